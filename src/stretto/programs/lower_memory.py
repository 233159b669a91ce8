# SPDX-License-Identifier: Apache-2.0
"""The place of every chunk: input, output or scratch.

A slot starts at its input place. Once written, it lives at its output place, or in scratch when the rank does
not keep it. In place, a cell can be the input place of one chunk and the output place of another; then the
second chunk stays in scratch until the first is no longer needed, and is copied at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..collectives import Collective
from .ir import Program
from .lower_blocks import COPY, NONE, READ, Blocks, History
from .lowered import INPUT, OUTPUT, SCRATCH

BUFFER = 1 << 40
"""A place is ``buffer * BUFFER + offset``; consecutive offsets are consecutive places."""


@dataclass(frozen=True, kw_only=True)
class BufferLayout:
    """Buffer positions as places, for the first of `instances` copies of the program.

    Every block of `block` positions is followed by those of the other instances, so instance i is found
    ``i * block`` further on, and runs inside a block stay runs.
    """

    collective: Collective
    instances: int = 1

    @property
    def block(self) -> int:
        """The number of neighbouring positions that stay together: a shard, where the buffers are made of shards."""
        c = self.collective
        lengths = np.concatenate([np.diff(c.in_ptr), np.diff(c.out_ptr), np.abs(c.place), [c.num_chunks]])
        return c.chunks if not np.any(lengths % c.chunks) else 1

    def offsets(self, position: NDArray[np.int64]) -> NDArray[np.int64]:
        """The offsets in the finer buffer that positions of the collective's buffer get."""
        block = self.block
        return position // block * (block * self.instances) + position % block

    def places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The place of every input and of every output; in place, a shared cell has one place under both names."""
        c = self.collective
        sides = []
        for ptr in (c.in_ptr, c.out_ptr):
            rank = np.repeat(np.arange(c.num_ranks), np.diff(ptr))
            sides.append((rank, np.arange(ptr[-1]) - ptr[rank]))
        (in_rank, in_at), (out_rank, out_at) = sides
        in_place = INPUT * BUFFER + self.offsets(in_at)
        out_place = OUTPUT * BUFFER + self.offsets(out_at)
        if c.in_place:
            inputs, outputs = np.diff(c.in_ptr), np.diff(c.out_ptr)
            named_out = outputs >= inputs  # the larger buffer gives its name, so that its runs stay whole
            other = in_at + c.place[in_rank]
            shared = named_out[in_rank] & (other >= 0) & (other < outputs[in_rank])
            in_place = np.where(shared, OUTPUT * BUFFER + self.offsets(np.maximum(other, 0)), in_place)
            other = out_at - c.place[out_rank]
            shared = ~named_out[out_rank] & (other >= 0) & (other < inputs[out_rank])
            out_place = np.where(shared, INPUT * BUFFER + self.offsets(np.maximum(other, 0)), out_place)
        return in_place, out_place

    def finer(self) -> Collective:
        """The collective with every chunk cut into `instances`."""
        if self.instances == 1:
            return self.collective
        c, k, block = self.collective, self.instances, self.block

        def cut(values: NDArray[Any], ptr: NDArray[np.int64]) -> NDArray[Any]:
            """Repeat what belongs to buffer positions in the order of the finer buffer."""
            rows = [values[a:b].reshape(-1, 1, block) for a, b in pairwise(ptr.tolist())]
            return np.concatenate([np.repeat(row, k, axis=1).ravel() for row in rows])

        def chunks(values: NDArray[np.int32], ptr: NDArray[np.int64]) -> NDArray[np.int32]:
            fine = cut(self.offsets(values.astype(np.int64)), ptr).reshape(-1, k, block)
            return (fine + np.arange(k)[:, None] * block).ravel().astype(np.int32)

        share = cut(c.chunk_share, np.array([0, c.num_chunks]))
        whole = np.round(1 / share)
        return replace(
            c,
            num_chunks=c.num_chunks * k,
            chunks=c.chunks * k,
            in_ptr=c.in_ptr * k,
            in_chunk=chunks(c.in_chunk, c.in_ptr),
            in_part=cut(c.in_part, c.in_ptr),
            out_ptr=c.out_ptr * k,
            out_chunk=chunks(c.out_chunk, c.out_ptr),
            out_set=cut(c.out_set, c.out_ptr),
            # 1/n cut in k becomes exactly 1/(n*k), as if the collective had been made with k times as many chunks.
            chunk_share=np.where(1 / whole == share, 1 / (whole * k), share / k),
            place=c.place * k,
        )


@dataclass(kw_only=True)
class Scratch:
    """One rank's scratch buffer: dead cells are used again, first those that the same threadblock touched last."""

    reuse: bool
    lag: int
    """The number of dead cells (per cell asked for) that stay unused before another threadblock takes one: it would
    have to wait for the threadblock that touched the cell last."""
    size: int = 0
    dead: dict[int, int] = field(default_factory=dict)
    by_block: dict[int, dict[int, None]] = field(default_factory=dict)

    def take(self, count: int, block: int) -> int:
        """Take `count` neighbouring cells for a threadblock; return the first offset."""
        start = _run(self.by_block.get(block, {}), count)
        if start < 0 and len(self.dead) > self.lag * count:
            start = _run(self.dead, count)
        if start < 0:
            start = self.size
            self.size += count
            return start
        for offset in range(start, start + count):
            del self.by_block[self.dead.pop(offset)][offset]
        return start

    def free(self, offset: int, block: int) -> None:
        """Mark a cell as dead; threadblock `block` touched it last."""
        if self.reuse:
            self.dead[offset] = block
            self.by_block.setdefault(block, {})[offset] = None


def _run(cells: dict[int, int] | dict[int, None], count: int) -> int:
    """The first offset of a run of `count` dead neighbours, preferring cells that died early, or -1."""
    if len(cells) < count:
        return -1
    if count == 1:
        return next(iter(cells))
    return next((o for o in cells if all(o + i in cells for i in range(1, count))), -1)


@dataclass(frozen=True, kw_only=True)
class PlaceAssignment:
    """The places each row (transfer, chunk) reads and writes, and the local copies that are needed."""

    read: NDArray[np.int64]
    """The place at the source that is sent."""
    operand: NDArray[np.int64]
    """The place at the destination that a reduction adds to; -1 for copies."""
    write: NDArray[np.int64]
    """The place at the destination that is written; -1 when nothing is stored."""
    scratch: NDArray[np.int64]
    copies: list[tuple[int, int, int]]
    """Local copies (rank, from place, to place), in the order in which they must be done."""


def assign_memory(
    program: Program,
    position: NDArray[np.int64],
    history: History,
    blocks: Blocks,
    layout: BufferLayout,
    *,
    reuse: bool,
    staged: bool,
) -> PlaceAssignment:
    """Walk the linear order and give every version of every slot its place.

    Args:
        program: The program.
        position: The position of each event, from `event_order`.
        history: The uses of each slot, from `slot_history`.
        blocks: The threadblocks, from `assign_blocks`.
        layout: The places of inputs and outputs.
        reuse: Whether dead scratch cells are used again.
        staged: Whether an output is never written where another chunk's input is read, even after that read.

    Returns:
        The places that each row reads and writes, the size of scratch, and the copies.
    """
    walk = _Walk(program, position, history, blocks, layout, reuse=reuse, staged=staged)
    forwarded = set(blocks.fused_send[blocks.fused_send >= 0].tolist())
    for event in np.argsort(position).tolist():
        if event >= program.num_transfers:
            walk.receive(event - program.num_transfers, event)
        elif event not in forwarded:  # The fused instruction that receives the chunks sends them.
            walk.send(event)
    return PlaceAssignment(
        read=np.array(walk.read, np.int64),
        operand=np.array(walk.operand, np.int64),
        write=np.array(walk.write, np.int64),
        copies=walk.late_copies(),
        scratch=np.array([s.size for s in walk.scratch], np.int64),
    )


class _Walk:
    """The places of slots while the linear order is walked: each chunk that is sent is read, and then written."""

    def __init__(
        self,
        program: Program,
        position: NDArray[np.int64],
        history: History,
        blocks: Blocks,
        layout: BufferLayout,
        *,
        reuse: bool,
        staged: bool,
    ) -> None:
        c = self.collective = program.collective
        in_place, out_place = layout.places()
        in_slot = (np.repeat(np.arange(c.num_ranks), np.diff(c.in_ptr)) * c.num_chunks + c.in_chunk).tolist()
        out_slot = (np.repeat(np.arange(c.num_ranks), np.diff(c.out_ptr)) * c.num_chunks + c.out_chunk).tolist()
        self.where: dict[int, int] = dict(zip(in_slot, in_place.tolist(), strict=True))
        self.home: dict[int, int] = dict(zip(out_slot, out_place.tolist(), strict=True))
        self.start = dict(self.where)
        self.written = set(history.write_slot.tolist())
        self.delayed: set[int] = set()
        """Slots that wait in scratch for their output place."""
        self.blocked = _blocked(c, self.start, self.home, self.written, history, staged)
        num_blocks = np.bincount(blocks.rank, minlength=c.num_ranks).tolist()
        self.scratch = [Scratch(reuse=reuse, lag=n) for n in num_blocks]
        rows = len(history.owner)
        self.read, self.operand, self.write = [-1] * rows, [-1] * rows, [-1] * rows
        self.ptr, self.when = program.chunk_ptr.tolist(), position.tolist()
        self.src, self.dst, self.reduces = program.src.tolist(), program.dst.tolist(), program.reduce.tolist()
        self.read_slot, self.write_slot = history.read_slot.tolist(), history.write_slot.tolist()
        self.after_read, self.after_write = history.after_read.tolist(), history.after_write.tolist()
        self.next_reader = history.next_reader.tolist()
        self.send_block = blocks.send_block[blocks.connection].tolist()
        self.recv_block = blocks.recv_block[blocks.connection].tolist()
        self.fused, self.unstored = blocks.fused_send.tolist(), blocks.unstored.tolist()

    def send(self, t: int) -> None:
        """Transfer t reads its chunks."""
        rank, block = self.src[t], self.send_block[t]
        for row in range(self.ptr[t], self.ptr[t + 1]):
            slot = self.read_slot[row]
            self.read[row] = self.where[slot]
            if self._dead_after(self.after_read[row], slot):
                self._release(rank, self.where[slot], block)

    def receive(self, t: int, event: int) -> None:
        """Transfer t writes its chunks, at the event with this number."""
        rank, block, where = self.dst[t], self.recv_block[t], self.where
        new: list[int] = []
        for row in range(self.ptr[t], self.ptr[t + 1]):
            slot = self.write_slot[row]
            if self.reduces[t]:
                self.operand[row] = where[slot]
            if self.unstored[t]:
                self._release(rank, where[slot], block)
                continue
            place = self.home.get(slot, -1)
            if slot in self.delayed or (place >= 0 and self.blocked(rank, slot, place, self.when[event])):
                self.delayed.add(slot)
                place = -1
            if place < 0 and self.reduces[t] and where[slot] >= SCRATCH * BUFFER:
                place = where[slot]
            if place < 0:
                new.append(row)
            else:
                self.write[row] = where[slot] = place
        if new:
            place = SCRATCH * BUFFER + self.scratch[rank].take(len(new), block)
            for row in new:
                self.write[row] = where[self.write_slot[row]] = place
                place += 1
        self._forward(t, rank, block)

    def _forward(self, t: int, rank: int, block: int) -> None:
        """What transfer t has written is read by the transfer that is fused with it, and released if it is dead."""
        send = self.fused[t]
        for row in range(self.ptr[t], self.ptr[t + 1]):
            slot, then = self.write_slot[row], self.after_write[row]
            if send >= 0:
                sent = row - self.ptr[t] + self.ptr[send]
                self.read[sent] = self.write[row]
                if then == READ and self.next_reader[row] == send:
                    then = self.after_read[sent]
            if self.write[row] >= 0 and self._dead_after(then, slot):
                self._release(rank, self.write[row], block)

    def _dead_after(self, then: int, slot: int) -> bool:
        return then == COPY or (then == NONE and slot not in self.home)

    def _release(self, rank: int, place: int, block: int) -> None:
        if place >= SCRATCH * BUFFER:
            self.scratch[rank].free(place - SCRATCH * BUFFER, block)

    def late_copies(self) -> list[tuple[int, int, int]]:
        """Copies to output places at the end: of inputs that no transfer wrote to, and of outputs kept in scratch."""
        c = self.collective
        held = {(slot // c.num_chunks, place) for slot, place in self.start.items()} if c.in_place else set()
        rescued, final = [], []
        for slot, place in self.home.items():
            rank = slot // c.num_chunks
            origin = self.where.get(slot, -1)
            if origin < 0 or origin == place or not (slot in self.delayed or slot not in self.written):
                continue
            if slot not in self.delayed and (rank, place) in held:  # two inputs may change places: go through scratch
                spare = SCRATCH * BUFFER + self.scratch[rank].size
                self.scratch[rank].size += 1
                rescued.append((rank, origin, spare))
                origin = spare
            final.append((rank, origin, place))
        return rescued + final


def _blocked(
    c: Collective,
    start: dict[int, int],
    home: dict[int, int],
    written: set[int],
    history: History,
    staged: bool,
) -> Callable[[int, int, int, int], bool]:
    """Whether an output place still holds another chunk's input that is needed (only ever in place)."""
    if not c.in_place:
        return lambda rank, slot, place, now: False
    holder = {(slot // c.num_chunks, place): slot for slot, place in start.items()}

    def blocked(rank: int, slot: int, place: int, now: int) -> bool:
        other = holder.get((rank, place), slot)
        if other == slot:
            return False
        moves = other not in written and home.get(other, place) != place
        return moves or history.input_read_until.get(other, -1) > (-1 if staged else now)

    return blocked
