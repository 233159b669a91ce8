# SPDX-License-Identifier: Apache-2.0
"""A start in which runs of equal comm-ops take another option than the rest."""

from __future__ import annotations

import time

import pytest
from judges.drawn_steps import random_problem

from stretto.planner.schedule.problem import MotifTask, Option, PlanProblem
from stretto.planner.schedule.runs import OpRun, RunSearch
from stretto.planner.schedule.schedule import Scheduler
from stretto.planner.schedule.search import search
from stretto.workload import Dep, Op, Workload


def option(name: str, channel: str, *us: float) -> Option:
    tasks = tuple(MotifTask(motif="RS", algorithm="ring", channels=(channel,), duration_us=each) for each in us)
    return Option(name=name, expression="RS", tasks=tasks)


def layers(count: int) -> PlanProblem:
    """Gradients of equal layers; a second network is four times slower, and most options are no use."""
    ops = []
    for k in range(count):
        ops.append(Op(name=f"backward{k}", duration_us=0.1, after=(Dep(op=f"grad{k}", lag=1),)))
        ops.append(Op(name=f"grad{k}", kind="reduce_scatter", nbytes=1.0, after=(Dep(op=f"backward{k}"),)))
    options = (
        option("fast", "ib", 1.0), option("slow", "eth", 4.2),
        *(option(f"fast in {n}", "ib", *([1.3 / n] * n)) for n in range(2, 20)),
        *(option(f"slow in {n}", "eth", *([6.0 / n] * n)) for n in range(2, 20)),
    )  # fmt: skip
    workload = Workload(name="layers", num_ranks=2, ops=tuple(ops))
    return PlanProblem(workload=workload, options={f"grad{k}": options for k in range(count)}, costs="example")


def test_the_second_network_takes_its_share_of_equal_layers() -> None:
    scheduler = Scheduler(layers(40))
    bound = scheduler.bound()
    greedy_us = scheduler.evaluate(scheduler.greedy)
    assert greedy_us > 1.2 * bound.us
    runs = RunSearch(scheduler, bound, serial=False, most=200)
    us, choice = runs.descend(scheduler.greedy)
    assert us < 1.05 * bound.us
    assert us == scheduler.evaluate(choice)
    # With few steps the search alone does not come near.
    assert search(scheduler, steps=200, chains=1).schedule.period_us <= us * (1 + 1e-9)


@pytest.mark.parametrize("placement", ["first", "last", "spread"])
def test_the_members_of_a_run(placement: str) -> None:
    ops = (3, 5, 8, 13, 21)
    for length in range(1, 6):
        run = OpRun(ops=ops, option=1, placement=placement, length=3).resized(length)
        members = run.members()
        assert len(set(members)) == length and set(members) <= set(ops)
        assert members == sorted(members)
        expected = {"first": list(ops[:length]), "last": list(ops[5 - length :])}.get(placement, members)
        assert members == expected


@pytest.mark.parametrize("seed", range(20))
def test_a_descent_never_ends_above_its_start_nor_below_the_bound(seed: int) -> None:
    scheduler = Scheduler(random_problem(seed, num_comm=3 + seed % 6, two_places=seed % 2 == 0))
    bound = scheduler.bound()
    start_us = scheduler.evaluate(scheduler.greedy)
    runs = RunSearch(scheduler, bound, serial=False, most=60)
    us, choice = runs.descend(scheduler.greedy)
    assert bound.us * (1 - 1e-9) <= us <= start_us
    assert us == scheduler.evaluate(choice)
    assert runs.evaluations <= 62
    late = RunSearch(scheduler, bound, serial=False, most=60, until=time.monotonic())
    assert late.descend(scheduler.greedy) == (start_us, scheduler.greedy)
