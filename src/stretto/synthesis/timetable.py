# SPDX-License-Identifier: Apache-2.0
"""Collectives as timetables: every piece gets trees of its own, put into the time that links have left.

Rates alone do not say when a link is free, and where latencies and bytes take about as long, that decides. First pieces
are moved about in timetables in which links may be overfull (``native/timetable_soft.cpp``), so that each learns what
the others need. Then pieces are put in one after the other (``native/timetable.cpp``): for a root and a moment at which
it knows the sum, one tree is grown backwards in time and one forwards, over what is still free. What no longer fits
makes others move. A horizon that was met is tightened, one that was missed is loosened a little. Each full timetable is
planned again by urgency (`justify`), which closes the gaps that its slots leave. In an all-gather pieces have the
second tree only, from the rank whose they are; a reduce-scatter is an all-gather backwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..collectives import AllGather, AllReduce, Collective, ReduceScatter
from ..errors import Infeasible
from ..programs import Program
from ..units import check_seed
from .combine import inverse, like, reversed_cluster
from .hops import Hops, joins_all
from .justify import SHAKEN, SHAKES, SendPlan, rejustified, shaken
from .piece_search import PieceSends, reordered
from .tree_pair_packing import pack_tree_pairs
from .tree_pairs import LATENCY_MATTERS

FIRST_SENDS, MOST_SENDS = 8_000, 100_000
"""The sends of the first timetables, and the most of any."""
PROBING = 0.25
"""The share of the budget after which coarse timetables give way to fine ones, if no horizon was missed before."""
ATTEMPTS = 20
"""How many of the fine ones the budget should allow."""
MOST_SLOTS = 1 << 20
"""The most slots of a link."""
LOOSE = 1.25
"""The first horizon over what bytes and latencies take one after the other."""
TIGHTER, LOOSER = 0.985, 1.04
"""How a horizon changes while none was missed, and while none was met; then it is halfway between."""
JUMP = 1.03
"""The next horizon over the time of a plan, where the horizon was much looser than that."""
CLOSE = 1.003
"""The ratio of a horizon that was met to one that was missed from which on both count as the same."""
FULL = (0.04, 0.13, 0.4)
"""What a hop over a link without free time costs, as a delay over the horizon: one of these for each timetable."""
TRIES = 5
"""The roots and moments that are tried for each piece."""
RUIN = 0.03
"""The most pieces that are taken out at once, as a share of all."""
EFFORT = 4
"""The insertions after which a horizon counts as missed, for each piece."""
ALIGN = 0.2
"""How far the number of pieces may be from the wanted one, so that latencies are whole numbers of slots."""
SOFT = 0.5
"""The share of the budget for timetables in which links may be overfull."""
SOFT_COARSE, SOFT_FINER = 2, (2, 2, 5)
"""How many of them have the first number of sends, and how many times as many the next ones have, in turn."""
SOFT_FULL, SOFT_SPANS = (0.1, 0.2, 0.4, 0.8), (8, 12, 16, 20, 24, 32)
"""What a full span costs, as a delay over the horizon, and the spans of time: one of these for each."""
SOFT_PASSES, SOFT_TRIES = 12, 6
"""How often every piece is moved, and the roots and moments that are tried then."""
SOFT_TIGHTER = (0.9, 1.0)
"""The horizon of such a timetable over the time of the best plan: anything between these."""
AGAIN_PASSES, AGAIN_TRIES, AGAIN_TIGHTER = 4, 12, (0.95, 0.995)
"""The same for timetables that begin where the best plan has its pieces."""
AGAIN_MOST, AGAIN_IDLE, AGAIN_GAIN = 12, 1, 5e-4
"""At most how many of these follow one another, after how many one must be better, and by which share."""
SOFT_LATE, SOFT_NARROWER, SOFT_WIDER = 0.995, 1.01, 0.998
"""From which share of a plan's time on a link ends late, how much slower it then counts, and how that wears off."""
WARMING, SEARCHING = 0.1, 0.85
"""The shares of the budget after which links are no longer packed, and no more timetables are begun."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Progress = Callable[[str, float], None]


def synthesize(
    collective: Collective,
    cluster: Cluster,
    *,
    nbytes: float,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    alpha: str = "pipelined",
) -> Program:
    """The best program by timetables that is found within the budget.

    Args:
        collective: An all-reduce, all-gather or reduce-scatter with the standard layout.
        cluster: The cluster; its devices are joined by direct links.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search; one program is always finished.
        seed: The seed of roots, moments and changes.
        progress: Called with a line of text and the fraction done, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.

    Returns:
        The verified program.

    Raises:
        Infeasible: The collective is none of these, ranks are joined by switches or do not reach each other,
            or latencies are nothing beside the bytes.

    >>> from stretto import KB
    >>> ring = Cluster.preset("ring", nodes=4)
    >>> synthesize(AllReduce(4), ring, nbytes=64 * KB, budget_s=0.2).collective.kind
    'all_reduce'
    """
    check_seed(seed)
    if collective.kind == "reduce_scatter":
        require_direct_links(collective, cluster)
        forth = synthesize(
            like(collective, kind="all_gather"), reversed_cluster(cluster), nbytes=nbytes, budget_s=0.9 * budget_s,
            seed=seed, progress=progress, alpha=alpha,
        )  # fmt: skip
        return inverse(forth, cluster, nbytes=nbytes, alpha=alpha)
    began = time.monotonic()
    tell = progress or (lambda message, fraction: None)
    require_direct_links(collective, cluster)
    search = _Search(collective, cluster, nbytes, alpha, seed)
    search.open(until=began + WARMING * budget_s)
    pieces = search.aligned(FIRST_SENDS / (2 * (collective.num_ranks - 1)))
    search.soften(pieces, until=began + SOFT * budget_s)
    if search.has_slots(pieces):
        _tighten(search, pieces, began, budget_s, tell)
    program = search.finished(until=began + 0.95 * budget_s)
    program.verify()
    return program


def _tighten(search: _Search, pieces: int, began: float, budget_s: float, tell: Progress) -> None:
    """Timetables whose links have slots: coarse ones first, then as fine as the budget allows."""
    until = began + SEARCHING * budget_s
    first, probes = time.monotonic(), 0
    while not probes or (not search.missed_us and time.monotonic() < began + (SOFT + PROBING) * budget_s):
        search.attempt(pieces)
        probes += 1
    assert search.best is not None
    each = (time.monotonic() - first) / probes
    finer = min(max(1.0, budget_s / ATTEMPTS / max(each, 1e-6)), MOST_SENDS / FIRST_SENDS)
    tell(f"{pieces} pieces: {search.best.plan.total_us:.6g} us", 0.2)
    pieces, search.missed_us = search.aligned(finer * pieces), 0.0
    while search.has_slots(pieces) and time.monotonic() + finer * each < until:
        search.attempt(pieces)
        tell(f"{pieces} pieces: {search.best.plan.total_us:.6g} us", min(0.9, (time.monotonic() - began) / budget_s))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Trial:
    """The sends of a timetable, and when each of them starts after it was planned again."""

    sends: PieceSends
    plan: SendPlan
    root: NDArray[np.int32]
    """The root of each piece, where it is known."""

    def places(self, share: float) -> dict[str, Any]:
        """Where pieces are by the plan, for another timetable to begin there; times are multiplied by the share."""
        program, piece = self.sends.program, self.sends.piece
        meet = np.zeros(len(self.root))
        np.maximum.at(meet, piece[self.sends.gathers], self.plan.arrive_us[self.sends.gathers])
        return {
            "first_root": self.root, "first_meet": share * meet, "first_link": program.route.astype(np.int32),
            "first_piece": piece.astype(np.int32), "first_gathers": self.sends.gathers.astype(np.uint8),
            "first_start": share * self.plan.start_us,
        }  # fmt: skip


NOWHERE: dict[str, Any] = {
    "first_root": np.zeros(0, np.int32), "first_meet": np.zeros(0), "first_link": np.zeros(0, np.int32),
    "first_piece": np.zeros(0, np.int32), "first_gathers": np.zeros(0, np.uint8), "first_start": np.zeros(0),
}  # fmt: skip
"""What a timetable is given whose pieces begin nowhere."""


class _Search:
    """The network, the horizon that is asked for, and the best plan so far."""

    def __init__(self, collective: Collective, cluster: Cluster, nbytes: float, alpha: str, seed: int) -> None:
        self.collective, self.cluster, self.nbytes, self.alpha = collective, cluster, nbytes, alpha
        self.best: _Trial | None = None
        self._hops = Hops.of(cluster, devices=collective.ranks)
        number = np.full(cluster.num_nodes, -1, np.int32)
        number[list(collective.ranks)] = np.arange(collective.num_ranks)
        self._src, self._dst = number[self._hops.src], number[self._hops.dst]
        self._spreads = collective.kind == "all_gather"
        self._random = np.random.default_rng(seed)
        self._horizon_us, self._met_us, self.missed_us = np.inf, np.inf, 0.0
        self._soft_us = np.inf
        self._narrow = np.ones(len(self._src))

    def open(self, *, until: float) -> None:
        """Set the first horizon: what the best trees take for the bytes, and the longest way there and back."""
        packing = pack_tree_pairs(self.cluster, self.collective.ranks, until=until, close=0.01)
        latency = [pair.latency_us(self.cluster.link_alpha_us) for pair in packing.pairs]
        bytes_us = self.nbytes / packing.gb_per_s / 1e3
        if min(latency) < LATENCY_MATTERS * bytes_us:
            raise Infeasible("timetable: latencies are nothing beside the bytes; pairs of trees in turn do as well")
        self._soft_us = bytes_us + max(latency)
        self._horizon_us = LOOSE * self._soft_us

    def aligned(self, wanted: float) -> int:
        """A number of pieces near the wanted one with which latencies lose little in slots."""
        ranks = self.collective.num_ranks
        if self._spreads:
            return ranks * max(1, round(wanted / ranks))
        low, high = max(1, int(wanted * (1 - ALIGN))), max(1, round(wanted * (1 + ALIGN)))
        counts = np.unique(np.linspace(low, high, 400).astype(np.int64))
        alpha, rate = self.cluster.link_alpha_us, self.cluster.link_gb_per_s * 1e3
        late = alpha > 0
        if self.alpha == "blocking" or not late.any():
            return max(1, round(wanted))
        slots = alpha[late] * rate[late] / self.nbytes * counts[:, None]
        lost = (np.ceil(slots - 1e-6) - slots) / counts[:, None]
        return int(counts[np.argmin(lost.mean(axis=1))])

    def _network(self, pieces: int) -> dict[str, Any]:
        """What all timetables of so many pieces are given."""
        cluster, blocks, size = self.cluster, self.alpha == "blocking", self.nbytes / pieces
        own = self._hops.link  # every hop is one link
        alpha, rate = cluster.link_alpha_us[own].astype(np.float64), cluster.link_gb_per_s[own] * 1e3
        home = np.arange(pieces if self._spreads else 0, dtype=np.int32) % self.collective.num_ranks
        return {
            "num_ranks": self.collective.num_ranks, "link_src": self._src, "link_dst": self._dst,
            "slot_us": size / rate + (alpha if blocks else 0.0), "tail_us": np.zeros_like(alpha) if blocks else alpha,
            "extra_us": size * cluster.reduce_us_per_mb / 1e6, "pieces": pieces, "home": home,
            "seed": int(self._random.integers(1 << 31)),
        }  # fmt: skip

    def has_slots(self, pieces: int) -> bool:
        """Whether rates are near enough to one another to cut the time of every link into slots of one piece."""
        slots = self._horizon_us * float(self.cluster.link_gb_per_s.max()) * 1e3 / (self.nbytes / pieces)
        return slots <= MOST_SLOTS

    def soften(self, coarse: int, *, until: float) -> None:
        """Timetables in which links may be overfull, first of coarse pieces, then of finer ones.

        Args:
            coarse: The number of coarse pieces.
            until: When to stop (`time.monotonic`); one is always made.
        """
        made, each = 0, 0.0  # each: the seconds for a piece
        while True:
            began = time.monotonic()
            if made >= SOFT_COARSE and made % 2 and self._go_on(until=until):
                made += 1
                continue
            finer = 1 if made < SOFT_COARSE else SOFT_FINER[(made - SOFT_COARSE) % len(SOFT_FINER)]
            if made > SOFT_COARSE and began + each * finer * coarse > until:
                finer = SOFT_FINER[0]
            pieces = self.aligned(finer * coarse)
            if self.best is not None and began + each * pieces > until:
                break
            self.settle(pieces)
            made, each = made + 1, (time.monotonic() - began) / pieces
        self._horizon_us = min(self._horizon_us, JUMP * self.best.plan.total_us)

    def _go_on(self, *, until: float) -> bool:
        """Timetables that begin with the best plan, as long as they better it; whether there was one."""
        if self.best is None or self._spreads or not len(self.best.root):
            return False
        took = 0.0
        for turn in range(AGAIN_MOST):
            began, before = time.monotonic(), self.best.plan.total_us
            if began + took > until:
                return turn > 0
            self.settle(len(self.best.root), again=True)
            took = time.monotonic() - began
            if self.best.plan.total_us > before * (1 - AGAIN_GAIN) and turn >= AGAIN_IDLE:
                return True
        return True

    def settle(self, pieces: int, *, again: bool = False) -> None:
        """One timetable whose links may be overfull, a little shorter than the best plan, planned again.

        Args:
            pieces: The number of pieces.
            again: Whether pieces begin where the best plan has them, of which there are then as many.
        """
        places, passes, tries = NOWHERE, SOFT_PASSES, SOFT_TRIES
        if self.best is not None:
            share = float(self._random.uniform(*(AGAIN_TIGHTER if again else SOFT_TIGHTER)))
            self._soft_us = self.best.plan.total_us * share
            if again:
                places, passes, tries = self.best.places(share), AGAIN_PASSES, AGAIN_TRIES
        network = self._network(pieces)
        network["slot_us"] = network["slot_us"] * self._narrow
        fits, hop, piece, gathers, start, root = _native.soft_timetable(
            until_us=self._soft_us, full_us=float(self._random.choice(SOFT_FULL)) * self._soft_us,
            spans=int(self._random.choice(SOFT_SPANS)), passes=passes, tries=tries, **network, **places,
        )  # fmt: skip
        if not fits:
            self._soft_us *= LOOSE
            return
        trial = self._keep(pieces, hop, piece, gathers, start, root)
        # Links that end last were asked for too much: the next timetables take them to be a little slower.
        end = np.zeros_like(self._narrow)
        np.maximum.at(end, trial.sends.program.route, trial.plan.arrive_us)
        late = end > SOFT_LATE * trial.plan.total_us
        self._narrow = np.where(late, SOFT_NARROWER * self._narrow, np.maximum(1.0, SOFT_WIDER * self._narrow))

    def _keep(
        self,
        pieces: int,
        hop: NDArray[np.int32],
        piece: NDArray[np.int32],
        gathers: NDArray[np.uint8],
        start: Floats,
        root: NDArray[np.int32],
    ) -> _Trial:
        """Plan a timetable again, and keep it if it is the best."""
        trial = self._planned(pieces, hop, piece.astype(np.int64), gathers.astype(np.bool_), start, root)
        if self.best is None or trial.plan.total_us < self.best.plan.total_us:
            self.best = trial
        return trial

    def attempt(self, pieces: int) -> None:
        """Fill one timetable, plan it again, and set the next horizon."""
        missing, hop, piece, gathers, start = _native.timetable(
            until_us=self._horizon_us, full_us=float(self._random.choice(FULL)) * self._horizon_us, tries=TRIES,
            ruin=RUIN, most_insertions=EFFORT * pieces, **self._network(pieces),
        )  # fmt: skip
        if missing:
            self._set_horizon(self._met_us, self._horizon_us, np.inf)
            return
        trial = self._keep(pieces, hop, piece, gathers, start, np.zeros(0, np.int32))
        self._set_horizon(self._horizon_us, self.missed_us, JUMP * trial.plan.total_us)

    def _set_horizon(self, met_us: float, missed_us: float, promise_us: float) -> None:
        """The next horizon, from the shortest that was met of late and the longest that was missed."""
        self._met_us, self.missed_us = met_us, missed_us
        if met_us == np.inf:
            self._horizon_us = LOOSER * missed_us
        elif missed_us == 0:
            self._horizon_us = min(TIGHTER * met_us, promise_us)
        elif met_us > CLOSE * missed_us:
            self._horizon_us = (met_us * missed_us) ** 0.5
        else:
            # About as short as it gets: other timetables of that length, which may be planned better.
            self._horizon_us, self.missed_us = met_us / CLOSE**0.5, 0.0

    def finished(self, *, until: float) -> Program:
        """The program of the best plan, after it was disturbed and planned again some times."""
        assert self.best is not None
        sends, plan = self.best.sends, self.best.plan
        plan = shaken(
            sends.program, plan, self.cluster, nbytes=self.nbytes, blocks=self.alpha == "blocking", piece=sends.piece,
            draw=self._random, by=SHAKEN, count=SHAKES, until=until,
        )  # fmt: skip
        return reordered(sends, np.lexsort((np.arange(len(plan.start_us)), plan.start_us)))

    def _planned(
        self,
        pieces: int,
        hop: NDArray[np.int32],
        piece: Ints,
        gathers: NDArray[np.bool_],
        start: Floats,
        root: NDArray[np.int32],
    ) -> _Trial:
        """The sends in the order of the timetable, planned again by urgency."""
        order = np.lexsort((~gathers, start))
        hop, piece, gathers = hop[order], piece[order], gathers[order]
        ranks, chunk = self.collective.num_ranks, piece
        if self._spreads:
            chunk = piece % ranks * (pieces // ranks) + piece // ranks
        program = Program.from_steps(
            f"timetable(pieces={pieces})",
            like(self.collective, chunks=pieces // ranks if self._spreads else pieces),
            src=self._src[hop],
            dst=self._dst[hop],
            chunk=chunk,
            step=np.arange(len(hop)),
            reduce=gathers,
            route=hop,
            routes=tuple(self._hops.route(k) for k in range(len(self._src))),
            routes_digest=self.cluster.digest,
        )
        plan = rejustified(program, start[order], self.cluster, nbytes=self.nbytes, blocks=self.alpha == "blocking")
        return _Trial(sends=PieceSends(program=program, piece=piece, gathers=gathers), plan=plan, root=root)


def require_direct_links(collective: Collective, cluster: Cluster) -> None:
    """Refuse other collectives, and ranks that direct links do not join."""
    make = {"all_reduce": AllReduce, "all_gather": AllGather, "reduce_scatter": ReduceScatter}.get(collective.kind)
    if make is None or collective.num_ranks < 2:
        raise Infeasible(f"timetable: does not serve {collective.kind} of {collective.num_ranks} ranks")
    if collective != make(collective.ranks, chunks=collective.chunks, in_place=collective.in_place):
        raise Infeasible(f"timetable: this {collective.kind} has a layout of its own; only the standard one is served")
    hops = Hops.of(cluster, devices=collective.ranks)
    number = {device: rank for rank, device in enumerate(collective.ranks)}
    ends = [np.array([number[device] for device in side.tolist()], np.int64) for side in (hops.src, hops.dst)]
    if np.any(np.diff(hops.link_ptr) != 1):
        raise Infeasible("timetable: is for devices that are joined by direct links, not by switches")
    if not joins_all(ends[0], ends[1], collective.num_ranks):
        raise Infeasible("timetable: some rank does not reach another one")
