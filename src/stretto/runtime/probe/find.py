# SPDX-License-Identifier: Apache-2.0
"""What a job's network looks like, from measurements: rates, latencies, and who shares which uplink.

TACCL's profiler asks which GPUs get less when they send at the same time. The same question is asked here of ranks,
of hosts and of channels: flows that take longer together than alone share a link. Nothing is assumed about the order
of ranks, and no more than a few rounds are run: hosts are paired at distances 1, 2, 4, ..., and pairs that have no host
in common run at the same time, until one of them turns out to be in another's way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from .fit import CLEAN, Fit, bounded_line, fit_line, per_hop_us
from .meter import MAX_FLOW_BYTES, MEMORY, LinkMeter, ProbeFlow

STEP_S = 0.04
"""How long a flow of a contention test takes by itself: a shaper's burst of a millisecond then hardly counts."""
FIT_S = 0.12
"""The longest flow from which a rate is taken."""
FIT_SHARES = (0.2, 0.6, 1.0)
FIT_TIMES, FIT_ROUNDS = 3, 4
"""Flows of each size, and how often they are repeated while the machine is too busy for a clean line."""
MEMORY_TIMES = 8
MEMORY_S = 0.004
"""How often and how long flows inside a host are timed: nothing is shaped there, and large buffers only fill caches."""
FIRST_BYTES = 128 << 10
SHARED = 1.35
"""Flows that take that many times as long together as alone share a link (two that share one equally take 2)."""
MORE = 1.3
"""Several flows that carry that many times what one carries are not limited by what limits one."""
SIZE_STEPS = 16
FEW_HOPS, MANY_HOPS = 2, 18
MAX_FAN = 4
MAX_TRUNK_HOSTS = 16
"""With more hosts, whether they share links beyond their own is not tested pair by pair."""

Pair = tuple[int, int]
Advance = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Uplink:
    """Ranks of one host that share an uplink on a channel."""

    host: int
    ranks: tuple[int, ...]
    out_gb_per_s: float
    in_gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """Hosts that share a link to the rest of a channel's network."""

    hosts: tuple[int, ...]
    out_gb_per_s: float
    in_gb_per_s: float


@dataclass(frozen=True, kw_only=True)
class ProbedChannel:
    """One channel between hosts; `error` is the worst of its fits."""

    name: str
    ports: tuple[Uplink, ...]
    alpha_us: float
    error: float
    flow_gb_per_s: float = math.inf
    trunks: tuple[Trunk, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """What ranks of one host exchange, while others of it do so too."""

    gb_per_s: float
    alpha_us: float
    error: float


@dataclass(frozen=True, kw_only=True)
class ProbeFindings:
    """All that was found; `memory` is None where no host has two ranks."""

    hosts: tuple[tuple[int, ...], ...]
    memory: HostMemory | None
    networks: tuple[ProbedChannel, ...]
    notes: tuple[str, ...] = ()


def find(meter: LinkMeter, *, advance: Advance = lambda label: None) -> ProbeFindings:
    """Measure everything. A collective call: all ranks of the job, at the same time."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(meter.hosts):
        members.setdefault(host, []).append(rank)
    hosts = tuple(tuple(members[host]) for host in sorted(members))
    memory = None
    if max(map(len, hosts)) > 1:
        advance("inside hosts")
        memory = _memory(meter, hosts)
    networks = []
    for channel in meter.channels:
        advance(channel)
        networks.append(_Search(meter, hosts, channel).network())
    notes = _channels_apart(meter, hosts, networks) if len(networks) > 1 else ()
    return ProbeFindings(hosts=hosts, memory=memory, networks=tuple(networks), notes=notes)


def rounds(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Pairs in rounds in which nobody appears twice, the first fit for each.

    >>> rounds([(0, 1), (1, 2), (2, 3), (3, 0)])
    [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]
    """
    made: list[list[Pair]] = []
    for pair in pairs:
        fits = (each for each in made if not any(set(pair) & set(other) for other in each))
        found = next(fits, None)
        if found is None:
            made.append(found := [])
        found.append(pair)
    return made


def at_distances(count: int) -> list[Pair]:
    """Every host with those 1, 2, 4, ... further on.

    >>> at_distances(3)
    [(0, 1), (1, 2), (2, 0), (0, 2), (1, 0), (2, 1)]
    """
    steps = [1 << bit for bit in range(max(count - 1, 0).bit_length())]
    return [(host, (host + step) % count) for step in steps if step < count for host in range(count)]


@dataclass
class _Search:
    """The search on one channel."""

    meter: LinkMeter
    hosts: tuple[tuple[int, ...], ...]
    channel: str
    alone: dict[Pair, float] = field(default_factory=dict)
    """Bytes per microsecond between two hosts when nothing else flows."""
    shared: list[set[int]] = field(default_factory=list)

    def network(self) -> ProbedChannel:
        suspicious = False
        for each in rounds(at_distances(len(self.hosts))):
            suspicious |= self._measure_round(each)
        if suspicious and 4 <= len(self.hosts) <= MAX_TRUNK_HOSTS:
            self.shared = self._groups()
        near = [(h, (h + 1) % len(self.hosts)) for h in range(len(self.hosts))]
        cap = self._flow_cap(near)
        ports = self._ports(near, cap)
        return self._fitted(ports, cap)

    def _apart(self, pairs: Sequence[Pair]) -> list[list[Pair]]:
        """Rounds without contention: no host twice, no two out of (or into) one group that shares a link."""
        group = {host: at for at, hosts in enumerate(self.shared) for host in hosts}
        made: list[list[Pair]] = []
        for each in rounds(pairs):
            if any(host in group for pair in each for host in pair):
                made += [[pair] for pair in each]
            else:
                made.append(each)
        return made

    def _measure_round(self, pairs: list[Pair]) -> bool:
        """Fill in `alone`; whether any of the pairs was in another's way."""
        leads = [(self.hosts[a][0], self.hosts[b][-1]) for a, b in pairs]
        together = _rates(self.meter, leads, self.channel)
        best = together.copy()
        if len(pairs) > 1:
            index = np.arange(len(pairs))
            for bit in range((len(pairs) - 1).bit_length()):
                for half in (0, 1):
                    some = np.flatnonzero(index >> bit & 1 == half)
                    found = _timed(self.meter, [leads[i] for i in some], self.channel, together[some])
                    best[some] = np.maximum(best[some], found)
            for i in np.flatnonzero(best > MORE * together):
                best[i] = max(best[i], _timed(self.meter, [leads[i]], self.channel, best[[i]])[0])
        if np.any(best > MORE * together):
            # Slow because of each other, or of what else this machine does? The least of more runs tells.
            sizes = _sizes(best, STEP_S)
            again = sizes / _run(self.meter, leads, self.channel, sizes, 5).min(axis=0)
            together = np.maximum(together, again)
            best = np.maximum(best, together)
        for pair, rate in zip(pairs, best.tolist(), strict=True):
            # Only disturbances make a link look slower than it is.
            self.alone[pair] = max(rate, self.alone.get(pair, 0.0))
        return bool(np.any(best > MORE * together))

    def _groups(self) -> list[set[int]]:
        """Hosts that share a link beyond their own, whichever hosts they send to."""
        count = len(self.hosts)
        joined: list[set[int]] = [{host} for host in range(count)]
        for a, b in combinations(range(count), 2):
            mine = next(group for group in joined if a in group)
            if b in mine or not self._share(a, b):
                continue
            other = next(group for group in joined if b in group)
            joined.remove(other)
            mine |= other
        return [group for group in joined if len(group) > 1]

    def _share(self, a: int, b: int) -> bool:
        others = [host for host in range(len(self.hosts)) if host not in (a, b)]
        # Three choices of where to send: flows that meet only at their destinations part in one of them.
        for shift in range(1, min(4, len(others))):
            x, y = others[0], others[shift]
            for targets in ((x, y), (y, x)):
                pairs = list(zip((a, b), targets, strict=True))
                leads = [(self.hosts[src][0], self.hosts[dst][-1]) for src, dst in pairs]
                for pair in pairs:
                    if pair not in self.alone:
                        self._measure_round([pair])
                each = np.array([self.alone[pair] for pair in pairs])
                sizes = _sizes(each, STEP_S)
                if not np.any(sizes / _run(self.meter, leads, self.channel, sizes, 4).min(axis=0) * MORE < each):
                    return False
        return True

    def _flow_cap(self, near: list[Pair]) -> bool:
        """Whether one connection gets less than several of the same rank."""
        for each in self._apart(near):
            wide = [pair for pair in each if len(self.hosts[pair[1]]) > 1]
            if not wide:
                continue
            fans = [[(self.hosts[a][0], dst) for dst in self.hosts[b][:MAX_FAN]] for a, b in wide]
            totals = self._totals(fans, [self.alone[pair] for pair in wide])
            for total, pair in zip(totals, wide, strict=True):
                if total > MORE * self.alone[pair]:
                    self._measure_round([pair])
            if all(total > MORE * self.alone[pair] for total, pair in zip(totals, wide, strict=True)):
                return True
        return False

    def _totals(self, groups: Sequence[Sequence[Pair]], rates: Sequence[float]) -> list[float]:
        """What groups of flows carry together, all groups at once; each group is sized for its rate."""
        pairs = [pair for group in groups for pair in group]
        each = np.concatenate([
            np.full(len(group), rate / len(group)) for group, rate in zip(groups, rates, strict=True)
        ])  # fmt: skip
        sizes = _sizes(each, STEP_S)
        times = np.median(_run(self.meter, pairs, self.channel, sizes, 3), axis=0)
        found, at = [], 0
        for group in groups:
            piece = slice(at, at + len(group))
            found.append(float(sizes[piece].sum() / times[piece].max()))
            at += len(group)
        return found

    def _fan(self, src: int, host: int, capped: bool) -> list[Pair]:
        """The flows with which one rank fills its uplink."""
        targets = self.hosts[host]
        return [(src, dst) for dst in (targets[:MAX_FAN] if capped else targets[-1:])]

    def _ports(self, near: list[Pair], capped: bool) -> list[list[tuple[int, ...]]]:
        """The ranks of every host, grouped by the uplink that they share."""
        ports = [[ranks] for ranks in self.hosts]
        for each in self._apart(near):
            several = [pair for pair in each if len(self.hosts[pair[0]]) > 1]
            if not several:
                continue
            crowds = [
                [(src, self.hosts[b][at % len(self.hosts[b])]) for at, src in enumerate(self.hosts[a])]
                for a, b in several
            ]
            alone = [self._alone(a, b, capped) for a, b in several]
            totals = self._totals(crowds, alone)
            for (a, b), total, rate in zip(several, totals, alone, strict=True):
                if total > MORE * rate:
                    ports[a] = self._split(a, b, capped, rate)
        return ports

    def _alone(self, a: int, b: int, capped: bool) -> float:
        """What one rank of a host carries by itself, with as many connections as it needs."""
        if not capped:
            return self.alone[a, b]
        return self._totals([self._fan(self.hosts[a][0], b, True)], [self.alone[a, b]])[0]

    def _split(self, a: int, b: int, capped: bool, rate: float) -> list[tuple[int, ...]]:
        """Ranks of a host by uplink: each is tried beside one of every uplink found so far."""
        found: list[list[int]] = []
        targets = self.hosts[b]
        for rank in self.hosts[a]:
            for port in found:
                if capped:
                    both = self._fan(port[0], b, True) + self._fan(rank, b, True)
                else:
                    both = [(port[0], targets[0]), (rank, targets[-1])]
                if self._totals([both], [2 * rate])[0] < 2 * rate / SHARED:
                    port.append(rank)
                    break
            else:
                found.append([rank])
        return [tuple(port) for port in found]

    def _fitted(self, ports: list[list[tuple[int, ...]]], capped: bool) -> ProbedChannel:
        """Rates of all uplinks, each from the fastest peer that was seen, and the channel's latency."""
        count = len(self.hosts)
        out = {h: self._best(pair for pair in self.alone if pair[0] == h) for h in range(count)}
        into = {h: self._best(pair for pair in self.alone if pair[1] == h) for h in range(count)}
        wanted = sorted({*out.values(), *into.values()})
        fits: dict[tuple[int, int, bool], Fit] = {}
        for each in self._apart(wanted):
            for (host, at, sends), fit in self._fit_round(each, ports, capped).items():
                kept = fits.get((host, at, sends))
                if kept is None or fit.gb_per_s > kept.gb_per_s:
                    fits[host, at, sends] = fit
        made = [
            Uplink(
                host=host, ranks=ranks, out_gb_per_s=fits[host, at, True].gb_per_s,
                in_gb_per_s=fits[host, at, False].gb_per_s,
            )
            for host, mine in enumerate(ports)
            for at, ranks in enumerate(mine)
        ]  # fmt: skip
        first = rounds([(h, (h + 1) % count) for h in range(count)])[0]
        few, many = (
            self.meter.bounce([(self.hosts[a][0], self.hosts[b][0]) for a, b in first], self.channel, hops, 12)
            for hops in (FEW_HOPS, MANY_HOPS)
        )
        alpha = float(np.median([
            per_hop_us(FEW_HOPS, few[:, at], MANY_HOPS, many[:, at]) for at in range(len(first))
        ]))  # fmt: skip
        return ProbedChannel(
            name=self.channel, ports=tuple(made), alpha_us=alpha, error=max(fit.error for fit in fits.values()),
            flow_gb_per_s=float(np.median(list(self.alone.values()))) / 1e3 if capped else math.inf,
            trunks=tuple(self._trunk(tuple(sorted(group)), ports) for group in self.shared),
        )  # fmt: skip

    def _best(self, pairs: Iterator[Pair]) -> Pair:
        """The fastest pair, or one nearly as fast that was measured earlier: neighbours share rounds."""
        known = list(pairs)
        top = max(self.alone[pair] for pair in known)
        return next(pair for pair in known if self.alone[pair] * 1.15 >= top)

    def _fit_round(
        self, pairs: list[Pair], ports: list[list[tuple[int, ...]]], capped: bool
    ) -> dict[tuple[int, int, bool], Fit]:
        flows: list[Pair] = []
        rates: list[float] = []
        owner: dict[tuple[int, int, bool], list[int]] = {}
        for a, b in pairs:
            # Uplink by uplink; the host with fewer of them takes several of the other's.
            for lane in range(max(len(ports[a]), len(ports[b]))):
                here, there = lane % len(ports[a]), lane % len(ports[b])
                far = ports[b][there]
                targets = far[:MAX_FAN] if capped else far[-1:]
                fan = [(ports[a][here][lane // len(ports[a]) % len(ports[a][here])], dst) for dst in targets]
                for key in ((a, here, True), (b, there, False)):
                    owner.setdefault(key, []).extend(range(len(flows), len(flows) + len(fan)))
                flows += fan
                rates += [self.alone[a, b] / (1 if capped else len(fan))] * len(fan)
        sizes = [_sizes(np.array(rates), FIT_S * share) for share in FIT_SHARES]
        times = [np.zeros((0, len(flows)))] * len(sizes)
        for _ in range(FIT_ROUNDS):
            more = [_run(self.meter, flows, self.channel, each, FIT_TIMES) for each in sizes]
            times = [np.concatenate(pair) for pair in zip(times, more, strict=True)]
            fits = {
                key: bounded_line([each[mine].sum() for each in sizes], [each[:, mine].max(axis=1) for each in times])
                for key, mine in owner.items()
            }
            if max(fit.error for fit in fits.values()) <= CLEAN:
                break
        return fits

    def _trunk(self, group: tuple[int, ...], ports: list[list[tuple[int, ...]]]) -> Trunk:
        """All hosts of the group at once, to (and from) hosts outside, or among themselves if there are none."""
        outside = [host for host in range(len(self.hosts)) if host not in group]
        if outside:
            there = [(host, outside[at % len(outside)]) for at, host in enumerate(group)]
        else:
            half = len(group) // 2
            there = [(group[at], group[half + at % (len(group) - half)]) for at in range(half)]
        found = []
        for pairs in (there, [pair[::-1] for pair in there]):
            flows = [(self.hosts[a][0], self.hosts[b][-1]) for a, b in pairs]
            rates = np.array([self.alone.get(pair) or min(self.alone.values()) for pair in pairs])
            sizes = [_sizes(rates, FIT_S * share) for share in FIT_SHARES]
            times = [_run(self.meter, flows, self.channel, each, FIT_TIMES).max(axis=1) for each in sizes]
            found.append(bounded_line([each.sum() for each in sizes], times).gb_per_s)
        return Trunk(hosts=group, out_gb_per_s=found[0], in_gb_per_s=found[1])


def _memory(meter: LinkMeter, hosts: tuple[tuple[int, ...], ...]) -> HostMemory:
    """Measure pairs of neighboring ranks inside hosts, where every second rank sends, on all hosts at once."""
    pairs = [(ranks[at], ranks[at + 1]) for ranks in hosts for at in range(0, len(ranks) - 1, 2)]
    rates = np.full(len(pairs), np.median(_rates(meter, pairs, MEMORY, MEMORY_S)))
    sizes = [_sizes(rates, MEMORY_S * share) for share in FIT_SHARES]
    times = [_run(meter, pairs, MEMORY, each, MEMORY_TIMES) for each in sizes]
    fit = fit_line([each[0] for each in sizes], [np.median(each.min(axis=0)) for each in times])
    few, many = (meter.bounce(pairs, MEMORY, hops, 12) for hops in (FEW_HOPS, MANY_HOPS))
    hop = [per_hop_us(FEW_HOPS, few[:, at], MANY_HOPS, many[:, at]) for at in range(len(pairs))]
    return HostMemory(gb_per_s=fit.gb_per_s, alpha_us=float(np.median(hop)), error=fit.error)


def _channels_apart(
    meter: LinkMeter, hosts: tuple[tuple[int, ...], ...], networks: Sequence[ProbedChannel]
) -> tuple[str, ...]:
    """Which channels slow each other: the same two hosts on both at once, sized to take as long alone."""
    notes = []
    rate: Mapping[str, float] = {
        net.name: 1e3 * min(net.ports[0].out_gb_per_s, net.flow_gb_per_s, *(p.in_gb_per_s for p in net.ports if p.host))
        for net in networks
    }
    for one, two in combinations([net.name for net in networks], 2):
        flows = [
            ProbeFlow(
                src=hosts[0][0], dst=hosts[1][-1], channel=name, nbytes=int(_sizes(np.array([rate[name]]), STEP_S)[0])
            )
            for name in (one, two)
        ]
        alone = max(float(np.median(meter.flows([flow], 3))) for flow in flows)
        both = float(np.median(meter.flows(flows, 3).max(axis=1)))
        if both > SHARED * alone:
            notes.append(f"{one} and {two} slow each other: together they take {both / alone:.2f} times as long")
    return tuple(notes)


def _rates(meter: LinkMeter, pairs: Sequence[Pair], channel: str, step_s: float = STEP_S) -> NDArray[np.float64]:
    """Bytes per microsecond of flows that run at once, with sizes that grow until every flow takes long enough."""
    sizes = np.full(len(pairs), FIRST_BYTES, np.int64)
    while True:
        times = np.median(_run(meter, pairs, channel, sizes, 1 if sizes.max() == FIRST_BYTES else 2), axis=0)
        short = (times < step_s * 1e6 / 2) & (sizes < MAX_FLOW_BYTES)
        if not short.any():
            return np.asarray(sizes / times, np.float64)
        growth = np.clip(step_s * 1e6 / times, 2, 16)
        wanted = np.where(short, np.minimum(sizes * growth, MAX_FLOW_BYTES), sizes)
        sizes = _sizes(wanted, 1e-6)


def _timed(meter: LinkMeter, pairs: Sequence[Pair], channel: str, rates: NDArray[np.float64]) -> NDArray[np.float64]:
    """The rates of flows that run at once, sized for rates that are known."""
    sizes = _sizes(rates, STEP_S)
    return np.asarray(sizes / np.median(_run(meter, pairs, channel, sizes, 3), axis=0), np.float64)


def _sizes(rates: NDArray[np.float64], seconds: float) -> NDArray[np.int64]:
    """Bytes that take about so long; flows of about the same rate get the same, which saves programs."""
    whole = np.clip(rates.max() * (seconds * 1e6), 64 * SIZE_STEPS, MAX_FLOW_BYTES)
    steps = np.ceil(rates / rates.max() * SIZE_STEPS - 0.25)
    return np.asarray(np.maximum(steps, 1) * (whole // SIZE_STEPS), np.int64)


def _run(
    meter: LinkMeter, pairs: Sequence[Pair], channel: str, sizes: NDArray[np.int64], times: int
) -> NDArray[np.float64]:
    flows = [
        ProbeFlow(src=a, dst=b, channel=channel, nbytes=size)
        for (a, b), size in zip(pairs, sizes.tolist(), strict=True)
    ]
    return meter.flows(flows, times)
