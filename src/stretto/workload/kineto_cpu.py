# SPDX-License-Identifier: Apache-2.0
"""Reads traces of jobs that compute on the CPU: the ops of one thread, and gloo's spans on its own threads."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from math import prod
from typing import Any

import msgspec

from ..errors import InvalidInput
from .kineto_events import ELEMENT_BYTES, CallPayload, Event, Events, args_of, count, sized
from .kineto_rank import HOST, KINDS, KinetoRank, TraceCall, TraceWork, backward_end, inside, kind_of

_ROOT_AT = {"broadcast_": 2, "reduce_": 3, "gather_": 3, "scatter_": 3, "send": 2, "recv_": 2}
"""The position of the root, or of the peer, among the arguments of a c10d call."""
_RUNS_AS = {"reduce_scatter": ("gloo:all_reduce", "gloo:reduce_scatter"), "barrier": ("gloo:barrier",)}
"""Names of gloo's spans for calls after which the span is not named."""
_COMMUNICATES = ("c10d::", "_c10d_functional::", "c10d_functional::")
"""The begins of names of operators that communicate, or wait for communication."""
_WHOLE = ("all_gather", "reduce_scatter", "gather", "scatter")
"""Collectives in which one buffer has a part per rank: if only the other is recorded, it counts once per rank."""


def fill(trace: KinetoRank, about: Events) -> None:
    """Add the calls and the work of a CPU trace."""
    threads: dict[Any, list[Event]] = defaultdict(list)
    weight: dict[Any, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    spans: list[Event] = []
    for event in about.events:
        if event.cat not in ("cpu_op", "user_annotation"):
            continue
        if event.name.startswith("gloo:"):
            spans.append(event)
            continue
        threads[event.tid].append(event)
        steps, busy = weight[event.tid]
        weight[event.tid] = (steps + event.name.startswith("ProfilerStep#"), busy + event.dur)
    if not threads:
        return
    main = max(threads, key=lambda tid: weight[tid])
    for tid, events in threads.items():
        if tid != main and any(event.name.startswith("c10d::") for event in events):
            raise InvalidInput(f"{about.where}: collectives are called from several threads: {main} and {tid}")
    events = sorted(threads[main], key=lambda event: (event.ts, -event.dur))
    calls = [event for event in events if event.name.startswith("c10d::")]
    labels: dict[str, int] = {}
    for event in _computing(events):
        trace.works.append(TraceWork(event.ts, event.ts, event.end, HOST, labels.setdefault(event.name, len(labels))))
    ddp = any(event.name == "DistributedDataParallel.forward" for event in events)
    _pair(trace, about, calls, sorted(spans, key=lambda event: event.ts), ddp=ddp)


def _computing(events: list[Event]) -> list[Event]:
    """The events that compute, in order, none inside another: whole operators, and the innermost of all others.

    An operator's own time is compute although small operators (an allocation, say) run inside it. An event around
    communication is none: between the calls inside it the thread may wait. Collective calls, waits for them, and what
    is inside are no compute.
    """
    comm = [event for event in events if event.name.startswith(_COMMUNICATES)]
    comm_starts = [event.ts for event in comm]
    out: list[Event] = []
    skip_until = float("-inf")
    for at, event in enumerate(events):
        if event.ts < skip_until:
            continue
        if event.name.startswith(_COMMUNICATES):
            skip_until = event.end
            continue
        following = events[at + 1] if at + 1 < len(events) else None
        inside = bisect_left(comm_starts, event.ts)
        if event.name.startswith("aten::") and not (inside < len(comm) and comm_starts[inside] < event.end):
            skip_until = event.end
            out.append(event)
        elif following is None or following.ts >= event.end or event.dur == 0:
            out.append(event)
    return out


def _pair(trace: KinetoRank, about: Events, calls: list[Event], spans: list[Event], *, ddp: bool) -> None:
    """Match each call with the first free span after it of the same name and shape: gloo serves calls in order."""
    groups = {group for group in about.groups.values() if len(group) > 1}
    if not groups and about.world and about.world > 1:
        groups = {tuple(range(about.world))}
    free: dict[str, list[Event]] = defaultdict(list)
    for each in spans:
        free[each.name].append(each)
    guessed = lost = 0
    for at, event in enumerate(calls):
        name = event.name.removeprefix("c10d::")
        if name.lower().replace("_", "") not in KINDS:
            continue
        where = f"{about.where}: c10d call {at} ({event.name})"
        kind = kind_of(name, where)
        dims, types, concrete = _shapes(event, where)
        names = _RUNS_AS.get("barrier" if name == "barrier" else kind, (f"gloo:{kind}",))
        span = _take(free, names, event, dims)
        if span is None:
            lost += 1
            continue
        if len(groups) != 1:
            what = f"{len(groups)} groups are possible" if groups else "distributedInfo names no group"
            raise InvalidInput(
                f"{where}: its group is missing (gloo does not record it) and {what}; capture such a job instead"
            )
        (group,) = groups
        width, known = _element(types, span)
        guessed += not known
        sizes = [size for size in map(_elements, dims) if size]
        largest = max(sizes, default=0)
        if kind in _WHOLE and sizes:
            largest = max(largest, min(sizes) * len(group))
        root = int(concrete[_ROOT_AT[name]]) if name in _ROOT_AT and _is_number(concrete, _ROOT_AT[name]) else 0
        if root >= len(group):
            raise InvalidInput(f"{where}: root or peer {root} is not a position 0..{len(group) - 1} in its group")
        receives = kind == "recv"
        if kind in ("send", "recv"):
            peer = group[root]
            group, root, kind = ((peer, trace.rank) if receives else (trace.rank, peer)), 0, "send"
        call = TraceCall(
            message=CallPayload(kind, sized(largest, width, where), group, root), submit=event.ts, start=span.ts,
            end=span.end, stream="gloo", receives=receives,
        )  # fmt: skip
        if name in ("send", "recv_") or (len(concrete) > 1 and concrete[-2] == "False"):
            call.wait_at = call.submit
        elif ddp and inside(trace.backward, event.ts):
            call.wait_at = backward_end(trace, event.ts)
        trace.calls.append(call)
    if lost:
        trace.notes.append(f"rank {trace.rank}: left out {lost} calls whose transfer was not recorded")
    if guessed:
        trace.notes.append(f"rank {trace.rank}: {guessed} calls do not record their dtype; 4 bytes per element assumed")


def _take(free: dict[str, list[Event]], names: tuple[str, ...], call: Event, dims: list[Any]) -> Event | None:
    shapes = _flat(dims)
    for name in names:
        for at, span in enumerate(free[name]):
            if span.ts < call.ts:
                continue
            mine = [shape for shape in _json(span, "dims") if isinstance(shape, list)]
            if not mine or not shapes or any(shape in shapes for shape in mine):
                return free[name].pop(at)
    return None


def _json(event: Event, key: str) -> list[Any]:
    try:
        value = msgspec.json.decode(getattr(args_of(event), key))
    except msgspec.MsgspecError:
        return []
    return value if isinstance(value, list) else []


def _shapes(event: Event, where: str) -> tuple[list[Any], list[Any], list[Any]]:
    dims, types, concrete = (_json(event, key) for key in ("dims", "types", "concrete"))
    if not dims:
        raise InvalidInput(f"{where}: no sizes; record with record_shapes=True")
    for at, value in enumerate(dims):
        _elements(value, f"{where}.Input Dims[{at}]")
    return dims, types, concrete


def _flat(dims: list[Any]) -> list[list[int]]:
    """The shape of every tensor, whether it was passed alone or in a list of tensors."""
    out: list[list[int]] = []
    for value in dims:
        if isinstance(value, list) and value and all(isinstance(item, list) for item in value):
            out += value
        elif isinstance(value, list) and value:
            out.append(value)
    return out


def _elements(value: Any, where: str = "Input Dims") -> int:
    """The number of elements of a tensor, or of all tensors of a list; 0 for any other argument."""
    if not isinstance(value, list) or not value:
        return 0
    if all(isinstance(item, list) for item in value):
        return sum(prod(count(size, where) for size in item) for item in value)
    return prod(count(size, where) for size in value)


def _element(types: list[Any], span: Event) -> tuple[int, bool]:
    for name in [*types, *_json(span, "types")]:
        if isinstance(name, str) and name in ELEMENT_BYTES:
            return ELEMENT_BYTES[name], True
    return 4, False


def _is_number(values: list[Any], at: int) -> bool:
    return at < len(values) and isinstance(values[at], str) and re.fullmatch("[0-9]{1,9}", values[at]) is not None
