# SPDX-License-Identifier: Apache-2.0
"""Run instruction streams on NumPy data as the ranks would: bounded FIFOs, flags, any interleaving."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import reduce as fold
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..collectives import Collective
from ..errors import InvalidInput, VerificationError, unknown
from ..units import check_seed
from .lowered import (
    BUFFERS,
    INPUT,
    NOP,
    OPS,
    OUTPUT,
    READS_SRC,
    RECEIVES,
    REDUCE,
    SENDS,
    WRITES_DST,
    Lowered,
)

Piece = NDArray[Any]
Buffers = Sequence[Sequence[Piece]]
"""``buffers[rank][position]`` is the data of one chunk."""

OPERATIONS: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
POISON = np.array(np.nan)
READS_LIST, WRITES_LIST, RECEIVES_LIST, SENDS_LIST = (
    table.tolist() for table in (READS_SRC, WRITES_DST, RECEIVES, SENDS)
)
SHOWN_WAITS = 6


def interpret(
    lowered: Lowered,
    inputs: Buffers | None = None,
    *,
    fifo_depth: int = 2,
    op: str = "sum",
    seed: int = 0,
    chunk_elements: int = 3,
) -> list[list[Piece]]:
    """Run instruction streams and return what every rank's output buffer holds afterwards.

    Threadblocks run in an order drawn from `seed`, each until it must wait. Scratch and output start as NaN, so that
    a read of memory that nobody wrote shows in the result.

    Args:
        lowered: The instruction streams.
        inputs: ``inputs[rank][position]`` is the data of one chunk; `random_inputs` when not given.
        fifo_depth: How many messages a connection holds before a send waits, >= 1.
        op: The reduction: "sum", "prod", "max" or "min".
        seed: The seed of the interleaving, and of random inputs.
        chunk_elements: The elements of the smallest chunk of random inputs, >= 1.

    Returns:
        ``outputs[rank][position]``, one array per chunk.

    Raises:
        VerificationError: A deadlock, messages of different length, or messages that are never received.
        InvalidInput: An argument is out of range, or the inputs do not fit the collective.
    """
    check_seed(seed)
    if op not in OPERATIONS:
        raise unknown("op", op, OPERATIONS)
    if fifo_depth < 1:
        raise InvalidInput(f"fifo_depth: must be >= 1, not {fifo_depth}")
    if inputs is None:
        inputs = random_inputs(lowered.collective, op=op, seed=seed, chunk_elements=chunk_elements)
    machine = _Machine(lowered, inputs, fifo_depth, OPERATIONS[op])
    machine.run(np.random.default_rng(seed))
    return machine.outputs()


def check(lowered: Lowered, *, fifo_depth: int = 2, op: str = "sum", seed: int = 0, chunk_elements: int = 3) -> None:
    """Run instruction streams on random data and compare with what the collective asks for.

    Args:
        lowered: The instruction streams.
        fifo_depth: How many messages a connection holds before a send waits, >= 1.
        op: The reduction: "sum", "prod", "max" or "min".
        seed: The seed of data and interleaving.
        chunk_elements: The elements of the smallest chunk, >= 1.

    Raises:
        VerificationError: An output is wrong (the message names rank and position), or the run failed.
    """
    c = lowered.collective
    inputs = random_inputs(c, op=op, seed=seed, chunk_elements=chunk_elements)
    outputs = interpret(lowered, inputs, fifo_depth=fifo_depth, op=op, seed=seed, chunk_elements=chunk_elements)
    for rank, (got, want) in enumerate(zip(outputs, expected_outputs(c, inputs, op=op), strict=True)):
        for position, (a, b) in enumerate(zip(got, want, strict=True)):
            if a.shape != b.shape or not (a == b).all():
                why = "was computed from memory nobody wrote" if np.isnan(a).any() else f"is {a}, not {b}"
                chunk = c.outputs(rank)[position]
                raise VerificationError(f"{lowered.name}: rank {rank} o[{position}] (chunk {chunk}) {why}")


def random_inputs(
    collective: Collective, *, op: str = "sum", seed: int = 0, chunk_elements: int = 3
) -> list[list[Piece]]:
    """Random data for every input: whole numbers as floats, so that any order of adding gives the same sum.

    Args:
        collective: The collective.
        op: The reduction; products get small factors.
        seed: The seed of the data.
        chunk_elements: The elements of the smallest chunk, >= 1; others are larger by their share.

    Returns:
        ``inputs[rank][position]``; ranks that hold the same part of a chunk hold equal data.

    Raises:
        InvalidInput: The seed or the number of elements is out of range.
    """
    check_seed(seed)
    c = collective
    if chunk_elements < 1:
        raise InvalidInput(f"chunk_elements: must be >= 1, not {chunk_elements}")
    rng = np.random.default_rng(seed)
    share = c.chunk_share / c.chunk_share.min(initial=1.0)
    elements = np.clip(np.round(share * chunk_elements), 1, 64 * chunk_elements).astype(int).tolist()
    parts: dict[tuple[int, int], Piece] = {}
    result: list[list[Piece]] = []
    for rank in range(c.num_ranks):
        row = []
        for at in range(int(c.in_ptr[rank]), int(c.in_ptr[rank + 1])):
            key = (int(c.in_chunk[at]), int(c.in_part[at]))
            if key not in parts:
                size = elements[key[0]]
                if op == "prod":
                    parts[key] = rng.choice([-1.0, 1.0, 2.0], size)
                else:
                    parts[key] = rng.integers(-(1 << 20), 1 << 20, size).astype(float)
            row.append(parts[key])
        result.append(row)
    return result


def expected_outputs(collective: Collective, inputs: Buffers, *, op: str = "sum") -> list[list[Piece]]:
    """The outputs that the collective asks for, computed directly from the inputs.

    Args:
        collective: The collective.
        inputs: ``inputs[rank][position]``, one array per chunk.
        op: The reduction: "sum", "prod", "max" or "min".

    Returns:
        ``outputs[rank][position]``, one array per chunk.
    """
    c = collective
    held = {}
    for rank in range(c.num_ranks):
        for position, at in enumerate(range(int(c.in_ptr[rank]), int(c.in_ptr[rank + 1]))):
            held[int(c.in_chunk[at]), int(c.in_part[at])] = inputs[rank][position]
    function = OPERATIONS[op]
    done: dict[tuple[int, int], Piece] = {}
    result = []
    for rank in range(c.num_ranks):
        row = []
        for at in range(int(c.out_ptr[rank]), int(c.out_ptr[rank + 1])):
            key = int(c.out_chunk[at]), int(c.out_set[at])
            if key not in done:
                done[key] = fold(function, [held[key[0], part] for part in c.parts_of(at)])
            row.append(done[key])
        result.append(row)
    return result


class _Machine:
    """The state of all ranks. Memory holds one array per chunk; arrays are never changed, only replaced."""

    def __init__(self, lowered: Lowered, inputs: Buffers, depth: int, function: np.ufunc) -> None:
        x = lowered
        self.x, self.depth, self.function = x, depth, function
        self.memory: list[Piece]
        self.cells: list[list[list[int]]]
        self.memory, self.cells = _allocate(x, inputs)
        self.first_tb: list[int] = np.searchsorted(x.tb_rank, np.arange(x.collective.num_ranks + 1)).tolist()
        self.begin, self.end = x.tb_ptr[:-1].tolist(), x.tb_ptr[1:].tolist()
        self.at = list(self.begin)
        ranks, sends, recvs = x.tb_rank.tolist(), x.tb_send.tolist(), x.tb_recv.tolist()
        channels = x.tb_channel.tolist()
        self.out_key = [(r, s, c) for r, s, c in zip(ranks, sends, channels, strict=True)]
        self.in_key = [(p, r, c) for r, p, c in zip(ranks, recvs, channels, strict=True)]
        self.fifo: dict[tuple[int, int, int], deque[list[Piece]]] = {}
        for key in self.out_key + self.in_key:
            self.fifo.setdefault(key, deque())
        self.rank: list[int] = ranks
        # Lists: reading one number of an array takes many times as long.
        self.op: list[int] = x.op.tolist()
        self.count: list[int] = x.count.tolist()
        sides = (x.src_buf, x.src_off), (x.dst_buf, x.dst_off)
        self.sides = {side: (b.tolist(), o.tolist()) for side, (b, o) in zip((INPUT, OUTPUT), sides, strict=True)}

    def run(self, rng: np.random.Generator) -> None:
        """Run every threadblock to its end, or raise."""
        x = self.x
        op, dep_tb, dep_step = self.op, x.dep_tb.tolist(), x.dep_step.tolist()
        receives, sends = RECEIVES_LIST, SENDS_LIST
        sleepers: dict[Any, list[int]] = {}
        ready = rng.permutation(len(self.begin)).tolist()
        while ready:
            tb = ready.pop()
            base = self.first_tb[self.rank[tb]]
            while self.at[tb] < self.end[tb]:
                k = self.at[tb]
                wait: Any = None
                if dep_tb[k] >= 0:
                    other = base + dep_tb[k]
                    if self.at[other] <= self.begin[other] + dep_step[k]:
                        wait = other
                if wait is None and receives[op[k]] and not self.fifo[self.in_key[tb]]:
                    wait = ("message", self.in_key[tb])
                if wait is None and sends[op[k]] and len(self.fifo[self.out_key[tb]]) >= self.depth:
                    wait = ("room", self.out_key[tb])
                if wait is not None:
                    sleepers.setdefault(wait, []).append(tb)
                    break
                self.step(tb, k)
                self.at[tb] = k + 1
                woken = sleepers.pop(tb, [])
                if receives[op[k]]:
                    woken += sleepers.pop(("room", self.in_key[tb]), [])
                if sends[op[k]]:
                    woken += sleepers.pop(("message", self.out_key[tb]), [])
                if woken:  # The next threadblock to run is drawn from all that are ready.
                    ready += woken
                    swap = int(rng.integers(len(ready)))
                    ready[swap], ready[-1] = ready[-1], ready[swap]
        stuck = [tb for tb in range(len(self.begin)) if self.at[tb] < self.end[tb]]
        if stuck:
            waits = "; ".join(self.describe_wait(tb) for tb in stuck[:SHOWN_WAITS])
            more = f"; and {len(stuck) - SHOWN_WAITS} more" if len(stuck) > SHOWN_WAITS else ""
            raise VerificationError(f"{x.name}: deadlock with FIFO depth {self.depth}: {waits}{more}")
        for (src, dst, channel), left in self.fifo.items():
            if left:
                raise VerificationError(
                    f"{x.name}: {len(left)} messages from rank {src} to {dst} on channel {channel} are never received"
                )

    def step(self, tb: int, k: int) -> None:
        """Execute instruction k of threadblock tb."""
        x, op = self.x, self.op[k]
        if op == NOP:
            return
        count = self.count[k]
        source = self.locate(tb, k, INPUT) if READS_LIST[op] else []
        target = self.locate(tb, k, OUTPUT) if WRITES_LIST[op] else []
        mine = [self.memory[cell] for cell in source]
        if RECEIVES_LIST[op]:
            value = self.fifo[self.in_key[tb]].popleft()
            if len(value) != count:
                raise VerificationError(
                    f"{x.name}: {self.name_of(tb, k)} receives {count} chunks but {len(value)} were sent"
                )
            if mine:
                value = [self.function(a, b) for a, b in zip(value, mine, strict=True)]
        elif op == REDUCE:
            value = [self.function(self.memory[cell], b) for cell, b in zip(target, mine, strict=True)]
        else:
            value = mine
        for cell, piece in zip(target, value, strict=False):
            self.memory[cell] = piece
        if SENDS_LIST[op]:
            self.fifo[self.out_key[tb]].append(value)

    def locate(self, tb: int, k: int, side: int) -> list[int]:
        """The memory cells that instruction k reads (side INPUT) or writes (side OUTPUT)."""
        x, rank = self.x, self.rank[tb]
        buffers, offsets = self.sides[side]
        buffer, low = buffers[k], offsets[k]
        cells, high = self.cells[rank][buffer], low + self.count[k]
        if low < 0 or high > len(cells):
            raise VerificationError(
                f"{x.name}: {self.name_of(tb, k)} uses {BUFFERS[buffer]}[{low}..{high - 1}], "
                f"but rank {rank} has {len(cells)} chunks there"
            )
        return cells[low:high]

    def outputs(self) -> list[list[Piece]]:
        """The contents of the output buffers, ``outputs[rank][position]``."""
        sizes = np.diff(self.x.collective.out_ptr).tolist()
        owned = [cells[OUTPUT][:size] for cells, size in zip(self.cells, sizes, strict=True)]
        return [[self.memory[cell] for cell in cells] for cells in owned]

    def name_of(self, tb: int, k: int) -> str:
        """The rank, threadblock, step and instruction as text, for messages."""
        rank = self.rank[tb]
        return f"rank {rank} tb {tb - self.first_tb[rank]} step {k - self.begin[tb]} ({OPS[self.x.op[k]]})"

    def describe_wait(self, tb: int) -> str:
        """The reason why a threadblock cannot go on, as text."""
        k, x = self.at[tb], self.x
        dep = int(x.dep_tb[k])
        other = self.first_tb[self.rank[tb]] + dep
        if dep >= 0 and self.at[other] <= self.begin[other] + int(x.dep_step[k]):
            return f"{self.name_of(tb, k)} waits for tb {dep} step {x.dep_step[k]}"
        channel = x.tb_channel[tb]
        if RECEIVES[x.op[k]] and not self.fifo[self.in_key[tb]]:
            return f"{self.name_of(tb, k)} waits for a message from rank {x.tb_recv[tb]} on channel {channel}"
        return f"{self.name_of(tb, k)} waits for room to send to rank {x.tb_send[tb]} on channel {channel}"


def _allocate(x: Lowered, inputs: Buffers) -> tuple[list[Piece], list[list[list[int]]]]:
    """Memory cells, and for each rank and buffer the cell of each offset; in place, shared cells."""
    c = x.collective
    if len(inputs) != c.num_ranks:
        raise InvalidInput(f"inputs: must be {c.num_ranks} buffers, one per rank, not {len(inputs)}")
    memory: list[Piece] = []
    cells: list[list[list[int]]] = []

    def fresh(count: int) -> list[int]:
        memory.extend([POISON] * count)
        return list(range(len(memory) - count, len(memory)))

    for rank in range(c.num_ranks):
        sizes = int(c.in_ptr[rank + 1] - c.in_ptr[rank]), int(c.out_ptr[rank + 1] - c.out_ptr[rank])
        if len(inputs[rank]) != sizes[0]:
            raise InvalidInput(f"inputs[{rank}]: must hold {sizes[0]} chunks, not {len(inputs[rank])}")
        place = int(c.place[rank])
        if c.in_place:
            low, high = min(0, place), max(sizes[1], sizes[0] + place)
            shared = fresh(high - low)
            mine = shared[place - low :]
            starts = mine[: sizes[0]]
            # Input and output are pointers into one piece of memory; offsets of either may reach to its end.
            cells.append([mine, shared[-low:], fresh(int(x.scratch[rank]))])
        else:
            starts = fresh(sizes[0])
            cells.append([starts, fresh(sizes[1]), fresh(int(x.scratch[rank]))])
        for cell, piece in zip(starts, inputs[rank], strict=True):
            memory[cell] = piece
    return memory, cells
