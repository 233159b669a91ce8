# SPDX-License-Identifier: Apache-2.0
"""What a carrier on the host can be made of: a motif that a thread moves, and a maximum through the job's store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

PAUSE_S = 0.001


def as_it_is(error: Exception) -> Exception:
    """The error itself, where nothing is known that explains it."""
    return error


class BackgroundMotif:
    """A motif under way that a thread of the carrier's moves; the carrier's `start` returns it without waiting.

    The carrier has its thread call `run`, once: that moves the data, keeps the time and the error, lets go
    those who wait, and reports the end.
    """

    def __init__(
        self,
        move: Callable[[], None],
        ended: Callable[[], None],
        explain: Callable[[Exception], Exception] = as_it_is,
    ) -> None:
        """Make a motif that has not begun.

        Args:
            move: Moves the data and returns when that is done, or raises.
            ended: Called behind the end, usually ``lambda: self.site.sequencer.ended(motif)`` in the carrier's `start`.
            explain: Turns what `move` raised into what those who wait are to see.
        """
        self.error: Exception | None = None
        self.elapsed_us = 0.0
        self._move: Callable[[], None] | None = move
        self._ended, self._explain = ended, explain
        self._over = threading.Event()

    def run(self) -> None:
        """Move the data, in the thread that calls."""
        assert self._move is not None, "a motif runs once"
        begin = time.perf_counter()
        try:
            self._move()
        except Exception as wrong:
            self.error = self._explain(wrong)
        # The function that moved the motif may hold a communicator, which is to end with its plan.
        self._move = None
        self.elapsed_us = (time.perf_counter() - begin) * 1e6
        self._over.set()
        self._ended()

    @property
    def done(self) -> bool:
        """Whether the motif has ended, with or without an error."""
        return self._over.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the motif has ended; False when the time is up."""
        if not self._over.wait(timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True


class StoreMaximum:
    """A maximum under way: all ranks write their values into the job's store under the same name."""

    def __init__(self, store: Any, name: str, rank: int, size: int, values: Sequence[int]) -> None:
        """Write this rank's values.

        Args:
            store: The job's store.
            name: The same on all ranks, and new each time.
            rank: This rank.
            size: How many ranks there are.
            values: The values, as many on all ranks.
        """
        self._store, self._keys = store, [f"{name}/{other}" for other in range(size)]
        store.set(self._keys[rank], " ".join(map(str, values)))

    def over(self, timeout_s: float) -> bool:
        """Whether all ranks have written within a time."""
        deadline = time.monotonic() + timeout_s
        while not self._store.check(self._keys):
            if time.monotonic() > deadline:
                return False
            time.sleep(PAUSE_S)
        return True

    def wait(self) -> list[int]:
        """The largest of each value, once all ranks have written."""
        rows = [map(int, self._store.get(key).decode().split()) for key in self._keys]
        return [max(column) for column in zip(*rows, strict=True)]
