# SPDX-License-Identifier: Apache-2.0
"""Lower bounds that hold for every plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from judges.drawn_steps import figure6, random_problem

from stretto.planner.schedule.bounds import least_us, lower_bound
from stretto.planner.schedule.branch import branched
from stretto.planner.schedule.problem import MotifTask, Option, PlanProblem
from stretto.planner.schedule.schedule import DISCIPLINES, Scheduler
from stretto.workload import Dep, Op, Workload


def task(channels: str, us: float, *after: int) -> MotifTask:
    return MotifTask(motif="m", algorithm="a", channels=tuple(channels.split("+")), duration_us=us, after=after)


def option(*tasks: MotifTask) -> Option:
    return Option(name="o", expression="", tasks=tasks)


def hidden(compute_us: float, *options: tuple[Option, ...]) -> PlanProblem:
    """Communication that nobody waits for before the next iteration but one."""
    names = [f"g{k}" for k in range(len(options))]
    ops = (
        Op(name="c", duration_us=compute_us, after=tuple(Dep(op=name, lag=2) for name in names)),
        *(Op(name=name, kind="all_reduce", nbytes=1.0, after=(Dep(op="c"),)) for name in names),
    )
    workload = Workload(name="w", num_ranks=2, ops=ops)
    return PlanProblem(workload=workload, options=dict(zip(names, options, strict=True)))


def test_compute_binds() -> None:
    bound = lower_bound(hidden(10.0, (option(task("x", 4.0)),)))
    assert (bound.us, bound.why) == (10.0, "compute stream")


def test_a_circle_binds_by_its_lag() -> None:
    bound = lower_bound(
        hidden(
            10.0,
            (
                option(
                    task(
                        "x",
                        7.0,
                    ),
                    task("y", 7.0, 0),
                ),
            ),
        )
    )
    assert bound.us == 12.0
    assert bound.why == "circle of waiting: c, g0"


def test_channels_share_what_options_allow() -> None:
    either = (option(task("x", 6.0)), option(task("y", 6.0)))
    assert lower_bound(hidden(1.0, either, either)).us == pytest.approx(6.0)
    assert lower_bound(hidden(1.0, either, either, either), whole=False).us == pytest.approx(9.0)
    assert lower_bound(hidden(1.0, either, either, either)).us == pytest.approx(12.0, rel=1e-5)
    assert lower_bound(hidden(1.0, either, either), serial=True).us == pytest.approx(12.0)
    slow = (option(task("x", 6.0)), option(task("y", 12.0)))
    bound = lower_bound(hidden(1.0, slow, slow, slow))
    assert bound.us == pytest.approx(12.0)
    assert bound.why == "channel load"


def test_an_option_is_no_faster_than_its_chain_or_channel() -> None:
    assert least_us(option(task("x", 2.0), task("y", 3.0))) == 3.0
    assert least_us(option(task("x", 2.0), task("y", 3.0, 0))) == 5.0
    assert least_us(option(task("x", 2.0), task("x+y", 3.0), task("y", 1.0))) == 5.0


@settings(max_examples=60, deadline=None)
@given(seed=some.integers(0, 10_000), serial=some.booleans(), two_places=some.booleans(), data=some.data())
def test_no_schedule_beats_the_bound(seed: int, serial: bool, two_places: bool, data: some.DataObject) -> None:
    problem = random_problem(seed, num_comm=5, longest_us=6.0, two_places=two_places)
    scheduler = Scheduler(problem)
    bound = lower_bound(problem, serial=serial)
    assert bound.us == max(bound.arguments.values())
    choice = [data.draw(some.integers(0, len(problem.options[op.name]) - 1)) for op in problem.workload.comm_ops]
    for discipline in DISCIPLINES:
        if discipline != "priority":
            assert scheduler.evaluate(choice, discipline=discipline, serial=serial) >= bound.us * (1 - 1e-9)


def test_options_that_are_divided_raise_the_bound_to_the_best_choice() -> None:
    # Each of three ops is on one of two channels: shares would halve the load, whole options are 8 and 4.
    either = (option(task("x", 4.0)), option(task("y", 4.0)))
    problem = hidden(1.0, either, either, either)
    first = lower_bound(problem, whole=False)
    assert first.us == pytest.approx(6.0)
    assert lower_bound(problem).us == pytest.approx(8.0, rel=1e-5)
    higher = branched(problem, first, 8.0, branches=20)
    assert higher.us == pytest.approx(8.0)
    assert higher.why.startswith("options of comm-ops one by one")
    assert branched(problem, first, 8.0, branches=0) is first
    assert branched(problem, first, first.us, branches=20) is first, "a plan at the bound needs none"


def test_divided_options_never_exceed_the_best_bound_of_any_choice() -> None:
    raised = sharper = 0
    for seed in range(40):
        problem = random_problem(seed, num_comm=3, longest_us=8.0)
        first = lower_bound(problem, whole=False)
        names = list(problem.options)
        every = product(*(range(len(problem.options[name])) for name in names))
        single = [
            replace(problem, options={n: (problem.options[n][k],) for n, k in zip(names, choice, strict=True)})
            for choice in every
        ]
        best = min(Scheduler(one).schedule([0] * len(names)).period_us for one in single)
        higher = branched(problem, first, best, branches=12)
        assert first.us <= higher.us <= best * (1 + 1e-9), seed
        whole = lower_bound(problem)
        assert first.us <= whole.us <= best * (1 + 1e-9), seed
        sharper += whole.us > first.us * (1 + 1e-6)
        assert higher.us <= max(min(lower_bound(one).us for one in single), first.us) * (1 + 1e-9), seed
        raised += higher.us > first.us * (1 + 1e-6)
    assert raised > 3
    assert sharper > 3


def test_of_equal_ops_a_whole_number_takes_the_slower_channel() -> None:
    # Seven ops, three times slower on the second channel: shares would put 1.75 of them there.
    either = (option(task("x", 1.0)), option(task("y", 3.0)))
    problem = hidden(1.0, *([either] * 7))
    first = lower_bound(problem, whole=False)
    assert first.us == pytest.approx(5.25)
    assert lower_bound(problem).us == pytest.approx(6.0, rel=1e-5)
    assert branched(problem, first, 6.0, branches=2).us == pytest.approx(6.0)


def test_gradients_and_messages_of_a_stage_take_turns() -> None:
    # The last message back goes out, gradients go both ways, and the next iteration's first message comes in: no two of
    # them can run at once, though the two messages hold different ends.
    ops = (
        Op(name="f0", duration_us=1.0, ranks=(0, 1), after=(Dep(op="back", lag=1),)),
        Op(name="send", kind="send", nbytes=1.0, groups=((0, 2), (1, 3)), after=(Dep(op="f0"),)),
        Op(name="f1", duration_us=2.0, ranks=(2, 3), after=(Dep(op="send"), Dep(op="grad", lag=1))),
        Op(name="back", kind="send", nbytes=1.0, groups=((2, 0), (3, 1)), after=(Dep(op="f1"),)),
        Op(name="grad", kind="all_reduce", nbytes=1.0, groups=((2, 3),), after=(Dep(op="f1"),)),
    )
    workload = Workload(name="stages", num_ranks=4, ops=ops)
    options: dict[str, tuple[Option, ...]] = {
        "send": (option(task("x", 3.0)),),
        "back": (option(task("x", 3.0)),),
        "grad": (option(task("x", 5.0)),),
    }
    problem = PlanProblem(workload=workload, options=options)
    # In turns: 2 of compute and 3 + 5 + 3 of communication; without that 10, the load of one end with what lies around.
    assert lower_bound(problem).us == pytest.approx(13.0)
    assert Scheduler(problem).schedule([0, 0, 0]).period_us == pytest.approx(13.0)


def test_the_worked_example_reaches_its_bound() -> None:
    bound = lower_bound(figure6())
    assert bound.us == pytest.approx(9.5, rel=1e-5)
    assert bound.why == "channel load and waiting together, with one whole option for each"
