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
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput, StrettoError
from ..runtime.enforcer.current import SERVES, Current
from ..runtime.tape import VARYING
from .agent import Agent, exchange_over
from .marks import LOOK, MOST, USER, Marks, common, period_of
from .transport import from_environment

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..runtime.capture import Recorder
    from ..runtime.enforcer.enforcer import Enforcer

LOG = logging.getLogger("stretto.control")
WARM_UP = 3
"""Iterations before the first recording: connections, buckets and caches are made in them."""
SKIP, RECORD = 2, 5
FORWARDS = 32
"""So many times a model is called in training before an optimizer steps: then none does, or none of PyTorch's."""
RETRY = 50
"""Iterations until the next try, after a recording that could not be used."""
MAX_TRIES = 4
AGREE_EVERY = 16
"""Iterations between two looks whether all ranks are to record again."""
LET_GO_S = 0.05
SMALL, SMALL_TIMES = 64, 15
OURS = "stretto"


def arm(c10d: Any) -> None:
    """Stand in front of `init_process_group` and `destroy_process_group` of `torch.distributed.distributed_c10d`."""
    init, destroy = c10d.init_process_group, c10d.destroy_process_group

    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, **more: Any) -> Any:
        chosen = _backend(backend)
        done = init(chosen, *args, **more)
        if chosen == OURS:
            _guarded(Autopilot.begin)
        return done

    @functools.wraps(destroy)
    def destroy_process_group(group: Any = None) -> Any:
        pilot = Autopilot.current
        if pilot is not None and (group is None or group is c10d.GroupMember.WORLD):
            _guarded(pilot.end)
        return destroy(group)

    c10d.init_process_group, c10d.destroy_process_group = init_process_group, destroy_process_group


def _backend(backend: str | None) -> str | None:
    """Ours instead of gloo, and instead of the default where that would be gloo."""
    import torch

    wanted = backend.lower() if isinstance(backend, str) else backend
    if wanted in ("gloo", "cpu:gloo") or (wanted is None and not torch.accelerator.is_available()):
        import torch.distributed as dist

        from ..runtime.backend import create

        if OURS.upper() not in dist.Backend._plugins:
            dist.Backend.register_backend(OURS, create, extended_api=True, devices=["cpu", "cuda"])
        return OURS
    if wanted != OURS:
        _say(f"the backend {backend or 'for accelerators'} is left as it is")
    return backend


class Autopilot:
    """One rank's: from the first process group until it is destroyed, or the process ends."""

    current: Autopilot | None = None

    def __init__(self) -> None:
        import torch.distributed as dist
        from torch._C import _distributed_c10d as c10d
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._pid, self._thread = os.getpid(), threading.get_ident()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._link = from_environment()
        if self._link is None:
            raise InvalidInput("STRETTO_CONTROLLER: must say where the controller is")
        store = c10d.PrefixStore("stretto/autopilot", dist.distributed_c10d._get_default_store())
        if self.rank == 0:
            # Later starts of the same job have later times; the clock of rank 0 alone counts.
            store.set("epoch", str(time.time_ns() // 1000))
        self._epoch = int(store.get("epoch"))
        self._wish = _Wish(store, self.rank, self.size)
        self._agent: Agent | None = None
        self._enforcer: Enforcer | None = None
        self._cluster: Cluster | None = None
        self._motif_us = 0.0
        self._recorder: Recorder | None = None
        self._steps = 0
        self._tries = 0
        self._begin_at = WARM_UP
        self._marks = Marks()
        self._look: _Look | None = None
        self._told = False
        """Whether optimizers, or the script, tell where iterations end; else calls of models do."""
        self._hook = register_optimizer_step_post_hook(self._stepped)
        self._forwards = 0
        self._unwatch = self._watch_forward()
        Current.pilot = self._said

    @classmethod
    def begin(cls) -> None:
        """For the process group that there is now."""
        import torch.distributed as dist

        if cls.current is None and dist.get_world_size() > 1:
            cls.current = cls()
            atexit.register(_guarded, cls.current.end)

    def end(self) -> None:
        """Before the process group goes: leave nothing under way, tell the controller."""
        if Autopilot.current is not self or os.getpid() != self._pid:
            # A forked child (a loader of data) has nothing of this but the memory.
            return
        Autopilot.current = None
        self._let_go()
        if self._agent is not None:
            self._agent.stop()
        if self._enforcer is not None:
            self._enforcer.close()

    def _let_go(self) -> None:
        """Watch nothing any more."""
        self._hook.remove()
        self._unwatch()
        Current.pilot = None
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

    def _watch_forward(self) -> Callable[[], None]:
        """For training without an optimizer of PyTorch's: each call of a data-parallel model begins an iteration."""
        from torch.nn.parallel import DistributedDataParallel

        kind: Any = DistributedDataParallel
        usual = kind.forward

        @functools.wraps(usual)
        def forward(model: Any, *inputs: Any, **more: Any) -> Any:
            if not self._told and model.training:
                self._forwarded(model)
            return usual(model, *inputs, **more)

        kind.forward = forward
        return lambda: setattr(kind, "forward", usual)

    def _forwarded(self, model: object) -> None:
        self._forwards += 1
        if self._forwards > FORWARDS:
            self._moment(id(model))

    def _moment(self, key: Hashable) -> None:
        """An iteration may end here."""
        if Autopilot.current is not self or os.getpid() != self._pid:
            return
        try:
            if self._look is not None:
                self._look_on(self._look, key)
            elif self._marks.end(key):
                self._iteration()
        except StrettoError as error:
            # The same on all ranks: every error of a collective part is raised everywhere.
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
            raise InvalidInput(f"{look.why}; mark the ends of iterations with stretto.step()")
        self._marks.learn(look.numbers, found)
        self._begin_at = self._steps + WARM_UP
        self._say(f"an iteration is {found} steps")

    def _iteration(self) -> None:
        self._steps += 1
        if Current.enforcer is not None:
            Current.enforcer.step()
        if self._recorder is not None:
            self._recorder.step()
            if self._recorder.done:
                self._recorded()
        elif self._steps == self._begin_at or self._asked_again():
            self._record()

    def _asked_again(self) -> bool:
        """Whether all ranks have heard that the step is to be recorded again."""
        return self._agent is not None and self._wish.agreed(self._steps, self._agent.profile_wanted)

    def _record(self) -> None:
        from ..runtime.capture import capture

        recorder = capture(iterations=RECORD, skip=SKIP, name=_script())
        recorder.__enter__()
        self._recorder = recorder

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
        if self._agent is None:
            self._cluster = self._find_cluster()
            self._motif_us = small_us()
            self._enforcer = self._enforce(self._cluster)
            assert self._link is not None
            self._agent = Agent(
                self._enforcer, exchange_over(self._link), job=os.environ.get("STRETTO_JOB", "") or _script(),
                epoch=self._epoch, rank=self.rank, size=self.size,
            )  # fmt: skip
            self._agent.start()
        assert self._cluster is not None
        self._agent.captured(workload, self._cluster, self._motif_us)
        self._say(f"recorded {RECORD} iterations: {len(workload.comm_ops)} comm-ops on {self._cluster!r}")

    def _find_cluster(self) -> Cluster:
        """What STRETTO_CLUSTER names, or what is measured; without an executor, hosts of which only the names count."""
        import torch.distributed as dist

        from ..runtime.probe import probe

        world: Any = dist.group.WORLD
        selector = world.engine.selector
        if selector.cluster is not None:
            known: Cluster = selector.cluster
            return known
        found, wrong = None, ""
        try:
            found = probe(world, name="probed").cluster
        except StrettoError as error:
            wrong = str(error)
        # It may have failed on some ranks only, and all need the same.
        said: list[str] = [""] * self.size
        dist.all_gather_object(said, wrong)
        if found is not None and not any(said):
            return found
        self._say(f"not probed: {next(filter(None, said))}")
        assumed: Cluster = selector.network
        return assumed

    def _enforce(self, cluster: Cluster) -> Enforcer:
        from ..runtime.backend_engine import Job
        from ..runtime.enforcer.enforcer import Enforcer

        job = Job.current
        carrier = "executor" if job is not None and job.executor is not None else "gloo"
        return Enforcer(cluster=cluster, carrier=carrier)

    def _drop(self, why: str) -> None:
        self._recorder = None
        self._tries += 1
        self._begin_at = self._steps + RETRY if self._tries < MAX_TRIES else -1
        later = f"next try in {RETRY} iterations" if self._begin_at > 0 else "left as it is"
        self._say(f"not recorded, {later}: {why}")

    def _say(self, text: str) -> None:
        if self.rank == 0:
            _say(text)


class _Look:
    """What is called between the moments at which iterations may end."""

    def __init__(self, why: str) -> None:
        from ..runtime.hooks import Hooks

        self.why = why
        """What a recording was refused for."""
        self.numbers: list[int] = []
        self.seen: list[Hashable] = []
        self._ends = 0
        self._begun = False
        self._hooks = Hooks()
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
        """Look no more."""
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


class _Wish:
    """Whether all ranks wish for the same at the same iteration: asked in band, without waiting for the answer.

    The controller's order reaches ranks at different iterations, and recording is a collective matter.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        import torch
        import torch.distributed as dist
        from torch._C import _distributed_c10d as c10d

        # Its own connections, below everything that plans and recordings see.
        self._group: Any = dist.ProcessGroupGloo(
            c10d.PrefixStore("wish", store), rank, size, timeout=timedelta(minutes=5)
        )
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN
        self._options = options
        self._value = torch.zeros(1, dtype=torch.int32)
        self._work: Any = None

    def agreed(self, iteration: int, wish: bool) -> bool:
        """The answer to the wishes of an earlier iteration; all ranks call this at the same ones."""
        if iteration % AGREE_EVERY == 0:
            self._value.fill_(int(wish))
            self._work = self._group.allreduce([self._value], self._options)
            return False
        if self._work is None or iteration % AGREE_EVERY != AGREE_EVERY - 1:
            return False
        self._work.wait()
        self._work = None
        return bool(self._value.item())


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
