# SPDX-License-Identifier: Apache-2.0
"""What every rank holds before a collective and must hold after it."""

from .conditions import ALL_PARTS, Collective
from .files import load_collective, save_collective
from .library import (
    COLLECTIVES,
    ROOTED,
    AllGather,
    AllReduce,
    AllToAll,
    AllToAllV,
    Broadcast,
    Gather,
    Permute,
    Reduce,
    ReduceScatter,
    Scatter,
)

__all__ = [
    "ALL_PARTS",
    "COLLECTIVES",
    "ROOTED",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "AllToAllV",
    "Broadcast",
    "Collective",
    "Gather",
    "Permute",
    "Reduce",
    "ReduceScatter",
    "Scatter",
    "load_collective",
    "save_collective",
]
