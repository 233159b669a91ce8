# SPDX-License-Identifier: Apache-2.0
"""One `Workload` from what all ranks recorded.

Ranks that do the same in the same order form a class; the time between two of their submits and waits is a
compute-op of the class. The ops that ranks submit are matched group by group, and those of disjoint groups at the
same places of their programs are one comm-op.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from ...errors import InvalidInput
from ...workload.dag import Dep, Op, Why, Workload
from .tape import FIRST_PHASE, VARYING, CallShape, Floats, RankRecording

MIN_BLOCK_US = 20.0
"""A shorter compute-op is the cost of the calls themselves; its time goes to the next one."""
NOISE_SHARE = 0.1
"""Ranks whose durations differ by a smaller share than this are taken for alike."""


@dataclass(kw_only=True)
class _Node:
    """An op being built."""

    shape: CallShape | None = None
    phase: str = ""
    at_us: float = 0.0
    after: dict[tuple[int, int], Why] = field(default_factory=dict)
    """Why the node waits for each (node, lag)."""
    before: set[int] = field(default_factory=set)
    """Nodes that come earlier in some rank's program."""
    ranks: tuple[int, ...] = ()
    groups: list[tuple[int, ...]] = field(default_factory=list)
    nbytes: int = 0
    at_most: bool = False
    rank_nbytes: tuple[int, ...] = ()
    duration_us: float = 0.0
    durations_us: tuple[float, ...] = ()
    wait_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class _Match:
    """One op of one group: which call it is on each of its ranks."""

    shape: CallShape
    calls: dict[int, int]
    nbytes: int
    at_most: bool
    rank_nbytes: tuple[int, ...] = ()
    """The largest size of each of its ranks, where they differ."""


def merge(
    traces: Sequence[RankRecording], offsets_us: Sequence[float], *, name: str, samples: float, notes: tuple[str, ...]
) -> Workload:
    """The workload; the same on every rank that merges the same traces.

    Args:
        traces: The recording of every rank, by rank.
        offsets_us: What to add to each rank's times, so that all clocks agree.
        name: The name of the workload.
        samples: What all ranks together train on in an iteration.
        notes: What was assumed, for readers.

    Returns:
        The step.

    Raises:
        InvalidInput: The ranks do not do the same in the same order.
    """
    matches = _matches(traces)
    classes = _classes(traces)
    nodes, node_of, order = _built(classes, matches, traces, offsets_us)
    if len(order) < len(nodes):
        # The ranks of a class stand for each other, also where one of them sends to another: inner stages, say.
        classes = _refined(classes, matches)
        nodes, node_of, order = _built(classes, matches, traces, offsets_us)
    if len(order) < len(nodes):
        stuck = min((node.at_us, str(node.shape)) for at, node in enumerate(nodes) if node.shape and at not in order)
        circle = f"the ranks wait for each other in a circle, first at {stuck[1]}"
        raise InvalidInput(_disorder(traces, nodes, node_of) or circle)
    names = _names(nodes, order, many=len(classes) > 1)
    return Workload(
        name=name,
        num_ranks=len(traces),
        ops=tuple(_op(nodes[at], names, names[at], len(traces)) for at in order),
        samples=samples,
        notes=notes,
    )


def _built(
    classes: Sequence[tuple[int, ...]], matches: Sequence[_Match], traces: Sequence[RankRecording],
    offsets_us: Sequence[float],
) -> tuple[list[_Node], dict[tuple[int, int], int], list[int]]:  # fmt: skip
    """All nodes, the node of each rank's calls, and the nodes in order, without those in a circle."""
    nodes: list[_Node] = []
    node_of: dict[tuple[int, int], int] = {}
    class_of = {rank: number for number, ranks in enumerate(classes) for rank in ranks}
    for together in _together(matches, class_of):
        for match in together:
            node_of |= {(rank, call): len(nodes) for rank, call in match.calls.items()}
        nodes.append(_comm(together, traces, offsets_us))
    for ranks in classes:
        _walk(ranks, traces, offsets_us, nodes, node_of)
    return nodes, node_of, _order(nodes)


def _refined(classes: Sequence[tuple[int, ...]], matches: Sequence[_Match]) -> list[tuple[int, ...]]:
    """Classes whose ranks make every call together with ranks of the same classes at the same places of programs.

    A circle of such classes is one of ranks, too: from any rank of a class each wait leads to a rank of the next class.
    """
    class_of = {rank: number for number, ranks in enumerate(classes) for rank in ranks}
    count = 0
    while count < len(set(class_of.values())):
        count = len(set(class_of.values()))
        seen: dict[int, list[Hashable]] = {rank: [number] for rank, number in class_of.items()}
        for match in matches:
            places = tuple(sorted((class_of[rank], call) for rank, call in match.calls.items()))
            for rank, call in match.calls.items():
                seen[rank].append((call, places))
        # The calls of a rank are in many groups, whose matches come in another order for each rank.
        keys = {rank: (mine[0], frozenset(mine[1:])) for rank, mine in seen.items()}
        number_of = {key: number for number, key in enumerate(dict.fromkeys(keys[rank] for rank in sorted(keys)))}
        class_of = {rank: number_of[keys[rank]] for rank in sorted(keys)}
    found: dict[int, list[int]] = {}
    for rank, number in class_of.items():
        found.setdefault(number, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _classes(traces: Sequence[RankRecording]) -> list[tuple[int, ...]]:
    found: dict[Hashable, list[int]] = {}
    for trace in traces:
        calls = tuple(
            (call.kind, len(call.group), call.root, call.encoding, call.phase, call.label, _sends(call, trace.rank))
            for call in trace.calls
        )
        found.setdefault((calls, trace.steps), []).append(trace.rank)
    return [tuple(ranks) for ranks in found.values()]


def _sends(call: CallShape, rank: int) -> bool:
    return call.kind == "send" and call.group[0] == rank


def _matches(traces: Sequence[RankRecording]) -> list[_Match]:
    """Each op of each group, with its call on every rank; refuses groups whose ranks do not agree."""
    queues: dict[tuple[str, tuple[int, ...]], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        for at, call in enumerate(trace.calls):
            queues[call.channel, call.group][trace.rank].append(at)
    found = []
    for (_, group), queue in queues.items():
        for number in range(max(map(len, queue.values()))):
            having = [rank for rank in group if number < len(queue.get(rank, ()))]
            shape = traces[having[0]].calls[queue[having[0]][number]]
            where = f"op {number} that ranks {', '.join(map(str, group))} submit together"
            for rank in group:
                if rank not in having:
                    raise InvalidInput(f"{where}: rank {having[0]} submits {shape}, rank {rank} nothing")
                other = traces[rank].calls[queue[rank][number]]
                if (other.kind, other.root) != (shape.kind, shape.root):
                    raise InvalidInput(f"{where}: {shape} on rank {having[0]}, {other} on rank {rank}")
            sizes = np.stack([traces[rank].nbytes[:, queue[rank][number]] for rank in group])
            if shape.kind not in VARYING and len(set(sizes[:, 0])) > 1:
                low, high = sizes.min(), sizes.max()
                raise InvalidInput(f"{where}: {shape} has {low} bytes on one rank and {high} on another")
            calls = {rank: queue[rank][number] for rank in group}
            # A root alone knows all of a gather's or a scatter's sizes: there ranks always differ.
            own = shape.kind == "all_to_all"
            splits = own and any(traces[rank].splits[call] for rank, call in calls.items() if traces[rank].splits)
            differ = own and len(set(sizes.max(axis=1))) > 1
            found.append(
                _Match(
                    shape=shape,
                    calls=calls,
                    nbytes=int(sizes.max()),
                    at_most=splits or differ or len(set(sizes.max(axis=0))) > 1,
                    rank_nbytes=tuple(sizes.max(axis=1).tolist()) if splits or differ else (),
                )
            )
    return found


def _together(matches: Iterable[_Match], class_of: dict[int, int]) -> list[list[_Match]]:
    """Sets of matches that are one op: the same thing at the same places of alike programs, in disjoint groups."""
    alike: dict[Hashable, list[_Match]] = {}
    for match in matches:
        places = tuple(sorted((class_of[rank], call) for rank, call in match.calls.items()))
        shape = match.shape
        # Groups whose sizes follow their data are alike although the sizes differ.
        size = None if match.rank_nbytes else (match.nbytes, match.at_most)
        key = (shape.kind, shape.root, shape.encoding, size, len(match.calls), places)
        alike.setdefault(key, []).append(match)
    found: list[list[_Match]] = []
    for candidates in alike.values():
        sets: list[tuple[set[int], list[_Match]]] = []
        for match in sorted(candidates, key=lambda match: match.shape.group):
            free = next((one for one in sets if one[0].isdisjoint(match.calls)), None)
            if free is None:
                sets.append((set(match.calls), [match]))
            else:
                free[0].update(match.calls)
                free[1].append(match)
        found += [together for _, together in sets]
    return found


def _comm(together: list[_Match], traces: Sequence[RankRecording], offsets_us: Sequence[float]) -> _Node:
    """A comm-op: it moves data from the moment its last rank is there, and the others wait until then."""
    first = together[0]
    transfers, waits, submits = [], [], []
    for match in together:
        starts = np.stack([traces[rank].started_us[:, call] + offsets_us[rank] for rank, call in match.calls.items()])
        ends = np.stack([traces[rank].ended_us[:, call] + offsets_us[rank] for rank, call in match.calls.items()])
        exact = np.array([traces[rank].exact[call] for rank, call in match.calls.items()])
        latest = starts.max(axis=0)
        # An end that is only known from a wait may be late, and the earliest of such is the best that is known.
        end = ends[exact].max(axis=0) if exact.any() else ends.min(axis=0)
        transfers.append(np.maximum(end - latest, 0.0))
        waits.append((latest - starts).mean(axis=0))
        submits.append(np.mean([starts[at] - _begin(traces, offsets_us) for at in range(len(starts))]))
    known = np.concatenate(transfers)
    known = known[~np.isnan(known)]
    return _Node(
        shape=first.shape,
        phase=first.shape.phase,
        at_us=float(np.median(submits)),
        groups=[match.shape.group for match in together],
        nbytes=max(match.nbytes for match in together),
        at_most=first.at_most,
        rank_nbytes=tuple(size for match in together for size in match.rank_nbytes),
        duration_us=_rounded(np.median(known)) if len(known) else 0.0,
        wait_us=_rounded(np.median(np.concatenate(waits))),
    )


def _begin(traces: Sequence[RankRecording], offsets_us: Sequence[float]) -> Floats:
    return traces[0].begin_us + offsets_us[0]


def _walk(
    ranks: tuple[int, ...],
    traces: Sequence[RankRecording],
    offsets_us: Sequence[float],
    nodes: list[_Node],
    node_of: dict[tuple[int, int], int],
) -> None:
    """Add the compute-ops of a class, and what its ops wait for: twice around, since an iteration follows another."""
    trace = traces[ranks[0]]
    block_of = _blocks(ranks, traces, offsets_us, nodes)
    last: tuple[int, int] | None = None
    waited: dict[tuple[int, int], None] = {}
    for second in (False, True):
        previous: list[int] = []
        for at in range(len(trace.steps) + 1):
            if at in block_of:
                block = block_of[at]
                if second:
                    nodes[block].after.update(dict.fromkeys(waited, "wait"))
                    if last is not None and last[1]:
                        nodes[block].after.setdefault(last, "data")
                    nodes[block].before.update(previous)
                last, waited, previous = (block, 0), {}, [block]
            if at == len(trace.steps) or trace.steps[at].what == "phase":
                continue
            step = trace.steps[at]
            targets = sorted({node_of[rank, step.call] for rank in ranks})
            if step.what == "wait":
                waited.update(dict.fromkeys((target, step.lag) for target in targets))
            elif second:
                call = trace.calls[step.call]
                behind = {(node_of[rank, step.behind], 0) for rank in ranks if step.behind >= 0}
                for target in targets:
                    needs = [*([last] if last else []), *waited, *sorted(behind)]
                    nodes[target].after.update(dict.fromkeys(needs, "submit"))
                # A message has two places in the programs, where it is sent and where it is received.
                if call.kind != "send":
                    for target in targets:
                        nodes[target].before.update(previous)
                    previous = targets
        if not second:
            last = (last[0], last[1] + 1) if last else None
            waited = {(node, lag + 1): None for node, lag in waited}


def _blocks(
    ranks: tuple[int, ...], traces: Sequence[RankRecording], offsets_us: Sequence[float], nodes: list[_Node]
) -> dict[int, int]:
    """Add a compute-op for each gap between steps that is long enough; where each stands in the program."""
    trace = traces[ranks[0]]
    gaps = np.stack([traces[rank].gaps() for rank in ranks])
    middle = np.median(gaps, axis=(0, 1))
    kept = np.flatnonzero(middle >= min(MIN_BLOCK_US, middle.max()))
    begins = np.concatenate([trace.begin_us[:, None], trace.leave_us], axis=1) + offsets_us[trace.rank]
    at_us = np.median(begins - _begin(traces, offsets_us)[:, None], axis=0)
    block_of = {}
    phase, steps_seen = FIRST_PHASE, 0
    carried = gaps[:, :, kept[-1] + 1 :].sum(axis=2)
    for at, since in zip(kept.tolist(), [0, *(kept[:-1] + 1).tolist()], strict=True):
        for step in trace.steps[steps_seen:at]:
            phase = step.phase or phase
        steps_seen = at
        block_of[at] = len(nodes)
        times = carried + gaps[:, :, since : at + 1].sum(axis=2)
        nodes.append(_block(ranks, times, phase=phase, at_us=float(at_us[at])))
        carried = np.zeros_like(carried)
    return block_of


def _block(ranks: tuple[int, ...], times: Floats, *, phase: str, at_us: float) -> _Node:
    """A compute-op; ranks keep their own durations where one is faster at its slowest than another at its fastest."""
    each = np.median(times, axis=1)
    middle = float(np.median(each))
    apart = float(times.min(axis=1).max()) > float(times.max(axis=1).min())
    differ = apart and float(each.max() - each.min()) > NOISE_SHARE * middle
    return _Node(
        phase=phase,
        at_us=at_us,
        ranks=ranks,
        duration_us=0.0 if differ else _rounded(middle),
        durations_us=tuple(_rounded(value) for value in each) if differ else (),
    )


def _disorder(traces: Sequence[RankRecording], nodes: list[_Node], node_of: dict[tuple[int, int], int]) -> str:
    """Which collectives two ranks submit in different orders; empty when none."""
    programs = [
        [node_of[trace.rank, at] for at, call in enumerate(trace.calls) if call.kind != "send"] for trace in traces
    ]
    for (one, mine), (other, theirs) in combinations(enumerate(programs), 2):
        shared = set(mine) & set(theirs)
        pairs = zip([n for n in mine if n in shared], [n for n in theirs if n in shared], strict=True)
        for number, (a, b) in enumerate(pairs):
            if a != b:
                here, there = (f"{node.shape} ({node.nbytes} bytes)" for node in (nodes[a], nodes[b]))
                return (
                    f"ranks {one} and {other} do not submit in one order: op {number} that both submit is {here} on "
                    f"rank {one}, {there} on rank {other}"
                )
    return ""


def _order(nodes: list[_Node]) -> list[int]:
    """The nodes in the order of their times, as far as what they wait for allows; without those in a circle."""
    needs = [node.before | {at for at, lag in node.after if not lag} for node in nodes]
    followers: dict[int, list[int]] = defaultdict(list)
    for at, before in enumerate(needs):
        for earlier in before:
            followers[earlier].append(at)
    missing = [len(before) for before in needs]
    ready = [(node.at_us, at) for at, node in enumerate(nodes) if not missing[at]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, at = heapq.heappop(ready)
        order.append(at)
        for follower in followers[at]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (nodes[follower].at_us, follower))
    return order


def _names(nodes: list[_Node], order: list[int], *, many: bool) -> dict[int, str]:
    counts: dict[str, int] = defaultdict(int)
    names = {}
    for at in order:
        node = nodes[at]
        stem = f"{node.phase}.{node.shape.label or node.shape.kind}" if node.shape else node.phase
        if many and not node.shape:
            stem += f"@{node.ranks[0]}"
        names[at] = f"{stem}.{counts[stem]}"
        counts[stem] += 1
    return names


def _op(node: _Node, names: dict[int, str], name: str, num_ranks: int) -> Op:
    after = tuple(Dep(op=names[at], lag=lag, why=why) for (at, lag), why in node.after.items())
    if node.shape is None:
        return Op(
            name=name,
            after=after,
            phase=node.phase,
            ranks=node.ranks if len(node.ranks) < num_ranks else (),
            duration_us=node.duration_us,
            durations_us=node.durations_us,
        )
    everyone = node.groups == [tuple(range(num_ranks))] and node.shape.kind != "send"
    return Op(
        name=name,
        kind=node.shape.kind,
        after=after,
        phase=node.phase,
        nbytes=float(node.nbytes),
        groups=() if everyone else tuple(node.groups),
        root=node.shape.root,
        encoding=node.shape.encoding,
        at_most=node.at_most,
        rank_nbytes=tuple(map(float, node.rank_nbytes)),
        duration_us=node.duration_us,
        wait_us=node.wait_us,
    )


def _rounded(value: float | np.floating) -> float:
    return round(float(value), 3)
