# SPDX-License-Identifier: Apache-2.0
"""Training steps on a multi-dimensional network: forward, backward, and exposed communication (Fig. 12).

All collectives of a `Workload` run on the dimensions that their groups span; those in flight share the dimensions, and
compute waits for what it needs. The groups of an op are all ranks together, neighbouring devices, or the devices with
the same position in such groups of neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

import numpy as np

from ..errors import InvalidInput, unknown
from ..workload.dag import Op, Workload
from .ideal import Need, relaxed
from .model import COLLECTIVES, Dim, Part, check_dims, split
from .schedule import MAX_CHUNKS, Stages
from .schedulers import CHUNKS
from .simulation import IN_FLIGHT, ChunkJob, Floats, keys, simulate_jobs
from .systems import SCHEDULERS, plan

SYSTEMS = (*SCHEDULERS, "ideal")
DATA_PARALLEL = ("ar-", "rs-", "ag-")
"""The prefixes of the names of collectives of gradients and parameters, in all models."""
SUPPORTED = (*COLLECTIVES, "all_to_all")
ROUNDS = 4
"""How often Stretto's scheduler plans again around other collectives in flight, while it is not `GOOD_ENOUGH`."""
GOOD_ENOUGH = 1.001
MAX_AROUND = 256
"""The most collectives of which each may get a plan of its own."""
LEAST_LEFT = 0.02


@dataclass(frozen=True, kw_only=True)
class IterationTime:
    """The time of one iteration, divided into compute and exposed communication."""

    system: str
    total_us: float
    forward_us: float
    backward_us: float
    data_parallel_us: float
    """The exposed time in which compute waits for gradients or parameters."""
    model_parallel_us: float
    """The exposed time in which compute waits for activations or embeddings."""
    utilization: float
    """The share used of the bandwidth of dimensions while a collective over them is pending; 1 for ``ideal``."""

    @property
    def exposed_us(self) -> float:
        """The communication time that no compute hides."""
        return self.data_parallel_us + self.model_parallel_us


def iteration(
    workload: Workload,
    dims: Sequence[Dim],
    system: str = "stretto",
    *,
    chunks: int = CHUNKS,
    in_flight: int = IN_FLIGHT,
    sharing: str = "ordered",
) -> IterationTime:
    """Simulate one iteration from its begin until all its ops are done.

    The system ``ideal`` is a bound that no system can beat (see `ideal`): bandwidth without latency, shared at will.
    The system ``stretto`` lets collectives that block compute go before those that do not, and earlier ones before
    later ones, and plans them again for the bandwidth that others in flight leave to them.

    Args:
        workload: The training step; all its ranks do the same.
        dims: The dimensions of the network; their sizes multiply to the workload's ranks.
        system: One of `SYSTEMS`.
        chunks: How many chunks a collective is cut into, 1..65536.
        in_flight: The most stages that share a dimension, as in `simulate`.
        sharing: "ordered" or "equal", as in `simulate`.

    Returns:
        The time of the iteration and its parts.

    Raises:
        InvalidInput: The system is unknown, or the workload does not fit the network.
    """
    if system not in SYSTEMS:
        raise unknown("system", system, SYSTEMS)
    if not 1 <= chunks <= MAX_CHUNKS:
        raise InvalidInput(f"chunks: must be 1..{MAX_CHUNKS}, not {chunks}")
    if len(workload.places) > 1:
        raise InvalidInput(f"{workload.name}: its ranks do different things; here all have to do the same")
    ops = _sorted(workload)
    streams = list(dict.fromkeys(op.stream for op in ops if not op.is_comm))
    network = _Network(check_dims(dims), workload.num_ranks, system, chunks, in_flight, sharing, streams)
    waits = _waits(ops)
    if system == "ideal":
        return _ideal(ops, waits, network)
    best = run = _run(ops, waits, network, [network.parts(op) if op.is_comm else () for op in ops])
    if system == "stretto" and sum(op.is_comm for op in ops) <= MAX_AROUND:
        bound = _ideal(ops, waits, network).total_us
        for _ in range(ROUNDS):
            if best.total_us <= GOOD_ENOUGH * bound:
                break
            run = _run(ops, waits, network, _around(ops, waits, network, run))
            best = min(best, run, key=lambda each: each.total_us)
    found = _account(system, ops, waits, best.starts, best.ends, best.total_us, None)
    return replace(found, utilization=_used(ops, waits, best, network))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    jobs: list[ChunkJob]
    starts: Floats
    ends: Floats
    busy: Floats

    @property
    def total_us(self) -> float:
        return float(self.ends.max(initial=0.0))


def _run(
    ops: Sequence[Op], waits: Sequence[tuple[int, ...]], network: _Network, parts: Sequence[tuple[Part, ...]]
) -> _Run:
    jobs = [replace(network.job(op, at, parts[at]), after=waits[at]) for at, op in enumerate(ops)]
    starts, ends, busy = simulate_jobs(network.rates, jobs, in_flight=network.in_flight, sharing=network.sharing)
    return _Run(jobs=jobs, starts=starts, ends=ends, busy=busy)


def _around(
    ops: Sequence[Op], waits: Sequence[tuple[int, ...]], network: _Network, run: _Run
) -> list[tuple[Part, ...]]:
    """The dimensions of each op's group, with the bandwidth that other ops left to it while it was pending."""
    rates = np.array([dim.bytes_per_us for dim in network.dims])
    comm = [at for at, op in enumerate(ops) if op.is_comm]
    stages = [run.jobs[at].stages for at in comm]
    sent = np.array([np.bincount(each.dim, each.wire_bytes, len(rates)) for each in stages])
    ready = np.array([max((run.ends[other] for other in waits[at]), default=0.0) for at in comm])
    end = run.ends[comm]
    length = np.maximum(end - ready, 1e-9)
    overlap = np.minimum(end[:, None], end) - np.maximum(ready[:, None], ready)
    overlap = np.clip(overlap / length, 0.0, 1.0)  # as a share of the time that the column's op is pending
    np.fill_diagonal(overlap, 0.0)
    left = np.clip(1 - overlap @ sent / (rates * length[:, None]), LEAST_LEFT, 1.0)
    found: list[tuple[Part, ...]] = [()] * len(ops)
    for row, at in enumerate(comm):
        mine = network.parts(ops[at])
        most = max(left[row, number] for number, _ in mine) if mine else 1.0
        found[at] = tuple(
            (number, replace(dim, gb_per_s=dim.gb_per_s * round(float(left[row, number] / most), 2)))
            for number, dim in mine
        )
    return found


def _waits(ops: Sequence[Op]) -> list[tuple[int, ...]]:
    """The ops that each op waits for; compute also waits for the previous op of its stream."""
    number = {op.name: at for at, op in enumerate(ops)}
    before: dict[str, int] = {}
    waits = []
    for at, op in enumerate(ops):
        after = {number[dep.op] for dep in op.after if dep.lag == 0}
        if not op.is_comm:
            if op.stream in before:
                after.add(before[op.stream])
            before[op.stream] = at
        waits.append(tuple(sorted(after)))
    return waits


def _ideal(ops: Sequence[Op], waits: Sequence[tuple[int, ...]], network: _Network) -> IterationTime:
    needs = [
        Need(after=after, kind=op.kind, nbytes=op.nbytes, parts=network.parts(op))
        if op.is_comm
        else Need(after=after, duration_us=op.duration_us)
        for op, after in zip(ops, waits, strict=True)
    ]
    starts, ends, total, last = relaxed([dim.bytes_per_us for dim in network.dims], needs)
    return _account("ideal", ops, waits, starts, ends, total, last)


def _sorted(workload: Workload) -> list[Op]:
    """The ops, each after those that it waits for; in the listed order where that is possible."""
    needs = {op.name: [dep.op for dep in op.after if dep.lag == 0] for op in workload.ops}
    listed = all(workload.index[dep] < at for at, op in enumerate(workload.ops) for dep in needs[op.name])
    return list(workload.ops) if listed else [workload.op(name) for name in TopologicalSorter(needs).static_order()]


class _Network:
    """The network of one iteration: it turns ops into jobs, and keeps the plan for each kind, size and group."""

    def __init__(
        self, dims: tuple[Dim, ...], num_ranks: int, system: str, chunks: int, in_flight: int, sharing: str,
        streams: Sequence[str],
    ) -> None:  # fmt: skip
        self.dims, self.num_ranks, self.system = dims, num_ranks, system
        self.chunks, self.in_flight, self.sharing = chunks, in_flight, sharing
        if int(np.prod([dim.size for dim in dims])) != num_ranks:
            sizes = "x".join(str(dim.size) for dim in dims)
            raise InvalidInput(f"ranks: the workload has {num_ranks}, the network {sizes}")
        self.rates = [dim.bytes_per_us for dim in dims] + [1.0] * len(streams)
        self.streams = {stream: len(dims) + at for at, stream in enumerate(streams)}
        self.spans: dict[tuple[tuple[int, ...], ...], tuple[Part, ...]] = {}
        self.planned: dict[tuple[str, float, tuple[Part, ...]], ChunkJob] = {}

    def job(self, op: Op, at: int, parts: tuple[Part, ...]) -> ChunkJob:
        """The op as chunks on dimensions, planned for `parts`; compute is one chunk on a dimension of its own."""
        if not op.is_comm:
            return ChunkJob(stages=_one(self.streams[op.stream], op.duration_us))
        key = op.kind, op.nbytes, parts
        if key not in self.planned:
            self.planned[key] = self._plan(*key)
        blocking = not op.name.startswith(DATA_PARALLEL)
        return replace(self.planned[key], priority=0 if blocking or self.system != "stretto" else 1 + at)

    def parts(self, op: Op) -> tuple[Part, ...]:
        """The dimensions that the op's groups span.

        All groups must be neighbouring devices, or all must be the devices with the same position in such groups.
        """
        if op.kind not in SUPPORTED:
            raise InvalidInput(f"{op.name}: {unknown('collective', op.kind, SUPPORTED)}")
        if op.groups not in self.spans:
            self.spans[op.groups] = self._span(op)
        return self.spans[op.groups]

    def _span(self, op: Op) -> tuple[Part, ...]:
        size = len(op.groups[0]) if op.groups else self.num_ranks
        everybody = np.arange(self.num_ranks)
        if self.num_ranks % size == 0 and all(len(group) == size for group in op.groups):
            told = np.array(sorted(op.groups) if op.groups else [everybody], np.int64)
            if np.array_equal(told, everybody.reshape(-1, size)):
                return split(self.dims, size)[0]
            if np.array_equal(told, everybody.reshape(size, -1).T):
                return split(self.dims, self.num_ranks // size)[1]
        raise InvalidInput(
            f"{op.name}.groups: must be all ranks in groups of neighbours, or those with the same place in such groups"
        )

    def _plan(self, kind: str, nbytes: float, parts: tuple[Part, ...]) -> ChunkJob:
        if kind == "all_to_all":
            return ChunkJob(stages=_all_to_all(parts, nbytes, self.chunks))
        schedule = plan(
            self.system, [dim for _, dim in parts], kind, nbytes, chunks=self.chunks, in_flight=self.in_flight,
            sharing=self.sharing,
        )  # fmt: skip
        numbers = np.array([at for at, _ in parts], np.int32)
        stages = replace(schedule.stages, dim=numbers[schedule.stages.dim])
        return ChunkJob(stages=stages, keys=None if schedule.discipline == "fifo" else keys(schedule))


def _one(dim: int, nbytes: float) -> Stages:
    one = np.array([nbytes])
    return Stages(
        chunk_ptr=np.array([0, 1]), dim=np.array([dim], np.int32), before_bytes=one, wire_bytes=one,
        latency_us=np.zeros(1),
    )  # fmt: skip


def _all_to_all(parts: Sequence[Part], nbytes: float, chunks: int) -> Stages:
    """The stages of an all-to-all: each chunk visits all dimensions and never shrinks, so that any order will do."""
    count = len(parts) * chunks
    sent = [dim.all_to_all_bytes(nbytes / chunks) for _, dim in parts]
    waits = [dim.step_us * (dim.size // 2 if dim.kind == "ring" else 1) for _, dim in parts]
    return Stages(
        chunk_ptr=np.arange(0, count + 1, len(parts)), dim=np.tile([at for at, _ in parts], chunks).astype(np.int32),
        before_bytes=np.full(count, nbytes / chunks), wire_bytes=np.tile(sent, chunks),
        latency_us=np.tile(waits, chunks),
    )  # fmt: skip


def _account(
    system: str, ops: Sequence[Op], waits: Sequence[tuple[int, ...]], starts: Floats, ends: Floats, total: float,
    last: int | None,
) -> IterationTime:  # fmt: skip
    """Account for the time of an iteration; `last` is the op that compute waits for in the end, by default the one
    that ends last."""
    exposed = {True: 0.0, False: 0.0}
    spent: dict[str, float] = {}
    clock = 0.0

    def wait(until: float, after: Iterable[int]) -> None:
        culprit = max((at for at in after if ops[at].is_comm), key=lambda at: ends[at], default=None)
        if until > clock and culprit is not None:
            exposed[ops[culprit].name.startswith(DATA_PARALLEL)] += until - clock

    for at, op in enumerate(ops):
        if op.is_comm:
            continue
        wait(float(starts[at]), waits[at])
        spent[op.phase] = spent.get(op.phase, 0.0) + op.duration_us
        clock = max(clock, float(ends[at]))
    wait(total, range(len(ops)) if last is None else [last])
    return IterationTime(
        system=system, total_us=total, forward_us=spent.get("forward", 0.0),
        backward_us=sum(time for phase, time in spent.items() if phase != "forward"),
        data_parallel_us=exposed[True], model_parallel_us=exposed[False], utilization=1.0,
    )  # fmt: skip


def _used(ops: Sequence[Op], waits: Sequence[tuple[int, ...]], run: _Run, network: _Network) -> float:
    """The bytes that all dimensions sent, divided by those that they could have sent while an op was pending."""
    pending: list[list[tuple[float, float]]] = [[] for _ in network.dims]
    for at, op in enumerate(ops):
        if op.is_comm:
            ready = max((float(run.ends[other]) for other in waits[at]), default=0.0)
            for number in {number for number, _ in network.parts(op)}:
                pending[number].append((ready, float(run.ends[at])))
    rates = [dim.bytes_per_us for dim in network.dims]
    possible = sum(rate * _union(spans) for rate, spans in zip(rates, pending, strict=True))
    sent = sum(rate * float(time) for rate, time in zip(rates, run.busy, strict=False))
    return sent / possible if possible else 1.0


def _union(spans: Sequence[tuple[float, float]]) -> float:
    total, reach = 0.0, 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return total
