# SPDX-License-Identifier: Apache-2.0
"""One job under a controller: when to plan, what to give out, when to think it over."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

from ..errors import StrettoError
from ..planner.plan import PLAIN as OWN
from ..planner.plan import Plan
from ..runtime.enforcer.report import EnforcerReport, Timing
from ..units import format_us
from .feedback import LEAST_GAIN, MOST_WINDOWS, WINDOWS, PlanWatch, Question
from .kept_plans import KeptPlan, KeptPlans, ReadyPlan
from .messages import (
    PLAIN,
    CapturedStep,
    JobStatus,
    MotifStatus,
    PlanId,
    RankState,
    RankStatus,
    decode_captured,
)
from .protocol import ControllerSide, ask_profile, propose
from .refine import Factors, alike
from .spans import ReportSpan, recorded_spans
from .split import GainSplit, over_ranks, split
from .worker import Planning, PlanReply, PlanRequest, plan_of

LOG = logging.getLogger("stretto.control")
WAITING = "waiting for ranks"
AGAIN_SHARE = 0.5
"""The share of the budget for a plan that replaces another: until then training is slower than it could be."""
MAX_REFUSALS = 3
MAX_SHOWN = 4
"""Plans of which the predicted timelines are kept."""
MAX_PROFILES = 5
"""A step that changes again and again is left alone."""


def shape(plan: Plan) -> str:
    """What a plan does, whatever it promises."""
    does = [
        (op.op, op.option, [(m.algorithm, m.channels, m.seq, m.ahead) for m in op.motifs])
        for op in sorted(plan.ops, key=lambda op: op.op)
    ]
    return hashlib.sha256(repr(does).encode()).hexdigest()


class SupervisedJob:
    """A job: the protocol's half of it (`job`), its captured step, the plan it has and the one that is being made."""

    def __init__(
        self, name: str, epoch: int, size: int, *, last: int, budget_s: float, seed: int,
        start: Callable[[PlanRequest], Planning], plans: KeptPlans | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.job = ControllerSide.start(epoch, size, last)
        self.heard_at = time.monotonic()
        self._budget_s, self._seed, self._start = budget_s, seed, start
        self._plans = plans
        self._planning: Planning | None = None
        self._forget()

    def _forget(self) -> None:
        """A job that was started again has nothing of what was known."""
        self.cancel()
        self.about = WAITING
        self._captured: CapturedStep | None = None
        self._digest = ""
        self._planned_for = ""
        self._question: Question | None = None
        self._asked: PlanRequest | None = None
        self._plan: Plan | None = None
        self._answer: PlanReply | None = None
        self._promised: dict[str, tuple[str, float]] = {}
        self._ready = False
        self._refused_number = 0
        self._factors: Factors = {}
        self._plain_then_us = 0.0
        """What was predicted of plain order when it was measured."""
        self._plain_times = 1.0
        self._watch: PlanWatch | None = None
        self._refuted: dict[str, Factors] = {}
        """Plans that were slower than plain order, by their shape, and what was known of the links then."""
        self._recorded: tuple[ReportSpan, ...] = ()
        self._before: tuple[ReportSpan, ...] = ()
        self._about_recorded = ""
        self._shown: dict[str, tuple[Plan, tuple[ReportSpan, ...]]] = {}
        """Plans that were given out, by their hashes, with their predicted timelines."""
        self._last_motifs: tuple[PlanId, EnforcerReport] | None = None
        """The last report of rank 0 under a plan: what is shown when none runs."""
        self._windows: dict[int, tuple[PlanId, Timing]] = {}
        """By rank, the last plan that was active, and what iterations took under it."""
        self._measured_plans: set[int] = set()
        """The numbers of all plans that were."""
        self._states: dict[int, tuple[float, RankState]] = {}
        self._refusals = 0
        self._profiles = 0
        self._replans = 0
        self._recalled = False

    @property
    def left(self) -> bool:
        """Whether all its ranks have ended."""
        return len(self._states) == len(self.job.ranks) and all(state.leaving for _, state in self._states.values())

    def begin(self, state: RankState) -> None:
        """Before a message is taken in: that it comes from a new start of the job is seen here."""
        if state.epoch > self.job.epoch:
            self._forget()

    def heard(self, state: RankState) -> None:
        """After a message was taken in."""
        self.heard_at = time.monotonic()
        view = self.job.ranks[state.rank] if state.rank < len(self.job.ranks) else None
        if state.epoch != self.job.epoch or view is None or view.beat != state.beat:
            return
        self._states[state.rank] = (self.heard_at, state)
        self._keep(state)
        if state.captured is not None and state.digest != self._digest:
            self._take(state.captured, state.digest)
        if state.report is not None and self._watch is not None and self._question is None and not state.leaving:
            self._question = self._watch.hear(state.rank, state.report)

    def _keep(self, state: RankState) -> None:
        """Remember what a plan was measured to do, for when it does not run any more."""
        report = state.report
        if report is None or not report.number:
            return
        if state.rank == 0 and report.motifs:
            self._last_motifs = (PlanId(report.number, report.hash), report)
        name, _ = self._promised.get(report.hash, ("", 0.0))
        timing = report.under_plan or report.window
        if timing is not None and name != OWN:
            self._windows[state.rank] = (PlanId(report.number, report.hash), timing)
            self._measured_plans.add(report.number)

    @property
    def captured(self) -> CapturedStep | None:
        """The recorded step, once rank 0 has sent it."""
        return self._captured

    def wants_captured(self, digest: str) -> bool:
        """Whether the step with this digest has not been seen."""
        return bool(digest) and digest != self._digest

    def body_of(self, hash: str) -> bytes:
        """A plan's content."""
        return self._answer.body if self._answer is not None and self._answer.hash == hash else b""

    def turn(self, remember: Callable[[int], int]) -> None:
        """What is due: begin to plan, give a plan out, look after the one that runs."""
        if self._planning is not None:
            answer = self._planning.poll()
            if answer is not None:
                self._planning = None
                self._consider(answer)
            return
        if not self.job.may_propose or self.left:
            return
        digest = self.job.heard[0].digest
        if self._ready and self._digest == digest:
            self._give_out(remember)
        elif digest == self._digest and self._planned_for != digest:
            self._planned_for = digest
            if not self._recall():
                self._ask("planning")
        elif self.job.phase == "refused":
            self._refused(remember)
        elif self._gave_up():
            if digest == self._digest:
                self._profile()
        elif self._question is not None and self._watch is not None:
            self._think_over(self._question)
        elif self._plan is not None and self._watch is None and self.job.phase == "active":
            number = self.job.proposal.number if self.job.proposal is not None else 0
            self.about = f"plan {number} is active"
            patience = min(WINDOWS << self._replans, MOST_WINDOWS)
            own = self._plan.name == OWN
            assert self._captured is not None
            # The application's own order is there because a plan was slower; only other links are a reason to look for
            # a third.
            self._watch = PlanWatch(
                plan=self._plan, number=number, size=len(self.job.ranks), factors=self._factors, patience=patience,
                motif_us=self._captured.motif_us, plain_times=self._plain_times, only_drift=own,
            )  # fmt: skip
            self._keep_plan(own)
            if own:
                self.about += ": the application's own order, as the plan before was slower"

    def fail(self, why: str) -> None:
        """Note why planning failed; `stretto status` shows it."""
        self.about = why

    def cancel(self) -> None:
        """End the planning that is under way."""
        if self._planning is not None:
            self._planning.cancel()
            self._planning = None

    def _take(self, captured: CapturedStep, digest: str) -> None:
        try:
            workload, _ = decode_captured(captured)
        except StrettoError as error:
            self.fail(f"what was captured cannot be read: {error}")
            return
        if workload.digest != digest:
            self.fail(f"what was captured has digest {workload.digest}, not {digest}")
            return
        self._captured, self._digest = captured, digest
        self._recorded, self._before = recorded_spans(workload), ()
        self._about_recorded = f"{workload!r}"
        self._factors = {}
        self.about = f"captured {workload.name}: {len(workload.comm_ops)} comm-ops"

    def _ask(self, about: str, *, factors: Factors | None = None, plain: bool = False) -> None:
        assert self._captured is not None
        current = (self._answer.body, self._answer.hash) if self._answer is not None and factors is not None else None
        budget_s = self._budget_s * (1.0 if factors is None else AGAIN_SHARE)
        self._asked = PlanRequest(
            captured=self._captured, budget_s=budget_s, seed=self._seed + self._replans + self._refusals,
            factors=dict(self._factors if factors is None else factors), current=current, plain=plain,
        )  # fmt: skip
        self._planning = self._start(self._asked)
        self.about = about

    def _recall(self) -> bool:
        """Begin with the plan that an earlier start of the job has left for this very step, if there is one."""
        assert self._captured is not None
        kept = self._plans.load(self._captured.key) if self._plans is not None and self._captured.key else None
        if kept is None or kept.digest != self._digest:
            return False
        self._asked = PlanRequest(captured=self._captured, budget_s=self._budget_s, factors=kept.factors)
        self._planning = ReadyPlan(kept.answer)
        self._recalled = True
        self.about = "a plan of an earlier start is checked"
        return True

    def _keep_plan(self, own: bool) -> None:
        """Leave the plan that runs to the next start of the job; not one that is there because another was slower."""
        captured, answer = self._captured, self._answer
        if self._plans is None or captured is None or answer is None or not captured.key:
            return
        if own:
            self._plans.forget(captured.key)
            return
        first = self._states[0][1].report if 0 in self._states else None
        kept = KeptPlan(
            key=captured.key, digest=self._digest, captured=captured, answer=answer, factors=dict(self._factors),
            on_own=first is not None and first.on_own,
        )  # fmt: skip
        self._plans.save(kept)

    def _consider(self, answer: PlanReply) -> None:
        """Give it out only where it promises enough; a plan for a step that is no more is dropped."""
        asked, question, self._question = self._asked, self._question, None
        assert asked is not None
        if asked.captured is not self._captured:
            return
        if answer.error:
            self.fail(f"no plan: {answer.error}")
            if question is not None and self._watch is not None:
                self._watch.asked_in_vain(asked.factors)
            return
        self._before = answer.plain_spans
        if question is None:
            self._plain_then_us = answer.plain_us
        before_us = answer.plain_us if question is None else answer.current_us
        if not asked.plain and before_us > 0 and answer.iteration_us > (1 - LEAST_GAIN) * before_us:
            now = "plain order" if question is None else "the plan that runs"
            promise = f"predicted {format_us(answer.iteration_us)}, {now} {format_us(before_us)}"
            if question is not None:
                # The summary tells what was promised of the plan that runs, and one figure by newer costs is enough.
                less = max(1 - answer.iteration_us / before_us, 0.0)
                promise = f"by what was measured since it was made, the best one {less:.1%}"
            self.about = f"no plan promises to be {LEAST_GAIN:.0%} faster than {now} ({promise})"
            if self._watch is not None:
                self._watch.asked_in_vain(asked.factors)
            return
        refuted = None if asked.plain else self._refuted.get(shape(plan_of(answer)))
        if refuted is not None and alike(refuted, asked.factors):
            self.about = "the best plan was slower than plain order when it was measured"
            if self._watch is not None:
                self._watch.asked_in_vain(asked.factors)
            return
        self._answer, self._plan, self._factors = answer, plan_of(answer), asked.factors
        self._shown[answer.hash] = (self._plan, answer.plan_spans)
        while len(self._shown) > MAX_SHOWN:
            del self._shown[next(iter(self._shown))]
        self._plain_times = answer.plain_us / self._plain_then_us if self._plain_then_us > 0 else 1.0
        self._promised[answer.hash] = (self._plan.name, answer.iteration_us)
        self._replans += question is not None
        self._ready, self._watch = True, None

    def _give_out(self, remember: Callable[[int], int]) -> None:
        assert self._answer is not None
        self._ready, self._question = False, None
        running = self.job.proposal
        if self.job.phase == "active" and running is not None and running.hash == self._answer.hash:
            # A controller that was started again has found the plan that the one before had given out.
            return
        self.job = replace(self.job, last=remember(self.job.last + 1) - 1)
        self.job = propose(self.job, self._answer.hash, self._digest)
        assert self.job.proposal is not None
        self.about = f"plan {self.job.proposal.number} is being prepared"
        LOG.info("job %s: %s given out", self.name, self.job.proposal)

    def _refused(self, remember: Callable[[int], int]) -> None:
        proposal = self.job.proposal
        assert proposal is not None
        if self._refused_number == proposal.number:
            return
        self._refused_number = proposal.number
        refusals = [
            (at, view.ballot)
            for at, view in enumerate(self.job.heard)
            if view.ballot is not None and view.ballot.plan == proposal and not view.ballot.yes
        ]
        if not refusals and self._answer is not None:
            # No rank refused the plan; only its number was taken, so it is given out under a new one.
            self._give_out(remember)
            return
        self._refusals += 1
        said = next((f"rank {at}: {ballot.why}" for at, ballot in refusals if not ballot.told), "")
        self._answer = self._plan = self._watch = None
        if self._refusals < MAX_REFUSALS and self.job.heard[0].digest == self._digest:
            self._ask(f"refused by {said}; planning again")
        else:
            self.about = f"refused by {said}"

    def _gave_up(self) -> bool:
        proposal = self.job.proposal
        return proposal is not None and any(view.barred >= proposal.number for view in self.job.heard)

    def _profile(self) -> None:
        why = next((s.report.fell_back for _, s in self._states.values() if s.report and s.report.fell_back), "")
        if self.job.profile == self._digest:
            return
        if self._profiles >= MAX_PROFILES:
            self.about = f"the step left its plan {self._profiles} times, so it stays in plain order: {why}"
            return
        self._profiles += 1
        if self._plans is not None and self._captured is not None and self._captured.key:
            self._plans.forget(self._captured.key)
        self._watch = self._answer = self._plan = None
        self.about = f"the step left its plan ({why}); recording it again"
        self.job = ask_profile(self.job)

    def _think_over(self, question: Question) -> None:
        LOG.info("job %s: %s", self.name, question.text)
        if question.why == "slower" and self._plan is not None:
            self._refuted[shape(self._plan)] = dict(question.factors)
        self._ask(f"{question.text}; planning again", factors=question.factors, plain=question.why == "slower")

    def _told(self) -> str:
        waited = self._planning is not None or self.about == WAITING or self._planned_for != self._digest
        return "the job ended before a plan was made" if self.left and waited and self._plan is None else self.about

    def status(self) -> JobStatus:
        """For `stretto status`."""
        now = time.monotonic()
        states = {rank: state for rank, (_, state) in sorted(self._states.items())}
        reports = [state.report for state in states.values() if state.report is not None]
        actives = {state.active for state in states.values()}
        active = next(iter(actives)) if len(actives) == 1 else PLAIN
        plan_name, predicted_us = self._promised.get(active.hash, ("", 0.0))
        mean = {
            key: fmean(getattr(report, key) for report in reports) if reports else 0.0
            for key in ("plain_us", "iteration_us", "waits_us", "held_us")
        }
        shown, report = self._last_motifs or (PLAIN, None)
        if active.number and active.hash in self._shown and active != shown:
            # The plan has just become active, and none of its motifs is measured yet.
            shown, report = active, None
        return JobStatus(
            job=self.name, epoch=self.job.epoch, size=len(self.job.ranks), phase=self.job.phase, about=self._told(),
            plan=active, plan_name=plan_name, digest=self._digest, predicted_us=predicted_us, replans=self._replans,
            ranks=tuple(
                RankStatus(
                    rank=rank, heard_s=now - self._states[rank][0], ballot=state.ballot, committed=state.committed,
                    active=state.active, iteration=state.report.iteration if state.report else 0,
                    iteration_us=state.report.iteration_us if state.report else 0.0,
                    waits_us=state.report.waits_us if state.report else 0.0,
                    held_us=state.report.held_us if state.report else 0.0,
                    fell_back=state.report.fell_back if state.report else "", left=state.leaving,
                )
                for rank, state in states.items()
            ),
            motifs=self._motifs(shown, report),
            motifs_plan=shown,
            split=self._split(active, plan_name, reports),
            recorded=self._recorded,
            before=self._before,
            after=self._shown[shown.hash][1] if shown.hash in self._shown else (),
            about_recorded=self._about_recorded,
            recalled=self._recalled,
            **mean,
        )  # fmt: skip

    def _split(self, active: PlanId, plan_name: str, reports: list[EnforcerReport]) -> GainSplit:
        """The unchanged job, our backend and the plan, each as it was measured."""
        first = reports[0] if reports else EnforcerReport()
        newest = max((plan for plan, _ in self._windows.values()), key=lambda plan: plan.number, default=PLAIN)
        windows = [self._windows.get(rank, (PLAIN, None)) for rank in range(len(self.job.ranks))]
        plan = over_ranks([timing if which == newest else None for which, timing in windows])
        whole = [report.job_us / report.job_iterations for report in reports if report.job_iterations]
        # Where nobody measured in turns, what runs without a plan is what there is.
        unchanged, backend = (over_ranks([getattr(report, side) for report in reports]) for side in ("own", "backend"))
        unchanged, backend = unchanged or first.own, backend or first.backend
        if backend is None and not first.on_own:
            backend = over_ranks([report.plain for report in reports])
        return split(
            own=first.own_name, unchanged=unchanged, backend=backend, plan=plan, no_unchanged=first.no_own,
            predicted_backend_us=self._plain_then_us,
            # The plan that was measured, not the one that was made last.
            predicted_plan_us=self._promised.get(newest.hash, ("", 0.0))[1] if plan is not None else 0.0,
            plan_number=newest.number if len(self._measured_plans) > 1 else 0,
            whole_us=fmean(whole) if whole else 0.0,
            whole_iterations=min((report.job_iterations for report in reports), default=0) if whole else 0,
            kept="plan" if active.number and plan_name != OWN else "unchanged" if first.on_own else "backend",
        )  # fmt: skip

    def _motifs(self, shown: PlanId, report: EnforcerReport | None) -> tuple[MotifStatus, ...]:
        """What was promised of a plan, beside what is measured."""
        if shown.hash not in self._shown:
            return ()
        measured = {(one.op, one.motif): one for one in (report.motifs if report is not None else ())}
        found = []
        for op in self._shown[shown.hash][0].ops:
            for number, motif in enumerate(op.motifs):
                seen = measured.get((op.op, number))
                found.append(
                    MotifStatus(
                        op=op.op, motif=number, algorithm=motif.algorithm, channels=motif.channels,
                        nbytes=motif.nbytes, predicted_start_us=motif.start_us, predicted_us=motif.duration_us,
                        start_us=seen.start_us if seen else 0.0, duration_us=seen.duration_us if seen else 0.0,
                        wait_us=seen.wait_us if seen else 0.0, turn_us=seen.turn_us if seen else 0.0,
                    )
                )  # fmt: skip
        return tuple(found)
