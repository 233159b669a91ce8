# SPDX-License-Identifier: Apache-2.0
"""Control for a script that knows nothing of it: counts iterations, records a few, probes, and lets the agent go on.

`arm` is called by the `sitecustomize` that `stretto run` puts in front, when PyTorch's distributed part has been
imported. From there on: a process group that would be gloo on CPUs becomes ours, and optimizer steps mark iterations.
Whatever goes wrong is one line, and training goes on as it would have.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable
from statistics import median
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput, StrettoError
from ..process_state import STATE, ProcessPart
from ..runtime.capture.tape import VARYING
from ..runtime.torch_backend.current import CURRENT, SERVES
from ..runtime.torch_backend.gpu_options import asked_for_programs
from ..runtime.torch_backend.job_store import job_store
from ..runtime.torch_backend.own_backend import OWN_BACKEND, on_ours
from ..runtime.torch_backend.patches import DDP_FORWARD, DESTROY_PROCESS_GROUP, INIT_PROCESS_GROUP, apply
from ..units import format_us
from .agent import Agent, exchange_over
from .aside import IterationRollCall, SideGroup
from .bucket_size import set_bucket_size
from .compare import Comparison, LaterTurns
from .gpu_pace import GpuPace
from .inductor import tell_inductor
from .marks import LOOK, MOST, USER, Marks, common, period_of
from .own_times import kinds_of, own_cluster, own_small_us, own_times
from .pulse import prepare, start_pulse, stop_pulse
from .recall import Recalled, StepTally, fits, identity_of, key_of, recall
from .transport import from_environment

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..runtime.capture.session import Recorder
    from ..runtime.enforcer.enforcer import Enforcer
    from ..runtime.torch_backend.engine import Engine
    from ..workload import Workload
    from .own_costs import Library, OwnTime

LOG = logging.getLogger("stretto.control")
WARM_UP = 3
"""Iterations before the first recording: connections, buckets and caches are made in them."""
SKIP, RECORD = 2, 5
FORWARDS = 32
"""A model that was called this often in training before any optimizer step is taken to have none of PyTorch's."""
RETRY = 50
"""Iterations until the next try, after a recording that could not be used."""
MAX_TRIES = 4
MAX_MISSES = 8
"""Iterations that may end at different calls on different ranks, until nothing is recorded any more."""
LET_GO_S = 0.05
SMALL, SMALL_TIMES = 64, 15
OURS, GLOO, NCCL = "stretto", "gloo", "nccl"
NEVER = -1
ASKED_FOR_OURS = "the job asked for the backend stretto itself"


def arm(c10d: Any) -> None:
    """Stand in front of `init_process_group` and `destroy_process_group` of `torch.distributed.distributed_c10d`."""

    def begins(init: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(init)
        def init_process_group(backend: str | None = None, *args: Any, **more: Any) -> Any:
            chosen = _backend(backend, more.get("pg_options"))
            _guarded(prepare)
            done = init(chosen, *args, **more)
            _guarded(tell_inductor)
            _guarded(lambda: start_pulse(os.environ.get("STRETTO_JOB", "") or _script(), ours=chosen == OURS))
            if chosen == OURS:
                _guarded(Autopilot.begin)
            return done

        return init_process_group

    def ends(destroy: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(destroy)
        def destroy_process_group(group: Any = None) -> Any:
            pilot = PILOT.current
            if group is None or group is c10d.GroupMember.WORLD:
                _guarded(stop_pulse)
            if pilot is not None and (group is None or group is c10d.GroupMember.WORLD):
                _guarded(pilot.end)
                try:
                    return destroy(group)
                finally:
                    # State is cleared also where a group could not be shut down.
                    STATE.job_ended()
            return destroy(group)

        return destroy_process_group

    atexit.register(_guarded, stop_pulse)
    apply(INIT_PROCESS_GROUP, begins)
    apply(DESTROY_PROCESS_GROUP, ends)


def _backend(backend: str | None, options: object = None) -> str | None:
    """Ours instead of gloo or NCCL, and of the default; a backend with options of the script's own is left alone."""
    import torch

    wanted = backend.lower() if isinstance(backend, str) else backend
    own = GLOO if wanted in ("gloo", "cpu:gloo") or (wanted is None and not torch.accelerator.is_available()) else ""
    if wanted in ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl") or (wanted is None and torch.cuda.is_available()):
        own = NCCL if torch.cuda.is_available() and torch.distributed.is_nccl_available() else ""
    if own == GLOO or (own and options is None):
        try:
            from ..runtime.torch_backend.backend import register
        except InvalidInput as error:
            # This version of PyTorch is not supported.
            _say(f"left as it is: {error}")
            return backend
        register()
        OWN_BACKEND.stand_in(own)
        return OURS
    OWN_BACKEND.stand_in("")
    if wanted != OURS:
        _say(f"the backend {backend or 'for accelerators'} is left as it is")
    return backend


class Autopilot:
    """One rank's: from the first process group until it is destroyed, or the process ends."""

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch._C import _distributed_c10d as c10d
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._pid, self._thread = os.getpid(), threading.get_ident()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._link = from_environment()
        if self._link is None:
            raise InvalidInput("STRETTO_CONTROLLER: must say where the controller is")
        store = job_store("stretto/autopilot")
        if self.rank == 0:
            # Later starts of the same job have later times; the clock of rank 0 alone counts.
            store.set("epoch", str(time.time_ns() // 1000))
        self._epoch = int(store.get("epoch"))
        world: Any = dist.group.WORLD
        self._aside = SideGroup(c10d.PrefixStore("aside", store), self.rank, self.size, world.timeout)
        self._roll: IterationRollCall | None = IterationRollCall(c10d.PrefixStore("roll", store), self.rank, self.size)
        self._recall_store = c10d.PrefixStore("recall", store)
        self._tally = StepTally()
        self._identity: dict[str, str] = {}
        """What the plan is kept under for the next start; empty: none is kept."""
        self._may_recall = True
        self._comparison: Comparison | None = None
        self._later: LaterTurns | None = None
        """Where the comparison has ended, and neither side was faster for sure."""
        self._workload: Workload | None = None
        self._misses = 0
        self._agent: Agent | None = None
        self._enforcer: Enforcer | None = None
        self._cluster: Cluster | None = None
        self._motif_us = 0.0
        self._own_times: tuple[OwnTime, ...] = ()
        self._recorder: Recorder | None = None
        self._steps = 0
        self._first: tuple[int, float] | None = None
        """The first iteration that ended, and when: from there on the job's time is counted."""
        self._tries = 0
        self._begin_at = NEVER
        self._marks = Marks()
        self._look: _Look | None = None
        self._told = False
        """Whether optimizers, or the script, tell where iterations end; else calls of models do."""
        self._pace = GpuPace(OWN_BACKEND.asked == NCCL)
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self._forwards = 0
        self._undo = [apply(DDP_FORWARD, self._watched_forward), set_bucket_size(store, self.rank)]
        CURRENT.pilot = self._said

    @classmethod
    def begin(cls) -> None:
        """For the process group that there is now."""
        import torch.distributed as dist

        if PILOT.current is None and dist.get_world_size() > 1:
            PILOT.current = cls()
            atexit.register(_guarded, PILOT.current.end)

    def end(self) -> None:
        """Before the process group goes: leave nothing under way, tell the controller."""
        if PILOT.current is not self or os.getpid() != self._pid:
            # A forked child (a loader of data) has nothing of this but the memory.
            return
        PILOT.current = None
        self._let_go()
        if self._comparison is not None and self._agent is not None:
            # What was measured so far counts.
            self._stop_comparing(self._comparison, "the job ended before it was measured")
        if self._agent is not None:
            self._agent.stop()
        if self._link is not None:
            # gRPC's threads end before the interpreter does.
            self._link.close()
        if self._enforcer is not None:
            self._enforcer.close()

    def _let_go(self) -> None:
        """Remove the hooks of this process and stop its agent."""
        self._hook.remove()
        for undo in filter(None, self._undo):
            undo()
        self._undo = []
        self._tally.end()
        CURRENT.pilot = None
        if self._look is not None:
            self._look.end()
            self._look = None
            # Threads of the library may still have to let go of what it has put there.
            time.sleep(LET_GO_S)

    def _stepped(self, optimizer: Any, *_: object) -> None:
        """After every optimizer's step."""
        if threading.get_ident() != self._thread or getattr(optimizer, SERVES, False):
            # A parameter server's own, which steps for all ranks on one of them.
            return
        if self._forwards <= FORWARDS:
            self._told = True
            self._moment(id(optimizer))

    def _said(self) -> None:
        """The script says by itself where an iteration ends."""
        self._told = True
        self._moment(USER)

    def _watched_forward(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """For training without an optimizer of PyTorch's: each call of a data-parallel model begins an iteration."""

        @functools.wraps(usual)
        def forward(model: Any, *inputs: Any, **more: Any) -> Any:
            if not self._told and model.training:
                self._forwarded(model)
            return usual(model, *inputs, **more)

        return forward

    def _forwarded(self, model: object) -> None:
        self._forwards += 1
        if self._forwards > FORWARDS:
            self._moment(id(model))

    def _moment(self, key: Hashable) -> None:
        """An iteration may end here."""
        if PILOT.current is not self or os.getpid() != self._pid:
            return
        try:
            if self._look is not None:
                self._look_on(self._look, key)
            elif self._marks.end(key):
                self._iteration()
        except StrettoError as error:
            # All ranks come here alike: an error of a collective part is raised on every rank.
            self._drop(str(error))
        except Exception as error:
            # Another rank is gone, or steps an optimizer that this one does not: nothing can be agreed any more.
            self._let_go()
            self._say(f"left as it is: {error}")

    def _look_on(self, look: _Look, key: Hashable) -> None:
        """Iterations differed: is there a period of several of them?"""
        # Ranks may step other optimizers beside: it ends where an iteration would have, which is the same on all.
        ends = self._marks.end(key)
        enough = look.cut(self._marks.number(key), ends=ends)
        if not enough and key != USER:
            return
        self._look = None
        look.end()
        if key == USER:
            # Now the script says so itself.
            self._begin_at = self._steps + 1 + WARM_UP
            self._iteration()
            return
        import torch.distributed as dist

        seen: list[Any] = [None] * self.size
        dist.all_gather_object(seen, (period_of(look.seen), look.numbers))
        found = common([period for period, _ in seen])
        if not found or any(numbers != look.numbers for _, numbers in seen):
            raise InvalidInput(f"{look.why}; mark the ends of iterations with stretto.torch.step()")
        self._marks.learn(look.numbers, found)
        # An iteration is something else from here on.
        self._first = None
        self._begin_at = self._steps + WARM_UP
        self._say(f"an iteration is {found} steps")

    def _iteration(self) -> None:
        self._steps += 1
        if self._steps == 1:
            self._tally.begin()
            from ..runtime.torch_backend.fsdp_gathers import gather_early_under_plans

            self._undo.append(gather_early_under_plans())
        self._tally.cut()
        self._count_whole()
        self._pace.iteration()
        if CURRENT.enforcer is not None:
            CURRENT.enforcer.step()
        if self._comparison is not None:
            if self._comparison.iteration():
                self._compared()
        elif self._recorder is not None:
            self._recorder.step()
            if self._recorder.done:
                self._recorded()
        elif self._roll is not None:
            self._call_roll(self._roll)
        elif self._steps == self._begin_at or self._asked_again():
            self._record()
        elif self._later is not None:
            self._turn_later(self._later)

    def _count_whole(self) -> None:
        """What the whole job takes, as a user's own clock sees it."""
        now = time.perf_counter()
        self._first = self._first or (self._steps, now)
        if self._agent is not None:
            self._agent.whole = (self._steps - self._first[0], (now - self._first[1]) * 1e6)

    def _call_roll(self, roll: IterationRollCall) -> None:
        """The first iterations, in which connections, buckets and caches are made: do all ranks come to their ends?"""
        found = roll.begin_at(self._steps, self._engines())
        if found is None:
            return
        self._roll = None
        if found:
            self._begin_at = max(found, self._steps + 1)
        else:
            self._leave_alone()

    def _leave_alone(self) -> None:
        """Let the job run as it is, because ranks cannot agree on iterations; every rank calls this alike."""
        self._let_go()
        self._say("left as it is: iterations do not end at the same calls on all ranks")

    def _asked_again(self) -> bool:
        """Whether all ranks have heard that the step is to be recorded again."""
        return self._agent is not None and self._aside.agreed(self._steps, self._agent.profile_wanted)

    def _record(self) -> None:
        from ..runtime.capture.session import capture

        if not self._aside.aligned(self._engines()):
            self._misses += 1
            self._begin_at = self._steps + 1
            if self._misses >= MAX_MISSES:
                self._leave_alone()
            return
        if self._recall():
            return
        on_gpu = OWN_BACKEND.asked == NCCL
        recorder = capture(iterations=RECORD, skip=SKIP, name=_script(), only_ours=True, gpu=on_gpu)
        recorder.__enter__()
        self._recorder = recorder

    def _recall(self) -> bool:
        """Begin with what an earlier start of the job has left, if all ranks find their step in it; asked once."""
        import torch.distributed as dist

        self._tally.end()
        if not self._may_recall:
            return False
        self._may_recall = False
        world: Any = dist.group.WORLD
        calls = self._tally.calls
        hosts = [card.host for card in world.cards]
        self._identity = identity_of(calls, self._aside, _script(), self.rank, hosts)
        if not self._identity:
            self._say("no kept plan is used, and none will be kept: the first iterations were not alike")
            return False
        assert self._link is not None
        found, why = recall(
            self._identity, calls, self._link, self._recall_store, self._aside, self.rank, world.engine.selector.cluster
        )  # fmt: skip
        if found is None:
            self._say(f"no kept plan is used, so the step is recorded: {why}")
            return False
        self._cluster, self._motif_us, self._workload = found.cluster, found.motif_us, found.workload
        self._own_times = found.own_times
        with on_ours():
            self._agent = self._start_agent()
        self._begin_with(found)
        return True

    def _begin_with(self, found: Recalled) -> None:
        """What runs until the plan does is what was faster then; both are measured beside the plan, later."""
        from ..runtime.torch_backend.engine import CURRENT_JOB

        assert self._agent is not None and self._enforcer is not None
        executor = CURRENT_JOB.job.executor if CURRENT_JOB.job is not None else None
        if OWN_BACKEND.asked and executor is not None:
            OWN_BACKEND.runs = found.on_own
            self._enforcer.compares = True
        why = "a plan of an earlier start was used at once" if OWN_BACKEND.asked else ASKED_FOR_OURS
        self._agent.compared(own_name=OWN_BACKEND.asked, on_own=OWN_BACKEND.runs, no_own=why)
        self._say(
            f"iteration {self._steps}: not recorded, as an earlier start has left {found.workload!r} and its plan"
        )
        self._tell_captured(found.workload, found.cluster)

    def _tell_captured(self, workload: Workload, cluster: Cluster) -> None:
        """The step is known on all ranks: the controller may plan."""
        assert self._agent is not None
        self._agent.captured(
            workload, cluster, self._motif_us, key_of(self._identity), self._own_times, self._identity
        )  # fmt: skip

    def _recorded(self) -> None:
        recorder, self._recorder = self._recorder, None
        assert recorder is not None
        try:
            recorder.__exit__(None, None, None)
        except InvalidInput as error:
            if self._tries or self._enforcer is not None:
                raise
            self._tries += 1
            self._look = _Look(str(error))
            return
        workload = recorder.workload
        if not workload.comm_ops:
            raise InvalidInput("the training step does not communicate")
        if self._agent is not None or not fits(self._tally.calls, workload, self.rank):
            # What is called now is not what a later start of the job would begin with.
            if self._identity:
                self._say("the plan is not kept for the next start: the step is not what the first iterations were")
            self._identity = {}
        self._workload = workload
        with on_ours():
            if self._agent is None:
                self._agent = self._start_agent()
        assert self._cluster is not None
        self._say(f"recorded {RECORD} iterations: {len(workload.comm_ops)} comm-ops on {self._cluster!r}")
        self._compare()

    def _start_agent(self) -> Agent:
        """Find out about the network, unless it is known, take over the calls, and begin to talk to the controller."""
        known = self._cluster is not None
        self._cluster = self._cluster or self._find_cluster()
        tell_inductor(self._cluster)
        if not known:
            library = self._library()
            self._motif_us = own_small_us(library) if library else small_us()
        self._enforcer = self._enforce(self._cluster)
        assert self._link is not None
        agent = Agent(
            self._enforcer, exchange_over(self._link), job=os.environ.get("STRETTO_JOB", "") or _script(),
            epoch=self._epoch, rank=self.rank, size=self.size,
        )  # fmt: skip
        agent.start()
        return agent

    def _engines(self) -> list[Engine]:
        from ..runtime.torch_backend.engine import CURRENT_JOB

        return CURRENT_JOB.job.engines if CURRENT_JOB.job is not None else []

    def _compare(self) -> None:
        """Measure the job on its own backend and on ours, in turns; where it asked for ours there is nothing to."""
        from ..runtime.torch_backend.engine import CURRENT_JOB

        assert self._agent is not None and self._workload is not None and self._cluster is not None
        if not OWN_BACKEND.asked:
            self._agent.compared(no_own=ASKED_FOR_OURS)
        elif CURRENT_JOB.job is None or CURRENT_JOB.job.executor is None:
            why = CURRENT_JOB.job.why if CURRENT_JOB.job is not None else "the job has ended"
            self._agent.compared(own_name=OWN_BACKEND.asked, on_own=True, no_own=f"there is no executor: {why}")
        else:
            # While the job's own backend is measured, only the application makes calls.
            CURRENT.enforcer = None
            self._comparison = Comparison(self._aside, self._engines)
            return
        self._tell_captured(self._workload, self._cluster)

    def _compared(self) -> None:
        """Tell the controller, once both backends are measured and the faster one runs, that it may plan."""
        comparison = self._comparison
        assert comparison is not None and self._agent is not None
        assert self._workload is not None and self._cluster is not None
        assert self._enforcer is not None
        self._enforcer.compares = comparison.settled
        self._stop_comparing(comparison, "iterations end at different calls on different ranks")
        own, ours = comparison.own, comparison.ours
        if own is not None and ours is not None:
            then = "" if self._on_programs() else " while a plan is made"
            self._say(f"measured in turns: {self._each(comparison)} runs{then}")
        if self._on_programs():
            # Plans run above NCCL, which was slower, and its kernels beside ours could block each other.
            CURRENT.enforcer = None
            return
        if comparison.settled and comparison.undecided and OWN_BACKEND.asked == GLOO:
            # On GPUs the kernels of a plan that becomes active could block ours.
            self._later = LaterTurns(comparison, self._steps)
        self._tell_captured(self._workload, self._cluster)

    def _turn_later(self, later: LaterTurns) -> None:
        """Own and ours were about as fast: more turns, now and then."""
        assert self._agent is not None and self._enforcer is not None
        done, comparison = later.iteration(self._steps, planned=self._enforcer.used), later.comparison
        if later.over:
            self._later = None
        if not done:
            return
        self._agent.compared(
            own=comparison.own, backend=comparison.ours, own_name=OWN_BACKEND.asked, on_own=OWN_BACKEND.runs
        )
        if not comparison.undecided:
            self._say(f"measured in more turns: {self._each(comparison)} runs from here on")

    def _each(self, comparison: Comparison) -> str:
        """What was measured of both sides, and then who runs."""
        own, ours = (format_us(timing.median_us) if timing else "-" for timing in (comparison.own, comparison.ours))
        runs = OWN_BACKEND.asked if OWN_BACKEND.runs else "ours"
        return f"{OWN_BACKEND.asked} {own}, ours {ours} per iteration; {runs}"

    def _on_programs(self) -> bool:
        """Whether an NCCL job's calls run as programs on GPU memory from here on, as that was faster."""
        from ..runtime.torch_backend.recording import LEDGER

        ours = OWN_BACKEND.asked == NCCL and not OWN_BACKEND.runs and asked_for_programs()
        return ours and any(choice.backend == "gpu" for choice in LEDGER.all())

    def _stop_comparing(self, comparison: Comparison, why: str) -> None:
        """Tell the agent what was measured, or why nothing was."""
        assert self._agent is not None
        self._comparison, CURRENT.enforcer = None, self._enforcer
        own = comparison.own
        self._agent.compared(
            own=own, backend=comparison.ours, own_name=OWN_BACKEND.asked, on_own=OWN_BACKEND.runs,
            no_own=why if own is None else "",
        )  # fmt: skip

    def _find_cluster(self) -> Cluster:
        """What STRETTO_CLUSTER names, or what is measured; without an executor, hosts of which only the names count."""
        import torch.distributed as dist

        from ..runtime.probe.probe import probe

        world: Any = dist.group.WORLD
        selector = world.engine.selector
        hosts = [card.host for card in world.cards]
        library = self._library()
        if library and self._workload is not None:
            largest = max(op.nbytes for op in self._workload.comm_ops)
            self._own_times = own_times(hosts, kinds_of(self._workload), largest, library)
        if selector.cluster is not None:
            known: Cluster = selector.cluster
            return known
        found, wrong = None, ""
        try:
            found = own_cluster(hosts, self._own_times) if self._own_times else probe(world, name="probed").cluster
        except StrettoError as error:
            wrong = str(error)
        # Probing may have failed on some ranks only, and all ranks need the same cluster.
        said: list[str] = [""] * self.size
        dist.all_gather_object(said, wrong)
        if found is not None and not any(said):
            return found
        self._say(f"not probed: {next(filter(None, said))}")
        assumed: Cluster = selector.network
        return assumed

    def _enforce(self, cluster: Cluster) -> Enforcer:
        from ..runtime.enforcer.enforcer import Enforcer

        return Enforcer(cluster=cluster, carrier=self._carrier())

    def _carrier(self) -> str:
        """The name of what carries plans out."""
        from ..runtime.enforcer.carriers import from_environment
        from ..runtime.torch_backend.engine import CURRENT_JOB

        job, named = CURRENT_JOB.job, from_environment()
        if named != "auto":
            return named
        ours = "executor" if job is not None and job.executor is not None else GLOO
        return NCCL if OWN_BACKEND.asked == NCCL else ours

    def _library(self) -> Library | None:
        """The job's own backend, where plans run above it by its algorithms, and it has one network to choose from."""
        from ..runtime.torch_backend.engine import channels_of

        if OWN_BACKEND.asked == NCCL and self._carrier() == NCCL:
            return "nccl"
        above_gloo = OWN_BACKEND.asked == GLOO and self._carrier() == GLOO
        return "gloo" if above_gloo and len(channels_of(os.environ)) == 1 else None

    def _drop(self, why: str) -> None:
        self._recorder = self._comparison = self._later = None
        if self._enforcer is not None:
            CURRENT.enforcer = self._enforcer
        self._tries += 1
        self._begin_at = self._steps + RETRY if self._tries < MAX_TRIES else -1
        later = f"next try in {RETRY} iterations" if self._begin_at > 0 else "left as it is"
        self._say(f"not recorded, {later}: {why}")

    def _say(self, text: str) -> None:
        if self.rank == 0:
            _say(text)


class CurrentAutopilot(ProcessPart):
    """The autopilot of this process. After a fork it stays, and does nothing in the child."""

    def __init__(self) -> None:
        self.current: Autopilot | None = None


PILOT = STATE.part(CurrentAutopilot)


class _Look:
    """What is called between the moments at which iterations may end."""

    def __init__(self, why: str) -> None:
        from ..runtime.capture.hooks import Hooks

        self.why = why
        """What a recording was refused for."""
        self.numbers: list[int] = []
        self.seen: list[Hashable] = []
        self._ends = 0
        self._begun = False
        self._hooks = Hooks(only_ours=True, gpu=OWN_BACKEND.asked == NCCL)
        self._hooks.install()

    def cut(self, number: int, *, ends: bool) -> bool:
        """A moment that belongs to this, at which an iteration would have ended or not; whether enough were seen."""
        calls = self._hooks.cut().calls
        said = tuple(
            (call.shape.kind, call.shape.group, call.shape.root, 0 if call.shape.kind in VARYING else call.nbytes)
            for call in calls
        )
        if self._begun and len(self.seen) < LOOK * MOST:
            self.numbers.append(number)
            self.seen.append((number, said))
        # Before the first one nobody knows what belongs to it.
        self._begun = True
        self._ends += ends
        return self._ends > LOOK

    def end(self) -> None:
        """Stop watching iterations."""
        self._hooks.remove()


def small_us() -> float:
    """What a sum of a few bytes takes: what any motif costs at least, on machines that have other things to do, too."""
    import torch
    import torch.distributed as dist

    value = torch.zeros(SMALL)
    took = []
    for _ in range(SMALL_TIMES):
        begin = time.perf_counter()
        dist.all_reduce(value)
        took.append((time.perf_counter() - begin) * 1e6)
    found = torch.tensor(median(took))
    # Rank 0 tells the controller, but all must have called it.
    dist.broadcast(found, 0)
    return float(found)


def _guarded(act: Callable[[], None]) -> None:
    """Whatever happens, training goes on."""
    try:
        act()
    except Exception as error:
        _say(f"left as it is: {error}")


def _script() -> str:
    return os.path.basename(sys.argv[0])[:100] if sys.argv and sys.argv[0] else "job"


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"stretto: {text}", file=sys.stderr, flush=True)
