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
from stretto.synthesis.timetable import NOWHERE


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


def soft_of(
    seed: int, until_us: float, home: list[int], places: dict[str, Any] = NOWHERE
) -> tuple[st.Cluster, bool, tuple[Any, ...]]:
    """A timetable of thirty pieces whose links may be overfull, straight from the native code."""
    cluster = direct(5, seed)
    size = 1e4 / (cluster.link_gb_per_s * 1e3)
    alpha = cluster.link_alpha_us.astype(np.float64)
    found = _native.soft_timetable(
        num_ranks=5, link_src=cluster.link_src, link_dst=cluster.link_dst, slot_us=size, tail_us=alpha,
        extra_us=0.1, pieces=30, until_us=until_us, full_us=0.2 * until_us, spans=6, passes=6, tries=6, seed=seed,
        home=np.array(home, np.int32), **places,
    )  # fmt: skip
    return cluster, found[0], found[1:]


@pytest.mark.parametrize("gathers_only", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_pieces_of_a_soft_timetable_leave_after_they_are_there(seed: int, gathers_only: bool) -> None:
    home = [k % 5 for k in range(30)] if gathers_only else []
    cluster, fits, (hop, piece, gathers, start, root) = soft_of(seed, 200.0, home)
    if not home:
        # The same again, from where the pieces are.
        meet = np.full(30, 100.0)
        places = dict(zip(NOWHERE, (root, meet, hop, piece, gathers, start), strict=True))
        cluster, fits, (hop, piece, gathers, start, root) = soft_of(seed, 200.0, home, places)
    assert fits and len(hop) == 30 * (1 if home else 2) * 4
    arrive = start + 1e4 / (cluster.link_gb_per_s[hop] * 1e3) + cluster.link_alpha_us[hop]
    assert start.min() >= 0 and arrive.max() <= 200 + 1e-6
    for k in range(30):
        mine = np.flatnonzero(piece == k)
        assert np.bincount(cluster.link_dst[hop[mine]][gathers[mine] == 0], minlength=5).max() == 1
        if home:
            assert home[k] not in cluster.link_dst[hop[mine]] and not gathers[mine].any()
        for send in mine:
            rank = cluster.link_src[hop[send]]
            into = mine[(cluster.link_dst[hop[mine]] == rank) & (gathers[mine] >= gathers[send])]
            assert np.all(arrive[into] + 0.1 * gathers[into] <= start[send] + 1e-9)


def test_a_soft_timetable_that_is_too_short_fits_nowhere() -> None:
    assert not soft_of(1, 5.0, [])[1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("first_root", [7] * 30),
        ("first_root", [0] * 29),
        ("first_link", [99]),
        ("first_piece", [30]),
        ("first_meet", []),
    ],
)
def test_places_that_do_not_exist_are_refused(name: str, value: list[int]) -> None:
    places = {
        "first_root": [0] * 30, "first_meet": [50.0] * 30, "first_link": [0], "first_piece": [0],
        "first_gathers": [1], "first_start": [10.0],
    }  # fmt: skip
    arrays = {key: np.array(value if key == name else of, NOWHERE[key].dtype) for key, of in places.items()}
    with pytest.raises((ValueError, IndexError), match="soft_timetable"):
        soft_of(1, 200.0, [], arrays)


def test_links_may_differ_in_rate_by_more_than_slots_allow() -> None:
    cluster = direct(5, 3, most=1e6)
    program = timetable.synthesize(st.AllReduce(5), cluster, nbytes=1e4, budget_s=0.3)
    bound = st.lower_bound(st.AllReduce(5), cluster, 1e4).total_us
    assert st.simulate(program, cluster, nbytes=1e4).total_us < 1.5 * bound


def test_a_link_that_the_bytes_need_late_is_not_filled_early() -> None:
    """`digraph8` of seed 20261118: all links into one device must be busy with sums from soon after the beginning."""
    ends = """0 1 50 1.88, 0 2 40 3.92, 0 5 5 3.76, 1 4 30 1.6, 1 5 15 2.52, 1 6 40 .99, 2 0 7 .61, 2 1 50 3.16,
        2 3 15 2.49, 2 6 25 .43, 3 0 15 .74, 3 2 8 4.38, 3 7 12 .5, 4 2 5 2.52, 4 5 40 2.85, 4 7 15 3.77, 5 0 50 1.22,
        5 4 20 1.1, 6 3 25 .5, 6 5 20 .56, 6 7 7 .98, 7 1 20 2.76, 7 3 12 4.95, 7 5 15 1.72"""
    rows = [[float(word) for word in row.split()] for row in ends.split(",")]
    links = [Link(src=int(a), dst=int(b), gb_per_s=rate, alpha_us=alpha) for a, b, rate, alpha in rows]
    cluster = st.Cluster.build("d8", nodes=[Node(name=f"d{k}", host=k) for k in range(8)], links=links)
    search = timetable._Search(st.AllReduce(8), cluster, 1e6, "pipelined", 0)
    search.open(until=float("inf"))
    for _ in range(8):
        search.settle(search.aligned(1100))
    assert search.best is not None
    assert search.best.plan.total_us < 1.11 * st.lower_bound(st.AllReduce(8), cluster, 1e6).total_us


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
