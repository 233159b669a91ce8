# SPDX-License-Identifier: Apache-2.0
"""Memory, recomputation, and the search for warm-ups and delays under a cap."""

from __future__ import annotations

from itertools import product

import pytest

from stretto.errors import Infeasible, InvalidInput
from stretto.pipeline import (
    FULL,
    StageCosts,
    StageMemory,
    check,
    eager_1f1b,
    one_f_one_b,
    paced,
    peak_bytes,
    search,
    simulate,
    with_comms,
    zb_h1,
)
from stretto.pipeline.memory import LayerMemory, recomputed


def test_peaks_count_what_is_held_and_what_is_posted() -> None:
    held = StageMemory(fixed_bytes=100.0, activation_bytes=10.0, working_bytes=3.0, received_bytes=2.0)
    assert peak_bytes(one_f_one_b(2, 4), [held, held]) == (123.0, 113.0)
    # A split backward gives its activations back with W only.
    assert peak_bytes(zb_h1(2, 4), [held, held]) == (123.0, 123.0)
    # Two receives are posted before the first forward.
    assert peak_bytes(with_comms(eager_1f1b(2, 4), "ahead"), [held, held])[1] > 113.0
    with pytest.raises(InvalidInput, match="memory: is of 1 stages"):
        peak_bytes(one_f_one_b(2, 4), [held])


def test_only_as_much_is_recomputed_as_must_be() -> None:
    layers = [LayerMemory(all_bytes=100.0, input_bytes=10.0), LayerMemory(all_bytes=40.0, input_bytes=10.0)]
    memory, chosen = recomputed(layers, fixed_bytes=0.0, in_flight=2, cap_bytes=280.0)
    assert chosen == (False, False) and memory.activation_bytes == 140.0
    memory, chosen = recomputed(layers, fixed_bytes=0.0, in_flight=2, cap_bytes=279.0)
    assert chosen == (True, False)
    assert (memory.activation_bytes, memory.working_bytes) == (50.0, 100.0)
    with pytest.raises(Infeasible, match="with everything recomputed, over the cap"):
        recomputed(layers, fixed_bytes=0.0, in_flight=2, cap_bytes=100.0)


def test_without_a_cap_the_bound_is_met() -> None:
    for stages in (2, 3, 4):
        costs = StageCosts.even(stages, forward_us=10.0, transfer_us=4.0)
        found = search(costs, 12)
        assert found.total_us == pytest.approx(found.bound_us)
        assert found.exhaustive
        assert search(costs, 12, memory=[StageMemory(activation_bytes=1e9)] * stages).total_us == found.total_us
        check(found.schedule)
        assert simulate(found.schedule, costs).total_us == found.total_us


def test_small_cases_are_the_best_of_all_combinations() -> None:
    costs = StageCosts(
        forward_us=(9.0, 12.0), input_us=(11.0, 8.0), weight_us=(7.0, 10.0), activation_us=(13.0,), gradient_us=(6.0,)
    )
    memory = [StageMemory(activation_bytes=1.0)] * 2
    found = search(costs, 5, memory=memory, cap_bytes=2.0, most_delay=2)
    best = min(
        simulate(schedule, costs).total_us
        for first, second in product(range(1, 3), repeat=2)
        for delay in product(range(FULL, 3), repeat=2)
        if first >= second
        for schedule in [paced(2, 5, warmup=[first, second], delay=delay)]
        if max(peak_bytes(schedule, memory)) <= 2.0
    )
    assert found.exhaustive
    assert found.total_us == pytest.approx(best)
    assert found.total_us >= found.bound_us
    assert max(found.peak_bytes) <= 2.0


def test_a_local_search_is_no_worse_than_the_known_schedules_and_keeps_the_cap() -> None:
    costs = StageCosts.even(5, forward_us=10.0, transfer_us=5.0)
    memory = [StageMemory(activation_bytes=1.0)] * 5
    found = search(costs, 10, memory=memory, cap_bytes=6.0, evaluations=50)
    assert max(found.peak_bytes) <= 6.0
    assert found.evaluations >= 50
    for schedule in (one_f_one_b(5, 10), zb_h1(5, 10)):
        assert found.total_us <= simulate(schedule, costs).total_us
    assert search(costs, 10, memory=memory, cap_bytes=6.0, evaluations=50) == found


def test_more_memory_is_never_slower_and_never_used_for_nothing() -> None:
    costs = StageCosts.even(3, forward_us=10.0, transfer_us=4.0)
    memory = [StageMemory(activation_bytes=1.0)] * 3
    times = [search(costs, 6, memory=memory, cap_bytes=float(cap)).total_us for cap in (1, 2, 4, 6)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
    generous = search(StageCosts.even(2), 8, memory=memory[:2], cap_bytes=100.0)
    assert max(generous.peak_bytes) <= 3.0


def test_what_cannot_fit_is_said() -> None:
    with pytest.raises(Infeasible, match="stage 1 needs 20 GB for one micro-batch"):
        search(StageCosts.even(2), 4, memory=[StageMemory(), StageMemory(fixed_bytes=2e10)], cap_bytes=1.6e10)
    with pytest.raises(InvalidInput, match="memory: is of 1 stages"):
        search(StageCosts.even(2), 4, memory=[StageMemory()])
