"""One rank's trace as calls (communication) and work (compute), the same for GPU and CPU traces."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ..errors import InvalidInput, unknown
from .kineto_events import Message

HOST = "host"
"""The stream of compute-ops where the processor itself computes."""
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
"""What the profiler calls a collective, without underscores, and what we call it."""


class Work(NamedTuple):
    """A piece of compute: given to its stream at `submit`, running from `start` to `end`."""

    submit: float
    start: float
    end: float
    stream: str
    label: int


class Sync(NamedTuple):
    """That `stream`, from `at` on, waits for what was given to `source` before `recorded`."""

    at: float
    stream: str
    recorded: float
    source: str


@dataclass(kw_only=True, slots=True)
class Call:
    """One communication call of one rank.

    `wait_at`: when the application asked to wait for it, and `wait_stream` where, as far as that is visible.
    """

    message: Message
    submit: float
    start: float
    end: float
    stream: str
    seq: int | None = None
    receives: bool = False
    wait_at: float | None = None
    wait_stream: str | None = None


@dataclass(kw_only=True)
class RankTrace:
    """What is kept of one rank's file."""

    where: str
    rank: int
    world: int
    host: str
    base_ns: int
    gpu: bool
    calls: list[Call]
    works: list[Work]
    steps: dict[int, tuple[float, float]]
    backward: list[tuple[float, float]]
    update: list[tuple[float, float]]
    syncs: list[Sync] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def syncs_of(self) -> dict[str, list[Sync]]:
        """What each stream was told to wait for, in order."""
        out: dict[str, list[Sync]] = {}
        for sync in sorted(self.syncs):
            out.setdefault(sync.stream, []).append(sync)
        return out


def kind_of(name: object, where: str) -> str:
    """Our name of a collective; ``recv`` stays itself, being the other end of a send."""
    kind = KINDS.get(str(name).lower().replace("_", ""))
    if kind is None:
        raise InvalidInput(f"{where}: {unknown('collective', name, sorted(set(KINDS)))}")
    return kind


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans in order, those that overlap made one."""
    out: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def inside(spans: list[tuple[float, float]], at: float) -> bool:
    """Whether a time lies in one of the spans, which are in order and apart."""
    found = bisect_right(spans, (at, float("inf"))) - 1
    return found >= 0 and at <= spans[found][1]


def backward_end(trace: RankTrace, at: float) -> float | None:
    """When the last backward op of the step ended: only then does DDP wait for its buckets, and for all of them."""
    until = min((start for start, _ in trace.steps.values() if start > at), default=float("inf"))
    last = bisect_left(trace.backward, (until, 0.0)) - 1
    return trace.backward[last][1] if last >= 0 and trace.backward[last][1] >= at else None
