# SPDX-License-Identifier: Apache-2.0
"""The gain over the unchanged job, from given measurements: its arithmetic, and what is said of it."""

from __future__ import annotations

import random
from fractions import Fraction
from statistics import median

import msgspec
import pytest

from stretto.cli.gain import gain_line, gain_lines, verdict
from stretto.control.split import LEAST_UNDER_PLAN, GainSplit, over_ranks, split
from stretto.runtime.enforcer.report import Timing


def timing(times_us: list[int]) -> Timing:
    found = Timing.of([float(us) for us in times_us])
    assert found is not None
    return found


def drawn(seed: int) -> tuple[dict[str, list[int]], str]:
    """What iterations took in some of the three ways, and which of them is kept."""
    draw = random.Random(seed)
    ways = {
        name: [draw.randint(100, 100_000) for _ in range(draw.randint(1, 40))]
        for name in ("unchanged", "backend", "plan")
        if draw.random() < 0.8
    }
    return ways, draw.choice(["unchanged", "backend", "plan"])


@pytest.mark.parametrize("seed", range(200))
def test_shares_are_ratios_of_medians_and_multiply(seed: int) -> None:
    ways, kept = drawn(seed)
    found = split(own="gloo", kept=kept, **{name: timing(times) for name, times in ways.items()})  # type: ignore[arg-type]
    exact = {name: Fraction(median(map(Fraction, times))) for name, times in ways.items()}

    def ratio(slow: str, fast: str) -> float:
        return float(exact[slow] / exact[fast]) if slow in exact and fast in exact else 0.0

    assert found.backend_share == pytest.approx(ratio("unchanged", "backend"))
    assert found.plan_share == pytest.approx(ratio("backend", "plan"))
    assert found.gain == pytest.approx(ratio("unchanged", kept))
    if kept == "plan" and len(ways) == 3:
        assert found.gain == pytest.approx(found.backend_share * found.plan_share)
    assert all(f"median of {len(times)}," in line for line, times in zip(_figures(found), ways.values(), strict=True))
    again = msgspec.json.decode(msgspec.json.encode(found), type=GainSplit)
    assert again == found


def _figures(found: GainSplit) -> list[str]:
    return [line for line in gain_lines(found) if "per iteration" in line]


@pytest.mark.parametrize("seed", range(200))
def test_a_spread_is_around_its_median_and_has_a_quarter_on_each_side(seed: int) -> None:
    times = [random.Random(seed).randint(1, 1000) for _ in range(seed % 40 + 1)]
    found = timing(times)
    assert found.low_us <= found.median_us <= found.high_us
    assert sum(us < found.low_us for us in times) <= len(times) / 4
    assert sum(us > found.high_us for us in times) <= len(times) / 4


X, Y, Z = (timing(LEAST_UNDER_PLAN * [us]) for us in (300_000, 200_000, 100_000))


def test_all_three_are_told_with_iterations_spread_and_predictions_of_the_same_thing() -> None:
    found = split(
        own="gloo", kept="plan", unchanged=X, backend=Y, plan=Z, predicted_backend_us=220_000.0,
        predicted_plan_us=90_000.0,
    )  # fmt: skip
    first, second, third, last = gain_lines(found)
    assert first == "unchanged job (gloo):        300 ms per iteration (median of 20, half of them 300 ms to 300 ms)"
    assert "200 ms per iteration, 1.50x" in second and "predicted 220 ms, 10% too long" in second
    assert "100 ms per iteration, 2.00x" in third and "predicted 90 ms, 10% too short" in third
    assert last == "gained: 3.00 times as fast as the unchanged job (our backend 1.50x, the plan 2.00x)"
    in_one = "gloo 300 ms -> our backend 200 ms (1.50x) -> plan 100 ms (2.00x), together 3.00x per iteration"
    assert gain_line(found) == in_one


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (split(own="gloo", kept="unchanged", unchanged=Y, backend=X), "nothing was gained: the job runs on gloo"),
        (split(own="gloo", kept="unchanged", unchanged=X, backend=Y), "our backend was 1.50 times as fast in 20 it"),
        (split(own="gloo", kept="backend", unchanged=Y, backend=Y), "nothing was gained: 1.00 times"),
        (split(own="gloo", kept="plan", unchanged=Z, backend=Y, plan=X), "nothing was gained: 0.33 times"),
        (split(own="gloo", kept="plan", unchanged=Z, backend=Y, plan=X), "runs (for 20 iterations: after 40"),
        (split(own="gloo", kept="plan", unchanged=Z, backend=Y, plan=timing(40 * [300_000])), "job; the plan runs"),
        (split(own="gloo", kept="backend", unchanged=X, backend=Y), "gained: 1.50 times as fast as the unchanged job"),
        (split(kept="plan", backend=X, plan=Y, no_unchanged="why"), "is not known; the plan is 1.50 times as fast"),
        (GainSplit(), "what was gained over the unchanged job is not known"),
    ],
)
def test_that_nothing_was_gained_or_is_known_is_said_plainly(found: GainSplit, words: str) -> None:
    assert words in verdict(found)
    assert gain_lines(found)[-1] == verdict(found)


def test_a_job_that_asked_for_our_backend_has_nothing_to_be_compared_with() -> None:
    found = split(kept="plan", backend=Y, plan=Z, no_unchanged="the job asked for the backend stretto itself")
    assert gain_lines(found)[0] == ("the unchanged job was not measured: the job asked for the backend stretto itself")
    assert found.gain == 0.0 and found.plan_share == 2.0


def test_ranks_are_averaged_once_all_have_measured() -> None:
    assert over_ranks([X, None]) is None and over_ranks([]) is None
    found = over_ranks([X, Z])
    assert found is not None
    assert (found.median_us, found.iterations) == (200_000, LEAST_UNDER_PLAN)


def test_no_gain_is_claimed_from_a_few_iterations_under_a_plan() -> None:
    few = timing((LEAST_UNDER_PLAN - 1) * [100_000])
    found = split(own="gloo", kept="plan", unchanged=X, backend=Y, plan=few)
    assert found.early and not split(kept="plan", unchanged=X, plan=Z).early
    assert not split(kept="backend", unchanged=X, backend=Y, plan=few).early
    said = verdict(found)
    assert said.startswith("too early to say what was gained: 19 iterations under the plan, of 20 at least (3.00 times")
    assert gain_line(found).endswith("together 3.00x per iteration, in only 19 iterations")


def test_the_whole_job_stands_beside_the_unchanged_one() -> None:
    found = split(
        own="gloo", kept="plan", unchanged=X, backend=Y, plan=Z, plan_number=3, whole_us=250_000.0,
        whole_iterations=299,
    )  # fmt: skip
    *_, plan, whole, last = gain_lines(found)
    assert plan.startswith("under plan 3, the last:      100 ms per iteration")
    assert whole == (
        "the whole job:               250 ms per iteration, 1.20x "
        "(mean of 299; recording, probing, measuring and planning included)"
    )
    assert last.endswith("(our backend 1.50x, the plan 2.00x); over the whole job 1.20 times")
    own = split(own="gloo", kept="unchanged", unchanged=X, backend=Y, whole_us=250_000.0, whole_iterations=299)
    assert "250 ms per iteration (mean of 299;" in gain_lines(own)[-2], "a ratio would tell of the machine alone"
