# SPDX-License-Identifier: Apache-2.0
"""Trees that load links alike, and plans that add everything up before they copy it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stretto import AllGather, AllReduce, Cluster, ReduceScatter
from stretto.algorithms import algorithm
from stretto.errors import InvalidInput
from stretto.programs.formats import mscclpp_reader, mscclpp_wide
from stretto.programs.formats.mscclpp_wide import PlanForm, widen_in
from stretto.simulator import Runtime
from stretto.simulator.priced_wide import wide_time_us
from stretto.synthesis.forest_trees import Forest
from stretto.synthesis.loop_packing import TreeLinks, packed_forests
from stretto.synthesis.loop_trees import loop_trees
from stretto.synthesis.path_bound import path_bound

NDV2 = Cluster.preset("ndv2")
DEVICES = tuple(range(8))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("height", [2, 3])
def test_packed_trees_span_all_ranks_and_say_their_load(reverse: bool, height: int) -> None:
    (found,), full = packed_forests(NDV2, DEVICES, 72, ways=(reverse,), height=height)
    for b in range(len(found.root)):
        reached = {int(found.root[b])}
        for e in range(int(found.ptr[b]), int(found.ptr[b + 1])):
            assert int(found.src[e]) in reached, "parents come first"
            reached.add(int(found.dst[e]))
        assert reached == set(DEVICES) and found.ptr[b + 1] - found.ptr[b] == 7
    assert found.height <= height
    assert [int(found.amount[found.root == root].sum()) for root in DEVICES] == [72] * 8
    assert fullest(found) == pytest.approx(full)
    bound = path_bound((ReduceScatter if reverse else AllGather)(8), NDV2, 8e3).total_us
    assert bound * (1 - 1e-9) <= full <= 1.02 * bound


def test_trees_used_both_ways_load_links_both_ways() -> None:
    forests, full = packed_forests(NDV2, DEVICES, 48, ways=(True, False), height=2, room=0.9)
    assert [one.reverse for one in forests] == [True, False]
    assert sum(fullest(one) for one in forests) == pytest.approx(full)
    assert all(np.array_equal(getattr(forests[0], key), getattr(forests[1], key)) for key in ("root", "src", "dst"))


def fullest(found: Forest) -> float:
    """The nanoseconds that the fullest link takes for one byte of every root, by the routes that memory takes."""
    loads = TreeLinks(NDV2, DEVICES, reverse=found.reverse)
    total = np.zeros(loads.per_share.shape[1])
    for b in range(len(found.root)):
        for e in range(int(found.ptr[b]), int(found.ptr[b + 1])):
            pair = loads.pairs.index((int(found.src[e]), int(found.dst[e])))
            total += loads.per_share[pair] * int(found.amount[b]) / found.k
    return float(total.max())


def test_a_plan_that_adds_up_before_it_copies_is_right_and_faster() -> None:
    program = next(p for p in loop_trees(AllReduce(8, in_place=True), NDV2, most=15) if "packed" not in p.name)
    runtime = Runtime.load("mscclpp:h200")
    share = int(float(program.collective.chunk_share[0]) * 1e9 / 16) // 16 * 16
    mixed = PlanForm(streams=32, loop_bytes=share)
    took = {}
    for form in (mixed, replace(mixed, halves=1)):
        took[form.halves] = wide_time_us(program, NDV2, nbytes=1e9, form=form, runtime=runtime)
    assert took[1] < 0.95 * took[0]
    text = mscclpp_wide.dumps(program, form=form)
    assert "right and free of races" in str(mscclpp_reader.check_plan(mscclpp_reader.loads(text)))


def test_halves_hold_sums_and_copies() -> None:
    program = algorithm("direct", "all_reduce", 4, in_place=True)
    wide = widen_in(program, PlanForm(loop_bytes=1024, halves=1))
    sums, copies = wide.phases(0)
    assert all(len(step.sources) > 1 and len(step.targets) == 1 for step in sums)
    assert all(len(step.sources) == 1 for step in copies)
    with pytest.raises(InvalidInput, match="halves: is for loops"):
        PlanForm(halves=1)
