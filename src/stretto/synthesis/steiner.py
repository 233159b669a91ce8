# SPDX-License-Identifier: Apache-2.0
"""Programs for groups smaller than the cluster, in which devices outside the group forward, copy and add.

Trees through all devices that may help are packed for the best rate (`steiner_packing`); the data is cut into equal
pieces, each of which goes along one tree (`piece_search`). The program's collective names the helpers that it needs as
ranks that hold nothing before and afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..collectives import Collective
from ..errors import Infeasible
from ..programs import Program
from ..programs.formats.named import NamedCollective, name_of
from ..simulator import simulate
from .piece_search import FEW, PieceSearch, PieceSends, share_pieces
from .steiner_packing import ShardTree, TreeFinder, pack_shards, shards_of

MAX_TRANSFERS = 200_000
MAX_DEVICES = 512

Progress = Callable[[str, float], None]


def synthesize(
    collective: Collective,
    cluster: Cluster,
    *,
    helpers: Sequence[int],
    nbytes: float,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    alpha: str = "pipelined",
    max_transfers: int = MAX_TRANSFERS,
) -> Program:
    """A program along packed trees through the group and its helpers, cut into as many pieces as simulation finds best.

    Args:
        collective: A collective of the library, of equal shards.
        cluster: The cluster.
        helpers: The devices outside the group that may forward, copy and add.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search; one program is always finished.
        seed: Ignored: there is no chance involved.
        progress: Called with a line of text and the fraction done, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.
        max_transfers: The most transfers of a program with more than one piece for each shard.

    Returns:
        The verified program; its collective has the helpers that it needs.

    Raises:
        Infeasible: The collective is not one of the library, or some rank does not reach another one.
    """
    del seed
    began = time.monotonic()
    tell = progress or (lambda message, fraction: None)
    named, devices = with_helpers("steiner", collective, helpers)
    work = _GroupWork(cluster=cluster, devices=devices, nbytes=nbytes, alpha=alpha, max_transfers=max_transfers)
    whole = named.kind == "all_reduce"
    tell("packing trees", 0.0)
    found = [work.search(named, began + budget_s * (0.5 if whole else 0.9)).best]
    if whole:
        tell("reduce-scatter and all-gather", 0.5)
        found.append(work.in_two(named, began + budget_s * 0.9))
    program = only_used_helpers(min((one for one in found if one is not None), key=lambda one: one[0])[1])
    program.verify()
    return program


def with_helpers(maker: str, collective: Collective, helpers: Sequence[int]) -> tuple[NamedCollective, tuple[int, ...]]:
    """The collective of the library in whole shards, and the devices of its group with the helpers behind them.

    Args:
        maker: The maker that asks, for the message.
        collective: The collective.
        helpers: The devices outside the group that may help.

    Returns:
        The collective's name with one chunk for each shard, and the devices.

    Raises:
        Infeasible: The collective is not one of the library, or there are too few or too many devices.
    """
    named = name_of(collective.without_helpers())
    if named is None or collective.num_ranks < 2:
        raise Infeasible(f"{maker}: serves the collectives of the library, over two or more ranks")
    devices = (*named.ranks, *helpers)
    if len(devices) > MAX_DEVICES:
        raise Infeasible(f"{maker}: {len(devices)} devices are more than {MAX_DEVICES}")
    return replace(named, chunks=1), devices


@dataclass(frozen=True, kw_only=True)
class _GroupWork:
    """A group with its helpers on a cluster, and how programs for it are judged."""

    cluster: Cluster
    devices: tuple[int, ...]
    nbytes: float
    alpha: str
    max_transfers: int

    def search(self, named: NamedCollective, until: float) -> PieceSearch:
        """Programs of one collective along packed trees, and along the quickest tree of each shard."""
        began, collective = time.monotonic(), named.build()
        shards, shard_bytes = shards_of(collective), float(collective.chunk_share[0]) * self.nbytes
        packing = pack_shards(self.cluster, self.devices, shards, until=began + (until - began) / 3)
        search = PieceSearch(self.cluster, self.nbytes, self.alpha, until)
        alone_us = self.cluster.link_alpha_us + shard_bytes / self.cluster.link_gb_per_s / 1e3
        for trees in (list(packing.trees), TreeFinder(self.cluster, self.devices, shards).cheapest(alone_us)):
            layout = PieceLayout(named, self.devices, self.cluster, trees, shard_bytes)
            search.climb(
                layout.sends,
                first=1,
                few=FEW * max(1, len(trees) // len(shards)),
                most=self.max_transfers / layout.hops_of_a_piece,
                together=len(shards),
            )
        return search

    def in_two(self, named: NamedCollective, until: float) -> tuple[float, Program] | None:
        """An all-reduce as a reduce-scatter and an all-gather, the second woven into the end of the first."""
        now = time.monotonic()
        halves = [
            self.search(replace(named, kind=kind), end).finest
            for kind, end in (("reduce_scatter", (now + until) / 2), ("all_gather", until))
        ]
        both = sorted(
            halves[0].keys() & halves[1].keys(), key=lambda pieces: halves[0][pieces][0] + halves[1][pieces][0]
        )
        if not both:
            return None
        first, second = (half[both[0]][1] for half in halves)
        collective = replace(named, chunks=both[0] * len(named.ranks)).build()
        joined = self._joined(collective.with_helpers(self.devices[len(named.ranks) :]), first, second)
        return simulate(joined, self.cluster, nbytes=self.nbytes, alpha=self.alpha).total_us, joined

    def _joined(self, collective: Collective, first: Program, second: Program) -> Program:
        """A program that gathers, then one that spreads the same chunks, each at its own pace.

        What a rank spreads first waits until everything has come that it gathers, as the pace of the second supposes.
        """
        count = first.num_transfers
        joined = Program.from_steps(
            f"all_reduce({first.name}+{second.name})",
            collective,
            **{
                key: np.concatenate([getattr(half, key) for half in (first, second)]) for key in ("src", "dst", "chunk")
            },
            step=np.arange(count + second.num_transfers),
            reduce=np.concatenate([first.reduce, second.reduce]),
            route=np.concatenate([first.route, second.route + len(first.routes)]),
            routes=first.routes + second.routes,
            routes_digest=self.cluster.digest,
        )
        arrive = simulate(first, self.cluster, nbytes=self.nbytes, alpha=self.alpha).end_us
        last = np.full(collective.num_ranks, -1)
        by_time = np.argsort(arrive, kind="stable")
        last[first.dst[by_time]] = by_time
        opening = np.flatnonzero(np.diff(second.after_ptr) == 0)
        opening = opening[last[second.src[opening]] >= 0]
        own = [np.repeat(np.arange(half.num_transfers), np.diff(half.after_ptr)) for half in (first, second)]
        return waiting_for(
            joined,
            [own[0], own[1] + count, opening + count],
            [first.after, second.after + count, last[second.src[opening]]],
        )


def waiting_for(program: Program, waiter: Sequence[NDArray[Any]], waited: Sequence[NDArray[Any]]) -> Program:
    """The program with more dependencies.

    Args:
        program: The program.
        waiter: Arrays of transfers that wait.
        waited: The transfer that each of them waits for.

    Returns:
        The program in which they wait, too.
    """
    count = program.num_transfers
    waits = np.concatenate([np.repeat(np.arange(count), np.diff(program.after_ptr)), *waiter]).astype(np.int64)
    pairs = np.unique(waits * count + np.concatenate([program.after, *waited]))
    after_ptr = np.searchsorted(pairs // count, np.arange(count + 1)).astype(np.int64)
    return program.replace(after_ptr=after_ptr, after=(pairs % count).astype(np.int32))


class PieceLayout:
    """Shards cut into pieces, each of which goes along one of its shard's trees."""

    def __init__(
        self,
        named: NamedCollective,
        devices: Sequence[int],
        cluster: Cluster,
        trees: Sequence[ShardTree],
        shard_bytes: float,
    ) -> None:
        self._named, self._devices, self._cluster, self._shard_bytes = named, devices, cluster, shard_bytes
        self._routes: dict[tuple[int, ...], int] = {}
        self._tables = [self._rows(tree) for tree in trees]
        self._rate = np.array([tree.gb_per_s for tree in trees])
        self._shards = shards_of(named.build())
        self._of_shard = [[k for k, tree in enumerate(trees) if tree.shard == s] for s in range(len(self._shards))]
        self.hops_of_a_piece = sum(max(len(self._tables[k]) for k in mine) for mine in self._of_shard)
        """The transfers that one more piece of every shard takes at most."""

    def sends(self, pieces: int) -> PieceSends:
        """The sends of `pieces` pieces of every shard, in the order in which pieces take turns."""
        which, turn, chunk = [], [], []
        for shard, mine in zip(self._shards, self._of_shard, strict=True):
            rates = self._rate[mine] if self._rate[mine].any() else np.ones(len(mine))
            count = share_pieces(rates, pieces)
            which.append(np.repeat(mine, count))
            turn.append(np.concatenate([(np.arange(c) + 0.5) / c for c in count.tolist() if c]))
            chunk.append(shard.first * pieces + np.arange(pieces))
        trees, chunks = np.concatenate(which), np.concatenate(chunk)
        order = np.lexsort((chunks, np.concatenate(turn)))
        trees, chunks = trees[order], chunks[order]
        rows = np.concatenate([self._tables[k] for k in trees.tolist()])
        lengths = np.array([len(self._tables[k]) for k in trees.tolist()])
        collective = replace(self._named, chunks=pieces).build().with_helpers(self._devices[len(self._named.ranks) :])
        dst, moved = rows[:, 1].astype(np.int32), np.repeat(chunks, lengths).astype(np.int32)
        gathers = rows[:, 2].astype(np.bool_)
        program = Program.from_steps(
            f"steiner({len(self._tables)},pieces={pieces})",
            collective,
            src=rows[:, 0],
            dst=dst,
            chunk=moved,
            step=np.arange(len(rows)),
            reduce=gathers,
            route=rows[:, 3],
            routes=tuple(self._routes),
            routes_digest=self._cluster.digest,
        )
        rate = sum(float(self._rate[mine].sum()) for mine in self._of_shard[:1])
        piece_us = self._shard_bytes / rate / 1e3 / len(order) if rate else 0.0
        piece = np.repeat(np.arange(len(order)), lengths)
        return PieceSends(program=program, piece=piece, gathers=gathers, piece_us=piece_us)

    def _rows(self, tree: ShardTree) -> NDArray[np.int64]:
        """The sends of one piece as rows (source, destination, whether it gathers, route), in an order that works."""
        number = self._routes.setdefault
        rows = [
            (src, dst, gathers, number(route, len(self._routes)))
            for gathers, hops in ((1, tree.gather), (0, tree.spread))
            for src, dst, route in hops
        ]
        return np.array(rows, np.int64)


def only_used_helpers(program: Program) -> Program:
    """The same program without the helpers that move nothing; the others keep their order."""
    c = program.collective
    used = np.zeros(c.num_ranks, np.bool_)
    used[: len(c.members)] = True
    used[program.src] = used[program.dst] = True
    number = (np.cumsum(used) - 1).astype(np.int32)
    kept = [c.ranks[rank] for rank in np.flatnonzero(used).tolist()]
    return program.replace(
        collective=c.with_helpers(kept[len(c.members) :]), src=number[program.src], dst=number[program.dst]
    )
