# SPDX-License-Identifier: Apache-2.0
"""Instruction streams against a machine that runs them in any order: what `verify` lets pass is right in every run."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import AllGather, InvalidInput, Permute, Program, VerificationError
from stretto.programs import Lowered
from stretto.programs.lowered import (
    COPY,
    NOP,
    OPS,
    READS_SRC,
    RECEIVES,
    REDUCE,
    SCRATCH,
    SENDS,
    WRITES_DST,
)

Make = Callable[[int], Program]
Value = tuple[int, Counter[int]]
COLUMNS = ("op", "src_buf", "src_off", "dst_buf", "dst_off", "count", "dep_tb", "dep_step")


class Fault(Exception):
    """What went wrong in a run."""


class Machine:
    """Memory, FIFOs and program counters, written from the definition of `Lowered` alone.

    An instruction is not atomic: others may run between any two of its reads and writes, its chunks are handled in any
    order, and it may read all of them before it writes the first, or not.
    """

    def __init__(self, x: Lowered, rng: random.Random, depth: int) -> None:
        self.x, self.c, self.rng, self.depth = x, x.collective, rng, depth
        self.memory: dict[tuple[int, int, int], Value] = {}
        self.fifo: dict[tuple[int, int, int], deque[list[Value]]] = {}
        self.at = x.tb_ptr[:-1].tolist()
        self.first = [int(np.sum(x.tb_rank < r)) for r in range(self.c.num_ranks + 1)]
        for r in range(self.c.num_ranks):
            for j, k in enumerate(range(self.c.in_ptr[r], self.c.in_ptr[r + 1])):
                self.memory[self.cell(r, 0, j)] = (int(self.c.in_chunk[k]), Counter([int(self.c.in_part[k])]))

    def cell(self, rank: int, buffer: int, offset: int) -> tuple[int, int, int]:
        """The cell that a buffer's offset means; in place, input and output are one."""
        sizes = [int(np.diff(ptr)[rank]) for ptr in (self.c.in_ptr, self.c.out_ptr)]
        low, high, shift = 0, 0, 0
        if buffer == SCRATCH:
            high = int(self.x.scratch[rank])
        elif self.c.in_place:
            place = int(self.c.place[rank])
            shift = place if buffer == 0 else 0
            low, high, buffer = min(0, place), max(sizes[1], sizes[0] + place), 1
        else:
            high = sizes[buffer]
        if offset < 0 or not low <= offset + shift < high:
            raise Fault("outside of its buffer")
        return rank, buffer, offset + shift

    def may_run(self, tb: int) -> bool:
        x, k, rank = self.x, self.at[tb], int(self.x.tb_rank[tb])
        if x.dep_tb[k] >= 0:
            other, step = self.first[rank] + int(x.dep_tb[k]), int(x.dep_step[k])
            if other >= self.first[rank + 1] or not 0 <= step < x.tb_ptr[other + 1] - x.tb_ptr[other]:
                raise Fault("waits for nothing")
            if self.at[other] <= x.tb_ptr[other] + step:
                return False
        if RECEIVES[x.op[k]] and not self.fifo.get(self.inward(tb)):
            return False
        return not SENDS[x.op[k]] or len(self.fifo.get(self.outward(tb), ())) < self.depth

    def inward(self, tb: int) -> tuple[int, int, int]:
        return int(self.x.tb_recv[tb]), int(self.x.tb_rank[tb]), int(self.x.tb_channel[tb])

    def outward(self, tb: int) -> tuple[int, int, int]:
        return int(self.x.tb_rank[tb]), int(self.x.tb_send[tb]), int(self.x.tb_channel[tb])

    def do(self, tb: int) -> Iterator[None]:
        """One instruction, which lets others run at every yield."""
        x, k, rank = self.x, self.at[tb], int(self.x.tb_rank[tb])
        op, count = int(x.op[k]), 0 if x.op[k] == NOP else int(x.count[k])
        got = self.fifo[self.inward(tb)].popleft() if RECEIVES[op] else None
        if got is not None and len(got) != count:
            raise Fault("a message of another length")
        read = [self.cell(rank, int(x.src_buf[k]), int(x.src_off[k]) + i) for i in range(count) if READS_SRC[op]]
        write = [self.cell(rank, int(x.dst_buf[k]), int(x.dst_off[k]) + i) for i in range(count) if WRITES_DST[op]]
        order = self.rng.sample(range(count), count)
        values: dict[int, Value] = {}

        def value(i: int) -> Value:
            terms = [got[i]] if got is not None else []
            terms += [self.load(cells[i]) for cells in (read, write if op == REDUCE else []) if cells]
            if len({chunk for chunk, _ in terms}) != 1:
                raise Fault("adds different chunks")
            return terms[0][0], sum((parts for _, parts in terms), Counter())

        together = self.rng.random() < 0.5
        for i in order:
            values[i] = value(i)
            yield
            if write and not together:
                self.memory[write[i]] = values[i]
        for i in order:
            if write and together:
                yield
                self.memory[write[i]] = values[i]
        if SENDS[op]:
            self.fifo.setdefault(self.outward(tb), deque()).append([values[i] for i in range(count)])
        self.at[tb] = k + 1

    def load(self, cell: tuple[int, int, int]) -> Value:
        if cell not in self.memory:
            raise Fault("reads what nobody wrote")
        return self.memory[cell]

    def run(self) -> None:
        x, c, busy = self.x, self.c, dict[int, Iterator[None]]()
        blocks = range(len(x.tb_rank))
        speed = [self.rng.random() ** 3 + 0.001 for _ in blocks]
        while True:
            able = [b for b in blocks if b in busy or (self.at[b] < x.tb_ptr[b + 1] and self.may_run(b))]
            if not able:
                break
            b = self.rng.choices(able, [speed[b] for b in able])[0]
            for _ in busy.setdefault(b, self.do(b)):
                break
            else:
                del busy[b]
        if self.at != x.tb_ptr[1:].tolist() or any(self.fifo.values()):
            raise Fault("does not come to an end")
        for r in range(c.num_ranks):
            for j, k in enumerate(range(c.out_ptr[r], c.out_ptr[r + 1])):
                if self.memory.get(self.cell(r, 1, j)) != (c.out_chunk[k], Counter(c.parts_of(k))):
                    raise Fault(f"rank {r} ends with a wrong o[{j}]")


def fault(x: Lowered, seed: int, depth: int) -> str | None:
    try:
        Machine(x, random.Random(seed), depth).run()
    except Fault as found:
        return str(found)
    return None


def lower(program: Program, rng: random.Random) -> Lowered:
    if rng.random() < 0.5 and program.collective.kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        shared = dataclasses.replace(program.collective, in_place=True)
        program = program.replace(collective=shared)
    return program.lower(
        instances=rng.choice([1, 1, 2]),
        fuse=rng.random() < 0.7,
        fifo_depth=rng.choice([1, 2]),
        reuse_scratch=rng.random() < 0.7,
    )


def mutate(x: Lowered, rng: random.Random) -> Lowered:
    """One to three random injuries to instructions, their order, dependencies, peers or memory."""
    f: dict[str, Any] = {key: getattr(x, key) for key in x.__dataclass_fields__}

    def put(key: str, at: int, value: int) -> None:
        f[key] = f[key].copy()
        f[key][at] = value

    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        count = len(f["op"])
        k, b = rng.randrange(count), rng.randrange(len(f["tb_rank"]))
        kind = rng.choice([*COLUMNS, "drop_dep", "drop_dep", "tb_send", "tb_recv", "tb_channel", "scratch", *"dsmx"])
        waits = np.flatnonzero(f["dep_tb"] >= 0).tolist()
        if kind in ("src_off", "dst_off", "count"):
            put(kind, k, max(kind == "count", int(f[kind][k]) + rng.choice([-2, -1, 1, 2])))
        elif kind in ("op", "src_buf", "dst_buf"):
            put(kind, k, rng.randrange(len(OPS) if kind == "op" else 3))
        elif kind == "dep_tb":
            put(kind, k, rng.randrange(-1, 4))
            put("dep_step", k, rng.randrange(4))
        elif kind in ("drop_dep", "dep_step"):
            if waits:
                k = rng.choice(waits)
                put("dep_tb", k, -1) if kind == "drop_dep" else put(kind, k, int(f[kind][k]) + rng.choice([-1, 1]))
        elif kind in ("tb_send", "tb_recv"):
            peers = [r for r in range(-1, x.collective.num_ranks) if r != f["tb_rank"][b]]
            put(kind, b, rng.choice(peers))
        elif kind == "tb_channel":
            put(kind, b, rng.randrange(3))
        elif kind == "scratch":
            f[kind] = np.maximum(0, f[kind] + rng.choice([-1, 1]))
        else:  # drop, say twice, move within the threadblock, exchange with the next
            order, ptr = list(range(count)), f["tb_ptr"].copy()
            tb = int(np.searchsorted(ptr, k, side="right")) - 1
            if kind == "d":
                order.pop(k)
                ptr[tb + 1 :] -= 1
            elif kind == "s":
                order.insert(k, k)
                ptr[tb + 1 :] += 1
            else:
                to = rng.randrange(ptr[tb], ptr[tb + 1]) if kind == "m" else min(k + 1, int(ptr[tb + 1]) - 1)
                order.insert(to, order.pop(k))
            f["tb_ptr"] = ptr
            f |= {key: f[key][np.array(order, np.intp)] for key in COLUMNS}
    return Lowered(**f)


@given(st.integers(0, 10**9))
@settings(max_examples=40, deadline=None)
def test_what_is_lowered_is_right_in_every_order(make_random_program: Make, make_wide_program: Make, seed: int) -> None:
    for make in (make_random_program, make_wide_program):
        lowered = lower(make(seed), random.Random(seed))
        depth = lowered.verify().fifo_depth
        assert [fault(lowered, order, depth) for order in range(3)] == [None] * 3


@given(st.integers(0, 10**9))
@settings(max_examples=200, deadline=None)
def test_a_mutation_is_caught_or_harmless_in_every_order(make_wide_program: Make, seed: int) -> None:
    rng = random.Random(seed)
    mutant = mutate(lower(make_wide_program(seed % 1000), rng), rng)
    try:
        report = mutant.verify()
    except VerificationError:
        return
    assert [fault(mutant, order, report.fifo_depth) for order in range(8)] == [None] * 8
    if report.fifo_depth == 2:
        assert fault(mutant, 0, 1) == "does not come to an end"


def test_mutants_that_fail_in_some_order_are_many_and_all_refused(make_wide_program: Make) -> None:
    failed = 0
    for seed in range(150):
        rng = random.Random(seed)
        mutant = mutate(lower(make_wide_program(seed), rng), rng)
        if any(fault(mutant, order, 2) for order in range(4)):
            failed += 1
            with pytest.raises(VerificationError):
                mutant.verify()
    assert failed > 60


def changed(x: Lowered, **fields: Any) -> Lowered:
    return dataclasses.replace(x, **fields)


def shifted_copy(count: int) -> Lowered:
    """Rank 0 spreads its chunk over scratch by copying cells onto their neighbours, then sends the last of them."""
    send = Program.from_steps("shift", Permute(2, [(0, 1)]), src=[0], dst=[1], chunk=[0], step=[0]).lower()
    at = int(np.flatnonzero(send.tb_rank == 0)[0])
    assert send.tb_ptr.tolist() == [0, 1, 2] and at == 0
    columns = {key: getattr(send, key)[[0, 0, 0, 1]].copy() for key in COLUMNS}
    columns["op"][:2] = COPY
    columns["dst_buf"][:2], columns["dst_off"][:2] = SCRATCH, [0, 1]
    columns["src_buf"][1:3], columns["src_off"][1:3] = SCRATCH, [0, count]
    columns["count"][1] = count
    return changed(send, scratch=np.array([count + 1, 0], np.int32), tb_ptr=np.array([0, 3, 4]), **columns)


def test_an_instruction_must_not_read_what_it_has_just_written() -> None:
    assert shifted_copy(1).verify().fifo_depth == 1
    assert {fault(shifted_copy(2), order, 1) for order in range(20)} > {"reads what nobody wrote"}
    with pytest.raises(VerificationError, match=r"tb 0 step 1 \(cpy\) reads from where it writes, but not in step"):
        shifted_copy(2).verify()


WILD = {
    "scratch": (-1, r"scratch\[0\]: must be >= 0, not -1"),
    "tb_rank": (7, r"tb_rank\[0\]: must be a rank 0..1, not 7"),
    "tb_send": (2, r"tb_send\[0\]: must be a rank 0..1, or -1 for none, not 2"),
    "tb_recv": (-2, r"tb_recv\[0\]: must be a rank 0..1, or -1 for none, not -2"),
    "tb_channel": (-1, r"tb_channel\[0\]: must be 0..1048575, not -1"),
    "tb_ptr": (1, "tb_ptr: must rise from 0 to 6, the number of instructions"),
    "op": (9, r"op\[0\]: must be 0..8, not 9"),
    "src_buf": (3, r"src_buf\[0\]: must be 0..2, not 3"),
    "dst_buf": (-1, r"dst_buf\[0\]: must be 0..2, not -1"),
    "count": (0, r"count\[0\]: must be >= 1, not 0"),
    "dep_tb": (-2, r"dep_tb\[0\]: must be a threadblock of the rank, or -1 for none, not -2"),
}


def pair() -> Lowered:
    return Program.from_steps("pair", AllGather(2), src=[0, 1], dst=[1, 0], chunk=[0, 1], step=[0, 0]).lower()


@pytest.mark.parametrize("field", WILD)
def test_a_number_out_of_range_is_named(field: str) -> None:
    value, message = WILD[field]
    array = getattr(pair(), field).copy()
    array[0] = value
    with pytest.raises(InvalidInput, match=message):
        changed(pair(), **{field: array})
    if field != "op":
        with pytest.raises(InvalidInput, match=rf"{field}|tb_ptr: has 5 entries, not 4"):
            changed(pair(), **{field: array[:-1]})


def test_threadblocks_and_sizes_that_make_no_sense_are_refused() -> None:
    x = pair()
    with pytest.raises(InvalidInput, match="threadblocks must be sorted by rank, not 0"):
        changed(x, tb_rank=x.tb_rank[::-1].copy(), tb_send=x.tb_send * 0 - 1, tb_recv=x.tb_recv * 0 - 1)
    with pytest.raises(InvalidInput, match="a rank cannot be its own peer"):
        changed(x, tb_send=x.tb_rank.copy())
    with pytest.raises(InvalidInput, match=r"scratch: \d+ chunks in all are more than"):
        changed(x, scratch=np.full(2, 2**31 - 1, np.int32))
    with pytest.raises(InvalidInput, match=r"count: \d+ chunks in all are more than"):
        changed(x, count=np.full(x.num_instructions, 2**31 - 1, np.int32))


def test_wild_offsets_and_waits_are_refused_by_the_verifier() -> None:
    x = pair()
    for field, message in (("src_off", "which rank 0 does not have"), ("dst_off", "which rank 0 does not have")):
        for value in (-1, 2**31 - 1, -(2**31)):
            with pytest.raises(VerificationError, match=message):
                changed(x, **{field: np.full(x.num_instructions, value, np.int32)}).verify()
    for tb, step in ((0, -1), (0, 2**31 - 1), (2**31 - 1, 0)):
        waits = {"dep_tb": np.full(6, tb, np.int32), "dep_step": np.full(6, step, np.int32)}
        with pytest.raises(VerificationError, match=f"waits for tb {tb} step {step}, which does not exist"):
            changed(x, **waits).verify()
