# SPDX-License-Identifier: Apache-2.0
"""Sorts spans into tracks that can be drawn: no two spans of a track overlap."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..simulator import Timeline

MAX_TRACE_SPANS = 1_000_000
"""The largest number of spans that trace viewers open and that is written in seconds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Tracks:
    """Track j holds the spans ``order[ptr[j]:ptr[j+1]]``, sorted by start; no two of them overlap.

    A stream whose spans overlap gets several lanes: tracks with the same rank and stream, lane 0, 1, ... The arrays
    `start_ns` and `end_ns` are parallel to `order`; `left_out` counts the spans of ranks that were left out.
    """

    order: NDArray[np.intp]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    ptr: NDArray[np.intp]
    rank: NDArray[np.int64]
    stream: NDArray[np.int64]
    lane: NDArray[np.int64]
    left_out: int

    def label(self, track: int, streams: tuple[str, ...]) -> str:
        """The name of a track's stream, with a number from the second lane on."""
        lane = int(self.lane[track])
        return streams[int(self.stream[track])] + (f" #{lane + 1}" if lane else "")


def tracks(timeline: Timeline, *, max_spans: int = MAX_TRACE_SPANS) -> Tracks:
    """Assign spans to lanes; past `max_spans`, only the lowest ranks that fit are taken (at least one)."""
    start = np.rint(timeline.start_us * 1e3).astype(np.int64)
    end = np.maximum(np.rint(timeline.end_us * 1e3).astype(np.int64), start)
    order = np.lexsort((end, start, timeline.stream, timeline.rank))
    order = order[: _whole_ranks(timeline.rank[order], max_spans)]
    start, end = start[order], end[order]
    key = timeline.rank[order].astype(np.int64) * max(len(timeline.streams), 1) + timeline.stream[order]
    lane = _lanes(key, start, end)
    if lane.any():
        again = np.lexsort((np.arange(len(order)), lane, key))
        order, start, end, key, lane = order[again], start[again], end[again], key[again], lane[again]
    first = np.flatnonzero(np.concatenate([[True], (np.diff(key) != 0) | (np.diff(lane) != 0)])[: len(order)])
    return Tracks(
        order=order,
        start_ns=start,
        end_ns=end,
        ptr=np.append(first, len(order)),
        rank=key[first] // max(len(timeline.streams), 1),
        stream=key[first] % max(len(timeline.streams), 1),
        lane=lane[first],
        left_out=timeline.num_spans - len(order),
    )


def _whole_ranks(rank: NDArray[np.int32], limit: int) -> int:
    if len(rank) <= limit:
        return len(rank)
    ends = np.append(np.flatnonzero(np.diff(rank)) + 1, len(rank))
    return int(ends[max(int(np.searchsorted(ends, limit, side="right")) - 1, 0)])


def _lanes(key: NDArray[np.int64], start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """The lowest free lane for each span; spans are sorted by key, then start."""
    lane = np.zeros(len(key), np.int64)
    clash = np.flatnonzero((key[1:] == key[:-1]) & (start[1:] < end[:-1]))
    for which in np.unique(key[clash]):
        low, high = np.searchsorted(key, [which, which + 1])
        busy: list[tuple[int, int]] = []
        free: list[int] = []
        lanes = []
        for begin, finish in zip(start[low:high].tolist(), end[low:high].tolist(), strict=True):
            while busy and busy[0][0] <= begin:
                heapq.heappush(free, heapq.heappop(busy)[1])
            mine = heapq.heappop(free) if free else len(busy)
            heapq.heappush(busy, (finish, mine))
            lanes.append(mine)
        lane[low:high] = lanes
    return lane


def busy_share(timeline: Timeline, row: NDArray[np.int64], rows: int, columns: int) -> NDArray[np.float64]:
    """The share of each time slot in which each row is busy.

    Args:
        timeline: the timeline.
        row: the row of each span, 0..rows-1.
        rows: number of rows.
        columns: number of equal time slots.

    Returns:
        An array of rows x columns with values 0..1.
    """
    total = timeline.total_us
    if total <= 0 or not timeline.num_spans:
        return np.zeros((rows, columns))
    # All rows are laid one after the other on a single axis, so that one running maximum merges overlapping spans.
    begin = row * total + np.clip(timeline.start_us, 0, total)
    finish = row * total + np.clip(timeline.end_us, 0, total)
    order = np.argsort(begin, kind="stable")
    begin, finish = begin[order], np.maximum.accumulate(finish[order])
    first = np.concatenate([[True], begin[1:] > finish[:-1]])
    begin, finish = begin[first], finish[np.append(np.flatnonzero(first)[1:] - 1, len(finish) - 1)]
    done = np.concatenate([[0.0], np.cumsum(finish - begin)])
    edges = (np.arange(rows * columns + 1) * (total / columns)).astype(np.float64)
    at = np.searchsorted(begin, edges, side="right")
    partial = np.where(at > 0, np.minimum(edges, finish[at - 1]) - begin[at - 1], 0.0)
    spent = np.where(at > 0, done[at - 1] + partial, 0.0)
    share: NDArray[np.float64] = np.clip(np.diff(spent) / (total / columns), 0, 1).reshape(rows, columns)
    return share


def gb_per_s(timeline: Timeline, columns: int) -> NDArray[np.float64]:
    """The rate at which all spans together move bytes, averaged over each of `columns` equal time slots."""
    total = timeline.total_us
    moved = timeline.nbytes > 0
    if total <= 0 or not moved.any():
        return np.zeros(columns)
    begin, finish = timeline.start_us[moved], timeline.end_us[moved]
    # A span without length would have an infinite rate, so every span lasts at least a thousandth of a slot.
    length = np.maximum(finish - begin, total / columns / 1e3)
    rate = timeline.nbytes[moved] / length
    edges = np.linspace(0, total, columns + 1)
    bytes_so_far = _ramps(begin, rate, edges) - _ramps(begin + length, rate, edges)
    result: NDArray[np.float64] = np.maximum(np.diff(bytes_so_far), 0) / (total / columns) / 1e3
    return result


def _ramps(begin: NDArray[np.float64], rate: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum of ``rate * (edge - begin)`` over all spans that begin before each edge."""
    order = np.argsort(begin)
    begin, rate = begin[order], rate[order]
    slope = np.concatenate([[0.0], np.cumsum(rate)])
    offset = np.concatenate([[0.0], np.cumsum(rate * begin)])
    at = np.searchsorted(begin, edges, side="right")
    result: NDArray[np.float64] = slope[at] * edges - offset[at]
    return result
