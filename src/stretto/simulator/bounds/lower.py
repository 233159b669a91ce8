# SPDX-License-Identifier: Apache-2.0
"""`lower_bound`: a time that no algorithm can beat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...cluster import Cluster
from ...cluster.symmetry import LinkOrbits, link_orbits, translations
from ...collectives import Collective
from ...collectives.implicit import ImplicitCollective
from ...errors import InvalidInput
from ...units import check_bytes, counted, format_bytes, format_us
from .concurrent import MAX_VARIABLES, FlowNeeds, concurrent_flow, lengths, needed
from .counting import counted_in_time
from .cuts import Cut, Need, prefix_cuts, region_cuts, regions, sink_needs, source_needs, worst_sink
from .demand import Demand, demand_of
from .first_sends import first_sends
from .net import ArcNetwork, Floats
from .partition import narrowest_partition
from .passing import helps, passing_weights
from .quickest import quickest_flows
from .relays import MAX_DEVICES, Ends, MessageTimes, TimedProof, least_time, timed_proofs

WORTH_MORE_WORDS = 1.001
"""The factor by which a timed cut must exceed the plainer arguments to be given instead of them."""
BYTES = "<bytes>"
"""The placeholder in a proof's reason for the size, which depends on nbytes."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Bound:
    """A lower bound on the time of a collective, with its reason.

    `bandwidth_us` is proved by weights on links: every algorithm sends so much over them that
    ``sum(weights x bytes sent over links) >= demand_bytes``. `exact` says that some schedule reaches `bandwidth_us`
    (without alphas, and with data cut as finely as one likes). `total_us` also counts alphas, and `reason` and
    `method` say which argument decides it.
    """

    total_us: float
    bandwidth_us: float
    latency_us: float
    reason: str
    method: str
    exact: bool
    links: NDArray[np.int64]
    weights: Floats
    demand_bytes: float
    nbytes: float

    @property
    def algorithm_gb_per_s(self) -> float:
        """The best algorithm bandwidth: nbytes over `bandwidth_us`, in GB/s."""
        return self.nbytes / self.bandwidth_us / 1e3 if self.bandwidth_us > 0 else np.inf

    def __repr__(self) -> str:
        return f"<Bound {format_us(self.total_us)}: {self.reason} ({self.method})>"


def lower_bound(
    collective: Collective, cluster: Cluster, nbytes: float, *, channels: Iterable[str] | None = None
) -> Bound:
    """A time that no algorithm beats, without in-network reduction, and with multicast only where the cluster has it.

    The bound holds for both contention modes and both alpha modes of `simulate`; any device may relay.
    ``docs/bounds.md`` has the proofs. Results that do not depend on nbytes are kept, so that a sweep over sizes costs
    little more than one size.

    Args:
        collective: The collective.
        cluster: The cluster.
        nbytes: The larger of one rank's send and receive buffer in bytes, > 0.
        channels: The channels whose links may be used; all when not given.

    Returns:
        The bound, with its reason.

    Raises:
        InvalidInput: A device or a channel does not exist, or there is no route.

    >>> from stretto import MB, AllReduce
    >>> ring = Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=1.0)
    >>> bound = lower_bound(AllReduce(4), ring, 4 * MB)
    >>> bound.total_us, bound.reason
    (301.0, 'counting: each byte is received 6 times by 4 devices, which take in 80 GB/s')
    """
    nbytes = check_bytes(nbytes)
    if max(collective.ranks) >= cluster.num_devices:
        has = f"{cluster.name} has {cluster.num_devices} devices"
        raise InvalidInput(f"ranks: device {max(collective.ranks)} does not exist; {has}")
    latency, proofs, timed = _analyze(collective, cluster, None if channels is None else frozenset(channels))
    widest = max(proofs, key=lambda proof: proof.us, default=_NOTHING)
    decides = max(proofs, key=lambda proof: proof.total_us(nbytes), default=_NOTHING)
    total, reason, method = decides.total_us(nbytes), decides.in_words(nbytes), decides.method
    if latency.us > total:
        total, reason, method = latency.us, latency.reason, "shortest path"
    in_time = max(timed, key=lambda proof: proof.total_us(nbytes), default=None)
    if in_time is not None and in_time.total_us(nbytes) > total * WORTH_MORE_WORDS:
        total, reason, method = in_time.total_us(nbytes), _timed_in_words(cluster, in_time, nbytes), in_time.method
    return Bound(
        total_us=total,
        bandwidth_us=nbytes * widest.us,
        latency_us=latency.us,
        reason=reason,
        method=method,
        exact=widest.exact,
        links=widest.links,
        weights=widest.weights,
        demand_bytes=nbytes * widest.share,
        nbytes=float(nbytes),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class BoundProof:
    """A proof that every algorithm has ``sum(weights x bytes over links) >= share x nbytes``."""

    share: float
    links: NDArray[np.int64]
    weights: Floats
    rate: Floats
    message_us: Floats
    reason: str
    method: str
    exact: bool

    @classmethod
    def of(cls, net: ArcNetwork, weights: Floats, share: float, reason: str, method: str, exact: bool) -> BoundProof:
        """Make a proof from one weight per arc.

        Args:
            net: The network.
            weights: The weight of each arc, >= 0.
            share: The least weighted bytes as a share of nbytes.
            reason: The proof in words, with `BYTES` in place of the size.
            method: The name of the method.
            exact: Whether some schedule reaches the bound, alphas aside.

        Returns:
            The proof over the links with a weight.
        """
        used = np.flatnonzero((weights > 0) & (net.link >= 0))
        used = used[np.argsort(net.message_us[used], kind="stable")]
        return cls(
            share=share,
            links=net.link[used],
            weights=weights[used],
            rate=net.rate[used],
            message_us=net.message_us[used],
            reason=reason,
            method=method,
            exact=exact,
        )

    @property
    def us(self) -> float:
        """The least time in microseconds per byte of nbytes."""
        return self.share / float(self.weights @ self.rate) if self.share > 0 else 0.0

    def total_us(self, nbytes: float) -> float:
        """The least T with ``sum(weights x rate x max(0, T - message_us)) >= share x nbytes``.

        No byte is on a link while the alphas of its own message pass.
        """
        if self.share <= 0:
            return 0.0
        return least_time(self.share * nbytes, self.weights * self.rate, self.message_us)

    def in_words(self, nbytes: float) -> str:
        """The reason for this size."""
        return self.reason.replace(BYTES, _size(nbytes * self.share))


_NONE = np.zeros(0)
_NOTHING = BoundProof(
    share=0.0, links=np.zeros(0, np.int64), weights=_NONE, rate=_NONE, message_us=_NONE,
    reason="nothing has to move", method="none needed", exact=True,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Latency:
    """The longest among the shortest paths (by alphas) from a part's holder to a device that wants it."""

    us: float
    reason: str


@lru_cache(maxsize=32)
def _analyze(
    collective: Collective, cluster: Cluster, channels: frozenset[str] | None
) -> tuple[Latency, tuple[BoundProof, ...], tuple[TimedProof, ...]]:
    alike = _alike(collective, cluster)
    if alike is not None:
        net = ArcNetwork.of(cluster, channels)
        latency = _latency_from(cluster, net, np.arange(alike.local, dtype=np.int32), channels)
        return latency, tuple(_proofs_alike(collective.kind, cluster, net, alike)), ()
    demand = demand_of(collective, cluster.num_nodes)
    net = ArcNetwork.of(cluster, channels, demand.shared)
    if len(demand.pairs[0]) == 0:
        return Latency(us=0.0, reason=_NOTHING.reason), (), ()
    latency = _latency(cluster, net, demand, channels)
    return latency, tuple(_proofs(cluster, net, demand)), tuple(_timed(cluster, net, demand))


@dataclass(frozen=True, kw_only=True, eq=False)
class Alike:
    """Groups of `local` devices that are images of one another under automorphisms of the cluster."""

    local: int
    copies: int
    orbits: LinkOrbits


def _alike(collective: Collective, cluster: Cluster) -> Alike | None:
    """The groups of a cluster that are alike, for a collective of the library over very many ranks; else None."""
    if not (isinstance(collective, ImplicitCollective) and collective.implicit):
        return None
    if collective.ranks != tuple(range(cluster.num_devices)):
        return None
    for local, sizes in translations(cluster):
        with suppress(InvalidInput):
            orbits = link_orbits(cluster, sizes, local=local)
            return Alike(local=local, copies=cluster.num_devices // local, orbits=orbits)
    return None


def _latency_from(
    cluster: Cluster, net: ArcNetwork, places: NDArray[np.int32], channels: frozenset[str] | None
) -> Latency:
    """The latency from these devices to all others, where every other device is an image of one of these."""
    far = net.distances(net.alpha_us, places)[:, : cluster.num_devices]
    at, to = (int(number) for number in np.unravel_index(int(far.argmax()), far.shape))
    names = [cluster.node_names[at], cluster.node_names[to]]
    worst = float(far[at, to])
    if not np.isfinite(worst):
        over = f" over channels {', '.join(sorted(channels))}" if channels is not None else ""
        raise InvalidInput(f"cluster {cluster.name}: no route from {names[0]} to {names[1]}{over}")
    return Latency(us=worst, reason=f"latency: {names[0]} to {names[1]} takes {format_us(worst)} of alphas")


def _proofs_alike(kind: str, cluster: Cluster, net: ArcNetwork, alike: Alike) -> Iterator[BoundProof]:
    """The proofs of `_proofs` for all devices of a symmetric cluster: one group's needs are those of all."""
    devices = np.arange(cluster.num_devices, dtype=np.int32)
    if kind == "all_to_all":
        yield from _pairs_alike(cluster, net, alike)
        return
    if kind != "all_reduce":
        shares = np.full(len(devices), 1 / len(devices))
        forth = net if kind == "all_gather" else net.reverse
        cut = worst_sink(forth, ((end, devices, shares) for end in range(alike.local)))
        whole = cut if kind == "all_gather" else cut and cut.reverse
        yield _cut_proof(cluster, net, whole, net.switches_balanced)
        return
    group = devices // alike.local
    around = Cut.into(net, net.narrowest_entry(group == 0), 1.0)
    yield _cut_proof(cluster, net, around, False)
    yield _cut_proof(cluster, net, Cut.into(net.reverse, net.reverse.narrowest_entry(group == 0), 1.0).reverse, False)
    for vertex, count in ((group, alike.copies), (devices, len(devices))):
        # The bytes into one group of a partition, times the number of its images; any partition gives a valid bound.
        entered = np.zeros(cluster.num_links)
        for one in np.unique(vertex[: alike.local]):
            cut = Cut.into(net, net.narrowest_entry(vertex == one), 1.0)
            np.add.at(entered, net.link[cut.arcs], 1.0)
        orbit, members = alike.orbits.orbit, np.bincount(alike.orbits.orbit)
        mean = np.bincount(orbit, entered) * alike.copies / members
        weights = mean[orbit][net.link]
        who = _groups_in_words(cluster, vertex.astype(np.int64), count)
        rate = f"{float(weights @ net.rate) / 1e3:.6g} GB/s"
        times = 2 * (count - 1)
        reason = f"counting: each byte is received {times} times by {who}, which take in {rate}"
        yield BoundProof.of(net, weights, float(times), reason, "max-flow over equal groups", False)


def _pairs_alike(cluster: Cluster, net: ArcNetwork, alike: Alike) -> Iterator[BoundProof]:
    """The cuts around one group, and around each of its devices: what others have for it comes in, and goes out."""
    devices = np.arange(cluster.num_devices)
    for inside in [devices < alike.local, *(devices == one for one in range(alike.local))]:
        count = int(inside.sum())
        share = count * (len(devices) - count) / len(devices)
        yield _cut_proof(cluster, net, Cut.into(net, net.narrowest_entry(inside), share), False)
        back = Cut.into(net.reverse, net.reverse.narrowest_entry(inside), share)
        yield _cut_proof(cluster, net, back.reverse, False)


def _latency(cluster: Cluster, net: ArcNetwork, demand: Demand, channels: frozenset[str] | None) -> Latency:
    source, wanter, _ = demand.pairs
    places, begins = np.unique(source, return_index=True)
    ends = np.append(begins[1:], len(source))
    worst, route = -1.0, (0, 0)
    rows = max(1, (1 << 23) // net.num_nodes)
    for first in range(0, len(places), rows):
        last = min(first + rows, len(places))
        pairs = slice(begins[first], ends[last - 1])
        far = net.distances(net.alpha_us, places[first:last])
        us = far[np.searchsorted(places[first:last], source[pairs]), wanter[pairs]]
        at = int(us.argmax())
        if us[at] > worst:
            worst, route = float(us[at]), (int(source[pairs][at]), int(wanter[pairs][at]))
    names = [cluster.node_names[demand.holders(route[0])[0]], cluster.node_names[route[1]]]
    if not np.isfinite(worst):
        over = f" over channels {', '.join(sorted(channels))}" if channels is not None else ""
        raise InvalidInput(f"cluster {cluster.name}: no route from {names[0]} to {names[1]}{over}")
    return Latency(us=worst, reason=f"latency: {names[0]} to {names[1]} takes {format_us(worst)} of alphas")


def _proofs(cluster: Cluster, net: ArcNetwork, demand: Demand) -> Iterator[BoundProof]:
    """The proofs by those arguments that fit the shape of the demand."""
    if not demand.combining and demand.same_wanters:
        wanters = demand.wanter[: demand.num_wanters[0]]
        exact = len(wanters) == 1 or _reaches_all(net, demand, wanters)
        needs = [*_everything_to(wanters, demand.source, demand.share)]
        cut = worst_sink(net, needs)
        yield _cut_proof(cluster, net, cut, exact)
        yield from _passing(cluster, net, demand, needs, cut, ~cluster.node_multicast)
    elif demand.distinct and demand.same_sources and np.all(demand.num_wanters == 1):
        sources = demand.source[: demand.num_sources[0]]
        exact = len(sources) == 1 or _reaches_all(net, demand, sources)
        needs = [*_everything_to(sources, demand.wanter, demand.share)]
        cut = worst_sink(net.reverse, needs)
        yield _cut_proof(cluster, net, cut and cut.reverse, exact)
        # A switch does not add, and copies of a summand are useless to a sum: a switch sends out what comes in.
        yield from _passing(cluster, net.reverse, demand, needs, cut, np.ones(cluster.num_nodes, np.bool_))
    elif demand.distinct and demand.same_sources and demand.same_wanters and not demand.shared:
        yield from _all_reduce(cluster, net, demand)
    else:
        yield from _mixed(cluster, net, demand)


def _timed(cluster: Cluster, net: ArcNetwork, demand: Demand) -> Iterator[TimedProof]:
    """Proofs from what can still be passed on, or already be a sum, when it crosses a cut, and from flows over time."""
    if demand.shared or net.num_devices > MAX_DEVICES or net.num_nodes != cluster.num_nodes:
        return
    copied = bool(cluster.node_multicast.any())
    if not demand.combining and demand.same_wanters:
        wanters = demand.wanter[: demand.num_wanters[0]]
        sources, shares = _at_places(demand.source, demand.share)
        ends = Ends(sources=sources, shares=shares, wanters=wanters, combining=False, copied=copied)
        yield from _between(cluster, net, ends)
    elif demand.distinct and demand.same_sources and np.all(demand.num_wanters == 1):
        # Backwards in time and against the links, sums that come together are copies that part.
        wanters = demand.source[: demand.num_sources[0]]
        sources, shares = _at_places(demand.wanter, demand.share)
        ends = Ends(sources=sources, shares=shares, wanters=wanters, combining=False, copied=False)
        yield from (replace(proof, sends=True) for proof in _between(cluster, net.reverse, ends))
    elif demand.distinct and demand.same_sources and demand.same_wanters:
        sources, wanters = demand.source[: demand.num_sources[0]], demand.wanter[: demand.num_wanters[0]]
        shares = np.full(len(sources), float(demand.share.sum()))
        ends = Ends(sources=sources, shares=shares, wanters=wanters, combining=True, copied=copied)
        yield from _between(cluster, net, ends)


def _between(cluster: Cluster, net: ArcNetwork, ends: Ends) -> Iterator[TimedProof]:
    times = MessageTimes(net, forwarding=cluster.devices_forward)
    yield from timed_proofs(cluster, net, times, ends)
    if not cluster.devices_forward:
        yield from quickest_flows(net, ends)
    if ends.combining and np.array_equal(ends.sources, ends.wanters):
        found = narrowest_partition(net, _adopt_relays(cluster, ends.wanters))
        groups = [*regions(cluster), *([found.group] if found is not None else [])]
        for group in groups:
            number = np.unique(group, return_inverse=True)[1]
            for proof in counted_in_time(net, times, number, ends.wanters):
                yield replace(proof, need=proof.need * float(ends.shares[0]), share=float(ends.shares[0]))


def _passing(
    cluster: Cluster, net: ArcNetwork, demand: Demand, needs: list[Need], cut: Cut | None, plain: NDArray[np.bool_]
) -> Iterator[BoundProof]:
    """A proof that also uses that switches that are `plain` send no more than they receive."""
    passive = plain & (np.arange(cluster.num_nodes) >= cluster.num_devices)
    if demand.shared or cut is None or not helps(net, passive):
        return
    found = passing_weights(net, needs, passive, cut)
    if found is None:
        return
    weights, share, settled = found
    used = weights > 0
    rate = f"{float(weights[used] @ net.rate[used]) / 1e3:.6g} GB/s"
    links = f"{counted(int(np.count_nonzero(used)), 'link')} of {rate} in all"
    reason = f"flow: {BYTES} (weighted) must pass {links}, as switches only pass data on"
    ends = np.array([end for end, _, _ in needs])
    linked = np.intersect1d(net.src, net.dst)
    exact = settled and bool(plain.all() and np.isin(linked[linked < net.num_devices], ends).all())
    yield BoundProof.of(net, weights, share, reason, f"max-flow LP{', exact' * exact}", exact)


def _reaches_all(net: ArcNetwork, demand: Demand, ends: NDArray[np.int32]) -> bool:
    """Whether Edmonds' condition holds: every device takes part, and switches can be split off into direct links."""
    linked = np.intersect1d(net.src, net.dst)
    all_devices = bool(np.isin(linked[linked < net.num_devices], ends).all())
    return all_devices and net.switches_balanced and not demand.shared


def _everything_to(ends: NDArray[np.int32], places: NDArray[np.int32], share: Floats) -> Iterator[Need]:
    where, amounts = _at_places(places, share)
    return ((int(end), where, amounts) for end in ends)


def _at_places(places: NDArray[np.int32], share: Floats) -> tuple[NDArray[np.int32], Floats]:
    """The distinct places, and the sum of the shares at each."""
    where, entry = np.unique(places, return_inverse=True)
    return where, np.bincount(entry, share).astype(np.float64)


def _all_reduce(cluster: Cluster, net: ArcNetwork, demand: Demand) -> Iterator[BoundProof]:
    """Proofs for an all-reduce: the tensor crosses every cut once each way; and the bytes into all groups, counted."""
    sources, wanters = demand.source[: demand.num_sources[0]], demand.wanter[: demand.num_wanters[0]]
    share = float(demand.share.sum())
    common = np.intersect1d(sources, wanters)
    if not len(common):
        yield from _mixed(cluster, net, demand)
        return
    here, once = common[:1].astype(np.int32), np.array([share])
    inward = worst_sink(net, ((int(w), here, once) for w in wanters if w != here[0]))
    outward = worst_sink(
        net.reverse, ((int(s), here, once) for s in sources if s != here[0]), inward.us if inward else 0.0
    )
    yield _cut_proof(cluster, net, outward.reverse if outward else inward, False)
    if np.array_equal(sources, wanters):
        found = narrowest_partition(net, _adopt_relays(cluster, wanters))
        if found is not None:
            times = 2 * (found.num_groups - 1)
            who = _groups_in_words(cluster, found.group, found.num_groups)
            rate = f"{found.rate / 1e3:.6g} GB/s"
            reason = f"counting: each byte is received {times} times by {who}, which take in {rate}"
            method = "max-flow over partitions"
            yield BoundProof.of(net, found.into.astype(np.float64), times * share, reason, method, False)
        for sends in first_sends(net, wanters.astype(np.int32), cluster.node_multicast):
            used = sends.weights > 0
            gb_per_s = float(sends.weights[used] @ net.rate[used]) / 1e3
            links = f"{counted(int(np.count_nonzero(used)), 'link')} of {gb_per_s:.6g} GB/s"
            order = "hear after a tree from all to it" if sends.hears else "send before a tree from it to all"
            reason = f"first sends: {BYTES} (weighted) must pass {links} in all, since all but one rank {order}"
            yield BoundProof.of(net, sends.weights, sends.share * share, reason, "max-flow LP", False)


def _adopt_relays(cluster: Cluster, ranks: NDArray[np.int32]) -> NDArray[np.int64]:
    """The vertex of each device: one per rank; other devices join the first rank of their host, else rank 0.

    The bound is valid for any such assignment.
    """
    host, at = np.unique(cluster.node_host[: cluster.num_devices], return_inverse=True)
    number = np.arange(len(ranks))
    first = np.zeros(len(host), np.int64)
    first[at[ranks[::-1]]] = number[::-1]
    vertex = np.where(host[at] >= 0, first[at], 0)
    vertex[ranks] = number
    return vertex


def _mixed(cluster: Cluster, net: ArcNetwork, demand: Demand) -> Iterator[BoundProof]:
    """Proofs for any other demand, in which different data goes to different places."""
    cuts = [*prefix_cuts(net, demand)]
    for group in regions(cluster):
        cuts += region_cuts(net, demand, group)
    best = 0.0
    if not demand.combining:
        needs = FlowNeeds.of(demand)
        if len(needs.sources) * len(net.src) <= MAX_VARIABLES:
            us, length = concurrent_flow(net, needs)
            proof = _length_proof(net, needs, length, "concurrent-flow LP")
            one_taker_each = len(demand.pairs[0]) == len(np.unique(demand.pairs[2]))
            if one_taker_each and proof.us >= us * (1 - 1e-6):
                cuts += region_cuts(net, demand, np.arange(cluster.num_devices))
                plain = _plainest(cluster, net, proof, cuts)
                yield replace(plain, method=f"{proof.method}, exact", exact=True)
                return
            yield proof
            best = proof.us
        for length in lengths(net, needs):
            proof = _length_proof(net, needs, length, "distance and capacity")
            yield proof
            best = max(best, proof.us)
    tightest = max(cuts, key=lambda cut: cut.us, default=None)
    best = max(best, tightest.us if tightest else 0.0)
    inward = worst_sink(net, sink_needs(demand), best)
    outward = worst_sink(net.reverse, source_needs(demand), max(best, inward.us if inward else 0.0))
    for cut in (tightest, inward, outward and outward.reverse):
        if cut is not None:
            yield _cut_proof(cluster, net, cut, False)


def _plainest(cluster: Cluster, net: ArcNetwork, proof: BoundProof, cuts: list[Cut]) -> BoundProof:
    """A cut that proves as much and is easier to read, or else the proof itself."""
    for cut in cuts:
        if cut.us >= proof.us * (1 - 1e-9):
            return _cut_proof(cluster, net, cut, False)
    return proof


def _length_proof(net: ArcNetwork, needs: FlowNeeds, length: Floats, method: str) -> BoundProof:
    length = np.where(net.link >= 0, length / max(length.max(), 1e-300), 0.0)
    share = needed(net, needs, length)
    used = length > 0
    rate = float(length[used] @ net.rate[used])
    weighted = " (weighted)" if length[used].min(initial=1.0) < 1 - 1e-9 else ""
    links = f"{counted(int(np.count_nonzero(used)), 'link')} of {rate / 1e3:.6g} GB/s in all"
    reason = f"flow: {BYTES}{weighted} must pass {links}"
    return BoundProof.of(net, length, share, reason, method, False)


def _cut_proof(cluster: Cluster, net: ArcNetwork, cut: Cut | None, exact: bool) -> BoundProof:
    assert cut is not None, "a demand that can be met over links has a cut"
    inside = cut.sink_side[: cluster.num_devices]
    receive = np.count_nonzero(inside) <= np.count_nonzero(~inside)
    who = _devices_in_words(cluster, np.flatnonzero(inside if receive else ~inside))
    reason = f"cut: {who} must {'receive' if receive else 'send'} {BYTES} over {cut.rate / 1e3:.6g} GB/s"
    method = f"max-flow{', exact' * exact}"
    return BoundProof.of(net, cut.arcs.astype(np.float64), cut.share, reason, method, exact)


def _timed_in_words(cluster: Cluster, proof: TimedProof, nbytes: float) -> str:
    much, rate = _size(nbytes * proof.share), f"{proof.rate / 1e3:.6g} GB/s"
    if proof.groups:
        times = f"{2 * (proof.groups - 1)} times by {proof.groups} groups of devices"
        return f"timed counting: each byte is received {times}, which take in {rate}, in time to be passed on"
    few = np.count_nonzero(proof.inside) <= np.count_nonzero(~proof.inside)
    who = _devices_in_words(cluster, np.flatnonzero(proof.inside if few else ~proof.inside))
    if proof.origins:
        whence = _devices_in_words(cluster, np.array(proof.origins, np.int64))
        ends = (who, whence) if proof.sends else (whence, who)
        return f"timed flow: {much} must come from {ends[0]} to {ends[1]} over {rate} at most"
    moves = "send" if few == proof.sends else "receive"
    return f"timed cut: {who} must {moves} {much} over {rate}, in time to be passed on"


def _size(nbytes: float) -> str:
    return format_bytes(float(f"{nbytes:.6g}"))


def _devices_in_words(cluster: Cluster, devices: NDArray[np.int64]) -> str:
    if len(devices) == 1:
        return cluster.node_names[int(devices[0])]
    hosts = np.unique(cluster.node_host[devices])
    whole = np.isin(cluster.node_host[: cluster.num_devices], hosts).sum() == len(devices)
    if whole and hosts[0] >= 0 and len(hosts) <= 4:
        return f"{len(devices)} devices of host{'s' * (len(hosts) > 1)} {', '.join(map(str, hosts))}"
    return f"{len(devices)} devices"


def _groups_in_words(cluster: Cluster, group: NDArray[np.int64], count: int) -> str:
    if count == cluster.num_devices:
        return f"{count} devices"
    pairs = np.unique(np.stack([group, cluster.node_host[: cluster.num_devices]]), axis=1)
    return f"{count} {'hosts' if pairs.shape[1] == count == cluster.num_hosts else 'groups of devices'}"
