# SPDX-License-Identifier: Apache-2.0
"""The sentence for each comm-op, on schedules that can be drawn by hand."""

from __future__ import annotations

import pytest

from stretto.planner.reasons import length_us, overlap_us, reasons, union, wrapped
from stretto.planner.schedule.problem import MotifTask, Option, PlanProblem
from stretto.planner.schedule.schedule import Scheduler
from stretto.workload import Dep, Op, Workload


def option(*tasks: tuple[str, float], name: str = "o") -> Option:
    return Option(
        name=name,
        expression="",
        tasks=tuple(MotifTask(motif="m", algorithm="a", channels=(channel,), duration_us=us) for channel, us in tasks),
    )


def compute(name: str, us: float, *after: Dep, ranks: tuple[int, ...] = ()) -> Op:
    return Op(name=name, duration_us=us, after=after, ranks=ranks)


def comm(name: str, *after: Dep, groups: tuple[tuple[int, ...], ...] = ()) -> Op:
    return Op(name=name, kind="all_reduce", nbytes=1.0, after=after, groups=groups)


def said(ops: list[Op], choice: dict[str, int] | None = None, **options: tuple[Option, ...]) -> dict[str, str]:
    problem = PlanProblem(workload=Workload(name="w", num_ranks=4, ops=tuple(ops)), options=options)
    return reasons(Scheduler(problem).schedule(choice or {}), problem)


def test_what_nobody_hides_is_on_the_circle() -> None:
    ops = [compute("b", 10.0), comm("g", Dep(op="b")), compute("u", 2.0, Dep(op="g"))]
    assert said(ops, g=(option(("x", 4.0)),)) == {
        "g": "as a library does it; 0 % hidden behind compute; on the circle that sets the iteration time"
    }


def test_what_wraps_around_the_end_of_the_iteration_is_counted_on_both_sides() -> None:
    """The gradients start 2 before the iteration ends and go on 3 into the next: compute runs in all of it."""
    ops = [compute("f", 6.0), compute("b", 4.0, Dep(op="g", lag=1)), compute("t", 2.0), comm("g", Dep(op="b"))]
    assert said(ops, g=(option(("x", 5.0)),)) == {"g": "as a library does it; 100 % hidden behind compute"}


def test_work_of_another_iteration_is_said_to_be() -> None:
    ops = [comm("prep"), compute("f", 10.0, Dep(op="prep")), compute("b", 10.0)]
    assert "runs an iteration ahead" in said(ops, prep=(option(("x", 8.0)),))["prep"]
    ops = [compute("f", 6.0), compute("b", 6.0, Dep(op="g", lag=1)), comm("g", Dep(op="b"))]
    assert "runs in the next iteration" in said(ops, g=(option(("x", 5.0)),))["g"]
    # One half fits before the end of the iteration, the other does not.
    ops = [compute("f", 6.0, Dep(op="g", lag=1)), compute("b", 1.0), comm("g", Dep(op="f"))]
    half = said([*ops[:1], compute("b", 4.0), *ops[2:]], g=(option(("x", 3.0), ("y", 3.0)),))["g"]
    assert "runs" not in half


def test_options_are_measured_against_the_default() -> None:
    ops = [compute("b", 10.0, Dep(op="g", lag=1)), comm("g", Dep(op="b"))]
    options = (option(("x", 4.0)), option(("x", 3.0)), option(("x", 5.0)), option(("x", 2.0), ("x", 2.0)))
    start = [said(ops, {"g": at}, g=options)["g"].split(";")[0] for at in range(4)]
    assert start == [
        "as a library does it",
        "25 % faster alone than the default",
        "25 % slower alone than the default, but better in place",
        "as fast alone as the default",
    ]


def test_partners_are_those_that_share_time_and_ranks() -> None:
    after = Dep(op="b")
    ops = [compute("b", 1.0), comm("g", after), comm("h", after), compute("u", 1.0, Dep(op="g"), Dep(op="h"))]
    found = said(ops, g=(option(("x", 4.0)),), h=(option(("y", 3.0)),))
    assert "overlaps h" in found["g"]
    assert "overlaps g" in found["h"]
    assert "overlaps" not in said(ops, g=(option(("x", 4.0)),), h=(option(("x", 3.0)),))["g"]
    left, right = (0, 1), (2, 3)
    ops = [
        compute("l", 1.0, Dep(op="g", lag=1), ranks=left), comm("g", Dep(op="l"), groups=(left,)),
        compute("r", 8.0, Dep(op="h", lag=1), ranks=right), comm("h", Dep(op="r"), groups=(right,)),
    ]  # fmt: skip
    found = said(ops, g=(option(("x", 8.0)),), h=(option(("x", 1.0)),))
    # The other half computes and sends meanwhile; that hides nothing here.
    assert all("overlaps" not in text and "0 % hidden" in text for text in found.values())


def test_only_three_partners_are_named() -> None:
    after = Dep(op="b")
    names = "vwxyz"
    ops = [compute("b", 1.0), *(comm(name, after) for name in names)]
    ops.append(compute("u", 1.0, *(Dep(op=name) for name in names)))
    found = said(ops, None, **{name: (option((name, 4.0)),) for name in names})
    assert "overlaps w, x, y ..." in found["v"]


def test_intervals() -> None:
    assert wrapped(1.0, 3.0, 10.0) == [(1.0, 3.0)]
    assert wrapped(8.0, 11.0, 10.0) == [(8.0, 10.0), (0.0, 1.0)]
    assert wrapped(3.0, 20.0, 10.0) == [(0.0, 10.0)]
    assert union([(4.0, 5.0), (0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]) == [(0.0, 3.0), (4.0, 6.0)]
    a, b = [(0.0, 3.0), (4.0, 6.0)], [(1.0, 2.0), (2.5, 5.0), (5.5, 9.0)]
    assert overlap_us(a, b) == overlap_us(b, a) == pytest.approx(1 + 0.5 + 1 + 0.5)
    assert length_us(a) == 5.0
