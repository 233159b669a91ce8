# SPDX-License-Identifier: Apache-2.0
"""The trace of one rank as calls (communication) and works (compute), in the same form for GPU and CPU traces."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ..errors import InvalidInput, unknown
from .kineto_events import CallPayload

HOST = "host"
"""The stream of compute-ops that run on the CPU."""
KINDS = {
    "allreduce": "all_reduce", "allreducecoalesced": "all_reduce", "allreducesparse": "all_reduce",
    "barrier": "all_reduce", "allreducebarrier": "all_reduce",
    "allgather": "all_gather", "allgatherbase": "all_gather", "allgatherintotensor": "all_gather",
    "allgatherintotensorcoalesced": "all_gather", "allgathercoalesced": "all_gather", "allgathersingle": "all_gather",
    "reducescatter": "reduce_scatter", "reducescatterbase": "reduce_scatter", "reducescattertensor": "reduce_scatter",
    "reducescattertensorcoalesced": "reduce_scatter", "reducescattersingle": "reduce_scatter",
    "alltoall": "all_to_all", "alltoallv": "all_to_all", "alltoallbase": "all_to_all", "alltoallsingle": "all_to_all",
    "broadcast": "broadcast", "broadcastoop": "broadcast", "reduce": "reduce", "reduceoop": "reduce",
    "gather": "gather", "scatter": "scatter", "send": "send", "recv": "recv",
}  # fmt: skip
"""The profiler's names of collectives, without underscores, and the kind of `Op` for each."""


class TraceWork(NamedTuple):
    """A piece of compute: submitted to its stream at `submit`, running from `start` to `end`; times are in us."""

    submit: float
    start: float
    end: float
    stream: str
    label: int


class StreamWait(NamedTuple):
    """A wait: `stream`, from time `at` on, waits for the work that was submitted to `source` before time `recorded`."""

    at: float
    stream: str
    recorded: float
    source: str


@dataclass(kw_only=True, slots=True)
class TraceCall:
    """One communication call of one rank; times are in us.

    `wait_at` is when the application waited for the call and `wait_stream` on which stream, where the trace shows it.
    """

    message: CallPayload
    submit: float
    start: float
    end: float
    stream: str
    seq: int | None = None
    receives: bool = False
    wait_at: float | None = None
    wait_stream: str | None = None


@dataclass(kw_only=True)
class KinetoRank:
    """The part of one rank's trace file that is used."""

    where: str
    rank: int
    world: int
    host: str
    base_ns: int
    gpu: bool
    calls: list[TraceCall]
    works: list[TraceWork]
    steps: dict[int, tuple[float, float]]
    backward: list[tuple[float, float]]
    update: list[tuple[float, float]]
    syncs: list[StreamWait] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def syncs_of(self) -> dict[str, list[StreamWait]]:
        """The waits of each stream, in order."""
        out: dict[str, list[StreamWait]] = {}
        for sync in sorted(self.syncs):
            out.setdefault(sync.stream, []).append(sync)
        return out


def kind_of(name: object, where: str) -> str:
    """The kind of `Op` for a collective's name in the profiler; ``recv`` stays ``recv``, the other end of a send."""
    kind = KINDS.get(str(name).lower().replace("_", ""))
    if kind is None:
        raise InvalidInput(f"{where}: {unknown('collective', name, sorted(set(KINDS)))}")
    return kind


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans in order; overlapping spans become one."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def inside(spans: list[tuple[float, float]], at: float) -> bool:
    """Whether a time lies in one of the spans, which must be sorted and disjoint."""
    found = bisect_right(spans, (at, float("inf"))) - 1
    return found >= 0 and at <= spans[found][1]


def backward_end(trace: KinetoRank, at: float) -> float | None:
    """The end of the step's last backward op, at which DDP waits for all its buckets; None if none follows."""
    until = min((start for start, _ in trace.steps.values() if start > at), default=float("inf"))
    last = bisect_left(trace.backward, (until, 0.0)) - 1
    return trace.backward[last][1] if last >= 0 and trace.backward[last][1] >= at else None
