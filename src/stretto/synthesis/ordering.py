# SPDX-License-Identifier: Apache-2.0
"""Stage 2: the times at which chunks take their hops, by list scheduling with the paper's rules and their reverses."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .routing_problem import Routing, RoutingProblem

Key = Callable[["SendTasks"], NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True, eq=False)
class SendTasks:
    """A routing as single sends: task t moves ``chunk[t]`` over ``hop[t]`` after task ``before[t]`` (-1: at once)."""

    problem: RoutingProblem
    routing: Routing
    chunk: list[int]
    hop: list[int]
    before: list[int]
    us: list[float]
    traveled_us: NDArray[np.float64]
    """The least time that the chunk has been on its way before this send."""
    remaining_us: NDArray[np.float64]
    """The least time from the start of this send to the arrival at the last target behind it."""
    busy: list[list[tuple[int, float]]]
    """The physical links that each send occupies, and for how long."""

    @classmethod
    def of(cls, problem: RoutingProblem, routing: Routing) -> SendTasks:
        """The sends of a routing, each after the one that brings its chunk."""
        src, dst = problem.logical.src_list, problem.logical.dst_list
        chunk: list[int] = []
        hop: list[int] = []
        before: list[int] = []
        for c, hops in enumerate(routing.hops):
            brought: dict[int, int] = {}
            for way in hops:
                before.append(brought.get(src[way], -1))
                brought[dst[way]] = len(hop)
                chunk.append(c)
                hop.append(way)
        sends = [problem.send(c, w) for c, w in zip(chunk, hop, strict=True)]
        us = [alone for alone, _ in sends]
        traveled, remaining = [0.0] * len(us), list(us)
        for t, b in enumerate(before):
            if b >= 0:
                traveled[t] = traveled[b] + us[b]
        for t in range(len(us) - 1, -1, -1):
            if before[t] >= 0:
                remaining[before[t]] = max(remaining[before[t]], us[before[t]] + remaining[t])
        busy = [links for _, links in sends]
        return cls(
            problem=problem,
            routing=routing,
            chunk=chunk,
            hop=hop,
            before=before,
            us=us,
            busy=busy,
            traveled_us=np.array(traveled),
            remaining_us=np.array(remaining),
        )

    def end_us(self, start: NDArray[np.float64]) -> float:
        """The time at which the last send of a plan arrives."""
        return float((start + np.array(self.us)).max(initial=0.0))

    @property
    def count(self) -> int:
        """The number of sends."""
        return len(self.hop)


def schedule(tasks: SendTasks, priority: NDArray[np.float64]) -> NDArray[np.float64]:
    """Start times by list scheduling: next is the send that can start first, and of several the lowest priority."""
    free = [0.0] * tasks.problem.logical.hops.cluster.num_links
    start = np.zeros(tasks.count)
    after: list[list[int]] = [[] for _ in range(tasks.count)]
    heap: list[tuple[float, float, int]] = []
    rank = priority.tolist()
    for t, b in enumerate(tasks.before):
        if b < 0:
            heap.append((0.0, rank[t], t))
        else:
            after[b].append(t)
    heapq.heapify(heap)
    ready = [0.0] * tasks.count
    while heap:
        when, key, t = heapq.heappop(heap)
        possible = ready[t]
        for link, _ in tasks.busy[t]:
            possible = max(possible, free[link])
        if possible > when + 1e-12:
            heapq.heappush(heap, (possible, key, t))
            continue
        start[t] = when
        for link, us in tasks.busy[t]:
            free[link] = when + us
        for follower in after[t]:
            ready[follower] = when + tasks.us[t]
            heapq.heappush(heap, (ready[follower], rank[follower], follower))
    return start


def backwards(tasks: SendTasks, priority: NDArray[np.float64]) -> NDArray[np.float64]:
    """Schedule from the end, every send as late as possible; the result is a priority for `schedule`, not a time."""
    free = [0.0] * tasks.problem.logical.hops.cluster.num_links
    waiting = [0] * tasks.count
    for b in tasks.before:
        if b >= 0:
            waiting[b] += 1
    ready = [0.0] * tasks.count
    rank = priority.tolist()
    heap = [(0.0, rank[t], t) for t in range(tasks.count) if waiting[t] == 0]
    heapq.heapify(heap)
    late = np.zeros(tasks.count)
    while heap:
        when, key, t = heapq.heappop(heap)
        possible = ready[t]
        for link, _ in tasks.busy[t]:
            possible = max(possible, free[link])
        if possible > when + 1e-12:
            heapq.heappush(heap, (possible, key, t))
            continue
        for link, us in tasks.busy[t]:
            free[link] = when + us
        late[t] = -(when + tasks.us[t])
        b = tasks.before[t]
        if b >= 0:
            waiting[b] -= 1
            ready[b] = max(ready[b], when + tasks.us[t])
            if waiting[b] == 0:
                heapq.heappush(heap, (ready[b], rank[b], b))
    return late


VARIANTS: dict[str, Key] = {
    "longest remaining first": lambda t: -t.remaining_us + 1e-3 * t.traveled_us,
    "shortest travelled first": lambda t: t.traveled_us - 1e-3 * t.remaining_us,
    "longest way first": lambda t: -(t.traveled_us + t.remaining_us),
    "backwards, shortest remaining first": lambda t: backwards(t, t.remaining_us),
    "backwards, longest travelled first": lambda t: backwards(t, -t.traveled_us),
}
"""The priority rules of the paper by name; those that schedule backwards suit switches."""


def justify(tasks: SendTasks, start: NDArray[np.float64], *, rounds: int = 6) -> NDArray[np.float64]:
    """Push all sends to the end in the order of the plan, then to the front again, for as long as that helps.

    Args:
        tasks: The sends.
        start: The start times of the plan.
        rounds: The most repetitions.

    Returns:
        The start times of the best plan.
    """
    best, end = start, tasks.end_us(start)
    for _ in range(rounds):
        start = schedule(tasks, backwards(tasks, -(start + np.array(tasks.us))))
        now = tasks.end_us(start)
        if now >= end * (1 - 1e-9):
            break
        best, end = start, now
    return best


def priorities(tasks: SendTasks, variant: str) -> NDArray[np.float64]:
    """A rule's priorities; where the sketch says so, relays send their own chunks to other hosts first."""
    found = VARIANTS[variant](tasks)
    logical = tasks.problem.logical
    if logical.sketch.own_first and tasks.count:
        spread = float(np.ptp(found)) + 1.0
        for t, (c, hop) in enumerate(zip(tasks.chunk, tasks.hop, strict=True)):
            if logical.crosses[hop] and int(logical.src[hop]) not in logical.sources[c]:
                found[t] += spread
    return found
