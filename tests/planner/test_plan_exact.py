# SPDX-License-Identifier: Apache-2.0
"""The exact optimum of small problems, by itself and as the measure of the search."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations, product

import pytest
from judges.drawn_steps import figure6, random_problem
from judges.planner_exact import solve_exactly

from stretto.errors import Infeasible, InvalidInput
from stretto.planner.schedule.bounds import lower_bound
from stretto.planner.schedule.problem import MotifTask, Option, PlanProblem
from stretto.planner.schedule.schedule import Scheduler
from stretto.planner.schedule.search import search
from stretto.workload import Dep, Op, Workload


def by_trying_all(problem: PlanProblem) -> float:
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


@pytest.mark.parametrize("seed", [1, 5, 7, 8])
def test_it_agrees_with_trying_everything_where_links_are_shared(seed: int) -> None:
    """Tasks of two places that meet on a link for half of their time; some ops are sends, one way or the other."""
    problem = random_problem(seed, num_comm=3, num_options=2, num_tasks=1, longest_us=6.0, two_places=True)
    options = {
        name: tuple(
            replace(option, tasks=tuple(replace(t, shared=((0, t.duration_us / 2),)) for t in option.tasks))
            for option in some
        )
        for name, some in problem.options.items()
    }
    sends = (((0, 2), (1, 3)), ((2, 0), (3, 1)))
    ops = [
        replace(op, kind="send", groups=sends[at % 2]) if op.is_comm and not op.groups else op
        for at, op in enumerate(problem.workload.ops)
    ]
    problem = replace(problem, workload=replace(problem.workload, ops=tuple(ops)), options=options)
    found = solve_exactly(problem, limit_s=30.0)
    assert found.status == "optimal"
    assert found.value_us == pytest.approx(by_trying_all(problem), rel=1e-9)
    assert lower_bound(problem).us <= found.value_us * (1 + 1e-9)


@pytest.mark.parametrize(("num_comm", "seed"), [(4, 1), (6, 3), (8, 4), (10, 3), (12, 5)])
def test_the_search_is_within_one_percent_of_the_optimum(num_comm: int, seed: int) -> None:
    problem = random_problem(seed, num_comm=num_comm, longest_us=6.0)
    exact = solve_exactly(problem, limit_s=300.0)
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


def test_out_of_time_the_start_and_its_bound_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = random_problem(3, num_comm=10, longest_us=6.0)
    monkeypatch.setattr("stretto.solvers.cp_sat.minimize", lambda task, limit_s: ("unknown", None, 0.0))
    found = solve_exactly(problem, limit_s=1e-3)
    assert found.status == "feasible"
    assert found.value_us == found.schedule.period_us
    assert found.bound_us == lower_bound(problem).us < found.value_us
    assert found.gap > 0


def corner() -> PlanProblem:
    """Four comm-ops that fill one channel without a gap at the optimum, and that single moves hardly lead to."""

    def option(*tasks: tuple[str, float, tuple[int, ...]]) -> Option:
        made = tuple(
            MotifTask(motif="m", algorithm="a", channels=tuple(channels), duration_us=us, after=after)
            for channels, us, after in tasks
        )
        return Option(name="o", expression="", tasks=made)

    def comm(name: str, *after: Dep) -> Op:
        return Op(name=name, kind="all_reduce", nbytes=1.0, after=after)

    ops = (
        comm("o0"), comm("o1", Dep(op="o0"), Dep(op="o5", lag=2)),
        comm("o2", Dep(op="o0"), Dep(op="o1"), Dep(op="o1", lag=2)), comm("o3", Dep(op="o3", lag=2)),
        Op(name="o4", duration_us=3.0, stream="side", after=(Dep(op="o1"), Dep(op="o2", lag=1))),
        Op(name="o5", duration_us=9.0, after=(Dep(op="o0"),)),
    )  # fmt: skip
    options = {
        "o0": (option(("c", 6.0, ())), option(("a", 6.0, ()), ("c", 1.0, (0,))),
               option(("c", 6.0, ()), ("a", 5.0, (0,)), ("a", 3.0, ()))),
        "o1": (option(("bc", 8.0, ()), ("ac", 8.0, ())), option(("ac", 6.0, ()), ("b", 2.0, (0,)), ("c", 8.0, (0, 1)))),
        "o2": (option(("b", 2.0, ()), ("bc", 8.0, (0,))), option(("bc", 8.0, ()), ("bc", 2.0, ())),
               option(("ab", 5.0, ()))),
        "o3": (option(("a", 4.0, ()), ("a", 7.0, ())), option(("bc", 5.0, ()), ("c", 6.0, ())),
               option(("bc", 2.0, ()), ("b", 7.0, (0,)), ("c", 1.0, (1,)))),
    }  # fmt: skip
    return PlanProblem(workload=Workload(name="corner", num_ranks=2, ops=ops), options=options)


@pytest.mark.parametrize("seed", [1, 2])
def test_several_moves_at_once_lead_out_of_a_corner(seed: int) -> None:
    assert search(corner(), steps=60_000, seed=seed).schedule.period_us == 18.0
    assert solve_exactly(corner(), limit_s=300.0).value_us == 18.0
