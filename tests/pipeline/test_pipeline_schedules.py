# SPDX-License-Identifier: Apache-2.0
"""The IR and the makers: text both ways, the orders that the literature gives, communication written out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import InvalidInput
from stretto.pipeline import (
    FULL,
    MAKERS,
    STYLES,
    Action,
    Schedule,
    check,
    eager_1f1b,
    gpipe,
    in_flight,
    interleaved,
    make,
    one_f_one_b,
    paced,
    with_comms,
    zb_h1,
    zb_h2,
)


@st.composite
def paced_schedules(draw: st.DrawFn) -> Schedule:
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    warmup = sorted(draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages)), reverse=True)
    delay = draw(st.lists(st.integers(FULL, 4), min_size=stages, max_size=stages))
    return paced(stages, microbatches, warmup=warmup, delay=delay)


def test_1f1b_and_eager_begin_with_the_papers_numbers_of_forwards() -> None:
    def warmups(schedule: Schedule) -> list[int]:
        return [next(at for at, action in enumerate(row) if action.kind != "F") for row in schedule.ranks]

    assert warmups(one_f_one_b(4, 12)) == [4, 3, 2, 1]
    # 2 (#stages - i) + 1 with i from 1.
    assert warmups(eager_1f1b(4, 12)) == [7, 5, 3, 1]
    assert warmups(eager_1f1b(4, 6)) == [6, 5, 3, 1]
    assert warmups(gpipe(4, 6)) == [6, 6, 6, 6]


def test_weights_follow_the_input_gradient_that_many_micro_batches_later() -> None:
    example = "0F0,0F1,0F2,0I0,0F3,0I1,0W0,0I2,0W1,0I3,0W2,0W3\n1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3\n"
    assert eager_1f1b(2, 4, delay=1).to_csv() == example
    assert eager_1f1b(1, 2, delay=0).to_csv() == "0F0,0I0,0W0,0F1,0I1,0W1\n"


def test_memory_in_flight_is_what_each_schedule_promises() -> None:
    assert in_flight(one_f_one_b(4, 16)) == (4, 3, 2, 1)
    assert in_flight(eager_1f1b(4, 16)) == (7, 5, 3, 1)
    assert in_flight(zb_h1(4, 16)) == (4, 4, 4, 4)
    assert in_flight(zb_h2(4, 16)) == (7, 7, 7, 7)
    assert in_flight(gpipe(4, 16)) == (16,) * 4


def test_interleaved_ranks_take_stages_in_turns() -> None:
    schedule = interleaved(4, 4)
    assert schedule.stage_rank == (0, 1, 0, 1)
    assert " ".join(map(str, schedule.ranks[1][:8])) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0"
    with pytest.raises(InvalidInput, match="multiple of the 2 ranks"):
        interleaved(4, 5)
    with pytest.raises(InvalidInput, match="per_rank: 5 stages"):
        interleaved(5, 4)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("style", STYLES)
def test_every_schedule_is_right_in_every_style(name: str, style: str) -> None:
    proof = check(with_comms(make(name, 4, 8), style))
    assert "async" in proof.transports
    if style != "ahead":
        assert {"pair", "blocking"} <= set(proof.transports)


@settings(max_examples=60, deadline=None)
@given(schedule=paced_schedules(), style=st.sampled_from(STYLES), ahead=st.integers(0, 6))
def test_random_warmups_and_delays_are_right_in_every_style(schedule: Schedule, style: str, ahead: int) -> None:
    written = with_comms(schedule, style, ahead=ahead)
    proof = check(written)
    assert written.compute_only().ranks == schedule.ranks
    assert proof.in_flight == in_flight(schedule)
    if schedule.num_stages > 1:
        assert "async" in proof.transports
    again = Schedule.from_csv(written.to_csv())
    assert again.ranks == written.ranks


def test_receives_are_posted_ahead_and_sends_at_once() -> None:
    for ahead in (0, 1, 3):
        for row in with_comms(one_f_one_b(2, 8), "ahead", ahead=ahead).ranks:
            for at, action in enumerate(row):
                if action.kind == "SEND_F":
                    assert row[at - 1] == Action(action.stage, "F", action.microbatch)
                if action.kind == "RECV_F":
                    use = row.index(Action(action.stage, "F", action.microbatch))
                    between = [a for a in row[at:use] if a.computes]
                    assert len(between) == min(ahead, sum(a.computes for a in row[:use]))


def test_files_come_back_and_bubbles_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    written = with_comms(zb_h1(3, 5), "mirrored")
    written.save(path)
    assert Schedule.load(path) == Schedule(name="mine", ranks=written.ranks)
    assert Schedule.from_csv("0F0,,0B0\n,1F0,1B0\n\n").ranks[1] == (Action(1, "F", 0), Action(1, "B", 0))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0X0", "line 1, cell 1: '0X0' is not an action"),
        ("0F", "needs a micro-batch"),
        ("0REDUCE_GRAD1", "names a micro-batch"),
        ("0F99999", "not an action|over 4096 stages"),
        ("(0F0;1B0)OVERLAP_F_B", "not an action"),
        ("0F0\n0F1", "stage 0 is on rank 0"),
        ("0F0\n2F0", "stages: 1 is missing"),
        ("", "ranks: must be 1"),
        ("0F0\n\n1F0", "ranks\\[1\\]: has no actions"),
        ("9999999F0", "not an action"),
    ],
)
def test_wrong_text_is_one_error_that_names_the_place(text: str, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Schedule.from_csv(text)


@pytest.mark.parametrize(
    ("stages", "microbatches", "warmup", "message"),
    [
        (0, 4, 1, "stages: must be"),
        (2, 0, 1, "microbatches: must be"),
        (4096, 4096, 1, "are over"),
        (2, 4, [1], "warmup: 1 numbers for 2 stages"),
        (2, 4, [2, 0], r"warmup\[1\]: must be"),
    ],
)
def test_counts_out_of_bounds_are_refused(
    stages: int, microbatches: int, warmup: int | Sequence[int], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        paced(stages, microbatches, warmup=warmup)


def test_unknown_names_list_the_choices() -> None:
    with pytest.raises(InvalidInput, match="unknown schedule 'x'; choose from: gpipe, 1f1b"):
        make("x", 2, 2)
    with pytest.raises(InvalidInput, match="choose from: blocking, mirrored, ahead"):
        with_comms(gpipe(2, 2), "x")
