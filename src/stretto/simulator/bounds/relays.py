# SPDX-License-Identifier: Apache-2.0
"""Bounds from cuts in space and time: what crosses late cannot be passed on, what crosses early cannot be a sum.

Take a set of devices `inside`, some sources outside and some wanters inside, and follow every pair of the two: the
source's part must come to the wanter. Look at the message by which it comes inside for the last time. If it starts at s
from u and is done at d in v, it serves only those wanters to which v can pass it on before the end, and carries only
those parts that could have reached u by s. So a byte on a link is worth (parts that it may carry) x (wanters it may
serve), which falls off towards both ends of the time; where nothing is combined, a byte carries one part.
`docs/bounds.md` has the proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ... import _native
from ...cluster import Cluster
from .cuts import Cut, regions
from .net import ArcNetwork, Floats, Mask

MAX_SETS = 64
"""The most sets of devices of one family that are tried; any choice of sets is valid."""
MAX_DEVICES = 256
"""The most devices for which these bounds are looked for."""
FEW_DEVICES = 32
"""The most devices for which all sets are tried, also those whose links look alike."""
FAR = 6
"""The most subsets of far sources, and of far wanters, that are tried for each set of devices."""

Worths = tuple[Floats, Floats]
"""Rates of worth (speed, from): from time `from` on, a link gains `speed` worth of bytes per microsecond."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TimedProof:
    """A proof that a time T has ``sum(speed x max(0, T - offset)) >= need x nbytes``, in each of several physics."""

    need: float
    worths: tuple[Worths, ...]
    share: float
    inside: Mask
    rate: float
    sends: bool = False
    """Whether it was found on reversed links: the devices inside then send."""
    origins: tuple[int, ...] = ()
    """The devices from which it all comes, for a flow from these to the one inside."""
    groups: int = 0
    """The number of groups, for an argument that counts how often they are entered."""

    @property
    def method(self) -> str:
        """The name of the method."""
        return "timed counting" if self.groups else "timed flow" if self.origins else "timed cut"

    def total_us(self, nbytes: float) -> float:
        """The least T that satisfies it in the kindest physics."""
        return min(least_time(self.need * nbytes, speed, offset) for speed, offset in self.worths)


def least_time(need: float, speed: Floats, offset: Floats) -> float:
    """The least T with ``sum(speed x max(0, T - offset)) >= need``.

    Args:
        need: What must be moved.
        speed: What is moved in a microsecond, by each of several movers.
        offset: When each of them begins, in ascending order.

    Returns:
        The time in microseconds.
    """
    return float(np.min((need + np.cumsum(speed * offset)) / np.cumsum(speed)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Ends:
    """What must come from `sources` (with a share of nbytes each) to all of `wanters`."""

    sources: NDArray[np.int32]
    shares: Floats
    wanters: NDArray[np.int32]
    combining: bool
    """Whether parts are added up on the way, so that one byte stands for many parts."""
    copied: bool
    """Whether a switch may hand one byte to several wanters."""


def timed_proofs(cluster: Cluster, net: ArcNetwork, times: MessageTimes, ends: Ends) -> Iterator[TimedProof]:
    """The proofs over single devices, all but one device, hosts and slices; those that say the same come once.

    Args:
        cluster: The cluster.
        net: Its links, or these reversed.
        times: The least alphas on them.
        ends: What must come from where to where.

    Yields:
        The proofs.
    """
    number = np.arange(net.num_devices)
    taking_part = np.union1d(ends.sources, ends.wanters)
    sets = [*_some([number == d for d in taking_part]), *_some([number != d for d in taking_part])]
    for group in regions(cluster):
        blocks = _some([group == block for block in np.unique(group)])
        sets += [*blocks, *(~block for block in blocks)]
    seen = set()
    for inside in sets if net.num_devices <= FEW_DEVICES else _unlike(net, sets):
        for proof in _around(net, times, ends, inside):
            key = (proof.need, *(part.round(9).tobytes() for pair in proof.worths for part in pair))
            if key not in seen:
                seen.add(key)
                yield proof


def _some(sets: list[Mask]) -> list[Mask]:
    return sets[:: -(-len(sets) // MAX_SETS)] if sets else sets


def _unlike(net: ArcNetwork, sets: list[Mask]) -> Iterator[Mask]:
    """The sets, but only the first of those with equally many devices and equal links."""
    seen = set()
    for inside in sets:
        alone = np.zeros(net.num_nodes, np.bool_)
        alone[: net.num_devices] = inside
        arcs = alone[net.dst] & ~alone[net.src]
        key = (int(inside.sum()), *sorted(zip(net.rate[arcs].tolist(), net.alpha_us[arcs].tolist(), strict=True)))
        if key not in seen:
            seen.add(key)
            yield inside


class MessageTimes:
    """The least alphas of messages and of chains of messages between nodes."""

    def __init__(self, net: ArcNetwork, *, forwarding: bool) -> None:
        self.net, self.forwarding = net, forwarding
        devices = np.arange(net.num_devices, dtype=np.int32)
        self.known = net.distances(net.alpha_us, devices)[:, : net.num_devices]
        """From each device to each device, over any number of messages."""
        # A message passes devices only where they forward: a device gets a second node, from which its messages start.
        self.start = net.src if forwarding else np.where(net.src < net.num_devices, net.num_nodes + net.src, net.src)
        origin = devices if forwarding else (net.num_nodes + devices).astype(np.int32)
        count = net.num_nodes + net.num_devices
        begins = np.concatenate([origin, np.arange(net.num_nodes, dtype=np.int32)])
        flat = _native.path_lengths(count, self.start.astype(np.int32), net.dst, net.alpha_us, begins)
        table = flat.reshape(len(begins), count)
        self.before = table[: net.num_devices][:, self.start]
        """From each device to the start of each arc, within one message."""
        self.after = table[net.num_devices :][net.dst][:, : net.num_devices]
        """From the end of each arc to each device, within one message."""

    def within(self, inside: Mask) -> Floats:
        """From each device inside to each device inside, over messages between devices inside."""
        net, devices = self.net, np.flatnonzero(inside).astype(np.int32)
        if len(devices) == 1:
            return np.zeros((1, 1))
        if self.forwarding:
            return self.known[np.ix_(inside, inside)]
        outside = (net.src < net.num_devices) & ~inside[np.minimum(net.src, net.num_devices - 1)]
        use = ~outside
        flat = _native.path_lengths(net.num_nodes, net.src[use], net.dst[use], net.alpha_us[use], devices)
        return flat.reshape(len(devices), net.num_nodes)[:, devices]


def _around(net: ArcNetwork, times: MessageTimes, ends: Ends, inside: Mask) -> Iterator[TimedProof]:
    wanted = ends.wanters[inside[ends.wanters]]
    away = np.flatnonzero(~inside[ends.sources])
    if not len(wanted) or not len(away):
        return
    within = times.within(inside)
    alone = np.zeros(net.num_nodes, np.bool_)
    alone[: net.num_devices] = inside
    sides = [net.narrowest_entry(inside)]
    if np.any(sides[0] != alone):
        sides.append(alone)
    near = times.known[np.ix_(ends.sources[away], np.flatnonzero(inside))].min(axis=1)
    deep = times.known[np.ix_(np.flatnonzero(~inside), wanted)].min(axis=0)
    for side in sides:
        cut = Cut.into(net, side, 0.0)
        for some in far_ones(deep):
            pass_on = within[:, np.searchsorted(np.flatnonzero(inside), wanted[some])]
            for parts in far_ones(near):
                proof = _proof(net, times, ends, inside, cut, away[parts], pass_on)
                if proof is not None:
                    yield proof


def far_ones(distance: Floats) -> Iterator[NDArray[np.int64]]:
    """Positions in `distance`: all of them, those that are far, and the farthest."""
    steps = np.unique(distance.round(9))
    if not len(steps):
        return
    for least in np.unique(np.append(steps[:: -(-len(steps) // (FAR - 1))], steps[-1])):
        yield np.flatnonzero(distance >= least - 1e-9)


def _proof(
    net: ArcNetwork,
    times: MessageTimes,
    ends: Ends,
    inside: Mask,
    cut: Cut,
    parts: NDArray[np.int64],
    pass_on: Floats,
) -> TimedProof | None:
    """The worth of all bytes on the links of a cut, under alphas after the bytes and under alphas before them.

    Where alphas are paid link by link, a byte is on a link neither before the first nor after the second moment.
    """
    ready = times.known[ends.sources[parts]][:, ~inside]
    ready = np.sort(ready, axis=0) if ends.combining else ready.min(axis=0, keepdims=True)
    late: list[Worths] = []
    early: list[Worths] = []
    for arc in np.flatnonzero(cut.arcs).tolist():
        before, after = times.before[~inside, arc], times.after[arc, inside]
        u, v = np.isfinite(before), np.isfinite(after)
        if not u.any() or not v.any():
            continue
        first, rate, alpha = ready[:, u], float(net.rate[arc]), float(net.alpha_us[arc])
        served = pass_on[v]
        last = _served(served + after[v, None], ends.copied) + before[u].min()
        late.append(_outer(first.min(axis=1), last + alpha, rate))
        last = _served(served, ends.copied) + after[v].min()
        early.append(_outer((first + before[None, u]).min(axis=1), last + alpha, rate))
    if not late:
        return None
    wanters, share = pass_on.shape[1], float(ends.shares[parts].sum())
    whole = float(ends.shares[0]) * len(parts) if ends.combining else share
    return TimedProof(
        need=wanters * whole,
        worths=(by_time(late), by_time(early)),
        share=float(ends.shares[0]) if ends.combining else share,
        inside=inside,
        rate=cut.rate,
    )


def _served(late: Floats, copied: bool) -> Floats:
    """How long before the end a byte must come to serve 1, 2, ... wanters (columns), over the devices (rows)."""
    if copied:
        return np.sort(late.min(axis=0))
    return np.asarray(np.sort(late, axis=1).min(axis=0))


def _outer(first: Floats, last: Floats, rate: float) -> Worths:
    offset = (first[:, None] + last[None, :]).ravel()
    offset = offset[np.isfinite(offset)]
    return np.full(len(offset), rate), offset


def by_time(worths: list[Worths]) -> Worths:
    """All worths by time, with those of one moment added up."""
    speed, offset = (np.concatenate(part) for part in zip(*worths, strict=True))
    moments, at = np.unique(offset, return_inverse=True)
    return np.bincount(at, speed).astype(np.float64), moments
