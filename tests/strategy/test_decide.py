# SPDX-License-Identifier: Apache-2.0
"""The comparison of the few best with what is used already."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from stretto.strategy.decide import Rounds, decide, ratio, surely_faster


def noisy(speeds: Sequence[float], spread: float, seed: int) -> Rounds:
    """Times that vary by themselves, and together from round to round."""
    rng = random.Random(seed)

    def rounds(who: Sequence[int], count: int) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in who]
        for _ in range(count):
            drift = rng.uniform(1.0, 1.5)
            for times, at in zip(found, who, strict=True):
                times.append(speeds[at] * drift * math.exp(rng.gauss(0.0, spread)))
        return found

    return rounds


def test_what_is_slower_than_the_reference_is_hardly_ever_chosen() -> None:
    wrong = sum(decide(3, [0], noisy([100, 101, 103], 0.03, seed), most=12).chosen != 0 for seed in range(200))
    assert wrong <= 10


def test_equals_seldom_displace_the_reference() -> None:
    wrong = sum(decide(4, [0], noisy([100] * 4, 0.03, seed), most=12).chosen != 0 for seed in range(200))
    assert wrong <= 30


def test_what_is_clearly_faster_is_found_in_few_rounds_though_the_machine_drifts() -> None:
    for seed in range(50):
        found = decide(4, [0, 1], noisy([100, 98, 80, 120], 0.02, seed), most=12)
        assert found.chosen == 2 and found.gain(0) == pytest.approx(1.25, rel=0.05)
        assert len(found.times_us[3]) <= 6


def test_who_beat_the_reference_is_chosen_though_another_leads_in_the_end() -> None:
    times = {0: [100.0] * 8, 1: [90.0] * 8, 2: [80.0, 120.0] * 2 + [60.0, 110.0] * 2}

    def rounds(who: Sequence[int], count: int) -> list[list[float]]:
        return [[times[at].pop(0) for _ in range(count)] for at in who]

    found = decide(3, [0], rounds, most=8)
    assert found.chosen == 1 and surely_faster(found.times_us[1], found.times_us[0])


def test_of_two_references_the_faster_stays() -> None:
    assert decide(3, [0, 1], noisy([120, 100, 101], 0.01, 3), most=12).chosen == 1


def test_another_reference_seldom_displaces_an_equal_first_one() -> None:
    wrong = sum(decide(3, [0, 1], noisy([100, 101, 103], 0.03, seed), most=12).chosen != 0 for seed in range(200))
    assert wrong <= 15


def test_what_does_not_run_drops_out() -> None:
    def rounds(who: Sequence[int], count: int) -> list[list[float]]:
        return [[] if at == 1 else [10.0 - at] * count for at in who]

    found = decide(3, [0], rounds, most=8)
    assert found.chosen == 2 and found.times_us[1] == () and found.median_us(1) == math.inf
    assert found.gain(1) == math.inf


def test_when_nothing_runs_the_reference_is_the_answer() -> None:
    assert decide(2, [0], lambda who, count: [[] for _ in who], most=8).chosen == 0


def test_ratios_are_taken_within_rounds() -> None:
    assert ratio([2.0, 40.0, 6.0, 1.0], [1.0, 10.0, 3.0]) == 2.0
    assert surely_faster([1.0, 10.0, 3.0], [2.0, 22.0, 6.5]) and not surely_faster([1.0], [2.0])


def test_a_reference_that_dropped_out_does_not_win_by_the_rounds_it_missed() -> None:
    drifts = [1.0, 3.0, 3.0]

    def rounds(who: Sequence[int], count: int) -> list[list[float]]:
        drift = drifts.pop(0)
        return [[(120.0, 100.0, 100.0)[at] * drift + turn for turn in range(count)] for at in who]

    decision = decide(3, [0, 1], rounds, most=8)
    assert len(decision.times_us[0]) == 4 < len(decision.times_us[1])
    assert decision.chosen == 1
