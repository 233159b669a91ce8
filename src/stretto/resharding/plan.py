# SPDX-License-Identifier: Apache-2.0
"""`plan_reshard`: a plan that moves tensors from one layout to another, with its time and its lower bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..cluster import Cluster
from ..collectives.reshard import Reshard, largest_buffer
from ..errors import InvalidInput, unknown
from ..programs import Program
from ..simulator import Timeline, lower_bound, simulate
from ..simulator.network import default_contention
from ..units import check_seed, format_bytes, format_us
from .assign import ORDERS, Assignment, assign, jobs_of
from .balance import host_bound_us
from .balanced import best_program
from .bundles import Bundle, bundles_of, check_messages
from .hosts import Hosts
from .moves import Moves
from .placing import Side, place
from .spec import Layout
from .strategies import STRATEGIES, ReshardArguments, add_up, summed
from .tasks import Box, Tensor, UnitTask, decompose

OURS = "stretto"
SYSTEMS = (*STRATEGIES, OURS)
DEFAULT_ORDER = {"broadcast": "ensemble"}
MAX_BOUND_BUNDLES, MAX_BOUND_DEVICES = 4096, 256
"""Limits for the general lower bound, which looks at every bundle and device; beyond them the hosts' bound is used."""


@dataclass(frozen=True, kw_only=True)
class BufferRegion:
    """Part of a device's buffer: a box of a tensor in row-major order, at `offset` bytes."""

    tensor: int
    box: Box
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class ScheduledBundle:
    """One row of the schedule: a bundle, the devices that send it first, and its simulated start and end."""

    bundle: int
    senders: tuple[int, ...]
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ReshardPlan:
    """A planned resharding: unit tasks, their senders and order, the program, its time and its lower bound."""

    tensors: tuple[Tensor, ...]
    cluster: Cluster
    strategy: str
    order: str
    tasks: tuple[UnitTask, ...]
    bundles: tuple[Bundle, ...]
    devices: tuple[int, ...]
    model_us: float | None
    """The time in the model that chose the order (ports or hosts, no latencies); None if no model did."""
    program: Program | None
    """The program; None if every device already holds what it wants."""
    bound_us: float
    bound_reason: str
    nbytes: int
    """Bytes of the largest buffer of any device, as the program's collective counts them."""
    note: str = ""
    """What the order's algorithm could not do: a depth-first search that gave up."""
    timelines: Mapping[str, Timeline] = field(default_factory=dict)
    """The program as it was simulated when it was chosen, by contention."""

    @cached_property
    def timeline(self) -> Timeline | None:
        """The simulated program, with the cluster's default contention; None if there is nothing to move."""
        return self.simulate()

    @property
    def time_us(self) -> float:
        """The simulated time in microseconds."""
        return self.timeline.total_us if self.timeline is not None else 0.0

    @property
    def ratio(self) -> float:
        """The time as a multiple of the lower bound; 1 is optimal."""
        return self.time_us / self.bound_us if self.bound_us > 0 else 1.0

    def simulate(self, contention: str | None = None, *, load_slots: int = 0) -> Timeline | None:
        """Simulate the program on the cluster, link by link; None if there is nothing to move."""
        if self.program is None:
            return None
        known = self.timelines.get(contention or default_contention(self.cluster))
        if known is not None and not load_slots:
            return known
        return simulate(self.program, self.cluster, nbytes=self.nbytes, contention=contention, load_slots=load_slots)

    @cached_property
    def schedule(self) -> tuple[ScheduledBundle, ...]:
        """Senders and times of each bundle, sorted by start."""
        if self.program is None or self.timeline is None:
            return ()
        first = np.cumsum([0, *(b.chunks for b in self.bundles)])
        owner = np.searchsorted(first, self.program.chunk, side="right") - 1
        rows = []
        for number in np.unique(owner).tolist():
            mine = np.flatnonzero(owner == number)
            bundle = self.bundles[number]
            held = {d for alike in bundle.holders for d in alike}
            senders = {self.devices[r] for r in np.unique(self.program.src[mine]).tolist()} & held
            rows.append(
                ScheduledBundle(
                    bundle=number,
                    senders=tuple(sorted(senders)),
                    start_us=float(self.timeline.start_us[mine].min()),
                    end_us=float(self.timeline.end_us[mine].max()),
                )
            )
        return tuple(sorted(rows, key=lambda row: (row.start_us, row.bundle)))

    def inputs(self, device: int) -> list[BufferRegion]:
        """The regions of a device's input buffer, in order; pack them before running the program."""
        return self._regions(lambda b: any(device in alike for alike in b.holders))

    def outputs(self, device: int) -> list[BufferRegion]:
        """The regions of a device's output buffer, in order; unpack them after running the program."""
        return self._regions(lambda b: device in b.receivers)

    def _regions(self, mine: Callable[[Bundle], bool]) -> list[BufferRegion]:
        found: list[BufferRegion] = []
        offset = 0
        for b in self.bundles:
            if mine(b):
                for t in b.tasks:
                    task = self.tasks[t]
                    found.append(BufferRegion(tensor=task.tensor, box=task.box, offset=offset, nbytes=task.nbytes))
                    offset += task.nbytes
        return found

    def explain(self) -> str:
        """A few lines of text: the bytes moved, their senders, the time and the reason for its bound."""
        moved = sum(t.nbytes for t in self.tasks if t.missing)
        there = sum(not t.missing for t in self.tasks)
        lines = [
            f"{len(self.tasks)} unit tasks in {len(self.bundles)} bundles, {format_bytes(moved)} to move"
            + (f"; {there} tasks are in place already" if there else ""),
            f"{self.strategy} ({self.order}): {format_us(self.time_us)}, {self.ratio:.3f}x the bound of "
            f"{format_us(self.bound_us)} ({self.bound_reason})",
            *([self.note] if self.note else []),
        ]
        for row in self.schedule[:16]:
            b = self.bundles[row.bundle]
            lines.append(
                f"  {format_us(row.start_us):>10} .. {format_us(row.end_us):>10}  {format_bytes(b.nbytes):>9} from "
                f"{_names(row.senders)} to {_names(b.missing)}"
            )
        if len(self.schedule) > 16:
            lines.append(f"  and {len(self.schedule) - 16} more")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"<ReshardPlan {self.strategy}: {len(self.tasks)} unit tasks on {self.cluster.name}, "
            f"{format_us(self.time_us)}, {self.ratio:.3f}x the bound>"
        )


def plan_reshard(
    *,
    src: Layout | Side | str,
    dst: Layout | Side | str,
    shape: Sequence[int],
    dtype_bytes: int = 4,
    cluster: Cluster,
    strategy: str = OURS,
    order: str | None = None,
    concurrent: bool = False,
    helpers: Sequence[int] = (),
    seed: int = 0,
) -> ReshardPlan:
    """Plan how to move one tensor from layout `src` to layout `dst`, on the same, other or overlapping devices.

    >>> hosts = Cluster.preset("p3_8xlarge", nodes=4)
    >>> plan = plan_reshard(src="(2,4) S0RR", dst="(2,4) S0RR", shape=(64, 64, 64), cluster=hosts)
    >>> len(plan.tasks), plan.ratio < 1.1
    (2, True)

    Args:
        src: the source layout; or a mesh and a spec as text such as ``(2,4) S0RR``, placed on the cluster by `place`.
        dst: the destination layout, of the same form as `src`.
        shape: sizes of the tensor, each >= 1.
        dtype_bytes: bytes of one element, 1..64.
        cluster: the cluster.
        strategy: one of `SYSTEMS`.
        order: for a baseline the algorithm that chooses senders and order, one of `ORDERS`; None takes its default.
        concurrent: whether a baseline issues everything at once instead of in order.
        helpers: further devices that may pass data on, so that their ports are used too.
        seed: seed of randomized orders, >= 0.

    Returns:
        The plan with its program, time and lower bound.

    Raises:
        InvalidInput: a layout, strategy or order is invalid, or the resharding too large.
    """
    if isinstance(src, Layout) and isinstance(dst, Layout):
        sides = src, dst
    elif isinstance(src, Layout) or isinstance(dst, Layout):
        raise InvalidInput("src, dst: give both as layouts or both as text")
    else:
        sides = place(src, dst, cluster)
    tensor = Tensor(shape=tuple(int(n) for n in shape), dtype_bytes=dtype_bytes, src=sides[0], dst=sides[1])
    return plan_tensors(
        [tensor], cluster, strategy=strategy, order=order, concurrent=concurrent, helpers=helpers, seed=seed
    )


def plan_tensors(
    tensors: Sequence[Tensor],
    cluster: Cluster,
    *,
    strategy: str = OURS,
    order: str | None = None,
    concurrent: bool = False,
    helpers: Sequence[int] = (),
    seed: int = 0,
    tasks: Sequence[UnitTask] | None = None,
) -> ReshardPlan:
    """Plan how to move many tensors (a state dict) at once; tasks between the same devices travel together.

    Args:
        tensors: the tensors, at least one.
        cluster: the cluster.
        strategy: one of `SYSTEMS`.
        order: for a baseline the algorithm that chooses senders and order, one of `ORDERS`; None takes its default.
        concurrent: whether a baseline issues everything at once instead of in order.
        helpers: further devices that may pass data on, so that their ports are used too.
        seed: seed of randomized orders, >= 0.
        tasks: the unit tasks of the tensors, or parts of them, to be planned; None takes all.

    Returns:
        The plan with its program, time and lower bound.

    Raises:
        InvalidInput: an argument is invalid, or the resharding too large.
    """
    check_seed(seed)
    if strategy not in SYSTEMS:
        raise unknown("strategy", strategy, SYSTEMS)
    if not tensors:
        raise InvalidInput("tensors: at least one tensor must be given")
    if strategy == OURS and (order is not None or concurrent):
        raise InvalidInput("order, concurrent: only baselines take them; stretto finds its own order")
    how = order or DEFAULT_ORDER.get(strategy, "in_order")
    if how not in ORDERS:
        raise unknown("order", how, ORDERS)
    tasks = tuple(tasks) if tasks is not None else decompose(tensors)
    devices = tuple(sorted({d for t in tensors for side in (t.src, t.dst) for d in side.mesh.devices} | set(helpers)))
    hosts = Hosts.of(cluster, devices)
    rank = {device: at for at, device in enumerate(devices)}
    whole = bundles_of(tasks, merge=True)
    nbytes = largest_buffer(len(devices), [b.piece(rank) for b in whole])
    bound_us, reason = _bound(whole, cluster, hosts, rank, nbytes)
    bundles, program, model_us, note = list(whole), None, None, ""
    timelines: dict[str, Timeline] = {}
    if strategy != OURS:
        bundles, program, model_us, note = _baseline(tasks, hosts, rank, strategy, how, concurrent, seed)
        how = "concurrent" if concurrent else how
    elif any(b.missing for b in whole):
        made = best_program(whole, cluster, hosts, rank, nbytes=nbytes, bound_us=bound_us)
        bundles, program, model_us, how = made.bundles, made.program, made.model_us, made.how
        timelines = made.timelines
    return ReshardPlan(
        tensors=tuple(tensors), cluster=cluster, strategy=strategy, order=how, tasks=tasks, bundles=tuple(bundles),
        devices=devices, model_us=model_us, program=program, bound_us=bound_us,
        bound_reason=reason, nbytes=nbytes, note=note, timelines=timelines,
    )  # fmt: skip


def _bound(
    bundles: Sequence[Bundle], cluster: Cluster, hosts: Hosts, rank: dict[int, int], nbytes: int
) -> tuple[float, str]:
    if not any(b.missing for b in bundles):
        return 0.0, "everything is where it is wanted"
    least_us = host_bound_us(bundles, hosts)
    if len(bundles) <= MAX_BOUND_BUNDLES and cluster.num_devices <= MAX_BOUND_DEVICES:
        general = lower_bound(Reshard(tuple(rank), [b.piece(rank) for b in bundles]), cluster, nbytes)
        if general.total_us >= least_us:
            return general.total_us, general.reason
    return least_us, "what the busiest host has to send or receive"


def _baseline(
    tasks: Sequence[UnitTask], hosts: Hosts, rank: dict[int, int], strategy: str, order: str, concurrent: bool,
    seed: int,
) -> tuple[list[Bundle], Program | None, float | None, str]:  # fmt: skip
    work, cut = STRATEGIES[strategy]
    bundles = [b.cut(cut(summed(b), hosts)) for b in bundles_of(tasks, merge=False)]
    check_messages(bundles)
    sums = [summed(b) for b in bundles]
    chosen: Assignment = assign(order, jobs_of(sums, hosts), seed)
    arguments = ReshardArguments(hosts=hosts, assignment=chosen, concurrent=concurrent)
    first = np.cumsum([0, *(b.chunks for b in bundles)]).tolist()
    moves = Moves(rank)
    for number in chosen.order:
        add_up(moves, bundles[number], first[number])
        work(moves, sums[number], number, first[number], arguments)
    program = None
    if moves.src:
        program = moves.program(f"reshard_{strategy}", Reshard(tuple(rank), [b.piece(rank) for b in bundles]))
    model_us = chosen.total_us if strategy == "broadcast" and not concurrent else None
    return bundles, program, model_us, f"{order}: {chosen.note}" if chosen.note else ""


def _names(devices: Sequence[int]) -> str:
    listed = ",".join(str(d) for d in devices[:8])
    return listed + (",..." if len(devices) > 8 else "")
