# SPDX-License-Identifier: Apache-2.0
"""Exact scheduling of a routing: start times of all sends by CP-SAT, and a bound that no schedule of it can beat.

The sends of a plan for two DGX-2 are 2,000, too many for a model of their order. But a sketch that names rotations has
routings that the rotations map onto themselves: sends that are images of one another then start together, and 124
classes of sends on seven classes of links are left. The bound is not restricted to such schedules: it looks at one
link at a time, which all sends that cross it have to share (Jackson's preemptive schedule with heads and tails, as in
job-shop scheduling), and it also holds where up to `MAX_MERGED` neighbours travel as one message.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..solvers import cp_sat
from .contiguity import MAX_MERGED
from .ordering import VARIANTS, SendTasks, justify, priorities, schedule

MAX_CLASSES = 2500
"""The most classes of sends that are worth a model."""
FEW_CLASSES = 60
"""Up to so many classes one worker of the solver is used, whose answer does not depend on the machine's load."""
WORKERS = 4
CLOSE = 1 + 1e-4
"""The ratio to the bound at which a schedule is good enough."""
MAX_TURNS = 1 << 20
STEPS = 1 << 20
"""Times are counted in this many steps of the known plan where no longer unit of time fits."""
MAX_PARTS = 400
"""The most units that the commonest send may last."""
LATER = 1e-3
"""The share of a plan's time that rounding to units may add to a chain of sends, or to a link that is never idle."""

Job = tuple[float, float, float]
"""A send on one link: when it can begin there, how long it takes, and what follows before its chunk's last arrival."""


def schedule_bound_us(tasks: SendTasks, *, merged: int = MAX_MERGED) -> float:
    """A time that no schedule can beat where links serve one message at a time, and messages have few chunks.

    Args:
        tasks: The sends, merged or not.
        merged: The most sends that travel as one message.

    Returns:
        The bound in microseconds.
    """
    cluster = tasks.problem.logical.hops.cluster
    alpha = cluster.link_alpha_us
    blocks = float(tasks.problem.blocking)
    jobs: dict[int, list[Job]] = {}
    for t, links in enumerate(tasks.busy):
        behind = float(tasks.remaining_us[t]) - tasks.us[t]
        latency = [float(alpha[link]) for link, _ in links]
        pushing = [busy - blocks * own for (_, busy), own in zip(links, latency, strict=True)]
        head = float(tasks.traveled_us[t])
        for at, (link, busy) in enumerate(links):
            # A slower link further on holds the last byte back; one before may have been passed long ago.
            tail = sum(latency[at:]) + max(pushing[at:]) - busy + behind
            jobs.setdefault(link, []).append((head, pushing[at] + blocks * latency[at] / merged, tail))
            head += latency[at]
    longest = float((tasks.traveled_us + tasks.remaining_us).max(initial=0.0))
    return max([longest, *(_one_link_us(sends) for sends in jobs.values())])


def _one_link_us(jobs: Sequence[Job]) -> float:
    """The least time to serve sends on one link, if it could interrupt them: the longest tail goes first."""
    waiting = sorted(jobs, reverse=True)
    ready: list[tuple[float, float]] = []
    now = last = 0.0
    while ready or waiting:
        if not ready:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            _, took, tail = waiting.pop()
            heapq.heappush(ready, (-tail, took))
        minus_tail, left = heapq.heappop(ready)
        until = waiting[-1][0] if waiting else math.inf
        if now + left > until:
            heapq.heappush(ready, (minus_tail, left - (until - now)))
            now = until
        else:
            now += left
            last = max(last, now - minus_tail)
    return last


def merged_by_symmetry(tasks: SendTasks) -> tuple[SendTasks, list[int]]:
    """One send for all that the sketch's rotations map onto one another and that may therefore start together.

    Args:
        tasks: The sends of a routing.

    Returns:
        The first send of each class, with one link in place of all that serve the same classes; and the class of every
        send. The given sends, each a class of its own, where the routing is not symmetric.
    """
    single = tasks, list(range(tasks.count))
    problem = tasks.problem
    if not problem.logical.sketch.symmetry_offsets:
        return single
    pair = {key: p for p, key in enumerate(zip(problem.chunk.tolist(), problem.hop.tolist(), strict=True))}
    orbit = [int(problem.orbit[pair[key]]) for key in zip(tasks.chunk, tasks.hop, strict=True)]
    number = {k: at for at, k in enumerate(dict.fromkeys(orbit))}
    group = [number[k] for k in orbit]
    served: dict[int, list[tuple[int, float]]] = {}
    for t, links in enumerate(tasks.busy):
        for link, us in links:
            served.setdefault(link, []).append((group[t], us))
    if any(len({k for k, _ in those}) < len(those) for those in served.values()):
        return single  # Sends of one class would meet on a link, where they cannot start together.
    alike: dict[tuple[tuple[int, float], ...], int] = {}
    stand_in = {link: alike.setdefault(tuple(sorted(those)), link) for link, those in served.items()}
    first: dict[int, int] = {}
    for t in range(tasks.count):
        one = first.setdefault(group[t], t)
        if _seen(tasks, one, group, stand_in) != _seen(tasks, t, group, stand_in):
            return single
    kept = list(first.values())
    folded = replace(
        tasks,
        chunk=[tasks.chunk[t] for t in kept],
        hop=[tasks.hop[t] for t in kept],
        before=[group[tasks.before[t]] if tasks.before[t] >= 0 else -1 for t in kept],
        us=[tasks.us[t] for t in kept],
        # Two links of a way that serve the same sends for equally long are one.
        busy=[list({stand_in[link]: us for link, us in tasks.busy[t]}.items()) for t in kept],
        traveled_us=tasks.traveled_us[kept],
        remaining_us=tasks.remaining_us[kept],
    )
    return folded, group


def _seen(tasks: SendTasks, t: int, group: list[int], stand_in: dict[int, int]) -> tuple[object, ...]:
    """What sends of one class have in common: the class before them, and the classes of links that serve them."""
    before = tasks.before[t]
    return group[before] if before >= 0 else -1, tuple((stand_in[link], us) for link, us in tasks.busy[t])


@dataclass(frozen=True, kw_only=True, eq=False)
class ExactSchedule:
    """The schedule that was found from a given one, and what was proved."""

    start_us: NDArray[np.float64] | None
    """Start times in microseconds; None for too many classes, or where nothing faster than the given ones was found."""
    bound_us: float
    """No schedule of single sends is faster in which sends that rotations map onto one another start together."""


def exact_schedule(tasks: SendTasks, start_us: NDArray[np.float64], *, limit_s: float, seed: int = 0) -> ExactSchedule:
    """The fastest schedule of single sends that a walk over orders and then CP-SAT find from a given one.

    Args:
        tasks: The sends.
        start_us: A schedule of them.
        limit_s: The seconds to search, > 0.
        seed: The seed of the searches.

    Returns:
        Start times, where they are better than the given ones, and a bound.
    """
    folded, group = merged_by_symmetry(tasks)
    known_us = tasks.end_us(start_us)
    bound_us = schedule_bound_us(tasks, merged=1)
    if not 1 < folded.count <= MAX_CLASSES or known_us <= 0:
        return ExactSchedule(start_us=None, bound_us=bound_us)
    first = [group.index(k) for k in range(folded.count)]
    end = time.monotonic() + limit_s
    # By symmetry a plan of all sends need not be one of the classes: its order is, and is planned again.
    start = min(
        (schedule(folded, start_us[first]), *(schedule(folded, priorities(folded, rule)) for rule in VARIANTS)),
        key=folded.end_us,
    )
    start = _walked(folded, start, until=end - limit_s / 2, seed=seed, bound_us=bound_us)
    left_s = end - time.monotonic()
    if cp_sat.available() and left_s > 0 and folded.end_us(start) > bound_us * CLOSE:
        start, bound_us = _solved(folded, start, limit_s=left_s, seed=seed, bound_us=bound_us)
    found: NDArray[np.float64] = start[group]
    faster = folded.end_us(start) < known_us * (1 - 1e-9)
    return ExactSchedule(start_us=found if faster else None, bound_us=bound_us)


def _walked(
    tasks: SendTasks, start: NDArray[np.float64], *, until: float, seed: int, bound_us: float
) -> NDArray[np.float64]:
    """The best plan of a walk in which few sends at a time change their place in the order."""
    rng = np.random.default_rng(seed)
    key = now = best = start
    scale, took = float(np.mean(tasks.us)), np.array(tasks.us)

    def late(plan: NDArray[np.float64]) -> tuple[float, float]:
        """The end of a plan; of equal ends the one with fewer sends near it."""
        over = np.maximum(plan + took - bound_us, 0.0)
        return float(over.max()), float((over**2).sum())

    reached = late(now)
    for turn in range(MAX_TURNS):
        if time.monotonic() > until or tasks.end_us(best) <= bound_us * CLOSE:
            break
        moved = key.copy()
        some = rng.integers(tasks.count, size=int(rng.integers(1, 4)))
        moved[some] += rng.normal(size=len(some)) * scale * (1 + turn % 4)
        plan = schedule(tasks, moved) if turn % 2 else justify(tasks, schedule(tasks, moved), rounds=1)
        if late(plan) <= reached:
            # Half of the time the walk goes on from the times themselves, which are a simpler order to disturb.
            key, now, reached = (moved if turn % 2 else plan), plan, late(plan)
            best = min(best, now, key=tasks.end_us)
    return best


def _solved(
    tasks: SendTasks, start: NDArray[np.float64], *, limit_s: float, seed: int, bound_us: float
) -> tuple[NDArray[np.float64], float]:
    """The schedule that CP-SAT finds from a known one, and the larger of its bound and the given one."""
    unit = _unit_us(tasks, tasks.end_us(start))
    long, late_us = _rounded(tasks, unit)
    hint = schedule(long, start)
    count = tasks.count
    most = round(max(long.end_us(hint), tasks.end_us(start) + late_us) / unit) + 1
    rows: list[tuple[int, None, list[int], list[int]]] = []
    served: dict[int, list[tuple[int, int]]] = {}
    for t, b in enumerate(long.before):
        rows.append((round(long.us[t] / unit), None, [count, t], [1, -1]))
        if b >= 0:
            rows.append((round(long.us[b] / unit), None, [t, b], [1, -1]))
        for link, us in long.busy[t]:
            served.setdefault(link, []).append((t, round(us / unit)))
    _, values, proved = cp_sat.minimize(
        {
            "lower": [0] * count + [math.floor(bound_us / unit)],
            "upper": [most] * (count + 1),
            "cost": [0] * count + [1],
            "rows": rows,
            "disjoint": [sends for sends in served.values() if len(sends) > 1],
            "hint": [round(us / unit) for us in (*hint.tolist(), long.end_us(hint))],
            "gap": CLOSE - 1,
            "seed": seed,
            "workers": 1 if count <= FEW_CLASSES else WORKERS,
        },
        limit_s=limit_s,
    )
    # What makes a schedule in whole units longer is the rounding of the sends on its longest path.
    bound_us = max(bound_us, (proved - count * 1e-6) * unit - late_us)
    if values is None:
        return start, bound_us
    found = np.array(values[:count]) * unit
    return min(start, found, justify(tasks, found), key=tasks.end_us), bound_us


def _unit_us(tasks: SendTasks, end_us: float) -> float:
    """A unit of time in which sends last whole numbers or nearly so; CP-SAT finds more where these are small.

    It is a part of the commonest send, the longest by which no chain of sends and no busy link becomes much longer.
    """
    common = Counter(us for links in tasks.busy for _, us in links).most_common(1)[0][0]
    load: Counter[int] = Counter()
    for links in tasks.busy:
        load.update(dict(links))
    for parts in range(1, MAX_PARTS + 1):
        unit = common / parts
        long, _ = _rounded(tasks, unit)
        chain = [0.0] * tasks.count
        for t in np.argsort(tasks.traveled_us, kind="stable").tolist():
            before = tasks.before[t]
            chain[t] = long.us[t] - tasks.us[t] + (chain[before] if before >= 0 else 0.0)
        longer: Counter[int] = Counter()
        for links in long.busy:
            longer.update(dict(links))
        idle = ((max(end_us - us, 0.0) / 2, longer[link] - us) for link, us in load.items())
        if max(chain) <= LATER * end_us and all(late <= max(LATER * end_us, half) for half, late in idle):
            return unit
    return end_us / STEPS


def _rounded(tasks: SendTasks, unit: float) -> tuple[SendTasks, float]:
    """The sends with all times rounded up to whole units, and by how much longer they are together."""

    def up(us: float) -> float:
        return math.ceil(us / unit - 1e-6) * unit

    busy = [[(link, up(us)) for link, us in links] for links in tasks.busy]
    us = [up(each) for each in tasks.us]
    late = sum(
        max([long - own, *(a - b for (_, a), (_, b) in zip(after, links, strict=True))])
        for long, own, after, links in zip(us, tasks.us, busy, tasks.busy, strict=True)
    )
    return replace(tasks, us=us, busy=busy), max(late, 0.0)
