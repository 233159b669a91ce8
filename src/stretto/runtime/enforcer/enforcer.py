"""`Enforcer`: takes the application's calls and carries them out as a plan says.

Two clocks meet here. The control plane hands over plans whenever it likes (`prepare`, `commit`); the data plane counts
iterations. At the begin of every m-th iteration all ranks start to compare the plan that each has been told to use, and
at its end they read the answer: they change to it there if, and only if, all hold the same. A rank that lacks it, for
whatever reason, keeps everybody where they are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist

from ...cluster import Cluster
from ...errors import InvalidInput, PlanMismatch, unknown
from ...planner.plan import Plan
from ...workload import Workload
from ..backend_buffers import Call, lay_out
from ..backend_engine import Engine, channels_of
from ..backend_work import GroupWork
from ..record import LEDGER, now_us
from .announce import Announcements, Place, Stray
from .careful import CarefulWork
from .carrier import MAX_NUMBER, RESERVED, SLOTS, Agreement, Carrier, ExecutorCarrier
from .current import Current
from .gloo import GlooCarrier
from .launches import check_launches
from .nccl import NcclCarrier
from .pieces import Programs
from .planned_work import Given, PlannedWork
from .prepared import Expected, Prepared
from .queued import QueuedGiven, QueuedWork
from .report import MotifReport, Report
from .rest import PATIENCE, RETURNS, Resting, too_many
from .sequencer import Instance, Sequencer

log = logging.getLogger("stretto.enforcer")
WINDOW, LEAST_WINDOW, WINDOW_US = 32, 5, 2e6
"""Iterations that a report looks back on; fewer where they are long, so that a change is soon seen."""
RECENT = 4
"""Of so many iterations the begin is remembered: motifs may run ahead of theirs, or late."""
SETTLE_S = 5.0
STRAY_S = 2.0
"""Who has waited so long in a call between two iterations tells the others."""
CARRIERS = ("auto", "executor", "gloo", "nccl")


class Spent:
    """What was measured of a motif in the last window."""

    def __init__(self) -> None:
        self.starts: deque[float] = deque(maxlen=WINDOW)
        self.durations: deque[float] = deque(maxlen=WINDOW)
        self.waits: deque[float] = deque(maxlen=WINDOW)


class Enforcer:
    """Makes a plan happen, one in each process; all ranks make it at the same point of the program.

    `workload` is the captured step: with it iterations are found by counting calls. Without it, or where other
    communication happens between iterations, mark their ends with `stretto.step`. Every `every` iterations all ranks
    agree whether to change plans. `cluster` is what plans were made for: algorithms that follow its links need it.
    `carrier` moves the data: our executor, or gloo or NCCL with one communicator for each channel; "auto" is NCCL
    where the job has used it so far, else the executor, else gloo. `group` is one of all ranks on the backend
    `stretto`, where that is not the default one (as the DDP hook's).
    """

    def __init__(
        self,
        workload: Workload | None = None,
        *,
        every: int = 8,
        cluster: Cluster | None = None,
        carrier: str = "auto",
        group: Any = None,
    ) -> None:
        if every < 1:
            raise InvalidInput(f"every: must be >= 1 iterations, not {every}")
        if isinstance(Current.enforcer, Enforcer) and not Current.enforcer.alive:
            Current.enforcer.close()
        if Current.enforcer is not None:
            raise InvalidInput("enforcer: there is one in this process already; close it first")
        world: Any = group if group is not None else dist.group.WORLD if dist.is_initialized() else None
        if not hasattr(world, "engine"):
            raise InvalidInput('enforcer: call torch.distributed.init_process_group("stretto") first')
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._every, self._cluster = every, cluster
        self._hosts: list[str] = [card.host for card in world.cards]
        self._sequencer = Sequencer()
        self._announcements = Announcements(self._rank)
        self._undo: Callable[[], object] = lambda: None
        self._job = world.engine.job
        self._carrier = self._made(carrier, world.engine)
        self._expected = Expected(workload, self._rank) if workload is not None else None
        self._flow = threading.RLock()
        self._control = threading.Lock()
        self._notes = threading.Lock()
        self._programs: Programs = {}
        self._prepared: dict[int, Prepared] = {}
        self._committed: Prepared | None = None
        self._active: Prepared | None = None
        self._voted: Prepared | None = None
        self._burnt: set[int] = set()
        self._agreement: Agreement | None = None
        self._marked = False
        self._position = 0
        self._iteration = 0
        self._began_us = now_us()
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._plain: deque[float] = deque(maxlen=WINDOW)
        self._waited = 0.0
        self._waits: deque[float] = deque(maxlen=WINDOW)
        self._spent: dict[tuple[int, int], Spent] = {}
        self._begins: deque[float] = deque(maxlen=RECENT)
        self._had_plan = False
        self._fell_back = ""
        self._resting: Resting | None = None
        self._falls: dict[int, int] = {}
        self._stays: dict[int, int] = {}
        """How often each plan was left, and became active."""
        self._strays: dict[tuple[int, ...], list[str]] = {}
        self._before = 0
        """Calls that are not of the step, by their ranks; and the iteration before which they came."""
        self._empty = 0
        Current.enforcer = self

    def _made(self, carrier: str, engine: Engine) -> Carrier:
        if carrier not in CARRIERS:
            raise unknown("carrier", carrier, CARRIERS)
        if carrier == "auto":
            # All ranks have made the same calls.
            on_gpu = any(choice.backend == "nccl" for choice in LEDGER.all())
            carrier = "nccl" if on_gpu else "gloo" if engine.job.executor is None else "executor"
        if carrier == "nccl":
            return NcclCarrier(
                rank=self._rank, size=self._size, timeout_s=engine.timeout_s, hopeless=self._hopeless,
                failed=self._sequencer.fail,
            )  # fmt: skip
        if carrier == "gloo":
            return GlooCarrier(self._sequencer.ended, rank=self._rank, size=self._size, timeout_s=engine.timeout_s)
        job = engine.job
        if job.executor is None:
            raise InvalidInput(f"carrier: there is no executor ({job.why}); use gloo")
        first = job.max_communicators - RESERVED
        if job.next > first:
            raise InvalidInput(f"enforcer: {job.next} groups leave no communicators for plans; make it earlier")
        # Groups that are made later stay below; all ranks make (and close) the enforcer at the same point.
        job.max_communicators = first
        self._undo = lambda: setattr(job, "max_communicators", first + RESERVED)
        return ExecutorCarrier(
            job.executor, self._sequencer.ended, networks=list(channels_of(os.environ)), first=first,
            timeout_s=engine.timeout_s, generation=self._announcements.generation,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        """Whether the job that it was made for still runs."""
        return self._job.executor is not None if self._carrier.programs else dist.is_initialized()

    @property
    def device(self) -> torch.device:
        """Where the tensors are that plans move."""
        return self._carrier.device if isinstance(self._carrier, NcclCarrier) else torch.device("cpu")

    # The control plane.

    def prepare(self, plan: Plan, workload: Workload, number: int) -> None:
        """Check a plan and make it ready beside the one that runs; raises `PlanMismatch` or `InvalidInput`."""
        if not 1 <= number <= MAX_NUMBER:
            raise InvalidInput(f"number: must be 1..{MAX_NUMBER}, not {number}")
        if workload.num_ranks != self._size:
            raise PlanMismatch(f"workload {workload.name} is for {workload.num_ranks} ranks, not {self._size}")
        if self._expected is not None and self._expected.digest != workload.digest:
            raise PlanMismatch(
                f"workload {workload.name} ({workload.digest}) is not the step that runs here ({self._expected.digest})"
            )
        if number in self._prepared:
            if self._prepared[number].hash != plan.hash:
                raise PlanMismatch(f"plan {number} is {self._prepared[number].hash} here, not {plan.hash}")
            return
        if number in self._burnt:
            raise PlanMismatch(f"plan {number} was given up: {self._fell_back}")
        with self._control:
            taken = next((at for at in self._prepared if at % SLOTS == number % SLOTS), None)
        if taken is not None:
            raise PlanMismatch(f"plan {number} needs the communicators of plan {taken}, which is still held")
        if isinstance(self._carrier, NcclCarrier):
            check_launches(plan, workload, self._hosts)
        made = Prepared(
            plan, workload, number, rank=self._rank, hosts=self._hosts, carrier=self._carrier, cluster=self._cluster,
            programs=self._programs,
        )  # fmt: skip
        with self._control:
            self._prepared[number] = made

    def commit(self, number: int, hash: str) -> None:
        """All ranks are ready: the plan may become active at the next boundary where all know this."""
        with self._control:
            found = self._prepared.get(number)
            if found is None or found.hash != hash:
                here = f"is {found.hash} here" if found else "is not prepared here"
                raise PlanMismatch(f"plan {number} ({hash}) {here}")
            if number in self._burnt:
                raise PlanMismatch(f"plan {number} was given up: {self._fell_back}")
            if self._committed is None or number >= self._committed.number:
                self._committed = found

    def discard(self, number: int) -> None:
        """Forget a prepared plan that is not active."""
        with self._control:
            found = self._prepared.get(number)
            if found is None or found is self._active:
                return
            del self._prepared[number]
            if self._resting is not None and self._resting.plan is found:
                self._resting = None
            if found is self._committed:
                self._committed = self._active
        self._carrier.unload(number)

    def report(self) -> Report:
        """How it goes."""
        if isinstance(self._carrier, NcclCarrier):
            self._carrier.clock.read()
        active, committed, resting = self._active, self._committed, self._resting
        ops = active.expected.workload.ops if active is not None else ()
        with self._notes:
            spent = [
                (key, list(one.starts), list(one.durations), list(one.waits)) for key, one in self._spent.items()
            ]
            times, plain, waits_us = list(self._times), list(self._plain), list(self._waits)
        recent = min(max(int(WINDOW_US / max(times[-1], 1.0)), LEAST_WINDOW), WINDOW) if times else WINDOW
        times, waits_us = times[-recent:], waits_us[-recent:]
        spent = [(key, starts[-recent:], took[-recent:], waits[-recent:]) for key, starts, took, waits in spent]
        motifs = [
            MotifReport(
                op=ops[op].name,
                motif=motif,
                start_us=median(starts) if starts else 0.0,
                duration_us=median(durations) if durations else 0.0,
                wait_us=fmean(waits) if waits else 0.0,
            )
            for (op, motif), starts, durations, waits in (sorted(spent) if ops else ())
        ]
        return Report(
            number=active.number if active else 0,
            hash=active.hash if active else "",
            committed=committed.number if committed else 0,
            iteration=self._iteration,
            iteration_us=median(times) if times else 0.0,
            plain_us=median(plain) if plain else 0.0,
            waits_us=fmean(waits_us) if waits_us else 0.0,
            motifs=tuple(motifs),
            fell_back=self._fell_back,
            resting=resting.plan.number if resting is not None else 0,
        )

    def close(self) -> None:
        """Let what was submitted run out, then leave calls to the backend alone."""
        with self._flow:
            if self._active is not None:
                self._retire(self._here(self._active))
        deadline = time.monotonic() + SETTLE_S * self.alive
        while not self._sequencer.idle and time.monotonic() < deadline:
            time.sleep(0.001)
        if Current.enforcer is self:
            Current.enforcer = None
            self._carrier.close()
            self._undo()

    def __enter__(self) -> Enforcer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # The data plane.

    def step(self) -> None:
        """An iteration ends here."""
        if isinstance(self._carrier, NcclCarrier):
            self._carrier.check()
        with self._flow:
            active = self._active
            self._marked = True
            if active is not None and self._position < len(active.expected):
                if not self._position and self._empty < PATIENCE:
                    # Nothing of the step at all: a batch that was skipped, or another kind of step, in plain order.
                    self._empty += 1
                    return
                missing = active.expected.ops[self._position][1].name
                self._fall_back(f"the iteration ends without {missing}")
            resting = self._resting
            if resting is not None:
                resting.step()
                self._see_return(resting)
            self._boundary()

    def take(
        self, group: Any, call: Call, tensors: list[torch.Tensor], opts: Any, plain: Callable[[], GroupWork]
    ) -> dist.Work | None:
        """Run a call as the plan says; None where it is to run as usual, as `plain` would."""
        if group.engine.job is not self._job:
            return None
        if isinstance(self._carrier, NcclCarrier):
            self._carrier.check()
        found = self._expect(group, call)
        if found is None:
            return self._carefully(group, tensors, plain)
        active, instance = found
        engine = group.engine
        # What the carrier does not run the wrapped backend does: as it comes, in the application's order.
        refused = call.op == "barrier" or group.coalescing or self._refusal(engine, call)
        buffers = None if refused else lay_out(call, call.op, engine.rank, engine.size)
        bound = active.bound(instance.planned.number, buffers.count) if buffers is not None else None
        if isinstance(self._carrier, NcclCarrier) and buffers is not None and bound is not None:
            queued = QueuedGiven(self, self._carrier, instance, buffers, bound, call, plain)
            self._sequencer.submit(instance, queued)
            return QueuedWork(self, self._sequencer, instance, queued, tensors, self._carrier)
        given = Given(self, self._carrier, instance, buffers, bound, call, plain)
        given.inline = bound is not None and not opts.asyncOp and len(bound.loaded) == 1 and group.alone
        self._sequencer.submit(instance, given)
        given.inline = False
        if buffers is None:
            return self._carefully(group, tensors, plain, of_the_step=True)
        return PlannedWork(self, self._sequencer, instance, given, tensors)

    def pass_by(self, group: Any, call: Call) -> None:
        """A call of several in one, which the backend runs as usual: only its place in the order counts."""
        found = self._expect(group, call)
        if found is not None:
            _, instance = found
            self._sequencer.submit(instance, Given(self, self._carrier, instance, None, None, call, _never))

    def _refusal(self, engine: Any, call: Call) -> str:
        """Why a call is left to the wrapped backend; only of what is the same on all ranks."""
        if isinstance(self._carrier, NcclCarrier):
            return self._carrier.refusal(call, engine.size)
        if self._carrier.programs or engine.job.executor is not None:
            return str(engine.refusal(call))
        if call.device.type != "cpu" or call.uneven or engine.size == 1:
            return "not for gloo's lanes"
        return "nothing to move" if call.tensor.layout != torch.strided or call.tensor.numel() == 0 else ""

    def _expect(self, group: Any, call: Call) -> tuple[Prepared, Instance] | None:
        """The op of the plan that a call is; None in plain order, and from a call on that is not what was expected."""
        ranks = tuple(group.engine.selector.devices)
        if group.engine.job is not self._job:
            return None
        with self._flow:
            if self._sequencer.failure is not None:
                self._active = None
            if self._active is None:
                self._count(call, ranks)
                resting = self._resting
                if self._active is None and resting is not None:
                    resting.call(call, ranks, marked=self._marked)
                    self._see_return(resting)
            elif not self._marked and self._position == len(self._active.expected):
                self._boundary()
                if self._active is None:
                    self._count(call, ranks)
            active = self._active
            if active is None:
                return None
            wrong = active.expected.refusal(self._position, call, ranks)
            if wrong:
                between = self._position in (0, len(active.expected))
                if not between or too_many(sum(map(len, self._strays.values())), active.expected):
                    self._fall_back(wrong)
                else:
                    self._stray(active, call, ranks)
                return None
            self._empty = 0
            number = active.expected.ops[self._position][0]
            self._position += 1
            return active, active.instance(self._iteration, number)

    # Calls that are not of the step.

    def _stray(self, active: Prepared, call: Call, ranks: tuple[int, ...]) -> None:
        """A call between two iterations (an evaluation's, say) runs in plain order, and the plan goes on after it."""
        upcoming = self._iteration + (self._position > 0)
        if upcoming != self._before:
            self._before, self._strays = upcoming, {}
        seen = self._strays.setdefault(ranks, [])
        seen.append(Expected.said(call, ranks))
        share = active.share
        if len(seen) == 1 and len(ranks) == self._size and (share.most_ahead or share.most_behind):
            # The application may wait for what is held back for the next iteration before that begins. All ranks come
            # here at the same place: what was submitted runs out, and the plan begins anew.
            place = (upcoming, 0)
            self._sequencer.add(active.close(place))
            self._sequencer.keep(lambda instance: instance.place < place)
            self._sequencer.add(active.begin(upcoming))

    def _carefully(
        self, group: Any, tensors: list[torch.Tensor], plain: Callable[[], Any], *, of_the_step: bool = False
    ) -> dist.Work | None:
        """Run a call in plain order, and look around if it takes long: other ranks may do something else."""
        active, resting = self._active, self._resting
        plan = active if active is not None else resting.plan if resting is not None else None
        if plan is None or not group.alone or group.coalescing:
            return None
        ranks = tuple(group.engine.selector.devices)
        seen = self._strays.get(ranks, [])
        stray = None
        if active is not None and not of_the_step and seen:
            stray = Stray(iteration=self._before, rank=self._rank, ranks=ranks, nth=len(seen) - 1, what=seen[-1])
        number, stay = plan.number, self._stays.get(plan.number, 0)
        told = False

        def stalled(waited_s: float) -> None:
            nonlocal told
            if stray is not None and not told and waited_s > STRAY_S:
                self._announcements.wait_in(number, stray)
                told = True
            self._look_around(number, stay)

        inner = plain()
        return CarefulWork(inner, tensors, stalled) if isinstance(inner, GroupWork) else inner

    def _look_around(self, number: int, stay: int) -> None:
        """Raises `PlanMismatch` where ranks have gone different ways for good."""
        with self._flow:
            active = self._active is not None and self._active.number == number
            ended = self._announcements.ended(number, stay)
            for before in sorted({self._before, self._iteration} if active else ()):
                seen = self._strays if before == self._before else {}
                # Who is inside an iteration has gone past the calls before it.
                past = self._iteration >= before and self._position > 0
                for stray in self._announcements.strays(number, before):
                    ended = ended or stray.contradicts(before, self._rank, seen, past=past)
            if ended:
                self._announcements.end(number, stay, ended)
                raise PlanMismatch(ended)
            found = self._announcements.look(number, stay) if active else None
            if found is not None:
                self._give_way(number, *found)

    def _see_return(self, resting: Resting) -> None:
        """The step that a resting plan was made for has come back: offer it again. Or it never will: let it go."""
        with self._control:
            if self._resting is not resting:
                # The control plane has just discarded it.
                return
            if resting.back and self._committed is None:
                self._committed = resting.plan
            elif not resting.back and self._committed is resting.plan:
                # An offer that is under way stands: others may have seen nothing, and will take it up.
                self._committed = None
            hopeless = resting.hopeless and self._voted is not resting.plan
            if hopeless:
                self._resting = None
        if hopeless:
            self._burnt.add(resting.plan.number)
            self._fell_back += "; the step did not come back"
            self._carrier.unload(resting.plan.number)

    def _count(self, call: Call, ranks: Sequence[int]) -> None:
        """Follow the application in plain order, to know where an iteration ends."""
        expected = self._expected
        if expected is None or self._marked:
            return
        if self._position == len(expected):
            self._boundary()
            if self._active is not None:
                return
        if expected.refusal(self._position, call, ranks):
            # Something between two iterations, or another model: start again where it fits.
            self._position = 0
            if expected.refusal(0, call, ranks):
                return
        self._position += 1

    def _boundary(self) -> None:
        """Between two iterations, and the only place where plans change."""
        now = now_us()
        took = now - self._began_us
        self._began_us = now
        self._begins.append(now)
        self._position = 0
        with self._notes:
            if self._iteration:
                self._times.append(took)
                if not self._had_plan:
                    self._plain.append(took)
            self._waits.append(self._waited)
            self._waited = 0.0
        self._iteration += 1
        if self._agreement is not None:
            pending, self._agreement = self._agreement, None
            self._decide(pending.wait())
        elif self._active is not None:
            self._sequencer.add(self._active.open(self._iteration))
        if self._active is not None:
            self._active.forget(self._iteration - 2)
        if self._iteration % self._every == 0:
            committed = self._voted = self._committed
            number, code = (committed.number, int(committed.hash[:15], 16)) if committed else (0, 0)
            self._agreement = self._carrier.agree([number, -number, code, -code])

    def _decide(self, agreed: Sequence[int]) -> None:
        number = agreed[0]
        same = agreed[0] == -agreed[1] and agreed[2] == -agreed[3]
        old = self._active
        resting = self._resting
        # An offer is void once its plan was left.
        void = number != (self._voted.number if self._voted is not None else 0)
        if not same or number == (old.number if old else 0) or number in self._burnt or void:
            if old is not None:
                self._sequencer.add(old.open(self._iteration))
            return
        with self._control:
            new = self._voted if number else None
            if old is not None:
                self._retire((self._iteration, 0))
            self._active = new
            self._committed = self._committed or new
            self._prepared = {at: one for at, one in self._prepared.items() if at >= number}
        if resting is not None and resting.plan is not new:
            self._carrier.unload(resting.plan.number)
        self._resting = None
        self._stays[number] = self._stays.get(number, 0) + 1
        self._strays, self._empty = {}, 0
        with self._notes:
            self._times.clear()
            self._waits.clear()
            self._spent = {}
        if new is not None:
            self._had_plan = True
            self._sequencer.add(new.begin(self._iteration))
            if self._rank == 0:
                log.info("plan %d (%s) is active from iteration %d on", number, new.hash, self._iteration)

    def _retire(self, place: Place, *, rests: bool = False) -> list[Instance]:
        """The active plan ends at a place: what comes before it runs out in the plan's order. Returns what does not."""
        old = self._active
        assert old is not None
        self._sequencer.add(old.close(place))
        gone = self._sequencer.keep(lambda instance: instance.place < place)
        self._active = None
        if not rests:
            self._carrier.unload(old.number)
        return gone

    # When the application does not do what the plan expects.

    def _fall_back(self, why: str, place: Place | None = None) -> list[Instance]:
        """Plain order from here on; without a `place` because of what this rank has seen.

        Then the plan rests, some times, until the application does again what it was made for. Returns what had been
        submitted behind the place.
        """
        active = self._active
        assert active is not None
        mine = place is None
        if place is None:
            at = self._position
            number = active.expected.ops[at][0] if at < len(active.expected) else len(active.expected.workload.ops)
            place = (self._iteration, number)
        self._fell_back = f"iteration {self._iteration}: {why}"
        self._falls[active.number] = self._falls.get(active.number, 0) + 1
        rests = mine and self._falls[active.number] <= RETURNS
        log.warning("rank %d leaves plan %d in %s", self._rank, active.number, self._fell_back)
        if rests:
            self._resting = Resting(active)
        else:
            self._burnt.add(active.number)
        if mine:
            stay = self._stays.get(active.number, 0)
            self._announcements.announce(active.number, stay, place, self._fell_back)
        with self._control:
            if self._voted is active:
                self._voted = None
            if not rests or self._committed is active:
                self._committed = None
        with self._notes:
            self._times.clear()
            self._plain.clear()
            self._had_plan = False
        return self._retire(place, rests=rests)

    def stalled(self, instance: Instance) -> None:
        """A wait has taken long: has the application changed its order, or another rank given up?"""
        with self._flow:
            if instance.done:
                return
            active = self._active if self._active is not None and self._active.number == instance.plan else None
            ahead = self._sequencer.behind(instance) if active is not None else None
            if active is not None and ahead is not None and ahead.place >= self._here(active):
                name, first = instance.planned.op.name, ahead.planned.op.name
                self._fall_back(f"the application waits for {name} before it submits {first}, which is to run first")
                return
            stay = self._stays.get(instance.plan, 0)
            try:
                self._look_around(instance.plan, stay)
            except PlanMismatch as error:
                self._sequencer.fail(error)
                return
            if active is None:
                found = self._announcements.look(instance.plan, stay)
                if found is not None:
                    self._give_way(instance.plan, *found)

    def _give_way(self, number: int, place: Place, rank: int, why: str) -> None:
        """Another rank has left a plan at a place: follow it, or end where that cannot be."""
        said = f"rank {rank} gave up plan {number}: {why}"
        active = self._active if self._active is not None and self._active.number == number else None
        if active is not None:
            stuck = self._fall_back(said, min(place, self._here(active)))
        else:
            stuck = self._sequencer.keep(lambda one: one.plan != number or one.place < place)
        touched = next((one for one in stuck if not one.untouched), None)
        if touched is not None:
            # Its memory is half way, and the rank that gave up will never join: no order can save this.
            error = PlanMismatch(f"{touched.planned.op.name} cannot end: {said}")
            self._announcements.end(number, self._stays.get(number, 0), str(error))
            for one in stuck:
                one.settle(error)
            self._sequencer.fail(error)
            return
        for one in stuck:
            assert isinstance(one.submission, Given)
            one.submission.run_plainly()

    def _hopeless(self, instance: Instance) -> str:
        """Why a GPU waits for an op in vain: a rank gave up the plan before it."""
        stay = self._stays.get(instance.plan, 0)
        found = self._announcements.look(instance.plan, stay)
        if found is None or found[0] > instance.place or found[1] == self._rank:
            return ""
        why = f"{instance.planned.op.name} cannot end: rank {found[1]} gave up plan {instance.plan}: {found[2]}"
        self._announcements.end(instance.plan, stay, why)
        return why

    def explain(self, instance: Instance, error: Exception) -> Exception:
        """What lies behind an error: a rank that has found out that ranks went different ways leaves, and says so."""
        why = ""
        if not isinstance(error, PlanMismatch):
            # The store may be gone with the rank.
            with contextlib.suppress(Exception):
                why = self._announcements.ended(instance.plan, self._stays.get(instance.plan, 0))
        return PlanMismatch(why) if why else error

    def _here(self, active: Prepared) -> Place:
        """The next comm-op that the application has to submit."""
        if self._position < len(active.expected):
            return self._iteration, active.expected.ops[self._position][0]
        return self._iteration + 1, 0

    def waited(self, instance: Instance, begin_us: float, end_us: float) -> None:
        """The application stood in ``wait()`` for an op: each motif is charged for what it was waited for."""
        with self._notes:
            self._waited += end_us - begin_us
            at = begin_us
            for entry in sorted(instance.entries.values(), key=lambda entry: entry.end_us):
                until = min(entry.end_us, end_us)
                self._spent_on(instance, entry.part.motif).waits.append(max(until - at, 0.0))
                at = max(at, until)

    def spent(self, instance: Instance, motif: int, start_us: float, end_us: float) -> None:
        """A motif ran from one moment to another."""
        with self._notes:
            one = self._spent_on(instance, motif)
            one.durations.append(end_us - start_us)
            begin_us = next((begin for begin in reversed(self._begins) if begin <= start_us), None)
            if begin_us is not None:
                one.starts.append(start_us - begin_us)

    def _spent_on(self, instance: Instance, motif: int) -> Spent:
        key = (instance.planned.number, motif)
        if key not in self._spent:
            self._spent[key] = Spent()
        return self._spent[key]


def _never() -> GroupWork:
    raise AssertionError("it runs in plain order already")
