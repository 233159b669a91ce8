# SPDX-License-Identifier: Apache-2.0
"""Trees in loops are exported as plans, and the reader proves them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from stretto import AllGather, AllReduce, Cluster, Collective, ReduceScatter
from stretto.errors import InvalidInput
from stretto.programs.formats import mscclpp_reader, mscclpp_wide
from stretto.programs.wide import widen
from stretto.synthesis.loop_trees import loop_trees
from stretto.synthesis.plan_search import loop_forms


@pytest.mark.parametrize("make", [AllGather, ReduceScatter, AllReduce])
@pytest.mark.parametrize("name", ["dgx_a100", "ndv2"])
def test_trees_are_exported_as_loops_and_the_reader_proves_them(name: str, make: Callable[..., Collective]) -> None:
    cluster = Cluster.preset(name)
    proved = 0
    for program in loop_trees(make(8, in_place=True), cluster, most=24):
        program.verify()
        chunks = program.collective.num_chunks
        assert widen(program, streams=chunks).streams <= chunks <= 48
        loops = [form for form in loop_forms(program, 1e9, 24) if form.loop_bytes]
        try:
            text = mscclpp_wide.dumps(program, form=loops[0], max_threadblocks=80)
        except InvalidInput as error:
            assert "cannot be shared by 1 slices in a loop" in str(error)
            continue
        assert '"pipeline"' in text
        mscclpp_reader.check_plan(mscclpp_reader.loads(text), seeds=(0,))
        proved += 1
        break
    assert proved
