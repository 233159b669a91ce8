# SPDX-License-Identifier: Apache-2.0
"""What a motif costs above the job's own backend, NCCL or gloo: by that backend's own times in this job.

A plan above NCCL or gloo chooses pieces, communicators and order; algorithms stay the backend's. So no algorithm of our
library is offered here, however fast it would be: a sum over all ranks takes what the backend takes for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..cluster import Cluster, Link, Node
from ..errors import Infeasible
from ..planner.costs.channels import Scope, bindings_for, scope_of
from ..planner.costs.costs import Cost, Motion
from ..planner.costs.measured import NCCL

LOCAL, NETWORK = "local", "network"
"""Channels of a cluster that was found by such times: communicators inside of hosts, and between them."""
DIRECT = "direct"
MAX_TIMES, MAX_SIZES = 64, 16
MOTIF_US = 150.0
"""What the host takes to queue a motif above NCCL, with its events and copies, beside the collective: chosen, not
measured. Without it plans have so many pieces that the GPU waits for the host."""
Positive = Annotated[float, Meta(gt=0, le=1e15)]
Library = Literal["nccl", "gloo"]
LIBRARIES: tuple[Library, ...] = ("nccl", "gloo")
Count = Annotated[int, Meta(ge=1, le=1 << 20)]


class OwnTime(msgspec.Struct, frozen=True, kw_only=True):
    """What a collective of the backend takes, by its bytes (the larger of a rank's send and receive buffer)."""

    library: Library = "nccl"
    kind: Annotated[str, Meta(max_length=32)]
    scope: Scope
    ranks: Count
    """The number of ranks of a group."""
    groups: Count = 1
    """That did the same at once."""
    times: Annotated[tuple[tuple[Positive, Positive], ...], Meta(min_length=1, max_length=MAX_SIZES)]
    """Bytes and microseconds, by growing bytes."""


def share_of_bytes(kind: str, ranks: int) -> float:
    """The bytes that a rank sends for each byte of a collective, as rings and straight sends do.

    >>> share_of_bytes("all_reduce", 4), share_of_bytes("all_gather", 4), share_of_bytes("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if kind in ("broadcast", "reduce", "send"):
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks


@dataclass(frozen=True, kw_only=True)
class _Line:
    """Times by size: straight lines between what was measured, never falling; beyond it goes on like the last.

    No size takes less for each byte than the largest: a link that was idle lets a burst through, which no plan has all
    the time.
    """

    sizes: tuple[float, ...]
    times_us: tuple[float, ...]

    def at(self, nbytes: float) -> float:
        if nbytes <= self.sizes[0] or len(self.sizes) == 1:
            return self.times_us[0]
        right = min(bisect_right(self.sizes, nbytes), len(self.sizes) - 1)
        (x0, x1), (y0, y1) = self.sizes[right - 1 : right + 1], self.times_us[right - 1 : right + 1]
        return y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0)


def _line(time: OwnTime) -> _Line:
    rows = sorted(dict(time.times).items())
    highest, times_us = 0.0, []
    per_byte_us = rows[-1][1] / rows[-1][0]
    for nbytes, us in rows:
        highest = max(highest, us, nbytes * per_byte_us)
        times_us.append(highest)
    return _Line(sizes=tuple(nbytes for nbytes, _ in rows), times_us=tuple(times_us))


class OwnCosts:
    """A `CostModel` of one algorithm, the backend's own, by what its collectives took in the job.

    Of a kind that was not timed, and of groups of another size, the time follows from one that was, by the bytes that
    each rank sends. Groups inside of hosts do not slow each other; of several groups between hosts the time lies
    between that of one and that of all.
    """

    def __init__(self, cluster: Cluster, times: Iterable[OwnTime]) -> None:
        self.cluster = cluster
        times = tuple(times)
        self._library = times[0].library if times else NCCL
        self._lines: dict[tuple[Scope, str], list[tuple[int, int, _Line]]] = {}
        for time in times:
            found = self._lines.setdefault((time.scope, time.kind), [])
            found.append((time.groups, time.ranks, _line(time)))
            found.sort(key=lambda row: row[:2])
        self._usual: dict[tuple[tuple[int, ...], ...], tuple[str, ...]] = {}

    def algorithms(self, motion: Motion, nbytes: float) -> list[str]:
        """The backend's, on the channels that the groups usually take; none for what was not timed."""
        if motion.groups not in self._usual:
            self._usual[motion.groups] = bindings_for(self.cluster, motion.groups)[0].channels
        if motion.channels != self._usual[motion.groups] or not self._known(motion):
            return []
        # Sends, and all-to-alls whose sizes follow the data, are planned as straight ones only.
        return [DIRECT] if motion.kind in ("send", "all_to_all") or motion.window is not None else [self._library]

    def cost(self, motion: Motion, nbytes: float, algorithm: str, *, exact: bool = False) -> Cost:
        """The time by what was measured.

        Args:
            motion: the motif, its groups and its channels.
            nbytes: bytes as the group's `Collective` counts them, > 0.
            algorithm: one of the names that `algorithms` returned.
            exact: not used: there is no time but the measured ones.

        Returns:
            The time in microseconds, with the launch.

        Raises:
            Infeasible: nothing was timed that says what this takes.
        """
        known = self._known(motion)
        if algorithm not in (self._library, DIRECT) or not known:
            raise Infeasible(f"{motion.kind} by {algorithm} of {len(motion.groups[0])} ranks: was not timed")
        us = max(self._group_us(motion, known, len(group), nbytes) for group in motion.groups)
        return Cost(us=us, source=f"measured: {self._library}'s {motion.kind} in this job", with_launch=True)

    def _known(self, motion: Motion) -> tuple[str, list[tuple[int, int, _Line]]] | None:
        scope = scope_of(self.cluster, motion.groups)
        for kind in (motion.kind, "all_gather", "all_reduce"):
            if (scope, kind) in self._lines:
                return kind, self._lines[scope, kind]
        return None

    def _group_us(
        self, motion: Motion, known: tuple[str, list[tuple[int, int, _Line]]] | None, ranks: int, nbytes: float
    ) -> float:
        assert known is not None
        kind, rows = known
        sent = nbytes * share_of_bytes(motion.kind, ranks)
        if motion.window is not None:
            sent *= min(motion.window[1] / max(ranks - 1, 1), 1.0)

        def alike(timed: int, line: _Line) -> float:
            """The time by a line of `timed` ranks, for equal bytes sent by a rank and latency scaled to steps."""
            us = line.at(sent / share_of_bytes(kind, timed))
            steps = max(ranks - 1, 1) / max(timed - 1, 1)
            return us + line.times_us[0] * (steps - 1.0) if kind != "send" else us

        count = len(motion.groups)
        least, most = rows[0], rows[-1]
        few, many = alike(least[1], least[2]), alike(most[1], most[2])
        if least[0] == most[0] or count <= least[0] or scope_of(self.cluster, motion.groups) == "intra":
            return max(few if count <= least[0] else many, 1e-3)
        weight = min((count - least[0]) / (most[0] - least[0]), 1.0)
        return max(few + (many - few) * weight, 1e-3)


def cluster_of(ranks: Sequence[Sequence[int]], inside: tuple[float, float], between: tuple[float, float]) -> Cluster:
    """Hosts with these ranks, and links of these latencies and rates.

    Args:
        ranks: Of each host.
        inside: Latency and rate of a device's link in its host.
        between: The same of a host's uplink; of one host not used.

    Returns:
        The cluster; device r is rank r. Inside of hosts and between them are channels of their own.
    """
    host_of = {rank: host for host, members in enumerate(ranks) for rank in members}
    nodes = [Node(name=f"h{host_of[rank]}.gpu{rank}", host=host_of[rank]) for rank in sorted(host_of)]
    links = []

    def both(a: int, b: int, latency_us: float, gb_per_s: float, channel: str) -> None:
        links.append(Link(src=a, dst=b, alpha_us=latency_us, gb_per_s=gb_per_s, channel=channel))
        links.append(Link(src=b, dst=a, alpha_us=0.0, gb_per_s=gb_per_s, channel=channel))

    several = len(ranks) > 1
    if several:
        nodes.append(Node(name="core", kind="switch", host=-1))
    core = len(nodes) - 1
    for host, members in enumerate(ranks):
        if len(members) > 1:
            nodes.append(Node(name=f"h{host}.switch", kind="switch", host=host))
            for rank in members:
                both(rank, len(nodes) - 1, _digits(inside[0]), _digits(inside[1]), LOCAL if several else NETWORK)
        if several:
            nodes.append(Node(name=f"h{host}.nic", kind="nic", host=host))
            for rank in members:
                both(rank, len(nodes) - 1, 0.0, _digits(between[1]), NETWORK)
            both(len(nodes) - 1, core, _digits(between[0]), _digits(between[1]), NETWORK)
    return Cluster.build(
        "timed", nodes=nodes, links=links, notes=("from the times of the backend's collectives in this job",)
    )


def fitted(ranks: int, small_us: float, large_us: float, large_bytes: float) -> tuple[float, float]:
    """The latency (us) and rate (GB/s) of a link with which a ring's sum of two sizes takes what was measured.

    A ring of n ranks takes 2 (n - 1) steps of one n-th of the bytes.

    >>> fitted(2, 20.0, 1020.0, 1e6)
    (10.0, 1.0)

    Args:
        ranks: The ranks of the ring.
        small_us: The time of a sum of next to nothing.
        large_us: The time of a sum of `large_bytes`.
        large_bytes: The bytes of the large sum.

    Returns:
        Latency and rate; both 0 where the times say nothing.
    """
    steps = 2 * (ranks - 1)
    if steps < 1 or large_us <= small_us or not large_bytes:
        return 0.0, 0.0
    rate = steps * large_bytes / ranks / (large_us - small_us) / 1e3
    return small_us / steps, rate


def _digits(value: float) -> float:
    return float(f"{value:.4g}")
