# SPDX-License-Identifier: Apache-2.0
"""Copies between the GPUs of this host and the memory of its sockets, timed by PyTorch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...errors import InvalidInput
from .inside import NBYTES, HostCopy

SOCKETS = Path("/sys/devices/system/node")


class TorchHostMeter:
    """Measures the GPUs that this process sees; a `HostMeter`.

    NICs are left out: PyTorch copies nothing from them. With ``device="cpu"`` (for tests) a GPU's memory is the host's,
    and copies that should run at once run one after the other.
    """

    nics: tuple[str, ...] = ()

    def __init__(self, device: str = "cuda", gpus: int | None = None) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise InvalidInput("probe: PyTorch sees no GPUs here")
        self.device = device
        self.gpus = torch.cuda.device_count() if gpus is None else gpus
        self._cpus = _sockets()
        self.sockets = len(self._cpus)
        self._memory = cache(self._allocated)

    def copies(self, copies: Sequence[HostCopy], times: int) -> NDArray[np.float64]:
        """See `HostMeter.copies`."""
        found = np.array([self._once(copies) for _ in range(times + 1)])
        return found[1:]  # the first one warms up

    def _once(self, copies: Sequence[HostCopy]) -> list[float]:
        ends = [(self._memory(c.src, at, 0)[: c.nbytes], self._memory(c.dst, at, 1)[: c.nbytes])
                for at, c in enumerate(copies)]  # fmt: skip
        if self.device != "cuda":
            return [_timed_us(src, dst) for src, dst in ends]
        queues = [torch.cuda.Stream(_gpu_of(src, dst)) for src, dst in ends]  # type: ignore[no-untyped-call]
        marks = []
        for at in range(self.gpus):
            torch.cuda.synchronize(at)
        for queue, (src, dst) in zip(queues, ends, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            with torch.cuda.stream(queue):
                begin.record()
                dst.copy_(src, non_blocking=True)
                end.record()
            marks.append((begin, end))
        for _, end in marks:
            end.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in marks]

    def _allocated(self, end: str, number: int, side: int) -> torch.Tensor:
        """Memory for an end of copy `number`, for its source (0) or target (1)."""
        if end.startswith("gpu"):
            where = f"cuda:{end[3:]}" if self.device == "cuda" else "cpu"
            return torch.zeros(NBYTES, dtype=torch.uint8, device=where)
        with _on(self._cpus[int(end[3:])]):  # whoever writes a page first decides on its socket
            return torch.zeros(NBYTES, dtype=torch.uint8, pin_memory=self.device == "cuda")


def _timed_us(src: torch.Tensor, dst: torch.Tensor) -> float:
    begun = time.perf_counter()
    dst.copy_(src)
    return max(1e6 * (time.perf_counter() - begun), 1e-3)


def _gpu_of(src: torch.Tensor, dst: torch.Tensor) -> torch.device:
    return src.device if src.is_cuda else dst.device


def _sockets() -> list[frozenset[int]]:
    """The processors of each socket (NUMA node) that this process may use."""
    mine = os.sched_getaffinity(0)
    found = []
    for path in sorted(SOCKETS.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:])):
        cpus: set[int] = set()
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1)) if first else set()
        if cpus & mine:
            found.append(frozenset(cpus & mine))
    return found or [frozenset(mine)]


@contextlib.contextmanager
def _on(cpus: frozenset[int]) -> Iterator[None]:
    """Run on some processors."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
