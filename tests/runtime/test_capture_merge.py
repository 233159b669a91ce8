# SPDX-License-Identifier: Apache-2.0
"""One workload from the recorded times of several ranks, without any process."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import InvalidInput
from stretto.runtime.capture.merge import merge
from stretto.runtime.capture.tape import (
    CallShape,
    RankRecording,
    RecordedCall,
    RecordedIteration,
    ThreadStep,
    TimedStep,
    trace_of,
)
from stretto.workload import Workload

SUM = CallShape(kind="all_reduce", group=(0, 1), channel="0", phase="step")


def one_op(
    rank: int,
    submits: list[float],
    ends: list[float],
    *,
    shape: CallShape = SUM,
    exact: bool = True,
    nbytes: int = 1000,
) -> RankRecording:
    """Iterations that compute until an op's submit (in us after their begin), wait for its end, and compute 50 us."""
    iterations = []
    for number, (submit, end) in enumerate(zip(submits, ends, strict=True)):
        begin = 10_000.0 * number
        at, done = begin + submit, begin + end
        call = RecordedCall(
            iteration=number, number=0, shape=shape, nbytes=nbytes, workers=1, submit_us=at, end_us=done, exact=exact
        )
        marks = [
            TimedStep(step=ThreadStep(what="submit", call=0), enter_us=at, leave_us=at),
            TimedStep(step=ThreadStep(what="wait", call=0), enter_us=at, leave_us=done),
        ]
        iterations.append(RecordedIteration(begin_us=begin, end_us=done + 50, marks=marks, calls=[call]))
    return trace_of(rank, iterations)


def shifted(trace: RankRecording, by_us: float) -> RankRecording:
    """The same, as a rank sees it whose clock is ahead."""
    keys = ("enter_us", "leave_us", "begin_us", "end_us", "started_us", "ended_us")
    return replace(trace, **{key: getattr(trace, key) + by_us for key in keys})


def together(*traces: RankRecording, offsets_us: list[float] | None = None) -> Workload:
    return merge(traces, offsets_us or [0.0] * len(traces), name="test", samples=0.0, notes=())


def test_transfer_begins_when_the_last_rank_is_there_and_the_rest_is_waiting() -> None:
    early, late = one_op(0, [100.0] * 3, [450.0] * 3), one_op(1, [300.0] * 3, [450.0] * 3)
    (op,) = together(early, late).comm_ops
    assert (op.duration_us, op.wait_us) == (150.0, 100.0)


def test_clocks_are_set_beside_each_other_first() -> None:
    early, late = one_op(0, [100.0] * 3, [450.0] * 3), one_op(1, [300.0] * 3, [450.0] * 3)
    assert together(early, shifted(late, 7e6), offsets_us=[0.0, -7e6]) == together(early, late)


def test_ranks_keep_durations_that_never_overlap() -> None:
    fast, slow = one_op(0, [100.0, 110.0, 120.0], [450.0] * 3), one_op(1, [300.0, 310.0, 320.0], [450.0] * 3)
    before, _, after = together(fast, slow).ops
    assert before.durations_us == (110.0, 310.0)
    assert (after.durations_us, after.duration_us) == ((), 50.0)


def test_ranks_whose_durations_overlap_share_the_median() -> None:
    one, other = one_op(0, [100.0, 200.0, 300.0], [450.0] * 3), one_op(1, [120.0, 260.0, 310.0], [450.0] * 3)
    before = together(one, other).ops[0]
    assert (before.durations_us, before.duration_us) == ((), 230.0)


def test_an_end_known_from_a_wait_counts_only_where_no_rank_knows_better() -> None:
    told, waited = one_op(0, [100.0] * 2, [150.0] * 2), one_op(1, [100.0] * 2, [900.0] * 2, exact=False)
    assert together(told, waited).comm_ops[0].duration_us == 50.0
    earlier = one_op(0, [100.0] * 2, [400.0] * 2, exact=False)
    assert together(earlier, waited).comm_ops[0].duration_us == 300.0


def test_an_op_that_queues_behind_another_is_not_under_way() -> None:
    calls = [
        RecordedCall(iteration=0, number=at, shape=SUM, nbytes=8, workers=1, submit_us=10.0 + at, end_us=end)
        for at, end in enumerate((100.0, 130.0))
    ]
    iteration = RecordedIteration(begin_us=0.0, end_us=200.0, calls=calls)
    assert trace_of(0, [iteration]).started_us.tolist() == [[10.0, 100.0]]
    for call in calls:
        call.workers = 2
    assert trace_of(0, [iteration]).started_us.tolist() == [[10.0, 11.0]]


def test_an_op_whose_end_was_never_seen_has_no_duration() -> None:
    traces = [one_op(rank, [100.0] * 2, [150.0] * 2) for rank in (0, 1)]
    for trace in traces:
        trace.ended_us[:] = math.nan
    assert together(*traces).comm_ops[0].duration_us == 0.0


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (one_op(1, [1.0], [2.0], shape=replace(SUM, kind="broadcast")), "broadcast of ranks 0, 1 on rank 1"),
        (one_op(1, [1.0], [2.0], nbytes=999), "has 999 bytes on one rank and 1000 on another"),
        (one_op(1, [1.0], [2.0], shape=replace(SUM, channel="other")), "rank 1 nothing"),
    ],
)
def test_ranks_that_do_not_agree_are_refused(other: RankRecording, said: str) -> None:
    with pytest.raises(InvalidInput, match="op 0 that ranks 0, 1 submit together") as error:
        together(one_op(0, [1.0], [2.0]), other)
    assert said in str(error.value)


@given(st.data())
def test_no_compute_is_lost_and_no_op_either(data: st.DataObject) -> None:
    """Random programs of submits and waits, whose gaps are compute of random length."""
    clock, total = 0.0, 0.0
    marks: list[TimedStep] = []
    calls: list[RecordedCall] = []
    open_calls: list[int] = []
    for _ in range(data.draw(st.integers(0, 12))):
        gap = data.draw(st.sampled_from([0.0, 1.0, 19.0, 21.0, 400.0]))
        clock, total = clock + gap, total + gap
        if data.draw(st.booleans()) and open_calls:
            waited = open_calls.pop(data.draw(st.integers(0, len(open_calls) - 1)))
            step = ThreadStep(what="wait", call=waited)
        else:
            step = ThreadStep(what="submit", call=len(calls))
            open_calls.append(len(calls))
            calls.append(
                RecordedCall(
                    iteration=0, number=len(calls), shape=SUM, nbytes=8, workers=2, submit_us=clock, end_us=clock + 5
                )
            )
        marks.append(TimedStep(step=step, enter_us=clock, leave_us=clock + 3))
        clock += 3
    total += 30
    iteration = RecordedIteration(begin_us=0.0, end_us=clock + 30, marks=marks, calls=calls)
    workload = together(*(trace_of(rank, [iteration]) for rank in (0, 1)))
    assert workload.compute_us == pytest.approx(total)
    assert len(workload.comm_ops) == len(calls)


EXCHANGE = CallShape(kind="all_to_all", group=(0, 1), channel="0", phase="step")


def test_an_exchange_whose_ranks_differ_in_size_is_an_upper_bound_with_a_size_for_each_rank() -> None:
    one, two = (one_op(rank, [100.0] * 3, [450.0] * 3, shape=EXCHANGE, nbytes=1000 + 500 * rank) for rank in range(2))
    (op,) = together(one, two).comm_ops
    assert (op.nbytes, op.at_most, op.rank_nbytes) == (1500.0, True, (1000.0, 1500.0))


def test_an_exchange_of_equal_sizes_is_no_upper_bound_unless_it_had_splits() -> None:
    one, two = (one_op(rank, [100.0] * 3, [450.0] * 3, shape=EXCHANGE) for rank in range(2))
    (op,) = together(one, two).comm_ops
    assert (op.nbytes, op.at_most, op.rank_nbytes) == (1000.0, False, ())
    (op,) = together(one, replace(two, splits=(True,))).comm_ops
    assert (op.nbytes, op.at_most, op.rank_nbytes) == (1000.0, True, (1000.0, 1000.0))


def test_groups_that_exchange_at_the_same_place_are_one_op_although_their_sizes_differ() -> None:
    traces = []
    for rank in range(4):
        shape = replace(EXCHANGE, group=(0, 1) if rank < 2 else (2, 3), channel=str(rank // 2))
        traces.append(one_op(rank, [100.0] * 3, [450.0] * 3, shape=shape, nbytes=1000 + 100 * rank))
    (op,) = together(*traces).comm_ops
    assert (op.nbytes, op.groups, op.rank_nbytes) == (1300.0, ((0, 1), (2, 3)), (1000.0, 1100.0, 1200.0, 1300.0))


def stage_of_pipeline(stage: int, replica: int, stages: int, batches: int, early: bool) -> RankRecording:
    """One rank of a pipeline that is written by hand; each rank counts ten microseconds for everything."""
    rank, warm = replica * stages + stage, min(stages - stage, batches) if early else batches
    actions = [(1, batch) for batch in range(warm)]
    for batch in range(batches):
        actions += [(-1, batch)] + [(1, warm + batch)] * (warm + batch < batches)
    clock = 0.0
    marks: list[TimedStep] = []
    calls: list[RecordedCall] = []

    def call(source: int, target: int) -> int:
        shape = CallShape(kind="send", group=(source, target), channel="0:0", phase="step")
        calls.append(
            RecordedCall(
                iteration=0, number=len(calls), shape=shape, nbytes=8, workers=1, submit_us=clock, end_us=clock
            )
        )
        return len(calls) - 1

    def mark(what: str, number: int) -> None:
        nonlocal clock
        marks.append(TimedStep(step=ThreadStep(what=what, call=number), enter_us=clock, leave_us=clock + 10))  # type: ignore[arg-type]
        clock += 10

    sent = []
    for step, _ in actions:
        if 0 <= stage - step < stages:
            taken = call(rank - step, rank)
            mark("submit", taken)
            mark("wait", taken)
        clock += 100.0
        if 0 <= stage + step < stages:
            sent.append(call(rank, rank + step))
            mark("submit", sent[-1])
    for number in sent:
        mark("wait", number)
    iteration = RecordedIteration(begin_us=0.0, end_us=clock + 50, marks=marks, calls=calls)
    return trace_of(rank, [iteration])


@pytest.mark.parametrize("early", [False, True], ids=["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "batches", "replicas"), [(3, 2, 1), (4, 3, 2), (6, 4, 1), (5, 1, 2)])
def test_inner_stages_that_make_alike_calls_are_told_apart(
    stages: int, batches: int, replicas: int, early: bool
) -> None:
    ranks = [(stage, replica) for replica in range(replicas) for stage in range(stages)]
    workload = together(*(stage_of_pipeline(*rank, stages, batches, early) for rank in ranks))
    messages = [op for op in workload.ops if op.is_comm]
    assert len(messages) == 2 * (stages - 1) * batches
    behind: dict[str, set[str]] = {}
    for op in workload.ops:
        behind[op.name] = {dep.op for dep in op.after if not dep.lag}
        behind[op.name] |= {before for name in behind[op.name] for before in behind[name]}
    for step in (1, -1):
        hops = [
            [op.name for op in messages if op.groups[0] == (stage, stage + step)]
            for stage in range(stages)
            if 0 <= stage + step < stages
        ]
        for one, other in zip(hops[::step], hops[::step][1:], strict=False):
            for batch in range(batches):
                assert one[batch] in behind[other[batch]]
                if step > 0 and not early:
                    assert behind[other[batch]].isdisjoint(one[batch + 1 :])
