# SPDX-License-Identifier: Apache-2.0
"""Times of a recording on a GPU: events in its streams while it lasts, read once at its end.

The host runs ahead of a GPU, so a call's place in time is where the application's stream comes to it. Nothing here
waits while iterations are recorded.
"""

from __future__ import annotations

import time
from typing import Any

import torch

cuda: Any = torch.cuda
"""`torch.cuda` as `Any`: its events and streams have no types."""


class GpuTimes:
    """Moments of one recording; `resolve` writes them, in microseconds of the host's clock, where they belong."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.stream: Any = cuda.current_stream(self.device)
        """The application's own: others that it uses wait for this one."""
        self._side: Any = cuda.Stream(self.device, priority=-1)
        self._pending: list[tuple[Any, Any, tuple[str, ...]]] = []
        self.records = False
        """Whether an event is being recorded that is not the application's."""
        self._anchor = cuda.Event(enable_timing=True)
        self._anchor.record(self._side)
        self._anchor.synchronize()
        self._anchor_us = time.perf_counter_ns() / 1000.0

    def here(self) -> Any:
        """The moment at which the application's stream comes to this place."""
        return self._moment(self.stream)

    def now_here(self) -> Any:
        """The moment at which the stream that is current comes to this place."""
        return self._moment(cuda.current_stream(self.device))

    def _moment(self, stream: Any) -> Any:
        event = cuda.Event(enable_timing=True)
        self.records = True
        event.record(stream)
        self.records = False
        return event

    def end_of(self, work: Any) -> Any:
        """The moment at which a collective ends; no stream of the application's waits for it.

        By its future: `wait` would let go of tensors that PyTorch keeps until the application waits. Raises
        `RuntimeError` where there is none.
        """
        future = work.get_future()
        with cuda.stream(self._side):
            future.wait()
            return self._moment(self._side)

    def put(self, event: Any, into: Any, *names: str) -> None:
        """Write a moment to attributes of an object, later.

        Args:
            event: A recorded CUDA event.
            into: The object.
            *names: Its attributes.
        """
        self._pending.append((event, into, names))

    def resolve(self) -> None:
        """Wait for all that was recorded, and write it down."""
        pending, self._pending = self._pending, []
        if pending:
            cuda.synchronize(self.device)
        for event, into, names in pending:
            at_us = self._anchor_us + float(self._anchor.elapsed_time(event)) * 1e3
            for name in names:
                setattr(into, name, at_us)
