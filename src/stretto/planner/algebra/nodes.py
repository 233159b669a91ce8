# SPDX-License-Identifier: Apache-2.0
"""A training step as nodes: one for every place of a compute-op, one for every comm-op, with the waits of each.

At a place a compute-op takes that place's time and waits only for nodes there: for the same place's part of another
compute-op (for all its parts if it has none there), and for whole comm-ops. A comm-op starts at all its places at once,
so it waits for all of them. Communication that no compute-op waits for, directly or through other communication, must
still have ended `LATEST` iterations later: the first compute-op of each of its places waits for it. Without that rule,
communication slower than compute would fall behind without limit, and its buffers would pile up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import InvalidInput
from ...workload import PAIRWISE, Op, Workload

MAX_NODES = 1 << 22
LATEST = 2
"""Iterations after which communication that no compute-op waits for must have ended."""
_KEPT = "_planner_nodes"

Wait = tuple[int, int]
"""A node, and the number of iterations by which it lies before."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Nodes:
    """The nodes of a step in program order, as parallel columns."""

    op: tuple[int, ...]
    place: tuple[int, ...]
    """The place of a compute-op; -1 for a comm-op, which is at several places."""
    us: tuple[float, ...]
    """Microseconds of a compute-op at its place; 0 for a comm-op."""
    stream: tuple[int, ...]
    """The number of the (place, stream) that a compute-op holds; -1 for a comm-op."""
    num_streams: int
    of_op: tuple[range, ...]
    """The nodes of each op."""
    waits: tuple[tuple[Wait, ...], ...]
    """The waits of each node, without those that the order of its stream gives."""

    @property
    def stream_us(self) -> list[float]:
        """Microseconds of compute on every stream."""
        load = [0.0] * self.num_streams
        for stream, us in zip(self.stream, self.us, strict=True):
            if stream >= 0:
                load[stream] += us
        return load

    @property
    def anchor(self) -> int:
        """The first node of the busiest stream; the times of an iteration count from its start."""
        load = self.stream_us
        return self.stream.index(load.index(max(load))) if load else 0

    def all_waits(self) -> list[list[Wait]]:
        """The waits of each node, the order of its stream included: the first node waits for the previous iteration's
        last.
        """
        found = [list(waits) for waits in self.waits]
        last, first = [-1] * self.num_streams, [-1] * self.num_streams
        for node, stream in enumerate(self.stream):
            if stream < 0:
                continue
            if last[stream] >= 0:
                found[node].append((last[stream], 0))
            else:
                first[stream] = node
            last[stream] = node
        for node, before in zip(first, last, strict=True):
            found[node].append((before, 1))
        return found


def nodes_of(workload: Workload) -> Nodes:
    """The nodes of a workload, which are kept with it: of a large step they take a second to make."""
    known = vars(workload)
    if _KEPT not in known:
        known[_KEPT] = _made(workload)
    found: Nodes = known[_KEPT]
    return found


def _made(workload: Workload) -> Nodes:
    count = sum(1 if op.is_comm else len(at) for op, at in zip(workload.ops, workload.op_places, strict=True))
    if count > MAX_NODES:
        raise InvalidInput(
            f"ops: compute-ops of {len(workload.places)} kinds of ranks are {count} parts; at most {MAX_NODES}"
        )
    op_: list[int] = []
    place_: list[int] = []
    us_: list[float] = []
    stream_: list[int] = []
    of_op: list[range] = []
    numbers: dict[tuple[int, str], int] = {}
    for at, (op, places) in enumerate(zip(workload.ops, workload.op_places, strict=True)):
        parts = [-1] if op.is_comm else places
        of_op.append(range(len(op_), len(op_) + len(parts)))
        op_ += [at] * len(parts)
        place_ += parts
        us_ += [0.0] if op.is_comm else workload.op_durations_us[at]
        stream_ += [-1 if op.is_comm else numbers.setdefault((p, op.stream), len(numbers)) for p in parts]
    return Nodes(
        op=tuple(op_), place=tuple(place_), us=tuple(us_), stream=tuple(stream_), num_streams=len(numbers),
        of_op=tuple(of_op), waits=tuple(_waits(workload, of_op)),
    )  # fmt: skip


def _waits(workload: Workload, of_op: Sequence[range]) -> list[tuple[Wait, ...]]:
    node_at = [dict(zip(places, nodes, strict=False)) for places, nodes in zip(workload.op_places, of_op, strict=True)]

    def parts(op: int, places: Sequence[int]) -> Sequence[int]:
        """The nodes of an op that something at these places waits for."""
        if len(of_op[op]) == 1:
            return of_op[op]
        return [node_at[op][place] for place in places if place in node_at[op]] or of_op[op]

    late = _late(workload, of_op)
    rows = []
    for at, (op, everywhere) in enumerate(zip(workload.ops, workload.op_places, strict=True)):
        needs = [(workload.index[dep.op], dep.lag) for dep in op.after]
        where = [everywhere] if op.is_comm else [(place,) for place in everywhere]
        for node, places in zip(of_op[at], where, strict=True):
            mine = dict.fromkeys((before, lag) for op_, lag in needs for before in parts(op_, places))
            rows.append((*mine, *late.get(node, ())))
    return rows


def _late(workload: Workload, of_op: Sequence[range]) -> dict[int, list[Wait]]:
    """Waits of the first compute-op of each place for communication that no other op waits for."""
    first: dict[int, int] = {}
    for op, nodes, places in zip(workload.ops, of_op, workload.op_places, strict=True):
        if not op.is_comm:
            for node, place in zip(nodes, places, strict=True):
                first.setdefault(place, node)
    late: dict[int, list[Wait]] = {}
    for at in _unawaited(workload):
        for place in workload.op_places[at]:
            if place in first:
                late.setdefault(first[place], []).append((of_op[at][0], LATEST))
    return late


def _unawaited(workload: Workload) -> list[int]:
    """The comm-ops that no compute-op waits for, directly or through other ops."""
    stack = [workload.index[dep.op] for op in workload.ops if not op.is_comm for dep in op.after]
    awaited = set(stack)
    while stack:
        for dep in workload.ops[stack.pop()].after:
            before = workload.index[dep.op]
            if before not in awaited:
                awaited.add(before)
                stack.append(before)
    return [at for at, op in enumerate(workload.ops) if op.is_comm and at not in awaited]


def communicator(op: Op) -> tuple[bool, tuple[tuple[int, ...], ...]]:
    """The key by which a library keeps one queue: the groups of a comm-op, and whether it is point to point."""
    return op.kind in PAIRWISE, op.groups


def is_queued(op: Op) -> bool:
    """Whether a stack that runs one collective at a time counts this op; sends have connections of their own."""
    return op.is_comm and op.kind not in PAIRWISE
