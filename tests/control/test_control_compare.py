# SPDX-License-Identifier: Apache-2.0
"""The job on its own backend against ours, in turns: who runs which iteration, and what all ranks come to."""

from __future__ import annotations

import random
from collections.abc import Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from stretto.control import compare
from stretto.control.aside import LEAD, MOST_STEPS, NOTES, IterationRollCall, _check
from stretto.control.compare import (
    MAX_MISSES,
    MOST,
    MOST_LATER,
    MOST_ROUNDS,
    OURS_SHARE,
    SETTLE,
    Comparison,
    LaterTurns,
    faster,
)
from stretto.runtime.torch_backend.own_backend import OWN_BACKEND


@pytest.fixture(autouse=True)
def stands_in() -> Iterator[None]:
    OWN_BACKEND.stand_in("gloo")
    yield
    OWN_BACKEND.stand_in("")


class Clock:
    """A clock that only moves when told."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Ranks:
    """Stands for the exchange with ranks that all measure the same."""

    def __init__(self, aligned: list[bool] | None = None) -> None:
        self.answers = aligned or []
        self.asked = 0

    def means(self, times: list[float]) -> list[float]:
        return [round(time) for time in times]

    def aligned(self, engines: Any) -> bool:
        self.asked += 1
        return self.answers.pop(0) if self.answers else True


def drive(ranks: Any, times_us: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Comparison, list[bool]]:
    """Run a comparison to its end; also who ran each iteration. `times_us` is asked with whether that is gloo."""
    clock = Clock()
    monkeypatch.setattr(compare, "time", clock)
    comparison = Comparison(ranks, list)
    ran = []
    for _ in range(1000):
        ran.append(OWN_BACKEND.runs)
        clock.now_s += times_us(OWN_BACKEND.runs) * 1e-6
        if comparison.iteration():
            return comparison, ran
    raise AssertionError("it does not end")


@pytest.mark.parametrize("seed", range(50))
def test_it_takes_few_iterations_and_each_counts_for_who_ran_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    means = {True: draw.uniform(1e3, 1e7), False: draw.uniform(1e3, 1e7)}
    spread = draw.uniform(0, 0.5)
    seen: dict[bool, list[float]] = {True: [], False: []}

    def times_us(own: bool) -> float:
        us = means[own] * draw.uniform(1 - spread, 1 + spread)
        seen[own].append(round(us))
        return us

    comparison, ran = drive(Ranks(), times_us, monkeypatch)
    own, ours = comparison.own, comparison.ours
    assert own is not None and ours is not None and comparison.settled
    assert len(ran) <= 2 * MOST_ROUNDS * (MOST + SETTLE)
    assert own.iterations <= sum(ran) and ours.iterations <= len(ran) - sum(ran)
    assert min(seen[True]) - 1 <= own.median_us <= max(seen[True]) + 1
    assert min(seen[False]) - 1 <= ours.median_us <= max(seen[False]) + 1
    # Both run early and late: what slows the machine down slows both.
    changes = [a for a, b in zip(ran, [*ran[1:], None], strict=True) if a != b]
    assert changes[:4] == [True, False, True, False]


@pytest.mark.parametrize(("own_us", "ours_us"), [(1000, 500), (500, 1000), (1000, 1000), (1000, 995)])
def test_ours_runs_on_only_where_it_is_faster_for_sure(
    own_us: float, ours_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = random.Random(1)
    drive(Ranks(), lambda own: (own_us if own else ours_us) * noise.uniform(0.95, 1.3), monkeypatch)
    assert OWN_BACKEND.runs == (ours_us != 500)


def test_load_that_comes_and_goes_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    at = 0

    def times_us(own: bool) -> float:
        nonlocal at
        at += 1
        return (1000 if own else 800) * (5 if at % 7 == 0 else 1)

    comparison, _ = drive(Ranks(), times_us, monkeypatch)
    assert not OWN_BACKEND.runs
    assert comparison.own is not None and comparison.own.median_us == 1000


def test_who_runs_calls_changes_only_where_all_ranks_are_at_the_same_call(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Ranks([False, False, True, False, True])
    comparison, ran = drive(late, lambda own: 1000.0, monkeypatch)
    assert comparison.settled and not late.answers
    never = Ranks([False] * 100)
    OWN_BACKEND.runs = True
    comparison, ran = drive(never, lambda own: 1000.0, monkeypatch)
    assert all(ran) and OWN_BACKEND.runs and not comparison.settled
    assert comparison.own is not None and comparison.ours is None


def go_on(
    comparison: Comparison, begun: int, times_us: Any, monkeypatch: pytest.MonkeyPatch, *, iterations: int,
    planned_from: int = 1 << 60,
) -> list[bool]:  # fmt: skip
    """Go on after an undecided comparison; who ran each iteration from there on."""
    clock = Clock()
    monkeypatch.setattr(compare, "time", clock)
    later, ran = LaterTurns(comparison, begun), []
    for step in range(begun + 1, begun + iterations + 1):
        ran.append(OWN_BACKEND.runs)
        clock.now_s += times_us(OWN_BACKEND.runs) * 1e-6
        if not later.over:
            later.iteration(step, planned=step >= planned_from)
    return ran


def undecided(monkeypatch: pytest.MonkeyPatch, ranks: Ranks | None = None) -> tuple[Comparison, int]:
    comparison, ran = drive(ranks or Ranks(), lambda own: 1000.0, monkeypatch)
    assert comparison.settled and comparison.undecided and OWN_BACKEND.runs
    return comparison, len(ran)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_a_little_faster_is_found_to_be_in_more_turns(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = random.Random(seed)
    comparison, begun = undecided(monkeypatch)
    ran = go_on(
        comparison, begun, lambda own: (1060 if own else 1000) * noise.uniform(0.95, 1.15), monkeypatch,
        iterations=3000,
    )  # fmt: skip
    assert not OWN_BACKEND.runs and comparison.settled and not comparison.undecided
    assert comparison.own is not None and comparison.ours is not None
    assert comparison.own.median_us > comparison.ours.median_us
    # Until it was sure, it took few iterations.
    turned = ran.index(False)
    sure = next(at for at in range(len(ran)) if not any(ran[at:]))
    assert turned >= 1 / OURS_SHARE and sum(not own for own in ran[:sure]) <= OURS_SHARE * sure + MOST + SETTLE


@pytest.mark.parametrize("slower", [1.0, 1.02])
def test_what_is_not_faster_takes_a_bounded_part_of_the_job(slower: float, monkeypatch: pytest.MonkeyPatch) -> None:
    noise = random.Random(7)
    comparison, begun = undecided(monkeypatch)
    ran = go_on(
        comparison, begun, lambda own: (1000 if own else 1000 * slower) * noise.uniform(0.9, 1.3), monkeypatch,
        iterations=4000,
    )  # fmt: skip
    assert OWN_BACKEND.runs and all(ran[-500:])
    for end in range(200, len(ran), 100):
        assert sum(not own for own in ran[:end]) <= OURS_SHARE * end
    assert 0 < sum(not own for own in ran) <= MOST_LATER * (MOST + SETTLE)


@pytest.mark.parametrize("at", range(0, 420, 7))
def test_with_the_first_plan_turns_are_over_and_the_own_backend_runs(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison, begun = undecided(monkeypatch)
    ran = go_on(comparison, begun, lambda own: 1000.0, monkeypatch, iterations=1000, planned_from=begun + 1 + at)
    assert all(ran[at + 1 :]) and OWN_BACKEND.runs
    assert comparison.own is not None and comparison.ours is not None


def test_ranks_that_are_not_at_the_same_call_end_later_turns_on_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    comparison, begun = undecided(monkeypatch, ranks)
    ranks.answers = [False] * (MAX_MISSES + 5)
    ran = go_on(comparison, begun, lambda own: 1000.0, monkeypatch, iterations=600)
    assert all(ran) and OWN_BACKEND.runs and not comparison.settled and len(ranks.answers) == 5


@pytest.mark.parametrize("seed", range(100))
def test_faster_is_what_a_permutation_test_says(seed: int) -> None:
    draw = random.Random(seed)
    shift = draw.choice([0.0, 0.1, 0.3, 1.0])
    some = [draw.gauss(1.0, 0.2) for _ in range(draw.randint(8, 24))]
    others = [draw.gauss(1.0 + shift, 0.2) for _ in range(draw.randint(8, 24))]

    def pairs(first: list[float], second: list[float]) -> int:
        return sum(a < b for a in first for b in second)

    together, found, times = some + others, pairs(some, others), 2000
    beaten = 0
    for _ in range(times):
        draw.shuffle(together)
        beaten += pairs(together[: len(some)], together[len(some) :]) >= found
    chance = beaten / times
    if chance < 0.004:
        assert faster(some, others) == (median(some) < median(others))
    elif chance > 0.025:
        assert not faster(some, others)


@pytest.mark.parametrize("seed", range(300))
def test_the_sum_of_checks_says_whether_all_ranks_of_all_groups_have_made_the_same_calls(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(2, 9)
    groups = {
        f"group {number}": sorted(draw.sample(range(size), draw.randint(1, size)))
        for number in range(draw.randint(1, 6))
    }
    counts = {(name, rank): draw.randint(0, 5) for name in groups for rank in range(size)}
    if seed % 2:
        counts = {(name, rank): counts[name, 0] for name, rank in counts}
        if seed % 4 == 1:
            name = draw.choice(list(groups))
            counts[name, draw.choice(groups[name])] += 1
    alike = all(len({counts[name, rank] for rank in members}) == 1 for name, members in groups.items())
    total = sum(
        _check(name, members.index(rank), len(members), counts[name, rank])
        for name, members in groups.items()
        for rank in members
    )
    assert (total % 2**64 == 0) == alike


@pytest.mark.parametrize("seed", range(200))
def test_ranks_wait_for_one_another_only_where_all_come_to_the_same_calls(seed: int) -> None:
    """Ranks that come to their boundaries in any order, some never, some after other calls than the rest."""
    from torch._C import _distributed_c10d as c10d

    draw = random.Random(seed)
    size = draw.randint(2, 6)
    store = c10d.HashStore()
    rolls = [IterationRollCall(store, rank, size) for rank in range(size)]
    calls = [[3 * step for step in range(2 * MOST_STEPS)] for _ in range(size)]
    odd = draw.choice(["", "", "calls", "absent", "all but rank 0"])
    if odd == "calls":
        calls[draw.randrange(size)][draw.randint(1, NOTES)] += draw.choice([-1, 1, 3])
    away = {"absent": {draw.randrange(size)}, "all but rank 0": set(range(1, size))}.get(odd, set())
    # Synchronous training: nobody is more than an iteration ahead, of those who come at all.
    found: dict[int, int] = {}
    for step in range(1, 2 * MOST_STEPS):
        for rank in draw.sample(range(size), size):
            if rank in away or rank in found:
                continue
            engine: Any = SimpleNamespace(name="world", rank=rank, size=size, calls=calls[rank][step])
            said = rolls[rank].begin_at(step, [engine])
            if said is not None:
                found[rank] = said
                assert not said or said > step, "there is time until then"
    assert set(found) == set(range(size)) - away
    assert len(set(found.values())) == 1, "one decision"
    assert bool(found[min(found)]) == (not odd)
    if not odd:
        assert NOTES < found[0] <= NOTES + 1 + LEAD
