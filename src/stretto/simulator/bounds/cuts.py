# SPDX-License-Identifier: Apache-2.0
"""Bounds from cuts: the data that must come into a set of nodes passes the links that lead into it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ... import _native
from ...cluster import Cluster
from .demand import Demand
from .net import ArcNetwork, Floats, Mask, Nodes

CLOSER = 1 + 1e-12
"""The factor by which a ratio must exceed another to count as better: below it, rounding decides."""
PREFIXES = 31
"""The number of cuts between the first k devices and the rest that are tried."""

Need = tuple[int, Nodes, Floats]
"""The needs of one sink: (sink, the sources that supply it, the share of nbytes from each)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """A cut: at least `share` of nbytes must pass `arcs`, which lead into `sink_side`."""

    share: float
    rate: float
    sink_side: Mask
    arcs: Mask

    @classmethod
    def into(cls, net: ArcNetwork, sink_side: Mask, share: float) -> Cut:
        """The cut around a set of nodes.

        Args:
            net: The network.
            sink_side: Whether each node is inside.
            share: The share of nbytes that must come in.

        Returns:
            The cut, with the arcs that lead into the set and their total rate.
        """
        arcs = ~sink_side[net.src] & sink_side[net.dst]
        return cls(share=share, rate=float(net.rate[arcs].sum()), sink_side=sink_side, arcs=arcs)

    @property
    def us(self) -> float:
        """The least time in microseconds per byte of nbytes."""
        return self.share / self.rate

    @property
    def reverse(self) -> Cut:
        """The same cut in the network with reversed arcs."""
        return Cut(share=self.share, rate=self.rate, sink_side=~self.sink_side, arcs=self.arcs)


def worst_sink(net: ArcNetwork, needs: Iterable[Need], at_least: float = 0.0) -> Cut | None:
    """The tightest cut that separates some sink from what it needs.

    In a time T the arcs carry rate x T, and the needs of a sink fit if a flow of their size reaches it. If
    not, the minimum cut of that flow proves a longer T (Newton's method on the ratio: finitely many cuts, no
    bisection). Most sinks only confirm the T found so far, with one flow.

    Args:
        net: The network.
        needs: What each sink needs, and from where.
        at_least: The time per byte of nbytes, in microseconds, that a cut must exceed.

    Returns:
        The cut, or None if no cut is tighter than `at_least`.
    """
    flow = _native.MaxFlow(net.num_nodes, net.src, net.dst)
    time, worst, sized_for = max(at_least, 1e-300), None, -1.0
    for sink, sources, amounts in needs:
        total = float(amounts.sum())
        here, unlimited = np.array([sink], np.int32), np.array([np.inf])
        while True:
            if sized_for != total:
                flow.set_capacity(np.minimum(net.rate * time, total), total * 2.0**-56)
                sized_for = total
            if flow.run(sources, amounts, here, unlimited) >= total / CLOSER:
                break
            side = flow.sink_side().astype(np.bool_)
            cut = Cut.into(net, side, float(amounts[~side[sources]].sum()))
            if cut.us <= time * CLOSER:
                break
            time, worst, sized_for = cut.us, cut, -1.0
    return worst


def sink_needs(demand: Demand) -> Iterator[Need]:
    """For each device the bundles that it wants, each from one of the places that its parts come from."""
    source, wanter, bundle = demand.pairs
    return _grouped(wanter, source, bundle, bundle, demand)


def source_needs(demand: Demand) -> Iterator[Need]:
    """For each source the payloads that must leave it, each to one device that wants it; for the reversed network."""
    source, wanter, bundle = demand.pairs
    return _grouped(source, wanter, demand.payload[bundle], bundle, demand)


def _grouped(
    at: Nodes, other: Nodes, what: NDArray[np.int64], bundle: NDArray[np.int64], demand: Demand
) -> Iterator[Need]:
    """Needs at each node of `at`: one row of every (at, what), and its share from `other`."""
    order = np.lexsort((what, at))
    at, other, what, bundle = at[order], other[order], what[order], bundle[order]
    first = np.append(True, (at[1:] != at[:-1]) | (what[1:] != what[:-1]))[: len(at)]
    at, other, amount = at[first], other[first], demand.share[bundle[first]]
    begins = np.flatnonzero(np.append(True, at[1:] != at[:-1])[: len(at)])
    for begin, end in zip(begins, np.append(begins[1:], len(at)), strict=True):
        places, entry = np.unique(other[begin:end], return_inverse=True)
        yield int(at[begin]), places, np.bincount(entry, amount[begin:end]).astype(np.float64)


def regions(cluster: Cluster) -> Iterator[NDArray[np.int64]]:
    """Natural partitions of the devices, as the group of each device: by host, and by slices of the dimensions."""
    number = np.arange(cluster.num_devices)
    host = cluster.node_host[: cluster.num_devices]
    found = [np.unique(np.where(host < 0, -1 - number, host), return_inverse=True)[1]]
    outer = number
    for dimension in cluster.dimensions[:-1]:
        found.append(outer % dimension.size)
        outer = outer // dimension.size
        found.append(outer)
    return (group for group in found if 0 < group.max() < len(number) - 1)


def region_cuts(net: ArcNetwork, demand: Demand, group: NDArray[np.int64]) -> Iterator[Cut]:
    """The cuts into and out of every group of devices.

    Args:
        net: The network.
        demand: The demand.
        group: The group of each device.

    Yields:
        One cut per group and direction in which something must move.
    """
    into, out = _group_shares(demand, group)
    for inside in np.flatnonzero(into):
        yield _around(net, group == inside, into[inside])
    for inside in np.flatnonzero(out):
        yield _around(net.reverse, group == inside, out[inside]).reverse


def prefix_cuts(net: ArcNetwork, demand: Demand) -> Iterator[Cut]:
    """Cuts between the devices below some number and the rest."""
    places = np.unique(np.linspace(0, net.num_devices, PREFIXES + 2).round().astype(int))[1:-1]
    into, out = _prefix_shares(demand, net.num_devices)
    number = np.arange(net.num_devices)
    for place in places:
        if into[place] > 0:
            yield _around(net, number < place, into[place])
        if out[place] > 0:
            yield _around(net, number >= place, out[place])


def _around(net: ArcNetwork, inside: Mask, share: float) -> Cut:
    return Cut.into(net, net.narrowest_entry(inside), float(share))


def _group_shares(demand: Demand, group: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """The shares of nbytes that must come into, and leave, each group; a payload counts once."""
    source, wanter, bundle = demand.pairs
    lowest, highest = (value[source] for value in demand.extent(group))
    # A part that devices of several groups hold is treated as held everywhere, which only loosens the bound.
    apart = (lowest == highest) & (lowest != group[wanter])
    width = int(demand.payload.max(initial=0)) + 1

    def shares(at: NDArray[np.int64]) -> Floats:
        keys, first = np.unique((at * width + demand.payload[bundle])[apart], return_index=True)
        share = demand.share[bundle[apart][first]]
        return np.bincount(keys // width, share, int(group.max()) + 1).astype(np.float64)

    return shares(group[wanter]), shares(lowest)


def _prefix_shares(demand: Demand, num_devices: int) -> tuple[Floats, Floats]:
    """The shares of nbytes that must come into, and leave, the first k devices; a payload counts once."""
    source, wanters, bundle = demand.pairs
    wanter = wanters.astype(np.int64)
    lowest, highest = (value[source] for value in demand.extent(np.arange(num_devices)))

    def shares(begin: NDArray[np.int64], end: NDArray[np.int64]) -> Floats:
        order = np.lexsort((begin - end, demand.payload[bundle]))
        _, first = np.unique(demand.payload[bundle][order], return_index=True)
        longest = order[first]
        longest = longest[begin[longest] < end[longest]]
        share = demand.share[bundle[longest]]
        steps = np.bincount(begin[longest] + 1, share, num_devices + 2)
        steps -= np.bincount(end[longest] + 1, share, num_devices + 2)
        return np.cumsum(steps)

    return shares(wanter, lowest), shares(highest, wanter)
