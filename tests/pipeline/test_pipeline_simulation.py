# SPDX-License-Identifier: Apache-2.0
"""Times against closed forms, and the lower bound against everything."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.errors import InvalidInput
from stretto.pipeline import (
    MAKERS,
    Schedule,
    StageCosts,
    eager_1f1b,
    gpipe,
    lower_bound_us,
    make,
    one_f_one_b,
    paced,
    simulate,
    zb_h2,
)
from stretto.pipeline.drawing import draw


def period(schedule: str, costs: StageCosts, transport: str = "async") -> float:
    """What one more micro-batch costs in the steady state, over an even number of them."""
    short, long = (simulate(make(schedule, costs.num_stages, n), costs, transport=transport).total_us for n in (24, 48))
    return (long - short) / 24


def test_steady_states_of_two_even_stages_are_the_closed_forms() -> None:
    costs = StageCosts.even(2, forward_us=10.0, backward_us=20.0, transfer_us=6.0)
    # Blocking pays both transfers every time, overlap half of them, eager-1F1B none.
    assert period("1f1b", costs, "blocking") == pytest.approx(42.0)
    assert period("1f1b", costs) == pytest.approx(36.0)
    assert period("eager_1f1b", costs) == pytest.approx(30.0)


def test_a_faster_last_stage_gives_time_for_communication() -> None:
    costs = StageCosts(
        forward_us=(10.0, 10.0), input_us=(20.0, 10.0), weight_us=(10.0, 10.0),
        activation_us=(10.0,), gradient_us=(10.0,),
    )  # fmt: skip
    # (40 + 30 + 20) / 2: the round trip of two micro-batches in flight.
    assert period("1f1b", costs) == pytest.approx(45.0)
    assert period("1f1b", costs, "blocking") == pytest.approx(60.0)
    assert period("eager_1f1b", costs) == pytest.approx(40.0)


def test_with_free_transfers_1f1b_and_eager_take_the_same_time() -> None:
    costs = StageCosts.even(4, forward_us=10.0)
    expected = (8 + 3) * 30.0
    for schedule in (gpipe(4, 8), one_f_one_b(4, 8), eager_1f1b(4, 8)):
        for transport in ("async", "pair", "blocking"):
            assert simulate(schedule, costs, transport=transport).total_us == pytest.approx(expected)


def test_zero_bubble_meets_the_bound() -> None:
    costs = StageCosts.even(3, forward_us=10.0, transfer_us=4.0)
    assert simulate(zb_h2(3, 12), costs).total_us == pytest.approx(lower_bound_us(costs, 12))


def test_ports_are_shared_by_both_directions_of_a_middle_stage() -> None:
    # Stage 1's way out takes activations to stage 2 and gradients to stage 0, one after the other.
    costs = StageCosts(
        forward_us=(1.0,) * 3, input_us=(1.0,) * 3, weight_us=(0.0,) * 3,
        activation_us=(0.0, 50.0), gradient_us=(50.0, 0.0),
    )  # fmt: skip
    run = simulate(gpipe(3, 8), costs)
    out = sorted((s.start_us, s.end_us) for s in run.spans if s.rank == 1 and s.action.kind.startswith("SEND"))
    assert len(out) == 16
    assert all(end <= start for (_, end), (start, _) in pairwise(out))
    assert run.total_us >= 800.0


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, StageCosts, int]:
    stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    times = st.floats(0.0, 20.0).map(lambda value: round(value, 2))

    def row(count: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(times, min_size=count, max_size=count)))

    costs = StageCosts(
        forward_us=row(stages), input_us=row(stages), weight_us=row(stages), activation_us=row(stages - 1),
        gradient_us=row(stages - 1), reduce_us=row(stages),
    )  # fmt: skip
    warmup = sorted(draw(st.lists(st.integers(1, 6), min_size=stages, max_size=stages)), reverse=True)
    delay = draw(st.lists(st.integers(-1, 3), min_size=stages, max_size=stages))
    return paced(stages, microbatches, warmup=warmup, delay=delay), costs, microbatches


@settings(max_examples=80, deadline=None)
@given(case=cases(), transport=st.sampled_from(("async", "pair", "blocking")))
def test_nothing_beats_the_bound_and_spans_never_overlap(
    case: tuple[Schedule, StageCosts, int], transport: str
) -> None:
    from stretto.pipeline import in_flight

    schedule, costs, microbatches = case
    run = simulate(schedule, costs, transport=transport)
    bound = lower_bound_us(costs, microbatches, in_flight=in_flight(schedule))
    assert run.total_us >= bound * (1 - 1e-9) - 1e-9
    for rank in range(len(schedule.ranks)):
        mine = sorted((s.start_us, s.end_us) for s in run.spans if s.rank == rank and not s.action.kind.startswith("S"))
        assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(mine))
    assert simulate(schedule, costs.free()).total_us <= run.total_us + 1e-9


def test_a_run_becomes_a_timeline_and_a_drawing() -> None:
    run = simulate(eager_1f1b(2, 4, delay=1), StageCosts.even(2, forward_us=10.0, transfer_us=5.0))
    timeline = run.timeline()
    assert timeline.total_us == run.total_us
    assert timeline.num_spans == len(run.spans)
    assert {"0F0", "1SEND_B3", "0W3"} <= set(timeline.names)
    lines = [line.plain for line in draw(run, width=90)]
    assert len(lines) == 4
    assert all(mark in "".join(lines) for mark in "░▓▒→←")
    assert max(map(len, lines)) <= 90
    assert len(draw(simulate(make("interleaved", 4, 4), StageCosts.even(4)), width=60)) == 2


def test_wrong_costs_are_named() -> None:
    with pytest.raises(InvalidInput, match="weight_us: 1 numbers where 2 stages need 2"):
        StageCosts(forward_us=(1.0, 1.0), input_us=(1.0, 1.0), weight_us=(1.0,))
    with pytest.raises(InvalidInput, match=r"input_us\[0\]: must be a number >= 0"):
        StageCosts(forward_us=(1.0,), input_us=(float("nan"),), weight_us=(1.0,))
    with pytest.raises(InvalidInput, match="costs: are of 3 stages, the schedule has 2"):
        simulate(gpipe(2, 2), StageCosts.even(3))
    with pytest.raises(InvalidInput, match="unknown transport"):
        simulate(gpipe(2, 2), StageCosts.even(2), transport="tcp")


@pytest.mark.parametrize("name", MAKERS)
def test_all_schedules_do_all_work(name: str) -> None:
    run = simulate(make(name, 4, 8), StageCosts.even(4, forward_us=10.0, transfer_us=1.0))
    assert sum(run.busy_us) == pytest.approx(4 * 8 * 30.0)
    assert 0.0 <= run.bubble < 1.0
