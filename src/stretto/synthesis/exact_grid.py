# SPDX-License-Identifier: Apache-2.0
"""Hop times on a grid of time slots, for exact mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..collectives import Collective
from ..errors import Infeasible, InvalidInput
from ..programs import Program
from .hops import Hops
from .pacing import paced
from .schedule import program_from_schedule

MAX_SLOTS = 16
"""The most slots of the longest hop for which a common divisor of the hop times is used as the slot."""

Move = tuple[int, int, int]
"""One send: (chunk, hop, slot in which its first link begins)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Grid:
    """Hop times in slots.

    Stage j of hop h is its j-th link, busy for ``busy[h][j]``; the next stage begins no sooner than ``leads[h][j]``
    after it (the last entry says when the message has arrived).
    """

    slot_us: float
    busy: list[list[int]]
    leads: list[list[int]]

    @cached_property
    def arrives(self) -> list[int]:
        """The least number of slots from a hop's start to its arrival."""
        return [sum(leads) for leads in self.leads]


@dataclass(frozen=True, kw_only=True, eq=False)
class HopNetwork:
    """The hops among a collective's ranks, whose ends are ranks, and their times for one chunk."""

    cluster: Cluster
    num_ranks: int
    src: list[int]
    dst: list[int]
    routes: list[tuple[int, ...]]
    busy_us: list[list[float]]
    leads_us: list[list[float]]

    @classmethod
    def of(
        cls, collective: Collective, cluster: Cluster, *, nbytes: float, alpha: str, channels: tuple[str, ...] | None
    ) -> HopNetwork:
        """The hops for chunks of the size that they have when the collective moves `nbytes`.

        Args:
            collective: The collective; its chunks are of one size.
            cluster: The cluster.
            nbytes: The size in bytes, > 0.
            alpha: "pipelined" or "blocking", as in `simulate`.
            channels: The channels whose links may be used; all when None.

        Returns:
            The hops with their times.

        Raises:
            Infeasible: Chunks differ in size.
            InvalidInput: A device does not exist.
        """
        shares = np.unique(np.round(collective.chunk_share, 15))
        if len(shares) > 1:
            raise Infeasible("chunks: exact mode needs chunks of one size")
        if max(collective.ranks) >= cluster.num_devices:
            raise InvalidInput(f"ranks: {cluster.name} has only devices 0..{cluster.num_devices - 1}")
        size, blocks = float(shares[0]) * nbytes, alpha == "blocking"
        hops = Hops.of(cluster, devices=collective.ranks, channels=channels, nbytes=size)
        rank = {device: r for r, device in enumerate(collective.ranks)}
        routes = [hops.route(h) for h in range(hops.num_hops)]
        busy, leads = [], []
        for route in routes:
            alphas = [float(cluster.link_alpha_us[link]) for link in route]
            sends = [size / (float(cluster.link_gb_per_s[link]) * 1e3) for link in route]
            busy.append([s + a * blocks for s, a in zip(sends, alphas, strict=True)])
            lead = [max(a, s + a - n) for a, s, n in zip(alphas, sends, sends[1:], strict=False)]
            leads.append([*lead, sends[-1] + alphas[-1]])
        return cls(
            cluster=cluster, num_ranks=collective.num_ranks, src=[rank[d] for d in hops.src.tolist()],
            dst=[rank[d] for d in hops.dst.tolist()], routes=routes, busy_us=busy, leads_us=leads,
        )  # fmt: skip

    @cached_property
    def grids(self) -> tuple[Grid, Grid]:
        """Hop times rounded down and rounded up; the same grid where nothing has to be rounded."""
        values = {v for row in (*self.busy_us, *self.leads_us) for v in row if v > 1e-9}
        if not values:
            raise Infeasible(f"exact: no two of the ranks are joined by a route on {self.cluster.name}")
        shared = _common_divisor(values)
        if shared is not None and max(values) / shared <= MAX_SLOTS:
            grid = self._grid(shared, round)
            return grid, grid
        slots = sorted({v / parts for v in values for parts in (1, 2, 3)})
        slots = [s for s in slots if max(values) / s <= MAX_SLOTS]

        def least(rounding: Callable[[float], int]) -> Grid:
            # Choose the grid with the smallest total error, and among equals the coarsest.
            error = {s: sum(abs(rounding(v / s) * s / v - 1) for v in values) for s in slots}
            return self._grid(min(slots, key=lambda s: (round(error[s], 6), -s)), rounding)

        return least(lambda v: math.floor(v + 1e-9)), least(lambda v: math.ceil(v - 1e-9))

    def _grid(self, slot: float, rounding: Callable[[float], int]) -> Grid:
        def rounded(rows: list[list[float]]) -> list[list[int]]:
            return [[rounding(v / slot) for v in row] for row in rows]

        return Grid(slot_us=slot, busy=rounded(self.busy_us), leads=rounded(self.leads_us))

    def describe(self) -> str:
        """The length of the slots, and which times were rounded to them, in words."""
        down, up = self.grids
        if down is up:
            return f"slots of {up.slot_us:g} us divide every hop time"
        return (
            f"hop times rounded up to slots of {up.slot_us:g} us for the program and down to slots of "
            f"{down.slot_us:g} us for the bound"
        )

    def distances(self, grid: Grid) -> NDArray[np.float64]:
        """The least number of slots from each rank to each other, relays included."""
        n = self.num_ranks
        far = np.full((n, n), np.inf)
        np.fill_diagonal(far, 0)
        for a, b, slots in zip(self.src, self.dst, grid.arrives, strict=True):
            far[a, b] = min(far[a, b], slots)
        for k in range(n):
            far = np.minimum(far, far[:, k, None] + far[None, k, :])
        return far

    @cached_property
    def staged(self) -> bool:
        """Whether some hop passes more than one link."""
        return any(len(route) > 1 for route in self.routes)

    def programs(self, collective: Collective, grid: Grid, moves: list[Move]) -> list[Program]:
        """The programs of a schedule; where links may be shared, a second one holds messages back (see `paced`).

        Args:
            collective: The collective.
            grid: The grid that the moves are on.
            moves: The moves; for all-reduce a hop number beyond the hops means the way from the root.

        Returns:
            One or two programs, not verified yet.
        """
        count = len(self.src)
        hop = [h % count for _, h, _ in moves]
        start = [t for _, _, t in moves]
        plain = program_from_schedule(
            label(grid),
            collective,
            self.cluster,
            start_us=start,
            src=[self.src[h] for h in hop],
            dst=[self.dst[h] for h in hop],
            chunks=[[c] for c, _, _ in moves],
            routes=[self.routes[h] for h in hop],
            reduce=[collective.combining and h < count for _, h, _ in moves],
        )
        if not self.staged:
            return [plain]
        return [plain, paced(plain, start, [t + grid.arrives[h] for t, h in zip(start, hop, strict=True)])]


def _common_divisor(values: Iterable[float]) -> float | None:
    """The largest number of which all values are multiples, up to rounding; None if there is none of useful size."""
    found = 0.0
    largest = max(values)
    for value in sorted(values):
        a, b = value, found
        while b > 1e-6 * largest:
            a, b = b, math.fmod(a, b)
            if b > 0 and a - b <= 1e-7 * largest:
                b = 0.0
        found = a
    found = largest / round(largest / found)
    return found if all(abs(v / found - round(v / found)) < 1e-6 for v in values) else None


def label(grid: Grid) -> str:
    """The name of a program made on a grid."""
    return f"exact(slot={grid.slot_us:g}us)"
