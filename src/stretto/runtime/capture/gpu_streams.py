# SPDX-License-Identifier: Apache-2.0
"""What the streams of a job on a GPU wait for, while it is recorded.

FSDP2 gathers and reduces on streams of its own, far ahead of the application's: a call there is submitted as soon as
the place of the application's stream is reached that its stream has waited for, and the application waits for it where
its stream waits for an event of the other. So every event that is recorded, and every wait for one, is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..torch_backend.patches import EVENT_RECORD, EVENT_WAIT, apply
from .gpu_times import GpuTimes
from .tape import RecordedCall

cuda: Any = torch.cuda


@dataclass(frozen=True)
class StreamTrail:
    """What a stream stands behind: a place of the application's stream, and calls that this one has not waited for."""

    place: int = 0
    moment: Any = None
    """The event, with a time, of that place; None: before the recording."""
    calls: tuple[RecordedCall, ...] = ()

    def behind(self, other: StreamTrail) -> StreamTrail:
        """The trail of a stream that waits for another one: the later place, and the calls of both."""
        later = other if other.place > self.place else self
        return StreamTrail(later.place, later.moment, tuple(dict.fromkeys((*self.calls, *other.calls))))


class StreamTrails:
    """All streams of one process; `waits` is told the calls for which the application's stream begins to wait."""

    def __init__(self, times: GpuTimes, waits: Callable[[RecordedCall], None]) -> None:
        self._times, self._waits = times, waits
        self._place = 1
        self._trails: dict[Any, StreamTrail] = {}
        self._events: WeakKeyDictionary[Any, StreamTrail] = WeakKeyDictionary()

    def install(self) -> list[Callable[[], object]]:
        """Look at events from here on; gives what ends it."""
        return [apply(EVENT_RECORD, self._watched_record), apply(EVENT_WAIT, self._watched_wait)]

    def next_place(self) -> int:
        """A new place of the application's stream, behind all before."""
        self._place += 1
        return self._place

    def side(self) -> Any:
        """The current stream, where it is not the application's; else None."""
        stream = cuda.current_stream(self._times.device)
        return None if stream == self._times.stream else stream

    def trail(self, stream: Any) -> StreamTrail:
        """What a stream stands behind."""
        return self._trails.get(stream, StreamTrail())

    def waited(self, stream: Any, call: RecordedCall) -> None:
        """A stream that is not the application's waits for a call."""
        self._trails[stream] = self.trail(stream).behind(StreamTrail(calls=(call,)))

    def recorded(self, event: Any, stream: Any) -> None:
        """An event of the application's was recorded in a stream."""
        if stream == self._times.stream:
            self._events[event] = StreamTrail(self.next_place(), self._times.here())
        else:
            self._events[event] = self.trail(stream)

    def awaited(self, event: Any, stream: Any) -> None:
        """A stream is about to wait for an event."""
        seen = self._events.get(event)
        if seen is None:
            return
        open_calls = tuple(call for call in seen.calls if not call.waited)
        if stream != self._times.stream:
            self._trails[stream] = self.trail(stream).behind(StreamTrail(seen.place, seen.moment, open_calls))
            return
        for call in open_calls:
            self._waits(call)

    def _watched_record(self, record: Callable[..., Any]) -> Callable[..., Any]:
        def watched(event: Any, stream: Any = None) -> Any:
            done = record(event, stream) if stream is not None else record(event)
            if not self._times.records:
                self.recorded(event, self._or_current(stream))
            return done

        return watched

    def _watched_wait(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def watched(event: Any, stream: Any = None) -> Any:
            self.awaited(event, self._or_current(stream))
            return wait(event, stream) if stream is not None else wait(event)

        return watched

    def _or_current(self, stream: Any) -> Any:
        return stream if stream is not None else cuda.current_stream(self._times.device)
