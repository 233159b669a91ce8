# SPDX-License-Identifier: Apache-2.0
"""What is shown of a job: the timelines of its last plan stay, whatever the controller does later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec
import pytest
from toy_job import Ready, toy_cluster, toy_plan, toy_workload

from stretto.cli.run_memory import with_memory
from stretto.control.controller import Controller
from stretto.control.messages import JobStatus, PlanId, RankState, encode_captured, encode_plan
from stretto.control.spans import ReportSpan, recorded_spans
from stretto.control.split import split
from stretto.control.worker import PlanReply, PlanRequest
from stretto.control.worker import answer as plan_now
from stretto.planner.plan import PLAIN
from stretto.runtime.enforcer import measured
from stretto.runtime.enforcer.report import EnforcerReport, MotifReport, Timing
from stretto.workload import Dep, Op, Workload

STEP, CLUSTER = toy_workload(2), toy_cluster(2)
BAR = ReportSpan(track="compute", name="backward", start_us=0.0, duration_us=5.0, phase="backward")


class Rank:
    """The only process of a job, whose step is one of two ranks: says whatever a test wants it to say."""

    def __init__(self, answers: list[PlanReply | None]) -> None:
        self.answers = answers
        self.controller = Controller(start=self.plan)
        self.beat = 0

    def plan(self, ask: PlanRequest) -> Ready:
        return Ready(self.answers.pop(0) if self.answers else None)

    def say(self, **fields: object) -> None:
        self.beat += 1
        state = RankState(job="j", epoch=1, rank=0, size=1, beat=self.beat, digest=STEP.digest)
        reply = self.controller.exchange(msgspec.structs.replace(state, **fields))
        if reply.send_captured:
            self.say(**fields | {"captured": encode_captured(STEP, CLUSTER)})

    def status(self) -> JobStatus:
        found = self.controller.job_status("j")
        assert found is not None
        return found

    def until(self, condition: Callable[[JobStatus], bool], **fields: object) -> JobStatus:
        deadline = time.monotonic() + 60
        while not condition(self.status()):
            assert time.monotonic() < deadline, self.status()
            time.sleep(0.02)
            self.say(**fields)
        return self.status()


@pytest.fixture
def start() -> Iterator[Callable[[list[PlanReply | None]], Rank]]:
    made: list[Rank] = []

    def begin(answers: list[PlanReply | None]) -> Rank:
        made.append(Rank(answers))
        made[-1].say()
        return made[-1]

    yield begin
    for rank in made:
        rank.controller.close()


def answer(name: str, *, plain_us: float = 300.0) -> PlanReply:
    plan = toy_plan(name, STEP, CLUSTER)
    return PlanReply(
        body=encode_plan(plan), hash=plan.hash, iteration_us=100.0, plain_us=plain_us, current_us=200.0,
        plain_spans=(BAR,), plan_spans=(BAR,),
    )  # fmt: skip


SLOW = MotifReport(op="gradients", motif=0, duration_us=50.0, wait_us=0.0, start_us=3.0)


def timing(us: float) -> Timing:
    return Timing(median_us=us, low_us=us, high_us=us, iterations=7)


def runs(number: int, hash: str, *, at: int = 0, duration_us: float = 11.0) -> dict[str, object]:
    """A rank that runs a plan and measures it."""
    from stretto.control.messages import Ballot

    plan = PlanId(number, hash)
    report = EnforcerReport(
        number=number, hash=hash, iteration=at, iteration_us=100.0, plain_us=200.0, window=timing(100.0),
        own=timing(400.0), backend=timing(200.0), own_name="gloo",
        motifs=(MotifReport(op="gradients", motif=0, duration_us=duration_us, wait_us=0.0, start_us=3.0),),
    )  # fmt: skip
    return {"active": plan, "committed": plan, "ballot": Ballot(plan=plan, yes=True), "report": report}


def test_timelines_stay_while_it_plans_again_and_when_the_step_leaves_its_plan(
    start: Callable[[list[PlanReply | None]], Rank],
) -> None:
    first = answer("first")
    # The second question is never answered.
    rank = start([first, None])
    rank.until(lambda status: "being prepared" in status.about)
    under_plan = runs(1, first.hash)
    seen = rank.until(lambda status: "is active" in status.about, **under_plan)
    assert [(m.op, m.predicted_us > 0, m.duration_us) for m in seen.motifs] == [("gradients", True, 11.0)]
    assert (seen.motifs_plan, seen.before, seen.after) == (PlanId(1, first.hash), (BAR,), (BAR,))
    assert seen.recorded == recorded_spans(STEP)
    assert (seen.split.kept, seen.split.backend_share, seen.split.plan_share, seen.split.gain) == ("plan", 2, 2, 4)
    assert (seen.split.predicted_backend_us, seen.split.predicted_plan_us) == (300.0, 100.0)
    at = 0
    while "planning again" not in rank.status().about:
        at += 20
        assert at < 20_000
        rank.say(**runs(1, first.hash, at=at, duration_us=50.0))
        time.sleep(0.01)
    assert [m.duration_us for m in rank.status().motifs] == [50.0]
    rank.say(report=EnforcerReport(fell_back="gradients has another size"), committed=PlanId(1, first.hash), barred=1)
    left = rank.status()
    assert left.plan == PlanId() and left.motifs_plan == PlanId(1, first.hash)
    assert [m.duration_us for m in left.motifs] == [50.0] and left.after == (BAR,)
    assert left.split.plan == timing(100.0), "what the last plan took"


def test_without_a_plan_there_is_what_was_recorded_and_what_was_predicted_of_it(
    start: Callable[[list[PlanReply | None]], Rank],
) -> None:
    rank = start([answer("no better", plain_us=101.0)])
    said = EnforcerReport(own=timing(400.0), backend=timing(500.0), own_name="gloo", on_own=True, plain_us=400.0)
    seen = rank.until(lambda status: "no plan promises" in status.about, report=said)
    assert seen.recorded and seen.before == (BAR,) and not seen.motifs
    assert (seen.split.kept, seen.split.predicted_backend_us) == ("unchanged", 101.0)
    assert seen.split.gain == 1.0 and seen.split.backend_share == 0.8


def test_a_plan_that_is_the_applications_own_order_does_not_count_as_the_plan(
    start: Callable[[list[PlanReply | None]], Rank],
) -> None:
    own = answer(PLAIN)
    rank = start([own])
    rank.until(lambda status: "being prepared" in status.about)
    seen = rank.until(lambda status: "is active" in status.about, **runs(1, own.hash))
    assert seen.split.plan is None and seen.split.kept == "backend"


def under(number: int, hash: str, us: float) -> dict[str, object]:
    """A rank that has run a plan for long, and a job for longer."""
    said = runs(number, hash)
    report = replace(said["report"], under_plan=timing(us), job_iterations=50, job_us=50 * 250.0)  # type: ignore[type-var]
    return said | {"report": report}


def test_a_prediction_stands_beside_what_the_same_plan_takes(start: Callable[[list[PlanReply | None]], Rank]) -> None:
    first, second = answer("first"), answer("second")
    second = msgspec.structs.replace(second, iteration_us=50.0)
    rank = start([first, second])
    rank.until(lambda status: "being prepared" in status.about)
    seen = rank.until(lambda status: "is active" in status.about, **under(1, first.hash, 120.0))
    assert (seen.split.plan, seen.split.predicted_plan_us, seen.split.plan_number) == (timing(120.0), 100.0, 0)
    assert (seen.split.whole_us, seen.split.whole_iterations, seen.split.whole_gain) == (250.0, 50, 1.6)
    at = 0
    while "planning again" not in rank.status().about and "plan 2" not in rank.status().about:
        at += 20
        assert at < 20_000
        report = replace(under(1, first.hash, 120.0)["report"], iteration=at, motifs=(SLOW,))  # type: ignore[type-var]
        rank.say(**under(1, first.hash, 120.0) | {"report": report})
        time.sleep(0.01)
    waits = rank.until(lambda status: "plan 2 is being prepared" in status.about, **under(1, first.hash, 120.0))
    assert waits.split.predicted_plan_us == 100.0, "plan 2 was made, but plan 1 is what was measured"
    seen = rank.until(lambda status: "plan 2 is active" in status.about, **under(2, second.hash, 60.0))
    assert (seen.split.plan, seen.split.predicted_plan_us, seen.split.plan_number) == (timing(60.0), 50.0, 2)


def test_the_plan_that_runs_has_one_prediction(start: Callable[[list[PlanReply | None]], Rank]) -> None:
    first, no_better = answer("first"), msgspec.structs.replace(answer("second"), iteration_us=199.0)
    rank = start([first, no_better])
    rank.until(lambda status: "being prepared" in status.about)
    rank.until(lambda status: "is active" in status.about, **runs(1, first.hash))
    at = 0
    while "no plan promises" not in (about := rank.status().about):
        at += 20
        assert at < 20_000
        rank.say(**runs(1, first.hash, at=at, duration_us=50.0))
        time.sleep(0.01)
    assert about == (
        "no plan promises to be 3% faster than the plan that runs "
        "(by what was measured since it was made, the best one 0.5%)"
    )
    assert rank.status().split.predicted_plan_us == 100.0


def test_many_long_iterations_under_a_plan_are_told_and_not_only_the_last_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(measured, "now_us", lambda: now)
    window = measured.MeasuredWindow()

    def iterations(count: int, us: float) -> measured.Figures:
        nonlocal now
        for _ in range(count):
            now += us
            window.boundary(0.0)
        return window.figures(())

    assert iterations(10, 1e6)["under_plan"] is None
    window.changed(planned=True)
    found = iterations(60, 5e5)
    assert found["window"] is not None and found["window"].iterations == 5
    assert found["under_plan"] is not None and found["under_plan"].iterations == 60
    window.left()
    assert iterations(10, 1e6)["under_plan"] is None
    window.changed(planned=True)
    assert iterations(300, 5e5)["under_plan"] == Timing.of([5e5] * measured.UNDER_PLAN)


def test_the_recorded_step_begins_at_zero_and_keeps_its_order() -> None:
    step = Workload(name="s", num_ranks=2, ops=(
        Op(name="backward", duration_us=100.0, phase="backward", after=(Dep(op="update", lag=1),)),
        Op(name="early", kind="all_reduce", nbytes=8.0, duration_us=30.0, after=(Dep(op="backward"),)),
        Op(name="more", duration_us=50.0, phase="backward"),
        Op(name="update", duration_us=5.0, phase="optimizer", after=(Dep(op="early"), Dep(op="more"))),
    ))  # fmt: skip
    found = {span.name: (span.track, span.start_us, span.duration_us, span.comm) for span in recorded_spans(step)}
    assert found == {
        "backward": ("compute", 0.0, 100.0, False), "early": ("communication", 100.0, 30.0, True),
        "more": ("compute", 100.0, 50.0, False), "update": ("compute", 150.0, 5.0, False),
    }  # fmt: skip


def test_the_planner_draws_both_orders_from_zero_with_compute() -> None:
    found = plan_now(PlanRequest(captured=encode_captured(toy_workload(2), toy_cluster(2)), budget_s=0.2))
    for spans, end_us in ((found.plain_spans, found.plain_us), (found.plan_spans, found.iteration_us)):
        assert {span.comm for span in spans} == {True, False}
        assert all(span.start_us >= 0 and span.start_us + span.duration_us <= end_us + 1e-6 for span in spans)


def test_what_a_controller_has_forgotten_is_remembered(start: Callable[[list[PlanReply | None]], Rank]) -> None:
    first = answer("first")
    rank = start([first])
    rank.until(lambda status: "being prepared" in status.about)
    known = rank.until(lambda status: "is active" in status.about, **runs(1, first.hash))
    again = msgspec.structs.replace(
        known, motifs=(), motifs_plan=PlanId(), recorded=(), before=(), after=(), predicted_us=0.0, plan_name="",
        about="waiting for ranks", split=split(),
    )  # fmt: skip
    assert with_memory(again, None) is again
    both = with_memory(again, known)
    assert msgspec.structs.replace(both, about=known.about) == known
    other_start = msgspec.structs.replace(again, epoch=2)
    assert with_memory(other_start, known) is other_start
