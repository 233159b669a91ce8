# SPDX-License-Identifier: Apache-2.0
"""`probe`: measures a running job's network and says what cluster it runs on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...cluster import Cluster
from ...dimensions.discovery import discover
from ...errors import InvalidInput
from ...units import format_bytes, format_us
from ..executor.executor import Executor
from .build import build
from .find import ProbeFindings, find
from .match import RING_BYTES, Match, host_order, match, match_presets, ring_us
from .meter import COMMUNICATOR, MEMORY, TIMEOUT_S, JobMeter

WORTH = 1.01
"""An order of ranks is proposed where it is predicted to be faster by that factor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbeResult:
    """What a job runs on, as it was measured."""

    cluster: Cluster
    found: ProbeFindings
    match: Match | None
    """The known cluster that this is, and how its devices are numbered there."""
    renumbering: tuple[int, ...]
    """``renumbering[new]`` is the rank that should have the number `new`; in order where that gains nothing."""
    ring_us: float
    """What a ring all-reduce of `RING_BYTES` over the ranks in order is predicted to take."""
    renumbered_ring_us: float
    """What that all-reduce is predicted to take with the ranks in the order of `renumbering`."""
    seconds: float
    """How long the measurements took."""

    @property
    def fit_error(self) -> Mapping[str, float]:
        """By channel: how far the measured times are from the lines that the rates come from, as a share."""
        errors = {net.name: net.error for net in self.found.networks}
        return errors if self.found.memory is None else {MEMORY: self.found.memory.error, **errors}

    @property
    def groups(self) -> Mapping[str, tuple[tuple[int, ...], ...]]:
        """Which ranks share a ``host``, and by channel which share an uplink."""
        uplinks = {net.name: tuple(port.ranks for port in net.ports) for net in self.found.networks}
        return {"host": self.found.hosts, **uplinks}

    @property
    def preset(self) -> str | None:
        """The name of the known cluster, if this is one."""
        return None if self.match is None else self.match.name

    @property
    def gain(self) -> float:
        """How many times faster a ring is predicted to be after renumbering."""
        return self.ring_us / self.renumbered_ring_us if self.renumbered_ring_us else 1.0

    def lines(self) -> list[str]:
        """The findings as lines for a terminal."""
        said = [f"{self.cluster!r}"[1:-1] + f", measured in {self.seconds:.1f} s"]
        said += [f"host {at}: ranks {_ranks(ranks)}" for at, ranks in enumerate(self.found.hosts)]
        memory = self.found.memory
        if memory is not None:
            said.append(f"{MEMORY}: {memory.gb_per_s:.3g} GB/s, {memory.alpha_us:.3g} us, fit {memory.error:.1%}")
        for net in self.found.networks:
            said.append(f"{net.name}: {net.alpha_us:.3g} us, fit {net.error:.1%}")
            for port in net.ports:
                rates = f"{port.out_gb_per_s:.4g} GB/s out, {port.in_gb_per_s:.4g} in"
                said.append(f"  uplink of host {port.host}, ranks {_ranks(port.ranks)}: {rates}")
            for trunk in net.trunks:
                rates = f"{trunk.out_gb_per_s:.4g} GB/s out, {trunk.in_gb_per_s:.4g} in"
                said.append(f"  hosts {_ranks(trunk.hosts)} share a link: {rates}")
        said += self.found.notes
        if self.cluster.dimensions:
            each = (
                f"{d.kind} of {d.size}, {d.gb_per_s:.4g} GB/s, {d.alpha_us:.3g} us" for d in self.cluster.dimensions
            )
            said.append(f"dimensions: {'; '.join(each)} (rates of a rank while all send)")
        if self.match is not None:
            said.append(f"matches {self.match.name}; the rates differ by at most {self.match.error:.1%}")
        if self.renumbering != tuple(range(len(self.renumbering))):
            before, after = format_us(self.ring_us), format_us(self.renumbered_ring_us)
            said.append(f"renumber: new rank 0, 1, ... should be the present {_list(self.renumbering)}")
            said.append(f"  a ring all-reduce of {format_bytes(RING_BYTES)} then takes {after} instead of {before}")
        return said


def probe(
    job: Executor | Any,
    *,
    channels: Iterable[str] | None = None,
    known: Cluster | None = None,
    name: str = "probed",
    timeout_s: float = TIMEOUT_S,
    communicator: int = COMMUNICATOR,
    advance: Callable[[str], None] = lambda label: None,
) -> ProbeResult:
    """Measure the network of a running job. All its ranks call this at the same time, and all get the same answer.

    `job` is an `Executor`, or a process group of the ``stretto`` backend (the whole job is then measured). `known` is
    a cluster to compare with; else the presets are. It takes some seconds, in which nothing else should run; a rank
    that is lost meanwhile ends it in `PeerLost`.

    Args:
        job: An `Executor`, or a process group of the backend `stretto`.
        channels: The networks to measure. Default: all.
        known: The cluster to compare with. Default: the presets.
        name: The name of the cluster.
        timeout_s: After which one measurement fails.
        communicator: A communicator's number that nobody uses.
        advance: Called with the name of each part that is done.

    Returns:
        The cluster, and how ranks are best numbered.

    Raises:
        InvalidInput: The job has one rank, or no executor.
        PeerLost: A rank is gone.
    """
    executor = job if isinstance(job, Executor) else _executor_of(job)
    if executor.world_size < 2:
        raise InvalidInput("probe: a job of one rank has no network to measure; start at least two ranks")
    begun = time.monotonic()
    meter = JobMeter(executor, channels=channels, communicator=communicator, timeout_s=timeout_s)
    found = find(meter, advance=advance)
    seconds = float(meter.agree([time.monotonic() - begun]).max())
    return conclude(found, known=known, name=name, seconds=seconds)


def conclude(
    found: ProbeFindings, *, known: Cluster | None = None, name: str = "probed", seconds: float = 0.0
) -> ProbeResult:
    """What follows from the measurements: a cluster, its dimensions, what it is known as, and how to number ranks.

    Args:
        found: The measurements.
        known: The cluster to compare with. Default: the presets.
        name: The name of the cluster.
        seconds: How long it took.

    Returns:
        The result.
    """
    cluster = build(found, name=name)
    one = match_presets(cluster) if known is None else match(cluster, known)
    count = cluster.num_devices
    hosts = {rank: host for host, ranks in enumerate(found.hosts) for rank in ranks}
    ports = [port.ranks for port in found.networks[0].ports] if found.networks else ()
    plain = tuple(range(count))
    before = ring_us(cluster, plain)
    orders = [host_order([hosts[rank] for rank in plain], ports)]
    if one is not None:
        orders.insert(0, one.order)
    times = [(ring_us(cluster, order), order) for order in orders]
    after, order = min(times, key=lambda pair: pair[0])
    if before < WORTH * after:
        after, order = before, plain
    if order == plain:
        # Where ranks should be numbered in another way, a grid in the present order would be one to avoid.
        cluster = replace(cluster, dimensions=discover(cluster))
    return ProbeResult(
        cluster=cluster, found=found, match=one, renumbering=order, ring_us=before, renumbered_ring_us=after,
        seconds=seconds,
    )  # fmt: skip


def _executor_of(group: Any) -> Executor:
    """The executor under the process group of a PyTorch job."""
    from ..torch_backend.engine import CURRENT_JOB

    job = CURRENT_JOB.job
    if job is None or job.executor is None:
        why = job.why if job is not None else "no process group of the stretto backend"
        raise InvalidInput(f"probe: the job has no executor: {why}")
    if group.size() != job.executor.world_size:
        raise InvalidInput(f"probe: give the group of all {job.executor.world_size} ranks, not one of {group.size()}")
    return job.executor


def _ranks(ranks: tuple[int, ...]) -> str:
    """``0-3``, or ``0,2,4``."""
    if len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))


def _list(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
