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
        if "packed" in program.name:
            continue
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


@pytest.mark.parametrize("make", [AllGather, ReduceScatter, AllReduce])
def test_trees_of_unequal_shares_have_one_stream_for_each_piece_and_the_reader_proves_them(
    make: Callable[..., Collective],
) -> None:
    program = next(loop_trees(make(8, in_place=True), Cluster.preset("ndv2"), most=60))
    assert "packed" in program.name
    form = loop_forms(program, 1e9, 60)[0]
    assert form.pull and form.longest and form.halves == (make is AllReduce)
    wide = widen(program, streams=60, halves=bool(form.halves), pull=True, longest=form.longest)
    assert len(wide.stream) == wide.streams <= 60, "every piece has a stream of its own"
    peers = [{cell[0] for cell in (*step.sources, *step.targets)} - {step.rank} for step in wide.steps]
    assert max(map(len, peers)) == 1, "no step waits for two links"
    text = mscclpp_wide.dumps(program, form=form, max_threadblocks=60)
    assert ('"get"' in text) == (make is not ReduceScatter)
    mscclpp_reader.check_plan(mscclpp_reader.loads(text), seeds=(0,))
