# SPDX-License-Identifier: Apache-2.0
"""The bound against a judge that shares no code with it: every order, on links as a fluid model, by hand.

The clusters are hosts with one NIC each, so that a pair's load can be written down: a send of n bytes takes n / rate of
the NIC it leaves, outward, and of the NIC it enters, inward; an all-reduce of two ranks does so both ways.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations
from random import Random

import pytest

from stretto.cluster import Cluster, Link, Node
from stretto.planner.algebra.options import problem as make_problem
from stretto.planner.schedule.problem import PlanProblem
from stretto.planner.schedule.schedule import Scheduler
from stretto.planner.schedule.search import search
from stretto.workload import Dep, Op, Workload

PER_HOST = 2
DEVICE_GB_PER_S = 50.0
ITERATIONS, FROM, TO = 16, 4, 12
"""Iterations that the judge simulates, and those between which it takes the mean: later ones still keep links busy."""

Node_ = tuple[str, int]
"""An op's part at a rank ("c0@3") or a comm-op, and its iteration."""


def hosts(rates: tuple[float, ...]) -> Cluster:
    count = len(rates)
    nodes = [Node(name=f"d{k}", host=k // PER_HOST) for k in range(PER_HOST * count)]
    nodes += [Node(name=f"nic{h}", kind="nic", host=h) for h in range(count)] + [Node(name="fabric", kind="switch")]
    ends = [(k, PER_HOST * count + k // PER_HOST, DEVICE_GB_PER_S) for k in range(PER_HOST * count)]
    ends += [(PER_HOST * count + h, (PER_HOST + 1) * count, rate) for h, rate in enumerate(rates)]
    links = [
        Link(src=a, dst=b, alpha_us=0.5, gb_per_s=rate, channel="net")
        for x, y, rate in ends
        for a, b in ((x, y), (y, x))
    ]
    return Cluster.build("hosts", nodes=nodes, links=links)


CLUSTERS: dict[tuple[float, ...], Cluster] = {
    rates: hosts(rates) for rates in ((10.0, 10.0), (8.0, 16.0), (10.0, 10.0, 5.0))
}
SIZES = (1e6, 2e6, 5e6)


def pipeline(draw: Random, count: int) -> list[Op]:
    """Two or three stages, on hosts or strided over them, that send forward and perhaps backward."""
    stages = [tuple(range(PER_HOST * h, PER_HOST * h + PER_HOST)) for h in range(count)]
    if draw.random() < 0.5:
        stages = [tuple(range(k, PER_HOST * count, PER_HOST)) for k in range(PER_HOST)]
    size, back = draw.choice(SIZES), draw.random() < 0.6
    ops: list[Op] = []
    for at, ranks in enumerate(stages):
        needs = [Dep(op=f"s{at - 1}")] if at else ([Dep(op="r0", lag=1)] if back else [])
        ops.append(Op(name=f"c{at}", duration_us=draw.choice((50.0, 200.0)), ranks=ranks, after=tuple(needs)))
        if at + 1 < len(stages):
            groups = tuple(zip(ranks, stages[at + 1], strict=True))
            ops.append(Op(name=f"s{at}", kind="send", nbytes=size, groups=groups, after=(Dep(op=f"c{at}"),)))
    if back:
        groups = tuple(zip(stages[-1], stages[0], strict=True))
        ops.append(Op(name="r0", kind="send", nbytes=size, groups=groups, after=(Dep(op=f"c{len(stages) - 1}"),)))
    return ops


def strided_pairs(draw: Random, count: int) -> list[Op]:
    """Pairs of ranks across hosts: all-reduces, or sends one way or the other.

    No pair may be two iterations ahead of another: without that each would go on at a pace of its own.
    """
    ops: list[Op] = []
    for k in range(draw.choice((2, 2, 3)) if count > 2 else 2):
        a, b = (k % PER_HOST, PER_HOST * (1 + (k + draw.randrange(2)) % (count - 1)) + k % PER_HOST)
        if any({a, b} & set(op.groups[0]) for op in ops if op.is_comm):
            continue
        pair = draw.choice(((a, b), (b, a)))
        kind = draw.choice(("all_reduce", "send"))
        ops += [
            Op(name=f"c{k}", duration_us=draw.choice((20.0, 300.0)), ranks=(a, b), after=(Dep(op=f"g{k}", lag=1),)),
            Op(name=f"g{k}", kind=kind, nbytes=draw.choice(SIZES), groups=(pair,), after=(Dep(op=f"c{k}"),)),
        ]
    pace = tuple(Dep(op=op.name, lag=2) for op in ops if op.is_comm)
    return [op if op.is_comm else replace(op, after=(*op.after, *pace)) for op in ops]


def drawn(seed: int) -> tuple[PlanProblem, tuple[float, ...]]:
    """A small step with the default option of every comm-op."""
    draw = Random(seed)
    rates = draw.choice(list(CLUSTERS))
    made = draw.choice((pipeline, strided_pairs))(draw, len(rates))
    workload = Workload(name=f"case{seed}", num_ranks=PER_HOST * len(rates), ops=tuple(made))
    whole = make_problem(workload, CLUSTERS[rates])
    options = {name: some[:1] for name, some in whole.options.items()}
    return PlanProblem(workload=workload, options=options), rates


class Judge:
    """A step rank by rank, its comm-ops as fluid flows over NICs and device links."""

    def __init__(self, problem: PlanProblem, rates: tuple[float, ...]) -> None:
        self.workload = problem.workload
        self.us: dict[str, float] = {}
        self.load: dict[str, dict[tuple[str, int], float]] = {}
        self.needs: dict[str, list[tuple[str, int]]] = {}
        last: dict[int, str] = {}
        ranks_of = {op.name: sorted(self.workload.ranks_of(op)) for op in self.workload.ops}
        first: dict[int, str] = {}
        for op in self.workload.ops:
            where = ranks_of[op.name] if not op.is_comm else []
            for rank in where:
                node = f"{op.name}@{rank}"
                self.us[node], self.load[node] = op.duration_us, {}
                self.needs[node] = [(dep.op, dep.lag) for dep in op.after]
                if rank in last:
                    self.needs[node].append((last[rank], 0))
                first.setdefault(rank, node)
                last[rank] = node
            if op.is_comm:
                self.us[op.name] = problem.options[op.name][0].tasks[0].duration_us
                self.load[op.name] = self.loads(op, rates)
                self.needs[op.name] = [
                    (f"{dep.op}@{rank}", dep.lag) for dep in op.after for rank in ranks_of[op.name]
                    if rank in ranks_of[dep.op]
                ]  # fmt: skip
        for rank, node in first.items():
            self.needs[node].append((last[rank], 1))
        awaited = {dep.op for op in self.workload.ops for dep in op.after}
        for op in self.workload.comm_ops:
            if op.name not in awaited:
                for rank in ranks_of[op.name]:
                    if rank in first:
                        self.needs[first[rank]].append((op.name, 2))

    def loads(self, op: Op, rates: tuple[float, ...]) -> dict[tuple[str, int], float]:
        found: dict[tuple[str, int], float] = {}
        ways = [pair for pair in op.groups] + ([pair[::-1] for pair in op.groups] if op.kind != "send" else [])
        for a, b in ways:
            for link, rate in (
                (("device out", a), DEVICE_GB_PER_S), (("device in", b), DEVICE_GB_PER_S),
                (("nic out", a // PER_HOST), rates[a // PER_HOST]), (("nic in", b // PER_HOST), rates[b // PER_HOST]),
            ):  # fmt: skip
                if link[0].startswith("device") or a // PER_HOST != b // PER_HOST:
                    found[link] = found.get(link, 0.0) + op.nbytes / rate / 1e3
        return found

    def ends(self, op: Op) -> set[tuple[str, int]]:
        if op.kind == "send":
            return {("out", a) for a, _ in op.groups} | {("in", b) for _, b in op.groups}
        return {(way, rank) for rank in self.workload.ranks_of(op) for way in ("out", "in")}

    def period_us(self, order: tuple[str, ...]) -> float | None:
        """The mean iteration with this order at every end; None if it cannot be carried out."""
        waits: dict[Node_, set[Node_]] = {}
        for i in range(ITERATIONS):
            for node, needs in self.needs.items():
                waits[node, i] = {(before, i - lag) for before, lag in needs if i >= lag}
        held: dict[tuple[str, int], Node_] = {}
        for i in range(ITERATIONS):
            for name in order:
                for end in self.ends(self.workload.op(name)):
                    if end in held:
                        waits[name, i].add(held[end])
                    held[end] = (name, i)
        finish = self.run(waits)
        if finish is None:
            return None
        return (finish[TO] - finish[FROM]) / (TO - FROM)

    def run(self, waits: dict[Node_, set[Node_]]) -> list[float] | None:
        behind: dict[Node_, list[Node_]] = {node: [] for node in waits}
        left = {node: len(before) for node, before in waits.items()}
        for node, before in waits.items():
            for one in before:
                behind[one].append(node)
        running = {node: 1.0 for node, count in left.items() if not count}
        now, finish, ended = 0.0, [0.0] * ITERATIONS, 0
        while running:
            rates = self.rates(list(running))
            step = min(share / rates[node] if self.us[node[0]] > 0 else 0.0 for node, share in running.items())
            now += step
            done = []
            for node in running:
                running[node] -= step * rates[node]
                if running[node] <= 1e-9:
                    done.append(node)
            for node in done:
                del running[node]
                ended += 1
                finish[node[1]] = max(finish[node[1]], now)
                for other in behind[node]:
                    left[other] -= 1
                    if not left[other]:
                        running[other] = 1.0
        return finish if ended == len(waits) else None

    def rates(self, nodes: list[Node_]) -> dict[Node_, float]:
        """Shares of a node per microsecond: as fast as alone, unless a link is full; then all on it slow down alike."""
        rate = {node: 1.0 / max(self.us[node[0]], 1e-9) for node in nodes}
        while True:
            used: dict[tuple[str, int], float] = {}
            for node in nodes:
                for link, us in self.load[node[0]].items():
                    used[link] = used.get(link, 0.0) + us * rate[node]
            full = max(used, key=lambda link: used[link], default=None)
            if full is None or used[full] <= 1 + 1e-9:
                return rate
            for node in nodes:
                if full in self.load[node[0]]:
                    rate[node] /= used[full]


def judged(seed: int) -> tuple[float, float, float]:
    """The bound, the best that the judge finds over all orders, and what the search promises."""
    problem, rates = drawn(seed)
    judge = Judge(problem, rates)
    names = [op.name for op in problem.workload.comm_ops]
    found = [us for order in permutations(names) if (us := judge.period_us(order)) is not None]
    scheduler = Scheduler(problem)
    return scheduler.bound().us, min(found), search(scheduler, steps=300).schedule.period_us


@pytest.mark.parametrize("block", range(4))
def test_no_order_beats_the_bound_on_links(block: int) -> None:
    for seed in range(50 * block, 50 * block + 50):
        bound, best, promised = judged(seed)
        assert bound <= best * (1 + 1e-3), seed
        assert bound <= promised * (1 + 1e-9), seed


def cut_us(problem: PlanProblem, cluster: Cluster) -> float:
    """The longest time that any set of devices needs for what has to leave it, over the narrowest cut around it."""
    devices = range(cluster.num_devices)
    others = range(cluster.num_devices, cluster.num_nodes)
    links = list(zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), cluster.link_gb_per_s.tolist(), strict=True))
    longest = 0.0
    for size in range(1, cluster.num_devices):
        for inside in combinations(devices, size):
            nbytes = 0.0
            for op in problem.workload.comm_ops:
                for group in problem.workload.groups_of(op):
                    leaves = group[0] in inside if op.kind == "send" else not set(group).isdisjoint(inside)
                    nbytes += op.nbytes if leaves and not set(group).issubset(inside) else 0.0
            if not nbytes:
                continue
            # Every way to put NICs and the switch on either side is a cut.
            sides = (
                set(inside).union(some) for count in range(len(others) + 1) for some in combinations(others, count)
            )
            rate = min(sum(gb for a, b, gb in links if a in side and b not in side) for side in sides)
            longest = max(longest, nbytes / rate / 1e3)
    return longest


@pytest.mark.parametrize("seed", range(16))
def test_the_bound_is_not_below_any_cut(seed: int) -> None:
    step, rates = drawn(seed)
    problem = make_problem(step.workload, CLUSTERS[rates])
    assert Scheduler(problem).bound().us >= cut_us(problem, CLUSTERS[rates]) * (1 - 1e-9)
