# SPDX-License-Identifier: Apache-2.0
"""Orders hops so that no port idles while one of its hops could start."""

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
    """Start and end of every hop when a port serves one hop at a time and none idles while a hop could start.

    Hop j can start once hop ``parent[j]`` has ended. Of the hops that a sender could start it takes one to the receiver
    with the most left to receive, and serves equal receivers in turn; senders with the most left to send choose first.
    With small hops this is an edge coloring of the traffic: ports with the most to do always work, so the busiest port
    decides the time.

    Args:
        out_port: the sending port of each hop; -1 for a hop inside a host, which takes no port.
        in_port: the receiving port of each hop; -1 for a hop inside a host.
        duration_us: microseconds of each hop.
        parent: the hop that each hop waits for; -1 for none.
        urgency: priority among hops between the same two ports, the least first.

    Returns:
        Start and end of each hop in microseconds.
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
    waiting: dict[int, set[int]] = defaultdict(set)
    """The senders that have something for each receiver."""
    # An event is the number of a hop that ends, or the complement of the number of a hop without a parent.
    events: list[tuple[float, int]] = [(0.0, ~j) for j in range(count) if parent[j] < 0]
    heapq.heapify(events)
    while events:
        now = events[0][0]
        # Only senders that have become free, or have something new, or something for a receiver that has become free.
        able: set[int] = set()
        while events and events[0][0] <= now + SAME_MOMENT:
            _, what = heapq.heappop(events)
            fresh = [~what]
            if what >= 0:
                fresh = children[what]
                if out_port[what] >= 0:
                    # Where devices are joined directly, one link is the sending port of a device and the receiving one
                    # of another.
                    for port in (out_port[what], in_port[what]):
                        busy.discard(port)
                        able.add(port)
                        able |= waiting[port]
            for j in fresh:
                if out_port[j] >= 0:
                    heapq.heappush(queue[out_port[j]][in_port[j]], (urgency[j], j))
                    waiting[in_port[j]].add(out_port[j])
                    able.add(out_port[j])
                else:
                    start[j], end[j] = now, now + duration_us[j]
                    heapq.heappush(events, (end[j], j))
        for sender in sorted((p for p in able if p in queue and p not in busy), key=lambda p: (-left[p], p)):
            ready = [p for p in queue[sender] if p not in busy]
            if not ready:
                continue
            receiver = max(ready, key=lambda p: (round(left[p], 6), left[sender, p], -p))
            _, j = heapq.heappop(queue[sender][receiver])
            if not queue[sender][receiver]:
                del queue[sender][receiver]
                waiting[receiver].discard(sender)
            if not queue[sender]:
                del queue[sender]
            busy |= {sender, receiver}
            for port in (sender, receiver, (sender, receiver)):
                left[port] -= duration_us[j]
            start[j], end[j] = now, now + duration_us[j]
            heapq.heappush(events, (end[j], j))
    return start, end
