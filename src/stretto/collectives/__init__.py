# SPDX-License-Identifier: Apache-2.0
"""What every rank holds before a collective and must hold after it."""

from typing import TYPE_CHECKING

from ..late import late_names
from .conditions import ALL_PARTS, Collective
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

if TYPE_CHECKING:
    from . import files as files
    from .files import load_collective as load_collective
    from .files import save_collective as save_collective
else:
    __getattr__ = late_names(__name__, {"files": ".files", "load_collective": ".files", "save_collective": ".files"})

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
