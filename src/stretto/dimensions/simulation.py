# SPDX-License-Identifier: Apache-2.0
"""The simulator of schedules on one device that stands for all: one collective, or many jobs with dependencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..errors import InvalidInput, unknown
from .model import MOST_US, Dim, ideal_us
from .schedule import DimSchedule, Stages

SHARINGS = ("ordered", "equal")
IN_FLIGHT = 16
MAX_IN_FLIGHT = 1 << 20
TIE = 1e-6

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DimRun:
    """The result of a simulation: when each stage held a slot, and how long each dimension sent."""

    schedule: DimSchedule
    dims: tuple[Dim, ...]
    total_us: float
    start_us: Floats
    end_us: Floats
    busy_us: Floats
    in_flight: int
    sharing: str

    @property
    def utilization(self) -> float:
        """The share of all bandwidth of all dimensions that was used, 0..1."""
        return ideal_us(self.dims, self.schedule.collective, self.schedule.nbytes) / self.total_us

    @property
    def dim_utilization(self) -> Floats:
        """The share of the time that each dimension was sending, 0..1."""
        return self.busy_us / self.total_us

    def activity(self, window_us: float) -> Floats:
        """For each dimension and window of time, the share in which some chunk was present (the paper's Fig. 9).

        A chunk is present in a dimension from when its stage gets a slot until it gives the slot back.
        """
        if not 0 < window_us < math.inf or self.total_us / window_us > 1 << 20:
            raise InvalidInput(f"window_us: must be > 0 and make at most {1 << 20} windows, not {window_us:g}")
        edges = np.arange(0.0, self.total_us + window_us, window_us)
        edges[-1] = max(self.total_us, edges[-2] + 1e-12) if len(edges) > 1 else self.total_us
        rows = []
        for at in range(len(self.dims)):
            mine = self.schedule.stages.dim == at
            rows.append(np.diff(_covered(self.start_us[mine], self.end_us[mine], edges)) / np.diff(edges))
        return np.array(rows)

    def enforced(self) -> DimSchedule:
        """The schedule with the order fixed in which the stages began here (section 4.6 of the paper)."""
        table = self.schedule.stages
        order: list[list[tuple[int, int]]] = [[] for _ in self.dims]
        # Stages that start at the same moment were taken in the order of the discipline, which their ends reveal.
        for at in np.lexsort((np.arange(len(table.dim)), self.end_us, self.start_us)).tolist():
            chunk = int(table.chunk[at])
            order[table.dim[at]].append((chunk, at - int(table.chunk_ptr[chunk])))
        return replace(self.schedule, order=tuple(map(tuple, order)))

    def __repr__(self) -> str:
        from ..units import format_us

        return (
            f"<DimRun {self.schedule.name}: {format_us(self.total_us)}, {100 * self.utilization:.1f} % of all "
            f"bandwidth ({self.in_flight} in flight, {self.sharing})>"
        )


def simulate(
    schedule: DimSchedule,
    *,
    in_flight: int = IN_FLIGHT,
    sharing: str = "ordered",
    release_us: Sequence[float] | None = None,
    dims: Sequence[Dim] | None = None,
) -> DimRun:
    """Run a schedule on one device that stands for all.

    Args:
        schedule: The schedule.
        in_flight: The most stages, >= 1, that share a dimension; their latencies overlap.
        sharing: Whether the rate of a dimension goes to the first stage in flight by the queue discipline ("ordered")
            or to all stages in flight alike ("equal").
        release_us: The time at which each chunk becomes available, >= 0; 0 when not given.
        dims: The real rates and latencies of the network, where the schedule was made with wrong ones.

    Returns:
        The times of all stages.

    Raises:
        InvalidInput: An argument is out of range, or `dims` have other kinds or sizes than the schedule's.
    """
    _check(in_flight, sharing)
    count = len(schedule.chunks)
    table = schedule.stages
    real = schedule.dims if dims is None else tuple(dims)
    if [(dim.kind, dim.size, dim.in_network) for dim in real] != [
        (dim.kind, dim.size, dim.in_network) for dim in schedule.dims
    ]:
        raise InvalidInput("dims: must be of the kinds and sizes that the schedule is for; only rates may differ")
    if release_us is not None and (len(release_us) != count or not all(0 <= each <= MOST_US for each in release_us)):
        raise InvalidInput(f"release_us: must be {count} times 0..{MOST_US:g}, one for each chunk")
    start, end, busy = _native.simulate_dimensions(
        rate=np.array([d.bytes_per_us for d in real]), chunk_ptr=table.chunk_ptr, dim=table.dim,
        bytes=table.wire_bytes, latency=np.array([d.latency_us for d in real])[table.dim],
        key=keys(schedule),
        release=np.zeros(count) if release_us is None else np.asarray(release_us, np.float64),
        job=np.zeros(count, np.int32), after_ptr=np.zeros(2, np.int64), after=np.zeros(0, np.int32),
        priority=np.zeros(1, np.int64), fifo=np.array([schedule.discipline == "fifo"]), turn=_turns(schedule),
        in_flight=in_flight, ordered=sharing == "ordered",
    )  # fmt: skip
    _check_ended(end)
    return DimRun(
        schedule=schedule, dims=real, total_us=float(end.max(initial=0.0)), start_us=start, end_us=end, busy_us=busy,
        in_flight=in_flight, sharing=sharing,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkJob:
    """Chunks that begin together, once all jobs numbered in `after` are over; jobs with a lower `priority` go first."""

    stages: Stages
    keys: Floats | None = None
    """A key per stage, of which the smallest goes first; None for first come, first served."""
    after: tuple[int, ...] = ()
    priority: int = 0


def simulate_jobs(
    rates: Sequence[float], jobs: Sequence[ChunkJob], *, in_flight: int = IN_FLIGHT, sharing: str = "ordered"
) -> tuple[Floats, Floats, Floats]:
    """Simulate many jobs on the same dimensions.

    Args:
        rates: The rate of each dimension in bytes per microsecond.
        jobs: The jobs; a job may only wait for earlier ones.
        in_flight: The most stages that share a dimension, as in `simulate`.
        sharing: "ordered" or "equal", as in `simulate`.

    Returns:
        For each job when it first held a slot and when it ended (both 0 for a job without chunks), and for each
        dimension how long it sent, all in microseconds.

    Raises:
        InvalidInput: A job waits for a later one, or a stage can never end.
    """
    _check(in_flight, sharing)
    for number, job in enumerate(jobs):
        if any(not 0 <= other < number for other in job.after):
            raise InvalidInput(f"jobs[{number}].after: may only name jobs before it")
    counts = np.array([len(job.stages.chunk_ptr) - 1 for job in jobs])
    lengths = [np.diff(job.stages.chunk_ptr) for job in jobs]
    waits = [np.array(job.after, np.int32) for job in jobs]
    job_of = np.repeat(np.arange(len(jobs), dtype=np.int32), counts)
    ptr = np.concatenate([[0], *lengths]).cumsum().astype(np.int64)
    start, end, busy = _native.simulate_dimensions(
        rate=np.asarray(rates, np.float64), chunk_ptr=ptr, dim=np.concatenate([job.stages.dim for job in jobs]),
        bytes=np.concatenate([job.stages.wire_bytes for job in jobs]),
        latency=np.concatenate([job.stages.latency_us for job in jobs]),
        key=np.concatenate([job.stages.before_bytes if job.keys is None else job.keys for job in jobs]),
        release=np.zeros(len(job_of)), job=job_of,
        after_ptr=np.concatenate([[0], np.cumsum([len(row) for row in waits])]).astype(np.int64),
        after=np.concatenate(waits), priority=np.array([job.priority for job in jobs], np.int64),
        fifo=np.array([job.keys is None for job in jobs]), turn=np.zeros(0, np.int64), in_flight=in_flight,
        ordered=sharing == "ordered",
    )  # fmt: skip
    _check_ended(end)
    owner = np.repeat(job_of, np.diff(ptr))
    begins, ends = np.full(len(jobs), np.inf), np.zeros(len(jobs))
    np.minimum.at(begins, owner, start)
    np.maximum.at(ends, owner, end)
    return np.where(np.isfinite(begins), begins, 0.0), ends, busy


def keys(schedule: DimSchedule) -> Floats:
    """The key of each stage, of which the smallest goes first, by the rates that the schedule was made with."""
    table = schedule.stages
    if schedule.discipline == "enforced":
        return _turns(schedule).astype(np.float64)
    if schedule.discipline != "johnson":
        # Of equal chunks the one with the shorter stage goes first: Themis then needs the 7 units of its Fig. 5, else
        # 8.
        return np.asarray(table.before_bytes + TIE * table.wire_bytes)
    rate = np.array([dim.bytes_per_us for dim in schedule.dims])
    here = table.wire_bytes / rate[table.dim] + table.latency_us
    following = np.append(here[1:], 0.0)
    following[table.chunk_ptr[1:] - 1] = 0.0
    return np.asarray(here - following)


def _turns(schedule: DimSchedule) -> NDArray[np.int64]:
    table = schedule.stages
    turn = np.zeros(len(table.dim) if schedule.order else 0, np.int64)
    for order in schedule.order:
        for position, (chunk, stage) in enumerate(order):
            turn[table.chunk_ptr[chunk] + stage] = position
    return turn


def _covered(start: Floats, end: Floats, edges: Floats) -> Floats:
    """The time before each edge that at least one of the intervals covers."""
    if not len(start):
        return np.zeros(len(edges))
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    fresh = np.append(True, start[1:] > reach[:-1])
    begins, ends = start[fresh], reach[np.append(np.flatnonzero(fresh)[1:] - 1, len(start) - 1)]
    return np.asarray(np.clip(edges[:, None] - begins, 0.0, ends - begins).sum(axis=1))


def _check_ended(end: Floats) -> None:
    if len(end) and not end.min() >= 0:
        raise InvalidInput(f"stages: {int(np.count_nonzero(~(end >= 0)))} of {len(end)} can never end")


def _check(in_flight: int, sharing: str) -> None:
    if not 1 <= in_flight <= MAX_IN_FLIGHT:
        raise InvalidInput(f"in_flight: must be 1..{MAX_IN_FLIGHT}, not {in_flight}")
    if sharing not in SHARINGS:
        raise unknown("sharing", sharing, SHARINGS)
