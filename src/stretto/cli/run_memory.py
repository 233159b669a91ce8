# SPDX-License-Identifier: Apache-2.0
"""What a controller that is not ours said last: it may be gone, or know nothing any more, when the job ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from ..control.messages import JobStatus
from ..control.transport import ControllerConnection
from ..errors import StrettoError
from .status import ask

EVERY_S = 2.0


class StatusWatcher:
    """Asks a controller for one job again and again, in a thread, between `start` and `last_words`."""

    def __init__(self, link: Callable[[], ControllerConnection], job: str, every_s: float = EVERY_S) -> None:
        self._link, self._job, self._every_s = link, job, every_s
        self._best: JobStatus | None = None
        self._heard_at = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="stretto-memory", daemon=True)

    def start(self) -> None:
        """Start the thread that asks the controller for its status."""
        self._thread.start()

    def last_words(self) -> tuple[JobStatus | None, str]:
        """Ask a last time.

        Returns:
            The job as far as anybody ever said, and why the controller does not say it now; empty where it does.
        """
        self._ending.set()
        self._thread.join()
        why = self._look()
        if why and self._best is not None:
            why += f"; it said last, {time.monotonic() - self._heard_at:.0f} s before the end:"
        return self._best, why

    def _loop(self) -> None:
        while not self._ending.wait(self._every_s):
            self._look()

    def _look(self) -> str:
        try:
            jobs = ask(self._link()).jobs
        except StrettoError as error:
            return str(error)
        now = next((job for job in jobs if job.job == self._job), None)
        if now is not None:
            self._best, self._heard_at = with_memory(now, self._best), time.monotonic()
        return ""


def with_memory(now: JobStatus, before: JobStatus | None) -> JobStatus:
    """A status with the timelines that an earlier one had, where it has none itself.

    A controller that was started again knows what runs, but not what was promised of it.
    """
    if before is None or before.epoch != now.epoch:
        return now
    kept: dict[str, object] = {}
    if not now.motifs and before.motifs:
        kept |= {"motifs": before.motifs, "motifs_plan": before.motifs_plan, "after": before.after}
        kept["before"] = now.before or before.before
    if not now.recorded and before.recorded:
        kept |= {"recorded": before.recorded, "about_recorded": before.about_recorded}
    if not now.predicted_us and now.plan == before.plan and before.predicted_us:
        kept |= {"predicted_us": before.predicted_us, "plan_name": before.plan_name}
    if now.split.plan is None and before.split.plan is not None:
        whole = now.split if now.split.whole_iterations else before.split
        kept["split"] = msgspec.structs.replace(
            before.split, whole_us=whole.whole_us, whole_iterations=whole.whole_iterations,
            whole_gain=whole.whole_gain or before.split.whole_gain,
        )  # fmt: skip
    return msgspec.structs.replace(now, **kept) if kept else now
