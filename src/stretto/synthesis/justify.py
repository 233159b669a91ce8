# SPDX-License-Identifier: Apache-2.0
"""Sends by their urgency: planned forwards and backwards in turn, so that no link waits while it could work ahead.

Pieces that take turns fill a network as a pipe: at first and at last most links have nothing to do. But what lies at
the leaves of trees can be sent long before its turn, and what goes to leaves long after it. So each link first serves
what has the longest way before it. Then all sends are moved to the end of the plan as far as they go, in the order in
which they end, and back to its beginning in the order in which they start (double justification, as in project
scheduling); each pass takes time out of the plan, some rounds of it nearly all that there is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..programs import Program

URGENCY = (1.0, 2.0)
"""How much a microsecond of the way before a send counts beside a microsecond of its turn, to begin with."""
ROUNDS = 4
SHAKES = 12
"""How often a plan is disturbed and planned again where there is time."""
SHAKEN = 0.01
"""How far its pieces are moved then, as a share of the plan's time."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SendPlan:
    """The planned start and arrival of each send in microseconds."""

    start_us: Floats
    arrive_us: Floats

    @property
    def total_us(self) -> float:
        """When the last send arrives."""
        return float(self.arrive_us.max(initial=0.0))


def justified(
    program: Program, turn_us: NDArray[np.floating[Any]], cluster: Cluster, *, nbytes: float, blocks: bool
) -> SendPlan:
    """The shortest plan found for the sends of a program whose pieces take turns.

    Args:
        program: The sends, each after all that it waits for.
        turn_us: When each send's piece has its turn.
        cluster: The cluster.
        nbytes: The size of the collective in bytes.
        blocks: Whether alphas block links.

    Returns:
        The plan.
    """
    planner = _Planner(program, cluster, nbytes, blocks)
    ahead = planner.longest_way_us()
    best: SendPlan | None = None
    for urgency in URGENCY:
        plan = planner.forwards(np.asarray(turn_us - urgency * ahead, np.float64))
        for _ in range(ROUNDS):
            if best is None or plan.total_us < best.total_us:
                best = plan
            back = planner.backwards(-plan.arrive_us)
            plan = planner.forwards(-back.arrive_us)
        best = min(best or plan, plan, key=lambda one: one.total_us)
    assert best is not None
    return best


def rejustified(program: Program, start_us: Floats, cluster: Cluster, *, nbytes: float, blocks: bool) -> SendPlan:
    """The shortest plan found that begins with the sends in the order of given starts.

    Args:
        program: The sends, each after all that it waits for.
        start_us: When each send starts in a plan that is to be improved.
        cluster: The cluster.
        nbytes: The size of the collective in bytes.
        blocks: Whether alphas block links.

    Returns:
        The plan.
    """
    return _passes(_Planner(program, cluster, nbytes, blocks), start_us, ROUNDS)


def shaken(
    program: Program,
    plan: SendPlan,
    cluster: Cluster,
    *,
    nbytes: float,
    blocks: bool,
    piece: Ints,
    draw: np.random.Generator,
    by: float,
    count: int,
    until: float,
) -> SendPlan:
    """The best of some plans that begin with the given one, in which pieces are moved at random.

    Args:
        program: The sends, each after all that it waits for.
        plan: The plan to begin with.
        cluster: The cluster.
        nbytes: The size of the collective in bytes.
        blocks: Whether alphas block links.
        piece: The piece that each send moves; its sends are moved together.
        draw: The source of chance.
        by: How far pieces are moved, as a share of the plan's time (a standard deviation).
        count: How many plans are tried.
        until: When to stop (`time.monotonic`).

    Returns:
        The plan.
    """
    planner = _Planner(program, cluster, nbytes, blocks)
    for _ in range(count):
        if time.monotonic() > until:
            break
        moved = draw.normal(0.0, by * plan.total_us, int(piece.max(initial=0)) + 1)[piece]
        plan = min(plan, _passes(planner, plan.start_us + moved, 1), key=lambda one: one.total_us)
    return plan


def _passes(planner: _Planner, start_us: Floats, rounds: int) -> SendPlan:
    """The shortest plan of some passes back and forth that begin with sends in the order of given starts."""
    plan = best = planner.forwards(start_us)
    for _ in range(rounds):
        plan = planner.forwards(-planner.backwards(-plan.arrive_us).arrive_us)
        best = min(best, plan, key=lambda one: one.total_us)
    return best


class _Planner:
    """The sends of a program on its links, forwards in time and backwards."""

    def __init__(self, program: Program, cluster: Cluster, nbytes: float, blocks: bool) -> None:
        self._cluster, self._program, self._blocks = cluster, program, blocks
        self._bytes = program.transfer_bytes(nbytes)
        self._extra = self._bytes * program.reduce * cluster.reduce_us_per_mb / 1e6
        self._ptr = np.cumsum([0, *map(len, program.routes)])
        self._links = np.array([link for route in program.routes for link in route], np.int32)
        self._links_back = np.array([link for route in program.routes for link in route[::-1]], np.int32)
        count = program.num_transfers
        # Backwards in time the first send is the last, and waits for those that wait for it.
        waiter = count - 1 - program.after.astype(np.int64)
        waited = count - 1 - np.repeat(np.arange(count), np.diff(program.after_ptr))
        order = np.lexsort((waited, waiter))
        self._after_back = waited[order].astype(np.int32)
        self._after_back_ptr = np.searchsorted(waiter[order], np.arange(count + 1)).astype(np.int64)

    def longest_way_us(self) -> Floats:
        """For each send the alphas on the longest chain of sends that begins with it."""
        hop = np.array([self._cluster.link_alpha_us[list(route)].sum() for route in self._program.routes])
        own = hop[self._program.route].tolist()
        longest = list(own)
        ptr, after = self._program.after_ptr.tolist(), self._program.after.tolist()
        for send in range(len(own) - 1, -1, -1):
            way = longest[send]
            for before in after[ptr[send] : ptr[send + 1]]:
                longest[before] = max(longest[before], own[before] + way)
        return np.array(longest)

    def forwards(self, key: Floats) -> SendPlan:
        """Every link serves the waiting send of the smallest key."""
        p = self._program
        return self._timed(p.after_ptr, p.after, p.route, self._links, self._bytes, self._extra, key)

    def backwards(self, key: Floats) -> SendPlan:
        """The plan with time reversed, where times are counted back from the end."""
        plan = self._timed(
            self._after_back_ptr,
            self._after_back,
            self._program.route[::-1].copy(),
            self._links_back,
            self._bytes[::-1].copy(),
            self._extra[::-1].copy(),
            key[::-1],
        )
        return SendPlan(start_us=plan.start_us[::-1], arrive_us=plan.arrive_us[::-1])

    def _timed(
        self,
        after_ptr: Ints,
        after: NDArray[np.int32],
        route: NDArray[np.int32],
        links: NDArray[np.int32],
        size: Floats,
        extra: Floats,
        key: Floats,
    ) -> SendPlan:
        rank = np.empty(len(key), np.int64)
        rank[np.argsort(key, kind="stable")] = np.arange(len(key))
        start, arrive = _native.time_sends(
            after_ptr,
            after,
            route,
            self._ptr,
            links,
            size,
            extra,
            self._cluster.link_alpha_us,
            self._cluster.link_gb_per_s * 1e3,
            rank,
            np.zeros(len(key)),
            self._blocks,
        )
        return SendPlan(start_us=start, arrive_us=arrive)
