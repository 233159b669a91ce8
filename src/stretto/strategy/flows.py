# SPDX-License-Identifier: Apache-2.0
"""Simulates a training step under a strategy: compute in its order, messages that share links.

In the planner's time model one motif holds its channels at all its places. That is right for collectives but not for
parameter servers, because different servers are reached at the same time. Here a message is a load on links: alone it
takes the time that the link-level simulator gives, and while others load the same links all of them slow down alike
(max-min fair). Equal collectives that run beside each other lose more than that, since the steps of each wait for one
another: the link-level simulator gives that loss once for each number of them. Messages on the same connections follow
one another: collectives of a lane in program order, pushes to a server and pulls from it in the order in which they
become ready.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..algorithms import algorithm
from ..cluster import Cluster
from ..errors import Infeasible
from ..planner.algebra.nodes import nodes_of
from ..planner.algebra.options import STOCK_ALGORITHMS
from ..planner.algebra.recipes import MotifRequest
from ..planner.costs.channels import bindings_for
from ..planner.costs.costs import GRID_RATIO, Motion, SimulatedCosts, launch_us
from ..planner.schedule.merge import Merge, transfers_of
from ..programs import Program
from ..simulator.network import routes_of, routes_vary
from ..workload import Workload

AS_LISTED = "as_listed"
"""The algorithm that is a ring through the ranks in the order of the group, whatever it costs."""
DIRECT = "direct"
FIRST_ITERATIONS = 3
MORE_ITERATIONS = 4
SETTLED = 1e-6
MAX_REMEMBERED = 1 << 16
CONTENTION = "fair"
"""Messages share links as in TCP. If they took turns, all senders would wait for the first server."""
SAME_SIZE = 0.05
"""Relative difference up to which the sizes of parts count as equal (an axis rarely divides)."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageFlow:
    """A message alone: its time, the bytes that it puts on each link, and the messages that it follows.

    `queue` names its connections; with `in_order` they serve messages in program order.
    """

    us: float
    load: Floats
    queue: Hashable
    in_order: bool
    motion: Motion
    algorithm: str
    nbytes: float
    launch_us: float


class FlowCosts:
    """The costs of single messages on a cluster, cached."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.costs = SimulatedCosts(cluster, providers=[_as_listed])
        self._loads: dict[tuple[Motion, str, float], Floats] = {}
        self._varying: dict[tuple[Motion, str], bool] = {}
        self._channels: dict[tuple[tuple[int, ...], ...], tuple[tuple[str, ...], float]] = {}
        self._flows: dict[tuple[object, ...], MessageFlow] = {}
        self._beside: dict[tuple[Motion, str, int, int], float] = {}

    def flow(
        self, kind: str, groups: tuple[tuple[int, ...], ...], nbytes: float, *, root: int, how: str, lane: int,
        more_us: float = 0.0,
    ) -> MessageFlow:  # fmt: skip
        """The flow of one exchange.

        Args:
            kind: kind of the collective.
            groups: its groups.
            nbytes: bytes as a `Collective` counts them.
            root: position of the root in each group.
            how: ``stock`` (the library's best algorithm), ``direct`` or ``as_listed``.
            lane: the lane whose collectives follow one another; -1 for exchanges with a server.
            more_us: microseconds that issuing takes longer than a library's launch.

        Returns:
            The flow.

        Raises:
            Infeasible: no algorithm can carry the exchange.
        """
        key = (kind, groups, nbytes, root, how, lane, more_us)
        if key not in self._flows:
            if len(self._flows) >= MAX_REMEMBERED:
                self._flows.clear()
            self._flows[key] = self._flow(*key)
        return self._flows[key]

    def _flow(
        self, kind: str, groups: tuple[tuple[int, ...], ...], nbytes: float, root: int, how: str, lane: int,
        more_us: float,
    ) -> MessageFlow:  # fmt: skip
        if groups not in self._channels:
            binding = bindings_for(self.cluster, groups)[0]
            self._channels[groups] = binding.channels, launch_us(binding)
        channels, launch = self._channels[groups]
        launch += more_us
        motion = Motion(kind=kind, groups=groups, channels=channels, root=root)
        names = STOCK_ALGORITHMS.get(kind, (DIRECT,)) if how == "stock" else (how,)
        known = self.costs.algorithms(motion, nbytes)
        best: tuple[float, str] | None = None
        for name in names:
            if name in known:
                us = self.costs.cost(motion, nbytes, name).us
                best = (us, name) if best is None else min(best, (us, name))
        if best is None:
            raise Infeasible(f"{kind} over {len(groups[0])} ranks: no algorithm of {', '.join(names)}")
        queue: Hashable = (kind, groups, root) if lane < 0 else (lane, groups)
        return MessageFlow(
            us=launch + best[0], load=self._load(motion, best[1], nbytes), queue=queue, in_order=lane >= 0,
            motion=motion, algorithm=best[1], nbytes=nbytes, launch_us=launch,
        )  # fmt: skip

    def beside_others(self, flow: MessageFlow, count: int) -> float:
        """The pace of each of `count` equal collectives that run at the same time, simulated link by link."""
        size = max(round(math.log(max(flow.nbytes, 1.0), GRID_RATIO)), 1)
        key = (flow.motion, flow.algorithm, size, count)
        if key not in self._beside:
            moves = transfers_of(flow.motion, float(GRID_RATIO**size), flow.algorithm, self.cluster, self.costs)
            assert moves is not None, "every algorithm of flows has a program"
            ends = []
            for copies in (1, count):
                merge = Merge(self.cluster, CONTENTION)
                start = merge.work([], flow.launch_us)
                last = [merge.move(moves, start) for _ in range(copies)]
                ends.append(float(merge.end_us()[last].max()))
            self._beside[key] = min(ends[0] / ends[1], 1.0)
        return self._beside[key]

    def _load(self, motion: Motion, name: str, nbytes: float) -> Floats:
        programs = [self.costs.program(motion, nbytes, name, at) for at in range(len(motion.groups))]
        if (motion, name) not in self._varying:
            self._varying[motion, name] = any(routes_vary(p, self.cluster, motion.channels) for p in programs)
        key = (motion, name, nbytes if self._varying[motion, name] else 0.0)
        if key not in self._loads:
            load = np.zeros(self.cluster.num_links)
            for program in programs:
                _, route, ptr, links = routes_of(program, self.cluster, motion.channels, nbytes=nbytes)
                per_route = np.bincount(route, program.transfer_bytes(1.0), minlength=len(ptr) - 1)
                load += np.bincount(links, np.repeat(per_route, np.diff(ptr)), minlength=len(load))
            self._loads[key] = load
        return self._loads[key] * nbytes


def _as_listed(ask: MotifRequest, cluster: Cluster, nbytes: float) -> dict[str, Callable[[], Program]]:
    if ask.kind not in ("all_reduce", "all_gather", "reduce_scatter"):
        return {}
    return {AS_LISTED: lambda: algorithm("ring", ask.kind, ask.group)}


@lru_cache(maxsize=16)
def flow_costs(cluster: Cluster) -> FlowCosts:
    """The costs of a cluster, one table per cluster and process."""
    return FlowCosts(cluster)


@dataclass(frozen=True, kw_only=True, eq=False)
class FlowResult:
    """The steady state: the time of an iteration, and the bytes that each link carried in it."""

    period_us: float
    settled: bool
    link_bytes: Floats
    comm_us: float
    """Microseconds of an iteration in which at least one message was under way."""


def run(workload: Workload, flows: Mapping[str, MessageFlow], cluster: Cluster) -> FlowResult:
    """Simulate iterations until two of them take the same time.

    Args:
        workload: the step.
        flows: the flow of each comm-op, by name.
        cluster: the cluster.

    Returns:
        The steady state, or the mean of the later iterations if there is none.
    """
    lag = max((dep.lag for op in workload.ops for dep in op.after), default=1)
    engine = _Engine(workload, flows, cluster)
    for iterations in (FIRST_ITERATIONS - 1 + lag, FIRST_ITERATIONS + MORE_ITERATIONS + 3 * lag):
        finish, comm_us = engine.finish(iterations)
        steps = np.diff(finish)
        settled = bool(abs(steps[-1] - steps[-2]) <= SETTLED * max(steps[-1], 1e-9))
        if settled:
            break
    period_us = float(steps[-1] if settled else steps[len(steps) // 2 :].mean())
    load = sum((flow.load for flow in flows.values()), np.zeros(cluster.num_links))
    return FlowResult(period_us=period_us, settled=settled, link_bytes=load, comm_us=comm_us / iterations)


class _Engine:
    def __init__(self, workload: Workload, flows: Mapping[str, MessageFlow], cluster: Cluster) -> None:
        nodes = nodes_of(workload)
        self._us = nodes.us
        self._waits = nodes.all_waits()
        self._behind: list[list[tuple[int, int]]] = [[] for _ in self._us]
        for node, waits in enumerate(self._waits):
            for before, lag in waits:
                self._behind[before].append((node, lag))
        self._capacity = cluster.link_gb_per_s * 1e3
        names = [op.name for op in workload.ops]
        self._flow = [flows.get(names[op]) for op in nodes.op]
        keys: dict[Hashable, int] = {}
        self._queue = [-1 if flow is None else keys.setdefault(flow.queue, len(keys)) for flow in self._flow]
        self._ordered = [False] * len(keys)
        self._turns: list[list[int]] = [[] for _ in keys]
        for node, flow in enumerate(self._flow):
            if flow is not None:
                self._ordered[self._queue[node]] = flow.in_order
                self._turns[self._queue[node]].append(node)
        used = np.flatnonzero(sum((f.load for f in self._flow if f is not None), np.zeros(len(self._capacity))))
        self._capacity = self._capacity[used]
        # Equal messages are one flow, and the shares of links depend only on which flows are active together.
        kinds = {id(flow): flow for flow in self._flow if flow is not None}
        number = {key: at for at, key in enumerate(kinds)}
        self._kind = [-1 if flow is None else number[id(flow)] for flow in self._flow]
        self._paces = _Paces(list(kinds.values()), used, self._capacity, flow_costs(cluster))

    def finish(self, iterations: int) -> tuple[Floats, float]:
        """The end of each iteration's compute, and the time in which messages were under way."""
        count = len(self._us)
        missing = [
            sum(lag <= iteration for _, lag in waits) for iteration in range(iterations) for waits in self._waits
        ]
        left = [deque(it * count + node for it in range(iterations) for node in turns) for turns in self._turns]
        ready_in: list[deque[int]] = [deque() for _ in self._turns]
        is_ready = bytearray(count * iterations)
        busy = [-1] * len(self._turns)
        running: list[tuple[float, int]] = []
        active = _Active(self._paces)
        finish = np.zeros(iterations)
        now = comm_us = 0.0
        done: list[int] = [-1]
        first = [at for at, needs in enumerate(missing) if not needs]
        while done:
            fresh = first if done == [-1] else []
            for number in done:
                if number < 0:
                    continue
                iteration, node = divmod(number, count)
                if self._flow[node] is None:
                    finish[iteration] = max(finish[iteration], now)
                for other, lag in self._behind[node]:
                    if iteration + lag < iterations:
                        at = (iteration + lag) * count + other
                        missing[at] -= 1
                        if not missing[at]:
                            fresh.append(at)
            touched = {self._queue[number % count] for number in done if number >= 0} - {-1}
            for number in touched:
                busy[number] = -1
            for at in fresh:
                queue = self._queue[at % count]
                if queue < 0:
                    heapq.heappush(running, (now + self._us[at % count], at))
                    continue
                is_ready[at] = 1
                ready_in[queue].append(at)
                touched.add(queue)
            for queue in sorted(touched):
                if busy[queue] >= 0 or not ready_in[queue]:
                    continue
                if self._ordered[queue]:
                    head = left[queue][0]
                    if not is_ready[head]:
                        continue
                    left[queue].popleft()
                    ready_in[queue].popleft()
                else:
                    head = ready_in[queue].popleft()
                busy[queue] = head
                flow = self._flow[head % count]
                assert flow is not None
                active.add(head, flow.us, self._kind[head % count])
            until = min(active.next_us(), running[0][0] - now if running else np.inf)
            if until == np.inf:
                break
            comm_us += until if active.numbers else 0.0
            now += until
            done = active.advance(until)
            while running and running[0][0] <= now * (1 + 1e-12):
                done.append(heapq.heappop(running)[1])
        return finish, comm_us


class _Paces:
    """The pace of each flow of a set that is active together, cached."""

    def __init__(self, flows: list[MessageFlow], used: NDArray[np.intp], capacity: Floats, costs: FlowCosts) -> None:
        self._share, self._capacity = np.array([flow.load[used] / flow.us for flow in flows]), capacity
        self._flows, self._costs = flows, costs
        self._known: dict[tuple[int, ...], Floats] = {}

    def __call__(self, kinds: tuple[int, ...]) -> Floats:
        if kinds not in self._known:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            self._known[kinds] = self._pace(kinds)
        return self._known[kinds]

    def _pace(self, kinds: tuple[int, ...]) -> Floats:
        pace = paces(self._share[list(kinds)], self._capacity)
        # Parts of one variable run in step. Messages of other sizes do not meet at the same places all the time.
        alike: dict[tuple[Motion, str, int], list[int]] = {}
        for at, kind in enumerate(kinds):
            if (flow := self._flows[kind]).in_order:
                size = round(math.log(max(flow.nbytes, 1.0)) / SAME_SIZE)
                alike.setdefault((flow.motion, flow.algorithm, size), []).append(at)
        for those in alike.values():
            if len(those) > 1:
                lost = self._costs.beside_others(self._flows[kinds[those[0]]], len(those))
                pace[those] = np.minimum(pace[those], lost)
        return pace


class _Active:
    """Messages under way: the rest of each, and its pace (1: as if it were alone)."""

    def __init__(self, pace_of: _Paces) -> None:
        self._pace_of = pace_of
        self._of: dict[int, tuple[int, float]] = {}
        """The message's number and remaining time of each kind of flow; a kind is active at most once."""
        self._changed = True
        self.numbers: list[int] = []
        self._kinds: tuple[int, ...] = ()
        self._left = np.zeros(0)
        self._pace = np.zeros(0)

    def add(self, number: int, us: float, kind: int) -> None:
        """Start a message."""
        if not self._changed:
            for other, left in zip(self._kinds, self._left.tolist(), strict=True):
                self._of[other] = self._of[other][0], left
        self._of[kind] = number, us
        self.numbers.append(number)
        self._changed = True

    def next_us(self) -> float:
        """The time until a message ends."""
        if not self._of:
            return float("inf")
        if self._changed:
            self._kinds = tuple(sorted(self._of))
            self._left = np.array([self._of[kind][1] for kind in self._kinds])
            self._pace = self._pace_of(self._kinds)
            self._changed = False
        return float((self._left / self._pace).min())

    def advance(self, us: float) -> list[int]:
        """Advance all messages by some microseconds; return the numbers of those that end."""
        if not self._of:
            return []
        self._left = self._left - self._pace * us
        over = self._left <= 1e-9 * us + 1e-9
        if not over.any():
            return []
        ended = []
        for kind, left, end in zip(self._kinds, self._left.tolist(), over.tolist(), strict=True):
            if end:
                ended.append(self._of.pop(kind)[0])
            else:
                self._of[kind] = self._of[kind][0], left
        self.numbers = [number for number, _ in self._of.values()]
        self._changed = True
        return ended


def paces(share: Floats, capacity: Floats) -> Floats:
    """Max-min fair paces of messages that alone would put `share` (rows: messages) on links of some capacity.

    >>> paces(np.array([[1.0, 0.0], [1.0, 0.5], [0.0, 0.5]]), np.array([1.0, 1.0])).tolist()
    [0.5, 0.5, 1.0]
    """
    pace = np.ones(len(share))
    load = share.sum(axis=0)
    if (load <= capacity).all():
        return pace
    free, room = np.ones(len(share), np.bool_), capacity.astype(np.float64)
    while free.any():
        load = share[free].sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            level = np.where(load > 0, np.maximum(room, 0.0) / load, np.inf)
        least = float(level.min(initial=np.inf))
        if least >= 1:
            break
        stop = free & (share[:, level <= least * (1 + 1e-12)] > 0).any(axis=1)
        pace[stop] = max(least, 1e-9)
        room = room - least * share[stop].sum(axis=0)
        free &= ~stop
    return pace
