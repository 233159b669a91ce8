# SPDX-License-Identifier: Apache-2.0
"""The schedulers by the names that benchmarks and commands use."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import unknown
from .balance import stretto
from .model import Dim
from .schedule import DimSchedule
from .schedulers import CHUNKS, TRACKERS, baseline, themis
from .simulation import IN_FLIGHT

SCHEDULERS = ("baseline", "themis_fifo", "themis_scf", "stretto")


def plan(
    system: str,
    dims: Sequence[Dim],
    collective: str,
    nbytes: float,
    *,
    chunks: int = CHUNKS,
    in_flight: int = IN_FLIGHT,
    sharing: str = "ordered",
    tracker: str = "whole",
) -> DimSchedule:
    """The schedule of one of `SCHEDULERS`.

    Args:
        system: The name of the scheduler.
        dims: The dimensions.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        nbytes: The bytes of the larger buffer of a device, > 0.
        chunks: How many chunks, 1..65536; for "stretto" the most.
        in_flight: The most stages that share a dimension; only "stretto" looks at it.
        sharing: "ordered" or "equal", as in `simulate`; only "stretto" looks at it.
        tracker: "whole" or "literal": how Themis counts the loads, as in `themis`.

    Returns:
        The schedule.

    Raises:
        InvalidInput: The scheduler is unknown, or an argument is out of range.
    """
    if system not in SCHEDULERS:
        raise unknown("scheduler", system, SCHEDULERS)
    if tracker not in TRACKERS:
        raise unknown("tracker", tracker, TRACKERS)
    if system == "baseline":
        return baseline(dims, collective, nbytes, chunks=chunks)
    if system == "stretto":
        return stretto(dims, collective, nbytes, chunks=chunks, in_flight=in_flight, sharing=sharing)
    discipline = system.removeprefix("themis_")
    return themis(dims, collective, nbytes, chunks=chunks, discipline=discipline, tracker=tracker)
