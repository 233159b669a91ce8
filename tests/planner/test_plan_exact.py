"""The exact optimum of small problems, by itself and as the measure of the search."""

from __future__ import annotations

from itertools import permutations, product

import pytest

from stretto.errors import Infeasible, InvalidInput
from stretto.planner.bounds import lower_bound
from stretto.planner.exact import solve_exactly
from stretto.planner.example import figure6, random_problem
from stretto.planner.problem import Problem
from stretto.planner.schedule import Scheduler
from stretto.planner.search import search


def by_trying_all(problem: Problem) -> float:
    """Every choice, every order, every shift."""
    scheduler = Scheduler(problem)
    best = float("inf")
    for choice in product(*(range(len(problem.options[op.name])) for op in problem.workload.comm_ops)):
        for order in permutations(scheduler.tasks(choice)):
            for shift in product((-1, 0, 1), repeat=len(order)):
                try:
                    best = min(best, scheduler.replay(choice, order, shift).period_us)
                except Infeasible:
                    continue
    return best


def test_the_worked_example_cannot_be_improved() -> None:
    found = solve_exactly(figure6(), limit_s=30.0)
    assert (found.value_us, found.status) == (9.5, "optimal")
    assert found.bound_us == pytest.approx(9.5, rel=1e-3)
    assert found.bound_us <= 9.5


@pytest.mark.parametrize("seed", [1, 6, 8])
def test_it_agrees_with_trying_everything(seed: int) -> None:
    problem = random_problem(seed, num_comm=3, num_options=2, num_tasks=1, longest_us=6.0)
    found = solve_exactly(problem, limit_s=30.0)
    assert found.status == "optimal"
    assert found.value_us == pytest.approx(by_trying_all(problem), rel=1e-9)


@pytest.mark.parametrize(("num_comm", "seed"), [(4, 1), (6, 3), (8, 4), (10, 3), (12, 5)])
def test_the_search_is_within_one_percent_of_the_optimum(num_comm: int, seed: int) -> None:
    problem = random_problem(seed, num_comm=num_comm, longest_us=6.0)
    exact = solve_exactly(problem, limit_s=40.0)
    assert exact.status == "optimal"
    assert lower_bound(problem).us <= exact.bound_us * (1 + 1e-9)
    assert exact.bound_us > lower_bound(problem).us * 1.001, "a case that needs more than the simple bounds"
    found = search(problem, steps=60_000, seed=1)
    assert found.schedule.period_us <= exact.bound_us * 1.01
    assert found.schedule.period_us >= exact.bound_us * (1 - 1e-9)


def test_a_start_that_meets_the_bound_needs_no_solver() -> None:
    problem = random_problem(3, num_comm=4)
    plan = search(problem, steps=2000).schedule
    found = solve_exactly(problem, start=plan)
    assert found.schedule is plan
    assert found.gap == pytest.approx(0.0, abs=1e-9)


def test_large_problems_are_refused() -> None:
    with pytest.raises(InvalidInput, match="exact: at most 12 comm-ops, not 13"):
        solve_exactly(random_problem(0, num_comm=13))
