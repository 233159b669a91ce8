# SPDX-License-Identifier: Apache-2.0
"""`PlannedWork`: the work of a call under a plan, for which the application waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from ..torch_backend.recording import now_us
from ..torch_backend.work import NO_TIMEOUT, Future, GroupWork, Tensors, completes_futures
from .futures import taken
from .sequencer import ActiveMotif, QueuedOp, Sequencer
from .submission import BaseSubmission, SubmissionOwner

TICK_S = 0.25
STALLED_S = 1.0
"""The seconds of waiting after which a work asks whether another rank has given up the plan."""


class PlannedWork(GroupWork):
    """A call that a plan carries out."""

    def __init__(
        self,
        owner: SubmissionOwner,
        sequencer: Sequencer,
        queued: QueuedOp,
        submission: BaseSubmission,
        tensors: Tensors,
    ) -> None:
        super().__init__(tensors)
        self._owner, self._sequencer = owner, sequencer
        self._under_way: tuple[QueuedOp, BaseSubmission] | None = (queued, submission)
        """The op and its submission; None once the op has ended, because applications keep works for long."""

    def _block(self, timeout: timedelta) -> bool:
        if self._under_way is None:
            return True
        queued, submission = self._under_way
        if queued.done and submission.instead is None and queued.error is None:
            return True
        begin_us = now_us()
        limit_s = timeout.total_seconds() if timeout > NO_TIMEOUT else float("inf")
        if not self._wait(queued, limit_s):
            return False
        if submission.instead is not None:
            return submission.instead.wait(timeout) if timeout > NO_TIMEOUT else submission.instead.wait()
        if queued.error is not None:
            raise self._owner.explain(queued, queued.error)
        self._owner.waited(queued, begin_us, now_us())
        return True

    def _wait(self, queued: QueuedOp, limit_s: float) -> bool:
        begin = looked = time.monotonic()
        motif = queued.running()
        if motif is not None and motif.active is not None and _ended(motif.active, min(TICK_S, limit_s)):
            self._sequencer.ended(motif)
        while not queued.done:
            now = time.monotonic()
            left_s = limit_s - (now - begin)
            if left_s <= 0:
                return False
            motif = self._sequencer.under_way(queued)
            if motif is None or motif.active is None:
                queued.wait(min(TICK_S, left_s))
            elif _ended(motif.active, min(TICK_S, left_s)):
                self._sequencer.ended(motif)
            if not queued.done and now - looked > STALLED_S:
                looked = now
                self._owner.stalled(queued)
        return True

    def _poll(self) -> bool:
        if self._under_way is None:
            return True
        queued, submission = self._under_way
        if not queued.done:
            self._sequencer.reap()
        return queued.done and (submission.instead is None or submission.instead.is_completed())

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
        queued, submission = self._under_way

        def over() -> None:
            if submission.instead is not None:
                GroupWork._when_over(self, then)
                return
            self._settle(queued.error)
            then()

        with self._sequencer.lock:
            if not queued.done:
                queued.callbacks.append(over)
                for motif in queued.motifs.values():
                    self._sequencer.notice(motif)
                return
        over()


def _ended(started: ActiveMotif, timeout_s: float) -> bool:
    """Whether a motif has ended, with or without an error, within a time."""
    try:
        return started.wait(timeout_s)
    except Exception:
        # The error stays with the motif, where the sequencer finds it.
        return True
