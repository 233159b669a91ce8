"""Training steps on a multi-dimensional network: forward, backward, and the communication that nothing hides (Fig. 12).

All collectives of a `Workload` run on the dimensions that their groups span, all in flight share them, and compute
waits for what it needs. A group is everybody, neighbouring devices, or devices with the same place in such groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

import numpy as np

from ..errors import InvalidInput, unknown
from ..workload.dag import Op, Workload
from .model import COLLECTIVES, Dim, Part, check_dims, ideal_us, split
from .schedule import Stages
from .schedulers import CHUNKS
from .simulation import IN_FLIGHT, Floats, Job, keys, simulate_jobs
from .systems import SCHEDULERS, plan

SYSTEMS = (*SCHEDULERS, "ideal")
DATA_PARALLEL = ("ar-", "rs-", "ag-")
"""How the names of collectives of gradients and parameters begin, in all models."""
SUPPORTED = (*COLLECTIVES, "all_to_all")


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Where the time of one iteration goes."""

    system: str
    total_us: float
    forward_us: float
    backward_us: float
    data_parallel_us: float
    """Exposed: compute waits for gradients or parameters."""
    model_parallel_us: float
    """Exposed: compute waits for activations or embeddings."""
    utilisation: float
    """Of the bandwidth of the groups' dimensions, while there is communication pending."""

    @property
    def exposed_us(self) -> float:
        """Communication that nothing hides."""
        return self.data_parallel_us + self.model_parallel_us


def iteration(
    workload: Workload,
    dims: Sequence[Dim],
    system: str = "stretto",
    *,
    chunks: int = CHUNKS,
    in_flight: int = IN_FLIGHT,
    sharing: str = "ordered",
) -> Iteration:
    """Simulate one iteration from its begin until nothing is left to do.

    In ``ideal`` each collective gets all the bandwidth of its group's dimensions without latency, one after the other.
    Ours lets collectives that block compute go before those that do not, and earlier ones before later ones.
    """
    if system not in SYSTEMS:
        raise unknown("system", system, SYSTEMS)
    if len(workload.places) > 1:
        raise InvalidInput(f"{workload.name}: its ranks do different things; here all have to do the same")
    ops = _sorted(workload)
    streams = list(dict.fromkeys(op.stream for op in ops if not op.is_comm))
    network = _Network(check_dims(dims), workload.num_ranks, system, chunks, in_flight, sharing, streams)
    number = {op.name: at for at, op in enumerate(ops)}
    before: dict[str, int] = {}
    jobs = []
    for at, op in enumerate(ops):
        after = {number[dep.op] for dep in op.after if dep.lag == 0}
        if not op.is_comm:
            if op.stream in before:
                after.add(before[op.stream])
            before[op.stream] = at
        jobs.append(replace(network.job(op, at), after=tuple(sorted(after))))
    starts, ends, _ = simulate_jobs(network.rates, jobs, in_flight=in_flight, sharing=sharing)
    return _account(system, ops, jobs, starts, ends, network)


def _sorted(workload: Workload) -> list[Op]:
    """The ops with each after what it waits for, otherwise as they are listed."""
    needs = {op.name: [dep.op for dep in op.after if dep.lag == 0] for op in workload.ops}
    listed = all(workload.index[dep] < at for at, op in enumerate(workload.ops) for dep in needs[op.name])
    return list(workload.ops) if listed else [workload.op(name) for name in TopologicalSorter(needs).static_order()]


class _Network:
    """Turns ops into jobs; remembers what was planned for one of the same kind, size and group."""

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
        self.servers: dict[tuple[int, ...], int] = {}
        self.planned: dict[tuple[str, float, tuple[Part, ...]], Job] = {}

    def job(self, op: Op, at: int) -> Job:
        """The op as chunks on dimensions; compute is one chunk on a dimension of its own."""
        if not op.is_comm:
            return Job(stages=_one(self.streams[op.stream], op.duration_us))
        if op.kind not in SUPPORTED:
            raise InvalidInput(f"{op.name}: {unknown('collective', op.kind, SUPPORTED)}")
        parts = self.parts(op)
        key = op.kind, op.nbytes, parts
        if key not in self.planned:
            self.planned[key] = self._plan(*key)
        blocking = not op.name.startswith(DATA_PARALLEL)
        return replace(self.planned[key], priority=0 if blocking or self.system != "stretto" else 1 + at)

    def parts(self, op: Op) -> tuple[Part, ...]:
        """The dimensions that the op's groups span."""
        everybody = tuple(enumerate(self.dims))
        if not op.groups:
            return everybody
        group, size = op.groups[0], len(op.groups[0])
        if size == self.num_ranks:
            return everybody
        if group == tuple(range(group[0], group[0] + size)):
            return split(self.dims, size)[0]
        if group == tuple(range(group[0], self.num_ranks, self.num_ranks // size)):
            return split(self.dims, self.num_ranks // size)[1]
        raise InvalidInput(f"{op.name}.groups: must be neighbours, or the same place in groups of neighbours")

    def _plan(self, kind: str, nbytes: float, parts: tuple[Part, ...]) -> Job:
        if self.system == "ideal":
            where = tuple(at for at, _ in parts)
            if where not in self.servers:
                self.servers[where] = len(self.rates)
                self.rates.append(1.0)
            return Job(stages=_one(self.servers[where], ideal_part_us(kind, nbytes, parts)))
        if kind == "all_to_all":
            return Job(stages=_all_to_all(parts, nbytes, self.chunks))
        schedule = plan(
            self.system, [dim for _, dim in parts], kind, nbytes, chunks=self.chunks, in_flight=self.in_flight,
            sharing=self.sharing,
        )  # fmt: skip
        numbers = np.array([at for at, _ in parts], np.int32)
        stages = replace(schedule.stages, dim=numbers[schedule.stages.dim])
        return Job(stages=stages, keys=None if schedule.discipline == "fifo" else keys(schedule))


def ideal_part_us(kind: str, nbytes: float, parts: Sequence[Part]) -> float:
    """The time of a collective alone when every dimension of its group sends all the time."""
    dims = [dim for _, dim in parts]
    if kind == "all_to_all":
        return max(dim.all_to_all_bytes(nbytes) / dim.bytes_per_us for dim in dims)
    return ideal_us(dims, kind, nbytes)


def _one(dim: int, nbytes: float) -> Stages:
    one = np.array([nbytes])
    return Stages(
        chunk_ptr=np.array([0, 1]), dim=np.array([dim], np.int32), before_bytes=one, wire_bytes=one,
        latency_us=np.zeros(1),
    )  # fmt: skip


def _all_to_all(parts: Sequence[Part], nbytes: float, chunks: int) -> Stages:
    """Chunk by chunk through the dimensions; nothing shrinks, so that the order does not matter for the load."""
    count = len(parts) * chunks
    sent = [dim.all_to_all_bytes(nbytes / chunks) for _, dim in parts]
    waits = [dim.step_us * (dim.size // 2 if dim.kind == "ring" else 1) for _, dim in parts]
    return Stages(
        chunk_ptr=np.arange(0, count + 1, len(parts)), dim=np.tile([at for at, _ in parts], chunks).astype(np.int32),
        before_bytes=np.full(count, nbytes / chunks), wire_bytes=np.tile(sent, chunks),
        latency_us=np.tile(waits, chunks),
    )  # fmt: skip


def _account(
    system: str, ops: Sequence[Op], jobs: Sequence[Job], starts: Floats, ends: Floats, network: _Network
) -> Iteration:
    exposed = {True: 0.0, False: 0.0}
    spent: dict[str, float] = {}
    clock = 0.0
    total = float(ends.max())

    def wait(until: float, after: Sequence[int]) -> None:
        culprit = max((at for at in after if ops[at].is_comm), key=lambda at: ends[at], default=None)
        if until > clock and culprit is not None:
            exposed[ops[culprit].name.startswith(DATA_PARALLEL)] += until - clock

    pending: list[tuple[float, float]] = []
    ideal = 0.0
    for at, op in enumerate(ops):
        ready = max((float(ends[other]) for other in jobs[at].after), default=0.0)
        if op.is_comm:
            pending.append((ready, float(ends[at])))
            ideal += ideal_part_us(op.kind, op.nbytes, network.parts(op))
            continue
        wait(float(starts[at]), jobs[at].after)
        spent[op.phase] = spent.get(op.phase, 0.0) + op.duration_us
        clock = max(clock, float(ends[at]))
    wait(total, range(len(ops)))
    return Iteration(
        system=system, total_us=total, forward_us=spent.get("forward", 0.0),
        backward_us=sum(time for phase, time in spent.items() if phase != "forward"),
        data_parallel_us=exposed[True], model_parallel_us=exposed[False],
        utilisation=ideal / _union(pending) if pending else 1.0,
    )  # fmt: skip


def _union(spans: Sequence[tuple[float, float]]) -> float:
    total, reach = 0.0, 0.0
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reach))
        reach = max(reach, end)
    return total
