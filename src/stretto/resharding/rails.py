# SPDX-License-Identifier: Apache-2.0
"""Routes of chunks between groups whose devices have a port each: which group sends a chunk, and by which port.

Devices of a group pass chunks on to one another, which is fast beside their ports, so every port of a group serves all
of its devices. The ports of two groups are paired: a port shares its partner's rate with no other port of its group,
and links that are shared fairly or served in order then give the same times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import inf

from .balance import balance
from .bundles import Bundle, Hop, Route
from .hosts import Hosts

NEARER = 0.75
"""By how many chunks a port may be ahead of another before a chunk leaves by a device that lacks it."""

Have = dict[int, int]
"""Devices of one group that have a chunk, and the hop that brings it to each; -1 for a holder."""


class RailRouter:
    """Chooses groups and ports for every chunk so that those of the same group are loaded alike.

    A group that wants a chunk gets it from a group that holds it, or from one that has got it before. With `direct` 1
    the group that has sent the least sends next; larger values let holders send that much more than groups that pass
    on, which makes ways shorter; with infinity holders alone send. With `even` each port sends as much to a
    group as the others of its own; else the sum of what both ports of a pair have to do is kept even.
    """

    def __init__(self, hosts: Hosts, *, direct: float = inf, even: bool = False) -> None:
        self.hosts, self.direct, self.even = hosts, direct, even
        self._load: dict[int, float] = defaultdict(float)
        """Microseconds of each port; a port that sends and one that receives are different links."""
        self._sent: dict[tuple[int, int], float] = defaultdict(float)
        """Microseconds that each port sends to each group."""
        self._group_sent: dict[int, float] = defaultdict(float)
        self._partners: dict[tuple[int, int], int] = {}
        self._turn = 0
        self._doors: dict[tuple[int, int], list[int]] = {}
        for group, devices in hosts.members.items():
            for plane in set(hosts.plane.values()):
                able = [d for d in devices if plane in hosts.reach[hosts.plane[d]]]
                self._doors[group, plane] = able or devices

    def all_routes(self, bundles: Sequence[Bundle]) -> list[list[Route]]:
        """For each bundle one route for each of its chunks; none for what is in place.

        Holders take turns, each with the same share of what it holds, so that loads grow evenly and chunks can leave by
        the devices that have them.
        """
        queues: dict[tuple[int, ...], list[tuple[float, int]]] = defaultdict(list)
        for number, b in enumerate(bundles):
            if b.missing:
                queues[b.holders[0]] += [((at + 0.5) / b.chunks, number) for at in range(b.chunks)]
        turns: list[tuple[float, int, int]] = []
        for queue in queues.values():
            sizes = [bundles[number].nbytes / bundles[number].chunks for _, number in sorted(queue)]
            total, before = sum(sizes), 0.0
            for at, (_, number) in enumerate(sorted(queue)):
                turns.append(((before + sizes[at] / 2) / total, at, number))
                before += sizes[at]
        found: list[list[Route]] = [[] for _ in bundles]
        for _, _, number in sorted(turns):
            found[number].append(self._copy(bundles[number]))
        return found

    def _copy(self, bundle: Bundle) -> Route:
        size = bundle.nbytes / bundle.chunks
        group = self.hosts.group
        has: dict[int, Have] = defaultdict(dict)
        for device in bundle.holders[0]:
            has[group[device]][device] = -1
        wanting: dict[int, list[int]] = defaultdict(list)
        for device in bundle.missing:
            wanting[group[device]].append(device)
        homes = list(has)
        hops: list[Hop] = []
        for g in [g for g in wanting if g in has]:
            self._spread(hops, has[g], wanting[g])
        far = [g for g in wanting if g not in homes]
        at = self._turn % max(len(far), 1)
        self._turn += 1
        passing: list[int] = []
        for g in far[at:] + far[:at]:
            sender = self._sender(homes, passing)
            self._cross(hops, (sender, has[sender]), (g, has[g]), size)
            self._spread(hops, has[g], wanting[g])
            self._group_sent[sender] += size / self.hosts.send_bytes_per_us[sender]
            passing.append(g)
        return tuple(hops)

    def _sender(self, homes: Sequence[int], passing: Sequence[int]) -> int:
        """The group that sends the next copy of a chunk."""
        sent = self._group_sent
        home = min(homes, key=lambda g: (sent[g], g))
        other = min(passing, key=lambda g: (sent[g], g), default=home)
        return home if sent[home] <= self.direct * sent[other] or self.direct == inf else other

    def _cross(self, hops: list[Hop], sender: tuple[int, Have], target: tuple[int, Have], size: float) -> None:
        """Add the hop between two groups, and one before it if the chunk leaves by another device than has it."""
        have = sender[1]
        leave = self._exit(sender, target[0], size)
        entry = self._partner(leave, target[0], sender[0])
        if leave not in have:
            near = min(have, key=lambda d: (self._sent[self.hosts.out_port[d], target[0]], d))
            hops.append(Hop(src=near, dst=leave, parent=have[near]))
            have[leave] = len(hops) - 1
        hops.append(Hop(src=leave, dst=entry, parent=have[leave]))
        target[1][entry] = len(hops) - 1
        out = self.hosts.out_port[leave]
        for port in (out, self.hosts.in_port[entry]):
            self._load[port] += size / self.hosts.bytes_per_us[port]
        self._sent[out, target[0]] += size / self.hosts.bytes_per_us[out]

    def _exit(self, sender: tuple[int, Have], target: int, size: float) -> int:
        """The device with the least to do for the target.

        One that has the chunk is taken where that is about as good: what it has from the beginning leaves in the order
        of the plan, what it must get first, when it comes.
        """
        group, have = sender
        cost = {d: self._cost(d, target, group) for d in self.hosts.members[group]}
        least = min(cost, key=lambda d: (cost[d], d))
        near = min(have, key=lambda d: (cost[d], d))
        slack_us = NEARER * size / self.hosts.bytes_per_us[self.hosts.out_port[near]]
        return near if cost[near] <= cost[least] + slack_us else least

    def _cost(self, device: int, target: int, group: int) -> float:
        out = self.hosts.out_port[device]
        if self.even:
            return self._sent[out, target]
        into = self.hosts.in_port[self._partner(device, target, group)]
        return self._load[out] + self._load[into] + self._sent[out, target]

    def _partner(self, leave: int, target: int, group: int) -> int:
        """The device of the target that a device always sends to."""
        key = leave, target
        if key not in self._partners:
            entries = self._doors[target, self.hosts.plane[leave]]
            exits = [d for d in self.hosts.members[group] if self._doors[target, self.hosts.plane[d]] == entries]
            self._partners[key] = entries[exits.index(leave) * len(entries) // len(exits)]
        return self._partners[key]

    def _spread(self, hops: list[Hop], have: Have, devices: Sequence[int]) -> None:
        """Pass a chunk from device to device inside a group, beginning with one that has it."""
        last = next(reversed(have))
        for device in devices:
            if device not in have:
                hops.append(Hop(src=last, dst=device, parent=have[last]))
                have[device] = len(hops) - 1
                last = device


def holders_alone_us(bundles: Sequence[Bundle], hosts: Hosts) -> float:
    """Microseconds that the busiest group sends if groups that hold a bundle send it to every group that wants it."""
    amounts: dict[frozenset[int], float] = defaultdict(float)
    for b in bundles:
        near = frozenset(hosts.groups(b.holders[0]))
        amounts[near] += b.nbytes * sum(g not in near for g in hosts.groups(b.missing))
    return balance(amounts, hosts.send_bytes_per_us)[1]
