# SPDX-License-Identifier: Apache-2.0
"""From programs to instruction streams: right, safe, fused, small, and with no wait too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from stretto import (
    AllGather,
    AllReduce,
    Collective,
    InvalidInput,
    Program,
    ReduceScatter,
    VerificationError,
)
from stretto.programs import Lowered
from stretto.programs.interpret import check
from stretto.programs.lower import lower
from stretto.programs.lower_memory import BufferLayout
from stretto.programs.lowered import (
    COPY,
    INPUT,
    NOP,
    OPS,
    OUTPUT,
    RECEIVES,
    SCRATCH,
    SENDS,
    WRITES_DST,
)

Build = Callable[..., Program]


def ops_of(lowered: Lowered, rank: int) -> list[str]:
    """The instructions of a rank, threadblock by threadblock."""
    blocks = np.flatnonzero(lowered.tb_rank == rank)
    return [OPS[o] for b in blocks for o in lowered.op[lowered.tb_ptr[b] : lowered.tb_ptr[b + 1]]]


def prove(lowered: Lowered) -> int:
    """Verify and run on data at every depth that is promised; the least depth."""
    report = lowered.verify()
    for depth in range(report.fifo_depth, 4):
        check(lowered, fifo_depth=depth, seed=depth)
    return report.fifo_depth


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("k", [1, 3])
def test_every_program_lowers_to_streams_that_do_the_same(build: Build, maker: str, k: int, in_place: bool) -> None:
    for n in (2, 4):
        program = build(maker, n, k=k, in_place=in_place)
        assert prove(lower(program)) <= program.verify().fifo_depth
        prove(lower(program, fifo_depth=2))
        prove(lower(program, fuse=False, reuse_scratch=False))


@pytest.mark.parametrize("instances", [2, 3])
def test_instances_cut_every_chunk_and_stay_right(build: Build, maker: str, instances: int) -> None:
    program = build(maker, 4, k=2)
    single, several = lower(program), lower(program, instances=instances)
    prove(several)
    assert several.num_channels == instances * single.num_channels
    assert several.num_instructions >= instances * single.num_instructions
    assert several.collective.num_chunks == instances * program.collective.num_chunks


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), in_place=st.booleans(), instances=st.integers(1, 2))
def test_random_programs_lower_to_streams_that_do_the_same(
    make_random_program: Callable[[int], Program], seed: int, in_place: bool, instances: int
) -> None:
    program = make_random_program(seed)
    program = program.replace(collective=replace(program.collective, in_place=in_place))
    prove(lower(program, instances=instances))


def test_a_fused_ring_is_what_is_known_from_public_files(build: Build) -> None:
    lowered = lower(build("ring_all_reduce", 4, in_place=True), fifo_depth=2)
    for rank in range(4):
        assert ops_of(lowered, rank) == ["s", "rrs", "rrs", "rrcs", "rcs", "rcs", "r"]
    assert lowered.scratch.tolist() == [0, 0, 0, 0]
    assert len(lowered.tb_rank) == 4


def test_only_one_rank_of_a_ring_stays_unfused_when_fifos_hold_one_message(build: Build) -> None:
    lowered = lower(build("ring_all_gather", 6, in_place=True))
    assert lowered.verify().fifo_depth == 1
    fused = [r for r in range(6) if "rcs" in ops_of(lowered, r)]
    assert len(fused) == 5


def test_without_fusing_there_are_only_plain_instructions(build: Build, maker: str) -> None:
    lowered = lower(build(maker, 4), fuse=False)
    assert {OPS[o] for o in lowered.op} <= {"s", "r", "rrc", "cpy", "nop"}


def test_inputs_are_never_written(build: Build, maker: str) -> None:
    for in_place in (False, True):
        lowered = lower(build(maker, 4, k=2, in_place=in_place))
        c = lowered.collective
        owner = np.repeat(lowered.tb_rank, np.diff(lowered.tb_ptr))
        for k in np.flatnonzero(WRITES_DST[lowered.op] & (lowered.dst_buf == INPUT)):
            rank = owner[k]
            assert c.in_place
            position = lowered.dst_off[k] + c.place[rank]
            assert position >= 0
            assert position + lowered.count[k] <= len(c.outputs(rank))


def test_out_of_place_the_first_sum_reads_the_input_and_writes_the_output(build: Build) -> None:
    lowered = lower(build("recursive_doubling_all_reduce", 2), fuse=False)
    sums = np.flatnonzero(lowered.op == OPS.index("rrc"))
    assert lowered.src_buf[sums].tolist() == [INPUT, INPUT]
    assert lowered.dst_buf[sums].tolist() == [OUTPUT, OUTPUT]


def test_the_own_shard_is_copied_only_out_of_place(build: Build) -> None:
    outside = lower(build("ring_all_gather", 4, k=3))
    inside = lower(build("ring_all_gather", 4, k=3, in_place=True))
    copies = np.flatnonzero(outside.op == COPY)
    assert len(copies) == 4
    assert outside.count[copies].tolist() == [3, 3, 3, 3]
    assert not np.any(inside.op == COPY)


def test_a_copy_stands_where_its_threadblock_would_wait_for_a_message(build: Build) -> None:
    lowered = lower(build("ring_all_gather", 4), fifo_depth=2)
    assert ops_of(lowered, 2) == ["s", "cpy", "rcs", "rcs", "r"]


def test_dead_scratch_is_used_again(build: Build) -> None:
    program = build("relay", 3, k=20)
    assert lower(program).scratch.tolist() == [0, 1, 0]
    assert lower(program, reuse_scratch=False).scratch.tolist() == [0, 20, 0]
    prove(lower(program))


def test_in_place_exchange_needs_no_scratch_when_sends_can_go_first(build: Build) -> None:
    lowered = lower(build("direct_all_to_all", 4, in_place=True))
    assert lowered.scratch.tolist() == [0, 0, 0, 0]
    assert not np.any(lowered.op == COPY)


def test_in_place_outputs_wait_in_scratch_for_inputs_that_are_still_needed() -> None:
    # Rank 1 sends its chunk for rank 0 only after it has received what goes to the same place.
    collective = replace(_swap(), in_place=True)
    program = Program.from_steps("late", collective, src=[0, 1], dst=[1, 0], chunk=[0, 1], step=[0, 1])
    held = program.replace(
        after_ptr=np.array([0, 0, 1]),
        after=np.array([0], np.int32),
        gate_ptr=np.array([0, 0, 0]),
        gate=np.zeros(0, np.int32),
    )
    lowered = lower(held)
    prove(lowered)
    assert "cpy" in ops_of(lowered, 1)
    assert lowered.scratch[1] == 1


def _swap() -> Collective:
    """Two ranks exchange one chunk, each in the place of the other."""
    one = np.ones(1, np.float64)
    return Collective(
        kind="swap",
        ranks=(0, 1),
        num_chunks=2,
        chunks=1,
        in_ptr=np.array([0, 1, 2]),
        in_chunk=np.array([0, 1], np.int32),
        in_part=np.zeros(2, np.int32),
        out_ptr=np.array([0, 1, 2]),
        out_chunk=np.array([1, 0], np.int32),
        out_set=np.full(2, -1, np.int32),
        chunk_share=np.repeat(one, 2),
        place=np.zeros(2, np.int64),
    )


@pytest.mark.parametrize("in_place", [False, True])
def test_chunks_of_one_rank_can_change_places_locally(in_place: bool) -> None:
    collective = Collective(
        kind="turn",
        ranks=(0,),
        num_chunks=3,
        chunks=1,
        in_ptr=np.array([0, 3]),
        in_chunk=np.array([0, 1, 2], np.int32),
        in_part=np.zeros(3, np.int32),
        out_ptr=np.array([0, 3]),
        out_chunk=np.array([2, 0, 1], np.int32),
        out_set=np.full(3, -1, np.int32),
        chunk_share=np.full(3, 1 / 3),
        place=np.zeros(1, np.int64),
        in_place=in_place,
    )
    nothing = np.zeros(0, np.int32)
    program = Program.from_steps("turn", collective, src=nothing, dst=nothing, chunk=nothing, step=nothing)
    lowered = lower(program)
    prove(lowered)
    assert lowered.scratch[0] == (3 if in_place else 0)


def test_neighbours_travel_in_one_instruction_and_others_in_several(build: Build) -> None:
    together = lower(build("recursive_doubling_all_gather", 4, k=2, in_place=True))
    assert set(together.count[SENDS[together.op]].tolist()) == {2, 4}
    apart = lower(build("strided_halving_doubling", 4, in_place=True))
    assert set(apart.count[SENDS[apart.op]].tolist()) == {1}
    assert np.sum(SENDS[apart.op]) > build("strided_halving_doubling", 4).num_transfers


def test_no_instruction_moves_more_chunks_than_the_runtimes_allow(build: Build) -> None:
    lowered = lower(build("ring_all_gather", 2, k=200, in_place=True))
    assert sorted(lowered.count[SENDS[lowered.op]].tolist()) == [58, 58, 71, 71, 71, 71]
    prove(lowered)


def test_waits_are_between_threadblocks_and_never_on_nops(build: Build, maker: str) -> None:
    lowered = lower(build(maker, 8 if maker == "strided_halving_doubling" else 4, k=2, in_place=True))
    first = np.searchsorted(lowered.tb_rank, lowered.tb_rank)
    block = np.repeat(np.arange(len(first)), np.diff(lowered.tb_ptr))
    waits = np.flatnonzero(lowered.dep_tb >= 0)
    target = first[block[waits]] + lowered.dep_tb[waits]
    assert np.all(target != block[waits])
    assert np.all(lowered.op[lowered.tb_ptr[target] + lowered.dep_step[waits]] != NOP)
    for k in np.flatnonzero(lowered.op == NOP):
        assert block[k + 1] == block[k]
        assert lowered.dep_tb[k] >= 0
        assert lowered.dep_tb[k + 1] >= 0


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("recursive_doubling_all_reduce", 4),
        ("recursive_doubling_all_gather", 8),
        ("direct_all_to_all", 3),
        ("binomial_broadcast", 6),
        ("binomial_reduce", 6),
        ("strided_halving_doubling", 4),
    ],
)
def test_every_wait_is_needed(build: Build, name: str, n: int) -> None:
    lowered = lower(build(name, n, in_place=True))
    waits = np.flatnonzero(lowered.dep_tb >= 0)
    assert len(waits)
    for k in waits:
        dep_tb, dep_step = lowered.dep_tb.copy(), lowered.dep_step.copy()
        dep_tb[k] = dep_step[k] = -1
        with pytest.raises(VerificationError):
            replace(lowered, dep_tb=dep_tb, dep_step=dep_step).verify()


def test_each_end_of_a_connection_belongs_to_one_threadblock(build: Build, maker: str) -> None:
    lowered = lower(build(maker, 4, k=2), instances=2)
    for peer in (lowered.tb_send, lowered.tb_recv):
        ends = Counter(zip(lowered.tb_rank, peer, lowered.tb_channel, strict=True))
        assert all(count == 1 for (_, p, _), count in ends.items() if p >= 0)


def test_a_rank_with_many_peers_spreads_them_over_channels(build: Build) -> None:
    lowered = lower(build("direct_all_to_all", 40))
    on_channel = Counter(zip(lowered.tb_rank, lowered.tb_channel, strict=True))
    assert max(on_channel.values()) <= 32
    assert lowered.num_channels > 1
    lowered.verify()


def test_lanes_become_channels() -> None:
    program = Program.from_steps(
        "lanes",
        AllGather(2, chunks=2),
        src=[0, 0, 1, 1],
        dst=[1, 1, 0, 0],
        chunk=[0, 1, 2, 3],
        step=0,
        lane=[0, 1, 0, 1],
    )
    lowered = lower(program)
    assert lowered.num_channels == 2
    assert sorted(lowered.tb_channel.tolist()) == [0, 0, 0, 0, 1, 1, 1, 1]
    prove(lowered)


@pytest.mark.parametrize(
    ("coarse", "fine"),
    [
        (AllGather(3, chunks=2, in_place=True), AllGather(3, chunks=8, in_place=True)),
        (ReduceScatter(3, chunks=2), ReduceScatter(3, chunks=8)),
        (AllReduce(5), AllReduce(5, chunks=20)),
    ],
)
def test_the_finer_collective_is_the_one_the_library_builds(coarse: Collective, fine: Collective) -> None:
    assert BufferLayout(collective=coarse, instances=4).finer() == fine


def test_every_kind_can_be_made_finer(build: Build, maker: str) -> None:
    coarse = build(maker, 3 if maker == "unequal_all_to_all" else 4).collective
    fine = BufferLayout(collective=coarse, instances=3).finer()
    assert fine.kind == coarse.kind
    assert fine.chunk_share.sum() == pytest.approx(coarse.chunk_share.sum())
    sizes: Callable[[NDArray[np.int64]], list[int]] = lambda ptr: np.diff(ptr).tolist()  # noqa: E731
    assert sizes(fine.in_ptr) == [3 * size for size in sizes(coarse.in_ptr)]


def test_instances_of_runs_that_cross_shards_keep_their_offsets(build: Build) -> None:
    # Public tools shift such runs as if they were one chunk, and send the wrong data.
    lowered = lower(build("recursive_doubling_all_gather", 8, in_place=True), instances=2)
    prove(lowered)
    assert lowered.collective == AllGather(8, chunks=2, in_place=True)


@pytest.mark.parametrize(("first", "waits"), [(0, True), (2, False)])
def test_a_send_waits_for_an_arrival_it_does_not_need_but_not_for_another_ranks(first: int, waits: bool) -> None:
    # Transfer 1 (from rank 1) is told to wait for 0>1, which rank 1 sees, or for 2>0, which it does not.
    src, dst = [0, 1, 2, 0, 1, 2], [1, 2, 0, 2, 0, 1]
    program = Program.from_steps("told", AllGather(3), step=0, src=src, dst=dst, chunk=src)
    told = program.replace(after_ptr=np.array([0, 0, 1, 1, 1, 1, 1]), after=np.array([first], np.int32))
    lowered, plain = lower(told), lower(program)
    prove(lowered)
    assert (np.count_nonzero(lowered.dep_tb >= 0) > np.count_nonzero(plain.dep_tb >= 0)) == waits


def test_a_program_without_transfers_is_only_copies() -> None:
    nothing = np.zeros(0, np.int32)
    program = Program.from_steps("alone", AllGather(1), src=nothing, dst=nothing, chunk=nothing, step=nothing)
    lowered = lower(program)
    assert ops_of(lowered, 0) == ["cpy"]
    prove(lowered)


def test_wrong_programs_are_refused(build: Build) -> None:
    program = build("ring_all_gather", 4)
    wrong = program.replace(chunk=np.roll(program.chunk, 1))
    with pytest.raises(VerificationError):
        lower(wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"instances": 0}, "instances: must be 1..256, not 0"),
        ({"instances": 1000}, "instances: must be 1..256, not 1000"),
        ({"fifo_depth": 3}, "fifo_depth: must be 1 or 2, not 3"),
    ],
)
def test_wrong_options_are_named(build: Build, options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        lower(build("ring_all_gather", 2), **options)  # type: ignore[arg-type]


def test_scratch_and_messages_are_consistent_everywhere(build: Build, maker: str) -> None:
    lowered = lower(build(maker, 4, k=2))
    owner = np.repeat(lowered.tb_rank, np.diff(lowered.tb_ptr))
    for k in np.flatnonzero(WRITES_DST[lowered.op] & (lowered.dst_buf == SCRATCH)):
        assert lowered.dst_off[k] + lowered.count[k] <= lowered.scratch[owner[k]]
    assert lowered.count[SENDS[lowered.op]].sum() == lowered.count[RECEIVES[lowered.op]].sum()
