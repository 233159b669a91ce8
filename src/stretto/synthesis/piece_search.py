# SPDX-License-Identifier: Apache-2.0
"""Programs of many equal pieces that enter the network in turn, each along a tree of its own, cut as finely as pays.

Ranks hold back what they could send at once, so that it does not queue in front of what others wait for: a send waits
for an arrival that the plan has some pieces earlier. How far ranks may run ahead is tried in several ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..collectives import Collective
from ..programs import Program
from ..simulator import simulate
from .justify import SHAKEN, justified, shaken
from .pacing import paced

WORTH_IT = 0.002
"""The share of the time that twice as many pieces must save to be worth it."""
FEW = 16
"""The pieces for each tree from which on their shares follow the rates well."""
WAYS = ((np.inf, 0.0), (64.0, 1.0), (16.0, 1.0), (16.0, 4.0), (4.0, 1.0), (4.0, 4.0), (1.0, 2.0))
"""Ways to pace sends: how many pieces a rank may send before their turn by the rates of the packing, and how many
pieces earlier than in the plan the arrival is that a send waits for."""
MARGINS = (1.0, 4.0)
"""How many pieces earlier than in a plan by urgency the arrival is that a send waits for, where plain order fails."""
KEPT = 3
"""The ways that are tried with the finest pieces."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class PieceSends:
    """The sends of all pieces, piece after piece, each piece's in an order that works.

    In `program` all that is gathered is added, also by helpers, so that what is sent on waits for all of it and not
    only for the last. It cannot be verified; `reordered` makes programs that can.
    """

    program: Program
    piece: NDArray[np.int64]
    """The turn of the piece that each transfer moves."""
    gathers: NDArray[np.bool_]
    """Whether each transfer takes a part to where it is added up."""
    piece_us: float = 0.0
    """The time between two turns by the rates of the trees; 0 where these are not known."""


class PieceSearch:
    """The fastest program so far, and until when to look for a faster one."""

    def __init__(self, cluster: Cluster, nbytes: float, alpha: str, until: float) -> None:
        self.cluster, self.nbytes, self.alpha, self.until = cluster, nbytes, alpha, until
        self.best: tuple[float, Program] | None = None
        self.finest: dict[int, tuple[float, Program]] = {}
        """The fastest program of each number of pieces."""

    def climb(
        self,
        sends: Callable[[int], PieceSends],
        *,
        first: int,
        few: int,
        most: float,
        together: int = 1,
        enough_us: float = 0.0,
    ) -> None:
        """Cut ever finer, until the additional alphas cost more than pipelining saves.

        Args:
            sends: Makes the sends for a number of pieces.
            first: The number of pieces to begin with.
            few: The number from which on the pieces' shares follow the rates well.
            most: The most pieces.
            together: How many pieces have their turn at once.
            enough_us: The time that is good enough to end the search.
        """
        pieces, idle, reached, ways = first, 0, np.inf, list(WAYS)
        while idle < 2 and (self.best is None or pieces <= most):
            times = {}
            for way, took, program in self._candidates(sends(pieces), ways, together):
                times[way] = took
                if self.best is None or took < self.best[0]:
                    self.best = took, program
                if pieces not in self.finest or took < self.finest[pieces][0]:
                    self.finest[pieces] = took, program
                if time.monotonic() > self.until or self.best[0] <= enough_us:
                    return
            # While a tree has few pieces, their shares are far from its rate, and the times say little.
            if pieces >= few:
                idle = 0 if min(times.values()) < reached * (1 - WORTH_IT) else idle + 1
                ways = sorted(ways, key=lambda way: times[way])[: max(KEPT, len(ways) - 2)]
            reached = min(reached, *times.values())
            pieces *= 4 if pieces < few else 2

    def attempt(self, sends: PieceSends, lead: float, margin: float) -> float:
        """Try one way to pace sends.

        Args:
            sends: The sends of some number of pieces.
            lead: How many pieces a rank may send before their turn.
            margin: How many pieces earlier than in the plan the arrival is that a send waits for.

        Returns:
            The time of that program.
        """
        _, took, program = next(self._candidates(sends, [(lead, margin)], 1))
        if self.best is None or took < self.best[0]:
            self.best = took, program
        return took

    def justify(self, sends: PieceSends, *, shakes: int = 0) -> float:
        """Try the sends by their urgency instead of piece after piece.

        Args:
            sends: The sends of some number of pieces.
            shakes: How often the plan is disturbed and planned again.

        Returns:
            The time of the fastest program found.
        """
        program, turn_us = sends.program, sends.piece * sends.piece_us
        blocks = self.alpha == "blocking"
        plan = justified(program, turn_us, self.cluster, nbytes=self.nbytes, blocks=blocks)
        plan = shaken(
            program, plan, self.cluster, nbytes=self.nbytes, blocks=blocks, piece=sends.piece,
            draw=np.random.default_rng(0), by=SHAKEN, count=shakes, until=self.until,
        )  # fmt: skip
        order = np.lexsort((np.arange(len(turn_us)), plan.start_us))
        plain, found = reordered(sends, order), np.inf
        for margin in (np.inf, *MARGINS):
            made = plain
            if np.isfinite(margin):
                made = paced(plain, plan.start_us[order] - margin * sends.piece_us, plan.arrive_us[order])
            took = simulate(made, self.cluster, nbytes=self.nbytes, alpha=self.alpha).total_us
            found = min(found, took)
            if self.best is None or took < self.best[0]:
                self.best = took, made
            # A network in which nothing overtakes keeps to the plan by itself.
            if found <= plan.total_us * (1 + WORTH_IT) or time.monotonic() > self.until:
                break
        return found

    def _candidates(
        self, sends: PieceSends, ways: list[tuple[float, float]], together: int
    ) -> Iterator[tuple[tuple[float, float], float, Program]]:
        """Programs of one number of pieces, by (lead, margin), each with its time."""
        turn_us = sends.piece_us * together
        planned: dict[float, tuple[NDArray[np.int64], Floats, Floats]] = {}
        for lead, margin in ways:
            if lead not in planned:
                ahead = np.maximum(sends.piece // together - lead, 0.0)
                planned[lead] = self._planned(sends.program, ahead * turn_us)
            order, start, arrive = planned[lead]
            program = reordered(sends, order)
            if np.isfinite(lead):
                program = paced(program, start[order] - margin * turn_us, arrive[order])
            took = simulate(program, self.cluster, nbytes=self.nbytes, alpha=self.alpha).total_us
            yield (lead, margin), took, program

    def _planned(self, program: Program, release_us: Floats) -> tuple[NDArray[np.int64], Floats, Floats]:
        """The order, starts and arrivals when every rank sends what has waited longest for its turn."""
        cluster = self.cluster
        size = program.transfer_bytes(self.nbytes)
        route_ptr = np.cumsum([0, *map(len, program.routes)])
        start, arrive = _native.time_sends(
            program.after_ptr,
            program.after,
            program.route,
            route_ptr,
            np.array([link for route in program.routes for link in route], np.int32),
            size,
            size * program.reduce * cluster.reduce_us_per_mb / 1e6,
            cluster.link_alpha_us,
            cluster.link_gb_per_s * 1e3,
            np.arange(program.num_transfers),
            np.broadcast_to(release_us, size.shape).astype(np.float64),
            self.alpha == "blocking",
        )
        return np.lexsort((np.arange(len(start)), start)), start, arrive


def share_pieces(rates: Floats, pieces: int) -> NDArray[np.int64]:
    """How many of the pieces each tree gets, by their rates.

    >>> share_pieces(np.array([1.0, 2.0, 0.1]), 4)
    array([1, 3, 0])
    """
    share = rates / rates.sum() * pieces
    count: NDArray[np.int64] = np.floor(share).astype(np.int64)
    count[np.argsort(count - share, kind="stable")[: pieces - int(count.sum())]] += 1
    return count


def copies_first(
    collective: Collective, dst: NDArray[np.int32], chunk: NDArray[np.int32], gathers: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Whether each transfer is added at its destination: a helper has nothing to add the first one to.

    Args:
        collective: The collective.
        dst: The rank that receives each transfer, in the order of the program.
        chunk: The chunk that it moves.
        gathers: Whether it takes a part to where parts are added up.

    Returns:
        `gathers` without the first transfer of each chunk to each helper.
    """
    outside = np.flatnonzero(gathers & (dst >= len(collective.members)))
    adds = gathers.copy()
    slot = dst[outside].astype(np.int64) * collective.num_chunks + chunk[outside]
    adds[outside[np.unique(slot, return_index=True)[1]]] = False
    return adds


def reordered(sends: PieceSends, order: NDArray[np.int64]) -> Program:
    """The same sends in another order, with the dependencies that this order needs.

    Args:
        sends: The sends, of one chunk each.
        order: The transfers, none before one that it waits for.

    Returns:
        The program in that order.
    """
    program = sends.program
    dst, chunk = program.dst[order], program.chunk[order]
    return Program.from_steps(
        program.name,
        program.collective,
        src=program.src[order],
        dst=dst,
        chunk=chunk,
        step=np.arange(len(order)),
        reduce=copies_first(program.collective, dst, chunk, sends.gathers[order]),
        route=program.route[order],
        routes=program.routes,
        routes_digest=program.routes_digest,
    )
