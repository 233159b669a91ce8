# SPDX-License-Identifier: Apache-2.0
"""Joins the communication calls of all ranks into comm-ops, and separates waiting from transfer."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

from ..errors import InvalidInput
from .kineto_blocks import RankClass
from .kineto_rank import TraceCall

_TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""Collectives that end at about the same time on every rank; the clocks of different hosts are aligned by them."""


@dataclass(kw_only=True)
class CommOp:
    """One comm-op under construction; `users` are its calls on each rank as (class, rank, position)."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    root: int
    users: list[tuple[int, int, int]] = field(default_factory=list)
    nbytes: float = 0.0
    at_most: bool = False
    transfer_us: float = 0.0
    wait_us: float = 0.0
    name: str = ""

    @property
    def first_class(self) -> int:
        """The index of the class of ranks that gives the op its place in the order of submission."""
        return self.users[0][0]

    @property
    def first_position(self) -> int:
        """The op's position among the calls of its first class."""
        return self.users[0][2]


def comm_ops(classes: list[RankClass], world: int, notes: list[str]) -> list[CommOp]:
    """Join the calls of all ranks into comm-ops.

    Calls of one group are matched by their order within the group; equal calls of disjoint groups, by position.

    Args:
        classes: the classes of ranks with the traces of their ranks.
        world: number of ranks of the job.
        notes: a list to which assumptions are appended.

    Returns:
        The comm-ops with size, transfer time and waiting time.

    Raises:
        InvalidInput: matching calls have different sequence numbers, so the traces are not of the same steps.
    """
    found: dict[object, CommOp] = {}
    traced = {rank for these in classes for rank in these.traces}
    for number, these in enumerate(classes):
        whole = _by_position(these, traced)
        for rank, steps in these.steps.items():
            seen: Counter[tuple[int, ...]] = Counter()
            for position, call in enumerate(next(iter(steps.values())).calls):
                group = call.message.group
                key: object = (group, seen[group], call.message.kind)
                seen[group] += 1
                if whole[position]:
                    key = (number, position)
                op = found.setdefault(key, CommOp(kind=call.message.kind, groups=(), root=call.message.root))
                if group not in op.groups:
                    op.groups = tuple(sorted((*op.groups, group)))
                op.users.append((number, rank, position))
    ops = list(found.values())
    offsets = _offsets(classes, ops, notes)
    alone = 0
    for op in ops:
        alone += not _measure(op, classes, offsets)
        if len(traced) < world and op.kind != "send":
            op.groups = _completed(op.groups, world, notes)
    if alone:
        notes.append(
            f"{alone} of {len(ops)} comm-ops lack the trace of some rank: their waiting is not known, and the shortest "
            "of the recorded steps is taken as transfer time"
        )
    if any(op.at_most for op in ops):
        notes.append("comm-ops whose size changed between steps or ranks carry the largest (at_most)")
    return ops


def _by_position(these: RankClass, traced: set[int]) -> list[bool]:
    """For each position of a class, whether the groups there are disjoint and contain only ranks of the class."""
    out = []
    for position in range(these.num_calls):
        messages = [next(iter(steps.values())).calls[position].message for steps in these.steps.values()]
        groups = {message.group for message in messages}
        apart = sum(map(len, groups)) == len({rank for group in groups for rank in group})
        alike = len({(message.kind, message.root) for message in messages}) == 1
        members = {rank for group in groups for rank in group} & traced
        out.append(apart and alike and messages[0].kind != "send" and members <= set(these.traces))
    return out


def _calls(op: CommOp, classes: list[RankClass]) -> dict[tuple[int, tuple[int, ...]], dict[int, TraceCall]]:
    """The calls of an op by step and group, then by rank."""
    out: dict[tuple[int, tuple[int, ...]], dict[int, TraceCall]] = defaultdict(dict)
    for number, rank, position in op.users:
        for step in classes[number].steps[rank].values():
            call = step.calls[position]
            out[step.number, call.message.group][rank] = call
    return out


def _measure(op: CommOp, classes: list[RankClass], offsets: dict[int, float]) -> bool:
    """Set an op's size, transfer time and waiting time; return whether every rank of its groups has a trace."""
    calls = _calls(op, classes)
    sizes = {call.message.nbytes for by_rank in calls.values() for call in by_rank.values()}
    splits = any(call.message.splits for by_rank in calls.values() for call in by_rank.values())
    op.nbytes, op.at_most = max(sizes), splits or len(sizes) > 1
    transfers, waits = [], []
    for (_, group), by_rank in calls.items():
        if len(by_rank) < len(group):
            continue
        seqs = {call.seq for call in by_rank.values() if call.seq is not None}
        if len(seqs) > 1:
            raise InvalidInput(
                f"a {op.kind} of ranks {list(group)} has sequence numbers {sorted(seqs)} on different ranks: "
                "the traces are not of the same steps of one job"
            )
        latest = max(call.start + offsets[rank] for rank, call in by_rank.items())
        ends = {rank: call.end + offsets[rank] for rank, call in by_rank.items()}
        shortest = min(call.end - call.start for call in by_rank.values())
        # A send may end before its receive begins; the transfer then took at least the shorter of the two calls.
        transfer = max(ends.values()) - latest if max(ends.values()) > latest else shortest
        transfers.append(transfer)
        waits.append(fmean(max(call.end - call.start - transfer, 0.0) for call in by_rank.values()))
    if transfers:
        op.transfer_us, op.wait_us = median(transfers), median(waits)
    else:
        op.transfer_us = min(call.end - call.start for by_rank in calls.values() for call in by_rank.values())
    return bool(transfers)


def _offsets(classes: list[RankClass], ops: list[CommOp], notes: list[str]) -> dict[int, float]:
    """Microseconds to add to each rank's times to compare them: traces have different bases, and hosts different
    clocks.
    """
    traces = {rank: trace for these in classes for rank, trace in these.traces.items()}
    first = min(traces)
    base = traces[first].base_ns
    offsets = {rank: (trace.base_ns - base) / 1000 for rank, trace in traces.items()}
    if len({trace.host for trace in traces.values()}) < 2:
        return offsets
    known = {rank for rank, trace in traces.items() if trace.host == traces[first].host}
    together = [by_rank for op in ops if op.kind in _TOGETHER for by_rank in _calls(op, classes).values()]
    while True:
        apart: dict[str, list[float]] = defaultdict(list)
        for by_rank in together:
            ends = {rank: call.end + offsets[rank] for rank, call in by_rank.items()}
            sure = [end for rank, end in ends.items() if rank in known]
            for rank, end in ends.items():
                if sure and rank not in known:
                    apart[traces[rank].host].append(median(sure) - end)
        if not apart:
            break
        for rank, trace in traces.items():
            if rank not in known and trace.host in apart:
                offsets[rank] += median(apart[trace.host])
                known.add(rank)
    notes.append("several hosts: their clocks are set so that collectives end at the same time on all ranks")
    return offsets


def _completed(groups: tuple[tuple[int, ...], ...], world: int, notes: list[str]) -> tuple[tuple[int, ...], ...]:
    """The groups of all ranks, those without a trace included, if the known groups are regular slices of a mesh."""
    group = groups[0]
    stride = group[1] - group[0]
    span = stride * len(group)
    regular = stride > 0 and all(b - a == stride for a, b in pairwise(group))
    if not regular or world % span or group[0] % span >= stride:
        notes.append(f"group {list(group)} is no regular slice of {world} ranks: only the traced groups are kept")
        return groups
    starts = [low + inner for low in range(0, world, span) for inner in range(stride)]
    out = tuple(tuple(range(start, start + span, stride)) for start in starts)
    return out if set(groups) <= set(out) else groups
