# SPDX-License-Identifier: Apache-2.0
"""All-reduce through shards of unequal sizes: summed where they are kept, then spread, both halves at the same time.

A rank with few links should keep much: what it keeps it need not receive again. So each rank keeps a share of the
pieces of its own. For given shares the greedy (``native/greedy.cpp``) plans how pieces spread, and backwards on the
reversed network how they are summed; every piece gets two trees of its own that way. Put one behind the other, the two
halves leave links idle in the middle; planned again by urgency (`justify`), what can be early or late fills these gaps.
Shares are searched: some to begin with that links suggest, then changes of the best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..collectives import AllReduce, Collective
from ..errors import Infeasible
from ..programs import Program
from ..units import check_seed
from .combine import reversed_cluster
from .hops import Hops, joins_all
from .justify import SHAKEN, SHAKES, SendPlan, rejustified, shaken
from .piece_search import PieceSends, reordered, share_pieces
from .quotient import quotient
from .tree_pair_packing import pack_tree_pairs

FEW = 15
"""The pieces for each rank with which shares are compared."""
FINER = (3, 8)
"""How much finer the best shares are cut in the end, while that pays."""
COMPARING = 0.6
"""The share of the budget that is for comparing shares."""
LEAST_S = 5.0
"""The limit of one greedy plan, which no plan of this size comes near."""
WORTH_IT = 0.999

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
    """The best all-reduce through unequal shards that is found within the budget.

    Args:
        collective: An all-reduce with the standard layout.
        cluster: The cluster; its devices are joined by direct links.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search; one program is always finished.
        seed: The seed of plans and of changes of shares.
        progress: Called with a line of text and the fraction done, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.

    Returns:
        The verified program.

    Raises:
        Infeasible: The collective is no standard all-reduce, ranks are joined by switches, or do not reach each other.

    >>> from stretto import KB
    >>> line = Cluster.preset("ring", nodes=4)
    >>> synthesize(AllReduce(4), line, nbytes=64 * KB, budget_s=0.5).collective.kind
    'all_reduce'
    """
    check_seed(seed)
    began = time.monotonic()
    tell = progress or (lambda message, fraction: None)
    search = ShareSearch.of(collective, cluster, nbytes=nbytes, alpha=alpha, seed=seed)
    until = began + COMPARING * budget_s
    pieces = FEW * collective.num_ranks
    best: _Trial | None = None
    for shares in search.suggested():
        if best is None or time.monotonic() < until:
            best = min(filter(None, (best, search.trial(shares, pieces))), key=lambda trial: trial.plan.total_us)
    assert best is not None
    tell(f"{pieces} pieces: {best.plan.total_us:.6g} us", 0.2)
    while time.monotonic() < until:
        best = min(best, search.trial(search.changed(best.shares), pieces), key=lambda trial: trial.plan.total_us)
    tell(f"{pieces} pieces, shares changed: {best.plan.total_us:.6g} us", COMPARING)
    found, took = best, 0.0
    for finer in FINER:
        now = time.monotonic()
        # A plan takes a time that grows with the square of its pieces.
        if now + 8 * took > began + 0.9 * budget_s:
            break
        trial = search.shaken(search.trial(best.shares, finer * pieces), until=began + 0.9 * budget_s)
        took = time.monotonic() - now
        tell(f"{finer * pieces} pieces: {trial.plan.total_us:.6g} us", 0.9)
        worth = trial.plan.total_us < WORTH_IT * found.plan.total_us
        found = min(found, trial, key=lambda one: one.plan.total_us)
        if not worth:
            break
    program = search.program(found)
    program.verify()
    return program


@dataclass(frozen=True, kw_only=True, eq=False)
class _Trial:
    """Shares with the sends that they lead to, and when each of these starts."""

    shares: Floats
    sends: PieceSends
    plan: SendPlan


@dataclass(frozen=True, kw_only=True, eq=False)
class _Half:
    """One half's plan: each hop's start, its links, its ends, and the piece that it carries."""

    start_us: Floats
    arrive_us: Floats
    link: Ints
    src: Ints
    dst: Ints
    piece: Ints


class ShareSearch:
    """What all trials have in common: the task, the network forwards and backwards, and the source of chance."""

    def __init__(self, collective: Collective, cluster: Cluster, nbytes: float, alpha: str, seed: int) -> None:
        self.collective, self.cluster, self.nbytes, self.alpha = collective, cluster, nbytes, alpha
        self._random = np.random.default_rng(seed)
        turned = reversed_cluster(cluster)
        self._ways = [(Hops.of(one, devices=collective.ranks), one is cluster) for one in (cluster, turned)]

    @classmethod
    def of(cls, collective: Collective, cluster: Cluster, *, nbytes: float, alpha: str, seed: int) -> ShareSearch:
        """The search for a task.

        Args:
            collective: An all-reduce with the standard layout.
            cluster: The cluster.
            nbytes: The size in bytes, > 0.
            alpha: "pipelined" or "blocking".
            seed: The seed of plans and of changes of shares.

        Returns:
            The search.

        Raises:
            Infeasible: The task is not served.
        """
        require_direct_links(collective, cluster)
        return cls(collective, cluster, nbytes, alpha, seed)

    def suggested(self) -> Iterator[Floats]:
        """Shares to begin with: more where links are few, as trees of the best rate have roots, or all the same."""
        cluster, ranks = self.cluster, self.collective.ranks
        n = len(ranks)
        rate = np.zeros((2, cluster.num_nodes))
        np.add.at(rate[0], cluster.link_dst, cluster.link_gb_per_s)
        np.add.at(rate[1], cluster.link_src, cluster.link_gb_per_s)
        few = leveled(rate.min(axis=0)[list(ranks)])
        yield few
        trees = np.zeros(n)
        for pair in pack_tree_pairs(cluster, ranks, until=time.monotonic() + 1.0, close=0.01).pairs:
            trees[pair.root] += pair.gb_per_s
        trees /= trees.sum()
        yield from (trees, np.full(n, 1 / n), (few + trees) / 2, np.eye(n)[int(trees.argmax())])

    def changed(self, shares: Floats) -> Floats:
        """Shares near the given ones: one rank, or some, keep more or less."""
        n, draw = len(shares), self._random
        made = shares * np.exp(draw.normal(0, 0.3, n) * (draw.random(n) < draw.choice((0.15, 0.5, 1.0))))
        a, b = draw.choice(n, 2, replace=False)
        moved = float(draw.random() ** 2) * made[a] * (draw.random() < 0.5)
        made[a], made[b] = made[a] - moved, made[b] + moved
        return np.asarray(made / made.sum(), np.float64)

    def trial(self, shares: Floats, pieces: int) -> _Trial:
        """Plan both halves for these shares, and the whole by urgency."""
        home = np.repeat(np.arange(len(shares)), share_pieces(shares, pieces))
        spread, gather = (self._half(hops, home, forwards) for hops, forwards in self._ways)
        end = float(gather.arrive_us.max(initial=0.0))
        first, second = np.argsort(-gather.arrive_us, kind="stable"), np.argsort(spread.start_us, kind="stable")
        start = np.concatenate([end - gather.arrive_us[first], end + spread.start_us[second]])
        piece = np.concatenate([gather.piece[first], spread.piece[second]])
        link = np.concatenate([gather.link[first], spread.link[second]])
        gathers = np.arange(len(piece)) < len(first)
        c = self.collective
        program = Program.from_steps(
            f"shares(pieces={pieces})",
            AllReduce(c.ranks, chunks=pieces, in_place=c.in_place),
            src=np.concatenate([gather.dst[first], spread.src[second]]),
            dst=np.concatenate([gather.src[first], spread.dst[second]]),
            chunk=piece,
            step=np.arange(len(piece)),
            reduce=gathers,
            route=link,
            routes=tuple((k,) for k in range(self.cluster.num_links)),
            routes_digest=self.cluster.digest,
        )
        plan = rejustified(program, start, self.cluster, nbytes=self.nbytes, blocks=self.alpha == "blocking")
        return _Trial(shares=shares, sends=PieceSends(program=program, piece=piece, gathers=gathers), plan=plan)

    def shaken(self, trial: _Trial, *, until: float) -> _Trial:
        """The trial with the best of plans that begin near its own."""
        plan = shaken(
            trial.sends.program, trial.plan, self.cluster, nbytes=self.nbytes, blocks=self.alpha == "blocking",
            piece=trial.sends.piece, draw=self._random, by=SHAKEN, count=SHAKES, until=until,
        )  # fmt: skip
        return _Trial(shares=trial.shares, sends=trial.sends, plan=plan)

    def program(self, trial: _Trial) -> Program:
        """The program in the order of the plan."""
        order = np.lexsort((np.arange(len(trial.plan.start_us)), trial.plan.start_us))
        return reordered(trial.sends, order)

    def _half(self, hops: Hops, home: Ints, forwards: bool) -> _Half:
        """How pieces spread from their homes over these hops; backwards in time on the reversed network."""
        pieces, view = len(home), quotient(hops, self.collective.ranks, symmetric=False)
        nothing = np.zeros(0, np.int32)
        start, arrive, hop, piece, missing = _native.greedy_schedule(
            num_devices=view.local, hop_src=view.src, hop_dst=view.dst, link_ptr=view.link_ptr, link=view.link,
            alpha_us=view.alpha_us, bytes_per_us=view.rate, shift=view.shift, there=nothing, back=nothing,
            nbytes=np.full(pieces, self.nbytes / pieces), kind=np.arange(pieces, dtype=np.int32), region=view.region,
            crosses=view.crosses, goal=nothing, distance=np.zeros(0), held=home * pieces + np.arange(pieces),
            alpha_blocks=self.alpha == "blocking", mirrored=not forwards, once=False, patient=False,
            seed=int(self._random.integers(1 << 31)), limit_s=LEAST_S,
        )  # fmt: skip
        if missing:
            raise Infeasible("shares: a plan was not done in time" if missing < 0 else "shares: no way to some rank")
        link = hops.link[hops.link_ptr[hop]].astype(np.int64)
        return _Half(
            start_us=start, arrive_us=arrive, link=link, src=view.src[hop].astype(np.int64),
            dst=view.dst[hop].astype(np.int64), piece=piece.astype(np.int64),
        )  # fmt: skip


def require_direct_links(collective: Collective, cluster: Cluster) -> None:
    """Refuse other collectives, and ranks that direct links do not join."""
    if collective.kind != "all_reduce" or collective.num_ranks < 2:
        raise Infeasible(f"shares: serves all_reduce of two or more ranks, not {collective.kind}")
    if collective != AllReduce(collective.ranks, chunks=collective.chunks, in_place=collective.in_place):
        raise Infeasible("shares: this all_reduce has a layout of its own; only the standard one is served")
    hops = Hops.of(cluster, devices=collective.ranks)
    number = {device: rank for rank, device in enumerate(collective.ranks)}
    ends = [np.array([number[device] for device in side.tolist()], np.int64) for side in (hops.src, hops.dst)]
    if np.any(np.diff(hops.link_ptr) != 1):
        raise Infeasible("shares: is for devices that are joined by direct links, not by switches")
    if not joins_all(ends[0], ends[1], collective.num_ranks):
        raise Infeasible("shares: some rank does not reach another one")


def leveled(rate: Floats) -> Floats:
    """Shares with which all ranks that keep anything receive the rest in the same time.

    Args:
        rate: The rate of each rank's links.

    Returns:
        The shares; they add up to one.

    >>> leveled(np.array([1.0, 1.0, 2.0])).round(9).tolist()
    [0.5, 0.5, 0.0]
    """
    low, high = 0.0, 1.0 / float(rate.min())
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(0, 1 - rate * middle).sum() > 1 else (low, middle)
    shares = np.maximum(0, 1 - rate * low)
    return np.asarray(shares / shares.sum(), np.float64)
