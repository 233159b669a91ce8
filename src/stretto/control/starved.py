# SPDX-License-Identifier: Apache-2.0
"""How long a process wanted to run and was not let: on a busy machine a rank that seems to stand still may only wait
for a processor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path


def waited_s(pid: int | str) -> dict[str, float]:
    """For each thread of a process, how long it has been ready to run without a processor; none where that is unknown.

    Linux counts it in ``/proc/PID/task/TID/schedstat``, in nanoseconds.
    """
    found: dict[str, float] = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):
                found[task.name] = int((task / "schedstat").read_text().split()[1]) * 1e-9
    return found


class StarvedClock:
    """Counts, from its making on, the time in which some thread of a process could not run for want of a processor.

    Of the threads the one that waited longest counts, from one reading to the next: others may have run meanwhile.
    """

    def __init__(
        self, pid: int | str, *, now: Callable[[], float] = time.monotonic,
        waited: Callable[[int | str], dict[str, float]] = waited_s,
    ) -> None:  # fmt: skip
        self._pid, self._clock, self._waited = pid, now, waited
        self._begun = self._last = now()
        self._before = waited(pid)
        self._starved_s = 0.0

    @property
    def age_s(self) -> float:
        """How long ago it was made, at its last reading."""
        return self._last - self._begun

    def read(self) -> float:
        """The seconds so far; never more than have passed."""
        now, waits = self._clock(), self._waited(self._pid)
        grown = max((waits[thread] - self._before.get(thread, 0.0) for thread in waits), default=0.0)
        self._starved_s += min(max(grown, 0.0), now - self._last)
        self._last, self._before = now, waits
        return self._starved_s
