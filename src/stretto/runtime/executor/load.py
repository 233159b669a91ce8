# SPDX-License-Identifier: Apache-2.0
"""What the C++ executor needs to know of a lowered program: one rank's streams, with every chunk named."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...collectives import COLLECTIVES, Collective
from ...errors import InvalidInput
from ...programs.lowered import NOP, READS_SRC, RECEIVES, REDUCE, SEND, SENDS, WRITES_DST, Lowered
from ...programs.streams import BufferMap, InstructionStreams

KINDS = ("custom", *COLLECTIVES)
"""Numbered as the C++ side names them in messages."""
SHARED_MEMORY = -1

Value = tuple[int, int, int]
"""(chunk, bit mask of the parts in it, the instruction that wrote it or -1)"""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What every instruction moves: its chunks, whether the result is complete, and which value a send reads."""

    chunks: list[tuple[int, ...]]
    complete: list[bool]
    read: list[tuple[tuple[int, int], ...]]
    """(location, who wrote it) of every chunk that a send reads from memory"""


def contents(x: Lowered, streams: InstructionStreams) -> Contents:
    """Run the (verified) streams once on symbols."""
    memory = BufferMap.of(x)
    held = _inputs(x.collective, memory)
    wanted = _wanted(x.collective)
    count = x.num_instructions
    chunks: list[tuple[int, ...]] = [()] * count
    complete = [False] * count
    read: list[tuple[tuple[int, int], ...]] = [()] * count
    messages: dict[int, list[Value]] = {}
    source = memory.locate(streams.rank, x.src_buf, x.src_off).tolist()
    target = memory.locate(streams.rank, x.dst_buf, x.dst_off).tolist()
    op, size = x.op.tolist(), x.count.tolist()
    receives, sends = RECEIVES[x.op].tolist(), SENDS[x.op].tolist()
    reads, writes = READS_SRC[x.op].tolist(), WRITES_DST[x.op].tolist()
    pop, push = streams.pop.tolist(), streams.push.tolist()
    for k in streams.order():
        if op[k] == NOP:
            continue
        cells = range(size[k])
        values = messages.pop(pop[k]) if receives[k] else []
        if reads[k]:
            mine = [held[source[k] + i] for i in cells]
            if op[k] == REDUCE:
                values = [held[target[k] + i] for i in cells]
            if op[k] == SEND:
                read[k] = tuple((source[k] + i, mine[i][2]) for i in cells)
            if values:
                values = [(a[0], a[1] | b[1], k) for a, b in zip(values, mine, strict=True)]
                complete[k] = all(v[1] in wanted.get(v[0], ()) for v in values)
            else:
                values = mine
        chunks[k] = tuple(v[0] for v in values)
        if writes[k]:
            for i in cells:
                held[target[k] + i] = (values[i][0], values[i][1], k)
        if sends[k]:
            messages[push[k]] = values
    return Contents(chunks=chunks, complete=complete, read=read)


def _inputs(c: Collective, memory: BufferMap) -> dict[int, Value]:
    held: dict[int, Value] = {}
    for rank in range(c.num_ranks):
        base = int(memory.base[rank, 0])
        for at in range(int(c.in_ptr[rank]), int(c.in_ptr[rank + 1])):
            held[base + at - int(c.in_ptr[rank])] = (int(c.in_chunk[at]), 1 << int(c.in_part[at]), -1)
    return held


def _wanted(c: Collective) -> dict[int, set[int]]:
    wanted: dict[int, set[int]] = defaultdict(set)
    for at, chunk in enumerate(c.out_chunk.tolist()):
        parts = c.parts_of(at)
        if len(parts) > 1:
            wanted[chunk].add(sum(1 << part for part in parts))
    return wanted


def signature(x: Lowered, ranks: Sequence[int], message_bytes: int) -> int:
    """Equal on ranks that run the same streams in the same way.

    Args:
        x: The program.
        ranks: The job's ranks that run it.
        message_bytes: The size of a slice.

    Returns:
        A number of 64 bits.
    """
    state = hashlib.sha256(f"{x.collective.digest} {tuple(ranks)} {message_bytes} {x.protocol}".encode())
    for key in ("scratch", "tb_rank", "tb_send", "tb_recv", "tb_channel", "tb_ptr", "op", "src_buf", "src_off",
                "dst_buf", "dst_off", "count", "dep_tb", "dep_step"):  # fmt: skip
        state.update(np.ascontiguousarray(getattr(x, key)).tobytes())
    return int.from_bytes(state.digest()[:8], "little")


def sized_by_call(x: Lowered) -> bool:
    """Whether sizes may come with each call: every piece goes straight from its rank to where it belongs."""
    straight = not x.scratch.any() and bool(np.all(x.dep_tb < 0)) and x.max_chunks == 1
    return x.collective.kind == "all_to_all_v" and x.collective.chunks == 1 and not x.collective.in_place and straight


def tables(
    x: Lowered,
    *,
    me: int,
    ranks: Sequence[int],
    communicator: int,
    wire: Callable[[int, int, int], int],
    message_bytes: int,
    first_number: int = 0,
    by_call: bool = False,
) -> dict[str, Any]:
    """One rank's part of a program for the C++ side.

    `me` is the rank inside the program, `ranks` says which rank of the job each of its ranks is, and
    ``wire(src, dst, channel)`` which network carries a connection, or `SHARED_MEMORY`. With `by_call` the sizes of
    the pieces come with each call, and chunks are numbered as this rank's inputs, then its outputs.

    Args:
        x: The program.
        me: This rank's number in it.
        ranks: The job's rank of each of its ranks.
        communicator: The number that the ranks agree on.
        wire: The network of a connection from its source, destination and channel.
        message_bytes: The size of a slice.
        first_number: The number of the first work.
        by_call: Whether sizes come with each call.

    Returns:
        Arrays by name, as `_executor` takes them.
    """
    c = x.collective
    streams = InstructionStreams.of(x)
    inside = contents(x, streams)
    blocks = np.flatnonzero(x.tb_rank == me)
    connections, ends = _connections(x, me, ranks, wire)
    pieces: list[tuple[int, ...]] = []
    code: list[tuple[int, ...]] = []
    rows: list[tuple[int, ...]] = []
    casts, members = _casts(x, inside, blocks.tolist(), ends, connections)
    for b in blocks.tolist():
        entry = len(code)
        for k in range(int(x.tb_ptr[b]), int(x.tb_ptr[b + 1])):
            begin = len(pieces)
            src_buf, src_off, dst_buf, dst_off = (int(a[k]) for a in (x.src_buf, x.src_off, x.dst_buf, x.dst_off))
            for i, chunk in enumerate(inside.chunks[k]):
                pieces.append((src_buf, src_off + i, dst_buf, dst_off + i, chunk))
            wait = int(x.dep_tb[k]), int(x.dep_step[k])
            code.append((int(x.op[k]), inside.complete[k], *wait, casts.get(k, -1), begin, len(pieces)))
        rows.append((ends[0].get(b, -1), ends[1].get(b, -1), entry, len(code)))
    given, taken = c.inputs(me).tolist(), c.outputs(me).tolist()
    chunks, shares = (1, []) if by_call else _shards(c)
    if by_call:
        own = {chunk: len(given) + at for at, chunk in enumerate(taken)} | {chunk: at for at, chunk in enumerate(given)}
        pieces = [(*where, own[chunk]) for *where, chunk in pieces]
        given, taken = list(range(len(given))), list(range(len(given), len(given) + len(taken)))
    parts = {len(c.parts_of(at)) for at in range(len(c.out_chunk))}
    return {
        "comm": communicator,
        "ranks": list(ranks),
        "signature": signature(x, ranks, message_bytes),
        "by_call": by_call,
        "first": first_number,
        "kind": KINDS.index(c.kind) if c.kind in KINDS else 0,
        "name": x.name,
        "chunks_per_shard": chunks,
        "num_chunks": len(own) if by_call else c.num_chunks,
        "scratch": int(x.scratch[me]),
        "max_count": x.max_chunks,
        "message_bytes": message_bytes,
        "in_place": c.in_place,
        "combining": c.combining,
        "place": int(c.place[me]),
        "parts": parts.pop() if len(parts) == 1 and not c.part_sets else 0,
        "in_chunk": given,
        "out_chunk": taken,
        "shard_share": shares,
        "blocks": _table(rows),
        "code": _table(code),
        "pieces": _table(pieces),
        "connections": _table(connections),
        "casts": _table(members),
    }


def _table(rows: Sequence[tuple[int, ...]]) -> NDArray[np.int32]:
    return np.array(rows, np.int32).ravel()


def _connections(
    x: Lowered, me: int, ranks: Sequence[int], wire: Callable[[int, int, int], int]
) -> tuple[list[tuple[int, ...]], tuple[dict[int, int], dict[int, int]]]:
    """(sends?, peer, wire, number, messages per slice) of this rank's connections; and per threadblock its two."""
    found: list[tuple[int, ...]] = []
    ends: tuple[dict[int, int], dict[int, int]] = ({}, {})
    for out in (True, False):
        peers, moves = (x.tb_send, SENDS) if out else (x.tb_recv, RECEIVES)
        mine: list[tuple[int, int, int, int]] = []
        for b in np.flatnonzero((x.tb_rank == me) & (peers >= 0)).tolist():
            messages = int(moves[x.op[x.tb_ptr[b] : x.tb_ptr[b + 1]]].sum())
            if messages:
                mine.append((int(peers[b]), int(x.tb_channel[b]), b, messages))
        numbers: dict[tuple[int, int], int] = defaultdict(int)
        for at, (peer, channel, b, messages) in enumerate(sorted(mine)):
            carrier = wire(me, peer, channel) if out else wire(peer, me, channel)
            number = numbers[peer, min(carrier, 0)]
            numbers[peer, min(carrier, 0)] += 1
            found.append((int(out), ranks[peer], carrier, number, messages))
            ends[0 if out else 1][b] = at
    return found, ends


def _casts(
    x: Lowered,
    inside: Contents,
    blocks: list[int],
    ends: tuple[dict[int, int], dict[int, int]],
    connections: list[tuple[int, ...]],
) -> tuple[dict[int, int], list[tuple[int, ...]]]:
    """Sends of one value to several peers of the host: (instruction -> cast), and (cast, connection, order) rows."""
    same: dict[tuple[tuple[int, int], ...], dict[int, tuple[int, int]]] = defaultdict(dict)
    for b in blocks:
        order = 0
        for k in range(int(x.tb_ptr[b]), int(x.tb_ptr[b + 1])):
            if not SENDS[x.op[k]]:
                continue
            out = ends[0][b]
            if x.op[k] == SEND and connections[out][2] == SHARED_MEMORY:
                same[inside.read[k]].setdefault(out, (k, order))
            order += 1
    casts: dict[int, int] = {}
    members: list[tuple[int, ...]] = []
    number = 0
    for group in same.values():
        if len(group) < 2:
            continue
        for out, (k, order) in group.items():
            casts[k] = number
            members.append((number, out, order))
        number += 1
    return casts, members


def _shards(c: Collective) -> tuple[int, list[float]]:
    """How many neighbouring chunks share a whole number of elements, and each shard's share of `count`."""
    if c.num_chunks % c.chunks == 0:
        by_shard = c.chunk_share.reshape(-1, c.chunks)
        if np.allclose(by_shard, by_shard[:, :1], rtol=1e-12):
            return c.chunks, (by_shard[:, 0] * c.chunks).tolist()
    if np.any(c.chunk_share <= 0):
        raise InvalidInput("chunk_share: must be > 0")
    return 1, c.chunk_share.tolist()
