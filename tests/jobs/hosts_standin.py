# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for a GPU: streams are threads, and kernels inside a host are programs on the executor."""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from stretto.errors import PeerLost
from stretto.programs.ir import Program
from stretto.runtime.executor.executor import DTYPES, Executor, LoadedProgram


class StandinEvent:
    """Over once the stream that recorded it has come to it."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def query(self) -> bool:
        """Whether it is over."""
        return self._over.is_set()

    def set(self) -> None:
        """It is over."""
        self._over.set()

    def wait(self) -> None:
        """Until it is over."""
        assert self._over.wait(60)


class StandinMark:
    """A number in a word."""

    def __init__(self, words: Any, place: int, number: int) -> None:
        self._words, self._place, self.number = words, place, number

    def query(self) -> bool:
        """Whether it is over."""
        return bool(self._words[self._place] >= self.number)

    def set(self) -> None:
        """It is over."""
        self._words[self._place] = self.number


class StandinStream:
    """Does what it is given, one thing behind the other, on a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, what: Callable[[], object]) -> None:
        """One more thing to do."""
        self._queue.put(what)

    def _run(self) -> None:
        while True:
            self._queue.get()()


class StandinDevice:
    """The `StagingDevice` of a machine without a GPU. `delay_s` comes before every copy."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self._word = (ctypes.c_uint32 * 3)()
        self._marks = [0, 0]
        self.copied: list[tuple[str, int]] = []

    def stream(self) -> StandinStream:
        """A new stream."""
        return StandinStream()

    def event(self) -> StandinEvent:
        """A new event."""
        return StandinEvent()

    def record(self, event: StandinEvent, stream: StandinStream) -> None:
        """The event is over once everything that the stream holds is."""
        stream.add(event.set)

    def wait(self, stream: StandinStream, event: StandinEvent) -> None:
        """The stream waits for an event."""
        stream.add(event.wait)

    def copy(self, stream: StandinStream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy when the stream comes to it."""

        def copy() -> None:
            time.sleep(self.delay_s)
            target.copy_(source)

        stream.add(copy)

    def run(self, stream: StandinStream, queue: Callable[[], object]) -> None:
        """What it queues happens when the stream comes to it."""
        stream.add(queue)

    @property
    def words(self) -> tuple[int, int]:
        """Where it is written up to which slice streams may go on, and up to which one is copied."""
        at = ctypes.addressof(self._word)
        return at, at + 4

    def mark(self, stream: StandinStream, place: int) -> StandinMark:
        """A moment behind everything that the stream holds."""
        self._marks[place] += 1
        mark = StandinMark(self._word, 1 + place, self._marks[place])
        stream.add(mark.set)
        return mark

    def wait_released(self, stream: StandinStream, number: int) -> None:
        """The stream waits until the word has come to this number."""

        def wait() -> None:
            while self._word[0] < number:
                time.sleep(0.0001)

        stream.add(wait)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory."""
        return torch.full((nbytes,), 0x7F, dtype=torch.uint8)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Memory."""
        return torch.full((nbytes,), 0x7F, dtype=torch.uint8)


class StandinLegs:
    """In the place of `GpuCommunicator`: the ranks of one host, by shared memory."""

    def __init__(self, executor: Executor, ranks: list[int], communicator: int) -> None:
        self.executor, self.ranks, self.communicator = executor, ranks, communicator
        self.held_bytes, self.why = 0, ""
        self._loaded: dict[int, tuple[LoadedProgram, Program]] = {}

    def load(self, program: Program, *, dtype: str, reduce: str, nbytes: int) -> Any:
        """As `GpuCommunicator.load`."""
        if id(program) not in self._loaded:
            loaded = self.executor.load(program, ranks=self.ranks, communicator=self.communicator)
            self._loaded[id(program)] = loaded, program
        return self._loaded[id(program)][0], dtype, reduce, nbytes // DTYPES[dtype]

    def launch(self, leg: Any, input: torch.Tensor, output: torch.Tensor, *, ordered: bool) -> None:
        """As `GpuCommunicator.launch`, but done when it returns: the stream's thread calls it."""
        loaded, dtype, reduce, count = leg
        assert ordered
        size = DTYPES[dtype]
        assert loaded.buffer_elements(count) == (input.nbytes // size, output.nbytes // size)
        if self.why:
            return
        work = self.executor.start(loaded, input.data_ptr(), output.data_ptr(), count, dtype, reduce, timeout_s=30)
        # A kernel that has lost a peer ends, and what comes behind it in its stream goes on.
        with contextlib.suppress(PeerLost):
            work.wait()

    def abort(self, why: str) -> None:
        """Nothing is launched any more."""
        self.why = why

    def lost(self) -> None:
        """No kernel gives up here."""

    def close(self) -> None:
        """Nothing to give back."""
