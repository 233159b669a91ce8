# SPDX-License-Identifier: Apache-2.0
"""When things happened on a GPU, on the clock of the host."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from .recording import now_us

cuda: Any = torch.cuda
"""`torch.cuda` as `Any`: its events and streams have no types."""
Event = Any
Topic = TypeVar("Topic")
"""What a note is about."""
FIRST = -1
"""Communication goes before what computes where both could run: the others wait for it."""
AGAIN_US = 1e6
"""How often both clocks are set."""
MAX_NOTES = 65536
Note = tuple[Event, Event, Callable[[float, float], object], Topic, float]


def event_of(*, timing: bool = False) -> Event:
    """A moment on a stream, not recorded yet."""
    return cuda.Event(enable_timing=timing)


class Clock(Generic[Topic]):
    """When things happened on the GPU, on the clock of the host, read once they have and without waiting."""

    def __init__(self, device: torch.device) -> None:
        # Nothing ever waits on this stream, so what is recorded there happens at that very moment.
        self._stream = cuda.Stream(device, priority=FIRST)
        self._anchor, self._anchor_us = event_of(timing=True), 0.0
        self._next: tuple[Event, float] | None = None
        self._notes: deque[Note[Topic]] = deque(maxlen=MAX_NOTES)
        self._lock = threading.Lock()
        self._anchor.record(self._stream)
        self._anchor.synchronize()
        self._anchor_us = now_us()

    def note(self, begin: Event, end: Event, then: Callable[[float, float], object], about: Topic) -> None:
        """Call `then` with both moments, some time after the second one.

        Args:
            begin: The first event.
            end: The second event.
            then: What to call, on a thread of the clock's.
            about: What the note is of; notes of a topic can be waited for.
        """
        self._notes.append((begin, end, then, about, time.monotonic()))

    def overdue(self, limit_s: float) -> Topic | None:
        """The oldest op that was given to the GPU so long ago and has not ended."""
        self.read()
        with contextlib.suppress(IndexError):
            _, _, _, about, since = self._notes[0]
            return about if time.monotonic() - since > limit_s else None
        return None

    def read(self) -> None:
        """Tell of everything that has happened."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            while self._notes and self._notes[0][1].query():
                begin, end, then, _, _ = self._notes.popleft()
                then(self._at(begin), self._at(end))
            now = now_us()
            if self._next is None and now > self._anchor_us + AGAIN_US:
                event = event_of(timing=True)
                event.record(self._stream)
                self._next = (event, now)
            elif self._next is not None and self._next[0].query():
                self._anchor, self._anchor_us = self._next
                self._next = None
        finally:
            self._lock.release()

    def _at(self, event: Event) -> float:
        return self._anchor_us + float(self._anchor.elapsed_time(event)) * 1e3
