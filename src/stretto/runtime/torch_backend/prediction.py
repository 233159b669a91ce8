# SPDX-License-Identifier: Apache-2.0
"""How long the executor should take for a program: the runtime ``executor``, with slices of a given length."""

from __future__ import annotations

from dataclasses import replace

from ...cluster import Cluster
from ...programs.lowered import Lowered
from ...simulator.priced import PricedRun, run_priced
from ...simulator.runtimes import PRESETS


def predict(lowered: Lowered, cluster: Cluster, *, nbytes: float, message_bytes: int) -> PricedRun:
    """Simulate a lowered program as the executor runs it: slice behind slice, connections sharing links fairly.

    Waiting for a processor is not in it, and neither are copies and reductions inside a rank.

    >>> from stretto.algorithms import algorithm
    >>> four = Cluster.preset("ring", nodes=4, gb_per_s=1.0, alpha_us=1.0)
    >>> ring = algorithm("ring", "all_gather", 4).lower()
    >>> round(predict(ring, four, nbytes=4e6, message_bytes=1 << 18).total_us)
    3012

    Args:
        lowered: The program.
        cluster: The cluster.
        nbytes: The size of the call.
        message_bytes: The size of a slice.

    Returns:
        The times.
    """
    return run_priced(lowered, cluster, nbytes=nbytes, runtime=replace(PRESETS["executor"], slice_bytes=message_bytes))
