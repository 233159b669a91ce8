"""A call under a plan: what the application gave, and what it gets to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch

from ..backend_buffers import Buffers, Call
from ..backend_work import NO_TIMEOUT, Future, GroupWork, Tensors
from ..record import current, now_us
from .carrier import Carrier
from .futures import taken
from .memory import Pool, Staged, stage
from .prepared import Bound
from .sequencer import Entry, Instance, Sequencer, Started

if TYPE_CHECKING:
    from collections.abc import Sequence

TICK_S = 0.25
STALLED_S = 1.0
"""A wait that takes this long looks whether another rank has given up the plan."""
POOL = Pool()


class Owner(Protocol):
    """What a call tells the enforcer."""

    def stalled(self, instance: Instance) -> None:
        """A wait has taken long."""

    def explain(self, instance: Instance, error: Exception) -> Exception:
        """What lies behind an error."""

    def waited(self, instance: Instance, begin_us: float, end_us: float) -> None:
        """The application stood in ``wait()``."""

    def spent(self, instance: Instance, motif: int, start_us: float, end_us: float) -> None:
        """A motif ran from one moment to another."""


class Given:
    """The memory of a submitted op; without `buffers` the backend runs it, and its motifs have nothing to do."""

    def __init__(
        self, owner: Owner, carrier: Carrier, instance: Instance, buffers: Buffers | None, bound: Bound | None,
        call: Call, plain: Callable[[], GroupWork], *, pool: Pool = POOL,
    ) -> None:  # fmt: skip
        self._owner, self._carrier, self._instance = owner, carrier, instance
        self.buffers, self._bound, self._plain, self._pool = buffers, bound, plain, pool
        self.inline = False
        """Whether the thread that submits waits at once."""
        self.instead: GroupWork | None = None
        """What runs in plain order after all."""
        self._staged: dict[int, Staged] = {}
        self._ended: dict[int, Callable[[float | None], None]] = {}
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

    def start(self, entry: Entry) -> Started | None:
        """Begin a motif; None where it has nothing to do."""
        motif = entry.part.motif
        loaded = self._bound.loaded[motif] if self._bound is not None else None
        if loaded is None or self.buffers is None:
            return None
        staged = self._staged[motif] = stage(loaded.layout, self._regions, self._dtype, self._pool)
        recording = current()
        if recording is not None:
            planned = self._instance.planned
            size = loaded.layout.task.count * self._dtype.itemsize
            name = f"{planned.op.name}#{motif} {entry.part.algorithm}"
            self._ended[motif] = recording.start(name, "+".join(entry.part.channels), size)
        return self._carrier.start(loaded, staged, self.buffers.dtype, self._op, entry, blocking=self.inline)

    def watch(self, entry: Entry) -> None:
        """From now on somebody waits for the end of a motif that runs already."""
        self._carrier.watch(entry)

    def moved(self, entry: Entry) -> None:
        """A motif's data has arrived: bring it where it belongs."""
        motif = entry.part.motif
        self._staged.pop(motif).back(self._regions, self._pool)
        self._owner.spent(self._instance, motif, entry.start_us, entry.end_us)
        ended = self._ended.pop(motif, None)
        if ended is not None:
            ended(entry.end_us - entry.start_us)

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
        """Nothing of it has started, and nothing will: run it as the application asked."""
        self.instead = self._plain()
        self._let_go()
        self._instance.settle(None)


class PlannedWork(GroupWork):
    """A call that a plan carries out."""

    def __init__(self, owner: Owner, sequencer: Sequencer, instance: Instance, given: Given, tensors: Tensors) -> None:
        super().__init__(tensors)
        self._owner, self._sequencer, self._instance, self._given = owner, sequencer, instance, given

    def _block(self, timeout: timedelta) -> bool:
        instance = self._instance
        if instance.done and self._given.instead is None and instance.error is None:
            return True
        begin_us = now_us()
        limit_s = timeout.total_seconds() if timeout > NO_TIMEOUT else float("inf")
        if not self._wait(limit_s):
            return False
        instead = self._given.instead
        if instead is not None:
            return instead.wait(timeout) if timeout > NO_TIMEOUT else instead.wait()
        if instance.error is not None:
            raise self._owner.explain(instance, instance.error)
        self._owner.waited(instance, begin_us, now_us())
        return True

    def _wait(self, limit_s: float) -> bool:
        instance = self._instance
        begin = looked = time.monotonic()
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
        if not self._instance.done:
            self._sequencer.reap()
        instead = self._given.instead
        return self._instance.done and (instead is None or instead.is_completed())

    def _make_future(self) -> Future:
        taken(self)
        return super()._make_future()

    def _when_over(self, then: Callable[[], object]) -> None:
        def over() -> None:
            if self._given.instead is not None:
                GroupWork._when_over(self, then)
                return
            self._settle(self._instance.error)
            then()

        with self._sequencer.lock:
            if not self._instance.done:
                self._instance.callbacks.append(over)
                for entry in self._instance.entries.values():
                    self._sequencer.notice(entry)
                return
        over()


def never() -> GroupWork:
    """In the place of a call that runs, or has run, in plain order already."""
    raise AssertionError("it runs in plain order already")


def _ended(started: Started, timeout_s: float) -> bool:
    """Whether it has, well or not."""
    try:
        return started.wait(timeout_s)
    except Exception:
        # The error stays with the motif, where the sequencer finds it.
        return True


