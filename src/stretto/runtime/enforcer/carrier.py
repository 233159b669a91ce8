"""Who moves a motif's data: our executor, with a communicator for each lane of a plan."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Protocol, TypeVar

import torch

from ...errors import PlanMismatch, StrettoError
from ...programs import Lowered, Program
from ...programs.lower import lower
from ..executor.executor import DTYPES, Executor, LoadedProgram
from .memory import RowLayout, StagedBuffers
from .parts import RankMotif
from .pieces import MotifBinding
from .sequencer import ActiveMotif, QueuedMotif

SLOTS = 6
"""Plans that follow each other use different communicators, so that one can run out while the next begins."""
LANES = 20
MAX_NUMBER = (1 << 16) - 1
MAX_KEPT = 1024
RESERVED = SLOTS * LANES + 1
TICK_S = 0.25
LATE_S = 0.002

Ended = Callable[[QueuedMotif], None]
K = TypeVar("K")
V = TypeVar("V")


class LoadedMotif(Protocol):
    """A task made ready for one carrier."""

    @property
    def layout(self) -> RowLayout:
        """Its memory."""


class Carrier(Protocol):
    """Runs the tasks of plans. Several plans may be loaded, each under its number."""

    programs: bool
    """Whether it runs programs; else it has algorithms of its own."""
    averages: bool
    """Whether a reduction can be an average."""

    def load(self, number: int, part: RankMotif, task: MotifBinding) -> LoadedMotif:
        """Make a task ready."""

    def start(
        self, loaded: LoadedMotif, staged: StagedBuffers, dtype: str, op: str, entry: QueuedMotif, *, blocking: bool
    ) -> ActiveMotif:
        """Run it; with `blocking` the caller waits at once. The end of a `watched` entry is reported."""

    def watch(self, entry: QueuedMotif) -> None:
        """Report the end of an entry that was started without."""

    def agree(self, values: Sequence[int]) -> PendingMaximum:
        """Begin to take the maximum of each value over all ranks; all ranks call it in the same order."""

    def unload(self, number: int) -> None:
        """Forget a plan."""

    def close(self) -> None:
        """End its threads."""


class PendingMaximum(Protocol):
    """A maximum under way."""

    def over(self, timeout_s: float) -> bool:
        """Whether it has ended, well or not, within a time."""

    def wait(self) -> list[int]:
        """The values, once all ranks have given theirs."""


class ExecutorMotif:
    """A program as the executor has it."""

    __slots__ = ("handle", "layout")

    def __init__(self, handle: LoadedProgram, layout: RowLayout) -> None:
        self.handle, self.layout = handle, layout


class ExecutorCarrier:
    """Our executor: every lane is a communicator, a motif's channels are networks."""

    programs = averages = True

    def __init__(
        self, executor: Executor, ended: Ended, *, networks: Sequence[str], first: int, timeout_s: float,
        generation: int = 0,
    ) -> None:  # fmt: skip
        self._executor, self._ended, self._timeout_s = executor, ended, timeout_s
        # Works of a plan are numbered from a place of its own: what used a communicator before does not matter.
        self._base = generation << 16
        self._networks, self._first = networks, first
        # Both by the ids of programs, which are theirs alone while they are kept here.
        self._handles: dict[tuple[int, int, int], tuple[Program, LoadedProgram]] = {}
        self._lowered: dict[int, tuple[Program, Lowered]] = {}
        self._running: dict[int, QueuedMotif] = {}
        self._late: SimpleQueue[QueuedMotif | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._fence: LoadedProgram | None = None

    def load(self, number: int, part: RankMotif, task: MotifBinding) -> ExecutorMotif:
        """Make a task ready; a program that many motifs run is loaded once for each lane."""
        assert task.program is not None
        if part.lane >= LANES:
            raise PlanMismatch(f"the plan needs more than {LANES} communicators")
        key = (number, id(task.program), part.lane)
        found = self._handles.get(key)
        if found is None:
            networks = [channel for channel in part.channels if channel in self._networks]
            handle = self._executor.load(
                self._lower(task.program), ranks=part.leaf.ranks, channels=networks or None,
                communicator=self._first + 1 + number % SLOTS * LANES + part.lane,
                first_number=(self._base + number) << 32, by_call=task.exchange is not None,
            )  # fmt: skip
            found = task.program, handle
            _keep(self._handles, key, found)
        return ExecutorMotif(found[1], RowLayout.of(task))

    def _lower(self, program: Program) -> Lowered:
        """Plans share programs, so each is lowered once."""
        found = self._lowered.get(id(program))
        if found is None:
            found = program, lower(program)
            _keep(self._lowered, id(program), found)
        return found[1]

    def start(
        self, loaded: LoadedMotif, staged: StagedBuffers, dtype: str, op: str, entry: QueuedMotif, *, blocking: bool
    ) -> ActiveMotif:
        """Run it; its end is reported by a thread that sleeps in C++."""
        assert isinstance(loaded, ExecutorMotif)
        if loaded.layout.task.exchange is not None:
            return self._start_exchange(loaded, staged, entry, blocking)
        size = DTYPES[dtype]
        ends = [0 if view is None else view[0].data_ptr() + view[1] * size for view in (staged.source, staged.target)]
        return self._start(loaded, ends[0], ends[1], dtype, op, entry, blocking, staged)

    def start_on(
        self, loaded: ExecutorMotif, tensor: torch.Tensor, dtype: str, op: str, entry: QueuedMotif, *, blocking: bool
    ) -> ActiveMotif:
        """The same for a motif that works in place on a tensor without gaps."""
        assert loaded.layout.place is not None
        _, read, _, written, _ = loaded.layout.place
        begin, size = tensor.data_ptr(), DTYPES[dtype]
        return self._start(loaded, begin + read * size, begin + written * size, dtype, op, entry, blocking, tensor)

    def _start(
        self, loaded: ExecutorMotif, read: int, written: int, dtype: str, op: str, entry: QueuedMotif, blocking: bool,
        keep: object,
    ) -> ActiveMotif:  # fmt: skip
        count = loaded.layout.task.count
        if not entry.watched:
            return self._executor.start(
                loaded.handle, read, written, count, dtype, op, timeout_s=self._timeout_s, blocking=blocking, keep=keep
            )
        if self._thread is None:
            self._begin()
        with self._lock:
            work = self._executor.start(
                loaded.handle, read, written, count, dtype, op, timeout_s=self._timeout_s, keep=keep, notify=True
            )
            self._running[work.id] = entry
        return work

    def _start_exchange(
        self, loaded: ExecutorMotif, staged: StagedBuffers, entry: QueuedMotif, blocking: bool
    ) -> ActiveMotif:
        """An all-to-all with splits: its pieces are wherever they are in the op's input and output."""
        gives, takes = _extents(loaded, staged)
        if not entry.watched:
            return self._executor.start_pieces(
                loaded.handle, gives, takes, timeout_s=self._timeout_s, blocking=blocking, keep=staged
            )
        if self._thread is None:
            self._begin()
        with self._lock:
            work = self._executor.start_pieces(
                loaded.handle, gives, takes, timeout_s=self._timeout_s, keep=staged, notify=True
            )
            self._running[work.id] = entry
        return work

    def watch(self, entry: QueuedMotif) -> None:
        """A second thread waits for those that were started without a report."""
        if self._thread is None:
            self._begin()
        self._late.put(entry)

    def agree(self, values: Sequence[int]) -> PendingMaximum:
        """On a communicator of its own."""
        from ...algorithms import algorithm

        if self._fence is None:
            world = self._executor.world_size
            program = algorithm("direct", "all_reduce", world, in_place=True)
            self._fence = self._executor.load(program, communicator=self._first, first_number=self._base << 32)
        return _Agreement(self._executor, self._fence, values, self._timeout_s)

    def unload(self, number: int) -> None:
        """Forget a plan's programs."""
        # Another thread may load another plan just now.
        for key in list(self._handles):
            if key[0] == number:
                self._handles.pop(key, None)

    def close(self) -> None:
        """The executor belongs to the job; only the thread ends, before another enforcer's could miss what it hears."""
        self._closed = True
        self._late.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._run, name="stretto-enforcer", daemon=True)
        self._thread.start()
        threading.Thread(target=self._wait_late, name="stretto-enforcer-late", daemon=True).start()

    def _wait_late(self) -> None:
        waiting: list[QueuedMotif] = []
        while True:
            while not waiting or not self._late.empty():
                entry = self._late.get()
                if entry is None:
                    return
                waiting.append(entry)
            # Whoever overtakes the oldest is noticed a moment later.
            with contextlib.suppress(Exception):
                assert waiting[0].started is not None
                waiting[0].started.wait(LATE_S)
            for entry in [one for one in waiting if one.started is not None and one.started.done]:
                waiting.remove(entry)
                self._ended(entry)

    def _run(self) -> None:
        while not self._closed:
            begin = time.monotonic()
            ended = self._executor.wait_any(TICK_S)
            if not ended and time.monotonic() - begin < TICK_S / 2:
                # A closed executor answers at once; whoever closed it may still close the enforcer.
                time.sleep(TICK_S)
            with self._lock:
                entries = [entry for number in ended if (entry := self._running.pop(number, None)) is not None]
            for entry in entries:
                self._ended(entry)


def _extents(loaded: ExecutorMotif, staged: StagedBuffers) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(address, bytes) of what goes to, and comes from, each rank in the motif's window."""
    task = loaded.layout.task
    assert task.exchange is not None
    assert staged.source is not None
    assert staged.target is not None
    count, (first, last) = len(task.leaf.ranks), task.leaf.window
    me = loaded.handle.me
    given, taken = staged.source[0].data_ptr(), staged.target[0].data_ptr()
    gives = [
        (given + lo, hi - lo)
        for at, (lo, hi) in enumerate(task.exchange.gives)
        if (at - me - first) % count < last - first
    ]
    takes = [
        (taken + lo, hi - lo)
        for at, (lo, hi) in enumerate(task.exchange.takes)
        if (me - at - first) % count < last - first
    ]
    return gives, takes


def _keep(known: dict[K, V], key: K, value: V) -> None:
    """Sizes that follow the data have no end: the oldest go. What is in use is held by who uses it."""
    while len(known) >= MAX_KEPT:
        known.pop(next(iter(known)), None)
    known[key] = value


class _Agreement:
    def __init__(self, executor: Executor, handle: LoadedProgram, values: Sequence[int], timeout_s: float) -> None:
        import numpy as np

        self._values = np.array(values, np.int64)
        at = self._values.ctypes.data
        self._work = executor.start(handle, at, at, len(values), "int64", "max", timeout_s=timeout_s, keep=self._values)

    def over(self, timeout_s: float) -> bool:
        with contextlib.suppress(StrettoError):
            self._work.wait(timeout_s)
        return self._work.done

    def wait(self) -> list[int]:
        self._work.wait()
        return [int(value) for value in self._values]
