# SPDX-License-Identifier: Apache-2.0
"""Running streams on data: right answers, and clear words for everything that goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import AllGather, AllReduce, Collective, InvalidInput, Program, VerificationError
from stretto.programs import Lowered
from stretto.programs.interpret import check, expected_outputs, interpret, random_inputs
from stretto.programs.lower import lower
from stretto.programs.lowered import BUFFERS, OPS

Build = Callable[..., Program]
Row = tuple[str, str, int, str, int, int, int, int]
"""op, src buffer and offset, dst buffer and offset, count, dependency"""


def streams(collective: Collective, blocks: list[tuple[int, int, int, list[Row]]], scratch: int = 0) -> Lowered:
    """Streams by hand: (rank, send, recv, rows) for each threadblock, all on channel 0."""
    rows = [row for *_, block in blocks for row in block]
    columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(8)]
    return Lowered(
        name="hand",
        collective=collective,
        scratch=np.full(collective.num_ranks, scratch, np.int32),
        tb_rank=np.array([b[0] for b in blocks], np.int32),
        tb_send=np.array([b[1] for b in blocks], np.int32),
        tb_recv=np.array([b[2] for b in blocks], np.int32),
        tb_channel=np.zeros(len(blocks), np.int32),
        tb_ptr=np.concatenate([[0], np.cumsum([len(b[3]) for b in blocks])]),
        op=np.array([OPS.index(str(o)) for o in columns[0]], np.uint8),
        src_buf=np.array([BUFFERS.index(str(b)) for b in columns[1]], np.int8),
        src_off=np.array(columns[2], np.int32),
        dst_buf=np.array([BUFFERS.index(str(b)) for b in columns[3]], np.int8),
        dst_off=np.array(columns[4], np.int32),
        count=np.array(columns[5], np.int32),
        dep_tb=np.array(columns[6], np.int32),
        dep_step=np.array(columns[7], np.int32),
    )


def send(off: int, count: int = 1, buffer: str = "o") -> Row:
    return ("s", buffer, off, "o", 0, count, -1, -1)


def receive(off: int, count: int = 1, buffer: str = "o") -> Row:
    return ("r", "o", 0, buffer, off, count, -1, -1)


PAIR = AllGather(2, in_place=True)


def test_an_exchange_by_hand_gives_both_ranks_both_shards() -> None:
    pair = streams(PAIR, [(0, 1, 1, [send(0), receive(1)]), (1, 0, 0, [send(1), receive(0)])])
    a, b = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    outputs = interpret(pair, [[a], [b]])
    assert [[p.tolist() for p in row] for row in outputs] == [[[1, 2], [3, 4]]] * 2
    pair.verify()


@pytest.mark.parametrize(("op", "want"), [("sum", 9.0), ("prod", 24.0), ("max", 4.0), ("min", 2.0)])
def test_every_operation_reduces(build: Build, op: str, want: float) -> None:
    lowered = lower(build("ring_all_reduce", 3))
    values = [[np.array([v])] * 3 for v in (2.0, 3.0, 4.0)]
    outputs = interpret(lowered, values, op=op)
    assert [[float(p[0]) for p in row] for row in outputs] == [[want] * 3] * 3


def test_local_reduction_adds_to_the_destination() -> None:
    alone = AllReduce(2, chunks=1, in_place=True)
    rows: list[Row] = [send(0), receive(0, buffer="s"), ("re", "s", 0, "o", 0, 1, -1, -1)]
    both = streams(alone, [(0, 1, 1, rows), (1, 0, 0, rows)], scratch=1)
    check(both)
    both.verify()


def test_data_and_interleaving_follow_the_seed(build: Build) -> None:
    collective = build("ring_all_reduce", 4).collective
    first, again, other = (random_inputs(collective, seed=s) for s in (7, 7, 8))
    assert np.array_equal(np.array(first), np.array(again))
    assert not np.array_equal(np.array(first), np.array(other))


def test_chunks_of_unequal_size_hold_unequal_data(build: Build) -> None:
    program = build("unequal_all_to_all", 3)
    sizes = {len(piece) for row in random_inputs(program.collective) for piece in row}
    assert len(sizes) > 1
    check(lower(program))


def test_what_the_collective_asks_for_is_computed_from_its_conditions() -> None:
    collective = AllReduce(3, chunks=1)
    inputs = [[np.array([float(v)])] for v in (1, 2, 4)]
    assert expected_outputs(collective, inputs)[2][0].tolist() == [7.0]


def test_deadlock_names_who_waits_for_what() -> None:
    waits: Row = ("r", "o", 0, "o", 1, 1, 1, 0)
    stuck = streams(
        PAIR,
        [(0, -1, 1, [waits]), (0, 1, -1, [("s", "o", 0, "o", 0, 1, 0, 0)]), (1, 0, 0, [receive(0), send(1)])],
    )
    with pytest.raises(VerificationError) as error:
        interpret(stuck)
    text = str(error.value)
    assert "deadlock with FIFO depth 2" in text
    assert "rank 0 tb 0 step 0 (r) waits for tb 1 step 0" in text
    assert "rank 1 tb 0 step 0 (r) waits for a message from rank 0 on channel 0" in text


def test_a_fused_ring_deadlocks_with_one_slot_and_runs_with_two(build: Build) -> None:
    ring = lower(build("ring_all_gather", 4), fifo_depth=2)
    check(ring, fifo_depth=2)
    with pytest.raises(VerificationError, match=r"FIFO depth 1: rank 0 tb 0 step \d \(rcs\) waits for room"):
        check(ring, fifo_depth=1)


def test_reading_what_nobody_wrote_shows_in_the_result() -> None:
    rows: list[Row] = [send(0, buffer="s"), receive(1)]
    wrong = streams(PAIR, [(0, 1, 1, rows), (1, 0, 0, [send(1), receive(0)])], scratch=1)
    with pytest.raises(VerificationError, match=r"rank 1 o\[0\] \(chunk 0\) was computed from memory nobody"):
        check(wrong)


def test_wrong_data_names_rank_and_position() -> None:
    wrong = streams(PAIR, [(0, 1, 1, [send(0), receive(0)]), (1, 0, 0, [send(1), receive(0)])])
    with pytest.raises(VerificationError, match=r"rank 0 o\[0\] \(chunk 0\) is .*, not "):
        check(wrong)


def test_messages_of_different_length_are_named() -> None:
    two = AllGather(2, chunks=2, in_place=True)
    wrong = streams(two, [(0, 1, -1, [send(0, 2)]), (1, -1, 0, [receive(0, 1)])])
    with pytest.raises(VerificationError, match=r"rank 1 tb 0 step 0 \(r\) receives 1 chunks but 2 were sent"):
        interpret(wrong)


def test_messages_nobody_receives_are_named() -> None:
    wrong = streams(PAIR, [(0, 1, -1, [send(0)]), (1, 0, -1, [])])
    with pytest.raises(VerificationError, match="1 messages from rank 0 to 1 on channel 0 are never received"):
        interpret(wrong)


def test_offsets_outside_a_buffer_are_named() -> None:
    wrong = streams(PAIR, [(0, 1, -1, [send(5)]), (1, -1, 0, [receive(0)])])
    with pytest.raises(VerificationError, match=r"rank 0 tb 0 step 0 \(s\) uses o\[5\.\.5\], but rank 0 has 2"):
        interpret(wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"op": "avg"}, "unknown op 'avg'; choose from: sum, prod, max, min"),
        ({"fifo_depth": 0}, "fifo_depth: must be >= 1, not 0"),
        ({"chunk_elements": 0}, "chunk_elements: must be >= 1, not 0"),
        ({"inputs": []}, "inputs: must be 2 buffers, one per rank, not 0"),
        ({"inputs": [[], []]}, r"inputs\[0\]: must hold 1 chunks, not 0"),
    ],
)
def test_wrong_arguments_are_named(build: Build, options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        interpret(lower(build("ring_all_gather", 2)), **options)  # type: ignore[arg-type]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 30), drop=st.integers(0, 1 << 30))
def test_what_the_verifier_passes_runs_right_in_every_order(
    make_random_program: Callable[[int], Program], seed: int, drop: int
) -> None:
    """Take a wait away: whatever the verifier still calls right must be right in any interleaving."""
    lowered = lower(make_random_program(seed))
    waits = np.flatnonzero(lowered.dep_tb >= 0)
    if len(waits):
        dep_tb = lowered.dep_tb.copy()
        dep_tb[waits[drop % len(waits)]] = -1
        lowered = replace(lowered, dep_tb=dep_tb)
    try:
        depth = lowered.verify().fifo_depth
    except VerificationError:
        return
    for order in range(5):
        check(lowered, fifo_depth=depth, seed=order)
