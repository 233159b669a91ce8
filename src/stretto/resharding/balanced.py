# SPDX-License-Identifier: Apache-2.0
"""Stretto's own resharding: exactly balanced senders, chunks that flow through hosts, and an order that keeps ports
busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..collectives import Collective
from ..collectives.reshard import Reshard
from ..programs import Program
from ..simulator import Timeline, simulate
from ..simulator.network import default_contention
from ..synthesis.pacing import paced
from .balance import sender_shares
from .bundles import Bundle, Hop, Route, Router, cut_for
from .dense import dense_order
from .hosts import Hosts
from .rails import RailRouter, holders_alone_us, relay_shares

GOOD_ENOUGH = 1.007
"""The multiple of the bound at which the search stops."""
CLOSE, FEW_HOPS = 1.05, 50_000
"""The multiple of the bound at which the search stops once so many hops are simulated."""
FANS = (1, 2, 4)
URGENCIES = ("far_first", "side_by_side")
PACES = ("", "as it arrives", "paced")
"""Orders that are tried: that of the model; hops passed on in the order of arrival; and sends that also wait for the
messages that arrive before them in the model."""
FINER = 4
"""Into how many parts a chunk is cut where finer chunks are tried."""
RAILS = ("holders send", "others pass some on")
BUSY = (1.0, 0.5)
"""Of the bound, how long the busiest group sends at least where others pass some on: as little is passed on as that
allows. Where senders and receivers have no time to spare, messages of several senders meet at receivers."""
DIRECT_LOAD = 1.02
"""The multiple of the bound up to which holders alone may be busy, where devices have a port each."""
DIGITS = 9
"""Times are compared with so many digits behind the bound's own."""
LATENCY_SHARE = 0.02
"""Trees are tried where the latency of a chain is more than this share of the bound."""
MAX_TRIED_HOPS = 180_000
"""Limit on the hops simulated in all tries together, so that large reshardings are planned in seconds; only hops
with fair links count, since others cost a twentieth."""


Stream = tuple[int, int]
"""The sender and the receiver of chunks between two groups."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BalancedProgram:
    """A program with its bundles, its time in the model, and a description of how it was made."""

    bundles: list[Bundle]
    program: Program
    model_us: float
    how: str
    worst_us: float
    """The longer of the program's times with fair and with fifo links."""
    rank: float
    """What programs are compared by, the least first: the worst time over the bound."""
    timelines: dict[str, Timeline]
    """The program simulated, by contention, so that nobody has to do it again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkHops:
    """All hops of all chunks, as columns."""

    src: list[int]
    dst: list[int]
    chunk: list[int]
    reduce: list[bool]
    parent: list[int]
    out_port: list[int]
    in_port: list[int]
    duration_us: list[float]
    done: list[int]
    """Number of hops between hosts before this one."""
    rest: list[int]
    """Number of hops between hosts after this one."""
    lane: list[int]
    """Lane of the connection: streams that enter a host by different ports do not wait for one another inside it."""
    progress: list[float]
    """The share of the bundle that goes before this chunk, 0..1."""
    step: list[float]
    """The share of the bundle that one chunk is, 0..1."""

    def together_us(self) -> list[float]:
        """Durations by which hops between the same kinds of ports end at one moment, so that senders change receivers
        together: chunks that differ by a byte take equally long, and the way to the door of a port takes no time.
        """
        return [
            float(f"{us:.4g}") if out >= 0 or parent >= 0 else 0.0
            for us, out, parent in zip(self.duration_us, self.out_port, self.parent, strict=True)
        ]

    def urgency(self, name: str) -> list[float]:
        """Priorities of hops between two ports, the least first: chunks with the farthest way, or
        bundles side by side.
        """
        if name == "far_first":
            return [at - rest for at, rest in zip(self.progress, self.rest, strict=True)]
        return [at + done * step for at, done, step in zip(self.progress, self.done, self.step, strict=True)]


def best_program(
    whole: Sequence[Bundle], cluster: Cluster, hosts: Hosts, rank: dict[int, int], *, nbytes: int, bound_us: float
) -> BalancedProgram:
    """The best program of several ways to route and order the chunks, each simulated with both kinds of contention.

    Args:
        whole: the bundles, not yet cut into chunks; at least one must have to move.
        cluster: the cluster, for simulations.
        hosts: groups and ports of the devices.
        rank: the program's rank of each device.
        nbytes: bytes of the largest buffer of any device.
        bound_us: lower bound in us, at which the search stops.

    Returns:
        The program with the least worst-case time, and its bundles cut into chunks.
    """
    # Links that send one message at a time are simulated first: they cost a tenth, and often say enough.
    both = ("fair",) if default_contention(cluster) == "fair" else ("fifo", "fair")
    best: BalancedProgram | None = None
    tried = 0
    for way in _ways(whole, hosts, bound_us):
        router, busiest_us = _router(way, whole, hosts, bound_us)
        bundles = cut_for(whole, hosts, max(busiest_us, bound_us), relayed=bool(way.rails))
        if way.finer:
            bundles = [b.cut(FINER * b.chunks) if b.missing else b for b in bundles]
            if sum(b.chunks * len(b.missing) for b in bundles) > FEW_HOPS:
                continue
        collective = Reshard(tuple(rank), [b.piece(rank) for b in bundles])
        hops = _hops(bundles, router, hosts, rank)
        planned = dense_order(
            out_port=hops.out_port, in_port=hops.in_port, parent=hops.parent,
            duration_us=hops.together_us() if way.doors else hops.duration_us,
            urgency=hops.urgency(way.urgency),
        )  # fmt: skip
        start, end = planned = just_in_time(hops, *planned)
        for pace in (PACES[2], PACES[0]) if way.rails else PACES:
            order = np.lexsort((np.arange(len(start)), start))
            program = _program(hops, order, rank, collective)
            if pace == "paced":
                program = paced(program, start[order], end[order], peers=way.doors)
            lines: dict[str, Timeline] = {}
            for how in both:
                # One that is slower than the best in one kind of links is not simulated in the other.
                if not lines or best is None or _rounded(lines[both[0]], bound_us) < best.rank or not way.rails:
                    lines[how] = simulate(program, cluster, nbytes=nbytes, contention=how)
                    tried += len(start) * (how == "fair")
            worst = max(lines.values(), key=lambda line: line.total_us)
            value = _rounded(worst, bound_us)
            if best is None or (value < best.rank and len(lines) == len(both)):
                best = BalancedProgram(
                    bundles=bundles, program=program, model_us=float(planned[1].max(initial=0.0)),
                    how=f"{way}{', ' * bool(pace)}{pace}", worst_us=worst.total_us, rank=value,
                    timelines=lines,
                )  # fmt: skip
            enough = CLOSE if tried > FEW_HOPS else GOOD_ENOUGH
            if best.worst_us <= enough * bound_us or tried > MAX_TRIED_HOPS:
                return best
            if not way.rails:
                start, end = planned if pace else (_arrivals(hops, order, start, worst.end_us), end)
    assert best is not None
    return best


def _rounded(line: Timeline, bound_us: float) -> float:
    return round(line.total_us / bound_us, DIGITS)


def just_in_time(
    hops: ChunkHops, start: NDArray[np.float64], end: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The same times, but hops inside a sending group come just before the hop between groups that they serve.

    Such hops take no port and could all go at once. Messages then ask for a port in another order than planned: what a
    device holds itself first, what others of its group bring to it afterwards. Where a device waits for what should
    have been brought to it before (`paced`), it asks in the order of the plan.

    Args:
        hops: the hops.
        start: when each hop starts.
        end: when each hop ends.

    Returns:
        The times with these hops later.
    """
    before = [out < 0 for out in hops.out_port]
    for j, parent in enumerate(hops.parent):
        before[j] = before[j] and (parent < 0 or before[parent])
    needed = [np.inf] * len(before)
    start, end = start.copy(), end.copy()
    for j in range(len(before) - 1, -1, -1):
        if before[j] and needed[j] < np.inf:
            end[j] = max(end[j], needed[j])
            start[j] = end[j] - hops.duration_us[j]
        parent = hops.parent[j]
        if parent >= 0:
            needed[parent] = min(needed[parent], start[j])
    return start, end


@dataclass(frozen=True, kw_only=True)
class BalanceOptions:
    """One way that is tried: how many hosts a host passes chunks on to, whether devices lend their ports, which hops go
    first.
    """

    fan: int
    relay: bool
    ring: bool
    urgency: str
    rails: str = ""
    """Where each device's port serves its whole group, who sends to other groups, one of `RAILS`; else empty."""
    even: bool = False
    """Whether ports send equally much to each group, or the sum of both ends is kept even."""
    busy: float = 1.0
    """How long the busiest group sends, relative to the bound: one of `BUSY`."""
    doors: bool = False
    """Whether devices that share a port send by the one nearest to it."""
    finer: bool = False
    """Whether chunks are smaller: what comes last is spread inside its group sooner, for more messages."""

    def __str__(self) -> str:
        if self.rails:
            spare = f" ({self.busy:g} busy)" if self.busy < 1 else ""
            return f"paired ports, {'even' if self.even else 'by load'}, {self.rails}{spare}{', finer' * self.finer}"
        ring, lent = "ring" if self.ring else "least loaded", ", ports lent" * self.relay
        return f"fan {self.fan}, {ring}, {self.urgency.replace('_', ' ')}{lent}{', by one device' * self.doors}"


def _ways(bundles: Sequence[Bundle], hosts: Hosts, bound_us: float) -> Iterator[BalanceOptions]:
    """The ways to try: chains first; where latency matters also trees, up to a sender that serves every host itself."""
    depth = max(len(hosts.groups(b.missing)) for b in bundles)
    if hosts.several_ports and not any(b.reduction for b in bundles):
        alone = holders_alone_us(bundles, hosts) <= bound_us * DIRECT_LOAD
        for finer, busy, even in product((False, True), (1.0,) if alone else BUSY, (True, False)):
            yield BalanceOptions(
                fan=1, relay=True, ring=True, urgency="side_by_side", rails=RAILS[not alone], even=even, busy=busy,
                finer=finer,
            )  # fmt: skip
    fans = {1}
    if depth > 1 and depth * hosts.alpha_us > LATENCY_SHARE * bound_us:
        fans |= {fan for fan in FANS if fan < depth} | {depth}
    relays = (False, True) if hosts.several_ports else (False,)
    rings = (True, False) if depth > 1 else (True,)
    for fan, relay, ring, urgency in product(sorted(fans), relays, rings, URGENCIES):
        yield BalanceOptions(fan=fan, relay=relay, ring=ring, urgency=urgency)
    if len(set(hosts.out_port.values())) == len(hosts.members) and set(hosts.doors) == set(hosts.out_port.values()):
        for ring, urgency in product(rings, URGENCIES):
            yield BalanceOptions(fan=1, relay=False, ring=ring, urgency=urgency, doors=True)


def _router(
    way: BalanceOptions, bundles: Sequence[Bundle], hosts: Hosts, bound_us: float
) -> tuple[Router | RailRouter, float]:
    """The router of one way, and the load of the busiest sender in us."""
    if way.rails:
        passing = relay_shares(bundles, hosts, way.busy * bound_us) if way.rails == RAILS[1] else ()
        return RailRouter(hosts, shares=passing, even=way.even), 0.0
    shares, busiest_us = sender_shares(bundles, hosts, relay=way.relay)
    return Router(hosts, shares, fan=way.fan, relay=way.relay, ring=way.ring, doors=way.doors), busiest_us


def _arrivals(
    hops: ChunkHops, order: NDArray[np.intp], planned: NDArray[np.float64], end_us: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The earliest start of each hop in the simulation, so that chunks are passed on in the order of their arrival."""
    ended = np.empty(len(order))
    ended[order] = end_us
    when = planned.tolist()
    for j, parent in enumerate(hops.parent):
        if parent >= 0:
            when[j] = max(float(ended[parent]), when[parent])
    return np.array(when)


def _program(hops: ChunkHops, order: NDArray[np.intp], rank: dict[int, int], collective: Collective) -> Program:
    src, dst = (np.array([rank[d] for d in devices], np.int64)[order] for devices in (hops.src, hops.dst))
    return Program.from_steps(
        "reshard_stretto", collective, src=src, dst=dst, chunk=np.array(hops.chunk)[order],
        reduce=np.array(hops.reduce, np.bool_)[order], lane=np.array(hops.lane)[order], step=np.arange(len(order)),
    )  # fmt: skip


def _hops(bundles: Sequence[Bundle], router: Router | RailRouter, hosts: Hosts, rank: dict[int, int]) -> ChunkHops:
    h = ChunkHops(
        src=[], dst=[], chunk=[], reduce=[], parent=[], out_port=[], in_port=[], duration_us=[], done=[], rest=[],
        lane=[], progress=[], step=[],
    )  # fmt: skip
    routes = router.all_routes(bundles)
    paired, streams = isinstance(router, RailRouter), dict[int, dict[Stream, int]]()
    first = 0
    for number, bundle in enumerate(bundles):
        sizes = np.diff(bundle.piece(rank).cuts()).tolist()
        for at, route in enumerate(routes[number]):
            base = len(h.src)
            entry: list[int] = []
            stream: list[Stream | None] = []
            done, rest = _between_hosts(route, hosts)
            for hop in route:
                far = hosts.group[hop.src] != hosts.group[hop.dst]
                out, into = (hosts.out_port[hop.src], hosts.in_port[hop.dst]) if far else (-1, -1)
                rate = min(hosts.bytes_per_us[out], hosts.bytes_per_us[into]) if far else hosts.local_bytes_per_us
                entry.append(hop.dst if far or hop.parent < 0 else entry[hop.parent])
                stream.append((hop.src, hop.dst) if far else stream[hop.parent] if hop.parent >= 0 else None)
                h.lane.append(
                    0 if far else _lane(hop, stream, streams, hosts) if paired else hosts.port_number[entry[-1]]
                )
                h.src.append(hop.src)
                h.dst.append(hop.dst)
                h.chunk.append(first + at)
                h.reduce.append(hop.reduce)
                h.parent.append(base + hop.parent if hop.parent >= 0 else -1)
                h.out_port.append(out)
                h.in_port.append(into)
                h.duration_us.append(sizes[at] / rate)
                h.progress.append((at + 0.5) / bundle.chunks)
                h.step.append(1 / bundle.chunks)
            h.done.extend(done)
            h.rest.extend(rest)
        first += bundle.chunks
    return h


def _lane(hop: Hop, stream: Sequence[Stream | None], streams: dict[int, dict[Stream, int]], hosts: Hosts) -> int:
    """The lane of the last hop, inside a group: chunks of one stream from another group arrive in order, so they share
    one; streams do not wait for one another.
    """
    group = hosts.group[hop.dst]
    own = stream[-1]
    if own is None:
        return hosts.port_number[hop.dst]
    known = streams.setdefault(group, {})
    return len(hosts.members[group]) + known.setdefault(own, len(known))


def _between_hosts(route: Route, hosts: Hosts) -> tuple[list[int], list[int]]:
    """For each hop the number of hops between hosts before it and after it."""
    before, behind = [0] * len(route), [0] * len(route)
    far = [hosts.group[hop.src] != hosts.group[hop.dst] for hop in route]
    for at, hop in enumerate(route):
        if hop.parent >= 0:
            before[at] = before[hop.parent] + far[hop.parent]
    for at in range(len(route) - 1, -1, -1):
        parent = route[at].parent
        if parent >= 0:
            behind[parent] = max(behind[parent], behind[at] + far[at])
    return before, behind
