# SPDX-License-Identifier: Apache-2.0
"""Streams, copies and waits of a GPU as the stages between hosts need them.

A stream waits for the network without holding an SM: in the driver, on a word in pinned memory (stream memory
operations), or where those are not supported in a host function that waits for a semaphore.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from ...errors import StrettoError, unknown

AT_LEAST = 0
"""CU_STREAM_WAIT_VALUE_GEQ, in the arithmetic of 32 bits."""
SEMAPHORE_BYTES = 64
WAITS = ("memory", "callback")


class Mark(Protocol):
    """A moment on a stream about which any thread may ask without a call to CUDA."""

    def query(self) -> bool:
        """Whether it is over."""


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
        """The stream waits until `release` has been called with at least this number."""

    def release(self, number: int) -> None:
        """Let all streams go on that wait for this number or a lower one."""

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory of the device."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Memory of the host that the device copies to and from."""


class PinnedMark:
    """A number that the GPU writes to pinned memory: CUDA's own calls may stand still, with the interpreter's lock."""

    def __init__(self, read: Callable[[], int], number: int) -> None:
        self._read, self._number = read, number

    def query(self) -> bool:
        """Whether it is over."""
        return (self._read() - self._number) & 0xFFFFFFFF < 1 << 31


class CudaDevice:
    """A GPU; `how` is "memory", "callback", or empty for what it supports (or STRETTO_GPU_WAIT says)."""

    def __init__(self, device: torch.device, how: str = "") -> None:
        self.device = device
        self._cuda: Any = torch.cuda
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._word = torch.zeros(16, dtype=torch.int32).pin_memory()
        self._flag = ctypes.c_uint32.from_address(self._word.data_ptr())
        self._semaphore = ctypes.create_string_buffer(SEMAPHORE_BYTES)
        self._libc = ctypes.CDLL(None)
        self._libc.sem_init(self._semaphore, 0, 0)
        self._posted = 0
        self._marks = [0, 0]
        self._marked = [ctypes.c_uint32.from_address(self._word.data_ptr() + 16 * (1 + place)) for place in (0, 1)]
        self._rung = [ctypes.create_string_buffer(SEMAPHORE_BYTES) for _ in self._marks]
        for semaphore in self._rung:
            self._libc.sem_init(semaphore, 0, 0)
        self.how = how or wait_option() or ("memory" if self._can_wait_on_memory() else "callback")

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
        number, on = self._marks[place], ctypes.c_void_p(stream.cuda_stream)
        if self.how == "memory":
            where = ctypes.c_uint64(self._word.data_ptr() + 16 * (1 + place))
            write = self._driver.cuStreamWriteValue32_v2
            wrong = write(on, where, ctypes.c_uint32(number & 0xFFFFFFFF), ctypes.c_uint(0))
        else:
            post, semaphore = (ctypes.cast(each, ctypes.c_void_p) for each in (self._libc.sem_post, self._rung[place]))
            wrong = self._driver.cuLaunchHostFunc(on, post, semaphore)
        if wrong:
            raise StrettoError(f"a stream cannot say where it is: CUDA error {wrong}")
        return PinnedMark(lambda: self._read_mark(place), number)

    def _read_mark(self, place: int) -> int:
        if self.how == "memory":
            return self._marked[place].value
        found = ctypes.c_int()
        self._libc.sem_getvalue(self._rung[place], ctypes.byref(found))
        return found.value

    def wait_released(self, stream: Any, number: int) -> None:
        """The stream waits until `release` has been called with at least this number."""
        on = ctypes.c_void_p(stream.cuda_stream)
        if self.how == "memory":
            wrong = self._wait_value(on, number)
        else:
            # One post for each wait: those of a stream come in the order of their numbers.
            wrong = self._driver.cuLaunchHostFunc(
                on, ctypes.cast(self._libc.sem_wait, ctypes.c_void_p), ctypes.cast(self._semaphore, ctypes.c_void_p)
            )
        if wrong:
            raise StrettoError(f"a stream cannot wait for the network: CUDA error {wrong}")

    def release(self, number: int) -> None:
        """Let all streams go on that wait for this number or a lower one."""
        self._flag.value = number & 0xFFFFFFFF
        for _ in range(number - self._posted):
            self._libc.sem_post(self._semaphore)
        self._posted = max(number, self._posted)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Memory of the device."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Memory of the host that the device copies to and from."""
        return torch.empty(nbytes, dtype=torch.uint8).pin_memory()

    def _wait_value(self, on: ctypes.c_void_p, number: int) -> int:
        where = ctypes.c_uint64(self._word.data_ptr())
        wait = self._driver.cuStreamWaitValue32_v2
        return int(wait(on, where, ctypes.c_uint32(number & 0xFFFFFFFF), ctypes.c_uint(AT_LEAST)))

    def _can_wait_on_memory(self) -> bool:
        """Whether a wait that is over before it begins is taken, and ends."""
        if not hasattr(self._driver, "cuStreamWaitValue32_v2"):
            return False
        stream, end = self.stream(), self.event()
        with self._cuda.device(self.device):
            if self._wait_value(ctypes.c_void_p(stream.cuda_stream), 0):
                return False
            end.record(stream)
            end.synchronize()
        return True


def wait_option(environment: Mapping[str, str] = os.environ) -> str:
    """STRETTO_GPU_WAIT: how streams wait for the network, "memory" or "callback"; empty where nothing is said."""
    how = environment.get("STRETTO_GPU_WAIT", "")
    if how and how not in WAITS:
        raise unknown("STRETTO_GPU_WAIT", how, WAITS)
    return how


def gpudirect() -> str:
    """Whether this host could send from GPU memory without a copy. That is found out and said, and not used yet."""
    loaded = any(os.path.isdir(f"/sys/module/{name}") for name in ("nvidia_peermem", "nv_peer_mem", "gdrdrv"))
    return "GPUDirect RDMA is there; it was never run, and data goes by way of pinned memory" if loaded else ""
