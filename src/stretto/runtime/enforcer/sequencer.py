# SPDX-License-Identifier: Apache-2.0
"""The sequencer: starts motifs in the plan's order on each channel, each as soon as its channels are free.

Every channel has a line. A motif starts when it stands first in the lines of all its channels, none of them is busy,
its op has been submitted, and the motifs of the op that it waits for have ended. Brief motifs do not wait for each
other. All ranks make the same lines, so the motifs of the same ranks and channels start in the same order everywhere.

Directions: a collective sends and receives at each of its ranks, so it holds its channels both ways. A message between
two ranks holds a channel one way only, outward at its source and inward at its destination. Where messages stand in
line at a rank (`messages`), each direction of their channels has a line of its own, and a collective stands in both.

Nobody waits for anybody in a circle. Let every motif wait for all motifs before it in the plan's order, whatever their
channels and directions, for its op's submission, and for its `after`; let the application wait for what the workload
says, messages included. `check_sequence` proves this graph free of circles when a plan is prepared. What really is
waited for is a part of it: only motifs with a line in common wait for each other, and a message may begin early.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from ..torch_backend.buffers import Buffers, CollectiveCall, lay_out
from ..torch_backend.recording import now_us
from ..torch_backend.work import GroupWork, Tensors
from .rank_plan import RankMotif, RankOp

WAITING, RUNNING, MOVED, ENDED = range(4)
TOGETHER = 8
"""How many brief motifs may be on the wire of a channel at once."""
UNKNOWN: Any = object()
"""Memory that has not been laid out yet."""
Plain = Callable[[], GroupWork]
"""Runs a call as the application asked for it, without the plan."""


def never() -> GroupWork:
    """In the place of a call that runs, or has run, in plain order already."""
    raise AssertionError("it runs in plain order already")


class ActiveMotif(Protocol):
    """A motif on the wire."""

    @property
    def done(self) -> bool:
        """Whether the motif has ended, with or without an error."""

    @property
    def error(self) -> Exception | None:
        """The error of the motif, once it has failed; else None."""

    @property
    def elapsed_us(self) -> float:
        """Microseconds from start to end."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the motif has ended; False when the time is up."""


class QueuedMotif:
    """One motif of one op of one iteration.

    Attributes:
        op: The op with its call.
        rank_motif: The motif as the plan has it for this rank.
        state: Whether it waits, runs or has ended.
        number: Where it stands in the order of all lines.
        active: What the carrier's `start` returned.
        watched: Whether its end is reported; else whoever needs it has to look.
        start_us: When it was started.
        end_us: When it ended.
        ready_us: When its op was submitted and what it waits for there had ended, if it could not start at that moment.
    """

    __slots__ = ("active", "end_us", "number", "op", "rank_motif", "ready_us", "start_us", "state", "watched")

    def __init__(self, op: QueuedOp, rank_motif: RankMotif) -> None:
        self.op, self.rank_motif = op, rank_motif
        self.state = WAITING
        self.number = 0
        self.active: ActiveMotif | None = None
        self.watched = False
        self.start_us = self.end_us = 0.0
        self.ready_us = 0.0


class LinkTurns(Protocol):
    """What is known of turns on links that motifs share with those of other ranks of the host."""

    def came(self, motif: QueuedMotif) -> bool:
        """Whether a motif has its turn."""

    def tell(self, motif: QueuedMotif) -> None:
        """A motif has ended here."""

    def forget(self) -> None:
        """Motifs that wait for a turn may have gone out of line."""


class Submission(Protocol):
    """What a carrier makes of a queued op and its call: it starts the op's motifs, each in its turn."""

    def start(self, motif: QueuedMotif) -> ActiveMotif | None:
        """Begin a motif; None where there is nothing to wait for."""

    def watch(self, motif: QueuedMotif) -> None:
        """From now on somebody waits for the end of a motif that runs already."""

    def moved(self, motif: QueuedMotif) -> None:
        """A motif's data has arrived: bring it where it belongs."""

    def over(self) -> None:
        """All motifs have ended."""


class QueuedOp:
    """One op of one iteration on this rank: its place in the plan's order and, once the application asks, its call."""

    __slots__ = ("_buffers", "_event", "_group", "blocking", "call", "callbacks", "done", "error", "iteration", "left",
                 "motifs", "plain", "plan", "rank_op", "submission", "tensors")  # fmt: skip

    def __init__(self, plan: int, rank_op: RankOp, iteration: int) -> None:
        self.plan, self.rank_op, self.iteration = plan, rank_op, iteration
        self.motifs: dict[int, QueuedMotif] = {one.number: QueuedMotif(self, one) for one in rank_op.motifs}
        self.left = len(self.motifs)
        self.submission: Submission | None = None
        self.done = False
        self.error: Exception | None = None
        self.callbacks: list[Callable[[], object]] = []
        self._event: threading.Event | None = None
        self.call: CollectiveCall | None = None
        """What the application has asked for; None before that, and once it is over."""

    def ask(
        self, call: CollectiveCall, tensors: Tensors, plain: Plain, rank: int, size: int, *, blocking: bool
    ) -> None:
        """The application makes the call.

        Args:
            call: The call.
            tensors: What its work gives back.
            plain: Makes the call without the plan.
            rank: This process in the call's group.
            size: The ranks of the group.
            blocking: Whether the application waits at once, for this call alone.
        """
        self.call, self.tensors, self.plain, self.blocking = call, tensors, plain, blocking
        self._group: tuple[int, int] = (rank, size)
        self._buffers: Buffers | None = UNKNOWN

    @property
    def buffers(self) -> Buffers | None:
        """The call's memory, flat and in one piece for each side; None where its tensors do not fit together.

        Laid out when it is first asked for: that may copy.
        """
        if self._buffers is UNKNOWN:
            assert self.call is not None
            self._buffers = lay_out(self.call, self.call.op, *self._group)
        return self._buffers

    @property
    def place(self) -> tuple[int, int]:
        """The op's position (iteration, number) in the order of submission, the same on all ranks."""
        return self.iteration, self.rank_op.number

    @property
    def is_message(self) -> bool:
        """Whether the op is a message between two ranks, which can go without the plan at any time."""
        return self.rank_op.op.kind == "send"

    @property
    def untouched(self) -> bool:
        """Whether none of the op's motifs has been started."""
        return all(motif.state == WAITING for motif in self.motifs.values())

    def running(self) -> QueuedMotif | None:
        """A motif of the op that is under way, or None."""
        for one in self.motifs.values():
            if one.state == RUNNING and one.active is not None:
                return one
        return None

    def rest(self) -> None:
        """Somebody is about to sleep: what has happened so far is known. Called with the sequencer's lock."""
        if self._event is None:
            self._event = threading.Event()
        self._event.clear()

    def wait(self, timeout_s: float) -> None:
        """Sleep until a motif of it starts or it is done, so long at most."""
        if not self.done:
            assert self._event is not None
            self._event.wait(timeout_s)

    def stir(self) -> None:
        """A motif has started: whoever sleeps may wait for that one, which costs no other thread a wake-up."""
        if self._event is not None:
            self._event.set()

    def forget(self) -> None:
        """Break the reference circles of an op that has ended, so that it is freed at once."""
        self.submission = None
        for motif in self.motifs.values():
            del motif.op

    def settle(self, error: Exception | None) -> None:
        """Mark the op as ended, wake those that wait for it, and let go of the application's tensors."""
        self.error = error
        self.done = True
        if self.call is not None:
            self.call = self._buffers = None
            self.tensors, self.plain = [], never
        if self._event is not None:
            self._event.set()
        if not self.callbacks:
            return
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            # A callback of the application may raise; the plan goes on.
            with contextlib.suppress(Exception):
                callback()


class Sequencer:
    """The lines of all channels of a process. Any thread may call; whoever comes starts what can be started."""

    def __init__(self, failed: Callable[[QueuedOp, Exception], None] = lambda queued, error: None) -> None:
        self.lock = threading.RLock()
        self._failed = failed
        """Called without the lock, before those who wait for an op get the failure."""
        self.failure: Exception | None = None
        """The error that ended the sequencer, after which no motif runs any more; else None."""
        self.link_turns: LinkTurns | None = None
        """Asked before motifs that have turns on links; None lets them go."""
        self._lines: dict[str, deque[QueuedMotif]] = {}
        self._busy: dict[str, list[QueuedMotif]] = {}
        self._open: dict[int, QueuedOp] = {}
        self._added = 0
        self._finished: deque[QueuedOp] = deque()
        self._broken: deque[QueuedOp] = deque()
        """Ops whose waiters are to be let go, with success or with the failure, once the lock is."""
        self._waiting = False
        """Whether motifs of submitted ops may be waiting."""
        self._submitted_us = 0.0
        """When the last of them was submitted."""
        self._held_since_us = self._held_us = 0.0
        """Since when the order holds motifs back, if it does; and for how long it did since somebody asked."""

    def add(self, motifs: Iterable[QueuedMotif]) -> None:
        """At the end of their lines. Those that run after their own iteration have been submitted already."""
        late = False
        with self.lock:
            for motif in motifs:
                self._added += 1
                motif.number = self._added
                late = late or motif.op.submission is not None
                for channel in motif.rank_motif.lines:
                    line = self._lines.get(channel)
                    if line is None:
                        line = self._lines[channel] = deque()
                        self._busy[channel] = []
                    line.append(motif)
            if late:
                self._advance()
                self._measure_held()
        if late:
            self._finish()
            self.watch()

    def submit(self, queued: QueuedOp, submission: Submission) -> None:
        """The application has given an op: its motifs may start."""
        held = False
        if self._waiting:
            # A motif that nobody reports may have left its channel idle: while something waits, that is measured.
            self.reap()
        with self.lock:
            failure = self.failure
            queued.submission = submission
            if failure is None:
                self._open[id(queued)] = queued
                held = self._begin(queued)
                if held or self._waiting:
                    self._note_waiting(queued, held=held)
        self._finish()
        if failure is not None:
            queued.settle(failure)
        elif not queued.motifs:
            self._over(queued)
        elif held:
            self.watch()

    def _begin(self, queued: QueuedOp) -> bool:
        """Start what may start now that an op was submitted; whether some of it waits. Called with the lock."""
        motifs = queued.motifs.values()
        # Submitting an op makes none but its own motifs ready.
        if len(motifs) == 1:
            (only,) = motifs
            if not self._ready(only):
                return True
            self._start(only)
            if self._followed(only):
                self._advance()
            return False
        if any(map(self._ready, motifs)):
            self._advance()
        return any(motif.state == WAITING for motif in motifs)

    def watch(self) -> None:
        """Something stands behind motifs that run: their ends are wanted from now on."""
        self.reap()
        with self.lock:
            for channel, line in self._lines.items():
                if line and line[0].op.submission is not None:
                    for motif in self._busy.get(channel, ()):
                        self.notice(motif)

    def reap(self) -> None:
        """Look for motifs that have ended without a report."""
        with self.lock:
            running = {id(motif): motif for busy in self._busy.values() for motif in busy if not motif.watched}
        for motif in running.values():
            if motif.active is not None and motif.active.done:
                self.ended(motif)

    def notice(self, motif: QueuedMotif) -> None:
        """Have the end of a motif reported, if it is not anyway."""
        if motif.state == RUNNING and not motif.watched and motif.active is not None:
            motif.watched = True
            assert motif.op.submission is not None
            motif.op.submission.watch(motif)

    def stir(self) -> None:
        """Turns on links may have come: start what may start now."""
        with self.lock:
            self._advance()
            self._measure_held()
        self._finish()
        self.watch()

    def under_way(self, queued: QueuedOp) -> QueuedMotif | None:
        """A motif of an op that runs; where none does, the start of the next one ends ``queued.wait()``."""
        with self.lock:
            found = queued.running()
            if found is None:
                queued.rest()
            return found

    def keep(self, wanted: Callable[[QueuedOp], bool]) -> list[QueuedOp]:
        """Take all others out of the lines; returns those of them that had been submitted, in their order."""
        with self.lock:
            gone = {number: queued for number, queued in self._open.items() if not wanted(queued)}
            for channel, line in self._lines.items():
                self._lines[channel] = deque(motif for motif in line if wanted(motif.op))
            for number in gone:
                del self._open[number]
            if self.link_turns is not None:
                self.link_turns.forget()
            self._advance()
            self._measure_held()
        self._finish()
        self.watch()
        return sorted(gone.values(), key=lambda queued: queued.place)

    def ended(self, motif: QueuedMotif) -> None:
        """A motif's program has ended; only the first call counts."""
        with self.lock:
            if motif.state != RUNNING:
                return
            motif.state = MOVED
            assert motif.active is not None
            elapsed = motif.active.elapsed_us
            motif.end_us = motif.start_us + elapsed if elapsed > 0 else now_us()
            self._free(motif)
            error = motif.active.error
            if error is None and self._followed(motif):
                # The channels are free before the data is where it belongs.
                self._advance()
            self._measure_held(motif.end_us)
        self._tell(motif)
        self._finish()
        if error is not None:
            self.fail(error)
            return
        self._bring(motif)

    def fail(self, error: Exception) -> None:
        """End all open ops with an error, which everything that waits for them raises."""
        with self.lock:
            self._break(error)
        self._finish()

    def behind(self, queued: QueuedOp) -> QueuedOp | None:
        """The op that has to be submitted here before this one can go on, if that is what holds it."""
        with self.lock:
            seen = [motif for motif in queued.motifs.values() if motif.state == WAITING]
            for motif in seen:
                for channel in motif.rank_motif.lines:
                    line = self._lines.get(channel)
                    if not line or self._busy.get(channel) or line[0] in seen:
                        continue
                    if line[0].op.submission is None:
                        return line[0].op
                    seen.append(line[0])
        return None

    def take_held_us(self) -> float:
        """For how long the order has held motifs back since this was asked last: see `_holds_back`."""
        with self.lock:
            now = now_us()
            if self._held_since_us:
                self._held_us += now - self._held_since_us
                self._held_since_us = now
            held_us, self._held_us = self._held_us, 0.0
            return held_us

    def _note_waiting(self, queued: QueuedOp, *, held: bool) -> None:
        """An op was submitted of which something waits, or while something else does. Called with the lock."""
        if held:
            self._waiting, self._submitted_us = True, now_us()
            for motif in queued.motifs.values():
                if motif.state == WAITING:
                    motif.ready_us = self._submitted_us
        self._measure_held()

    def _measure_held(self, at_us: float = 0.0) -> None:
        """Something was submitted, or has ended (`at_us`): does the order hold motifs back? Called with the lock."""
        if not self._waiting:
            return
        if self._holds_back():
            # The thread that looks at the end of a motif may be late.
            self._held_since_us = self._held_since_us or max(at_us or now_us(), self._submitted_us)
        elif self._held_since_us:
            self._held_us += max(now_us() - self._held_since_us, 0.0)
            self._held_since_us = 0.0

    def _holds_back(self) -> bool:
        """Whether a motif that could run waits, on a channel that lies idle, for one that was not submitted yet."""
        self._waiting = False
        for queued in self._open.values():
            for motif in queued.motifs.values():
                if motif.state != WAITING:
                    continue
                self._waiting = True
                # What is not in line yet runs after its own iteration, as the plan wants it: nothing holds it back.
                if not motif.number or not self._after_is_over(motif):
                    continue
                for channel in motif.rank_motif.lines:
                    line = self._lines.get(channel)
                    if not line or self._busy[channel]:
                        continue
                    if line[0].op.submission is None or (line[0] is motif and not self._has_turn(motif)):
                        return True
        return False

    @property
    def idle(self) -> bool:
        """Whether everything that was submitted has ended."""
        self.reap()
        return not self._open

    def _advance(self) -> None:
        """Start whatever may start, in the order of the lines: the same on all ranks. Called with the lock."""
        while True:
            first: QueuedMotif | None = None
            for line in self._lines.values():
                if line and (first is None or line[0].number < first.number) and self._ready(line[0]):
                    first = line[0]
            if first is None:
                return
            self._start(first)

    def _ready(self, motif: QueuedMotif) -> bool:
        queued, rank_motif = motif.op, motif.rank_motif
        if queued.submission is None or motif.state != WAITING:
            return False
        for channel in rank_motif.lines:
            line = self._lines.get(channel)
            if not line or line[0] is not motif:
                return False
            busy = self._busy[channel]
            if busy:
                if not rank_motif.brief or len(busy) >= TOGETHER:
                    return False
                for other in busy:
                    if not other.rank_motif.brief:
                        return False
        return self._after_is_over(motif) and self._has_turn(motif)

    def _has_turn(self, motif: QueuedMotif) -> bool:
        """Whether a motif need not wait for one of other ranks of this host, with which it shares a link."""
        return not motif.rank_motif.link_turns or self.link_turns is None or self.link_turns.came(motif)

    def _tell(self, motif: QueuedMotif) -> None:
        if motif.rank_motif.tells and self.link_turns is not None:
            self.link_turns.tell(motif)

    @staticmethod
    def _after_is_over(motif: QueuedMotif) -> bool:
        """Whether the motifs of its op that a motif waits for have ended."""
        after = motif.rank_motif.after
        return not after or all(motif.op.motifs[before].state == ENDED for before in after)

    def _start(self, motif: QueuedMotif) -> None:
        for channel in motif.rank_motif.lines:
            self._lines[channel].popleft()
            self._busy[channel].append(motif)
        motif.state = RUNNING
        motif.start_us = now_us()
        # A report costs a thread's wake-up, which is only worth it where something comes after.
        motif.watched = len(motif.op.motifs) > 1 or bool(motif.op.callbacks) or self._followed(motif)
        motif.watched = motif.watched or bool(motif.rank_motif.tells)
        assert motif.op.submission is not None
        try:
            motif.active = motif.op.submission.start(motif)
        except Exception as error:
            self._break(error)
            return
        if motif.active is None:
            motif.state = ENDED
            motif.end_us = motif.start_us
            self._free(motif)
            self._tell(motif)
            motif.op.left -= 1
            if not motif.op.left:
                self._finished.append(motif.op)
        elif motif.op._event is not None:
            motif.op.stir()

    def _break(self, error: Exception) -> None:
        """Mark all open ops as failed. Called with the lock."""
        self.failure = self.failure or error
        self._broken.extend(self._open.values())
        self._open.clear()
        self._waiting, self._held_since_us = False, 0.0
        self._lines.clear()
        self._busy.clear()

    def _finish(self) -> None:
        """Let go those who wait for what is over, well or not; without the lock, as they may do anything."""
        if not self._finished and not self._broken:
            return
        while (queued := _first(self._finished)) is not None:
            self._over(queued)
        while (queued := _first(self._broken)) is not None:
            assert self.failure is not None
            self._failed(queued, self.failure)
            queued.settle(self.failure)

    def _followed(self, motif: QueuedMotif) -> bool:
        """Whether something that was submitted stands behind a motif."""
        for channel in motif.rank_motif.lines:
            line = self._lines.get(channel)
            if line and line[0].op.submission is not None:
                return True
        return False

    def _free(self, motif: QueuedMotif) -> None:
        for channel in motif.rank_motif.lines:
            busy = self._busy.get(channel)
            if busy and motif in busy:
                busy.remove(motif)

    def _bring(self, motif: QueuedMotif) -> None:
        queued = motif.op
        assert queued.submission is not None
        try:
            if motif.active is not None:
                queued.submission.moved(motif)
        except Exception as error:
            self.fail(error)
            return
        with self.lock:
            motif.state = ENDED
            queued.left -= 1
            over = queued.left == 0
            if not over:
                for other in queued.motifs.values():
                    if motif.rank_motif.number in other.rank_motif.after and self._after_is_over(other):
                        other.ready_us = now_us()
                self._advance()
                self._measure_held()
        if over:
            self._over(queued)
        else:
            self._finish()

    def _over(self, queued: QueuedOp) -> None:
        assert queued.submission is not None
        error: Exception | None = None
        try:
            queued.submission.over()
        except Exception as wrong:
            error = wrong
        with self.lock:
            known = self._open.pop(id(queued), None) is not None
        if known:
            queued.settle(error)


def _first(ops: deque[QueuedOp]) -> QueuedOp | None:
    """Taken out; another thread may have come first."""
    try:
        return ops.popleft()
    except IndexError:
        return None
