# SPDX-License-Identifier: Apache-2.0
"""What carries slices between hosts: a GPU's stream cannot send, and must not hold the GPU while it waits.

Slices are numbered from 1 on in the order in which they are posted, which is the same on all ranks. For each a thread
waits until the GPU has copied it to pinned memory, starts the network's part of it on the executor, and once that is
done on all ranks of this host lets the GPU's stream go on: so no kernel starts that would wait for a slower neighbour's
network. That thread is the executor's `Carrier`, which needs neither Python nor CUDA: whoever calls CUDA may stand
still, with the interpreter's lock, until a slice has come. Another thread, of Python's, hears of failures and looks for
lost ranks. Loads no torch.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ... import _executor

WORD = 8
LOOK_S = 0.25
"""The seconds between two questions whether a rank is lost, while a call is under way."""
REST_S = 1.0
"""The seconds between two questions whether a rank is lost, while no call is under way."""


class DeviceWords(Protocol):
    """A GPU, as far as the carrier sees it."""

    @property
    def words(self) -> tuple[int, int]:
        """Where in pinned memory is written up to which slice streams may go on, and up to which one is copied."""


class ProgressBoard:
    """How many slices each rank of a host is through with, in memory that they share."""

    def __init__(self, path: str | Path, me: int, size: int, offset: int = 0) -> None:
        """Open a file that has `board_bytes(size)` zeros from `offset` on, which is a multiple of the page size."""
        self.size, self.me = size, me
        with Path(path).open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), board_bytes(size), offset=offset)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def advance(self, number: int) -> None:
        """This rank is through with so many."""
        struct.pack_into("<q", self._memory, WORD * self.me, number)


def board_bytes(size: int) -> int:
    """The size of a board's file: whole pages."""
    return -(-WORD * size // mmap.PAGESIZE) * mmap.PAGESIZE


class NetworkProxy:
    """The threads of one group on one rank.

    Args:
        carrier: Makes the executor's thread, with the addresses of two words: up to which slice the GPU may go on, and
            up to which it has copied.
        device: The GPU, which has these words.
        error: An exception for a failure of the executor: its kind and its words.
        failed: Told of an error that ends the group's calls.
        look: Asked now and then while something is under way; raises where a rank is lost.
    """

    def __init__(
        self, carrier: Callable[[int, int], _executor.Carrier], device: DeviceWords,
        error: Callable[[int, str], Exception], failed: Callable[[Exception], None],
        look: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._carrier, self._error, self._failed, self._look = carrier(*device.words), error, failed, look
        # The carrier writes to memory of both.
        self._keep = carrier, device
        self._ended = False
        self._thread: threading.Thread | None = None

    @property
    def through(self) -> int:
        """With how many slices this rank is through."""
        return self._carrier.state()["through"]

    def state(self) -> str:
        """Where the slices are, for those who ask why nothing moves."""
        s = self._carrier.state()
        return (
            f"{s['posted']} slices posted, {s['waiting']} wait for the GPU ({s['copied']} copied), {s['running']} on "
            f"the network, {s['through']} through here, {s['lowest']} on all of the host, {s['released']} released"
        )

    def wait_for_room(self, most: int) -> None:
        """Wait until fewer than so many slices are under way: a GPU's queue has an end, and who fills it blocks."""
        while not self._carrier.wait_for_room(most, LOOK_S):
            pass

    def post(
        self, mark: int, arguments: tuple[_executor.Loaded | None, int, int, int, int, int], timeout_s: float
    ) -> int:
        """Carry one more slice once the GPU has copied it.

        Args:
            mark: What the GPU's word has come to by then.
            arguments: The program and its memory, as `Executor.arguments` gives them.
            timeout_s: How long it may take.

        Returns:
            Its number.
        """
        number = self._carrier.post(mark & 0xFFFFFFFF, *arguments, timeout_s)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="stretto-gpu-network", daemon=True)
            self._thread.start()
        return number

    def abort(self, why: str) -> None:
        """Let go of everything, so that no stream waits any longer; what is on the network ends by its own limit."""
        self._ended = True
        self._carrier.abort()

    def close(self) -> int:
        """End the threads; how many slices are still on the network, whose memory must stay."""
        self.abort("closed")
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        return self._carrier.close()

    def _run(self) -> None:
        busy = True
        while not self._ended:
            kind, why = self._carrier.wait_failure(LOOK_S if busy else REST_S)
            if self._ended:
                return
            try:
                if kind:
                    raise self._error(kind, why)
                state = self._carrier.state()
                busy = state["posted"] > state["released"]
                if busy:
                    self._look()
            except Exception as error:
                # First of all the calls are marked as failed: the GPU must not seem to have done them.
                self._failed(error)
                self.abort(str(error))
