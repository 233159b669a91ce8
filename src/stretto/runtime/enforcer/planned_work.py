"""A call under a plan: what the application gave, and what it gets to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch

from ...process_state import STATE
from ..torch_backend.buffers import Buffers, CollectiveCall
from ..torch_backend.recording import current, now_us
from ..torch_backend.work import NO_TIMEOUT, Future, GroupWork, Tensors, completes_futures
from .carrier import Carrier
from .futures import taken
from .memory import Pool, StagedBuffers, stage
from .prepared import CompiledOp
from .sequencer import ActiveMotif, QueuedMotif, QueuedOp, Sequencer

if TYPE_CHECKING:
    from collections.abc import Sequence

TICK_S = 0.25
STALLED_S = 1.0
"""A wait that takes this long looks whether another rank has given up the plan."""
POOL = STATE.part(Pool)


class SubmissionOwner(Protocol):
    """What a call tells the enforcer."""

    def stalled(self, instance: QueuedOp) -> None:
        """A wait has taken long."""

    def explain(self, instance: QueuedOp, error: Exception) -> Exception:
        """What lies behind an error."""

    def waited(self, instance: QueuedOp, begin_us: float, end_us: float) -> None:
        """The application stood in ``wait()``."""

    def spent(self, instance: QueuedOp, motif: int, start_us: float, end_us: float) -> None:
        """A motif ran from one moment to another."""


class SubmittedOp:
    """The memory of a submitted op; without `buffers` the backend runs it, and its motifs have nothing to do."""

    __slots__ = (
        "_bound", "_carrier", "_divides", "_dtype", "_ended", "_instance", "_op", "_owner", "_plain",
        "_pool", "_regions", "_room", "_staged", "buffers", "inline", "instead",
    )  # fmt: skip

    def __init__(
        self,
        owner: SubmissionOwner,
        carrier: Carrier,
        instance: QueuedOp,
        buffers: Buffers | None,
        bound: CompiledOp | None,
        call: CollectiveCall,
        plain: Callable[[], GroupWork],
        *,
        pool: Pool = POOL,
    ) -> None:
        self._owner, self._carrier, self._instance = owner, carrier, instance
        self.buffers, self._bound, self._plain, self._pool = buffers, bound, plain, pool
        self.inline = False
        """Whether the thread that submits waits at once."""
        self.instead: GroupWork | None = None
        """What runs in plain order after all."""
        self._staged: dict[int, StagedBuffers] = {}
        self._ended: dict[int, Callable[[float | None], None]] | None = None
        """Of motifs that are recorded."""
        self._regions: Sequence[torch.Tensor | None] = ()
        self._op = call.reduce or "sum"
        self._room: torch.Tensor | None = None
        self._divides = False
        if buffers is None or bound is None:
            return
        larger = buffers.target if buffers.target is not None else buffers.source
        assert larger is not None
        self._dtype = larger.dtype
        if bound.tasks.room:
            self._room = pool.take(self._dtype, bound.tasks.room)
        self._regions = (buffers.source, buffers.target, self._room)
        self._divides = self._op == "avg" and not (bound.tasks.averages and carrier.averages)
        if self._divides:
            self._op = "sum"

    def start(self, entry: QueuedMotif) -> ActiveMotif | None:
        """Begin a motif; None where it has nothing to do."""
        motif = entry.part.motif
        loaded = self._bound.loaded[motif] if self._bound is not None else None
        if loaded is None or self.buffers is None:
            return None
        staged = self._staged[motif] = stage(loaded.layout, self._regions, self._dtype, self._pool)
        self._record(entry, loaded.layout.task.count * self._dtype.itemsize)
        return self._carrier.start(loaded, staged, self.buffers.dtype, self._op, entry, blocking=self.inline)

    def _record(self, entry: QueuedMotif, nbytes: int) -> None:
        """A motif begins, which may be recorded."""
        recording = current()
        if recording is None:
            return
        name = f"{self._instance.planned.op.name}#{entry.part.motif} {entry.part.algorithm}"
        if self._ended is None:
            self._ended = {}
        self._ended[entry.part.motif] = recording.start(name, "+".join(entry.part.channels), nbytes)

    def watch(self, entry: QueuedMotif) -> None:
        """From now on somebody waits for the end of a motif that runs already."""
        self._carrier.watch(entry)

    def moved(self, entry: QueuedMotif) -> None:
        """A motif's data has arrived: bring it where it belongs."""
        motif = entry.part.motif
        staged = self._staged.pop(motif)
        if staged.scratch:
            staged.back(self._regions, self._pool)
        self._ran(entry, motif)

    def _ran(self, entry: QueuedMotif, motif: int) -> None:
        self._owner.spent(self._instance, motif, entry.start_us, entry.end_us)
        if self._ended is not None and motif in self._ended:
            self._ended.pop(motif)(entry.end_us - entry.start_us)

    def over(self) -> None:
        """All motifs have ended."""
        if self.buffers is None:
            return
        if self._divides and self.buffers.target is not None:
            self.buffers.target.div_(len(self._instance.planned.whole.ranks))
        if self._room is not None:
            self._pool.give(self._room)
        if self.buffers.finish is not None:
            self.buffers.finish()
        self._let_go()

    def _let_go(self) -> None:
        """Works are remembered for long: the application's tensors must not be, nor a plan that has ended."""
        self.buffers, self._bound, self._room, self._regions, self._plain = None, None, None, (), never

    def run_plainly(self) -> None:
        """Nothing of it has started, and nothing will: run it as the application asked, unless it has been."""
        if self._plain is not never:
            self.instead = self._plain()
        self._let_go()
        self._instance.settle(None)


class PlannedWork(GroupWork):
    """A call that a plan carries out."""

    def __init__(
        self, owner: SubmissionOwner, sequencer: Sequencer, instance: QueuedOp, given: SubmittedOp, tensors: Tensors
    ) -> None:
        super().__init__(tensors)
        self._owner, self._sequencer = owner, sequencer
        self._under_way: tuple[QueuedOp, SubmittedOp] | None = (instance, given)
        """None once it is over: works are remembered for long, and what they are made of need not be."""

    def _block(self, timeout: timedelta) -> bool:
        if self._under_way is None:
            return True
        instance, given = self._under_way
        if instance.done and given.instead is None and instance.error is None:
            return True
        begin_us = now_us()
        limit_s = timeout.total_seconds() if timeout > NO_TIMEOUT else float("inf")
        if not self._wait(instance, limit_s):
            return False
        if given.instead is not None:
            return given.instead.wait(timeout) if timeout > NO_TIMEOUT else given.instead.wait()
        if instance.error is not None:
            raise self._owner.explain(instance, instance.error)
        self._owner.waited(instance, begin_us, now_us())
        return True

    def _wait(self, instance: QueuedOp, limit_s: float) -> bool:
        begin = looked = time.monotonic()
        entry = instance.running()
        if entry is not None and entry.started is not None and _ended(entry.started, min(TICK_S, limit_s)):
            self._sequencer.ended(entry)
        while not instance.done:
            now = time.monotonic()
            left_s = limit_s - (now - begin)
            if left_s <= 0:
                return False
            entry = self._sequencer.under_way(instance)
            if entry is None or entry.started is None:
                instance.wait(min(TICK_S, left_s))
            elif _ended(entry.started, min(TICK_S, left_s)):
                self._sequencer.ended(entry)
            if not instance.done and now - looked > STALLED_S:
                looked = now
                self._owner.stalled(instance)
        return True

    def _poll(self) -> bool:
        if self._under_way is None:
            return True
        instance, given = self._under_way
        if not instance.done:
            self._sequencer.reap()
        return instance.done and (given.instead is None or given.instead.is_completed())

    def _release(self) -> None:
        self._under_way = None

    def _make_future(self) -> Future:
        taken(self)
        return super()._make_future()

    def _when_over(self, then: Callable[[], object]) -> None:
        if self._under_way is None:
            then()
            return
        if completes_futures():
            super()._when_over(then)
            return
        instance, given = self._under_way

        def over() -> None:
            if given.instead is not None:
                GroupWork._when_over(self, then)
                return
            self._settle(instance.error)
            then()

        with self._sequencer.lock:
            if not instance.done:
                instance.callbacks.append(over)
                for entry in instance.entries.values():
                    self._sequencer.notice(entry)
                return
        over()


def never() -> GroupWork:
    """In the place of a call that runs, or has run, in plain order already."""
    raise AssertionError("it runs in plain order already")


def _ended(started: ActiveMotif, timeout_s: float) -> bool:
    """Whether it has, well or not."""
    try:
        return started.wait(timeout_s)
    except Exception:
        # The error stays with the motif, where the sequencer finds it.
        return True
