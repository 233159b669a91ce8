# SPDX-License-Identifier: Apache-2.0
"""What ran on this rank: the choice that was made for every kind of call, and, while recording, when each call ran."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from ...errors import InvalidInput
from ...process_state import STATE, ProcessPart
from ...simulator import Timeline

log = logging.getLogger("stretto.torch")
MAX_CHOICES = 4096
MAX_SPANS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which program ran for a kind of call, and why no other did.

    `program` is its name, or empty where the wrapped `backend` ran the call. `calls` counts those that were alike:
    same group, collective, size, dtype and reduction.
    """

    op: str
    group: str
    nbytes: int
    dtype: str
    reduce: str
    backend: str
    program: str
    why: str
    rejected: tuple[tuple[str, str], ...] = ()
    calls: int = 1

    def __str__(self) -> str:
        what = f"{self.op}{f' {self.reduce}' if self.reduce else ''} of {self.nbytes} bytes {self.dtype}"
        where = "GPU memory" if self.backend == "gpu" else "the executor"
        ran = f"program {self.program} on {where}" if self.program else self.backend
        others = "".join(f"; not {name}: {reason}" for name, reason in self.rejected)
        return f"{what} in group {self.group}: {ran} ({self.why}{others}), {self.calls} calls"


class Ledger(ProcessPart):
    """The choices of this process, oldest first; of very many kinds the oldest are forgotten."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: OrderedDict[Choice, int] = OrderedDict()
        self._last: Choice | None = None
        self._said: set[tuple[str, str]] = set()

    def after_fork(self) -> None:
        """A thread of the parent may have held the lock."""
        self._lock = threading.Lock()

    def add(self, choice: Choice, said: str = "", *, loud: bool = True) -> None:
        """Count a call; a delegated one is logged the first time for what is `said` (its op) and the reason.

        One rank of a group is `loud`: all would say the same.

        Args:
            choice: What was decided.
            said: What is logged as delegated; empty: nothing.
            loud: Whether this rank speaks for its group.
        """
        with self._lock:
            self._counts[choice] = self._counts.get(choice, 0) + 1
            self._last = choice
            if len(self._counts) > MAX_CHOICES:
                self._counts.popitem(last=False)
            new = bool(said) and (said, choice.why) not in self._said
            if new:
                self._said.add((said, choice.why))
        if new:
            # Most scripts set no logging up, and then nothing else says whose line it is.
            level = logging.WARNING if loud else logging.INFO
            log.log(level, "stretto: %s goes to %s: %s", said, choice.backend, choice.why)

    def last(self) -> Choice | None:
        """The choice for the latest call."""
        with self._lock:
            last = self._last
            return None if last is None else replace(last, calls=self._counts.get(last, 1))

    def all(self) -> list[Choice]:
        """Every kind of call so far."""
        with self._lock:
            return [replace(choice, calls=count) for choice, count in self._counts.items()]

    def clear(self) -> None:
        """Forget all choices."""
        with self._lock:
            self._counts.clear()
            self._last = None


class Recording:
    """Spans as they end; `timeline` is there after the block."""

    def __init__(self) -> None:
        self._begin_us = now_us()
        self._spans: list[tuple[str, str, float, float, int]] = []
        self._open = 0
        self._change = threading.Condition()
        self._left_out = 0
        self._rank = 0
        self._timeline: Timeline | None = None

    @property
    def timeline(self) -> Timeline:
        """What ran on this rank inside the block; times count from its begin."""
        if self._timeline is None:
            raise InvalidInput("timeline: is there after the `with` block of stretto.torch.record has ended")
        return self._timeline

    def start(self, name: str, stream: str, nbytes: int) -> Callable[[float | None], None]:
        """A call begins; call what this returns when it has ended, with how long it took where that is known.

        Args:
            name: The name of the span.
            stream: The row that it is shown in.
            nbytes: Its size.

        Returns:
            To be called at its end.
        """
        begin_us, span = now_us(), self.expect(name, stream, nbytes)

        def ended(elapsed_us: float | None) -> None:
            span(begin_us, now_us() if elapsed_us is None else begin_us + elapsed_us)

        return ended

    def expect(self, name: str, stream: str, nbytes: int) -> Callable[[float, float], None]:
        """A call comes whose times are known later; call what this returns with its begin and end.

        Args:
            name: What the span is called.
            stream: The group that the call belongs to.
            nbytes: Its size.

        Returns:
            A function that takes both times, in microseconds of `now_us`.
        """
        with self._change:
            self._open += 1

        def ended(begin_us: float, end_us: float) -> None:
            with self._change:
                if len(self._spans) < MAX_SPANS:
                    self._spans.append((name, stream, begin_us, end_us, nbytes))
                else:
                    self._left_out += 1
                self._open -= 1
                self._change.notify_all()

        return ended

    def finish(self, rank: int, settle_s: float) -> None:
        """Wait a little for calls that nobody has waited for, then make the timeline."""
        with self._change:
            self._change.wait_for(lambda: not self._open, settle_s)
            spans = sorted(self._spans, key=lambda span: span[2])
            unfinished = self._open
        names = _numbered([span[0] for span in spans])
        streams = _numbered([span[1] for span in spans])
        facts = [("measured", f"rank {rank}")]
        if unfinished:
            facts.append(("unfinished", str(unfinished)))
        if self._left_out:
            facts.append(("left out", str(self._left_out)))
        self._timeline = Timeline(
            total_us=now_us() - self._begin_us,
            rank=np.full(len(spans), rank, np.int32),
            stream=np.array([streams[span[1]] for span in spans], np.int32),
            name=np.array([names[span[0]] for span in spans], np.int32),
            start_us=np.array([span[2] - self._begin_us for span in spans], np.float64),
            end_us=np.array([span[3] - self._begin_us for span in spans], np.float64),
            nbytes=np.array([span[4] for span in spans], np.float64),
            streams=tuple(streams),
            names=tuple(names),
            facts=tuple(facts),
        )


def _numbered(words: list[str]) -> dict[str, int]:
    return {word: number for number, word in enumerate(dict.fromkeys(words))}


def now_us() -> float:
    """The clock of every measured time."""
    return time.perf_counter_ns() / 1000.0


class Recordings(ProcessPart):
    """The recordings that are under way."""

    def __init__(self) -> None:
        self.open: list[Recording] = []


LEDGER = STATE.part(Ledger)
_RECORDINGS = STATE.part(Recordings)
SETTLE_S = 2.0


def current() -> Recording | None:
    """The recording that is under way, the innermost."""
    return _RECORDINGS.open[-1] if _RECORDINGS.open else None


@contextmanager
def record(rank: Callable[[], int] = lambda: 0) -> Iterator[Recording]:
    """Note when every call inside the block ran."""
    recording = Recording()
    _RECORDINGS.open.append(recording)
    try:
        yield recording
    finally:
        _RECORDINGS.open.remove(recording)
        recording.finish(rank(), SETTLE_S)
