# SPDX-License-Identifier: Apache-2.0
"""Merges programs that run at the same time into one program, so that their contention for links is simulated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from ...collectives import Collective
from ...collectives.conditions import ALL_PARTS
from ...programs import Program
from ...simulator.network import routes_of


@dataclass(frozen=True, kw_only=True)
class ConcurrentProgram:
    """One of the programs: its bytes, and the channels that its routes may use (None: any)."""

    program: Program
    nbytes: float
    channels: tuple[str, ...] | None = None


def together(parts: Sequence[ConcurrentProgram], cluster: Cluster) -> tuple[Program, float]:
    """All programs side by side as one program, and the number of bytes to simulate it with.

    The programs may share ranks; each keeps its own chunks, connections and channels. The result verifies as all of
    their collectives at once.
    """
    whole = max(part.nbytes for part in parts)
    devices = sorted({device for part in parts for device in part.program.collective.ranks})
    rank_of = {device: rank for rank, device in enumerate(devices)}
    ranks = [np.array([rank_of[d] for d in part.program.collective.ranks], np.int32) for part in parts]
    programs = [part.program for part in parts]
    transfers = _before(p.num_transfers for p in programs)
    disjoint = sum(map(len, ranks)) == len(devices)
    lanes = [0] * len(parts) if disjoint else _before(p.num_lanes for p in programs)
    chunks = _before(p.collective.num_chunks for p in programs)
    routed = [_routed(part, cluster) for part in parts]
    routes = _before(len(table) for _, table in routed)
    rows = list(enumerate(programs))

    def rows_of(name: str, shift: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        ends = [getattr(p, f"{name}_ptr") for p in programs]
        starts = _before(int(end[-1]) for end in ends)
        ptr = np.concatenate([[0], *(end[1:] + starts[at] for at, end in enumerate(ends))])
        return ptr, np.concatenate([getattr(p, name) + np.int32(shift[at]) for at, p in rows])

    chunk_ptr, chunk = rows_of("chunk", chunks)
    after_ptr, after = rows_of("after", transfers)
    gate_ptr, gate = rows_of("gate", transfers)
    program = Program(
        name=" | ".join(dict.fromkeys(p.name for p in programs)),
        collective=_collective(parts, ranks, chunks, tuple(devices), whole),
        src=np.concatenate([ranks[at][p.src] for at, p in rows]),
        dst=np.concatenate([ranks[at][p.dst] for at, p in rows]),
        reduce=np.concatenate([p.reduce for p in programs]),
        chunk_ptr=chunk_ptr, chunk=chunk, after_ptr=after_ptr, after=after, gate_ptr=gate_ptr, gate=gate,
        lane=np.concatenate([p.lane + np.int16(lanes[at]) for at, p in rows]),
        route=np.concatenate(
            [np.where(route >= 0, route + routes[at], -1).astype(np.int32) for at, (route, _) in enumerate(routed)]
        ),
        routes=tuple(route for _, table in routed for route in table),
        routes_digest=cluster.digest if any(table for _, table in routed) else "",
    )  # fmt: skip
    return program, whole


def _routed(part: ConcurrentProgram, cluster: Cluster) -> tuple[NDArray[np.int32], tuple[tuple[int, ...], ...]]:
    p = part.program
    if part.channels is None:
        return p.route, p.routes
    # Routes that the program names belong to the cluster that it was made for, which may have other channels.
    plain = p.replace(route=np.full(p.num_transfers, -1, np.int32), routes=(), routes_digest="") if p.routes else p
    _, route, ptr, links = routes_of(plain, cluster, part.channels, nbytes=part.nbytes)
    return route, tuple(tuple(links[x:y].tolist()) for x, y in pairwise(ptr))


def _collective(
    parts: Sequence[ConcurrentProgram],
    ranks: Sequence[NDArray[np.int32]],
    chunks: Sequence[int],
    devices: tuple[int, ...],
    whole: float,
) -> Collective:
    each = [part.program.collective for part in parts]
    sets = _before(len(c.part_sets) for c in each)

    def side(name: str, beside: str) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32]]:
        owner, chunk, extra = [], [], []
        for at, c in enumerate(each):
            ptr = getattr(c, f"{name}_ptr")
            owner.append(np.repeat(ranks[at], np.diff(ptr)))
            chunk.append(getattr(c, f"{name}_chunk") + np.int32(chunks[at]))
            values = getattr(c, beside)
            shifted = np.where(values == ALL_PARTS, ALL_PARTS, values + sets[at])
            extra.append((shifted if beside == "out_set" else values).astype(np.int32))
        who = np.concatenate(owner)
        order = np.argsort(who, kind="stable")
        ptr = np.searchsorted(who[order], np.arange(len(devices) + 1)).astype(np.int64)
        return ptr, np.concatenate(chunk)[order], np.concatenate(extra)[order]

    in_ptr, in_chunk, in_part = side("in", "in_part")
    out_ptr, out_chunk, out_set = side("out", "out_set")
    kinds = list(dict.fromkeys(c.kind for c in each))
    return Collective(
        kind=kinds[0] if len(each) == 1 else f"{len(each)} x {'+'.join(kinds)}", ranks=devices,
        num_chunks=sum(c.num_chunks for c in each), chunks=1, in_ptr=in_ptr, in_chunk=in_chunk, in_part=in_part,
        out_ptr=out_ptr, out_chunk=out_chunk, out_set=out_set,
        chunk_share=np.concatenate([c.chunk_share * (p.nbytes / whole) for c, p in zip(each, parts, strict=True)]),
        place=np.zeros(len(devices), np.int64), part_sets=tuple(s for c in each for s in c.part_sets),
    )  # fmt: skip


def _before(sizes: Iterable[int]) -> list[int]:
    """The start of each part when the parts lie one behind the other."""
    total, found = 0, []
    for size in sizes:
        found.append(total)
        total += size
    return found
