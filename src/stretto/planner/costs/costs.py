# SPDX-License-Identifier: Apache-2.0
"""The cost of a bound motif: simulated, measured, or measured where there is a measurement and simulated elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from ...cluster.alike_hosts import HostSymmetry, Renaming
from ...cluster.model import LARGE_MESSAGE
from ...errors import Infeasible, InvalidInput
from ...programs import Program
from ...simulator.network import Routing, default_contention, routes_of, routes_vary, simulate_transfers
from ..algebra.recipes import MotifRequest, Provider, build, library
from .channels import Binding, default_binding, require_connected, restrict
from .concurrent import ConcurrentProgram, together

GRID_BYTES = 1024
GRID_RATIO = 4
"""Sizes are simulated at 1 KiB, 4 KiB, 16 KiB, ...; in between the time is linear, below 1 KiB it is constant."""
CPU_REDUCE_US_PER_MB = 100.0
"""Assumed time of a reduction at each rank if host code drives the motif (10 GB/s, one core's share of memory)."""
LAUNCH_US = 10.0
CPU_LAUNCH_US = 30.0
"""Assumed microseconds to issue one motif: as a GPU kernel, or through host code with its staging copies."""

Groups = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The time of a motif, and how it is known.

    A simulated time begins once the motif has been issued. A measured time includes the launch: `with_launch`.
    """

    us: float
    source: str
    with_launch: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.us < math.inf:
            raise InvalidInput(f"us: the cost of a motif must be a number >= 0, not {self.us!r} (from {self.source!r})")


@dataclass(frozen=True, kw_only=True)
class Motion:
    """The subject of a cost: one motif in each of several disjoint groups at once, on some channels.

    Attributes:
        kind: The collective (`COLLECTIVES`), or ``send``.
        groups: The devices of each group; the groups share none.
        channels: The channels of the cluster that the messages may use.
        root: The position of the root in each group, for rooted kinds.
        window: Of an all-to-all: (first, width), so that each rank sends only to those from ``first`` to ``first +
            width - 1`` places behind it; None for all.
    """

    kind: str
    groups: tuple[tuple[int, ...], ...]
    channels: tuple[str, ...]
    root: int = 0
    window: tuple[int, int] | None = None

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.groups, self.channels, self.root, self.window))

    def __hash__(self) -> int:
        """The hash is cached: tables are asked for the same motion thousands of times, and groups are long."""
        return self._hash

    def ask(self, at: int = 0) -> MotifRequest:
        """The request for one of the groups."""
        return MotifRequest(kind=self.kind, group=self.groups[at], root=self.root, window=self.window)


class CostModel(Protocol):
    """A cost model: gives the time of a motif, and the algorithms that can move it.

    Pass an instance as ``costs=`` to `plan`, `problem` or `retime`. Only the process that plans calls it, from one
    thread; the ranks of a job never do. For every motif and size the planner first calls `algorithms`, then `cost` with
    some of the returned names, thousands of times in all: answers should be cached. A model may assume that
    `motion.groups` are disjoint sets of device numbers of `cluster` with at least two ranks each, that
    `motion.channels` are channels of `cluster`, and that ``nbytes > 0``. Equal arguments must give equal answers.

    A model that can also bound a cost from below without computing it implements `Bounding`.

    Attributes:
        cluster: the cluster that the costs are for.
    """

    cluster: Cluster

    def algorithms(self, motion: Motion, nbytes: float) -> list[str]:
        """The names of the algorithms that `cost` knows for this motif.

        A plan is carried out with the library's program of that name (a recipe, docs/costs.md); one with other names
        can only be timed. The order breaks ties between equally fast algorithms. An empty list means that the model
        cannot move this motif on these channels; options that need it are left out.
        """
        ...

    def cost(self, motion: Motion, nbytes: float, algorithm: str, *, exact: bool = False) -> Cost:
        """The time of a motif by one algorithm, from the start of all groups at once to the end of the last.

        For one algorithm the time must not fall as `nbytes` grows, and k times the bytes may take at most k times as
        long: the planner skips algorithms by these two properties.

        Args:
            motion: the motif, its groups and its channels.
            nbytes: bytes as the group's `Collective` counts them, > 0.
            algorithm: one of the names that `algorithms` returned for this motion and size.
            exact: whether the time must be that of exactly this size; otherwise it may be interpolated.

        Returns:
            The time in microseconds; its `source` begins with one word and a colon, such as ``measured: file.csv``.

        Raises:
            Infeasible: the channels or the algorithm cannot carry the motif; the planner then tries another.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class LinkLoads:
    """The links that a motif uses over all its groups, and how long each byte of its size keeps them busy."""

    links: NDArray[np.int32]
    us_per_byte: NDArray[np.float64]


@runtime_checkable
class Bounding(Protocol):
    """A cost model that can rule out an algorithm without costing it; the planner calls `at_least_us` before `cost`."""

    def at_least_us(self, motion: Motion, nbytes: float, algorithm: str) -> float:
        """A lower bound on the cost.

        Args:
            motion: the motif, its groups and its channels.
            nbytes: bytes as the group's `Collective` counts them, > 0.
            algorithm: one of the names that `algorithms` returned.

        Returns:
            Microseconds that ``cost(...).us`` is not below; 0 if nothing is known, infinite if the algorithm cannot
            run.
        """
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class _Run:
    """A program on the part of the cluster that it uses, in the form that the simulator takes at any size."""

    program: Program
    part: Cluster

    @cached_property
    def varies(self) -> bool:
        """Whether the routes depend on the size."""
        return routes_vary(self.program, self.part)

    def routed(self, nbytes: float) -> Routing:
        """Each transfer's connection and route for a collective of this size, and the links of all routes."""
        return routes_of(self.program, self.part, nbytes=nbytes) if self.varies else self._routed

    @cached_property
    def _routed(self) -> Routing:
        return routes_of(self.program, self.part, nbytes=LARGE_MESSAGE)

    def links(self, nbytes: float) -> NDArray[np.int32]:
        """Every link that the program uses for a collective of this size, once."""
        return np.unique(self.routed(nbytes)[3])

    def link_us(self, nbytes: float) -> NDArray[np.float64]:
        """The time of every link for its share, without latency and waiting; multicasts do not count."""
        _, route, ptr, links = self.routed(nbytes)
        sizes = self.program.transfer_bytes(nbytes)
        if self.program.multicasts:
            sizes = np.where(self.program.cast >= 0, 0.0, sizes)
        per_route = np.bincount(route, sizes, minlength=len(ptr) - 1)
        load = np.bincount(links, np.repeat(per_route, np.diff(ptr)), minlength=self.part.num_links)
        return load / self.part.link_gb_per_s / 1e3

    def least_us(self, nbytes: float) -> float:
        """The time of the busiest link for its share, without latency and waiting."""
        return float(self.link_us(nbytes).max(initial=0.0))

    def total_us(self, nbytes: float) -> float:
        p = self.program
        connection, route, ptr, links = self.routed(nbytes)
        times = simulate_transfers(
            self.part, routes=(ptr, links), route=route, connection=connection, nbytes=p.transfer_bytes(nbytes),
            after=(p.after_ptr, p.after), reduce=p.reduce, gate=(p.gate_ptr, p.gate), gate_reads=p.gate_reads,
            cast=p.cast if p.multicasts else None,
        )  # fmt: skip
        return float(times.end_us.max(initial=0.0))


class SimulatedCosts:
    """Costs by the link-level simulator: verified programs of all groups at once, on the channels they are bound to.

    `providers` add algorithms to those of the library. If a binding is driven by the CPU, a reduction costs
    `cpu_reduce_us_per_mb` at each receiver.

    >>> costs = SimulatedCosts(Cluster.preset("dgx2"))
    >>> motion = Motion(kind="all_gather", groups=(tuple(range(16)),), channels=("nvlink",))
    >>> cost = costs.cost(motion, 16e6, "ring", exact=True)
    >>> round(cost.us, 3), cost.source
    (124.5, 'simulated: ring on nvlink, fifo')
    """

    def __init__(
        self, cluster: Cluster, *, providers: Sequence[Provider] = (),
        cpu_reduce_us_per_mb: float = CPU_REDUCE_US_PER_MB,
    ) -> None:  # fmt: skip
        self.cluster = cluster
        self.simulations = 0
        """The number of simulations run so far."""
        self._providers = tuple(providers)
        self._cpu_reduce = cpu_reduce_us_per_mb
        self._renamings: dict[tuple[tuple[tuple[int, ...], ...], tuple[str, ...]], Renaming] = {}
        self._parts: dict[tuple[str, ...], Cluster] = {}
        self._named: dict[tuple[str, ...], str] = {}
        self._images: dict[Motion, Motion] = {}
        self._programs: dict[tuple[Motion, str, float], Program] = {}
        self._runs: dict[tuple[Motion, str, float], tuple[_Run, ...]] = {}
        self._least: dict[tuple[Motion, str], float] = {}
        self._loads: dict[tuple[Motion, str, float], LinkLoads] = {}
        self._times: dict[tuple[Motion, str, float], float] = {}

    @cached_property
    def symmetry(self) -> HostSymmetry:
        """The hosts that can change places: a motif is costed once for all its images."""
        return HostSymmetry(self.cluster)

    @property
    def library_only(self) -> bool:
        """Whether all algorithms are the library's, so that images of a motif have the same algorithms."""
        return not self._providers

    def renamed(self, groups: tuple[tuple[int, ...], ...], channels: tuple[str, ...]) -> Renaming:
        """The groups with the names of the first hosts alike; images of each other get the same names."""
        key = (groups, channels)
        if key not in self._renamings:
            self._renamings[key] = self.symmetry.renamed(groups, channels)
        return self._renamings[key]

    def _image(self, motion: Motion) -> Motion:
        """The motion that stands for this one and all its images."""
        if motion not in self._images:
            groups = self.renamed(motion.groups, motion.channels).groups
            self._images[motion] = motion if groups == motion.groups else replace(motion, groups=groups)
        return self._images[motion]

    def algorithms(self, motion: Motion, nbytes: float) -> list[str]:
        """The library's algorithms for the size of the groups, then those of the providers."""
        return [*library(motion.ask()), *self._provided(motion, nbytes)]

    def cost(self, motion: Motion, nbytes: float, algorithm: str, *, exact: bool = False) -> Cost:
        """The simulated time.

        Args:
            motion: the motif, its groups and its channels.
            nbytes: bytes as the group's `Collective` counts them, > 0.
            algorithm: name of an algorithm of the library or of a provider.
            exact: whether exactly this size is simulated; otherwise the time is interpolated between the sizes of a
                grid.

        Returns:
            The time in microseconds, without the launch.

        Raises:
            InvalidInput: `nbytes` is not a positive number.
            Infeasible: the channels or the algorithm do not serve the groups.
        """
        if not (math.isfinite(nbytes) and nbytes > 0):
            raise InvalidInput(f"nbytes: must be > 0, not {nbytes}")
        source = f"simulated: {algorithm} on {self._where(motion.channels)}"
        if exact or algorithm not in library(motion.ask()):
            # A provider may make another program for each size, so times between two sizes cannot be interpolated.
            return Cost(us=self._time(motion, algorithm, nbytes), source=source)
        return Cost(us=interpolated(nbytes, lambda size: self._time(motion, algorithm, size)), source=source)

    def at_least_us(self, motion: Motion, nbytes: float, algorithm: str) -> float:
        """The time of the busiest link, for algorithms of the library.

        Args:
            motion: the motif, its groups and its channels.
            nbytes: bytes as the group's `Collective` counts them.
            algorithm: name of the algorithm.

        Returns:
            Microseconds; 0 for a provider's algorithm, infinite for one that cannot run.
        """
        if algorithm not in library(motion.ask()):
            return 0.0
        motion = self._image(motion)
        key = (motion, algorithm)
        if key not in self._least:
            try:
                runs = self._prepared(motion, algorithm, nbytes)
            except Infeasible:
                self._least[key] = math.inf
            else:
                if any(run.varies for run in runs):
                    return max(run.least_us(nbytes) for run in runs)
                self._least[key] = max(run.least_us(1.0) for run in runs)
        return self._least[key] * nbytes

    def link_loads(self, motion: Motion, nbytes: float, algorithm: str) -> LinkLoads:
        """The load of every link that the groups use together.

        Args:
            motion: the motif, its groups and its channels.
            nbytes: bytes, for algorithms of providers, which may make another program for each size.
            algorithm: name of the algorithm.

        Returns:
            Links of the whole cluster, with their time per byte.

        Raises:
            InvalidInput: the algorithm is unknown or not defined for the motif.
        """
        known = algorithm in library(motion.ask())
        key = (motion, algorithm, 0.0 if known else nbytes)
        image = self._image(motion) if known else motion
        if image != motion:
            found = self.link_loads(image, nbytes, algorithm)
            links = self.symmetry.links(found.links, self.renamed(motion.groups, motion.channels))
            sort = np.argsort(links)
            return LinkLoads(links=links[sort].astype(np.int32), us_per_byte=found.us_per_byte[sort])
        if key not in self._loads:
            part = self.part(motion)
            programs = [self.program(motion, nbytes, algorithm, at) for at in range(len(motion.groups))]
            runs = [_Run(program=program, part=part) for program in programs]
            if any(run.varies for run in runs) and key[2] != nbytes:
                key = (motion, algorithm, nbytes)
                if key in self._loads:
                    return self._loads[key]
            us_per_byte = np.sum([run.link_us(nbytes) for run in runs], axis=0) / nbytes
            used = np.flatnonzero(us_per_byte)
            number = self._link_numbers(part)
            self._loads[key] = LinkLoads(links=number[used].astype(np.int32), us_per_byte=us_per_byte[used])
        return self._loads[key]

    def _link_numbers(self, part: Cluster) -> NDArray[np.int64]:
        """The links of a part of the cluster by their numbers in the whole."""
        mine = [self.cluster.channels.index(channel) for channel in part.channels]
        return np.flatnonzero(np.isin(self.cluster.link_channel, mine))

    def program(self, motion: Motion, nbytes: float, algorithm: str, at: int = 0) -> Program:
        """The verified program that one of the groups runs.

        Args:
            motion: the motif, its groups and its channels.
            nbytes: bytes, for algorithms of providers, which may make another program for each size.
            algorithm: name of the algorithm.
            at: index of the group.

        Returns:
            The program, over the group's devices.

        Raises:
            InvalidInput: the algorithm is unknown or not defined for the motif.
            VerificationError: a provider's program is wrong.
        """
        made = algorithm not in library(motion.ask())
        key = (replace(motion, groups=(motion.groups[at],)), algorithm, nbytes if made else 0.0)
        if key not in self._programs:
            if made:
                offered = self._provided(key[0], nbytes)
                if algorithm not in offered:
                    raise InvalidInput(f"algorithm {algorithm!r}: nobody offers it for {motion.kind}")
                program = offered[algorithm]()
                program.verify()
            elif at and self._alike(motion, at):
                # The first group's program is proved; this one differs only in the names of its devices.
                first = self.program(motion, nbytes, algorithm)
                program = first.replace(collective=replace(first.collective, ranks=motion.groups[at]))
            else:
                program = build(algorithm, key[0].ask(), self.part(motion))
                program.verify()
            self._programs[key] = program
        return self._programs[key]

    def _alike(self, motion: Motion, at: int) -> bool:
        """Whether a group lies on its hosts in the same way as the first one, so that it gets the same program."""
        return _layout(self.cluster, motion.groups[0]) == _layout(self.cluster, motion.groups[at])

    def _provided(self, motion: Motion, nbytes: float) -> dict[str, Callable[[], Program]]:
        part = self.part(motion)
        return {name: make for one in self._providers for name, make in one(motion.ask(), part, nbytes).items()}

    def _time(self, motion: Motion, algorithm: str, nbytes: float) -> float:
        if algorithm in library(motion.ask()):
            motion = self._image(motion)
        key = (motion, algorithm, nbytes)
        if key not in self._times:
            self._times[key] = self._simulate(motion, algorithm, nbytes)
        return self._times[key]

    def _simulate(self, motion: Motion, algorithm: str, nbytes: float) -> float:
        self.simulations += 1
        return max(run.total_us(nbytes) for run in self._prepared(motion, algorithm, nbytes))

    def _prepared(self, motion: Motion, algorithm: str, nbytes: float) -> tuple[_Run, ...]:
        """The programs to simulate; raises `Infeasible` if the channels or the algorithm do not serve the groups."""
        key = (motion, algorithm, 0.0 if algorithm in library(motion.ask()) else nbytes)
        if key not in self._runs:
            require_connected(self.cluster, motion.groups, motion.channels)
            try:
                self._runs[key] = self._contending(motion, algorithm, nbytes)
            except InvalidInput as error:
                raise Infeasible(f"{motion.kind} by {algorithm} on {'+'.join(motion.channels)}: {error}") from None
        return self._runs[key]

    def _contending(self, motion: Motion, algorithm: str, nbytes: float) -> tuple[_Run, ...]:
        """The programs to simulate: those of all groups merged, or, if groups share no link, one of each sort."""
        part = self.part(motion)
        if len(motion.groups) > 1 and algorithm in library(motion.ask()):
            apart = self._apart(motion, algorithm, nbytes)
            if apart:
                return apart
        programs = [self.program(motion, nbytes, algorithm, at) for at in range(len(motion.groups))]
        made = [_Run(program=program, part=part) for program in programs]
        used = [run.links(nbytes) for run in made]
        if len(made) == 1:
            return tuple(made)
        if not any(run.varies for run in made):
            every = np.concatenate(used)
            if len(np.unique(every)) == len(every):
                keys = [(self._shape(run.program), self._sort(part, own)) for run, own in zip(made, used, strict=True)]
                return tuple(dict(zip(keys, made, strict=True)).values())
        one, _ = together([ConcurrentProgram(program=program, nbytes=nbytes) for program in programs], part)
        return (_Run(program=one, part=part),)

    def _apart(self, motion: Motion, algorithm: str, nbytes: float) -> tuple[_Run, ...]:
        """If groups share no link, one program for all groups that are images of each other; else nothing."""
        part = self.part(motion)
        number = self._link_numbers(part)
        made: dict[tuple[tuple[int, ...], ...], tuple[_Run, NDArray[np.int64]]] = {}
        used: list[NDArray[np.int64]] = []
        for group in motion.groups:
            renaming = self.renamed((group,), motion.channels)
            if renaming.groups not in made:
                run = _Run(program=self.program(replace(motion, groups=renaming.groups), nbytes, algorithm), part=part)
                if run.varies:
                    return ()
                made[renaming.groups] = run, number[run.links(nbytes)]
            used.append(self.symmetry.links(made[renaming.groups][1], renaming))
        every = np.concatenate(used)
        return tuple(run for run, _ in made.values()) if len(np.unique(every)) == len(every) else ()

    @staticmethod
    def _shape(program: Program) -> bytes:
        """A key that is equal for programs that send the same messages between ranks of the same numbers."""
        return program.src.tobytes() + program.dst.tobytes() + program.chunk.tobytes()

    @staticmethod
    def _sort(part: Cluster, links: NDArray[np.integer]) -> bytes:
        rows = np.stack([part.link_alpha_us[links], part.link_gb_per_s[links], part.link_incast[links]])
        return rows[:, np.lexsort(rows)].tobytes()

    def _where(self, channels: tuple[str, ...]) -> str:
        if channels not in self._named:
            part = restrict(self.cluster, channels)
            how = default_contention(part)
            self._named[channels] = f"{'+'.join(part.channels)}, {how}"
        return self._named[channels]

    def part(self, motion: Motion) -> Cluster:
        """The links that a motion may use, with the cost of reductions there."""
        if motion.channels not in self._parts:
            part = restrict(self.cluster, motion.channels)
            if not set(motion.channels) <= set(default_binding(self.cluster).channels):
                part = replace(part, reduce_us_per_mb=max(part.reduce_us_per_mb, self._cpu_reduce))
            self._parts[motion.channels] = part
        return self._parts[motion.channels]


@lru_cache(maxsize=4)
def simulated_costs(cluster: Cluster) -> SimulatedCosts:
    """The simulated costs of a cluster with the library's algorithms, cached per process."""
    return SimulatedCosts(cluster)


def simulator_of(costs: CostModel) -> SimulatedCosts:
    """The model that knows programs: the model itself if it simulates, else the cluster's simulated costs."""
    return costs if isinstance(costs, SimulatedCosts) else simulated_costs(costs.cluster)


@lru_cache(maxsize=4096)
def _layout(cluster: Cluster, group: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """For each rank the number of its host in the group, and its position among the host's devices."""
    host = cluster.hosts_of(group)
    all_hosts = cluster.hosts_of(range(cluster.num_devices))
    number = {value: at for at, value in enumerate(dict.fromkeys(host.tolist()))}
    first = {value: int(np.flatnonzero(all_hosts == value)[0]) for value in number}
    direct = bool(np.any((cluster.node_kind[cluster.link_src] == 0) & (cluster.node_kind[cluster.link_dst] == 0)))
    return tuple((number[h], rank - first[h] if direct else 0) for rank, h in zip(group, host.tolist(), strict=True))


def launch_us(binding: Binding, cost: Cost | None = None) -> float:
    """Microseconds to issue one motif on a binding; 0 if the cost includes the launch already."""
    if cost is not None and cost.with_launch:
        return 0.0
    return CPU_LAUNCH_US if binding.cpu_driven else LAUNCH_US


def interpolated(nbytes: float, time: Callable[[float], float]) -> float:
    """The time at a size, linear between the two neighboring sizes of the grid.

    >>> interpolated(3000.0, lambda size: 1.0 + size / 1000)
    4.0
    """
    if nbytes <= GRID_BYTES:
        return time(float(GRID_BYTES))
    step = math.floor(math.log(nbytes / GRID_BYTES, GRID_RATIO) + 1e-12)
    low = float(GRID_BYTES * GRID_RATIO**step)
    if nbytes <= low:
        return time(low)
    before, after = time(low), time(low * GRID_RATIO)
    share = (nbytes - low) / (low * GRID_RATIO - low)
    return before + (after - before) * share
