# SPDX-License-Identifier: Apache-2.0
"""Who may go next: motifs in the plan's order on each channel, each as soon as its channels are free.

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
from typing import Protocol

from ..torch_backend.recording import now_us
from .parts import RankMotif, RankOp

WAITING, RUNNING, MOVED, ENDED = range(4)
TOGETHER = 8
"""So many brief motifs may be under way on a channel."""


class ActiveMotif(Protocol):
    """A motif under way."""

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""

    @property
    def error(self) -> Exception | None:
        """Why it failed, once it has."""

    @property
    def elapsed_us(self) -> float:
        """How long it took."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has ended; False when the time is up."""


class QueuedMotif:
    """One motif of one op of one iteration."""

    __slots__ = ("end_us", "instance", "number", "part", "ready_us", "start_us", "started", "state", "watched")

    def __init__(self, instance: QueuedOp, part: RankMotif) -> None:
        self.instance, self.part = instance, part
        self.state = WAITING
        self.number = 0
        """Where it stands in the order of all lines."""
        self.started: ActiveMotif | None = None
        self.watched = False
        """Whether its end is reported; else whoever needs it has to look."""
        self.start_us = self.end_us = 0.0
        self.ready_us = 0.0
        """When its op was submitted and what it waits for there had ended, if it could not start at that moment."""


class Submission(Protocol):
    """What the application gave for an op."""

    def start(self, entry: QueuedMotif) -> ActiveMotif | None:
        """Begin a motif; None where there is nothing to wait for."""

    def watch(self, entry: QueuedMotif) -> None:
        """From now on somebody waits for the end of a motif that runs already."""

    def moved(self, entry: QueuedMotif) -> None:
        """A motif's data has arrived: bring it where it belongs."""

    def over(self) -> None:
        """All motifs have ended."""


class QueuedOp:
    """One op of one iteration on this rank."""

    __slots__ = ("_event", "callbacks", "done", "entries", "error", "iteration", "left", "plan", "planned",
                 "submission")  # fmt: skip

    def __init__(self, plan: int, planned: RankOp, iteration: int) -> None:
        self.plan, self.planned, self.iteration = plan, planned, iteration
        self.entries: dict[int, QueuedMotif] = {part.motif: QueuedMotif(self, part) for part in planned.parts}
        self.left = len(self.entries)
        self.submission: Submission | None = None
        self.done = False
        self.error: Exception | None = None
        self.callbacks: list[Callable[[], object]] = []
        self._event: threading.Event | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Where it stands in the order of submission, the same on all ranks."""
        return self.iteration, self.planned.number

    @property
    def is_message(self) -> bool:
        """Whether it is a message between two ranks, which can go without the plan at any time."""
        return self.planned.op.kind == "send"

    @property
    def untouched(self) -> bool:
        """Whether none of its motifs has been started."""
        return all(entry.state == WAITING for entry in self.entries.values())

    def running(self) -> QueuedMotif | None:
        """A motif of it that is under way."""
        for one in self.entries.values():
            if one.state == RUNNING and one.started is not None:
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
        """It has ended, and is in no line any more: without circles it goes at once, not when garbage is collected."""
        self.submission = None
        for entry in self.entries.values():
            del entry.instance

    def settle(self, error: Exception | None) -> None:
        """It is over: let everybody know."""
        self.error = error
        self.done = True
        if self._event is not None:
            self._event.set()
        if not self.callbacks:
            return
        callbacks, self.callbacks = self.callbacks, []
        for callback in callbacks:
            # Who has asked to be told may fail by himself; the plan goes on.
            with contextlib.suppress(Exception):
                callback()


class Sequencer:
    """The lines of all channels of a process. Any thread may call; whoever comes starts what can be started."""

    def __init__(self, failed: Callable[[QueuedOp, Exception], None] = lambda instance, error: None) -> None:
        self.lock = threading.RLock()
        self._failed = failed
        """Called without the lock, before those who wait for an op get the failure."""
        self.failure: Exception | None = None
        """What ended it; nothing runs any more."""
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

    def add(self, entries: Iterable[QueuedMotif]) -> None:
        """At the end of their lines. Those that run after their own iteration have been submitted already."""
        late = False
        with self.lock:
            for entry in entries:
                self._added += 1
                entry.number = self._added
                late = late or entry.instance.submission is not None
                for channel in entry.part.lines:
                    line = self._lines.get(channel)
                    if line is None:
                        line = self._lines[channel] = deque()
                        self._busy[channel] = []
                    line.append(entry)
            if late:
                self._advance()
                self._measure_held()
        if late:
            self._finish()
            self.watch()

    def submit(self, instance: QueuedOp, submission: Submission) -> None:
        """The application has given an op: its motifs may start."""
        held = False
        if self._waiting:
            # A motif that nobody reports may have left its channel idle: while something waits, that is measured.
            self.reap()
        with self.lock:
            failure = self.failure
            instance.submission = submission
            if failure is None:
                self._open[id(instance)] = instance
                held = self._begin(instance)
                if held or self._waiting:
                    self._note_waiting(instance, held=held)
        self._finish()
        if failure is not None:
            instance.settle(failure)
        elif not instance.entries:
            self._over(instance)
        elif held:
            self.watch()

    def _begin(self, instance: QueuedOp) -> bool:
        """Start what may start now that an op was submitted; whether some of it waits. Called with the lock."""
        entries = instance.entries.values()
        # Nothing but its own motifs became ready by this.
        if len(entries) == 1:
            (only,) = entries
            if not self._ready(only):
                return True
            self._start(only)
            if self._followed(only):
                self._advance()
            return False
        if any(map(self._ready, entries)):
            self._advance()
        return any(entry.state == WAITING for entry in entries)

    def watch(self) -> None:
        """Something stands behind motifs that run: their ends are wanted from now on."""
        self.reap()
        with self.lock:
            for channel, line in self._lines.items():
                if line and line[0].instance.submission is not None:
                    for entry in self._busy.get(channel, ()):
                        self.notice(entry)

    def reap(self) -> None:
        """Look for motifs that have ended without a report."""
        with self.lock:
            running = {id(entry): entry for busy in self._busy.values() for entry in busy if not entry.watched}
        for entry in running.values():
            if entry.started is not None and entry.started.done:
                self.ended(entry)

    def notice(self, entry: QueuedMotif) -> None:
        """Have the end of a motif reported, if it is not anyway."""
        if entry.state == RUNNING and not entry.watched and entry.started is not None:
            entry.watched = True
            assert entry.instance.submission is not None
            entry.instance.submission.watch(entry)

    def under_way(self, instance: QueuedOp) -> QueuedMotif | None:
        """A motif of an op that runs; where none does, the start of the next one ends ``instance.wait()``."""
        with self.lock:
            found = instance.running()
            if found is None:
                instance.rest()
            return found

    def keep(self, wanted: Callable[[QueuedOp], bool]) -> list[QueuedOp]:
        """Take all others out of the lines; returns those of them that had been submitted, in their order."""
        with self.lock:
            gone = {number: instance for number, instance in self._open.items() if not wanted(instance)}
            for channel, line in self._lines.items():
                self._lines[channel] = deque(entry for entry in line if wanted(entry.instance))
            for number in gone:
                del self._open[number]
            self._advance()
            self._measure_held()
        self._finish()
        self.watch()
        return sorted(gone.values(), key=lambda instance: instance.place)

    def ended(self, entry: QueuedMotif) -> None:
        """A motif's program has ended; only the first call counts."""
        with self.lock:
            if entry.state != RUNNING:
                return
            entry.state = MOVED
            assert entry.started is not None
            elapsed = entry.started.elapsed_us
            entry.end_us = entry.start_us + elapsed if elapsed > 0 else now_us()
            self._free(entry)
            error = entry.started.error
            if error is None and self._followed(entry):
                # The channels are free before the data is where it belongs.
                self._advance()
            self._measure_held(entry.end_us)
        self._finish()
        if error is not None:
            self.fail(error)
            return
        self._bring(entry)

    def fail(self, error: Exception) -> None:
        """Nothing of this can go on: everybody who waits gets the error."""
        with self.lock:
            self._break(error)
        self._finish()

    def behind(self, instance: QueuedOp) -> QueuedOp | None:
        """The op that has to be submitted here before this one can go on, if that is what holds it."""
        with self.lock:
            seen = [entry for entry in instance.entries.values() if entry.state == WAITING]
            for entry in seen:
                for channel in entry.part.lines:
                    line = self._lines.get(channel)
                    if not line or self._busy.get(channel) or line[0] in seen:
                        continue
                    if line[0].instance.submission is None:
                        return line[0].instance
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

    def _note_waiting(self, instance: QueuedOp, *, held: bool) -> None:
        """An op was submitted of which something waits, or while something else does. Called with the lock."""
        if held:
            self._waiting, self._submitted_us = True, now_us()
            for entry in instance.entries.values():
                if entry.state == WAITING:
                    entry.ready_us = self._submitted_us
        self._measure_held()

    def _measure_held(self, at_us: float = 0.0) -> None:
        """Something was submitted, or has ended (`at_us`): does the order hold motifs back? Called with the lock."""
        if not self._waiting:
            return
        if self._holds_back():
            # Who looks at the end of a motif may be late.
            self._held_since_us = self._held_since_us or max(at_us or now_us(), self._submitted_us)
        elif self._held_since_us:
            self._held_us += max(now_us() - self._held_since_us, 0.0)
            self._held_since_us = 0.0

    def _holds_back(self) -> bool:
        """Whether a motif that could run waits, on a channel that lies idle, for one that was not submitted yet."""
        self._waiting = False
        for instance in self._open.values():
            for entry in instance.entries.values():
                if entry.state != WAITING:
                    continue
                self._waiting = True
                # What is not in line yet runs after its own iteration, as the plan wants it: nothing holds it back.
                if not entry.number or not self._after_is_over(entry):
                    continue
                for channel in entry.part.lines:
                    line = self._lines.get(channel)
                    if line and line[0].instance.submission is None and not self._busy[channel]:
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

    def _ready(self, entry: QueuedMotif) -> bool:
        instance, part = entry.instance, entry.part
        if instance.submission is None or entry.state != WAITING:
            return False
        for channel in part.lines:
            line = self._lines.get(channel)
            if not line or line[0] is not entry:
                return False
            busy = self._busy[channel]
            if busy:
                if not part.brief or len(busy) >= TOGETHER:
                    return False
                for other in busy:
                    if not other.part.brief:
                        return False
        return self._after_is_over(entry)

    @staticmethod
    def _after_is_over(entry: QueuedMotif) -> bool:
        """Whether the motifs of its op that a motif waits for have ended."""
        after = entry.part.after
        return not after or all(entry.instance.entries[before].state == ENDED for before in after)

    def _start(self, entry: QueuedMotif) -> None:
        for channel in entry.part.lines:
            self._lines[channel].popleft()
            self._busy[channel].append(entry)
        entry.state = RUNNING
        entry.start_us = now_us()
        # A report costs a thread's wake-up, which is only worth it where something comes after.
        entry.watched = len(entry.instance.entries) > 1 or bool(entry.instance.callbacks) or self._followed(entry)
        assert entry.instance.submission is not None
        try:
            entry.started = entry.instance.submission.start(entry)
        except Exception as error:
            self._break(error)
            return
        if entry.started is None:
            entry.state = ENDED
            entry.end_us = entry.start_us
            self._free(entry)
            entry.instance.left -= 1
            if not entry.instance.left:
                self._finished.append(entry.instance)
        elif entry.instance._event is not None:
            entry.instance.stir()

    def _break(self, error: Exception) -> None:
        """Nothing goes on. Called with the lock."""
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
        while (instance := _first(self._finished)) is not None:
            self._over(instance)
        while (instance := _first(self._broken)) is not None:
            assert self.failure is not None
            self._failed(instance, self.failure)
            instance.settle(self.failure)

    def _followed(self, entry: QueuedMotif) -> bool:
        """Whether something that was submitted stands behind a motif."""
        for channel in entry.part.lines:
            line = self._lines.get(channel)
            if line and line[0].instance.submission is not None:
                return True
        return False

    def _free(self, entry: QueuedMotif) -> None:
        for channel in entry.part.lines:
            busy = self._busy.get(channel)
            if busy and entry in busy:
                busy.remove(entry)

    def _bring(self, entry: QueuedMotif) -> None:
        instance = entry.instance
        assert instance.submission is not None
        try:
            if entry.started is not None:
                instance.submission.moved(entry)
        except Exception as error:
            self.fail(error)
            return
        with self.lock:
            entry.state = ENDED
            instance.left -= 1
            over = instance.left == 0
            if not over:
                for other in instance.entries.values():
                    if entry.part.motif in other.part.after and self._after_is_over(other):
                        other.ready_us = now_us()
                self._advance()
                self._measure_held()
        if over:
            self._over(instance)
        else:
            self._finish()

    def _over(self, instance: QueuedOp) -> None:
        assert instance.submission is not None
        error: Exception | None = None
        try:
            instance.submission.over()
        except Exception as wrong:
            error = wrong
        with self.lock:
            known = self._open.pop(id(instance), None) is not None
        if known:
            instance.settle(error)


def _first(instances: deque[QueuedOp]) -> QueuedOp | None:
    """Taken out; another thread may have come first."""
    try:
        return instances.popleft()
    except IndexError:
        return None
