# SPDX-License-Identifier: Apache-2.0
"""What an enforcer measures: how long iterations and motifs take, and where the application waited."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import TypedDict

from ...workload import Op
from ..torch_backend.recording import now_us
from .report import MotifReport, Timing
from .sequencer import QueuedMotif, QueuedOp
from .trial import BLOCK, ROUNDS, SIDES, Side

WINDOW, LEAST_WINDOW, WINDOW_US = 32, 5, 2e6
"""Iterations that a report looks back on; fewer where they are long, so that a change is soon seen."""
UNDER_PLAN = 256
"""Iterations under a plan that are summed up, however long they are."""
RECENT = 4
"""How many begins of iterations are remembered: a motif may run before or after its own iteration."""


class MotifTimes:
    """What was measured of a motif in the last window."""

    __slots__ = ("durations", "starts", "turns", "waits")

    def __init__(self) -> None:
        self.starts: deque[float] = deque(maxlen=WINDOW)
        self.durations: deque[float] = deque(maxlen=WINDOW)
        self.waits: deque[float] = deque(maxlen=WINDOW)
        self.turns: deque[float] = deque(maxlen=WINDOW)


class Figures(TypedDict):
    """The measured part of a `Report`."""

    iteration_us: float
    plain_us: float
    waits_us: float
    held_us: float
    motifs: tuple[MotifReport, ...]
    window: Timing | None
    plain: Timing | None
    under_plan: Timing | None
    own: Timing | None
    backend: Timing | None


class MeasuredWindow:
    """The last window of a rank. Any thread may tell and ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began_us = now_us()
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._plain: deque[float] = deque(maxlen=WINDOW)
        self._under_plan: deque[float] = deque(maxlen=UNDER_PLAN)
        self._planned = False
        self._waited = 0.0
        self._waits: deque[float] = deque(maxlen=WINDOW)
        self._held: deque[float] = deque(maxlen=WINDOW)
        self._spent: dict[tuple[int, int], MotifTimes] = {}
        self._begins: deque[float] = deque(maxlen=RECENT)
        self._had_plan = False
        self._beside: dict[Side, list[float]] = {side: [] for side in SIDES}
        """Iterations for which the plan was set aside."""

    def boundary(self, held_us: float, side: Side | None = None, *, counts: bool = True) -> None:
        """An iteration ends, the next one begins.

        Args:
            held_us: How long the plan's order held motifs back in it.
            side: Who ran it where a plan was set aside.
            counts: Whether its time counts; that of the first one does not, as nobody knows when it began.
        """
        now = now_us()
        took, self._began_us = now - self._began_us, now
        with self._lock:
            self._begins.append(now)
            waited, self._waited = self._waited, 0.0
            if side is not None:
                if counts:
                    self._beside[side].append(took)
                return
            if counts:
                self._times.append(took)
                if self._planned:
                    self._under_plan.append(took)
                if not self._had_plan:
                    self._plain.append(took)
            self._waits.append(waited)
            self._held.append(held_us)

    def changed(self, *, planned: bool) -> None:
        """Another plan, or none, is active."""
        with self._lock:
            self._times.clear()
            self._under_plan.clear()
            self._planned = planned
            self._waits.clear()
            self._held.clear()
            self._spent = {}
            self._beside = {side: [] for side in SIDES}
            self._had_plan = self._had_plan or planned

    def left(self) -> None:
        """The application does something else from here on: what was measured before does not count."""
        with self._lock:
            self._times.clear()
            self._under_plan.clear()
            self._plain.clear()
            self._had_plan = self._planned = False

    def waited(self, queued: QueuedOp, begin_us: float, end_us: float) -> None:
        """The application stood in ``wait()`` for an op: each motif is charged for what it was waited for.

        Args:
            queued: The op.
            begin_us: When the application entered ``wait()``.
            end_us: When it came back.
        """
        motifs = list(queued.motifs.values())
        if len(motifs) > 1:
            motifs.sort(key=_end_us)
        with self._lock:
            self._waited += end_us - begin_us
            at = begin_us
            for motif in motifs:
                until = min(motif.end_us, end_us)
                self._of(queued, motif.rank_motif.number).waits.append(max(until - at, 0.0))
                at = max(at, until)

    def spent(self, queued: QueuedOp, motif: int, start_us: float, end_us: float) -> None:
        """A motif ran from one moment to another.

        Args:
            queued: The op.
            motif: The number of the motif in it.
            start_us: When the motif began to move.
            end_us: When it had ended.
        """
        with self._lock:
            one = self._of(queued, motif)
            one.durations.append(end_us - start_us)
            ready_us = queued.motifs[motif].ready_us
            one.turns.append(max(start_us - ready_us, 0.0) if ready_us else 0.0)
            for begin_us in reversed(self._begins):
                if begin_us <= start_us:
                    one.starts.append(start_us - begin_us)
                    break

    def figures(self, ops: Sequence[Op]) -> Figures:
        """For a report; `ops` are those of the active plan's workload."""
        with self._lock:
            spent = [
                (key, list(one.starts), list(one.durations), list(one.waits), list(one.turns))
                for key, one in self._spent.items()
            ]
            times, plain, under_plan = list(self._times), list(self._plain), list(self._under_plan)
            waits_us, held_us = list(self._waits), list(self._held)
            done = all(len(beside) == ROUNDS * BLOCK for beside in self._beside.values())
            own, ours = (list(self._beside[side]) if done else [] for side in SIDES)
        recent = min(max(int(WINDOW_US / max(times[-1], 1.0)), LEAST_WINDOW), WINDOW) if times else WINDOW
        times, waits_us, held_us = times[-recent:], waits_us[-recent:], held_us[-recent:]
        motifs = [
            MotifReport(
                op=ops[op].name,
                motif=motif,
                start_us=_median(starts[-recent:]),
                duration_us=_median(durations[-recent:]),
                wait_us=_mean(waits[-recent:]),
                turn_us=_mean(turns[-recent:]),
            )
            for (op, motif), starts, durations, waits, turns in (sorted(spent) if ops else ())
        ]
        return Figures(
            iteration_us=_median(times), plain_us=_median(plain), waits_us=_mean(waits_us),
            held_us=_mean(held_us), motifs=tuple(motifs), window=Timing.of(times), plain=Timing.of(plain),
            under_plan=Timing.of(under_plan), own=Timing.of(own), backend=Timing.of(ours),
        )  # fmt: skip

    def _of(self, queued: QueuedOp, motif: int) -> MotifTimes:
        key = (queued.rank_op.number, motif)
        found = self._spent.get(key)
        if found is None:
            found = self._spent[key] = MotifTimes()
        return found


def _end_us(motif: QueuedMotif) -> float:
    return motif.end_us


def _median(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else 0.0
