# SPDX-License-Identifier: Apache-2.0
"""Schedules worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from judges.drawn_steps import figure6
from judges.planner_exact import solve_exactly

from stretto.errors import Infeasible, InvalidInput
from stretto.planner.schedule.bounds import lower_bound
from stretto.planner.schedule.problem import MotifTask, Option, PlanProblem
from stretto.planner.schedule.schedule import Scheduler, StepSchedule, check_order
from stretto.workload import Dep, Op, Workload


def option(*tasks: tuple[str, float], name: str = "o", chained: bool = False) -> Option:
    return Option(
        name=name,
        expression="",
        tasks=tuple(
            MotifTask(motif=f"m{k}", algorithm="a", channels=tuple(channels.split("+")), duration_us=us,
                 after=(k - 1,) if chained and k else ())
            for k, (channels, us) in enumerate(tasks)
        ),
    )  # fmt: skip


def problem(ops: list[Op], **options: Option | tuple[Option, ...]) -> PlanProblem:
    workload = Workload(name="by hand", num_ranks=4, ops=tuple(ops))
    return PlanProblem(workload=workload, options={k: v if isinstance(v, tuple) else (v,) for k, v in options.items()})


def compute(name: str, us: float, *after: Dep, stream: str = "compute", ranks: tuple[int, ...] = ()) -> Op:
    return Op(name=name, duration_us=us, after=after, stream=stream, ranks=ranks)


def comm(name: str, *after: Dep, groups: tuple[tuple[int, ...], ...] = ()) -> Op:
    return Op(name=name, kind="all_reduce", nbytes=1.0, after=after, groups=groups)


def at(schedule: StepSchedule, op: int, task: int = -1) -> tuple[float, float, int]:
    row = int(np.flatnonzero((schedule.op == op) & (schedule.task == task))[0])
    return float(schedule.start_us[row]), float(schedule.end_us[row]), int(schedule.iteration[row])


def test_communication_that_nobody_hides_adds_to_the_iteration() -> None:
    step = problem(
        [compute("b", 10.0), comm("g", Dep(op="b")), compute("u", 2.0, Dep(op="g"))], g=option(("x", 4.0), ("x", 3.0))
    )
    found = Scheduler(step).schedule([0])
    assert found.period_us == 19.0
    assert found.first_us == 19.0
    assert at(found, 1, 0) == (10.0, 14.0, 0)
    assert at(found, 1, 1) == (14.0, 17.0, 0)
    assert at(found, 2) == (17.0, 19.0, 0)
    assert found.compute_idle == pytest.approx([7 / 19])
    assert found.exposed_us == pytest.approx([7.0])
    assert found.seq == (0, 1)


def test_a_wait_in_the_next_iteration_lets_communication_hide() -> None:
    ops = [compute("f", 6.0), compute("b", 6.0, Dep(op="g", lag=1)), comm("g", Dep(op="b"))]
    found = Scheduler(problem(ops, g=option(("x", 5.0)))).schedule([0])
    assert found.period_us == 12.0
    assert at(found, 2, 0) == (0.0, 5.0, -1)
    assert found.shift == (-1,)
    assert found.exposed_us == pytest.approx([0.0])
    assert Scheduler(problem(ops, g=option(("x", 9.0)))).schedule([0]).period_us == 15.0


@pytest.mark.parametrize(("lag", "period"), [(0, 11.0), (1, 8.0), (2, 8.0)])
def test_a_lag_counts_iterations(lag: int, period: float) -> None:
    # With a lag of 1 the circle is compute 3 + communication 8 over 1; with 2 it is 11 over 2, and the channel binds.
    ops = [comm("g", Dep(op="c", lag=1)), compute("c", 3.0, Dep(op="g", lag=lag))]
    found = Scheduler(problem(ops, g=option(("x", 8.0)))).schedule([0])
    assert found.period_us == (11.0 if lag == 0 else max(period, 11.0 / (lag + 1)))


def test_work_is_pulled_ahead_of_its_own_iteration() -> None:
    """As the all-to-all of data preparation: nothing of this iteration comes before it."""
    ops = [comm("prep"), compute("f", 10.0, Dep(op="prep")), compute("b", 10.0)]
    found = Scheduler(problem(ops, prep=option(("x", 8.0)))).schedule([0])
    assert found.period_us == 20.0
    assert found.shift == (1,)
    assert found.first_us == 28.0


def test_tasks_on_other_channels_overlap_unless_the_stack_is_serial() -> None:
    after = Dep(op="b")
    ops = [compute("b", 1.0), comm("g", after), comm("h", after), compute("u", 1.0, Dep(op="g"), Dep(op="h"))]
    scheduler = Scheduler(problem(ops, g=option(("x+y", 4.0)), h=option(("z", 5.0))))
    together = scheduler.schedule([0, 0])
    assert together.period_us == 7.0
    assert together.seq == (0, 0)
    assert scheduler.schedule([0, 0], serial=True).period_us == 11.0
    shared = Scheduler(problem(ops, g=option(("x+y", 4.0)), h=option(("y+z", 5.0))))
    assert shared.schedule([0, 0]).period_us == 11.0
    assert shared.schedule([0, 0]).seq == (0, 1)


def test_places_do_not_hinder_each_other() -> None:
    left, right = (0, 1), (2, 3)
    ops = [
        compute("l", 2.0, ranks=left), compute("r", 3.0, ranks=right),
        comm("gl", Dep(op="l"), groups=(left,)), comm("gr", Dep(op="r"), groups=(right,)),
        compute("ul", 1.0, Dep(op="gl"), ranks=left), compute("ur", 1.0, Dep(op="gr"), ranks=right),
    ]  # fmt: skip
    scheduler = Scheduler(problem(ops, gl=option(("x", 4.0)), gr=option(("x", 4.0))))
    for serial in (False, True):
        found = scheduler.schedule([0, 0], serial=serial)
        assert found.period_us == 8.0
        assert found.compute_idle == pytest.approx([5 / 8, 4 / 8])


def skewed() -> Workload:
    """Two ranks that take turns in being slow: each computes for 11, nobody for 20."""
    return Workload(
        name="skew", num_ranks=2,
        ops=(
            Op(name="a", durations_us=(1.0, 10.0)), Op(name="b", durations_us=(10.0, 1.0), after=(Dep(op="a"),)),
            comm("g", Dep(op="b")), compute("u", 1.0, Dep(op="g")),
        ),
    )  # fmt: skip


def test_a_compute_op_takes_each_places_own_time() -> None:
    step = PlanProblem(workload=skewed(), options={"g": (option(("x", 2.0)),)})
    found = Scheduler(step).schedule([0])
    assert step.workload.compute_us == 12.0
    # Both arrive at g after 11; neither waits for the other before.
    assert found.period_us == 14.0
    assert lower_bound(step).us == pytest.approx(14.0)
    assert found.compute_idle == pytest.approx([2 / 14, 2 / 14])
    assert found.exposed_us == pytest.approx([2.0, 2.0])
    rows = {(int(o), int(p)): float(e) for o, p, e in zip(found.op, found.place, found.end_us, strict=True)}
    assert rows == {(0, 0): 1.0, (0, 1): 10.0, (1, 0): 11.0, (1, 1): 11.0, (2, -1): 13.0, (3, 0): 14.0, (3, 1): 14.0}
    assert solve_exactly(step).value_us == 14.0
    check_order(step.workload, found)
    shown = found.timeline(step)
    assert shown.num_spans == 8
    assert sorted((shown.end_us - shown.start_us)[shown.rank == 1].tolist()) == [1.0, 1.0, 2.0, 10.0]


def test_a_place_waits_only_for_what_happens_there() -> None:
    ops = [
        compute("slow", 9.0, ranks=(0, 1)), compute("all", 1.0, stream="other"),
        compute("left", 1.0, Dep(op="all"), ranks=(0, 1), stream="third"),
        comm("pair", Dep(op="slow"), Dep(op="all"), groups=((2, 3),)),
        compute("end", 1.0, Dep(op="pair"), ranks=(2, 3)),
    ]  # fmt: skip
    scheduler = Scheduler(problem(ops, pair=option(("x", 1.0))))
    nodes = scheduler.nodes
    assert nodes.op == (0, 1, 1, 2, 3, 4)
    assert nodes.place == (0, 0, 1, 0, -1, 1)
    # `left` waits for its own place's part; `pair` is not where `slow` is, so it waits for that wherever it is.
    assert nodes.waits == ((), (), (), ((1, 0),), ((0, 0), (2, 0)), ((4, 0),))


@pytest.mark.parametrize("compute_us", [0.0, 0.5, 5.0, 100.0])
def test_what_nobody_waits_for_ends_two_iterations_later(compute_us: float) -> None:
    ops = [compute("f", compute_us), comm("g", Dep(op="f"))]
    step = problem(ops, g=option(("x", 7.0)))
    scheduler = Scheduler(step)
    for discipline in ("critical_path", "lifo", "fifo"):
        for serial in (False, True):
            found = scheduler.schedule([0], discipline=discipline, serial=serial)
            # The channel, the compute, or both in a circle of two iterations.
            assert found.period_us == max(7.0, compute_us, (7.0 + compute_us) / 2)
            check_order(step.workload, found)
    assert lower_bound(step).us == pytest.approx(max(7.0, compute_us, (7.0 + compute_us) / 2))
    assert solve_exactly(step).value_us == max(7.0, compute_us, (7.0 + compute_us) / 2)


def test_what_only_communication_waits_for_ends_too_at_every_place() -> None:
    left, right = (0, 1), (2, 3)
    ops = [
        compute("l", 1.0, ranks=left), compute("r", 1.0, ranks=right), comm("g", Dep(op="l"), groups=(left,)),
        comm("h", Dep(op="g"), Dep(op="h", lag=1), groups=((0, 2), (1, 3))),
    ]  # fmt: skip
    scheduler = Scheduler(problem(ops, g=option(("x", 6.0)), h=option(("y", 7.0))))
    # g and h both have ended before l of two iterations later, h before r.
    assert scheduler.nodes.waits[:2] == (((2, 2), (3, 2)), ((3, 2),))
    found = scheduler.schedule([0, 0])
    assert found.period_us == 7.0
    assert lower_bound(scheduler.problem).us == 7.0
    # With slower communication the circle of l, g, h over two iterations binds.
    slow = Scheduler(problem(ops, g=option(("x", 9.0)), h=option(("y", 9.0))))
    assert slow.schedule([0, 0]).period_us == 9.5


def test_sends_run_beside_collectives_and_communicators_keep_their_own_order() -> None:
    ops = [
        compute("c", 1.0), comm("g", Dep(op="c")), replace(comm("s", Dep(op="c"), groups=((0, 1),)), kind="send"),
        compute("u", 1.0, Dep(op="g"), Dep(op="s")),
    ]  # fmt: skip
    apart = Scheduler(problem(ops, g=option(("x", 4.0)), s=option(("y", 5.0))))
    assert apart.schedule([0, 0], discipline="fifo", serial=True).period_us == 7.0
    # `late` is listed first and ready last: only its own communicator waits for it.
    ops = [
        compute("slow", 9.0, stream="side"), comm("late", Dep(op="slow"), groups=((0, 1), (2, 3))),
        compute("c", 1.0, Dep(op="mine"), Dep(op="u", lag=1)), comm("mine"),
        comm("own", Dep(op="c"), groups=((0, 1), (2, 3))),
        compute("u", 1.0, Dep(op="own"), Dep(op="late")),
    ]  # fmt: skip
    scheduler = Scheduler(problem(ops, late=option(("x", 2.0)), mine=option(("x", 1.0)), own=option(("x", 1.0))))
    found = scheduler.schedule([0, 0, 0], discipline="fifo", serial=True)
    rows = zip(found.op, found.iteration, found.start_us, strict=True)
    start = {int(op): float(us) - int(ahead) * found.period_us for op, ahead, us in rows}
    assert start[4] >= start[1] + 2.0
    assert start[3] + 1.0 <= start[2]
    assert start[3] < start[1]


def test_streams_of_a_place_run_beside_each_other() -> None:
    ops = [compute("a", 5.0), compute("b", 4.0, stream="side"), compute("c", 1.0)]
    found = Scheduler(problem(ops)).schedule([])
    assert found.period_us == 6.0
    assert found.compute_idle == pytest.approx([0.0])


def test_disciplines_order_what_waits_for_one_channel() -> None:
    start = Dep(op="s")
    ops = [
        compute("s", 1.0), comm("p", start), comm("q", start), comm("r", start),
        compute("x", 10.0, Dep(op="q")), compute("e", 1.0, Dep(op="p"), Dep(op="r")),
    ]  # fmt: skip
    scheduler = Scheduler(problem(ops, p=option(("c", 2.0)), q=option(("c", 3.0)), r=option(("c", 4.0))))

    def order(discipline: str, priority: dict[str, float] | None = None) -> str:
        found = scheduler.schedule([0, 0, 0], discipline=discipline, priority=priority)
        return "".join("spqrxe"[op] for op, _ in found.order)

    assert order("fifo") == "pqr"
    assert order("lifo") == "rqp"
    assert order("critical_path") == "qrp"
    assert order("priority", {"p": 2.0, "q": 1.0, "r": 0.0}) == "rqp"
    assert order("priority", {"p": 1.0, "q": 1.0, "r": 0.0}) == "rpq"
    assert scheduler.evaluate([0, 0, 0]) == 15.0
    assert scheduler.evaluate([0, 0, 0], discipline="fifo") == 17.0


def test_an_order_that_contradicts_the_dependencies_is_refused_with_both_names() -> None:
    ops = [comm("g"), compute("c", 1.0, Dep(op="g")), comm("h", Dep(op="c"))]
    scheduler = Scheduler(problem(ops, g=option(("x", 1.0)), h=option(("x", 1.0))))
    assert scheduler.replay([0, 0], [(0, 0), (2, 0)], [0, 0]).period_us == 3.0
    # g of the next iteration goes ahead of h, which has to wait for c anyhow.
    assert scheduler.replay([0, 0], [(0, 0), (2, 0)], [0, -1]).period_us == 2.0
    with pytest.raises(Infeasible, match="order: 'g' is behind 'h' on a channel, but 'h' waits for 'g'"):
        scheduler.replay([0, 0], [(2, 0), (0, 0)], [0, 0])
    # The same turns as at first, the window beginning elsewhere.
    assert scheduler.replay([0, 0], [(2, 0), (0, 0)], [-1, 0]).period_us == 3.0
    with pytest.raises(Infeasible, match="'g' is behind 'h'"):
        scheduler.replay([0, 0], [(2, 0), (0, 0)], [1, 0])


def test_tasks_of_no_duration_cannot_hide_a_deadlock() -> None:
    ops = [comm("g"), comm("h", Dep(op="g")), compute("c", 1.0, Dep(op="h"))]
    scheduler = Scheduler(problem(ops, g=option(("x", 0.0)), h=option(("x", 0.0))))
    assert scheduler.schedule([0, 0]).period_us == 1.0
    with pytest.raises(Infeasible, match="'g' is behind 'h'"):
        scheduler.replay([0, 0], [(1, 0), (0, 0)], [0, 0])


def test_what_is_pulled_ahead_must_be_submittable_in_time() -> None:
    """On channels of their own the two do not meet, but an enforcer starts tasks strictly in the plan's order."""
    ops = [
        compute("f", 2.0), comm("prep", Dep(op="f", why="submit")), comm("grad", Dep(op="f", why="submit")),
        compute("u", 1.0, Dep(op="grad", why="wait")),
    ]  # fmt: skip
    scheduler = Scheduler(problem(ops, prep=option(("x", 1.0)), grad=option(("y", 1.0))))
    fine = scheduler.replay([0, 0], [(1, 0), (2, 0)], [0, 0])
    check_order(scheduler.problem.workload, fine)
    ahead = scheduler.replay([0, 0], [(1, 0), (2, 0)], [1, 0])
    with pytest.raises(Infeasible, match=r"'prep' comes before 'grad', but .* submits 'prep' only after .* 'grad'"):
        check_order(scheduler.problem.workload, ahead)


def test_every_schedule_can_be_fed_in_its_order() -> None:
    scheduler = Scheduler(figure6())
    for discipline in ("critical_path", "lifo", "fifo"):
        for choice in ((0, 0, 0, 0), (1, 0, 1, 1)):
            check_order(scheduler.problem.workload, scheduler.schedule(choice, discipline=discipline))


def test_the_timeline_shows_streams_and_channels() -> None:
    scheduler = Scheduler(figure6())
    found = scheduler.schedule({"a": 1})
    shown = found.timeline(scheduler.problem)
    assert shown.total_us == 9.5
    assert shown.streams == ("compute", "ethernet", "nvlink", "pcie", "rdma")
    assert shown.num_spans == 3 + 4 * 2
    busy = {
        name: float((shown.end_us - shown.start_us)[shown.stream == k].sum()) for k, name in enumerate(shown.streams)
    }
    assert busy == {"compute": 3.0, "ethernet": 6.5, "nvlink": 6.0, "pcie": 6.5, "rdma": 6.0}


def test_greedy_takes_what_is_fastest_alone() -> None:
    ops = [comm("g"), compute("c", 1.0, Dep(op="g"))]
    slow, fast = option(("x", 5.0)), option(("x", 2.0), ("y", 2.0))
    assert Scheduler(problem(ops, g=(slow, fast))).greedy == (1,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"choice": [0, 0]}, "choice: 2 for 4 comm-ops"),
        ({"choice": {"a": 2}}, "choice of a: must be 0..1, not 2"),
        ({"choice": {"z": 0}}, "unknown comm-op 'z'; choose from: b, c, d, a"),
        ({"choice": {}, "discipline": "best"}, "unknown discipline 'best'; choose from: critical_path"),
        ({"choice": {}, "discipline": "priority"}, "priority: goes with discipline='priority'"),
        ({"choice": {}, "discipline": "priority", "priority": {"a": 1.0}}, "priority: 'b' has none"),
        ({"choice": {}, "discipline": "priority", "priority": [1.0]}, "priority: 1 for 4 comm-ops"),
        ({"choice": {}, "iterations": 1}, "iterations: must be 2..64, not 1"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Scheduler(figure6()).schedule(**arguments)  # type: ignore[arg-type]


def test_an_order_must_name_every_task_once() -> None:
    with pytest.raises(InvalidInput, match="order: must name each of the 4 tasks once"):
        Scheduler(figure6()).replay({}, [(1, 0)], [0])
