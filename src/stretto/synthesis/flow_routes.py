# SPDX-License-Identifier: Apache-2.0
"""Routes for personalised traffic: every chunk gets one path over the physical links, so that no link is crowded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..cluster.model import DEVICE
from ..collectives import AllToAll, Collective
from ..errors import Infeasible
from ..programs.ir import take_rows
from .hops import Hops

Ints = NDArray[np.int64]
Nodes = NDArray[np.int32]
Floats = NDArray[np.float64]

SHARPNESS = 4096.0
GATHER_SHARPNESS = 64.0
SWEEPS = 6
WALK = 400


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """Traffic: chunk ``chunk[i]``, which is ``share[i]`` of nbytes, goes from rank ``src[i]`` to rank ``dst[i]``."""

    chunk: Nodes
    src: Nodes
    dst: Nodes
    share: Floats


def traffic_of(collective: Collective) -> Traffic:
    """The traffic of a collective; `Infeasible` where a chunk is held or wanted by several ranks.

    >>> from stretto import AllGather
    >>> len(traffic_of(AllToAll(4)).chunk)
    12
    >>> traffic_of(AllGather(4))
    Traceback (most recent call last):
    stretto.errors.Infeasible: flow: chunk 0 of all_gather is wanted by 4 ranks; flow serves one to one only
    """
    c = collective
    holders, wanters = (np.bincount(x, minlength=c.num_chunks) for x in (c.in_chunk, c.out_chunk))
    for count, verb in ((holders, "held"), (wanters, "wanted")):
        bad = np.flatnonzero((count > 1) & (wanters > 0))
        if len(bad):
            raise Infeasible(
                f"flow: chunk {bad[0]} of {c.kind} is {verb} by {count[bad[0]]} ranks; flow serves one to one only"
            )
    src, dst = np.full(c.num_chunks, -1, np.int32), np.full(c.num_chunks, -1, np.int32)
    src[c.in_chunk] = np.repeat(np.arange(c.num_ranks), np.diff(c.in_ptr))
    dst[c.out_chunk] = np.repeat(np.arange(c.num_ranks), np.diff(c.out_ptr))
    chunk = np.flatnonzero((dst >= 0) & (src != dst)).astype(np.int32)
    return Traffic(chunk=chunk, src=src[chunk], dst=dst[chunk], share=c.chunk_share[chunk])


def refined(collective: Collective, pieces: int) -> Collective:
    """The same collective with each chunk cut into `pieces` chunks.

    >>> refined(AllToAll(4, chunks=2), 3) == AllToAll(4, chunks=6)
    True
    """
    c = collective
    if pieces == 1:
        return c
    if c.kind == "all_to_all":
        return AllToAll(c.ranks, chunks=c.chunks * pieces, in_place=c.in_place)

    def cut(chunks: Nodes) -> Nodes:
        return np.asarray((chunks[:, None].astype(np.int64) * pieces + np.arange(pieces)).ravel().astype(np.int32))

    return replace(
        c,
        num_chunks=c.num_chunks * pieces,
        chunks=c.chunks * pieces,
        in_ptr=c.in_ptr * pieces,
        in_chunk=cut(c.in_chunk),
        in_part=np.repeat(c.in_part, pieces),
        out_ptr=c.out_ptr * pieces,
        out_chunk=cut(c.out_chunk),
        out_set=np.repeat(c.out_set, pieces),
        chunk_share=np.repeat(c.chunk_share, pieces) / pieces,
        place=c.place * pieces,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Paths:
    """Paths of all traffic: chunk i takes the links ``link[ptr[i]:ptr[i+1]]``; the busiest link needs `worst_us`.

    Where `turn` is given (one per entry of `link`), chunks that take the same hop in the same turn share a message.
    """

    ptr: Ints
    link: Nodes
    worst_us: float
    turn: Ints | None = None


def route(
    collective: Collective,
    cluster: Cluster,
    traffic: Traffic,
    *,
    nbytes: float,
    target_us: float,
    detour: float = 0.02,
    seed: int = 0,
) -> Paths:
    """Paths whose busiest link is as little busy as a search finds; short paths are preferred.

    Data passes switches, NICs and ranks; it passes other devices only where the cluster's devices forward.

    Args:
        collective: The collective.
        cluster: The cluster.
        traffic: Its traffic, from `traffic_of`.
        nbytes: The size in bytes, > 0.
        target_us: The time of the busiest link at which the search ends, > 0.
        detour: The price of time on an idle link, relative to time on the busiest link.
        seed: The seed of the search.

    Returns:
        One path per chunk.

    Raises:
        Infeasible: Some ranks have no way to others.
    """
    device = np.array(collective.ranks, np.int32)
    relays = (cluster.node_kind != DEVICE) | cluster.devices_forward
    relays[device] = True
    rate = cluster.link_gb_per_s * 1e3 * target_us
    size = traffic.share * nbytes
    try:
        ptr, link, worst = _native.route_items(
            num_nodes=cluster.num_nodes,
            src=cluster.link_src,
            dst=cluster.link_dst,
            use_ptr=np.arange(cluster.num_links + 1),
            use=np.arange(cluster.num_links, dtype=np.int32),
            relays=relays,
            base=detour * (float(size.mean()) / rate + cluster.link_alpha_us / target_us),
            rate=rate,
            open=np.zeros(cluster.num_links),
            from_node=device[traffic.src],
            to_node=device[traffic.dst],
            size=size,
            target=1 + 1e-6,
            sharpness=SHARPNESS,
            sweeps=SWEEPS,
            walk=WALK,
            seed=seed,
        )
    except ValueError:
        raise Infeasible(f"flow: some ranks have no way to others on {cluster.name} over ranks and switches") from None
    return Paths(ptr=ptr, link=link, worst_us=worst * target_us)


def gather(
    collective: Collective,
    cluster: Cluster,
    traffic: Traffic,
    *,
    nbytes: float,
    target_us: float,
    pieces: int = 1,
    turns: int = 3,
    detour: float = 0.02,
    seed: int = 0,
) -> Paths:
    """Paths of at most `turns` hops, chosen so that chunks share messages: a message pays the alphas of its links once.

    In each turn a chunk stays where it is or takes a hop; chunks of one hop and turn travel together. The two-step and
    three-step all-to-alls are of this form.

    Args:
        collective: The collective.
        cluster: The cluster.
        traffic: Its traffic, from `traffic_of`.
        nbytes: The size in bytes, > 0.
        target_us: The time of the busiest link at which the search ends, > 0.
        pieces: The result is for the collective `refined` into so many pieces, which follow one another.
        turns: The most hops of a path, >= 1.
        detour: The price of time on an idle link, relative to time on the busiest link.
        seed: The seed of the search.

    Returns:
        One path per piece of a chunk.

    Raises:
        Infeasible: Some ranks are more than `turns` hops from others.
    """
    size = traffic.share * nbytes
    hops = Hops.of(cluster, devices=collective.ranks, nbytes=float(size.mean()))
    ranks, count = collective.num_ranks, hops.num_hops
    rank_of = np.full(cluster.num_devices, -1, np.int32)
    rank_of[list(collective.ranks)] = np.arange(ranks)
    turn = np.arange(turns, dtype=np.int32)[:, None] * ranks
    stay = np.arange(ranks, dtype=np.int32)
    src = np.concatenate([rank_of[hops.src], stay]) + turn
    dst = np.concatenate([rank_of[hops.dst], stay]) + turn + ranks
    use_ptr = np.concatenate([hops.link_ptr, np.full(ranks, hops.link_ptr[-1])])
    lengths = np.tile(np.diff(use_ptr), turns)
    hop_cost = (hops.alpha_us + float(size.mean()) / (hops.gb_per_s * 1e3)) / target_us
    base = detour * np.concatenate([hop_cost, np.zeros(ranks)])
    try:
        ptr, arc, worst = _native.route_items(
            num_nodes=ranks * (turns + 1),
            src=src.ravel().astype(np.int32),
            dst=dst.ravel().astype(np.int32),
            use_ptr=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            use=np.tile(hops.link, turns),
            relays=np.ones(ranks * (turns + 1), np.bool_),
            base=np.tile(base, turns),
            rate=cluster.link_gb_per_s * 1e3 * target_us,
            open=pieces * cluster.link_alpha_us / target_us,
            from_node=traffic.src,
            to_node=traffic.dst + ranks * turns,
            size=size,
            target=1 + 1e-6,
            sharpness=GATHER_SHARPNESS,
            sweeps=SWEEPS,
            walk=0,
            seed=seed,
        )
    except ValueError:
        raise Infeasible(f"flow: some ranks are more than {turns} hops from others on {cluster.name}") from None
    rows = np.repeat(np.arange(len(traffic.chunk)), pieces)
    ptr, arc = take_rows(ptr, arc, rows)
    which, hop = np.divmod(arc, count + ranks)
    item = np.repeat(np.arange(len(rows)), np.diff(ptr))
    away = hop < count
    link_ptr, link = take_rows(hops.link_ptr, hops.link, hop[away].astype(np.intp))
    per_item = np.bincount(item[away], np.diff(link_ptr), len(rows)).astype(np.int64)
    turn_and_piece = which[away].astype(np.int64) * pieces + item[away] % pieces
    return Paths(
        ptr=np.concatenate([[0], np.cumsum(per_item)]),
        link=link,
        worst_us=worst * target_us,
        turn=np.repeat(turn_and_piece, np.diff(link_ptr)),
    )
