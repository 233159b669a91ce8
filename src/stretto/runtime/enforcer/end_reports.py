# SPDX-License-Identifier: Apache-2.0
"""Reports of motifs that the executor has ended, by threads that sleep in C++ until one has."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from .sequencer import ActiveMotif, QueuedMotif

TICK_S = 0.25
LATE_S = 0.002


class NumberedMotif(ActiveMotif, Protocol):
    """A motif under way that the executor knows by a number."""

    @property
    def id(self) -> int:
        """What `EndedMotifs.wait_any` calls it."""


class EndedMotifs(Protocol):
    """The executor, as far as it tells what has ended."""

    def wait_any(self, timeout_s: float) -> list[int]:
        """Sleep until motifs that were started with a notice have ended; their numbers."""


class EndReports:
    """Tells `ended` of motifs as they end. Its threads begin with the first that somebody wants to hear of."""

    def __init__(self, executor: EndedMotifs, ended: Callable[[QueuedMotif], None]) -> None:
        self._executor, self._ended = executor, ended
        self._running: dict[int, QueuedMotif] = {}
        self._late: SimpleQueue[QueuedMotif | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self, motif: QueuedMotif, start: Callable[[], NumberedMotif]) -> ActiveMotif:
        """Start a motif with a notice, whose end is reported."""
        self._run_threads()
        with self._lock:
            work = start()
            self._running[work.id] = motif
        return work

    def add_late(self, motif: QueuedMotif) -> None:
        """Report the end of a motif that was started without a notice; a second thread waits for these."""
        self._run_threads()
        self._late.put(motif)

    def close(self) -> None:
        """End the threads, before another enforcer's could miss what they hear."""
        self._closed = True
        self._late.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run_threads(self) -> None:
        if self._thread is not None:
            return
        self._thread = threading.Thread(target=self._run, name="stretto-enforcer", daemon=True)
        self._thread.start()
        threading.Thread(target=self._wait_late, name="stretto-enforcer-late", daemon=True).start()

    def _wait_late(self) -> None:
        waiting: list[QueuedMotif] = []
        while True:
            while not waiting or not self._late.empty():
                motif = self._late.get()
                if motif is None:
                    return
                waiting.append(motif)
            # A motif that ends before the oldest one is noticed a moment later.
            with contextlib.suppress(Exception):
                assert waiting[0].active is not None
                waiting[0].active.wait(LATE_S)
            for motif in [one for one in waiting if one.active is not None and one.active.done]:
                waiting.remove(motif)
                self._ended(motif)

    def _run(self) -> None:
        while not self._closed:
            begin = time.monotonic()
            ended = self._executor.wait_any(TICK_S)
            if not ended and time.monotonic() - begin < TICK_S / 2:
                # A closed executor answers at once; whoever closed it may still close the enforcer.
                time.sleep(TICK_S)
            with self._lock:
                motifs = [motif for number in ended if (motif := self._running.pop(number, None)) is not None]
            for motif in motifs:
                self._ended(motif)
