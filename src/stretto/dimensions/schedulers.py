"""The schedulers to compare with: the multi-rail hierarchical baseline, and Themis."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidInput, unknown
from .model import AG, COLLECTIVES, RS, Dim, check_dims, order_loads
from .schedule import MAX_CHUNKS, DimChunk, DimSchedule

CHUNKS = 64
TRACKERS = {"whole": (1, 2), "literal": (2, 1)}
"""Of an all-reduce: stage latencies that the tracker begins with, and passes of a chunk that it counts."""
THRESHOLD_PART = 16
"""Themis: loads that differ by less than a stage of this part of a chunk count as equal."""


def baseline(dims: Sequence[Dim], collective: str, nbytes: float, *, chunks: int = CHUNKS) -> DimSchedule:
    """The hierarchical algorithm over all rails: every chunk from the innermost dimension to the outermost and back."""
    check_request(collective, chunks)
    same = way(collective, tuple(range(len(dims))), 1 / chunks)
    return DimSchedule(name="baseline", dims=tuple(dims), collective=collective, nbytes=nbytes, chunks=(same,) * chunks)


def themis(
    dims: Sequence[Dim], collective: str, nbytes: float, *, chunks: int = CHUNKS, discipline: str = "scf",
    tracker: str = "whole",
) -> DimSchedule:  # fmt: skip
    """Themis' Algorithm 1: each chunk visits the least loaded dimension first, while it is still large.

    Loads closer than the threshold count as equal, and the chunk then goes as in the baseline. What the tracker of an
    all-reduce counts, the paper says in two ways: ``whole``, both passes of a chunk, as in its Fig. 7, after the
    latency of one stage; ``literal``, as Algorithm 1 and section 4.4 are written, only the reduce-scatter of a chunk,
    after the latency of the whole all-reduce. For the halves alone they are the same.

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
    """A chunk that is reduced in this order and gathered in the reverse (or in the reverse of `back`)."""
    return DimChunk(
        share=share,
        reduce_scatter=order if collective != AG else (),
        all_gather=(order if back is None else back)[::-1] if collective != RS else (),
    )


def check_request(collective: str, chunks: int) -> None:
    """Refuse what no scheduler can do."""
    if collective not in COLLECTIVES:
        raise unknown("collective", collective, COLLECTIVES)
    if not 1 <= chunks <= MAX_CHUNKS:
        raise InvalidInput(f"chunks: must be 1..{MAX_CHUNKS}, not {chunks}")
