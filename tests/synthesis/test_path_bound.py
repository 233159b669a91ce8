# SPDX-License-Identifier: Apache-2.0
"""Bounds over the routes of GPU memory, judged by another linear program, by programs and by what links allow."""

from __future__ import annotations

import heapq
import random
from itertools import combinations

import numpy as np
import pytest

from stretto import AllGather, AllReduce, AllToAll, Broadcast, Cluster, ReduceScatter
from stretto.algorithms import algorithm
from stretto.cluster.wiring import Wiring, numbered
from stretto.errors import Infeasible
from stretto.programs.formats import mscclpp_wide
from stretto.programs.formats.mscclpp_reader import check_plan, loads
from stretto.simulator import lower_bound, simulate
from stretto.simulator.priced_wide import wide_time_us
from stretto.solvers.linear import LinearProgram
from stretto.synthesis import forest
from stretto.synthesis.forest_program import PACES
from stretto.synthesis.loop_packing import TreeLinks
from stretto.synthesis.loop_paths import loop_paths
from stretto.synthesis.loop_trees import loop_trees
from stretto.synthesis.path_bound import path_bound
from stretto.synthesis.plan_search import loop_forms

NDV2 = Cluster.preset("ndv2")


def drawn_box(seed: int, gpus: int = 0) -> Cluster:
    """Four to six GPUs (or so many) on two sockets, some pairs of which have one or two NVLinks."""
    draw = random.Random(seed)
    gpus = gpus or draw.randint(4, 6)
    wiring = Wiring(numbered("gpu", gpus), hosts=0)
    cpus = wiring.add(numbered("cpu", 2), kind="switch", hosts=0)
    for a in range(gpus):
        for b in range(a + 1, gpus):
            if draw.random() < 0.6:
                rate = draw.choice((20.0, 40.0))
                wiring.duplex(a, b, gb_per_s=rate, alpha_us=0.3, channel="nvlink")
    sockets = cpus[np.arange(gpus) * 2 // gpus]
    wiring.duplex(np.arange(gpus), sockets, gb_per_s=draw.uniform(8, 16), alpha_us=1.0, channel="pcie")
    wiring.duplex(cpus[0], cpus[1], gb_per_s=draw.uniform(8, 30), alpha_us=1.0, channel="pcie")
    return wiring.cluster(f"drawn{seed}")


class FlowProgram:
    """The same bounds as flows, written anew: what is sent of every root's data is at least each of its flows."""

    def __init__(self, cluster: Cluster, *, reverse: bool) -> None:
        self.n = cluster.num_devices
        self.paths = TreeLinks(cluster, tuple(range(self.n)), reverse=reverse)
        self.model = LinearProgram()
        self.sent: list[list[int]] = []
        self.time = self.model.column(cost=1.0)

    def tree(self, root: int, share: int | None) -> None:
        """Flows from a root to every other rank, of one byte or of what a column says."""
        pairs, model = self.paths.pairs, self.model
        sent = [model.column() for _ in pairs]
        for sink in range(self.n):
            if sink == root:
                continue
            flow = [model.column() for _ in pairs]
            for mine, all_sent in zip(flow, sent, strict=True):
                model.row([mine, all_sent], [1.0, -1.0], upper=0.0)
            for v in range(self.n):
                if v == root:
                    continue
                at = [f for f, pair in zip(flow, pairs, strict=True) if v in pair]
                sign = [1.0 if pair[1] == v else -1.0 for pair in pairs if v in pair]
                if v == sink and share is not None:
                    model.row([*at, share], [*sign, -1.0], lower=0.0, upper=0.0)
                else:
                    model.row(at, sign, lower=float(v == sink), upper=float(v == sink))
        self.sent.append(sent)

    def paths_from(self, root: int) -> None:
        """A flow from a root that leaves one byte with every other rank."""
        pairs, model = self.paths.pairs, self.model
        flow = [model.column() for _ in pairs]
        for v in (v for v in range(self.n) if v != root):
            at = [f for f, pair in zip(flow, pairs, strict=True) if v in pair]
            model.row(at, [1.0 if pair[1] == v else -1.0 for pair in pairs if v in pair], lower=1.0, upper=1.0)
        self.sent.append(flow)

    def us(self, nbytes: float) -> float:
        """The least time in which every link carries what is sent over it."""
        for link in range(self.paths.per_share.shape[1]):
            used = np.flatnonzero(self.paths.per_share[:, link]).tolist()
            index = [sent[pair] for sent in self.sent for pair in used]
            value = [float(self.paths.per_share[pair, link]) for _ in self.sent for pair in used]
            self.model.row([*index, self.time], [*value, -1.0], upper=0.0)
        return self.model.solve().objective * nbytes / 1e3


def flow_us(kind: str, cluster: Cluster) -> float:
    """The bound by flows, for 1 GB."""
    n = cluster.num_devices
    program = FlowProgram(cluster, reverse=kind in ("reduce_scatter", "all_reduce"))
    if kind == "all_to_all":
        for root in range(n):
            program.paths_from(root)
        return program.us(1e9 / n)
    if kind != "all_reduce":
        for root in range(n):
            program.tree(root, None)
        return program.us(1e9 / n)
    model = program.model
    first = [model.column() for _ in range(n)]
    model.row(first, [1.0] * n, lower=1.0, upper=1.0)
    for root in range(n):
        program.tree(root, first[root])
    last = [model.column() for _ in program.paths.pairs]
    for v in range(n):
        into = [column for column, pair in zip(last, program.paths.pairs, strict=True) if pair[0] == v]
        model.row([*into, first[v]], [1.0] * (len(into) + 1), lower=1.0, upper=1.0)
    program.sent.append(last)
    return program.us(1e9)


MAKES = {"all_gather": AllGather, "reduce_scatter": ReduceScatter, "all_reduce": AllReduce, "all_to_all": AllToAll}


@pytest.mark.parametrize("kind", list(MAKES))
@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_that_of_flows_and_no_program_beats_it(seed: int, kind: str) -> None:
    cluster = drawn_box(seed)
    n = cluster.num_devices
    bound = path_bound(MAKES[kind](n), cluster, 1e9)
    assert bound.total_us == pytest.approx(flow_us(kind, cluster), rel=1e-6)
    assert bound.total_us >= lower_bound(MAKES[kind](n), cluster, 1e9).bandwidth_us * (1 - 1e-9) or kind == "all_reduce"
    for name in ("direct", "pairwise" if kind == "all_to_all" else "ring"):
        ran = simulate(algorithm(name, kind, n), cluster, nbytes=1e9)
        assert ran.total_us >= bound.total_us * (1 - 1e-9)
        assert bound.weights @ ran.link_bytes[bound.links] >= bound.demand_bytes * (1 - 1e-9)


def sums_of(held: frozenset[int]) -> frozenset[int]:
    """All partial sums (sets of ranks, as bits) that a rank can make of those it holds."""
    made, grown = set(held), True
    while grown:
        more = {a | b for a, b in combinations(made, 2) if not a & b} - made
        grown = bool(more)
        made |= more
    return frozenset(made)


def cheapest_all_reduce(cost: dict[tuple[int, int], float], n: int) -> float:
    """The least that any program pays for one byte: a search over what every rank can make."""
    every = (1 << n) - 1
    start = tuple(frozenset([1 << rank]) for rank in range(n))
    paid, number, queue = {start: 0.0}, 0, [(0.0, 0, start)]
    while queue:
        so_far, _, state = heapq.heappop(queue)
        if all(every in held for held in state):
            return so_far
        for (a, b), price in cost.items():
            for part in state[a] - state[b]:
                after = (*state[:b], sums_of(state[b] | {part}), *state[b + 1 :])
                if so_far + price < paid.get(after, np.inf) - 1e-15:
                    paid[after] = so_far + price
                    number += 1
                    heapq.heappush(queue, (so_far + price, number, after))
    raise AssertionError("no program")


@pytest.mark.parametrize("seed", range(10))
def test_no_all_reduce_of_three_ranks_pays_less_than_the_bound_says(seed: int) -> None:
    """At the bound's own prices of links, of all programs that there are."""
    cluster = drawn_box(seed, gpus=3)
    bound = path_bound(AllReduce(3), cluster, 1.0)
    price = dict(zip(bound.links.tolist(), bound.weights.tolist(), strict=True))
    paths = TreeLinks(cluster, (0, 1, 2), reverse=False)
    cost = {
        pair: sum(price.get(link, 0.0) for link in route) for pair, route in zip(paths.pairs, paths.routes, strict=True)
    }
    assert cheapest_all_reduce(cost, 3) >= bound.demand_bytes * (1 - 1e-9)


@pytest.mark.parametrize(
    ("kind", "socket_gb_per_s"), [("all_gather", 7.0), ("reduce_scatter", 7.0), ("all_reduce", 14.0)]
)
def test_ndv2_is_out_of_reach_of_plans(kind: str, socket_gb_per_s: float) -> None:
    """By hand: four GPUs take in 4 x 130.4 GB/s of NVLink, and all that comes over PCIe crosses the sockets' 20 GB/s.

    A program for free links is more than 5 % faster than that, so that no plan comes within 5 % of the links.
    """
    wanted = MAKES[kind](8, in_place=True)
    paths_us = path_bound(wanted, NDV2, 1e9).total_us
    assert paths_us == pytest.approx(socket_gb_per_s * 1e9 / (2 * (4 * 6e3 / 46 + 20)) / 1e3, rel=1e-9)
    assert paths_us == pytest.approx(flow_us(kind, NDV2), rel=1e-6)
    if kind == "all_gather":
        free = forest._build(wanted, forest.forests_of(wanted, NDV2, max_k=24), 512, PACES[0])
        free.verify()
        assert paths_us > 1.05 * simulate(free, NDV2, nbytes=1e9).total_us


def test_what_has_no_such_bound_is_refused() -> None:
    with pytest.raises(Infeasible, match="not broadcast"):
        path_bound(Broadcast(8), NDV2, 1e9)


def test_an_all_to_all_on_ndv2_is_near_what_its_paths_allow() -> None:
    bound = path_bound(AllToAll(8), NDV2, 1e9)
    assert bound.total_us == pytest.approx(flow_us("all_to_all", NDV2), rel=1e-6)
    made = list(loop_trees(AllToAll(8), NDV2, most=80))
    assert len(made) == 3
    for program in made:
        load = simulate(program, NDV2, nbytes=1e9).link_bytes / NDV2.link_gb_per_s / 1e3
        assert bound.total_us * (1 - 1e-9) <= load.max() <= 1.02 * bound.total_us
    form = max(loop_forms(made[0], 1e9, 80), key=lambda form: form.loop_bytes)
    assert wide_time_us(made[0], NDV2, nbytes=1e9, form=form, runtime="mscclpp:h200") < 1.05 * bound.total_us


def test_paths_of_drawn_boxes_are_programs_whose_plans_are_right() -> None:
    for seed in range(4):
        cluster = drawn_box(seed)
        program = loop_paths(AllToAll(cluster.num_devices), cluster, shares=6, detour=1e-5)
        program.verify()
        for form in loop_forms(program, 1e8, 80):
            check_plan(loads(mscclpp_wide.dumps(program, form=form)), seeds=[seed])
