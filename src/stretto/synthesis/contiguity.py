# SPDX-License-Identifier: Apache-2.0
"""Stage 3: neighbours on a connection that travel as one message, and the exact times of a plan.

A message of several chunks pays alpha once, but leaves only when all of its chunks are there, and arrives as a whole.
Where alpha only delays arrival (``pipelined``) a link loses nothing to it and merging never helps; where alpha occupies
the link (``blocking``), small plans are merged by a model of the paper's kind. Large ones are decomposed: that model
is of the whole plan, but only the pairs of a window of time may change, window after window.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..errors import Infeasible
from ..solvers.milp import Milp, solve
from .ordering import SendTasks

MAX_MERGED = 6
RUNS = (2, 3, 4, 6)
MAX_EXACT = 150
"""The most sends for which the model is worth solving with all pairs free."""
WINDOW = 48
"""The number of pairs that are free at a time in a larger plan; the next window begins in the middle of this one."""
WINDOW_S = 5.0
"""The most seconds for one window."""
WORTH_US = 1e-9

Pairs = AbstractSet[tuple[int, int]]
"""Sends that follow one another on a hop."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageSchedule:
    """A plan: message m starts at ``start_us[m]`` and carries the sends ``sends[m]``, all over one hop."""

    tasks: SendTasks
    start_us: NDArray[np.float64]
    sends: tuple[tuple[int, ...], ...]

    @classmethod
    def single(cls, tasks: SendTasks, start_us: NDArray[np.float64]) -> MessageSchedule:
        """The plan in which every send is a message of its own."""
        return cls(tasks=tasks, start_us=start_us, sends=tuple((t,) for t in range(tasks.count)))

    @cached_property
    def ends_us(self) -> NDArray[np.float64]:
        """The planned arrival of each message, in microseconds."""
        tasks, alpha = self.tasks, self.tasks.problem.logical.hops.alpha_us
        took = [sum(tasks.us[t] for t in m) - (len(m) - 1) * float(alpha[tasks.hop[m[0]]]) for m in self.sends]
        ends: NDArray[np.float64] = self.start_us + np.array(took)
        return ends

    @property
    def end_us(self) -> float:
        """The planned arrival of the last message, in microseconds."""
        return float(self.ends_us.max(initial=0.0))

    def joined(self, pairs: Pairs) -> MessageSchedule | None:
        """The plan in which these neighbours on a hop share messages; None if messages would wait in a circle."""
        following = dict(pairs)
        later = set(following.values())
        groups = []
        for (first,) in self.sends:
            if first not in later:
                group = [first]
                while group[-1] in following:
                    group.append(following[group[-1]])
                groups.append(tuple(group))
        start = _replan(self.tasks, groups, [max(float(self.start_us[t]) for t in group) for group in groups])
        return None if start is None else MessageSchedule(tasks=self.tasks, start_us=start, sends=tuple(groups))


def _replan(tasks: SendTasks, groups: list[tuple[int, ...]], wanted: list[float]) -> NDArray[np.float64] | None:
    """Start times of messages in the wanted order, each after the messages that bring its chunks; None for a circle."""
    alpha = tasks.problem.logical.hops.alpha_us
    owner = {t: m for m, group in enumerate(groups) for t in group}
    waits = [{owner[tasks.before[t]] for t in group if tasks.before[t] >= 0} for group in groups]
    after: list[list[int]] = [[] for _ in groups]
    for m, others in enumerate(waits):
        for other in others:
            after[other].append(m)
    missing = [len(others) for others in waits]
    ready = [0.0] * len(groups)
    free: dict[int, float] = {}
    start = np.zeros(len(groups))
    heap = [(wanted[m], m) for m in range(len(groups)) if not missing[m]]
    heapq.heapify(heap)
    done = 0
    while heap:
        _, m = heapq.heappop(heap)
        group = groups[m]
        saved = (len(group) - 1) * float(alpha[tasks.hop[group[0]]])
        begin = max([ready[m], *(free.get(link, 0.0) for link, _ in tasks.busy[group[0]])])
        start[m], done = begin, done + 1
        for at, (link, _) in enumerate(tasks.busy[group[0]]):
            free[link] = begin + max(0.0, sum(tasks.busy[t][at][1] for t in group) - saved)
        for other in after[m]:
            ready[other] = max(ready[other], begin + sum(tasks.us[t] for t in group) - saved)
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(heap, (wanted[other], other))
    return start if done == len(groups) else None


def neighbors(plan: MessageSchedule) -> list[tuple[int, int]]:
    """Pairs of sends that follow one another on a hop whose alpha is worth saving."""
    tasks = plan.tasks
    by_hop: dict[int, list[int]] = {}
    for t in np.argsort(plan.start_us, kind="stable").tolist():
        by_hop.setdefault(tasks.hop[t], []).append(t)
    alpha = tasks.problem.logical.hops.alpha_us
    return [pair for hop, sends in by_hop.items() if alpha[hop] > WORTH_US for pair in pairwise(sends)]


def merge(
    plan: MessageSchedule,
    score: Callable[[MessageSchedule], float],
    *,
    limit_s: float,
    seed: int = 0,
    solver: str = "highs",
) -> tuple[MessageSchedule, float]:
    """Find the best way to merge neighbouring sends into messages.

    Args:
        plan: The plan with single sends.
        score: Returns the simulated time of a plan.
        limit_s: The seconds to search.
        seed: The seed of the search.
        solver: The solver of the model, "highs" or "cpsat".

    Returns:
        The best plan and its time; the given plan where alpha does not block links.
    """
    best, best_us = plan, score(plan)
    candidates = neighbors(plan)
    if not plan.tasks.problem.blocking or not candidates:
        return best, best_us
    end = time.monotonic() + limit_s
    chosen: Pairs = set()

    def better(tried: Pairs) -> bool:
        nonlocal best, best_us, chosen
        if tried == chosen or _longest(tried) > MAX_MERGED:
            return False
        plan_tried = plan.joined(tried)
        if plan_tried is None or (us := score(plan_tried)) >= best_us * (1 - 1e-9):
            return False
        best, best_us, chosen = plan_tried, us, tried
        return True

    if plan.tasks.count <= MAX_EXACT:
        better(_exact(plan, candidates, limit_s=limit_s / 2, seed=seed, solver=solver))
    for removed, added in _runs(plan, candidates):
        if time.monotonic() > end:
            break
        better((chosen - removed) | added if len(removed) > 1 else chosen ^ added)
    if plan.tasks.count > MAX_EXACT:
        for free in _windows(plan, candidates):
            # Half of what is left is for single pairs.
            left_s = (end - time.monotonic()) / 2
            if left_s <= 0:
                break
            limit = min(left_s, WINDOW_S)
            better(_exact(plan, candidates, limit_s=limit, seed=seed, solver=solver, free=free, chosen=chosen))
    for k in np.random.default_rng(seed).permutation(len(candidates)).tolist():
        if time.monotonic() > end:
            break
        better(chosen ^ {candidates[k]})
    return best, best_us


def _windows(plan: MessageSchedule, candidates: Sequence[tuple[int, int]]) -> Iterator[Pairs]:
    """Pairs that are near each other in time, in windows that overlap by half."""
    order = sorted(candidates, key=lambda pair: float(plan.start_us[pair[0]]))
    for first in range(0, max(len(order) - WINDOW // 2, 1), WINDOW // 2):
        yield set(order[first : first + WINDOW])


def _runs(plan: MessageSchedule, candidates: list[tuple[int, int]]) -> Iterator[tuple[Pairs, Pairs]]:
    """Changes to try, as (pairs to separate, pairs to join): runs of one length on all hops of one alpha, or on one."""
    alpha = plan.tasks.problem.logical.hops.alpha_us
    chains: dict[int, list[tuple[int, int]]] = {}
    for pair in candidates:
        chains.setdefault(plan.tasks.hop[pair[0]], []).append(pair)
    alphas = sorted({float(alpha[hop]) for hop in chains}, reverse=True)
    groups = [[hop for hop in chains if alpha[hop] == value] for value in alphas]
    groups += [[hop] for hop in sorted(chains, key=lambda h: (-float(alpha[h]), h)) if len(chains) > 1]
    for hops in groups:
        for length in RUNS:
            runs = {pair for hop in hops for at, pair in enumerate(chains[hop]) if (at + 1) % length}
            yield {pair for hop in hops for pair in chains[hop]}, runs


def _longest(pairs: Pairs) -> int:
    following, later = dict(pairs), {b for _, b in pairs}
    longest = 1
    for first in following:
        if first not in later:
            length, at = 1, first
            while at in following:
                length, at = length + 1, following[at]
            longest = max(longest, length)
    return longest


def _exact(
    plan: MessageSchedule, candidates: Sequence[tuple[int, int]], *, limit_s: float, seed: int, solver: str,
    free: Pairs | None = None, chosen: Pairs = frozenset(),
) -> Pairs:  # fmt: skip
    """The neighbours that share messages in the fastest plan that keeps the order on every link (appendix B.3).

    With `free` all other pairs stay as in `chosen`, which is also the answer where the model finds none.
    """
    may = set(candidates) if free is None else free
    tasks = plan.tasks
    horizon = tasks.end_us(plan.start_us) * 1.5 + 1e-6
    model = Milp()
    start = [model.column(upper=horizon) for _ in range(tasks.count)]
    end = [model.column(upper=horizon) for _ in range(tasks.count)]
    total = model.column(cost=1.0, upper=horizon)
    together = {
        pair: model.column(
            cost=1e-7, lower=float(pair in chosen and pair not in may), upper=float(pair in chosen or pair in may),
            integer=True,
        )
        for pair in candidates
    }  # fmt: skip
    alpha = tasks.problem.logical.hops.alpha_us
    push = [tasks.us[t] - float(alpha[tasks.hop[t]]) for t in range(tasks.count)]
    most = MAX_MERGED * max(push, default=0.0)
    # filled[t] is the transmission time of the sends up to t in the message that t belongs to.
    filled = [model.column(lower=push[t], upper=most) for t in range(tasks.count)]
    for t in range(tasks.count):
        model.row({end[t]: 1.0, start[t]: -1.0, filled[t]: -1.0}, lower=float(alpha[tasks.hop[t]]))
        model.row({total: 1.0, end[t]: -1.0}, lower=0.0)
        if tasks.before[t] >= 0:
            model.row({start[t]: 1.0, end[tasks.before[t]]: -1.0}, lower=0.0)
    for (a, b), join in together.items():
        model.row({start[b]: 1.0, start[a]: -1.0}, lower=0.0)
        model.row({start[b]: 1.0, start[a]: -1.0, join: horizon}, upper=horizon)
        model.row({end[a]: 1.0, end[b]: -1.0, join: -horizon}, lower=-horizon)
        model.row({filled[b]: 1.0, filled[a]: -1.0, join: -most}, lower=push[b] - most)
    _in_order(plan, model, start, end, together, horizon)
    for chain in _chains(candidates):
        for at in range(len(chain) - MAX_MERGED + 1):
            window = list(zip(chain[at : at + MAX_MERGED], chain[at + 1 : at + MAX_MERGED + 1], strict=False))
            if len(window) == MAX_MERGED:
                model.row({together[pair]: 1.0 for pair in window}, upper=MAX_MERGED - 1.0)
    try:
        solved = solve(model, solver=solver, limit_s=limit_s, seed=seed)
    except Infeasible:
        return chosen
    if solved.values is None:
        return chosen
    return {pair for pair, join in together.items() if solved.values[join] > 0.5}


def _in_order(
    plan: MessageSchedule,
    model: Milp,
    start: list[int],
    end: list[int],
    together: dict[tuple[int, int], int],
    horizon: float,
) -> None:
    """Add rows: a physical link serves its sends in the plan's order, one at a time unless they share a message."""
    served: dict[int, list[int]] = {}
    for t in np.argsort(plan.start_us, kind="stable").tolist():
        for link, _ in plan.tasks.busy[t]:
            served.setdefault(link, []).append(t)
    for sends in served.values():
        for a, b in pairwise(sends):
            terms = {start[b]: 1.0, end[a]: -1.0}
            if (a, b) in together:
                terms[together[a, b]] = horizon
            model.row(terms, lower=0.0)


def _chains(pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    following, later = dict(pairs), {b for _, b in pairs}
    chains = []
    for first in following:
        if first not in later:
            chain = [first]
            while chain[-1] in following:
                chain.append(following[chain[-1]])
            chains.append(chain)
    return chains
