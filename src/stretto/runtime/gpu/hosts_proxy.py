# SPDX-License-Identifier: Apache-2.0
"""The thread that carries slices between hosts: a GPU's stream cannot send, and must not hold the GPU while it waits.

Slices are numbered from 1 on in the order in which they are posted, which is the same on all ranks. For each the thread
waits until the GPU has copied it to pinned memory, starts the network's part of it on the executor, and once that is
done on all ranks of this host lets the GPU's stream go on: so no kernel starts that would wait for a slower neighbour's
network. Loads no torch.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

WORD = 8
PAUSE_S = 0.00005
NETWORK_S = 0.0002
"""How long the network alone is driven before the thread looks at the GPU and its neighbours again."""
LOOK_S = 0.25
"""Between two questions whether a rank is lost."""


class Ready(Protocol):
    """A moment on a GPU's stream."""

    def query(self) -> bool:
        """Whether it is over."""


@dataclass(kw_only=True, eq=False)
class NetworkItem:
    """One slice's way between hosts."""

    number: int
    ready: Ready
    start: Callable[[], Any]
    """Starts it on the executor, and gives a `ProgramWork`."""
    work: Any = None


class ProgressBoard:
    """How many slices each rank of a host is through with, in memory that they share."""

    def __init__(self, path: str | Path, me: int, size: int, offset: int = 0) -> None:
        """Open a file that has `board_bytes(size)` zeros from `offset` on, which is a multiple of the page size."""
        self._size, self._me = size, me
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), board_bytes(size), offset=offset)

    def advance(self, number: int) -> None:
        """This rank is through with so many."""
        struct.pack_into("<q", self._memory, WORD * self._me, number)

    def lowest(self) -> int:
        """What all ranks are through with."""
        return int(min(struct.unpack_from(f"<{self._size}q", self._memory)))


def board_bytes(size: int) -> int:
    """The size of a board's file: whole pages."""
    return -(-WORD * size // mmap.PAGESIZE) * mmap.PAGESIZE


class NetworkProxy:
    """The thread of one group on one rank.

    Args:
        board: The progress of the ranks of this host.
        release: Lets the GPU's stream go on with all slices up to a number; never called by two threads at a time.
        failed: Told of an error that ends the group's calls.
        look: Asked now and then while something is under way; raises where a rank is lost.
    """

    def __init__(
        self, board: ProgressBoard, release: Callable[[int], None], failed: Callable[[Exception], None],
        look: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._board, self._release, self._failed, self._look = board, release, failed, look
        self._waiting: deque[NetworkItem] = deque()
        self._running: deque[NetworkItem] = deque()
        self._posted = self._through = self._released = 0
        self._ended = False
        self._over = ""
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def posted(self) -> int:
        """How many slices were posted."""
        return self._posted

    @property
    def through(self) -> int:
        """With how many of them this rank is through."""
        return self._through

    def state(self) -> str:
        """Where the slices are, for those who ask why nothing moves."""
        copied = sum(item.ready.query() for item in list(self._waiting))
        return (
            f"{self._posted} slices posted, {len(self._waiting)} wait for the GPU ({copied} copied), "
            f"{len(self._running)} on the network, {self._through} through here, {self._board.lowest()} on all of the "
            f"host, {self._released} released"
        )

    def wait_for_room(self, most: int) -> None:
        """Wait until fewer than so many slices are under way: a GPU's queue has an end, and who fills it blocks."""
        while self._posted - self._released >= most and not self._over:
            time.sleep(PAUSE_S)

    def post(self, ready: Ready, start: Callable[[], Any]) -> int:
        """Carry one more slice once `ready` is over; its number."""
        with self._wake:
            self._posted += 1
            item = NetworkItem(number=self._posted, ready=ready, start=start)
            if self._over:
                self._release(self._posted)
            else:
                self._waiting.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stretto-gpu-network", daemon=True)
                self._thread.start()
            self._wake.notify()
        return item.number

    def abort(self, why: str) -> None:
        """Let go of everything, so that no stream waits any longer; what is on the network ends by its own limit."""
        with self._wake:
            self._over = self._over or why
            self._waiting.clear()
            self._release(self._posted)
            self._wake.notify()

    def close(self) -> list[NetworkItem]:
        """End the thread; what is still on the network, whose memory must stay."""
        self.abort("closed")
        with self._wake:
            self._ended = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        return [item for item in self._running if item.work is not None and not item.work.done]

    def _run(self) -> None:
        looked = time.monotonic()
        while not self._ended:
            with self._wake:
                if not self._waiting and (self._over or self._released == self._posted):
                    self._wake.wait(1.0)
                    looked = time.monotonic()
                    continue
            try:
                moved = self._start() | self._end() | self._let_go()
                if not moved:
                    self._pause()
                if time.monotonic() - looked > LOOK_S:
                    looked = time.monotonic()
                    self._look()
            except Exception as error:
                self._failed(error)
                self.abort(str(error))

    def _start(self) -> bool:
        """Put on the network what the GPU has copied, in order."""
        moved = False
        while self._waiting and self._waiting[0].ready.query():
            with self._wake:
                if not self._waiting:
                    break
                item = self._waiting.popleft()
            item.work = item.start()
            self._running.append(item)
            moved = True
        return moved

    def _end(self) -> bool:
        moved = False
        while self._running and self._running[0].work.done:
            item = self._running.popleft()
            if item.work.error is not None:
                raise item.work.error
            self._through = item.number
            self._board.advance(self._through)
            moved = True
        return moved

    def _let_go(self) -> bool:
        lowest = min(self._board.lowest(), self._through)
        with self._wake:
            if lowest <= self._released or self._over:
                return False
            self._released = lowest
            self._release(lowest)
        return True

    def _pause(self) -> None:
        if self._running and not self._running[0].work.done:
            # Whoever waits drives the network.
            self._running[0].work.wait(NETWORK_S)
        else:
            time.sleep(PAUSE_S)
