"""The order of hops: no port waits while there is something for it to do."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SAME_MOMENT = 1e-9

Floats = NDArray[np.float64]


def dense_order(
    *,
    out_port: Sequence[int],
    in_port: Sequence[int],
    duration_us: Sequence[float],
    parent: Sequence[int],
    urgency: Sequence[float],
) -> tuple[Floats, Floats]:
    """Start and end of every hop when a port serves one at a time, and none idles while a hop could start.

    Hop j takes ``out_port[j]`` and ``in_port[j]`` (-1: neither, it is inside a host) once ``parent[j]`` has ended.
    Of those a sender could start it takes the one to the receiver with the most left to receive, and serves equal ones
    in turn; senders with the most left to send choose first. Between two ports hops go by `urgency`, the least first.
    With small hops this is what colouring the edges of the traffic does: ports with the most to do always work, so the
    busiest decides the time.
    """
    count = len(parent)
    start, end = np.zeros(count), np.zeros(count)
    children: dict[int, list[int]] = defaultdict(list)
    left: dict[int | tuple[int, int], float] = defaultdict(float)
    queue: dict[int, dict[int, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
    for j in range(count):
        if parent[j] >= 0:
            children[parent[j]].append(j)
        if out_port[j] >= 0:
            for port in (out_port[j], in_port[j], (out_port[j], in_port[j])):
                left[port] += duration_us[j]
    busy: set[int] = set()
    # An event is the end of a hop, or (as its complement) one that can begin without waiting for another.
    events: list[tuple[float, int]] = [(0.0, ~j) for j in range(count) if parent[j] < 0]
    heapq.heapify(events)
    while events:
        now = events[0][0]
        while events and events[0][0] <= now + SAME_MOMENT:
            _, what = heapq.heappop(events)
            fresh = [~what]
            if what >= 0:
                busy -= {out_port[what], in_port[what]} if out_port[what] >= 0 else set()
                fresh = children[what]
            for j in fresh:
                if out_port[j] >= 0:
                    heapq.heappush(queue[out_port[j]][in_port[j]], (urgency[j], j))
                else:
                    start[j], end[j] = now, now + duration_us[j]
                    heapq.heappush(events, (end[j], j))
        for sender in sorted((p for p in queue if p not in busy), key=lambda p: (-left[p], p)):
            ready = [p for p in queue[sender] if p not in busy]
            if not ready:
                continue
            receiver = max(ready, key=lambda p: (round(left[p], 6), left[sender, p], -p))
            _, j = heapq.heappop(queue[sender][receiver])
            if not queue[sender][receiver]:
                del queue[sender][receiver]
            if not queue[sender]:
                del queue[sender]
            busy |= {sender, receiver}
            for port in (sender, receiver, (sender, receiver)):
                left[port] -= duration_us[j]
            start[j], end[j] = now, now + duration_us[j]
            heapq.heappush(events, (end[j], j))
    return start, end
