# SPDX-License-Identifier: Apache-2.0
"""Streams, copies and waits of a GPU as the stages between hosts need them.

A stream waits for the network without holding an SM: in the driver, on a word in pinned memory (stream memory
operations). Host functions would not do: one thread of the driver runs those of all streams, and one that waits holds
up those that would end its wait.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ...errors import StrettoError

AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ, in the arithmetic of 32 bits."""
TRY_S = 0.002
LIMIT_S = 5.0
UNSUPPORTED = "streams of this GPU cannot wait for words in memory (cuStreamWaitValue32)"


class Mark(Protocol):
    """A moment on a stream about which any thread may ask without a call to CUDA."""

    @property
    def number(self) -> int:
        """What the word of its place has come to by then."""

    def query(self) -> bool:
        """Whether the GPU has come to this place of its stream."""


class StagingDevice(Protocol):
    """What `HostsCommunicator` asks of a device. Streams and events are the device's own."""

    def stream(self) -> Any:
        """A new stream."""

    def event(self) -> Any:
        """A new event."""

    def record(self, event: Any, stream: Any) -> None:
        """The event is over once everything that the stream holds is."""

    def wait(self, stream: Any, event: Any) -> None:
        """The stream waits for an event."""

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy when the stream comes to it.

        Args:
            stream: The stream.
            target: Where to; as many elements.
            source: Where from.
        """

    def run(self, stream: Any, queue: Callable[[], object]) -> None:
        """Call something that queues work on the current stream."""

    def mark(self, stream: Any, place: int) -> Mark:
        """A moment behind everything that the stream holds; those of one place (0 or 1) are one behind the other."""

    def wait_released(self, stream: Any, number: int) -> None:
        """The stream waits until the first of `words` has come to this number."""

    @property
    def words(self) -> tuple[int, int]:
        """Where it is written up to which slice streams may go on, and up to which one is copied."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory of the device."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Memory of the host that the device copies to and from."""


class PinnedMark:
    """A number that the GPU writes to pinned memory: CUDA's own calls may stand still, with the interpreter's lock."""

    def __init__(self, word: ctypes.c_uint32, number: int) -> None:
        self._word, self.number = word, number

    def query(self) -> bool:
        """Whether the GPU has come to this place of its stream."""
        return (self._word.value - self.number) & 0xFFFFFFFF < 1 << 31


class CudaDevice:
    """A GPU whose streams wait for words in pinned memory; raises `StrettoError` where they cannot."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda: Any = torch.cuda
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._memory = torch.zeros(64, dtype=torch.int32).pin_memory()
        # Each in a cache line of its own: released, copied (place 0), ended (place 1), and one to try it out.
        self._places = [self._memory.data_ptr() + 64 * at for at in range(4)]
        self._word = [ctypes.c_uint32.from_address(place) for place in self._places]
        self._marks = [0, 0]
        self._try()

    @property
    def words(self) -> tuple[int, int]:
        """Where it is written up to which slice streams may go on, and up to which one is copied."""
        return self._places[0], self._places[1]

    def stream(self) -> Any:
        """A new stream, before those that compute where both could run."""
        return self._cuda.Stream(self.device, priority=-1)

    def event(self) -> Any:
        """A new event."""
        return self._cuda.Event()

    def record(self, event: Any, stream: Any) -> None:
        """The event is over once everything that the stream holds is."""
        event.record(stream)

    def wait(self, stream: Any, event: Any) -> None:
        """The stream waits for an event."""
        stream.wait_event(event)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy when the stream comes to it.

        Args:
            stream: The stream.
            target: Where to; as many elements.
            source: Where from.
        """
        with self._cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def run(self, stream: Any, queue: Callable[[], object]) -> None:
        """Call something that queues work on the current stream."""
        with self._cuda.stream(stream):
            queue()

    def mark(self, stream: Any, place: int) -> PinnedMark:
        """A moment behind everything that the stream holds; those of one place (0 or 1) are one behind the other."""
        self._marks[place] += 1
        self._write(stream, 1 + place, self._marks[place])
        return PinnedMark(self._word[1 + place], self._marks[place])

    def wait_released(self, stream: Any, number: int) -> None:
        """The stream waits until the word has come to this number."""
        on, where = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(self._places[0])
        wait = self._driver.cuStreamWaitValue32_v2
        wrong = wait(on, where, ctypes.c_uint32(number & 0xFFFFFFFF), ctypes.c_uint(AT_LEAST))
        if wrong:
            raise StrettoError(f"a stream cannot wait for the network: CUDA error {wrong}")

    def _write(self, stream: Any, place: int, number: int) -> None:
        on, where = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(self._places[place])
        write = self._driver.cuStreamWriteValue32_v2
        wrong = write(on, where, ctypes.c_uint32(number & 0xFFFFFFFF), ctypes.c_uint(0))
        if wrong:
            raise StrettoError(f"a stream cannot say where it is: CUDA error {wrong}")

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory of the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Memory of the host that the device copies to and from."""
        return torch.empty(nbytes, dtype=torch.uint8).pin_memory()

    def _try(self) -> None:
        """Whether a stream stands still until a word is written, and then goes on."""
        if not hasattr(self._driver, "cuStreamWaitValue32_v2"):
            raise StrettoError(UNSUPPORTED)
        stream = self.stream()
        with self._cuda.device(self.device):
            self.wait_released(stream, 1)
            self._write(stream, 3, 1)
        time.sleep(TRY_S)
        early = self._word[3].value
        self._word[0].value = 1
        deadline = time.monotonic() + LIMIT_S
        while not self._word[3].value and time.monotonic() < deadline:
            time.sleep(TRY_S)
        if early or not self._word[3].value:
            raise StrettoError(UNSUPPORTED)
        self._word[0].value = 0


def gpudirect() -> str:
    """Whether this host could send from GPU memory without a copy. That is found out and said, and not used yet."""
    loaded = any(os.path.isdir(f"/sys/module/{name}") for name in ("nvidia_peermem", "nv_peer_mem", "gdrdrv"))
    return "GPUDirect RDMA is there; it was never run, and data goes by way of pinned memory" if loaded else ""
