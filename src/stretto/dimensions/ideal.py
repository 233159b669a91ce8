# SPDX-License-Identifier: Apache-2.0
"""A bound for training steps: a network whose bandwidth can be shared and interrupted at will.

Every collective has to put some bytes into any set X of dimensions, whatever the orders of its chunks: at least those
of the order that visits X last. So X is a machine on which each collective needs some time. A collective cannot begin
before its head (the longest path of ops before it, each alone and without latency), and after it at least its tail
(the longest path behind it) has to run. A machine that may interrupt its jobs does best with the longest tail first,
and its time then bounds every system. The ideal time is the largest over all X and over the longest path of ops.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from .model import RS, Dim, Part

Floats = NDArray[np.float64]
PIECES = 8
"""The pieces of a flow that cannot use all of a machine: its end alone does not say how much of it has to be late."""


@dataclass(frozen=True, kw_only=True)
class Need:
    """The needs of an op: a duration, or (where `kind` is not empty) a collective over parts of the dimensions."""

    after: tuple[int, ...]
    duration_us: float = 0.0
    kind: str = ""
    nbytes: float = 0.0
    parts: tuple[Part, ...] = ()


def relaxed(rates: Sequence[float], needs: Sequence[Need]) -> tuple[Floats, Floats, float, int]:
    """The earliest begin and end of each op, the least total time, and the op that is last to be served.

    `rates` are bytes per us of each dimension; ops may only wait for earlier ones.
    """
    sets = range(1, 1 << len(rates))
    flows = [
        [[(need.nbytes * share, most) for share, most in row] for row in _least(need.kind, need.parts, tuple(rates))]
        if need.kind
        else []
        for need in needs
    ]
    took = np.array(
        [
            need.duration_us + max((nbytes / most for row in rows for nbytes, most in row), default=0.0)
            for need, rows in zip(needs, flows, strict=True)
        ]
    )
    begin, tail = np.zeros(len(needs)), np.zeros(len(needs))
    for at, need in enumerate(needs):
        begin[at] = max((begin[other] + took[other] for other in need.after), default=0.0)
    for at in reversed(range(len(needs))):
        for other in needs[at].after:
            tail[other] = max(tail[other], tail[at] + took[at])
    end = begin + took
    total = float(end.max(initial=0.0))
    last = int(end.argmax()) if len(needs) else 0
    done = set()
    for x in sets:
        capacity = sum((rate for at, rate in enumerate(rates) if x >> at & 1), start=0.0)
        jobs = [
            (at, *piece)
            for at, rows in enumerate(flows)
            if rows
            for nbytes, most in rows[x - 1]
            for piece in _pieces(nbytes, most, capacity, float(begin[at]), float(tail[at]))
        ]
        table = np.array([job[1:] for job in jobs]).reshape(-1, 3)
        if not jobs or table.tobytes() in done:
            continue
        done.add(table.tobytes())
        found, job = longest_tail_first(*table.T)
        if found > total:
            total, last = found, int(jobs[job][0])
    return begin, end, total, last


def _pieces(nbytes: float, most: float, capacity: float, head: float, tail: float) -> Iterator[tuple[float, ...]]:
    """Head, body and tail of a flow on a machine of some capacity; a flow that cannot use all of it comes in pieces.

    A piece cannot begin before the earlier pieces could be sent, and after it the later pieces are still to be sent.
    """
    count = PIECES if most < capacity * (1 - 1e-9) else 1
    alone = nbytes / most
    for at in range(count):
        yield head + alone * at / count, nbytes / capacity / count, tail + alone * (count - 1 - at) / count


def longest_tail_first(head: Floats, body: Floats, tail: Floats) -> tuple[float, int]:
    """The least time until the last tail is over, on one machine that may interrupt its jobs.

    Args:
        head: The earliest begin of each job, >= 0.
        body: The time that each job needs on the machine, >= 0.
        tail: The time that passes after each job, off the machine, >= 0.

    Returns:
        The time, and the job whose tail is the last to end.

    >>> longest_tail_first(np.array([0.0, 1.0]), np.array([4.0, 2.0]), np.array([0.0, 10.0]))  # the second cuts in
    (13.0, 1)
    """
    order = np.argsort(head, kind="stable").tolist()
    left = body.tolist()
    ready: list[tuple[float, int]] = []
    now, total, last, at = 0.0, 0.0, 0, 0
    while at < len(order) or ready:
        if not ready:
            now = max(now, float(head[order[at]]))
        while at < len(order) and head[order[at]] <= now:
            heapq.heappush(ready, (-float(tail[order[at]]), order[at]))
            at += 1
        job = ready[0][1]
        until = float(head[order[at]]) if at < len(order) else np.inf
        if now + left[job] > until:
            left[job] -= until - now
            now = until
            continue
        heapq.heappop(ready)
        now += left[job]
        if now + tail[job] > total:
            total, last = now + float(tail[job]), job
    return total, last


@cache
def _least(kind: str, parts: tuple[Part, ...], rates: tuple[float, ...]) -> tuple[tuple[tuple[float, float], ...], ...]:
    """For each set of dimensions the flows that one byte of the collective puts into it: (least bytes, most rate)."""
    sets = range(1, 1 << len(rates))
    if kind == "all_to_all":
        return tuple(tuple((dim.all_to_all_bytes(1.0), rates[at]) for at, dim in parts if x >> at & 1) for x in sets)
    mine = sum(1 << at for at, _ in parts)
    found = {x: _fewest(kind, parts, x) for x in range(1, 1 << len(rates)) if x & ~mine == 0}
    return tuple(
        ((found[x & mine], sum(rates[at] for at, _ in parts if x >> at & 1)),) if x & mine else () for x in sets
    )


def _fewest(kind: str, parts: tuple[Part, ...], chosen: int) -> float:
    """The fewest bytes that any order sends into the chosen dimensions, by dynamic programming over visited sets."""
    dims: list[Dim] = [dim for _, dim in parts]
    alone = kind != "all_reduce"
    fewest = [0.0] + [np.inf] * ((1 << len(parts)) - 1)
    for visited in range(1 << len(parts)):
        size = 1.0
        for at, dim in enumerate(dims):
            size /= dim.size if visited >> at & 1 else 1
        for at, (number, dim) in enumerate(parts):
            if visited >> at & 1:
                continue
            sent = dim.payload_bytes(RS, size, alone=alone) if chosen >> number & 1 else 0.0
            both = visited | 1 << at
            fewest[both] = min(fewest[both], fewest[visited] + sent)
    return fewest[-1] * (1 if alone else 2)
