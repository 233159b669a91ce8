# SPDX-License-Identifier: Apache-2.0
"""Routes of chunks between groups whose devices have a port each: which group sends a chunk, and by which port.

Devices of a group pass chunks on to one another, which is fast beside their ports, so every port of a group serves all
of its devices. The ports of two groups are paired: a port shares its partner's rate with no other port of its group,
and links that are shared fairly or served in order then give the same times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from .balance import LIMIT_S, balance
from .bundles import Bundle, Hop, Route
from .hosts import Hosts

RELAY_COST = 1e-3
"""What passing on costs beside the time of the busiest group: enough to pass on no more than that time needs."""
PAIR_COST = 1e-4
"""What a pair out of turn costs beside the time of the busiest group."""
LEAST_SHARE = 1e-3
FAN = 2
"""To how many devices of its group a device passes a chunk on: a chain of 64 devices is as late as 64 hops."""
NEARER = 0.75
"""By how many chunks a port may be ahead of another before a chunk leaves by a device that lacks it."""

PairShares = dict[tuple[frozenset[int], int], dict[int, float]]
"""For the groups that hold something and a group that wants it, the share that each of the first sends."""
Have = dict[int, int]
"""Devices of one group that have a chunk, and the hop that brings it to each; -1 for a holder."""


class RailRouter:
    """Chooses groups and ports for every chunk so that those of the same group are loaded alike.

    A group that wants a chunk gets it from a group that holds it, or from one that has got it before. `shares` has for
    each bundle the share of its copies that each group sends (`relay_shares`); without them holders alone send, each to
    few groups (`pair_shares`). With `even` each port sends as much to a group as the others of its own; else the sum of
    what both ports of a pair have to do is kept even.
    """

    def __init__(self, hosts: Hosts, *, shares: Sequence[dict[int, float]] = (), even: bool = False) -> None:
        self.hosts, self.shares, self.even = hosts, shares, even
        self._pairs: PairShares = {}
        self._load: dict[int, float] = defaultdict(float)
        """Microseconds of each port; a port that sends and one that receives are different links."""
        self._sent: dict[tuple[int, int], float] = defaultdict(float)
        """Microseconds that each port sends to each group."""
        self._group_sent: dict[int, float] = defaultdict(float)
        self._owed: dict[object, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        """Bytes that each group should still send, for bundles that share one set of shares, or one key of pairs."""
        self._passed: dict[int, float] = defaultdict(float)
        """Bytes that each device has passed on inside its group."""
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
        if not self.shares:
            self._pairs = pair_shares(bundles, self.hosts)
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
            found[number].append(self._copy(bundles[number], self.shares[number] if self.shares else {}))
        return found

    def _copy(self, bundle: Bundle, shares: dict[int, float]) -> Route:
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
            self._spread(hops, has[g], wanting[g], size)
        far = [g for g in wanting if g not in homes]
        at = self._turn % max(len(far), 1)
        self._turn += 1
        near = frozenset(homes)
        owed = self._owed[id(shares)]
        for g, share in shares.items():
            owed[g] += share * size * len(far)
        able = homes
        # Groups that should pass a chunk on get it first.
        for g in sorted(far[at:] + far[:at], key=lambda g: -owed[g]) if shares else far[at:] + far[:at]:
            if not shares:
                owed = self._owed[near, g]
                for h, share in self._pairs.get((near, g), {}).items():
                    owed[h] += share * size
            sender = max(able, key=lambda g: (owed[g], -self._group_sent[g], -g))
            owed[sender] -= size
            self._cross(hops, (sender, has[sender]), (g, has[g]), size)
            self._spread(hops, has[g], wanting[g], size)
            self._group_sent[sender] += size / self.hosts.send_bytes_per_us[sender]
            if shares.get(g, 0.0) > 0:
                able = [*able, g]
        return tuple(hops)

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

    def _spread(self, hops: list[Hop], have: Have, devices: Sequence[int], size: float) -> None:
        """Pass a chunk on inside a group as a tree, beginning with the device that got it last.

        Devices that have passed the least on so far stand in the middle of the tree, so that all of them send alike.
        """
        passed = self._passed
        order = [next(reversed(have)), *sorted((d for d in devices if d not in have), key=lambda d: (passed[d], d))]
        for at, device in enumerate(order[1:]):
            sender = order[at // FAN]
            passed[sender] += size
            hops.append(Hop(src=sender, dst=device, parent=have[sender]))
            have[device] = len(hops) - 1


def holders_alone_us(bundles: Sequence[Bundle], hosts: Hosts) -> float:
    """Microseconds that the busiest group sends if groups that hold a bundle send it to every group that wants it."""
    amounts: dict[frozenset[int], float] = defaultdict(float)
    for b in bundles:
        near = frozenset(hosts.groups(b.holders[0]))
        amounts[near] += b.nbytes * sum(g not in near for g in hosts.groups(b.missing))
    return balance(amounts, hosts.send_bytes_per_us)[1]


def pair_shares(bundles: Sequence[Bundle], hosts: Hosts) -> PairShares:
    """Which holders send to which group, so that the busiest group is done soonest and each sends to few others.

    Groups that all send to all others would meet at their ports. A basic solution of the transport problem has few
    pairs; the k-th holder is taken for the k-th group that wants, where that costs nothing.
    """
    from ..solvers.milp import Milp, solve

    amounts: dict[tuple[frozenset[int], int], float] = defaultdict(float)
    for b in bundles:
        near = frozenset(hosts.groups(b.holders[0]))
        for group in set(hosts.groups(b.missing)) - near:
            amounts[near, group] += b.nbytes
    scale = sum(amounts.values()) / max(min(hosts.send_bytes_per_us.values()), 1e-9) or 1.0
    wanting = sorted({group for _, group in amounts})
    model = Milp()
    busiest = model.column(cost=1.0)
    terms: dict[int, dict[int, float]] = defaultdict(dict)
    columns: dict[tuple[frozenset[int], int], dict[int, int]] = {}
    for (near, group), nbytes in sorted(amounts.items(), key=lambda item: (sorted(item[0][0]), item[0][1])):
        mine = columns[near, group] = {}
        for at, holder in enumerate(sorted(near)):
            us = nbytes / hosts.send_bytes_per_us[holder] / scale
            turn = (at - wanting.index(group)) % len(near)
            mine[holder] = model.column(upper=1.0, cost=PAIR_COST * us * turn / len(near))
            terms[holder][mine[holder]] = us
        model.row(dict.fromkeys(mine.values(), 1.0), lower=1.0, upper=1.0)
    for _, row in sorted(terms.items()):
        model.row({**row, busiest: -1.0}, upper=0.0)
    values = solve(model, limit_s=LIMIT_S).values if columns else None
    if values is None:
        return {}
    return {
        key: {holder: float(values[c]) for holder, c in mine.items() if values[c] > LEAST_SHARE}
        for key, mine in columns.items()
    }


def relay_shares(bundles: Sequence[Bundle], hosts: Hosts, bound_us: float) -> list[dict[int, float]]:
    """The share of each bundle's copies that each group should send, so that the busiest group is done soonest.

    Groups that hold a bundle send at least one copy; of the others, groups that want it may pass some on, as few as the
    least time allows.

    Args:
        bundles: the bundles.
        hosts: groups and ports of the devices.
        bound_us: no resharding is faster, so groups need not send less than this takes.

    Returns:
        For each bundle its share per group, the same object for bundles between the same groups.
    """
    from ..solvers.milp import Milp, solve

    amounts: dict[tuple[frozenset[int], frozenset[int]], float] = defaultdict(float)
    keys = []
    for b in bundles:
        near = frozenset(hosts.groups(b.holders[0]))
        keys.append((near, frozenset(hosts.groups(b.missing)) - near))
        amounts[keys[-1]] += b.nbytes
    model = Milp()
    busiest = model.column(cost=1.0, lower=1.0)
    terms: dict[int, dict[int, float]] = defaultdict(dict)
    columns: dict[tuple[frozenset[int], frozenset[int]], dict[int, int]] = {}
    for (near, far), nbytes in amounts.items():
        if not far:
            continue
        mine = columns[near, far] = {}
        for group in sorted(near | (far if len(far) > 1 else frozenset())):
            us = nbytes * len(far) / hosts.send_bytes_per_us[group] / bound_us
            mine[group] = model.column(upper=1.0, cost=0.0 if group in near else RELAY_COST * us)
            terms[group][mine[group]] = us
        model.row(dict.fromkeys(mine.values(), 1.0), lower=1.0, upper=1.0)
        model.row({mine[group]: 1.0 for group in near}, lower=1.0 / len(far))
    for _, row in sorted(terms.items()):
        model.row({**row, busiest: -1.0}, upper=0.0)
    values = solve(model, limit_s=LIMIT_S).values if columns else None
    shares: dict[tuple[frozenset[int], frozenset[int]], dict[int, float]] = {key: {} for key in amounts}
    if values is not None:
        for key, mine in columns.items():
            shares[key] = {group: float(values[c]) for group, c in mine.items() if values[c] > LEAST_SHARE}
    return [shares[key] for key in keys]
