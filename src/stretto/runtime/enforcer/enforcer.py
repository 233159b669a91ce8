# SPDX-License-Identifier: Apache-2.0
"""`Enforcer`: takes the application's calls and carries them out as a plan says.

Two clocks meet here. The control plane hands over plans whenever it likes (`prepare`, `commit`); the data plane counts
iterations. At the begin of every m-th iteration all ranks start to compare the plan that each has been told to use, and
at its end they read the answer: they change to it there if, and only if, all hold the same. A rank that lacks it, for
whatever reason, keeps everybody where they are.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...cluster import Cluster
from ...errors import InvalidInput, PeerLost, PlanMismatch
from ...planner.plan import PLAIN, Plan
from ...workload import Workload
from ..executor.executor import ProgramMismatch
from ..executor.forks import Home, check_world
from ..torch_backend.buffers import CollectiveCall
from ..torch_backend.current import CURRENT
from ..torch_backend.own_backend import OWN_BACKEND
from ..torch_backend.work import GroupWork
from .announce import Announcements, Place, Stray
from .carrier import CarrierMaker, CarrierSite, PendingMaximum
from .carriers import make
from .compiled_op import CompiledOp
from .link_turns import TurnBoard
from .measured import MeasuredWindow
from .messages import MessageLines
from .planned_work import STALLED_S
from .plans import Plans
from .prepared import ExpectedOps, PreparedPlan
from .report import EnforcerReport
from .resting_plan import PATIENCE, too_many
from .sequencer import QueuedOp, Sequencer
from .submission import BaseSubmission, PlaceSubmission
from .trial import PlainTrial
from .watched_work import WatchedWork

log = logging.getLogger("stretto.enforcer")
SETTLE_S = 5.0
STRAY_S = 2.0
"""A rank that has waited this long in a call between two iterations tells the others."""


class Enforcer:
    """Makes a plan happen, one in each process; all ranks make it at the same point of the program.

    `workload` is the captured step: with it iterations are found by counting calls. Without it, or where other
    communication happens between iterations, mark their ends with `stretto.torch.step`. Every `every` iterations all
    ranks agree whether to change plans. `cluster` is what plans were made for: algorithms that follow its links need
    it. `carrier` moves the data: our executor, or gloo or NCCL with one communicator for each channel; "auto" is NCCL
    where the job has used it so far, else the executor, else gloo. Instead of a name it may be what makes another
    one, of which `Carrier` is the contract. `group` is one of all ranks on the backend `stretto`, where that is not
    the default one (as the DDP hook's).
    """

    def __init__(
        self,
        workload: Workload | None = None,
        *,
        every: int = 8,
        cluster: Cluster | None = None,
        carrier: str | CarrierMaker = "auto",
        group: Any = None,
    ) -> None:
        if every < 1:
            raise InvalidInput(f"every: must be >= 1 iterations, not {every}")
        if isinstance(CURRENT.enforcer, Enforcer) and not CURRENT.enforcer.alive:
            CURRENT.enforcer.close()
        if CURRENT.enforcer is not None:
            raise InvalidInput("enforcer: there is one in this process already; close it first")
        world: Any = group if group is not None else dist.group.WORLD if dist.is_initialized() else None
        if not hasattr(world, "engine"):
            raise InvalidInput('enforcer: call torch.distributed.init_process_group("stretto") first')
        check_world()
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._home = Home(f"rank {self._rank}")
        self._every = every
        self._sequencer = Sequencer(self._tell_failure)
        self._announcements = Announcements(self._rank)
        self._board = TurnBoard(self._rank, self._sequencer, self._announcements.generation)
        self._sequencer.link_turns = self._board
        self._job = world.engine.job
        self._carrier = make(
            carrier,
            CarrierSite(
                rank=self._rank, size=self._size, engine=world.engine, sequencer=self._sequencer, owner=self,
                generation=self._announcements.generation, explain=world.explain, hopeless=self._hopeless,
            ),
        )  # fmt: skip
        self._expected = ExpectedOps(workload, self._rank) if workload is not None else None
        self._plans = Plans(
            self._carrier, rank=self._rank, hosts=[card.host for card in world.cards], cluster=cluster,
            expected=self._expected,
        )  # fmt: skip
        self._messages = MessageLines(self, self._sequencer)
        self._measured = MeasuredWindow()
        self.waited, self.spent = self._measured.waited, self._measured.spent
        self._flow = threading.RLock()
        self._agreement: PendingMaximum | None = None
        self._marked = False
        self._position = 0
        self._iteration = 0
        self._round = 0
        """The iteration as the active plan counts: one in which nothing of the step was called here does not count."""
        self._strays: dict[tuple[int, ...], list[str]] = {}
        self._before = 0
        """Calls that are not of the step, by their ranks; and the iteration before which they came."""
        self._empty = 0
        self._last: EnforcerReport | None = None
        self.compares = False
        """Whether each plan is set aside for some iterations, to measure what it is compared with; on all ranks."""
        self._trial: PlainTrial | None = None
        self._used = False
        self._told: Exception | None = None
        """The failure that other ranks have been told of."""
        CURRENT.enforcer = self

    @property
    def alive(self) -> bool:
        """Whether the job that it was made for still runs."""
        return self._carrier.alive

    @property
    def asleep(self) -> bool:
        """Whether calls are of no interest to it now: there is no plan, and no order of calls that it follows."""
        plans = self._plans
        return plans.active is None and plans.resting is None and (self._expected is None or self._marked)

    @property
    def used(self) -> bool:
        """Whether a plan is, or has been, active: between two iterations the same on all ranks."""
        return self._used

    @property
    def device(self) -> torch.device:
        """Where the tensors are that plans move."""
        return self._carrier.device

    # The control plane.

    def prepare(self, plan: Plan, workload: Workload, number: int) -> None:
        """Check a plan and make it ready beside the one that runs; raises `PlanMismatch` or `InvalidInput`.

        Args:
            plan: The plan.
            workload: The step that it is for: the one that was captured here.
            number: The plan's number, which all ranks agree on; higher ones are newer.

        Raises:
            PlanMismatch: The plan is for another step, another job, or needs what this carrier has not.
            InvalidInput: The number is out of range.
        """
        self._plans.prepare(plan, workload, number)

    def commit(self, number: int, hash: str) -> None:
        """All ranks are ready: the plan may become active at the next boundary where all know this."""
        self._plans.commit(number, hash)

    def discard(self, number: int) -> None:
        """Forget a prepared plan that is not active."""
        self._plans.discard(number)

    def report(self) -> EnforcerReport:
        """How it goes; once closed, how it went."""
        if self._last is not None:
            return self._last
        self._carrier.read()
        plans = self._plans
        active, committed, resting = plans.active, plans.committed, plans.resting
        return EnforcerReport(
            number=active.number if active else 0,
            hash=active.hash if active else "",
            committed=committed.number if committed else 0,
            iteration=self._iteration,
            fell_back=plans.fell_back,
            resting=resting.plan.number if resting is not None else 0,
            outgrown=active.outgrown if active is not None else (),
            **self._measured.figures(active.expected.workload.ops if active is not None else ()),
        )

    def close(self) -> None:
        """Let what was submitted run out, then leave calls to the backend alone."""
        if self._home.left:
            if CURRENT.enforcer is self:
                CURRENT.enforcer = None
            return
        with self._flow:
            active = self._plans.active
            if active is not None:
                self._run_out(active, self._here(active))
                self._last = self.report()
                self._plans.active = None
                self._carrier.unload(active.number)
        deadline = time.monotonic() + SETTLE_S * self.alive
        while not self._sequencer.idle and time.monotonic() < deadline:
            time.sleep(0.001)
        if CURRENT.enforcer is self:
            CURRENT.enforcer = None
            self._messages.close()
            self._board.close()
            self._carrier.close()

    def __enter__(self) -> Enforcer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # The data plane.

    def step(self) -> None:
        """An iteration ends here."""
        self._home.check()
        self._carrier.check()
        with self._flow:
            active = self._plans.active
            self._marked = True
            if active is not None and self._position < len(active.expected):
                if not self._position and self._empty < PATIENCE:
                    # The iteration had no call of the step: its batch was skipped, or it ran another step.
                    self._empty += 1
                    self._boundary(empty=True)
                    return
                missing = active.expected.ops[self._position][1].name
                self._fall_back(f"the iteration ends without {missing}")
            resting = self._plans.resting
            if resting is not None:
                resting.step()
                self._plans.see_return(resting)
            self._boundary()

    def take(
        self, group: Any, call: CollectiveCall, tensors: list[torch.Tensor], opts: Any, plain: Callable[..., GroupWork]
    ) -> dist.Work | None:
        """Run a call as the plan says; None where it is to run as usual, as `plain` would.

        Args:
            group: The process group of the call.
            call: The call.
            tensors: The tensors that its future gives.
            opts: PyTorch's options of the call.
            plain: Runs the call as usual; ``plain(own=True)`` on the backend that the job asked for.

        Returns:
            The work that the application waits for.

        Raises:
            PlanMismatch: The call contradicts the plan, and ranks cannot go back to plain order together.
            PeerLost: A rank is gone.
        """
        if group.engine.job is not self._job:
            return None
        self._carrier.check()
        found = self._expect(group, call)
        if found is None:
            return self._carefully(group, tensors, plain)
        active, queued = found
        side = self._trial.side(self._iteration) if self._trial is not None else None
        if side is not None or (active.plan.name == PLAIN and OWN_BACKEND.runs):
            # Without the plan, or plain order is what the job's own backend does.
            self._keep_place(queued)
            return None if side is None or not group.alone else plain(own=side == "own")
        if active.may_split(queued.rank_op.number):
            call = call.with_splits()
        engine = group.engine
        compiled: CompiledOp | None = None
        # What the carrier does not run the wrapped backend does: as it comes, in the application's order.
        if call.op != "barrier" and not group.coalescing and not self._carrier.refusal(call, engine):
            blocking = not opts.asyncOp and group.alone
            queued.ask(call, tensors, plain, engine.rank, engine.size, blocking=blocking)
            compiled = active.compiled(queued)
        if compiled is None:
            self._keep_place(queued)
            return self._carefully(group, tensors, plain, of_the_step=True)
        return self._carrier.submit(queued, compiled)

    def message(
        self, group: Any, call: CollectiveCall, source: int, target: int, plain: Callable[[], GroupWork]
    ) -> dist.Work | None:
        """Run a message between two ranks in its turn; None where it is to run at once.

        Args:
            group: The process group.
            call: The call of this end.
            source: The rank of the group that sends.
            target: The rank of the group that receives.
            plain: Makes the call.

        Returns:
            What to wait for, or None.
        """
        if group.engine.job is not self._job or not group.alone or call.device.type != "cpu":
            return None
        ranks = group.engine.selector.devices
        with self._flow:
            active = self._plans.active
            if active is None or self._sequencer.failure is not None:
                return None
            side = self._trial.side(self._iteration) if self._trial is not None else None
            follows = side is None and not (active.plan.name == PLAIN and OWN_BACKEND.runs)
            return self._messages.take(
                active, self._round, (ranks[source], ranks[target]), call.nbytes, follows=follows, plain=plain,
                tensors=call.inputs + call.outputs,
            )  # fmt: skip

    def pass_by(self, group: Any, call: CollectiveCall) -> None:
        """A call of several in one, which the backend runs as usual: only its place in the order counts."""
        found = self._expect(group, call)
        if found is not None:
            self._keep_place(found[1])

    def _expect(self, group: Any, call: CollectiveCall) -> tuple[PreparedPlan, QueuedOp] | None:
        """The op of the plan that a call is; None in plain order, and from a call on that is not what was expected."""
        ranks = tuple(group.engine.selector.devices)
        if group.engine.job is not self._job:
            return None
        with self._flow:
            if self._sequencer.failure is not None:
                self._plans.active = None
            if self._plans.active is None:
                self._count(call, ranks)
                resting = self._plans.resting
                if self._plans.active is None and resting is not None:
                    resting.call(call, ranks, marked=self._marked)
                    self._plans.see_return(resting)
            elif self._counts_up(self._plans.active.expected, call, ranks):
                self._boundary()
                if self._plans.active is None:
                    self._count(call, ranks)
            active = self._plans.active
            if active is None:
                return None
            wrong = active.expected.refusal(self._position, call, ranks)
            if wrong:
                between = self._position in (0, len(active.expected))
                if not between and not self._carrier.one_launch_order and len(ranks) < self._size:
                    # Ranks outside of this group do not see the call: leaving the plan here would part the ranks.
                    self._strays.pop(ranks, None)
                    if active.expected.differs_in_size(self._position, call, ranks):
                        self._keep_place(self._next_op(active))
                elif not between or too_many(sum(map(len, self._strays.values())), active.expected):
                    self._fall_back(wrong)
                else:
                    self._stray(active, call, ranks)
                return None
            self._empty = 0
            queued = self._next_op(active)
            active.measure(queued.rank_op.number, call)
            return active, queued

    def _next_op(self, active: PreparedPlan) -> QueuedOp:
        """The op that comes next, which is submitted now."""
        number = active.expected.ops[self._position][0]
        self._position += 1
        return active.queued_op(self._round, number)

    def _keep_place(self, queued: QueuedOp) -> None:
        """An op that runs in plain order only keeps its place in the plan's."""
        self._sequencer.submit(queued, PlaceSubmission(self, queued))

    # Calls that are not of the step.

    def _stray(self, active: PreparedPlan, call: CollectiveCall, ranks: tuple[int, ...]) -> None:
        """A call between two iterations (an evaluation's, say) runs in plain order, and the plan goes on after it."""
        upcoming = self._round + (self._position > 0)
        if upcoming != self._before:
            self._before, self._strays = upcoming, {}
        seen = self._strays.setdefault(ranks, [])
        seen.append(ExpectedOps.said(call, ranks))
        share = active.share
        if len(seen) == 1 and len(ranks) == self._size and (share.most_ahead or share.most_behind):
            # The application may wait for what is held back for the next iteration before that begins. All ranks come
            # here at the same place: what was submitted runs out, and the plan begins anew.
            place = (upcoming, 0)
            self._sequencer.add(active.close(place))
            self._keep_only(lambda queued: queued.place < place)
            self._sequencer.add(active.begin(upcoming))

    def _carefully(
        self, group: Any, tensors: list[torch.Tensor], plain: Callable[[], Any], *, of_the_step: bool = False
    ) -> dist.Work | None:
        """Run a call in plain order, and look around if it takes long: other ranks may do something else."""
        active, resting = self._plans.active, self._plans.resting
        plan = active if active is not None else resting.plan if resting is not None else None
        if plan is None or not group.alone or group.coalescing:
            return None
        ranks = tuple(group.engine.selector.devices)
        seen = self._strays.get(ranks, [])
        stray = None
        if active is not None and not of_the_step and seen:
            stray = Stray(iteration=self._before, rank=self._rank, ranks=ranks, nth=len(seen) - 1, what=seen[-1])
        number, stay = plan.number, self._plans.stay(plan.number)
        told = False

        def stalled(waited_s: float) -> None:
            nonlocal told
            if stray is not None and not told and waited_s > STRAY_S:
                self._announcements.wait_in(number, stray)
                told = True
            self._look_around(number, stay)

        inner = plain()
        return WatchedWork(inner, tensors, stalled) if isinstance(inner, GroupWork) else inner

    def _look_around(self, number: int, stay: int) -> None:
        """Raises `PlanMismatch` where ranks have gone different ways for good."""
        with self._flow:
            active = self._plans.active_as(number) is not None
            ended = self._announcements.ended(number, stay)
            for before in sorted({self._before, self._round} if active else ()):
                seen = self._strays if before == self._before else {}
                # A rank that is inside an iteration has gone past the calls before it.
                past = self._round >= before and self._position > 0
                for stray in self._announcements.strays(number, before):
                    ended = ended or stray.contradicts(before, self._rank, seen, past=past)
            if ended:
                self._announcements.end(number, stay, ended)
                raise PlanMismatch(ended)
            found = self._announcements.look(number, stay) if active else None
            if found is not None:
                self._give_way(number, *found)

    def _count(self, call: CollectiveCall, ranks: Sequence[int]) -> None:
        """Follow the application in plain order, to know where an iteration ends."""
        expected = self._expected
        if expected is None or self._marked or not expected.countable:
            return
        if self._position == len(expected):
            if not self._counts_up(expected, call, ranks):
                return
            self._boundary()
            if self._plans.active is not None:
                return
        if expected.refusal(self._position, call, ranks):
            # Something between two iterations, or another model: start again where it fits.
            self._position = 0
            if expected.refusal(0, call, ranks):
                return
        self._position += 1

    def _counts_up(self, expected: ExpectedOps, call: CollectiveCall, ranks: Sequence[int]) -> bool:
        """Whether a call begins the next iteration, where iterations are counted by calls.

        Not every call behind the last comm-op does: some ranks may have an evaluation's there, and others not, and
        `stretto.torch.step` may still mark the end of the first iteration.
        """
        if self._marked or self._position < len(expected):
            return False
        return expected.countable and expected.begins(call, ranks)

    def _boundary(self, *, empty: bool = False) -> None:
        """Between two iterations, and the only place where plans change.

        One that was `empty` here may not have been so on other ranks: all of them agree on plans after it.
        """
        trial = self._trial
        side = trial.side(self._iteration) if trial is not None else None
        counts = bool(self._iteration) and not empty and (trial is None or trial.counts(self._iteration))
        self._measured.boundary(self._sequencer.take_held_us(), side, counts=counts)
        self._position = 0
        old = self._plans.active
        if old is not None and not empty:
            self._messages.boundary(old, self._round, marked=self._marked)
        self._iteration += 1
        self._round += not empty
        if self._agreement is not None:
            pending, self._agreement = self._agreement, None
            while not pending.over(STALLED_S):
                self._check_ended()
            if self._plans.elect(pending.wait()):
                self._change(old)
                old = None
        if old is not None and not empty:
            self._sequencer.add(old.open(self._round))
            old.forget(self._round - 2)
        if self._iteration % self._every == 0:
            self._agreement = self._carrier.agree(self._plans.offer())

    def _check_ended(self) -> None:
        """Raise `PlanMismatch` where another rank has said that nothing goes on."""
        for plan in (self._plans.active, self._plans.resting.plan if self._plans.resting is not None else None):
            why = "" if plan is None else self._announcements.ended(plan.number, self._plans.stay(plan.number))
            if why:
                raise PlanMismatch(why)

    def _change(self, old: PreparedPlan | None) -> None:
        """All ranks have agreed: from here on another plan is active."""
        if old is not None:
            self._run_out(old, (self._round, 0))
            self._carrier.unload(old.number)
        new = self._plans.active
        self._used = self._used or new is not None
        self._round = self._iteration
        self._messages.forget()
        self._strays, self._empty = {}, 0
        self._measured.changed(planned=new is not None)
        compares = self.compares and new is not None and new.plan.name != PLAIN
        self._trial = PlainTrial(self._iteration) if compares else None
        if new is not None:
            if new.share.takes_turns:
                with self._sequencer.lock:
                    self._board.begin(new.number, self._round, new.plan.iteration_us, sorted(new.share.tells))
            self._sequencer.add(new.begin(self._round))
            if self._rank == 0:
                log.info("plan %d (%s) is active from iteration %d on", new.number, new.hash, self._iteration)

    def _run_out(self, old: PreparedPlan, place: Place) -> list[QueuedOp]:
        """A plan ends at a place: what comes before it runs out in the plan's order. Returns what does not."""
        self._sequencer.add(old.close(place))
        return self._keep_only(lambda queued: queued.place < place and not queued.is_message)

    def _keep_only(self, wanted: Callable[[QueuedOp], bool]) -> list[QueuedOp]:
        """Take all others out of the lines; messages among them begin. Returns collectives that had been submitted."""
        gone = self._sequencer.keep(wanted)
        for one in gone:
            if one.is_message and isinstance(one.submission, BaseSubmission):
                one.submission.run_plainly()
        return [one for one in gone if not one.is_message]

    # When the application does not do what the plan expects.

    def _fall_back(self, why: str, place: Place | None = None) -> list[QueuedOp]:
        """Plain order from here on; without a `place` because of what this rank has seen.

        Then the plan rests, some times, until the application does again what it was made for. Returns what had been
        submitted behind the place.
        """
        active = self._plans.active
        assert active is not None
        mine = place is None
        self._trial = None
        if place is None:
            at = self._position
            number = active.expected.ops[at][0] if at < len(active.expected) else len(active.expected.workload.ops)
            place = (self._round, number)
        why = f"iteration {self._iteration}: {why}"
        log.warning("rank %d leaves plan %d in %s", self._rank, active.number, why)
        self._plans.leave(why, mine=mine)
        if mine:
            self._announcements.announce(active.number, self._plans.stay(active.number), place, why)
        self._measured.left()
        return self._run_out(active, place)

    def stalled(self, queued: QueuedOp) -> None:
        """A wait has taken long: has the application changed its order, or another rank given up?"""
        with self._flow:
            if queued.done:
                return
            active = self._plans.active_as(queued.plan)
            ahead = self._sequencer.behind(queued) if active is not None else None
            if ahead is not None and ahead.is_message:
                # The message may never be called for, and can go without the plan when it is.
                self._messages.pass_by(ahead)
                return
            if active is not None and ahead is not None and ahead.place >= self._here(active):
                name, first = queued.rank_op.op.name, ahead.rank_op.op.name
                self._fall_back(f"the application waits for {name} before it submits {first}, which is to run first")
                return
            stay = self._plans.stay(queued.plan)
            try:
                self._look_around(queued.plan, stay)
            except PlanMismatch as error:
                self._sequencer.fail(error)
                return
            if active is None:
                found = self._announcements.look(queued.plan, stay)
                if found is not None:
                    self._give_way(queued.plan, *found)

    def _give_way(self, number: int, place: Place, rank: int, why: str) -> None:
        """Another rank has left a plan at a place: follow it, or end where that cannot be."""
        said = f"rank {rank} gave up plan {number}: {why}"
        active = self._plans.active_as(number)
        if active is not None:
            stuck = self._fall_back(said, min(place, self._here(active)))
        else:
            stuck = self._keep_only(lambda one: one.plan != number or (one.place < place and not one.is_message))
        touched = next((one for one in stuck if not one.untouched), None)
        if touched is not None:
            # The op's memory is half reduced, and the rank that gave up will never join: no order can save this op.
            error = PlanMismatch(f"{touched.rank_op.op.name} cannot end: {said}")
            self._announcements.end(number, self._plans.stay(number), str(error))
            for one in stuck:
                one.settle(error)
            self._sequencer.fail(error)
            return
        for one in stuck:
            assert isinstance(one.submission, BaseSubmission)
            one.submission.run_plainly()

    def _hopeless(self, queued: QueuedOp) -> str:
        """Why a GPU waits for an op in vain: a rank gave up the plan before it."""
        stay = self._plans.stay(queued.plan)
        return self._announcements.hopeless(queued.plan, stay, queued.place, queued.rank_op.op.name)

    def _tell_failure(self, queued: QueuedOp, error: Exception) -> None:
        """Tell ranks that wait elsewhere why this one goes no further; of lost ranks they hear by themselves."""
        if isinstance(error, PeerLost) or error is self._told:
            return
        self._told = error
        # The store may be gone with a rank.
        with contextlib.suppress(Exception):
            why = str(error) if isinstance(error, PlanMismatch) else f"{queued.rank_op.op.name} failed: {error}"
            self._announcements.end(queued.plan, self._plans.stay(queued.plan), why)

    def explain(self, queued: QueuedOp, error: Exception) -> Exception:
        """What lies behind an error: a rank that has found out that ranks went different ways leaves, and says so."""
        why = ""
        if not isinstance(error, PlanMismatch | ProgramMismatch):
            # The store may be gone with the rank.
            with contextlib.suppress(Exception):
                why = self._announcements.ended(queued.plan, self._plans.stay(queued.plan))
        return PlanMismatch(why) if why else error

    def _here(self, active: PreparedPlan) -> Place:
        """The next comm-op that the application has to submit."""
        if self._position < len(active.expected):
            return self._round, active.expected.ops[self._position][0]
        return self._round + 1, 0
