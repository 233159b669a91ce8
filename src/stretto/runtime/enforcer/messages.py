# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks in the plan's order: each begins in its turn, and then goes as it would without a plan.

A message stands in the line of one direction of its channel, outward at its source and inward at its destination, where
collectives of the rank stand too. When its turn comes the wrapped backend is called, on both ends in the order in which
the application called for this pair of ranks: a message whose turn comes first takes earlier ones of its pair along. So
the plan can only delay a call. Whatever becomes of the plan, or of the order in which the other end sees it, messages
reach whom they were meant for; and one that is held back in vain is let go after a while.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from datetime import timedelta
from queue import SimpleQueue

from ..torch_backend.work import NO_TIMEOUT, GroupWork, Tensors
from .planned_work import STALLED_S
from .prepared import PreparedPlan
from .sequencer import ActiveMotif, Plain, QueuedMotif, QueuedOp, Sequencer
from .submission import BaseSubmission, PlaceSubmission, SubmissionOwner

log = logging.getLogger("stretto.enforcer")
Pair = tuple[int, int]
"""The source and the destination of messages, as ranks of the job."""
PATIENT_LOOKS = 2
"""A message is let go when so many looks have found it behind an op that was not submitted."""


class MessageSubmission(BaseSubmission):
    """One end of a message: what begins it, and, once it is under way, how it stands."""

    __slots__ = ("_lines", "_lock", "_motif", "_over", "begun", "error", "inner", "looks", "pair", "queued")

    elapsed_us = 0.0

    def __init__(self, owner: SubmissionOwner, queued: QueuedOp, plain: Plain, lines: MessageLines, pair: Pair) -> None:
        super().__init__(owner, queued, plain)
        self.queued = queued
        self._lines, self.pair = lines, pair
        self._lock, self._over = threading.Lock(), threading.Event()
        self._motif: QueuedMotif | None = None
        self.begun = threading.Event()
        self.inner: GroupWork | None = None
        self.error: Exception | None = None
        self.looks = 0
        # However the op is settled, with its plan or without, the message goes on its way.
        queued.callbacks.append(self.begin)

    def begin(self) -> None:
        """Call the wrapped backend, unless that was done."""
        self._lines.begin(self)

    def begin_now(self) -> None:
        """Begin this message alone; `MessageLines` calls this once."""
        try:
            self.inner = self._plain()
        except Exception as error:
            # The error goes to the call that waits for the message; the plan goes on.
            self.error = error
        self.let_go()
        self.begun.set()
        if self.inner is None:
            self.ended()

    def ended(self) -> None:
        """The message has arrived, or failed, here."""
        with self._lock:
            self._over.set()
            motif = self._motif
        if motif is not None:
            self._lines.sequencer.ended(motif)

    def start(self, motif: QueuedMotif) -> ActiveMotif | None:
        """Run the message: its turn in the plan's order has come."""
        self.begin()
        with self._lock:
            if self._over.is_set():
                return None
            self._motif = motif
            return _Active(self._over)

    def watch(self, motif: QueuedMotif) -> None:
        """Every end is reported."""

    def moved(self, motif: QueuedMotif) -> None:
        """Do nothing: a message has no result to copy."""
        self._ran(motif)

    def over(self) -> None:
        """Do nothing: a message holds no memory of a pool."""

    def run_plainly(self) -> None:
        """Begin the message at once, as it is without the plan."""
        self._queued.settle(None)


class _Active:
    """A message under way. Its errors are for who waits for it."""

    error = None
    elapsed_us = 0.0

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    @property
    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self._over.wait(timeout_s)


class MessageWork(GroupWork):
    """What the application waits for."""

    def __init__(self, message: MessageSubmission, tensors: Tensors) -> None:
        super().__init__(tensors)
        self._message: MessageSubmission | None = message

    def _block(self, timeout: timedelta) -> bool:
        message = self._message
        if message is None:
            return True
        if timeout > NO_TIMEOUT:
            # gloo gives up a message whose wait has a timeout of its own: what is held back can be waited for again.
            if not message.begun.wait(timeout.total_seconds()):
                return False
        else:
            message.begun.wait()
        if message.error is not None:
            raise message.error
        assert message.inner is not None
        return message.inner.wait(timeout) if timeout > NO_TIMEOUT else message.inner.wait()

    def _poll(self) -> bool:
        message = self._message
        return message is None or (message.begun.is_set() and (message.inner is None or message.inner.is_completed()))

    def _release(self) -> None:
        self._message = None


class MessageLines:
    """The messages of this rank under the active plan. Training's thread calls `take` and `boundary`."""

    def __init__(self, owner: SubmissionOwner, sequencer: Sequencer) -> None:
        self._owner, self.sequencer = owner, sequencer
        self._lock = threading.RLock()
        self._held: dict[Pair, deque[MessageSubmission]] = {}
        """Messages that have not begun, in the application's order."""
        self._counts: dict[Pair, int] = {}
        self._ends: dict[str, SimpleQueue[MessageSubmission | None]] = {}
        self._watching: threading.Thread | None = None
        self._closed = threading.Event()

    def take(
        self, active: PreparedPlan, iteration: int, pair: Pair, nbytes: int, *, follows: bool,
        plain: Plain, tensors: Tensors,
    ) -> GroupWork | None:  # fmt: skip
        """Put a message in line.

        Args:
            active: The active plan.
            iteration: The iteration, as the plan counts.
            pair: Source and destination.
            nbytes: Its size.
            follows: Whether the plan is followed in this iteration; else the message only keeps its place.
            plain: Makes the call.
            tensors: Of the call.

        Returns:
            What to wait for; None where the plan says nothing of it.
        """
        numbers = active.share.messages.get(pair, ())
        at = self._counts.get(pair, 0)
        self._counts[pair] = at + 1
        if at >= len(numbers) or numbers[at] not in active.share.ops:
            return None
        queued = active.queued_op(iteration, numbers[at])
        if queued.submission is not None:
            return None
        if not follows or nbytes != queued.rank_op.op.nbytes:
            self._keep_place(queued)
            return None
        message = MessageSubmission(self._owner, queued, plain, self, pair)
        with self._lock:
            self._held.setdefault(pair, deque()).append(message)
        self.sequencer.submit(queued, message)
        if not message.begun.is_set():
            self._watch()
        return MessageWork(message, tensors)

    def begin(self, message: MessageSubmission) -> None:
        """Begin a message that is held back, and those of its pair that were called before it."""
        with self._lock:
            held = self._held.get(message.pair)
            while held and not message.begun.is_set():
                first = held.popleft()
                first.begin_now()
                if first.inner is not None:
                    self._await_end(first)

    def boundary(self, active: PreparedPlan, iteration: int, *, marked: bool) -> None:
        """An iteration ends: nobody waits any longer for messages of it that have not come.

        Args:
            active: The plan under which it ran.
            iteration: The iteration, as the plan counts.
            marked: Whether the application said so; else messages of the next iteration may have come already.
        """
        for pair, numbers in active.share.messages.items():
            came = self._counts.get(pair, 0)
            for number in numbers[came:]:
                self._pass(active, iteration, number)
            early = 0 if marked else max(came - len(numbers), 0)
            self._counts[pair] = early
            for number in numbers[:early]:
                self._pass(active, iteration + 1, number)

    def forget(self) -> None:
        """Forget the messages of the last plan."""
        self._counts.clear()

    def pass_by(self, queued: QueuedOp) -> None:
        """Stop waiting for a message that has not been submitted, and keep its place for when it is."""
        if queued.submission is None:
            self._keep_place(queued)

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        with self._lock:
            for ends in self._ends.values():
                ends.put(None)
            self._ends = {}

    def _pass(self, active: PreparedPlan, iteration: int, number: int) -> None:
        if number in active.share.ops:
            self.pass_by(active.queued_op(iteration, number))

    def _keep_place(self, queued: QueuedOp) -> None:
        self.sequencer.submit(queued, PlaceSubmission(self._owner, queued))

    # Threads: gloo's messages can only be waited for, not asked, and somebody has to look at what is held back.

    def _await_end(self, message: MessageSubmission) -> None:
        line = message.queued.rank_op.motifs[0].lines[0]
        ends = self._ends.get(line)
        if ends is None:
            ends = self._ends[line] = SimpleQueue()
            threading.Thread(target=_report_ends, args=(ends,), name="stretto-messages", daemon=True).start()
        ends.put(message)

    def _watch(self) -> None:
        with self._lock:
            if self._watching is None or not self._watching.is_alive():
                self._watching = threading.Thread(target=self._look, name="stretto-held-messages", daemon=True)
                self._watching.start()

    def _look(self) -> None:
        """Let go what is held back for an op that the application does not submit."""
        while not self._closed.wait(STALLED_S):
            with self._lock:
                waiting = [held[0] for held in self._held.values() if held]
            for message in waiting:
                ahead = self.sequencer.behind(message.queued)
                message.looks = message.looks + 1 if ahead is not None else 0
                if ahead is not None and message.looks >= PATIENT_LOOKS:
                    log.warning("%s no longer waits for %s", message.queued.rank_op.op.name, ahead.rank_op.op.name)
                    message.begin()


def _report_ends(ends: SimpleQueue[MessageSubmission | None]) -> None:
    """Wait for messages in the order in which they began."""
    while (message := ends.get()) is not None:
        assert message.inner is not None
        try:
            message.inner.wait()
        except Exception as error:
            log.debug("a message failed: %s", error)
        message.ended()
