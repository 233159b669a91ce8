# SPDX-License-Identifier: Apache-2.0
"""Exact scheduling beside an exhaustive search, the one-link bound beside the simulator, and classes by symmetry."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

import stretto as st
from stretto.synthesis.contiguity import MessageSchedule, neighbors
from stretto.synthesis.exact_schedule import exact_schedule, merged_by_symmetry, schedule_bound_us
from stretto.synthesis.logical import LogicalTopology, default_sketch
from stretto.synthesis.ordering import SendTasks, schedule
from stretto.synthesis.routing import route
from stretto.synthesis.routing_problem import RoutingProblem
from stretto.synthesis.routing_search import search
from stretto.synthesis.sketch import Sketch
from stretto.synthesis.three_stage import _Judge, solve

NBYTES = 24e3


def drawn_cluster(rng: np.random.Generator, count: int) -> st.Cluster:
    """Devices around a switch whose ports differ, with some direct links."""
    nodes = [st.Node(name=f"g{i}") for i in range(count)] + [st.Node(name="sw", kind="switch")]
    links = []
    for i in range(count):
        links += [drawn_link(rng, i, count), drawn_link(rng, count, i)]
    links += [drawn_link(rng, i, (i + 1) % count) for i in range(count) if rng.random() < 0.5]
    return st.Cluster.build("drawn", nodes=nodes, links=links)


def drawn_link(rng: np.random.Generator, src: int, dst: int) -> st.Link:
    rate = float(rng.choice([1.0, 2.0, 3.0]))
    return st.Link(src=src, dst=dst, alpha_us=float(rng.integers(0, 4)), gb_per_s=rate, channel="net")


def drawn_tasks(seed: int, ranks: int, chunks: int, alpha: str) -> SendTasks:
    rng = np.random.default_rng(seed)
    cluster = drawn_cluster(rng, ranks)
    kind = (st.AllGather, st.AllToAll, st.Scatter, st.Broadcast)[seed % 4]
    logical = LogicalTopology.of(Sketch(channels="all"), cluster, kind(ranks, chunks=chunks))
    problem = RoutingProblem.of(logical, nbytes=NBYTES, alpha=alpha)
    routing = search(problem, seed=seed)
    assert routing is not None
    return SendTasks.of(problem, routing)


def least_us(tasks: SendTasks, best: float) -> float:
    """The end of the best schedule, by trying every order in which sends can be placed as early as possible."""

    def place(placed: tuple[int, ...], ends: dict[int, float], free: dict[int, float], end: float) -> None:
        nonlocal best
        if end >= best - 1e-9:
            return
        if len(placed) == tasks.count:
            best = end
            return
        for t in range(tasks.count):
            before = tasks.before[t]
            if t in ends or (before >= 0 and before not in ends):
                continue
            begin = max([ends.get(before, 0.0), *(free.get(link, 0.0) for link, _ in tasks.busy[t])])
            taken = {link: begin + us for link, us in tasks.busy[t]}
            done = begin + tasks.us[t]
            place((*placed, t), ends | {t: done}, free | taken, max(end, done))

    place((), {}, {}, 0.0)
    return best


@pytest.mark.parametrize("alpha", ["pipelined", "blocking"])
def test_small_routings_are_scheduled_as_an_exhaustive_search_does(alpha: str) -> None:
    tried = 0
    for seed in range(40):
        tasks = drawn_tasks(seed, 3, 1, alpha)
        if not 3 <= tasks.count <= 7:
            continue
        tried += 1
        # The slowest order of a few to begin with.
        rng = np.random.default_rng(seed)
        known = max((schedule(tasks, rng.random(tasks.count)) for _ in range(8)), key=tasks.end_us)
        found = exact_schedule(tasks, known, limit_s=2.0)
        got = tasks.end_us(known if found.start_us is None else found.start_us)
        right = least_us(tasks, math.inf)
        assert found.bound_us <= right * (1 + 1e-9), seed
        assert right * (1 - 1e-9) <= got <= right * (1 + 1e-3), seed
        assert schedule_bound_us(tasks) <= schedule_bound_us(tasks, merged=1) <= right * (1 + 1e-9), seed
    assert tried >= 10


@pytest.mark.parametrize("alpha", ["pipelined", "blocking"])
def test_no_simulated_plan_is_below_the_bound(alpha: str) -> None:
    for seed in range(40):
        tasks = drawn_tasks(seed, 4, 1 + seed % 3, alpha)
        rng = np.random.default_rng(seed)
        judge = _Judge(tasks.problem, "drawn", NBYTES, alpha)
        for _ in range(6):
            plan = MessageSchedule.single(tasks, schedule(tasks, rng.random(tasks.count) * 10))
            pairs = neighbors(plan)
            joined = plan.joined({pair for pair in pairs[::2] if rng.random() < 0.5})
            for each in filter(None, (plan, joined)):
                assert judge.see(each) >= schedule_bound_us(tasks) * (1 - 1e-9), seed


@pytest.mark.parametrize("alpha", ["pipelined", "blocking"])
def test_sends_that_rotations_make_equal_are_planned_as_one(alpha: str) -> None:
    cluster = st.Cluster.load("dgx2:2")
    collective = st.AllGather(32)
    logical = LogicalTopology.of(default_sketch(cluster, collective), cluster, collective)
    problem = RoutingProblem.of(logical, nbytes=64e6, alpha=alpha)
    routing = route(problem, limit_s=3.0, solutions=1)[0]
    tasks = SendTasks.of(problem, routing)
    folded, group = merged_by_symmetry(tasks)
    known = schedule(tasks, -tasks.remaining_us)
    found = exact_schedule(tasks, known, limit_s=1.0)
    start = schedule(folded, -folded.remaining_us)[group] if found.start_us is None else found.start_us
    busy: dict[int, list[tuple[float, float]]] = {}
    for t, links in enumerate(tasks.busy):
        before = tasks.before[t]
        assert before < 0 or start[t] >= start[before] + tasks.us[before] - 1e-6
        for link, us in links:
            busy.setdefault(link, []).append((float(start[t]), us))
    for sends in busy.values():
        assert all(a + us <= b + 1e-6 for (a, us), (b, _) in pairwise(sorted(sends)))
    assert schedule_bound_us(tasks) <= tasks.end_us(start) * (1 + 1e-9)
    assert folded.count <= tasks.count


def test_a_result_carries_its_bound() -> None:
    cluster = st.Cluster.load("ndv2:1")
    found = solve(st.AllGather(8), cluster, nbytes=8e6, budget_s=2.0)
    assert 0 < found.schedule_bound_us <= found.time_us * (1 + 1e-9)
    assert found.schedule_gap == pytest.approx(found.time_us / found.schedule_bound_us - 1, abs=1e-9)
    assert found.time_us == st.simulate(found.program, cluster, nbytes=8e6).total_us
