# SPDX-License-Identifier: Apache-2.0
"""The maker `timetable`: all-reduces whose pieces are put into the free time of direct links one by one."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import stretto as st
from stretto import _native
from stretto.cluster.model import Link, Node
from stretto.errors import Infeasible
from stretto.programs.interpret import check
from stretto.synthesis import timetable


def direct(count: int, seed: int, most: float = 25.0) -> st.Cluster:
    """A strongly connected digraph of devices with unequal links."""
    draw = random.Random(seed)
    circle = draw.sample(range(count), count)
    pairs = set(zip(circle, [*circle[1:], circle[0]], strict=True))
    while len(pairs) < 2 * count:
        a, b = draw.sample(range(count), 2)
        pairs.add((a, b))
    links = [
        Link(src=a, dst=b, gb_per_s=draw.choice((4.0, 10.0, most)), alpha_us=draw.choice((0.3, 2.0)))
        for a, b in sorted(pairs)
    ]
    return st.Cluster.build("drawn", nodes=[Node(name=f"d{k}", host=k) for k in range(count)], links=links)


@pytest.mark.parametrize("make", [st.AllReduce, st.AllGather, st.ReduceScatter])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("alpha", ["pipelined", "blocking"])
def test_programs_are_right_and_not_below_the_bound(
    make: Any, seed: int, alpha: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timetable, "FIRST_SENDS", 300)
    cluster = direct(3 + seed, seed)
    ranks = random.Random(seed).sample(range(cluster.num_devices), cluster.num_devices)
    task = make(ranks)
    program = timetable.synthesize(task, cluster, nbytes=1e5, budget_s=0.05, seed=seed, alpha=alpha)
    program.verify()
    check(program.lower(), fifo_depth=1 << 20, op="sum", seed=seed)
    took = st.simulate(program, cluster, nbytes=1e5, alpha=alpha).total_us
    assert took >= st.lower_bound(task, cluster, 1e5).total_us * (1 - 1e-9)


def slots_of(seed: int, until_us: float) -> tuple[st.Cluster, int, tuple[Any, ...]]:
    """A timetable of ten pieces on a drawn network, straight from the native code."""
    cluster = direct(5, seed)
    size = 1e4 / (cluster.link_gb_per_s * 1e3)
    alpha = cluster.link_alpha_us.astype(np.float64)
    found = _native.timetable(
        num_ranks=5, link_src=cluster.link_src, link_dst=cluster.link_dst, slot_us=size, tail_us=alpha,
        extra_us=0.0, pieces=10, until_us=until_us,
        full_us=0.1 * until_us, tries=8, ruin=0.3, most_insertions=500, seed=seed,
        home=np.zeros(0, np.int32),
    )  # fmt: skip
    return cluster, found[0], found[1:]


@pytest.mark.parametrize("seed", range(20))
def test_no_link_serves_two_pieces_at_once_and_nothing_leaves_before_it_is_there(seed: int) -> None:
    cluster, missing, (hop, piece, gathers, start) = slots_of(seed, 200.0)
    assert missing == 0 and len(hop) == 10 * 2 * 4
    took = 1e4 / (cluster.link_gb_per_s[hop] * 1e3)
    arrive = start + took + cluster.link_alpha_us[hop]
    assert arrive.max() <= 200 + 1e-6
    order = np.lexsort((start, hop))
    same = hop[order][1:] == hop[order][:-1]
    assert np.all(start[order][1:][same] >= (start + took)[order][:-1][same] - 1e-9)
    for k in range(10):
        mine = np.flatnonzero(piece == k)
        for send in mine:
            rank = cluster.link_src[hop[send]]
            into = mine[(cluster.link_dst[hop[mine]] == rank) & (gathers[mine] >= gathers[send])]
            assert np.all(arrive[into] <= start[send] + 1e-9)


def test_a_horizon_that_is_too_short_is_missed() -> None:
    assert slots_of(1, 5.0)[1] == 10


def test_a_line_is_near_its_bound_with_few_pieces() -> None:
    """Pairs of trees with one root stay 2 % above it, however many pieces they have."""
    links = [Link(src=a, dst=b, gb_per_s=30.0, alpha_us=0.8) for k in range(7) for a, b in ((k, k + 1), (k + 1, k))]
    line = st.Cluster.build("line8", nodes=[Node(name=f"d{k}", host=k) for k in range(8)], links=links)
    search = timetable._Search(st.AllReduce(8), line, 1e6, "pipelined", 0)
    search.open(until=float("inf"))
    for _ in range(12):
        search.attempt(search.aligned(700))
    program = search.finished(until=float("-inf"))
    program.verify()
    bound = st.lower_bound(st.AllReduce(8), line, 1e6).total_us
    assert st.simulate(program, line, nbytes=1e6).total_us < 1.03 * bound


def test_what_it_is_not_for_is_refused() -> None:
    with pytest.raises(Infeasible, match="not by switches"):
        timetable.synthesize(st.AllReduce(8), st.Cluster.load("dgx_a100"), nbytes=1e6)
    with pytest.raises(Infeasible, match="does not serve all_to_all"):
        timetable.synthesize(st.AllToAll(4), st.Cluster.load("ring:4"), nbytes=1e6)
    with pytest.raises(Infeasible, match="does not reach"):
        timetable.synthesize(st.AllReduce([0, 5]), st.Cluster.load("torus:4x4"), nbytes=1e6)
    with pytest.raises(Infeasible, match="nothing beside the bytes"):
        timetable.synthesize(st.AllReduce(4), st.Cluster.load("ring:4"), nbytes=1e9)
    with pytest.raises(Infeasible, match="differ too much"):
        timetable.synthesize(st.AllReduce(5), direct(5, 3, most=1e6), nbytes=1e4)
