# SPDX-License-Identifier: Apache-2.0
"""Which host sends each unit task, and in which order: the algorithms of section 3.2 of the cross-mesh paper.

The paper's model: a task occupies its sender and all its receivers from its start to its end, and a host does one task
at a time (Eq. 1-3). A task's time is its bytes over a port's rate; a task inside one host takes no time.

An algorithm of `ORDERS` is called as ``algorithm(jobs, seed)``, once per plan, in the process that plans; equal
arguments must give equal results. It returns an `Assignment` that names for every job one of its `senders`, and every
job once in `order`; `timed` computes the rest.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import unknown
from ..units import check_seed
from .bundles import Bundle
from .hosts import Hosts

DFS_STEPS = 50_000
"""Budget of the depth-first search in steps, not in seconds, so that the same input gives the same order."""
DFS_TASKS = 20
"""Largest number of tasks for the depth-first search; with more it finds nothing good, and only `greedy` is used."""
DFS_LIMIT = 200
"""Tasks beyond which the recursion of the depth-first search would exceed the interpreter's limit."""
GREEDY_TRIES = 16


@dataclass(frozen=True, kw_only=True)
class HostTask:
    """A unit task between hosts: the hosts that could send it, the hosts that receive it, and its time."""

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    us: float


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """The sender host of each task, the order of the tasks, each task's start and the end of all in the model."""

    sender: tuple[int, ...]
    order: tuple[int, ...]
    start_us: tuple[float, ...]
    total_us: float
    note: str = ""
    """What the algorithm could not do, such as a search that ended before it was complete."""


def jobs_of(bundles: Sequence[Bundle], hosts: Hosts) -> list[HostTask]:
    """The tasks between hosts; a host that holds a task serves its own devices and is no receiver."""
    jobs = []
    for b in bundles:
        senders = tuple(hosts.groups(b.holders[0]))
        receivers = tuple(g for g in hosts.groups(b.missing) if g not in senders)
        jobs.append(HostTask(senders=senders, receivers=receivers, us=b.nbytes / hosts.slowest if receivers else 0.0))
    return jobs


def timed(jobs: Sequence[HostTask], sender: Sequence[int], order: Sequence[int]) -> Assignment:
    """Start every task as early as the tasks before it on the same hosts allow.

    Args:
        jobs: the tasks.
        sender: the sender host of each task.
        order: all task numbers, in the order in which hosts do them.

    Returns:
        The assignment with start times and total time in microseconds.
    """
    free: dict[int, float] = defaultdict(float)
    start = [0.0] * len(jobs)
    for j in order:
        mine = (sender[j], *jobs[j].receivers) if jobs[j].receivers else ()
        start[j] = max((free[h] for h in mine), default=0.0)
        for h in mine:
            free[h] = start[j] + jobs[j].us
    total = max((start[j] + job.us for j, job in enumerate(jobs)), default=0.0)
    return Assignment(sender=tuple(sender), order=tuple(order), start_us=tuple(start), total_us=total)


def naive(jobs: Sequence[HostTask], seed: int = 0) -> Assignment:
    """The first holder of each task sends it; tasks stay in their given order."""
    return timed(jobs, [job.senders[0] for job in jobs], range(len(jobs)))


def balanced_in_order(jobs: Sequence[HostTask], seed: int = 0) -> Assignment:
    """The least loaded holder sends each task; tasks stay in their given order. The all-gather baselines do this."""
    load: dict[int, float] = defaultdict(float)
    sender = []
    for job in jobs:
        sender.append(min(job.senders, key=lambda h: (load[h], h)))
        load[sender[-1]] += job.us
    return timed(jobs, sender, range(len(jobs)))


def load_balance_only(jobs: Sequence[HostTask], seed: int = 0) -> Assignment:
    """Longest tasks first, each sent by its least loaded holder (Eq. 4), in that order."""
    load: dict[int, float] = defaultdict(float)
    order = sorted(range(len(jobs)), key=lambda j: (-jobs[j].us, j))
    sender = [-1] * len(jobs)
    for j in order:
        sender[j] = min(jobs[j].senders, key=lambda h: (load[h], h))
        load[sender[j]] += jobs[j].us
    return timed(jobs, sender, order)


def depth_first(jobs: Sequence[HostTask], seed: int = 0, *, steps: int = DFS_STEPS) -> Assignment:
    """Depth-first search over orders and senders; branches that cannot beat the best so far are cut.

    Args:
        jobs: the tasks.
        seed: not used; all algorithms take it.
        steps: number of branches after which the search ends with the best order found.

    Returns:
        The best assignment found; its note says where the search gave up.
    """
    count = len(jobs)
    best_us, best_sender, best_order = math.inf, tuple[int, ...](), tuple[int, ...]()
    budget = steps
    waiting: dict[int, float] = defaultdict(float)
    for job in jobs:
        for h in job.receivers:
            waiting[h] += job.us
    free: dict[int, float] = defaultdict(float)
    sender, order = [job.senders[0] for job in jobs], list[int]()
    left = [True] * count

    def visit(end: float) -> None:
        nonlocal budget, best_us, best_sender, best_order
        if len(order) == count:
            if end < best_us:
                best_us, best_sender, best_order = end, tuple(sender), tuple(order)
            return
        seen: set[tuple[object, ...]] = set()
        for j in range(count):
            if not left[j]:
                continue
            job = jobs[j]
            for host in job.senders:
                alike = (job.senders, job.receivers, job.us, host)
                if alike in seen or (budget <= 0 and best_us < math.inf):
                    continue
                seen.add(alike)
                budget -= 1
                mine = (host, *job.receivers) if job.receivers else ()
                before = {h: free[h] for h in mine}
                stop = max(before.values(), default=0.0) + job.us
                for h in mine:
                    free[h] = stop
                for h in job.receivers:
                    waiting[h] -= job.us
                after = max(end, stop)
                bound = max((free[h] + waiting[h] for h in waiting), default=after)
                if max(after, bound) < best_us * (1 - 1e-12):
                    left[j], sender[j] = False, host
                    order.append(j)
                    visit(after)
                    order.pop()
                    left[j] = True
                for h in job.receivers:
                    waiting[h] += job.us
                free.update(before)

    if count > DFS_LIMIT:
        why = f"gave up: {count} tasks are more than the {DFS_LIMIT} it can search; the order is naive"
        return replace(naive(jobs), note=why)
    visit(0.0)
    why = f"gave up after {steps} steps: the order is the best so far" if budget <= 0 else ""
    return replace(timed(jobs, best_sender, best_order), note=why)


def greedy(jobs: Sequence[HostTask], seed: int = 0, *, tries: int = GREEDY_TRIES) -> Assignment:
    """Repeatedly choose, from several random orders, the set of tasks without common hosts that occupies the most
    hosts.

    Args:
        jobs: the tasks.
        seed: seed of the random orders.
        tries: random orders for each set.

    Returns:
        The assignment.
    """
    draw = random.Random(seed)
    left = [j for j, job in enumerate(jobs) if job.receivers]
    order = [j for j, job in enumerate(jobs) if not job.receivers]
    sender = [job.senders[0] for job in jobs]
    load: dict[int, float] = defaultdict(float)
    while left:
        senders = {h for j in left for h in jobs[j].senders}
        receivers = {h for j in left for h in jobs[j].receivers}
        best: list[tuple[int, int]] = []
        most = -1
        for _ in range(tries):
            taken: set[int] = set()
            chosen: list[tuple[int, int]] = []
            # The order is shuffled lazily, one task at a time, since most tasks are never reached.
            pool = left.copy()
            for at in range(len(pool)):
                swap = draw.randrange(at, len(pool))
                pool[at], pool[swap] = pool[swap], pool[at]
                job = jobs[pool[at]]
                if any(h in taken for h in job.receivers):
                    continue
                able = [h for h in job.senders if h not in taken]
                if not able:
                    continue
                host = min(able, key=lambda h: (load[h], h))
                chosen.append((pool[at], host))
                taken |= {host, *job.receivers}
                if senders <= taken or receivers <= taken:
                    break
            if len(taken) > most:
                best, most = chosen, len(taken)
        for j, host in best:
            sender[j] = host
            load[host] += jobs[j].us
            order.append(j)
        gone = {j for j, _ in best}
        left = [j for j in left if j not in gone]
    return timed(jobs, sender, order)


def ensemble(jobs: Sequence[HostTask], seed: int = 0) -> Assignment:
    """The paper's choice: the better of depth-first search and randomized greedy."""
    found = [greedy(jobs, seed)]
    if len(jobs) <= DFS_TASKS:
        found.append(depth_first(jobs, seed))
    return min(found, key=lambda a: a.total_us)


ORDERS: dict[str, Callable[[Sequence[HostTask], int], Assignment]] = {
    "naive": naive,
    "in_order": balanced_in_order,
    "load_balance_only": load_balance_only,
    "dfs": depth_first,
    "greedy": greedy,
    "ensemble": ensemble,
}


def assign(name: str, jobs: Sequence[HostTask], seed: int = 0) -> Assignment:
    """Choose senders and order by one of `ORDERS`.

    Args:
        name: name of the algorithm.
        jobs: the tasks.
        seed: seed of randomized algorithms, >= 0.

    Returns:
        The assignment.

    Raises:
        InvalidInput: the name is unknown or the seed out of range.
    """
    check_seed(seed)
    if name not in ORDERS:
        raise unknown("order", name, ORDERS)
    return ORDERS[name](jobs, seed)
