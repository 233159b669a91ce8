# SPDX-License-Identifier: Apache-2.0
"""How long work takes on a GPU: many calls in one CUDA graph, so that launching them is not measured."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime.probe.mscclpp_ranks import graph_times_us

cuda: Any = torch.cuda
"""`torch.cuda` as `Any`: its events and graphs have no types."""
WARM_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class GpuTime:
    """The median of several rounds, and the fastest and slowest of them, for one call."""

    median_us: float
    least_us: float
    most_us: float

    @classmethod
    def of(cls, rounds_us: list[float]) -> GpuTime:
        """From the times of the rounds."""
        return cls(median_us=statistics.median(rounds_us), least_us=min(rounds_us), most_us=max(rounds_us))


def time_graph(run: Callable[[], object], meet: Callable[[], object], *, calls: int = 20, rounds: int = 9) -> GpuTime:
    """Time a call on this rank's GPU inside a CUDA graph.

    Args:
        run: Queues one call on the current stream. All ranks run the same calls.
        meet: Waits, on the host, until all ranks have come.
        calls: Calls in one graph.
        rounds: How often the graph is replayed; before each the ranks meet, and make one call that is not timed.

    Returns:
        The time of one call.
    """
    for _ in range(WARM_CALLS):
        run()
    return GpuTime.of(graph_times_us(run, calls, meet=meet, tries=rounds))


def time_calls(run: Callable[[], object], meet: Callable[[], object], *, calls: int = 5, rounds: int = 5) -> GpuTime:
    """Time a call as `time_graph` does, without a graph: launching is measured, too.

    Args:
        run: Queues one call on the current stream.
        meet: Waits until all ranks have come.
        calls: Calls between two events.
        rounds: How often they are timed.

    Returns:
        The time of one call.
    """
    for _ in range(WARM_CALLS):
        run()
    cuda.synchronize()

    def burst() -> None:
        for _ in range(calls):
            run()

    return GpuTime.of([_once(burst, meet) / calls for _ in range(rounds)])


def _once(work: Callable[[], object], meet: Callable[[], object]) -> float:
    """Microseconds on the GPU."""
    meet()
    begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
