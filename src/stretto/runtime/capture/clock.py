# SPDX-License-Identifier: Apache-2.0
"""Where each rank's clock stands against rank 0's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .hooks import now_us

ROUNDS = 16


@dataclass(frozen=True, kw_only=True)
class Offset:
    """What to add to a rank's time to get rank 0's, and how far that may be wrong."""

    offset_us: float = 0.0
    error_us: float = 0.0


def offsets() -> list[Offset]:
    """One for each rank, the same list on all; a collective call.

    Ranks under one kernel read the same monotonic clock. Another kernel's clock is set beside it by messages to and
    fro: the remote reading lies between sending and receiving, so the fastest round is wrong by at most half of it.
    """
    kernels: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(kernels, _kernel())
    found = [Offset() if kernel == kernels[0] else measure(rank) for rank, kernel in enumerate(kernels)]
    shared: list[list[Offset]] = [found]
    dist.broadcast_object_list(shared, src=0)
    return shared[0]


def measure(rank: int) -> Offset:
    """How far a rank's clock is behind rank 0's. All ranks may call it; only rank 0 learns the answer."""
    me = dist.get_rank()
    message = torch.zeros(1, dtype=torch.float64)
    best = Offset(error_us=float("inf"))
    for _ in range(ROUNDS):
        if me == 0:
            sent_us = now_us()
            dist.send(message, rank)
            dist.recv(message, rank)
            took_us = now_us() - sent_us
            if took_us / 2 < best.error_us:
                best = Offset(offset_us=sent_us + took_us / 2 - message.item(), error_us=took_us / 2)
        elif me == rank:
            dist.recv(message, 0)
            message.fill_(now_us())
            dist.send(message, 0)
    return best


def _kernel() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else f"rank {dist.get_rank()}"
