# SPDX-License-Identifier: Apache-2.0
"""In which order the calls of all groups are given to a GPU, and how many of them may be on it at a time.

A kernel that waits for its peers holds its SMs until they have come. Were more of them on a GPU than fit, one that has
started could wait for one that cannot start. So launches of all groups go through one queue per device: what would not
fit beside the launches before it first waits, on its stream, for the oldest of them.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ...process_state import STATE, ProcessPart
from .cuda_clock import cuda

MAX_WAITING = 256
RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Launch:
    """A kernel that was given to the GPU; `capture` is the number of the graph capture it belongs to, or 0."""

    stream: Any
    end: Any
    blocks: int
    capture: int

    @property
    def ended(self) -> bool:
        """Whether the GPU is done with it. What was captured runs whenever its graph does, and counts as ended."""
        return self.capture != 0 or bool(self.end.query())


class LaunchQueue:
    """The launches on one device."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.lock = threading.RLock()
        self._waiting: deque[Launch] = deque()

    def make_room(self, stream: Any, blocks: int, capture: int) -> list[Launch]:
        """Let a stream wait until so many blocks fit beside what was launched before; what it waits for.

        Args:
            stream: The stream that launches next.
            blocks: How many blocks it will take.
            capture: The number of the CUDA graph that is captured; 0: none.

        Returns:
            The launches that the stream now waits for.
        """
        if capture:
            # A capture cannot wait for what is outside of it; its own launches are in the order of its streams.
            return []
        while self._waiting and (len(self._waiting) >= MAX_WAITING or self._waiting[0].ended):
            self._waiting.popleft()
        waited = []
        held = sum(launch.blocks for launch in self._waiting)
        for launch in list(self._waiting):
            if held + blocks <= self.max_blocks:
                break
            held -= launch.blocks
            if launch.stream != stream:
                stream.wait_event(launch.end)
                waited.append(launch)
            self._waiting.remove(launch)
        return waited

    def add(self, launch: Launch) -> None:
        """Note a kernel that was launched."""
        if not launch.capture:
            self._waiting.append(launch)


class LaunchQueues(ProcessPart):
    """The queues of this process, by device."""

    def __init__(self) -> None:
        self._queues: dict[int, LaunchQueue] = {}

    def of(self, device: int, max_blocks: int) -> LaunchQueue:
        """The queue of a device; the least number of blocks that was ever given holds."""
        queue = self._queues.setdefault(device, LaunchQueue(max_blocks))
        queue.max_blocks = min(queue.max_blocks, max_blocks)
        return queue

    def job_ended(self) -> None:
        """The next job begins with none."""
        self._queues.clear()


QUEUES = STATE.part(LaunchQueues)


def capture_number(stream: Any) -> int:
    """The number of the graph capture that a stream takes part in; 0 where there is none."""
    if not cuda.is_current_stream_capturing():
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    ask = _driver("cuStreamGetCaptureInfo_v2")
    if ask is None:
        return 1
    nothing = ctypes.c_void_p()
    wrong = ask(ctypes.c_void_p(stream.cuda_stream), ctypes.byref(status), ctypes.byref(number), *[nothing] * 3)
    return int(number.value) or 1 if not wrong else 1


def ask_freely() -> None:
    """Let this thread ask for events while another one captures a graph, which otherwise ends the capture."""
    exchange = _driver("cuThreadExchangeStreamCaptureMode")
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(RELAXED)))


def _driver(name: str) -> Any:
    """A function of the CUDA driver; None where there is none of that name."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """What is queued inside goes to a stream; cheap where it is the current one."""
    if stream == cuda.current_stream(stream.device):
        yield
    else:
        with cuda.stream(stream):
            yield
