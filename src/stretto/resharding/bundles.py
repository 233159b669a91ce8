# SPDX-License-Identifier: Apache-2.0
"""Bundles of unit tasks that travel together, and the route of every chunk: its sender, its hosts,
its way inside them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..collectives.reshard import Piece
from ..errors import InvalidInput
from .hosts import Hosts
from .tasks import UnitTask

MAX_CHUNKS = 1024
MAX_HOPS = 40_000
"""The largest number of hops that is planned and simulated in seconds; beyond it chunks become larger."""
FEW_CHUNKS = 80
"""With fewer chunks than this a port cannot share its work evenly: twice as many hops are planned then."""
MAX_MESSAGES = 1 << 22
RELAYED = 1
"""About how many hops a chunk takes in each group beside those to devices that want it, where ports serve a group."""


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """Unit tasks between the same devices, laid one behind the other in one buffer, and the number of chunks it is cut
    into.
    """

    tasks: tuple[int, ...]
    nbytes: int
    holders: tuple[tuple[int, ...], ...]
    receivers: tuple[int, ...]
    missing: tuple[int, ...]
    align: int
    reduction: str
    chunks: int = 1

    def piece(self, rank: dict[int, int]) -> Piece:
        """The bundle as a piece of the `Reshard` collective; `rank` maps devices to ranks."""
        return Piece(
            nbytes=self.nbytes,
            parts=tuple(tuple(rank[d] for d in alike) for alike in self.holders),
            wanted=tuple(rank[d] for d in self.receivers),
            chunks=self.chunks,
            align=self.align,
        )

    def cut(self, chunks: int) -> Bundle:
        """This bundle cut into at most `chunks` chunks."""
        return replace(self, chunks=max(1, min(chunks, MAX_CHUNKS, self.nbytes // self.align)))


class Hop(NamedTuple):
    """One message on a chunk's route; `parent` is the hop that delivers the chunk to `src`, -1 if `src` holds it."""

    src: int
    dst: int
    parent: int = -1
    reduce: bool = False


Route = tuple[Hop, ...]


def bundles_of(tasks: Sequence[UnitTask], *, merge: bool) -> list[Bundle]:
    """One bundle per unit task, or with `merge` one for all tasks between the same devices with the
    same element size.
    """
    found: dict[object, list[int]] = defaultdict(list)
    for number, task in enumerate(tasks):
        key = (task.holders, task.receivers, task.align, task.reduction)
        found[key if merge else number].append(number)
    return [
        Bundle(
            tasks=tuple(numbers),
            nbytes=sum(tasks[n].nbytes for n in numbers),
            holders=tasks[numbers[0]].holders,
            receivers=tasks[numbers[0]].receivers,
            missing=tasks[numbers[0]].missing,
            align=tasks[numbers[0]].align,
            reduction=tasks[numbers[0]].reduction,
        )
        for numbers in found.values()
    ]


def check_messages(bundles: Sequence[Bundle]) -> None:
    """Raise `InvalidInput` if there would be so many messages that planning them takes minutes."""
    count = sum(b.chunks * (len(b.missing) + len(b.holders) - 1) for b in bundles if b.missing)
    if count > MAX_MESSAGES:
        raise InvalidInput(f"tensors: this takes {count} messages; at most {MAX_MESSAGES} are planned")


def cut_for(bundles: Sequence[Bundle], hosts: Hosts, busy_us: float, *, relayed: bool = False) -> list[Bundle]:
    """Cut bundles into chunks that are small enough to fill pipelines fast and large enough for latency not to matter.

    Through D hosts a stream of K chunks takes ``(K + D - 1) (alpha + t / K)``, which is least at
    ``K = sqrt((D - 1) t / alpha)``; all streams together keep a port busy for t = `busy_us`.

    Args:
        bundles: the bundles.
        hosts: groups and ports of the devices.
        busy_us: microseconds that the busiest port works.
        relayed: whether devices lend their ports, so that chunks take more hops inside groups.

    Returns:
        The same bundles with their numbers of chunks.

    Raises:
        InvalidInput: there would be too many messages.
    """
    depth = max((len(hosts.groups([*_first(b), *b.missing])) for b in bundles), default=1)
    alpha = max(hosts.alpha_us, 1e-3)
    count = math.sqrt(max(depth - 1, 1) * max(busy_us, alpha) / alpha)
    rate = min(hosts.slowest, 1e9)
    relays = {at: RELAYED * len(hosts.groups(b.missing)) if relayed else 0 for at, b in enumerate(bundles)}
    hop_bytes = sum(b.nbytes * max(1, len(b.missing) + len(b.holders) - 1 + relays[at]) for at, b in enumerate(bundles))
    best = max(busy_us * rate / count, 1.0)
    chunk_bytes = max(best, hop_bytes / MAX_HOPS)
    if relayed:
        chunk_bytes = min(chunk_bytes, max(best, busy_us * rate / FEW_CHUNKS, hop_bytes / (2 * MAX_HOPS)))
    pieces = [b.cut(math.ceil(b.nbytes / chunk_bytes) if b.missing else 1) for b in bundles]
    check_messages(pieces)
    return pieces


class Router:
    """Chooses the route of every chunk and keeps the load of all ports even."""

    def __init__(
        self,
        hosts: Hosts,
        shares: Sequence[dict[int, float]],
        *,
        fan: int = 1,
        relay: bool = False,
        ring: bool = True,
        doors: bool = False,
    ) -> None:
        self.hosts = hosts
        self.fan = fan
        """The number of hosts that a host passes a chunk on to: 1 is a chain with the most throughput, more have less
        latency."""
        self.relay = relay
        """Whether devices that neither hold nor want a chunk lend it their ports."""
        self.ring = ring
        """Whether chunks visit hosts in a circle from their sender, or the hosts with the least to send first."""
        self.doors = doors
        """Whether all chunks leave by the device that is nearest to a shared port, in the order of the plan."""
        self.shares = shares
        """The share of each bundle that should leave by each port."""
        self.load: dict[int, float] = defaultdict(float)
        self._owed: dict[frozenset[int], dict[int, float]] = defaultdict(lambda: defaultdict(float))

    def all_routes(self, bundles: Sequence[Bundle]) -> list[list[Route]]:
        """For each bundle one route for each of its chunks; none for what is in place."""
        return [self.routes(number, b) if b.missing else [] for number, b in enumerate(bundles)]

    def routes(self, number: int, bundle: Bundle) -> list[Route]:
        """One route for each chunk of a bundle."""
        if bundle.reduction:
            return [self._reduction(bundle, turn) for turn in range(bundle.chunks)]
        order = self._chain_order(bundle)
        return [self._copy(number, bundle, order) for _ in range(bundle.chunks)]

    def _chain_order(self, bundle: Bundle) -> list[int]:
        """The hosts that need a bundle from outside, in the order in which they get it; the last host passes nothing
        on.
        """
        near = set(self.hosts.groups(bundle.holders[0]))
        doors: dict[int, set[int]] = defaultdict(set)
        for device in bundle.missing:
            if self.hosts.group[device] not in near:
                doors[self.hosts.group[device]].add(self.hosts.out_port[device])
        if self.ring:
            home = self.hosts.group[bundle.holders[0][0]]
            far = sorted(doors, key=lambda g: (g < home, g))
        else:
            far = sorted(doors, key=lambda g: (min(self.load[p] for p in doors[g]), g))
        for at, g in enumerate(far, 1):
            copies = max(0, min(self.fan, len(far) - at * self.fan))
            for port in doors[g]:
                self.load[port] += copies * bundle.nbytes / self.hosts.bytes_per_us[port] / len(doors[g])
        return far

    def _copy(self, number: int, bundle: Bundle, order: Sequence[int]) -> Route:
        size = bundle.nbytes / bundle.chunks
        at_home: dict[int, list[int]] = defaultdict(list)
        for device in bundle.holders[0]:
            at_home[self.hosts.group[device]].append(device)
        members: dict[int, list[int]] = defaultdict(list)
        for device in bundle.missing:
            members[self.hosts.group[device]].append(device)
        hops: list[Hop] = []
        for group, devices in members.items():
            if group in at_home:
                _spread(hops, at_home[group][0], -1, devices)
        if order:
            leaves, parent = self._sender(number, bundle, size), -1
            if leaves not in bundle.holders[0]:
                home = at_home[self.hosts.group[leaves]]
                parent = _index(hops, leaves)
                if parent < 0:
                    hops.append(Hop(src=min(home, key=lambda d: (d < leaves, d)), dst=leaves))
                    parent = len(hops) - 1
            has = [(leaves, parent)]
            for at, group in enumerate(order):
                holder, parent = has[at // self.fan]
                entry = self._entry(group, members[group], size)
                hops.append(Hop(src=holder, dst=entry, parent=parent))
                has.append((entry, len(hops) - 1))
                _spread(hops, *has[-1], [d for d in members[group] if d != entry])
        return tuple(hops)

    def _sender(self, number: int, bundle: Bundle, size: float) -> int:
        """The device that sends the next chunk: ports take turns in proportion to their shares.

        Bundles with the same possible ports share one account of bytes owed to each port.
        """
        share = self.shares[number]
        able = exits(bundle, self.hosts, self.relay)
        owed = self._owed[frozenset(self.hosts.out_port[d] for d in able)]
        for port, part in share.items():
            owed[port] += part * size
        port = max(share, key=lambda p: (owed[p], -p))
        owed[port] -= size
        self.load[port] += size / self.hosts.bytes_per_us[port]
        if self.doors:
            return self.hosts.doors[port]
        return next(d for d in able if self.hosts.out_port[d] == port)

    def _entry(self, group: int, wanting: Sequence[int], size: float) -> int:
        able = self.hosts.members[group] if self.relay else wanting
        entry = min(able, key=lambda d: (round(self.load[self.hosts.in_port[d]], 6), d not in wanting, d))
        port = self.hosts.in_port[entry]
        self.load[port] += size / self.hosts.bytes_per_us[port]
        return entry

    def _reduction(self, bundle: Bundle, turn: int) -> Route:
        """A route along the hosts that hold summands, each of which adds its own, and on to the devices that want the
        sum.

        Chunks end at different hosts in turn, so that all chunks together use every port alike.
        """
        group = self.hosts.group
        chosen = [alike[turn % len(alike)] for alike in bundle.holders]
        members: dict[int, list[int]] = defaultdict(list)
        for device in chosen:
            members[group[device]].append(device)
        wanting: dict[int, list[int]] = defaultdict(list)
        for device in bundle.receivers:
            wanting[group[device]].append(device)
        ring = sorted(members)
        ends = [g for g in ring if g in wanting] or ring
        at = ring.index(ends[turn % len(ends)])
        ring = ring[at + 1 :] + ring[: at + 1]
        hops: list[Hop] = []
        carrier, parent = -1, -1
        for g in ring:
            # The last device of the ring should be one that wants the sum.
            devices = members[g][turn % len(members[g]) :] + members[g][: turn % len(members[g])]
            if g == ring[-1]:
                devices.sort(key=lambda d: d in wanting[g])
            for device in devices:
                if carrier >= 0:
                    hops.append(Hop(src=carrier, dst=device, parent=parent, reduce=True))
                    parent = len(hops) - 1
                carrier = device
        _spread(hops, carrier, parent, [d for d in wanting[group[carrier]] if d != carrier])
        rest = [g for g in ring[:-1] if g in wanting] + sorted(g for g in wanting if g not in members)
        for g in rest:
            entry = wanting[g][turn % len(wanting[g])]
            hops.append(Hop(src=carrier, dst=entry, parent=parent))
            carrier, parent = entry, len(hops) - 1
            _spread(hops, entry, parent, [d for d in wanting[g] if d != entry])
        return tuple(hops)


def exits(bundle: Bundle, hosts: Hosts, relay: bool) -> list[int]:
    """The devices through which a bundle may leave its hosts: its holders, and with `relay` the other devices of their
    groups.

    Args:
        bundle: the bundle.
        hosts: groups and ports of the devices.
        relay: whether devices lend their ports to others of their group.

    Returns:
        The devices, holders first, each once.
    """
    holders = [d for alike in bundle.holders for d in alike]
    others = [d for g in hosts.groups(holders) for d in hosts.members[g]] if relay else []
    return list(dict.fromkeys([*holders, *others]))


def _index(hops: Sequence[Hop], device: int) -> int:
    """The hop that delivers a chunk to a device, or -1."""
    return next((at for at, hop in enumerate(hops) if hop.dst == device), -1)


def _spread(hops: list[Hop], holder: int, parent: int, devices: Sequence[int]) -> None:
    """Add hops that pass a chunk from device to device inside a host."""
    for device in devices:
        hops.append(Hop(src=holder, dst=device, parent=parent))
        holder, parent = device, len(hops) - 1


def _first(bundle: Bundle) -> list[int]:
    return [alike[0] for alike in bundle.holders]
