# SPDX-License-Identifier: Apache-2.0
"""A sketch applied to a cluster and a collective: the hops that each chunk may take, and what forbids the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..collectives import Collective
from ..errors import Infeasible, InvalidInput, unknown
from .hops import Hops, joins_all
from .sketch import Connections, LinkRule, Sketch

MAX_ROTATED = 512
"""The most devices for which equal hosts are looked for: larger clusters are beyond this synthesiser anyway."""


def default_sketch(cluster: Cluster, collective: Collective | None = None) -> Sketch:
    """A sketch from the structure of the cluster: relays beside their NICs, and equal hosts as a symmetry.

    For a collective over some of the devices, any device relays; a collective with a root is not symmetric.
    """
    if collective is not None and collective.ranks != tuple(range(cluster.num_devices)):
        return Sketch(name="auto")
    hosts = _hosts(cluster, np.arange(cluster.num_devices))
    local, sizes = _local(hosts)
    if len(sizes) == 1:
        return Sketch(name="auto")
    conn: Connections = "fully-connected"
    offsets: tuple[tuple[int, int], ...] = ()
    if len(set(sizes)) == 1 and sizes[0] > 1:
        conn = _nearest_relays(cluster, hosts, local)
        blocks = np.array_equal(hosts, np.repeat(np.arange(len(sizes)), sizes[0]))
        rooted = collective is not None and collective.root >= 0
        if blocks and not rooted and _rotates(cluster, sizes[0]):
            offsets = ((sizes[0], cluster.num_devices),)
    return Sketch(name="auto", internode_conn=conn, symmetry_offsets=offsets)


@dataclass(frozen=True, kw_only=True, eq=False)
class LogicalTopology:
    """The topology that a sketch leaves: hops between *ranks*, and which of them each chunk may take."""

    sketch: Sketch
    collective: Collective
    hops: Hops
    src: NDArray[np.int32]
    dst: NDArray[np.int32]
    host: NDArray[np.int32]
    """The host of each rank."""
    local: NDArray[np.int32]
    """The number of each rank within its host."""
    sources: tuple[tuple[int, ...], ...]
    targets: tuple[tuple[int, ...], ...]
    """The ranks that hold each chunk at the start, and the ranks that want it and do not have it."""

    @classmethod
    def of(cls, sketch: Sketch, cluster: Cluster, collective: Collective) -> LogicalTopology:
        """Apply a sketch to a cluster and a collective.

        Args:
            sketch: The sketch.
            cluster: The cluster.
            collective: The collective, which does not combine chunks.

        Returns:
            The topology.

        Raises:
            Infeasible: The collective combines chunks.
            InvalidInput: The sketch does not fit the cluster, or a device does not exist.
        """
        if collective.combining:
            raise Infeasible(f"three_stage: {collective.kind} combines chunks; synthesise what it is derived from")
        if max(collective.ranks) >= cluster.num_devices:
            raise InvalidInput(
                f"ranks: device {max(collective.ranks)} does not exist; "
                f"{cluster.name} has {cluster.num_devices} devices"
            )
        devices = np.array(collective.ranks, np.int32)
        hosts_all = _hosts(cluster, np.arange(cluster.num_devices))
        local_all, sizes = _local(hosts_all)
        host, local = hosts_all[devices], local_all[devices]
        if sketch.nodes is not None and sketch.nodes != len(sizes):
            raise InvalidInput(f"nodes: the sketch is for {sketch.nodes} hosts, {cluster.name} has {len(sizes)}")
        _check_gpus(sketch, max(sizes))
        hops = _hops(sketch, cluster, devices, host)
        rank = np.full(cluster.num_devices, -1, np.int32)
        rank[devices] = np.arange(len(devices))
        pre: list[list[int]] = [[] for _ in range(collective.num_chunks)]
        post: list[list[int]] = [[] for _ in range(collective.num_chunks)]
        for r in range(collective.num_ranks):
            for c in collective.inputs(r).tolist():
                pre[c].append(r)
            for c in collective.outputs(r).tolist():
                post[c].append(r)
        return cls(
            sketch=sketch,
            collective=collective,
            hops=hops,
            src=rank[hops.src],
            dst=rank[hops.dst],
            host=host,
            local=local,
            sources=tuple(map(tuple, pre)),
            targets=tuple(tuple(r for r in b if r not in a) for a, b in zip(pre, post, strict=True)),
        )

    @cached_property
    def crosses(self) -> NDArray[np.bool_]:
        """Whether each hop leads to another host."""
        crosses: NDArray[np.bool_] = self.host[self.src] != self.host[self.dst]
        return crosses

    @cached_property
    def src_list(self) -> list[int]:
        """The column `src` as a list, which is faster in loops."""
        return self.src.tolist()  # type: ignore[no-any-return]

    @cached_property
    def dst_list(self) -> list[int]:
        """The column `dst` as a list, which is faster in loops."""
        return self.dst.tolist()  # type: ignore[no-any-return]

    @cached_property
    def split(self) -> NDArray[np.float64]:
        """The factor by which the sketch slows each hop down in planning (`beta_split`)."""
        factor = np.ones(self.hops.num_hops)
        for gpu, n in self.sketch.beta_split.items():
            factor[self.crosses & (self.local[self.src] == gpu)] = n
        return factor

    @cached_property
    def connections(self) -> tuple[tuple[str, NDArray[np.int64]], ...]:
        """The policy and the hops of every switch hyperedge."""
        found = []
        for edge in self.sketch.switches:
            members = np.isin(self.local, edge.gpus)
            inside = ~self.crosses & members[self.src] & members[self.dst]
            found.append((edge.strategy, np.flatnonzero(inside)))
        return tuple(found)

    @property
    def has_policies(self) -> bool:
        """Whether the sketch asks the routing model for a balance or a switch policy beside a short time."""
        return self.sketch.balance != "none" or any(policy != "none" for policy, _ in self.connections)

    @cached_property
    def restrictions(self) -> tuple[tuple[str, NDArray[np.bool_]], ...]:
        """The sketch's limits by name, each as a table [chunk, hop] of the hops that it permits."""
        sketch, count = self.sketch, (self.collective.num_chunks, self.hops.num_hops)
        found: list[tuple[str, NDArray[np.bool_]]] = []
        names = self.hops.cluster.node_names
        numbers = {name: i for i, name in enumerate(names[: self.hops.cluster.num_devices])}
        if sketch.keep:
            kept = np.zeros(count, np.bool_)
            for at, rule in enumerate(sketch.keep):
                kept |= self._matches(rule, numbers, f"links.keep[{at}]")
            found.append(("only the links of links.keep are left", kept))
        for at, rule in enumerate(sketch.drop):
            found.append((f"links.drop[{at}] is gone", ~self._matches(rule, numbers, f"links.drop[{at}]")))
        if not isinstance(sketch.internode_conn, str):
            pairs = {(i, j) for i, dsts in sketch.internode_conn.items() for j in dsts}
            ends = zip(self.local[self.src].tolist(), self.local[self.dst].tolist(), strict=True)
            good = np.array([pair in pairs for pair in ends], np.bool_) | ~self.crosses
            found.append(("internode_conn limits who sends to other hosts", np.broadcast_to(good, count)))
        elif sketch.internode_conn == "direct-map":
            good = (self.local[self.src] == self.local[self.dst]) | ~self.crosses
            found.append(("internode_conn is direct-map", np.broadcast_to(good, count)))
        relays = self._relays()
        if relays is not None:
            found.append((f"{relays[0]} says which relay each chunk takes", relays[1]))
        return tuple(found)

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """A table [chunk, hop] of the hops that the sketch permits, except into ranks that hold the chunk already."""
        table = np.ones((self.collective.num_chunks, self.hops.num_hops), np.bool_)
        for _, permitted in self.restrictions:
            table &= permitted
        for c, ranks in enumerate(self.sources):
            table[c, np.isin(self.dst, ranks)] = False
        return table

    def _relays(self) -> tuple[str, NDArray[np.bool_]] | None:
        """The name and table of the limit on which GPU of its host sends each chunk to other hosts; None if none."""
        sketch = self.sketch
        if sketch.chunk_to_relay_map is None and not sketch.gpus_to_sender:
            return None
        table = np.ones((self.collective.num_chunks, self.hops.num_hops), np.bool_)
        if sketch.chunk_to_relay_map is not None:
            r1, r2 = sketch.chunk_to_relay_map
            senders = {p: {p // r1 * r1 + r2} for p in set(self.local.tolist())}
            name = "chunk_to_relay_map"
        else:
            senders = {}
            for sender, gpus in sketch.gpus_to_sender.items():
                for gpu in gpus:
                    senders.setdefault(gpu, set()).add(sender)
            name = "gpus_to_sender"
        for c, ranks in enumerate(self.sources):
            for rank in ranks:
                leaving = self.crosses & (self.host[self.src] == self.host[rank])
                through = senders.get(int(self.local[rank]))
                if through is not None:
                    table[c, leaving & ~np.isin(self.local[self.src], list(through))] = False
        return name, table

    def _matches(self, rule: LinkRule, numbers: Mapping[str, int], where: str) -> NDArray[np.bool_]:
        def ends(given: tuple[int | str, ...], key: str, devices: NDArray[np.int32]) -> NDArray[np.bool_]:
            if not given:
                return np.ones(len(devices), np.bool_)
            for at, value in enumerate(given):
                if (value not in numbers) if isinstance(value, str) else not 0 <= value < len(numbers):
                    raise InvalidInput(f"{where}.{key}[{at}]: {unknown('device', value, list(numbers)[:64])}")
            return np.isin(devices, [numbers[v] if isinstance(v, str) else v for v in given])

        hop = ends(rule.src, "src", self.hops.src) & ends(rule.dst, "dst", self.hops.dst)
        chunk = np.ones(self.collective.num_chunks, np.bool_)
        if rule.chunks:
            if not all(0 <= c < len(chunk) for c in rule.chunks):
                raise InvalidInput(f"{where}.chunks: chunks are 0..{len(chunk) - 1}, not {max(rule.chunks)}")
            chunk = np.isin(np.arange(len(chunk)), rule.chunks)
        return chunk[:, None] & hop[None, :]


def _hosts(cluster: Cluster, devices: NDArray[np.integer]) -> NDArray[np.int32]:
    """The host of each device, numbered from 0; where no device has one, all are on one host, as in TACCL."""
    given = cluster.node_host[devices]
    if np.all(given < 0):
        return np.zeros(len(devices), np.int32)
    alone = np.where(given < 0, given.max() + 1 + np.arange(len(given)), given)
    _, first, number = np.unique(alone, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))
    return order[number].astype(np.int32)


def _local(hosts: NDArray[np.int32]) -> tuple[NDArray[np.int32], list[int]]:
    local, sizes = np.zeros(len(hosts), np.int32), [0] * (int(hosts.max()) + 1)
    for at, h in enumerate(hosts.tolist()):
        local[at] = sizes[h]
        sizes[h] += 1
    return local, sizes


def _hops(sketch: Sketch, cluster: Cluster, devices: NDArray[np.int32], host: NDArray[np.int32]) -> Hops:
    """The hops within a host over the sketch's channels, and between hosts over any channel."""
    everything = Hops.of(cluster, devices=devices.tolist())
    number = np.full(cluster.num_devices, -1, np.int32)
    number[devices] = host
    crosses = number[everything.src] != number[everything.dst]
    channels = sketch.channels
    if not isinstance(channels, str):
        for at, channel in enumerate(channels):
            if channel not in cluster.channels:
                raise InvalidInput(f"links.channels[{at}]: {unknown('channel', channel, cluster.channels)}")
        chosen: tuple[str, ...] | None = channels
    elif channels == "all" or crosses.all():
        chosen = None
    else:
        inner = everything.link[np.repeat(~crosses, np.diff(everything.link_ptr))]
        widest = inner[np.argmax(cluster.link_gb_per_s[inner])]
        chosen = (cluster.channels[cluster.link_channel[widest]],)
    if chosen is None:
        return everything
    narrow = Hops.of(cluster, devices=devices.tolist(), channels=chosen)
    inside = number[narrow.src] == number[narrow.dst]
    if channels == "auto" and not _joins(narrow, inside, devices, host):
        return everything
    return _merge(narrow, np.flatnonzero(inside), everything, np.flatnonzero(crosses))


def _links_of(hops: Hops, hop: int) -> NDArray[np.int32]:
    return hops.link[hops.link_ptr[hop] : hops.link_ptr[hop + 1]]


def _joins(hops: Hops, inside: NDArray[np.bool_], devices: NDArray[np.int32], host: NDArray[np.int32]) -> bool:
    """Whether the hops inside hosts reach every device of a host from every other one."""
    following: dict[int, list[int]] = {d: [] for d in devices.tolist()}
    for a, b in zip(hops.src[inside].tolist(), hops.dst[inside].tolist(), strict=True):
        following[a].append(b)
    for h in range(int(host.max()) + 1):
        members = set(devices[host == h].tolist())
        for start in members:
            seen, todo = {start}, [start]
            while todo:
                fresh = [b for b in following[todo.pop()] if b not in seen]
                seen.update(fresh)
                todo += fresh
            if not members <= seen:
                return False
    return True


def _merge(a: Hops, rows_a: NDArray[np.intp], b: Hops, rows_b: NDArray[np.intp]) -> Hops:
    links = [*(_links_of(a, h) for h in rows_a.tolist()), *(_links_of(b, h) for h in rows_b.tolist())]

    def join(key: str) -> NDArray[np.float64]:
        return np.concatenate([getattr(a, key)[rows_a], getattr(b, key)[rows_b]])

    return Hops(
        cluster=a.cluster,
        src=np.concatenate([a.src[rows_a], b.src[rows_b]]),
        dst=np.concatenate([a.dst[rows_a], b.dst[rows_b]]),
        link_ptr=np.cumsum([0, *map(len, links)]),
        link=np.concatenate([a.link[:0], *links]),
        alpha_us=join("alpha_us"),
        gb_per_s=join("gb_per_s"),
    )


def _nearest_relays(cluster: Cluster, hosts: NDArray[np.int32], local: NDArray[np.int32]) -> Connections:
    """The GPUs with the shortest way to another host; of GPUs that share a NIC the last sends, the first receives."""
    here, there = (np.flatnonzero(hosts == h).tolist() for h in (0, 1))
    hops = Hops.of(cluster, devices=[*here, *there])
    leaving = np.flatnonzero((hosts[hops.src] == 0) & (hosts[hops.dst] == 1)).tolist()
    cost = {h: (float(hops.alpha_us[h]), -float(hops.gb_per_s[h]), len(hops.route(h))) for h in leaving}
    if not cost:
        return "fully-connected"
    best = min(cost.values())
    senders: dict[int, set[int]] = {}
    receivers: dict[int, set[int]] = {}
    joined: dict[tuple[int, int], tuple[int, int]] = {}
    for h in (h for h in leaving if cost[h] == best):
        route = np.array(hops.route(h))
        narrow = route[cluster.link_gb_per_s[route] <= cluster.link_gb_per_s[route].min() * (1 + 1e-9)].tolist()
        a, b = int(local[hops.src[h]]), int(local[hops.dst[h]])
        senders.setdefault(narrow[0], set()).add(a)
        receivers.setdefault(narrow[-1], set()).add(b)
        joined[a, b] = narrow[0], narrow[-1]
    conn: dict[int, tuple[int, ...]] = {}
    for nic, sharing in senders.items():
        relay = max(sharing)
        mine = {b for (a, b), links in joined.items() if a == relay and links[0] == nic}
        first = {min(group & mine) for group in receivers.values() if group & mine}
        # Prefer the receivers on the GPU's own rail or switch; where there are none, take all that it reaches.
        conn[relay] = tuple(sorted({*conn.get(relay, ()), *((first & sharing) or first)}))
    if conn == {gpu: (gpu,) for gpu in range(len(here))}:
        return "direct-map"
    return conn if _connected(cluster, hosts, local, conn) else "fully-connected"


def _connected(
    cluster: Cluster, hosts: NDArray[np.int32], local: NDArray[np.int32], conn: Mapping[int, tuple[int, ...]]
) -> bool:
    """Whether these relays connect every device with every other one; hosts may be wired differently."""
    hops = Hops.of(cluster)
    pairs = np.zeros((int(local.max()) + 1,) * 2, np.bool_)
    for a, dsts in conn.items():
        pairs[a, list(dsts)] = True
    kept = (hosts[hops.src] == hosts[hops.dst]) | pairs[local[hops.src], local[hops.dst]]
    return joins_all(hops.src[kept], hops.dst[kept], cluster.num_devices)


def _rotates(cluster: Cluster, size: int) -> bool:
    """Whether mapping every device to the same device of the next host maps direct hops to equal ones."""
    if cluster.num_devices > MAX_ROTATED:
        return False
    hops = Hops.of(cluster)
    at = {pair: (float(hops.alpha_us[h]), float(hops.gb_per_s[h])) for pair, h in hops.between.items()}
    n = cluster.num_devices
    return all(at.get(((a + size) % n, (b + size) % n)) == cost for (a, b), cost in at.items())


def _check_gpus(sketch: Sketch, gpus: int) -> None:
    conn = {} if isinstance(sketch.internode_conn, str) else sketch.internode_conn
    named: list[tuple[str, Sequence[int]]] = [
        *((f"switches[{at}].gpus", edge.gpus) for at, edge in enumerate(sketch.switches)),
        ("internode_conn", [*conn, *(j for dsts in conn.values() for j in dsts)]),
        ("beta_split", list(sketch.beta_split)),
        ("gpus_to_sender", [*sketch.gpus_to_sender, *(j for v in sketch.gpus_to_sender.values() for j in v)]),
    ]
    for key, values in named:
        for value in values:
            if not 0 <= value < gpus:
                raise InvalidInput(f"{key}: a host has GPUs 0..{gpus - 1}, not {value}")
