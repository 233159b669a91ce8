# SPDX-License-Identifier: Apache-2.0
"""The systems that a plan is compared with, on steps worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from stretto.errors import InvalidInput
from stretto.planner.baselines import BASELINES, STOCK, Effort, Systems, as_submitted, baseline, first_uses, tac_order
from stretto.planner.schedule.problem import MotifTask, Option, PlanProblem
from stretto.planner.schedule.schedule import StepSchedule
from stretto.workload import Dep, Op, Workload


def compute(name: str, us: float, *after: Dep, **rest: Any) -> Op:
    return Op(name=name, duration_us=us, after=after, **rest)


def comm(name: str, *after: Dep, nbytes: float = 1e6, kind: str = "all_reduce", **rest: Any) -> Op:
    return Op(name=name, kind=kind, nbytes=nbytes, after=after, **rest)


def option(
    us: float, pieces: int = 1, *, channels: str = "x", algorithm: str = "ring", launch_us: float = 0.0
) -> Option:
    """An option that cuts into equal pieces."""
    return Option(
        name=f"{algorithm}/{pieces} on {channels}",
        expression="",
        rules=(f"segment:parts={pieces}",) if pieces > 1 else (),
        tasks=tuple(
            MotifTask(motif=f"m{k}", algorithm=algorithm, channels=tuple(channels.split("+")),
                 duration_us=us / pieces + launch_us, launch_us=launch_us)
            for k in range(pieces)
        ),
    )  # fmt: skip


def problem(ops: list[Op], **options: tuple[Option, ...]) -> PlanProblem:
    return PlanProblem(workload=Workload(name="by hand", num_ranks=4, ops=tuple(ops)), options=options)


def ddp() -> PlanProblem:
    """Two layers, data parallel: the gradients of layer 1 come first, those of layer 0 are needed first.

    Whole and in order: f0 2, f1 2, b1 2, g1 6, g0 3 in a circle of 15. Cut into halves of 3, g0 can go between those
    of g1: f1 2, b1 2, half 3, g0 3, half 3 in a circle of 13.
    """
    ops = [
        compute("f0", 2.0, Dep(op="g0", lag=1)), compute("f1", 2.0, Dep(op="g1", lag=1)),
        compute("b1", 2.0), comm("g1", Dep(op="b1")), compute("b0", 1.0), comm("g0", Dep(op="b0")),
    ]  # fmt: skip
    return problem(ops, g1=(option(6.0), option(6.0, 2)), g0=(option(3.0), option(3.0, 2)))


def names(schedule: StepSchedule, of: PlanProblem) -> list[str]:
    return [of.workload.ops[op].name for op, _ in schedule.order]


def test_whole_tensors_in_order_take_their_time() -> None:
    assert baseline("fifo", ddp()).period_us == 15.0
    assert baseline("tictac", ddp()).period_us == 15.0


def test_the_oracle_cuts_where_that_lets_the_urgent_go_first() -> None:
    found = baseline("bytescheduler+", ddp())
    assert found.period_us == 13.0
    assert found.choice == (1, 0)
    assert names(found, ddp()).count("g1") == 2
    # With a launch cost that eats the gain, the oracle leaves everything whole.
    dear = problem(list(ddp().workload.ops), g1=(option(6.0), option(6.0, 2, launch_us=3.0)), g0=(option(3.0),))
    assert baseline("bytescheduler+", dear).choice == (0, 0)
    assert baseline("bytescheduler+", dear).period_us == 15.0


def test_fifo_never_overtakes() -> None:
    """Both are ready, the later one is urgent: FIFO still sends the earlier one first."""
    ops = [
        compute("c", 1.0, Dep(op="late", lag=1)), comm("early", Dep(op="c")), comm("late", Dep(op="c")),
    ]  # fmt: skip
    step = problem(ops, early=(option(5.0),), late=(option(2.0),))
    assert names(baseline("fifo", step), step) == ["early", "late"]
    assert baseline("fifo", step).period_us == 8.0
    # LIFO sends the one that was submitted last; the circle is then c 1 and late 2, and the channel's load 7.
    assert baseline("bytescheduler+", step).period_us == 7.0


def test_fifo_waits_even_for_what_is_not_ready() -> None:
    ops = [
        compute("slow", 10.0, stream="side"), comm("first", Dep(op="slow")), compute("c", 1.0, Dep(op="u", lag=1)),
        comm("second", Dep(op="c")), compute("u", 1.0, Dep(op="second"), Dep(op="first", lag=1)),
    ]  # fmt: skip
    step = problem(ops, first=(option(4.0),), second=(option(2.0),))
    found = baseline("fifo", step)
    assert names(found, step) == ["first", "second"]
    end = {int(op): float(us) for op, us in zip(found.op, found.end_us, strict=True)}
    start = {int(op): float(us) for op, us in zip(found.op, found.start_us, strict=True)}
    assert (start[3] - end[1]) % found.period_us == pytest.approx(0.0)


def test_traditional_systems_run_one_motif_at_a_time() -> None:
    after = Dep(op="c")
    ops = [compute("c", 1.0), comm("a", after), comm("b", after), compute("u", 1.0, Dep(op="a"), Dep(op="b"))]
    step = problem(ops, a=(option(4.0, channels="x"),), b=(option(4.0, channels="y"),))
    for name in BASELINES:
        overlaps = name in ("s_exec", "syndicate")
        found = baseline(name, step)
        assert found.serial is not overlaps
        assert found.period_us == (6.0 if overlaps else 10.0)


def test_tac_prefers_much_compute_for_little_communication() -> None:
    ops = [
        comm("a"), comm("b"), comm("c"), comm("d"),
        compute("x", 1.0, Dep(op="a"), stream="1"), compute("y", 10.0, Dep(op="b"), stream="2"),
        compute("z", 5.0, Dep(op="c"), Dep(op="d"), stream="3"),
        compute("w", 1.0, *(Dep(op=name) for name in "abcd"), stream="4"),
    ]  # fmt: skip
    step = problem(ops, a=(option(4.0),), b=(option(2.0),), c=(option(3.0),), d=(option(3.0),))
    # b: P 10, M 2. a: P 1, M 4. c and d open z only together.
    assert tac_order(step) == ["b", "a", "c", "d"]


def test_tac_breaks_ties_by_what_is_opened_together() -> None:
    ops = [
        comm("p"), comm("q"), comm("r"), compute("one", 3.0, Dep(op="p"), Dep(op="q"), stream="1"),
        compute("two", 3.0, Dep(op="q"), Dep(op="r"), stream="2"),
    ]  # fmt: skip
    step = problem(ops, p=(option(5.0),), q=(option(1.0),), r=(option(1.0),))
    # Nobody opens anything alone; q and r together need 2, p and q 6. Then r opens `two` for 1, p `one` for 5.
    assert tac_order(step) == ["q", "r", "p"]


def test_tac_sends_what_others_wait_for_only_when_that_opens_something() -> None:
    ops = [
        comm("a"), comm("b", Dep(op="a")), comm("c"), compute("x", 6.0, Dep(op="b"), stream="1"),
        compute("y", 6.0, Dep(op="c"), stream="2"),
    ]  # fmt: skip
    step = problem(ops, a=(option(4.0),), b=(option(1.0),), c=(option(3.0),))
    # b takes 1 but needs a too: c opens as much for 3.
    assert tac_order(step) == ["c", "a", "b"]


def test_tac_looks_into_the_next_iteration() -> None:
    assert tac_order(ddp()) == ["g0", "g1"]


def test_p3_sends_slices_of_fifty_thousand_parameters() -> None:
    ops = [comm(f"g{size}", Dep(op="b"), nbytes=size * 1e5) for size in (1, 4, 7, 1000)]
    ops += [comm("t", Dep(op="b"), nbytes=1e8, kind="all_to_all")]
    ops = [compute("b", 1.0, *(Dep(op=op.name, lag=1) for op in ops)), *ops]
    cuts = tuple(option(4.0, pieces) for pieces in (1, 2, 4, 8))
    step = problem(ops, **{op.name: cuts for op in ops if op.is_comm})
    # 100 KB are half a slice, 400 KB two, 700 KB 3.5, 100 MB five hundred: the nearest number of pieces there is.
    assert baseline("p3", step).choice == (0, 1, 2, 3, 0)


def test_p3_sends_first_what_the_next_forward_pass_needs_first() -> None:
    assert first_uses(ddp().workload) == {"g1": (1, 1), "g0": (1, 0)}
    ops = [
        compute("f0", 1.0, Dep(op="gather", lag=1)), compute("f1", 1.0, Dep(op="step", lag=1)),
        compute("b", 1.0), comm("g1", Dep(op="b")), comm("g0", Dep(op="b")),
        compute("step", 1.0, Dep(op="g1"), phase="optimizer"), comm("gather", Dep(op="g0")), comm("never"),
    ]  # fmt: skip
    uses = first_uses(Workload(name="zero", num_ranks=2, ops=tuple(ops)))
    # Through an optimiser's step and through another comm-op, to whoever reads the parameters.
    assert uses == {"g1": (1, 1), "g0": (1, 0), "gather": (1, 0), "never": (2, 7)}


def test_hand_optimised_prefers_all_to_alls_and_the_fastest_option() -> None:
    ops = [
        compute("f", 1.0, Dep(op="a2a", lag=1)), compute("b", 1.0), comm("a2a", Dep(op="b"), kind="all_to_all"),
        comm("ar", Dep(op="b")),
    ]  # fmt: skip
    step = problem(ops, a2a=(option(3.0), option(2.0, algorithm="bruck"), option(1.0, channels="y")), ar=(option(4.0),))
    # LIFO: ar 4, then a2a 3 in a circle of 9. By hand a2a goes first, and by Bruck: 1 + 1 + 2, so the channel binds.
    assert baseline("bytescheduler+", step).period_us == 9.0
    found = baseline("hand_optimised", step)
    assert found.period_us == 6.0
    assert found.choice == (1, 0)


def test_syndicate_pulls_ahead_what_stock_systems_cannot() -> None:
    ops = [comm("prep"), compute("f", 10.0, Dep(op="prep")), compute("b", 10.0)]
    step = problem(ops, prep=(option(8.0),))
    assert {name: baseline(name, step).period_us for name in BASELINES} == {
        name: 28.0 if name in STOCK else 20.0 for name in BASELINES
    }


def test_submission_waits_for_the_compute_before() -> None:
    step = Workload(
        name="s", num_ranks=4,
        ops=(comm("prep"), compute("f", 1.0), compute("side", 1.0, stream="side"), comm("g", Dep(op="f"))),
    )  # fmt: skip
    made = as_submitted(step)
    assert made.ops[0].after == (Dep(op="side", lag=1, why="submit"),)
    assert made.ops[3].after == (Dep(op="f"), Dep(op="side", why="submit"))
    assert made.ops[1:3] == step.ops[1:3]
    assert as_submitted(made) == made


def test_submission_is_counted_at_each_place() -> None:
    """Two stages of a pipeline: a send waits for both ends' last compute, a stage's own collective for its own."""
    first, second = (0, 1), (2, 3)
    step = Workload(
        name="s", num_ranks=4,
        ops=(
            compute("f0", 1.0, ranks=first), comm("send", Dep(op="f0"), kind="send", groups=((0, 2), (1, 3))),
            compute("f1", 1.0, Dep(op="send"), ranks=second), comm("g1", groups=(second,)), comm("g0", groups=(first,)),
        ),
    )  # fmt: skip
    made = as_submitted(step)
    assert made.op("send").after == (Dep(op="f0"), Dep(op="f1", lag=1, why="submit"))
    assert made.op("g1").after == (Dep(op="f1", why="submit"),)
    assert made.op("g0").after == (Dep(op="f0", why="submit"),)


def test_captured_submissions_are_kept() -> None:
    step = Workload(
        name="s", num_ranks=4,
        ops=(compute("f", 1.0), compute("b", 1.0), comm("g", Dep(op="f", why="submit"))),
    )  # fmt: skip
    assert as_submitted(step) == step


def test_an_op_listed_before_what_it_waits_for_is_submitted_after_it() -> None:
    step = Workload(name="s", num_ranks=4, ops=(compute("u", 1.0, Dep(op="g")), compute("v", 1.0), comm("g")))
    assert as_submitted(step).op("g").after == (Dep(op="v", lag=1, why="submit"),)


def test_stages_of_a_pipeline_keep_their_own_order() -> None:
    """What one stage sends early does not hold up the collectives of the other, which submits those first."""
    first, second = (0, 1), (2, 3)
    ops: list[Op] = []
    for k in range(3):
        ops.append(compute(f"f{k}", 4.0, Dep(op="h2", lag=1), ranks=first))
        ops.append(comm(f"send{k}", Dep(op=f"f{k}"), kind="send", groups=((0, 2), (1, 3))))
    for k in range(3):
        ops.append(compute(f"g{k}", 2.0, Dep(op=f"send{k}"), ranks=second))
        ops.append(comm(f"tp{k}", Dep(op=f"g{k}"), groups=(second,)))
        ops.append(compute(f"h{k}", 1.0, Dep(op=f"tp{k}"), ranks=second))
    step = problem(ops, **{op.name: (option(1.0),) for op in ops if op.is_comm})
    systems = Systems(step)
    strict = systems.own.replay([0] * 6, systems.own.tasks([0] * 6), [0] * 6, serial=True)
    # f0 f1 f2 12, send2 1, then g2 tp2 h2 4. As it is listed, tp0 comes after send2: all of the second stage does.
    assert systems.schedule("fifo").period_us == 17.0
    assert systems.own.schedule([0] * 6, discipline="fifo", serial=True).period_us == 17.0
    assert strict.period_us == 23.0


def test_tac_ends_in_time_and_says_what_it_left_out() -> None:
    step = ddp()
    systems = Systems(step)
    found = systems.schedule("tictac", Effort(budget_s=-1.0))
    # Nothing was ranked: g0 is used first.
    assert [step.workload.ops[op].name for op, _ in found.order] == ["g1", "g0"]
    assert systems.notes == ["tictac: 2 of 2 comm-ops in the order of their use, for want of time"]


def test_a_problem_is_compiled_once_for_all_stock_systems() -> None:
    systems = Systems(ddp())
    stock = systems.stock
    assert {name: systems.schedule(name).period_us for name in BASELINES} == {
        name: baseline(name, ddp()).period_us for name in BASELINES
    }
    assert systems.stock is stock
    assert systems.notes == ["nccl: 2 all-reduces run by their default option, as no costs of nccl_tree are known"]


def test_unknown_systems_are_named() -> None:
    with pytest.raises(InvalidInput, match="unknown baseline 'gpipe'; choose from: fifo, nccl_ring, nccl_tree, "):
        baseline("gpipe", ddp())


def test_effort_bounds_what_is_tried() -> None:
    cuts = tuple(option(4.0, pieces, launch_us=0.1) for pieces in (1, 2, 4, 8))
    ops = [comm(f"g{k}", Dep(op="b")) for k in range(6)]
    ops = [compute("b", 1.0, *(Dep(op=op.name, lag=1) for op in ops)), *ops]
    step = problem(ops, **{op.name: cuts for op in ops if op.is_comm})
    for name in BASELINES:
        one = baseline(name, step, Effort(evaluations=50, budget_s=float("inf"), seed=3))
        assert baseline(name, step, Effort(evaluations=50, budget_s=float("inf"), seed=3)).choice == one.choice
        assert baseline(name, step, Effort(evaluations=1, budget_s=1e-9)).period_us > 0
