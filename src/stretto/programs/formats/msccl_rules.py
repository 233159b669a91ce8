# SPDX-License-Identifier: Apache-2.0
"""Names and limits of the two MSCCL runtimes."""

from __future__ import annotations

from ..lower_blocks import MAX_BLOCKS_PER_CHANNEL
from ..lower_emit import MAX_COUNT

__all__ = ["MAX_BLOCKS_PER_CHANNEL", "MAX_COUNT"]

DIALECTS = ("new", "old")
PROTOCOLS = ("Simple", "LL", "LL128")
MAX_CHANNELS = 32
MAX_NAME = 63
MAX_STEPS = 256
MAX_BLOCKS = {"old": 216, "new": MAX_BLOCKS_PER_CHANNEL * MAX_CHANNELS}
OLD_MAX_BYTES = 1 << 35

NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "all_to_all": "alltoall",
}
"""The collectives that both dialects spell alike; the spelling of all others differs."""
NEW_NAMES = NAMES | {
    "reduce_scatter": "reducescatter",
    "all_to_all_v": "alltoallv",
    "gather": "gather",
    "scatter": "scatter",
}
OLD_NAMES = NAMES | {"reduce_scatter": "reduce_scatter"}
