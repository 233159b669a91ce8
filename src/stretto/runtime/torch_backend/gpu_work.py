# SPDX-License-Identifier: Apache-2.0
"""A collective on GPU memory as a `Work`: ``wait`` makes the current stream wait, as under NCCL, and not the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .cuda_clock import cuda
from .launch_queue import Launch, on_stream
from .work import NO_TIMEOUT, Future, GroupWork, Tensors

PAUSE_S = 0.0001


@dataclass(kw_only=True, eq=False)
class GpuFlight:
    """A call, or several as one, that a stream holds; `error` is set where something has ended it before its time."""

    op: str
    number: int
    launch: Launch
    submitted_on: Any
    """The stream that was current when the call came: its memory belongs to it."""
    limit_s: float
    since: float = field(default_factory=time.monotonic)
    error: Exception | None = None

    @property
    def ended(self) -> bool:
        """Whether the GPU is done with it, well or not."""
        return self.error is not None or self.launch.ended


class GpuWork(GroupWork):
    """A call on GPU memory. `stash` is memory that must live until the GPU is done with it."""

    def __init__(
        self, flight: GpuFlight, tensors: Tensors, stash: object, *, check: Callable[[], object], blocks_host: bool,
        blocks_stream: bool = False,
    ) -> None:  # fmt: skip
        """`blocks_stream` says that the call itself runs on the current stream, and nobody asks for its work."""
        # First of all: from the base's constructor on, works of other threads may look at this one.
        self._flight, self._stash, self._check, self._blocks_host = flight, stash, check, blocks_host
        self._blocks_stream = blocks_stream
        super().__init__(tensors)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Make the current stream wait; every stream that uses the result needs one of its own.

        The host waits, too, where a timeout is given, and for a barrier. Raises what has ended the call.
        """
        self._check_process()
        flight = self._flight
        self._raise_error()
        stream = cuda.current_stream(flight.launch.stream.device)
        if stream != flight.launch.stream:
            stream.wait_event(flight.launch.end)
        if stream == flight.submitted_on:
            self._stash = None
            if self._blocks_stream:
                # What the stream does next comes after the call: the caller may have the memory back now, and
                # has it back at the same point on all ranks.
                self._tensors = []
        if (timeout > NO_TIMEOUT or self._blocks_host) and not flight.launch.capture:
            self._wait_on_host(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether the GPU has done it, well or not."""
        return self._flight.ended

    def exception(self) -> Exception | None:
        """What has ended the call, where that was not its end."""
        return self._flight.error

    @property
    def forgettable(self) -> bool:
        """Whether its tensors need not be kept for its sake."""
        # A thread that captures a graph must not ask for events outside of it.
        return not cuda.is_current_stream_capturing() and self._flight.ended

    def strip(self) -> None:
        """Let go of everything but whether it went well."""
        self._tensors, self._stash, self._future = [], None, None

    def _block(self, timeout: timedelta) -> bool:
        return self.wait(timeout)

    def _poll(self) -> bool:
        return self._flight.ended

    def _raise_error(self) -> None:
        if self._flight.error is not None:
            raise self._flight.error

    def _wait_on_host(self, timeout: timedelta) -> None:
        flight = self._flight
        deadline = time.monotonic() + timeout.total_seconds() if timeout > NO_TIMEOUT else float("inf")
        while not flight.ended:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the operation did not end within {timeout.total_seconds():g} s")
            time.sleep(PAUSE_S)
        # The kernel may have ended because the call was given up a moment ago.
        self._check()
        self._raise_error()

    def _make_future(self) -> Future:
        flight, tensors = self._flight, self._tensors
        stream = flight.launch.stream
        done: Future = torch.futures.Future(devices=[stream.device])
        # A future remembers where the current stream stands, and whoever waits for it makes their stream wait.
        with on_stream(stream):
            done.set_result(tensors)
        if flight.error is None:
            return done

        def value(_: Future) -> Tensors:
            # An exception set on a future is invisible to C++; one raised in a callback is not.
            assert flight.error is not None
            raise flight.error

        child: Future = done.then(value)
        return child


class GpuWorks(GroupWork):
    """Several calls on GPU tensors as one, ours and NCCL's."""

    def __init__(self, works: Sequence[dist.Work], device: torch.device) -> None:
        self._works, self._device = list(works), device
        super().__init__([tensor for work in works for tensor in work.result()])

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Make the current stream wait for all of them."""
        return all([work.wait(timeout) if timeout > NO_TIMEOUT else work.wait() for work in self._works])

    def is_completed(self) -> bool:
        """Whether the GPU is done with all of them."""
        return self._poll()

    def exception(self) -> Exception | None:
        """What has ended the first of them that did not end well."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    @property
    def forgettable(self) -> bool:
        """Whether its tensors need not be kept for its sake: each work keeps its own."""
        return True

    def strip(self) -> None:
        """Each work keeps what it needs."""

    def _block(self, timeout: timedelta) -> bool:
        return self.wait(timeout)

    def _poll(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def _make_future(self) -> Future:
        done: Future = torch.futures.Future(devices=[self._device])
        with cuda.stream(cuda.Stream(self._device)):
            self.wait()
            done.set_result(self._tensors)
        return done
