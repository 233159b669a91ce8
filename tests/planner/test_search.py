# SPDX-License-Identifier: Apache-2.0
"""The search: reproducible, never worse than what it is given, and as the paper describes where it says so."""

from __future__ import annotations

import pytest
from judges.drawn_steps import figure6, random_problem

from stretto.errors import InvalidInput
from stretto.planner.schedule.schedule import DISCIPLINES, Scheduler, StepSchedule, check_order
from stretto.planner.schedule.search import MODES, Progress, search

HARD = 4
"""A seed whose step no plan found so far brings down to the bound."""


def same(a: StepSchedule, b: StepSchedule) -> bool:
    return (a.choice, a.order, a.shift, a.period_us) == (b.choice, b.order, b.shift, b.period_us)


@pytest.mark.parametrize("mode", MODES)
def test_the_worked_example_is_solved(mode: str) -> None:
    found = search(figure6(), steps=3000, mode=mode)
    # Ours also starts from the options of the bound's linear program, which are already the best ones here.
    assert found.start_us == (10.0 if mode == "syndicate" else 9.5)
    assert found.schedule.period_us == 9.5
    assert found.schedule.choice == (0, 0, 0, 1)


@pytest.mark.parametrize("mode", MODES)
def test_with_a_budget_of_steps_only_the_seed_decides(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(5, num_comm=9, longest_us=6.0)
    first = search(problem, steps=4000, seed=7, mode=mode)
    # As on a machine that is so busy, or so fast, that every slice of the search takes another time.
    monkeypatch.setattr("stretto.planner.schedule.search.SLICE_S", 1e-9)
    again = search(problem, steps=4000, seed=7, mode=mode)
    assert same(first.schedule, again.schedule)
    assert (first.evaluations, first.acceptance) == (again.evaluations, again.acceptance)
    assert [x[1:] for x in first.curve][-1] == [x[1:] for x in again.curve][-1]


def test_threads_change_nothing_but_the_time() -> None:
    problem = random_problem(5, num_comm=9, longest_us=6.0)
    assert same(search(problem, steps=4000, seed=3).schedule, search(problem, steps=4000, seed=3, threads=3).schedule)


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_is_never_worse_than_any_it_starts_from(seed: int) -> None:
    scheduler = Scheduler(random_problem(seed, num_comm=8, longest_us=5.0, two_places=seed % 2 == 0))
    last = tuple(len(scheduler.problem.options[op.name]) - 1 for op in scheduler.problem.workload.comm_ops)
    plans = [
        scheduler.schedule(choice, discipline=discipline, serial=serial)
        for choice in (scheduler.greedy, last)
        for discipline in DISCIPLINES
        if discipline != "priority"
        for serial in (False, True)
    ]
    found = search(scheduler, steps=1, seed=seed, start=plans)
    assert found.schedule.period_us <= min(plan.period_us for plan in plans) * (1 + 1e-9)
    assert found.schedule.period_us >= found.bound.us * (1 - 1e-9)
    assert found.start_us >= found.schedule.period_us
    check_order(scheduler.problem.workload, found.schedule)


@pytest.mark.parametrize("seed", range(4))
def test_ours_is_at_least_as_good_as_the_papers(seed: int) -> None:
    problem = random_problem(20 + seed, num_comm=10, longest_us=6.0, num_tasks=3)
    paper = search(problem, steps=3000, seed=seed, mode="syndicate")
    ours = search(problem, steps=3000, seed=seed, start=[paper.schedule])
    assert ours.schedule.period_us <= paper.schedule.period_us * (1 + 1e-9)


def test_what_is_found_is_what_replaying_it_gives() -> None:
    scheduler = Scheduler(random_problem(11, num_comm=9, longest_us=6.0))
    for serial in (False, True):
        plan = search(scheduler, steps=3000, serial=serial).schedule
        assert scheduler.replay(plan.choice, plan.order, plan.shift, serial=serial).period_us == plan.period_us
        assert plan.serial is serial


def test_a_large_step_is_judged_as_replaying_it_does_and_grows_little() -> None:
    seed = 0
    scheduler = Scheduler(random_problem(seed, num_comm=2100, longest_us=2.0, two_places=True, num_tasks=6))
    found = search(scheduler, steps=150, seed=seed)
    assert found.curve[-1][2] == pytest.approx(found.schedule.period_us, rel=1e-9)
    assert found.schedule.period_us < found.start_us, "the period that moves leave is known, not only an upper bound"
    starts = [scheduler.schedule(scheduler.greedy, discipline=d) for d in DISCIPLINES if d != "priority"]
    assert len(found.schedule.order) <= 1.25 * max(len(one.order) for one in starts)


def test_the_papers_search_keeps_to_its_discipline() -> None:
    scheduler = Scheduler(random_problem(12, num_comm=6))
    found = search(scheduler, steps=1000, mode="syndicate", discipline="lifo", serial=True)
    again = scheduler.schedule(found.schedule.choice, discipline="lifo", serial=True)
    assert again.period_us == pytest.approx(found.schedule.period_us, rel=1e-9)


def test_a_plan_that_meets_the_bound_ends_the_search() -> None:
    found = search(random_problem(3, num_comm=4), steps=10**9)
    assert found.why_stopped.startswith("optimal: equals the lower bound (")
    assert found.schedule.period_us == pytest.approx(found.bound.us, rel=1e-9)


def test_the_papers_search_gives_up_when_half_of_it_brought_nothing() -> None:
    found = search(random_problem(HARD, num_comm=8), steps=100_000, mode="syndicate")
    assert found.why_stopped == "nothing better for half of the search"
    assert found.steps < 100_000


def test_progress_is_told_and_can_end_the_search() -> None:
    seen: list[Progress] = []

    def watch(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 3:
            raise KeyboardInterrupt

    found = search(random_problem(HARD, num_comm=8), budget_s=60.0, progress=watch)
    assert found.why_stopped == "interrupted"
    assert len(seen) == 3
    assert [p.evaluations for p in seen] == sorted(p.evaluations for p in seen)
    assert all(p.left_s is not None and 0 <= p.left_s <= 60 and 0 < p.acceptance < 1 for p in seen)
    assert found.schedule.period_us == pytest.approx(seen[-1].best_us)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "best"}, "unknown mode 'best'; choose from: stretto, syndicate"),
        ({"budget_s": 0.0}, "budget_s: must be finite and > 0, not 0"),
        ({"budget_s": float("inf")}, "budget_s: must be finite and > 0, not inf"),
        ({"steps": 0}, "steps: must be > 0, not 0"),
        ({"chains": 0}, "chains, threads: must be 1..64"),
        ({"discipline": "priority"}, "unknown discipline 'priority'; choose from: critical_path, lifo, fifo"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        search(figure6(), **arguments)  # type: ignore[arg-type]


def test_a_workload_without_choices_has_its_one_plan() -> None:
    problem = random_problem(1, num_comm=1, num_options=1, num_tasks=1)
    for mode in MODES:
        assert search(problem, steps=200, mode=mode).schedule.choice == (0,)
