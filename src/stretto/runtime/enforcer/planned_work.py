# SPDX-License-Identifier: Apache-2.0
"""What the application gets to wait for when it makes a call under a plan."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from ..torch_backend.recording import now_us
from ..torch_backend.work import NO_TIMEOUT, Future, GroupWork, Tensors, completes_futures
from .futures import taken
from .sequencer import ActiveMotif, QueuedOp, Sequencer
from .submission import SubmissionOwner, SubmittedOp

TICK_S = 0.25
STALLED_S = 1.0
"""A wait that takes this long looks whether another rank has given up the plan."""


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


def _ended(started: ActiveMotif, timeout_s: float) -> bool:
    """Whether it has, well or not."""
    try:
        return started.wait(timeout_s)
    except Exception:
        # The error stays with the motif, where the sequencer finds it.
        return True
