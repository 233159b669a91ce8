# SPDX-License-Identifier: Apache-2.0
"""What holds between the systems on any step."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judges.drawn_steps import random_problem

from stretto.planner.baselines import BASELINES, STOCK, Effort, as_submitted, baseline
from stretto.planner.schedule.problem import MotifTask, Option, PlanProblem
from stretto.planner.schedule.schedule import Scheduler, StepSchedule, check_order
from stretto.planner.schedule.search import search

EFFORT = Effort(evaluations=60, budget_s=float("inf"))


def some_problem(seed: int) -> PlanProblem:
    """A random step where every comm-op has also a plain default, and that cut into two and four."""
    draw = Random(seed)
    found = random_problem(seed, num_comm=draw.randint(2, 5), two_places=draw.random() < 0.5)
    options: dict[str, tuple[Option, ...]] = {}
    for name, others in found.options.items():
        us, channels = draw.randint(1, 8) / 2, draw.choice((("x",), ("y",), ("x", "y")))
        plain = [
            Option(
                name=f"whole/{pieces}", expression="", rules=("segment",) if pieces > 1 else (),
                tasks=tuple(
                    MotifTask(motif=f"m{k}", algorithm="ring", channels=channels, duration_us=us / pieces + 0.125)
                    for k in range(pieces)
                ),
            )
            for pieces in (1, 2, 4)
        ]  # fmt: skip
        options[name] = (*plain, *others)
    return replace(found, options=options)


def systems(problem: PlanProblem) -> dict[str, StepSchedule]:
    return {name: baseline(name, problem, EFFORT) for name in BASELINES}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_what_holds_between_systems(seed: int) -> None:
    problem = some_problem(seed)
    found = systems(problem)
    us = {name: schedule.period_us for name, schedule in found.items()}
    slack = 1 + 1e-9
    stock = replace(problem, workload=as_submitted(problem.workload))
    whole = dict.fromkeys(problem.options, 0)
    assert us["bytescheduler+"] <= Scheduler(stock).evaluate(whole, discipline="lifo", serial=True) * slack
    assert us["s_sched"] <= Scheduler(problem).evaluate(whole, serial=True) * slack
    assert us["hand_optimised"] <= us["bytescheduler+"] * slack
    assert us["s_exec"] <= us["fifo"] * slack
    assert all(found[name].choice == tuple(whole.values()) for name in ("fifo", "tictac"))
    assert {name for name in found if not found[name].serial} == {"s_exec", "syndicate"}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_ours_is_never_slower_and_can_be_carried_out(seed: int) -> None:
    problem = some_problem(seed)
    found = systems(problem)
    ours = search(problem, steps=200, seed=seed, start=tuple(found.values())).schedule
    for name, schedule in found.items():
        assert ours.period_us <= schedule.period_us * (1 + 1e-9), name
    check_order(problem.workload, ours)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_submission_only_adds_waits_for_compute_at_the_same_places(seed: int) -> None:
    workload = random_problem(seed, num_comm=5, two_places=True).workload
    made = as_submitted(workload)
    for before, after in zip(workload.ops, made.ops, strict=True):
        assert replace(after, after=()) == replace(before, after=())
        assert after.after[: len(before.after)] == before.after
        for dep in after.after[len(before.after) :]:
            assert after.is_comm
            assert dep.why == "submit"
            assert not made.op(dep.op).is_comm
            assert not made.ranks_of(made.op(dep.op)).isdisjoint(made.ranks_of(after))


@pytest.mark.parametrize("name", STOCK)
def test_stock_systems_run_nothing_ahead_of_its_submission(name: str) -> None:
    for seed in range(20):
        problem = some_problem(seed)
        found = baseline(name, problem, EFFORT)
        stock = Scheduler(replace(problem, workload=as_submitted(problem.workload)))
        again = stock.replay(found.choice, found.order, found.shift, serial=found.serial)
        assert again.period_us == pytest.approx(found.period_us)
