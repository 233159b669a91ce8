# SPDX-License-Identifier: Apache-2.0
"""The schedulers that Stretto's is compared with: the multi-rail hierarchical baseline, and Themis."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidInput, unknown
from .model import AG, COLLECTIVES, RS, Dim, check_dims, order_loads
from .schedule import MAX_CHUNKS, DimChunk, DimSchedule

CHUNKS = 64
TRACKERS = {"whole": (1, 2), "literal": (2, 1)}
"""For an all-reduce, the number of stage latencies that the tracker begins with, and the passes that it counts."""
THRESHOLD_PART = 16
"""Themis treats loads as equal that differ by less than a stage of 1/THRESHOLD_PART of a chunk."""


def baseline(dims: Sequence[Dim], collective: str, nbytes: float, *, chunks: int = CHUNKS) -> DimSchedule:
    """The hierarchical algorithm over all rails: every chunk goes from the innermost dimension outwards and back.

    Args:
        dims: The dimensions, 1..8.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        nbytes: The bytes of the larger buffer of a device, > 0.
        chunks: How many chunks, 1..65536.

    Returns:
        The schedule, called "baseline".
    """
    check_request(collective, chunks)
    same = way(collective, tuple(range(len(dims))), 1 / chunks)
    return DimSchedule(name="baseline", dims=tuple(dims), collective=collective, nbytes=nbytes, chunks=(same,) * chunks)


def themis(
    dims: Sequence[Dim], collective: str, nbytes: float, *, chunks: int = CHUNKS, discipline: str = "scf",
    tracker: str = "whole",
) -> DimSchedule:  # fmt: skip
    """Themis' Algorithm 1: each chunk visits the least loaded dimension first, while it is still large.

    Loads closer than the threshold count as equal, and the chunk then goes as in the baseline. The paper describes the
    tracker of an all-reduce in two ways: ``whole`` counts both passes of a chunk, as in its Fig. 7, after the latency
    of one stage; ``literal`` counts, as Algorithm 1 and section 4.4 are written, only the reduce-scatter of a chunk,
    after the latency of the whole all-reduce. For a reduce-scatter or an all-gather alone the two are the same.

    Args:
        dims: The dimensions, 1..8.
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        nbytes: The bytes of the larger buffer of a device, > 0.
        chunks: How many chunks, 1..65536.
        discipline: The queue discipline of the schedule, "scf" or "fifo" in the paper.
        tracker: "whole" or "literal".

    Returns:
        The schedule, called ``themis_`` and the discipline.

    Raises:
        InvalidInput: An argument is out of range.

    >>> dims = [Dim(kind="switch", size=4, gb_per_s=100, step_us=0), Dim(kind="switch", size=4, gb_per_s=50, step_us=0)]
    >>> [chunk.reduce_scatter for chunk in themis(dims, "all_reduce", 256e6, chunks=4).chunks]
    [(0, 1), (1, 0), (0, 1), (0, 1)]
    """
    check_request(collective, chunks)
    dims = check_dims(dims)
    size = nbytes / chunks
    alone = collective != "all_reduce"
    if tracker not in TRACKERS:
        raise unknown("tracker", tracker, TRACKERS)
    begin, passes = (1, 1) if alone else TRACKERS[tracker]
    loads = [begin * dim.latency_us for dim in dims]
    ways = []
    for _ in range(chunks):
        least = min(range(len(dims)), key=lambda at: loads[at])
        threshold = dims[least].wire_bytes(RS, size / THRESHOLD_PART, alone=alone) / dims[least].bytes_per_us
        order = tuple(range(len(dims)))
        if max(loads) - min(loads) >= threshold:
            order = tuple(sorted(order, key=lambda at: loads[at]))
        ways.append(way(collective, order, 1 / chunks))
        for at, load in enumerate(order_loads(dims, order, size, alone=alone)):
            loads[at] += load * passes
    return DimSchedule(
        name=f"themis_{discipline}", dims=dims, collective=collective, nbytes=nbytes, chunks=tuple(ways),
        discipline=discipline,
    )  # fmt: skip


def way(collective: str, order: tuple[int, ...], share: float, back: tuple[int, ...] | None = None) -> DimChunk:
    """A chunk that is reduced in one order and gathered in the reverse of that or of another order.

    Args:
        collective: "all_reduce", "reduce_scatter" or "all_gather".
        order: The dimensions of the reduce-scatter stages.
        share: The chunk's share of the data, > 0 and at most 1.
        back: The order whose reverse the all-gather stages take; `order` when not given.

    Returns:
        The chunk, without the stages that the collective does not have.
    """
    return DimChunk(
        share=share,
        reduce_scatter=order if collective != AG else (),
        all_gather=(order if back is None else back)[::-1] if collective != RS else (),
    )


def check_request(collective: str, chunks: int) -> None:
    """Refuse an unknown collective, and a number of chunks out of range."""
    if collective not in COLLECTIVES:
        raise unknown("collective", collective, COLLECTIVES)
    if not 1 <= chunks <= MAX_CHUNKS:
        raise InvalidInput(f"chunks: must be 1..{MAX_CHUNKS}, not {chunks}")
