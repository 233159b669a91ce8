# SPDX-License-Identifier: Apache-2.0
"""Threadblocks: which connections share one, on which channel, and which receives are fused with a send."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .ir import Program
from .lower_order import connections

MAX_BLOCKS_PER_CHANNEL = 32
NONE, READ, COPY, REDUCE = range(4)


@dataclass(frozen=True, kw_only=True)
class History:
    """The uses of each slot in the linear order; one row per (transfer, chunk), as in `Program.chunk`."""

    owner: NDArray[np.int64]
    """The transfer of the row."""
    read_slot: NDArray[np.int64]
    write_slot: NDArray[np.int64]
    writer: NDArray[np.int64]
    """The transfer that wrote what the row reads at its source; -1 where that is the rank's input."""
    after_read: NDArray[np.int8]
    """The next use of the slot that the row reads (NONE, READ, COPY or REDUCE)."""
    after_write: NDArray[np.int8]
    """The next use of the slot that the row writes."""
    next_reader: NDArray[np.int64]
    """The transfer whose read is the next use of the slot that the row writes; -1 where the next use is no read."""
    input_read_until: dict[int, int]
    """For slots that are read before they are written: the position of the last read of their input."""


def slot_history(program: Program, position: NDArray[np.int64]) -> History:
    """Follow every slot through the linear order `position` (see `event_order`)."""
    count, chunks = program.num_transfers, program.collective.num_chunks
    owner = np.repeat(np.arange(count, dtype=np.int64), np.diff(program.chunk_ptr))
    rows = len(owner)
    read_slot = program.src[owner].astype(np.int64) * chunks + program.chunk
    write_slot = program.dst[owner].astype(np.int64) * chunks + program.chunk
    slot = np.concatenate([read_slot, write_slot])
    time = np.concatenate([position[owner], position[count + owner]])
    writes = np.where(program.reduce[owner], REDUCE, COPY)
    kind = np.concatenate([np.full(rows, READ), writes]).astype(np.int8)
    order = np.lexsort((time, slot))
    slot, time, kind = slot[order], time[order], kind[order]
    by = np.concatenate([owner, owner])[order]

    index = np.arange(2 * rows)
    first = np.searchsorted(slot, slot)
    last_write = np.maximum.accumulate(np.where(kind == READ, -1, index))
    before = np.append(-1, last_write)[:-1]  # the last write strictly before
    fresh = before < first
    following = np.where(np.append(slot, -1)[1:] == slot, np.append(kind, NONE)[1:], NONE).astype(np.int8)
    reader = np.where(following == READ, np.append(by, -1)[1:], -1)

    def back(values: NDArray[np.generic]) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
        out = np.empty_like(values)
        out[order] = values
        return out[:rows], out[rows:]

    uses_input = np.flatnonzero(fresh & (kind != COPY))
    after_read, after_write = back(following)
    return History(
        owner=owner,
        read_slot=read_slot,
        write_slot=write_slot,
        writer=back(np.where(fresh, -1, by[before]))[0].astype(np.int64),
        after_read=after_read.astype(np.int8),
        after_write=after_write.astype(np.int8),
        next_reader=back(reader)[1].astype(np.int64),
        input_read_until=dict(zip(slot[uses_input].tolist(), time[uses_input].tolist(), strict=True)),
    )


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Threadblocks (numbered over all ranks, sorted by rank) and the fused pairs."""

    rank: NDArray[np.int64]
    send: NDArray[np.int64]
    recv: NDArray[np.int64]
    channel: NDArray[np.int64]
    connection: NDArray[np.int64]
    """The connection of each transfer."""
    send_block: NDArray[np.int64]
    """The threadblock that sends, for each connection."""
    recv_block: NDArray[np.int64]
    fused_send: NDArray[np.int64]
    """For each transfer, the transfer that forwards it in the same instruction, or -1."""
    unstored: NDArray[np.bool_]
    """Whether each transfer is received, added, sent on and never stored (instruction rrs)."""


def assign_blocks(program: Program, position: NDArray[np.int64], history: History, *, depth: int, fuse: bool) -> Blocks:
    """Pair receive and send connections of a lane so that most forwards stay inside one threadblock.

    Args:
        program: The program.
        position: The position of each event, from `event_order`.
        history: The uses of each slot, from `slot_history`.
        depth: The FIFO depth, 1 or 2.
        fuse: Whether receives may be fused with the sends that forward their data.

    Returns:
        The threadblocks, and the fused pairs.
    """
    connection, first = connections(program)
    forward = _forwards(program, history)
    partner = _pair(program, history, connection, first, forward)
    fused = np.full(program.num_transfers, -1, np.int64)
    if fuse:
        fused = _fuse(program, position, connection, partner, forward, depth)
    src, dst = program.src[first].astype(np.int64), program.dst[first].astype(np.int64)
    lane = program.lane[first].astype(np.int64)
    channel = _channels(src, dst, lane, partner)

    # One row per threadblock: a receive connection with its partner, or a send connection without one.
    paired = np.flatnonzero(partner >= 0)
    alone = np.ones(len(first), np.bool_)
    alone[partner[paired]] = False
    receives, sends = np.arange(len(first)), np.flatnonzero(alone)
    recv = np.concatenate([receives, np.full(len(sends), -1)])
    send = np.concatenate([partner, sends])
    rank = np.concatenate([dst, src[sends]])
    own = np.concatenate([channel, channel[sends]])
    peer_out = np.where(send >= 0, dst[send], -1)
    peer_in = np.where(recv >= 0, src[recv], -1)
    order = np.lexsort((peer_in, peer_out, own, rank))
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    send_block, recv_block = np.full(len(first), -1), np.full(len(first), -1)
    recv_block[receives] = number[: len(first)]
    send_block[send[send >= 0]] = number[send >= 0]
    return Blocks(
        rank=rank[order],
        send=peer_out[order],
        recv=peer_in[order],
        channel=own[order],
        connection=connection,
        send_block=send_block,
        recv_block=recv_block,
        fused_send=fused,
        unstored=_unstored(program, history, fused),
    )


def _forwards(program: Program, history: History) -> NDArray[np.int64]:
    """For each transfer, the transfer whose chunks it sends on, all of them and nothing else, or -1."""
    count = program.num_transfers
    sizes = np.diff(program.chunk_ptr)
    source = history.writer[program.chunk_ptr[:-1]]
    same = np.ones(count, np.bool_)
    same[history.owner[history.writer != source[history.owner]]] = False
    source = np.where(same & (source >= 0), source, -1)
    source = np.where(sizes[source] == sizes, source, -1)
    shift = (program.chunk_ptr[:-1][source] - program.chunk_ptr[:-1])[history.owner]
    forwards = source[history.owner] >= 0
    row = np.where(forwards, np.arange(len(history.owner)) + shift, 0)
    differs = (program.chunk[row] != program.chunk) & forwards
    source[history.owner[differs]] = -1
    return source


def _pair(
    program: Program,
    history: History,
    connection: NDArray[np.int64],
    first: NDArray[np.int64],
    forward: NDArray[np.int64],
) -> NDArray[np.int64]:
    """For each receive connection the send connection that shares its threadblock, or -1.

    The pair with the most forwards wins. Connections without forwards are joined when at least half the messages of
    the shorter one wait for the other: one stream then loses no overlap, and saves the flags between two.
    """
    num = len(first)
    sends = np.flatnonzero(forward >= 0)
    fusable = connection[forward[sends]] * num + connection[sends]
    reads = history.writer >= 0
    waits = np.sort(history.writer[reads] * program.num_transfers + history.owner[reads])
    waits = waits[np.diff(waits, prepend=-1) > 0]
    follows = connection[waits // program.num_transfers] * num + connection[waits % program.num_transfers]
    at = np.repeat(np.arange(program.num_transfers), np.diff(program.gate_ptr))
    local = program.src[program.gate] == program.dst[at]
    gates = connection[at[local]] * num + connection[program.gate[local]]
    keys, which = np.unique(np.concatenate([fusable, follows, gates]), return_inverse=True)
    forwards = np.bincount(which[: len(fusable)], minlength=len(keys))
    related = np.bincount(which[len(fusable) :], minlength=len(keys))
    receive, send = keys // num, keys % num
    length = np.bincount(connection, minlength=num)
    useful = (forwards > 0) | (2 * related >= np.minimum(length[receive], length[send]))
    useful &= program.lane[first[receive]] == program.lane[first[send]]
    useful &= program.dst[first[receive]] == program.src[first[send]]
    back = program.src[first[receive]] == program.dst[first[send]]
    partner = np.full(num, -1, np.int64)
    taken = np.zeros(num, np.bool_)
    for k in np.lexsort((keys, ~back, -related, -forwards)).tolist():
        if useful[k] and partner[receive[k]] < 0 and not taken[send[k]]:
            partner[receive[k]] = send[k]
            taken[send[k]] = True
    for chain in _chains(partner):
        visits: dict[int, int] = {}
        for before, c in zip([-1, *chain[:-1]], chain, strict=True):
            rank = int(program.dst[first[c]])
            if visits.get(rank, 0) >= MAX_BLOCKS_PER_CHANNEL - 1:  # no channel could hold the whole chain
                partner[before] = -1
                visits.clear()
            visits[rank] = visits.get(rank, 0) + 1
    return partner


def _fuse(
    program: Program,
    position: NDArray[np.int64],
    connection: NDArray[np.int64],
    partner: NDArray[np.int64],
    forward: NDArray[np.int64],
    depth: int,
) -> NDArray[np.int64]:
    """Fuse a forward when everything else that its send waits for precedes the receive in the linear order."""
    count = program.num_transfers
    fused = np.full(count, -1, np.int64)
    candidates = np.flatnonzero(forward >= 0)
    candidates = candidates[partner[connection[forward[candidates]]] == connection[candidates]]
    starts: list[int] = position[:count].tolist()
    finishes: list[int] = position[count:].tolist()
    queue = _queue_predecessors(connection, depth)
    previous, room = queue[0].tolist(), queue[1].tolist()
    ptr, after = program.after_ptr.tolist(), program.after.tolist()
    for u in candidates[np.argsort(position[candidates], kind="stable")].tolist():
        t = int(forward[u])
        limit = finishes[t]
        if fused[t] >= 0 or (previous[u] >= 0 and starts[previous[u]] > limit):
            continue
        if room[u] >= 0 and room[u] != t and finishes[room[u]] > limit:
            continue
        if any(finishes[a] > limit for a in after[ptr[u] : ptr[u + 1]]):
            continue
        fused[t] = u
        starts[u] = limit
    return fused


def _queue_predecessors(connection: NDArray[np.int64], depth: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For each transfer, the previous one on its connection, and the one that must have left the FIFO first."""
    order = np.argsort(connection, kind="stable")
    result = []
    for distance in (1, depth):
        before = np.full(len(connection), -1, np.int64)
        same = connection[order[distance:]] == connection[order[:-distance]]
        before[order[distance:][same]] = order[:-distance][same]
        result.append(before)
    return result[0], result[1]


def _unstored(program: Program, history: History, fused: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each transfer is a fused reduction whose sum only its send reads (instruction `rrs`)."""
    c = program.collective
    rank = np.repeat(np.arange(c.num_ranks, dtype=np.int64), np.diff(c.out_ptr))
    outputs = rank * c.num_chunks + c.out_chunk
    result = (fused >= 0) & program.reduce
    rows = np.flatnonzero(result[history.owner])
    send = fused[history.owner[rows]]
    sent = rows - program.chunk_ptr[history.owner[rows]] + program.chunk_ptr[send]
    then = history.after_read[sent]
    last = np.isin(history.write_slot[rows], outputs)
    needed = (history.next_reader[rows] != send) | (then == READ) | (then == REDUCE) | ((then == NONE) & last)
    result[history.owner[rows[needed]]] = False
    return result


def _channels(
    src: NDArray[np.int64], dst: NDArray[np.int64], lane: NDArray[np.int64], partner: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The channel of each connection: its lane, unless a rank would have too many threadblocks on one channel."""
    at_rank = np.concatenate([dst, src]) * (lane.max(initial=0) + 1) + np.concatenate([lane, lane])
    if np.bincount(at_rank).max(initial=0) <= MAX_BLOCKS_PER_CHANNEL:
        return lane
    used: dict[tuple[int, int], int] = {}
    owned: set[tuple[int, int, int]] = set()
    channel = lane.copy()
    for chain in _chains(partner):
        # A threadblock per receive; a send needs its own only where it begins the chain.
        ends = [int(dst[c]) for c in chain] + ([int(src[chain[0]])] if partner[chain[-1]] < 0 else [])
        need = {rank: ends.count(rank) for rank in set(ends)}
        at = int(lane[chain[0]])
        while any(used.get((rank, at), 0) + n > MAX_BLOCKS_PER_CHANNEL for rank, n in need.items()) or any(
            (int(src[c]), int(dst[c]), at) in owned for c in chain
        ):
            at += 1
        for rank, n in need.items():
            used[rank, at] = used.get((rank, at), 0) + n
        owned.update((int(src[c]), int(dst[c]), at) for c in chain)
        channel[chain] = at
    return channel


def _chains(partner: NDArray[np.int64]) -> list[list[int]]:
    """Chains of connections that are joined by shared threadblocks; a chain must be on one channel."""
    follower: list[int] = partner.tolist()
    has_leader = set(follower)
    seen = [False] * len(follower)
    chains = []
    for head in [c for c in range(len(follower)) if c not in has_leader] + list(range(len(follower))):
        chain = []
        at = head
        while at >= 0 and not seen[at]:
            seen[at] = True
            chain.append(at)
            at = follower[at]
        if chain:
            chains.append(chain)
    return chains
