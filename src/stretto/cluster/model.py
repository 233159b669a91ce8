# SPDX-License-Identifier: Apache-2.0
"""`Cluster`: devices, switches, NICs and directed links, held in arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..errors import InvalidInput, unknown
from ..late import LateFunction
from ..units import MB

if TYPE_CHECKING:
    from pathlib import Path

DEVICE, SWITCH, NIC = 0, 1, 2
KINDS = ("device", "switch", "nic")
DIMENSION_KINDS = ("ring", "fully_connected", "switch")
MAX_NODES = 1 << 20
MAX_LINKS = 1 << 24
NO_CAP = math.inf
MULTICAST = "+multicast"
"""The suffix of a cluster's name, and of a source given to `load`, that says that its switches multicast."""
GB_PER_S = (1e-9, 1e9)
MAX_ALPHA_US = 1e9
"""The valid rates (one byte to one exabyte per second) and latencies (up to a quarter of an hour) of a link: sums of
times stay finite and exact enough within them."""

LARGE_MESSAGE = 64 * MB
"""The size whose routes callers get that know no size: latency then hardly counts, so the widest routes win."""

Curve = tuple[tuple[int, float], ...]

PRESET: LateFunction[..., Cluster] = LateFunction("cluster.presets.registry.preset")
LOAD: LateFunction[[str | Path], Cluster] = LateFunction("cluster.files.load")
SAVE: LateFunction[[Cluster, str | Path], None] = LateFunction("cluster.files.save")


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the network. Devices compute and hold data; switches and NICs only forward.

    A node that multicasts can copy what comes in over one link to several outgoing links at once.
    """

    name: str
    kind: str = "device"
    host: int = -1
    multicast: bool = False


@dataclass(frozen=True, kw_only=True)
class Link:
    """One directed link: a transfer over it costs ``alpha_us + bytes / gb_per_s``.

    `flow_gb_per_s` is the most one flow gets (clouds cap it); `incast` is ``((flows, share), ...)``: from `flows`
    concurrent flows on, only `share` of the rate is left.
    """

    src: int
    dst: int
    alpha_us: float
    gb_per_s: float
    channel: str = "link"
    flow_gb_per_s: float = NO_CAP
    incast: Curve = ()


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One dimension of a regular network: `gb_per_s` is one device's aggregate one-way rate in it."""

    kind: str
    size: int
    gb_per_s: float
    alpha_us: float


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Cluster:
    """The hardware as arrays over nodes and directed links. Devices are nodes ``0..num_devices-1``.

    With `dimensions`, device ``c0 + size0 * (c1 + size1 * (c2 + ...))`` has coordinates (c0, c1, c2, ...).

    >>> ring = Cluster.preset("ring", nodes=4)
    >>> ring.num_devices, ring.num_links, ring.routes(0, 2)
    (4, 8, [(0, 2), (7, 5)])
    """

    name: str
    node_names: tuple[str, ...]
    node_kind: NDArray[np.int8]
    node_host: NDArray[np.int32]
    link_src: NDArray[np.int32]
    link_dst: NDArray[np.int32]
    link_alpha_us: NDArray[np.float64]
    link_gb_per_s: NDArray[np.float64]
    link_channel: NDArray[np.int16]
    channels: tuple[str, ...]
    link_flow_gb_per_s: NDArray[np.float64]
    link_incast: NDArray[np.int16]
    incast_curves: tuple[Curve, ...] = ()
    dimensions: tuple[Dimension, ...] = ()
    devices_forward: bool = False
    """Whether a route may pass through a device (routers of a torus do; GPUs do not)."""
    reduce_us_per_mb: float = 0.0
    """gamma: the time that a reduction takes at the receiver, in microseconds per 10^6 bytes."""
    notes: tuple[str, ...] = field(default=())
    """Sentences about what a preset or a reader assumed or left out; shown by ``stretto cluster show``."""
    node_multicast: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Whether each node can copy what passes it to several links; an empty array means that none can."""

    def __post_init__(self) -> None:
        if len(self.node_multicast) == 0:
            object.__setattr__(self, "node_multicast", np.zeros(len(self.node_names), np.bool_))
        for array in vars(self).values():
            if isinstance(array, np.ndarray):
                array.setflags(write=False)
        _validate(self)

    @classmethod
    def build(cls, name: str, *, nodes: Iterable[Node], links: Iterable[Link], **rest: Any) -> Cluster:
        """Make a cluster from `Node` and `Link` objects; devices are moved to the front, otherwise the order is kept.

        Args:
            name: The cluster's name.
            nodes: The nodes; a `Link` refers to them by their position here.
            links: The directed links.
            **rest: Other fields of `Cluster`: dimensions, devices_forward, reduce_us_per_mb, notes.

        Returns:
            The validated cluster.

        Raises:
            InvalidInput: A kind is unknown, a link ends nowhere, or a number is out of range.
        """
        given, links = list(nodes), list(links)
        for at, node in enumerate(given):
            if node.kind not in KINDS:
                raise InvalidInput(f"nodes[{at}].kind: {unknown('kind', node.kind, KINDS)}")
        order = sorted(range(len(given)), key=lambda i: given[i].kind != "device")
        new_id = {old: new for new, old in enumerate(order)}
        nodes = [given[i] for i in order]
        for at, link in enumerate(links):
            for end in ("src", "dst"):
                if getattr(link, end) not in new_id:
                    raise InvalidInput(f"links[{at}].{end}: no node {getattr(link, end)}; there are {len(nodes)} nodes")
        channels = tuple(dict.fromkeys(link.channel for link in links))
        curves = tuple(dict.fromkeys(link.incast for link in links if link.incast))
        return cls(
            name=name,
            node_names=tuple(node.name for node in nodes),
            node_kind=np.array([KINDS.index(node.kind) for node in nodes], np.int8),
            node_host=np.array([node.host for node in nodes], np.int32),
            link_src=np.array([new_id[link.src] for link in links], np.int32),
            link_dst=np.array([new_id[link.dst] for link in links], np.int32),
            link_alpha_us=np.array([link.alpha_us for link in links], np.float64),
            link_gb_per_s=np.array([link.gb_per_s for link in links], np.float64),
            link_channel=np.array([channels.index(link.channel) for link in links], np.int16),
            channels=channels,
            link_flow_gb_per_s=np.array([link.flow_gb_per_s for link in links], np.float64),
            link_incast=np.array([curves.index(x.incast) if x.incast else -1 for x in links], np.int16),
            incast_curves=curves,
            node_multicast=np.array([node.multicast for node in nodes], np.bool_),
            **rest,
        )

    @classmethod
    def preset(cls, name: str, *, nodes: int | None = None, **options: Any) -> Cluster:
        """Make a named cluster, such as ``Cluster.preset("dgx2", nodes=2)``; ``stretto cluster list`` shows all names.

        Args:
            name: The preset's name.
            nodes: How many hosts (machines) or devices (regular networks), >= 1; the preset's default when not given.
            **options: Options of that preset, such as gb_per_s or alpha_us.

        Returns:
            The cluster.

        Raises:
            InvalidInput: The name, an option or the number of nodes is not valid; the message lists the choices.
        """
        return PRESET(name, nodes=nodes, **options)

    @classmethod
    def load(cls, source: str | Path) -> Cluster:
        """Load a cluster from ``preset``, ``preset:nodes`` or a file of any form that `cluster.files.load` reads."""
        return LOAD(source)

    def save(self, path: str | Path) -> None:
        """Write the versioned file form: JSON where the name ends in ``.json``, YAML otherwise."""
        SAVE(self, path)

    @cached_property
    def num_devices(self) -> int:
        """The number of nodes that hold data and take part in collectives."""
        return int(np.count_nonzero(self.node_kind == DEVICE))

    @property
    def num_nodes(self) -> int:
        """The number of devices, switches and NICs together."""
        return len(self.node_names)

    @property
    def num_links(self) -> int:
        """The number of directed links."""
        return len(self.link_src)

    @cached_property
    def num_hosts(self) -> int:
        """The number of hosts that hold devices; a device without a host counts as a host of its own."""
        hosts = self.node_host[: self.num_devices]
        return len(set(hosts[hosts >= 0].tolist())) + int(np.count_nonzero(hosts < 0))

    def hosts_of(self, ranks: Iterable[int]) -> NDArray[np.int64]:
        """The host of each given device; a device without one is a host of its own (with a negative number)."""
        at = np.asarray(list(ranks), np.int64)
        if len(at) and not 0 <= at.min() <= at.max() < self.num_devices:
            raise InvalidInput(f"ranks: {self.name} has only devices 0..{self.num_devices - 1}")
        host = self.node_host[at].astype(np.int64)
        return np.where(host < 0, -1 - at, host)

    def node(self, index: int) -> Node:
        """The node with this index, as a `Node`."""
        return Node(
            name=self.node_names[index],
            kind=KINDS[self.node_kind[index]],
            host=int(self.node_host[index]),
            multicast=bool(self.node_multicast[index]),
        )

    def link(self, index: int) -> Link:
        """The link with this index, as a `Link`."""
        curve = int(self.link_incast[index])
        return Link(
            src=int(self.link_src[index]),
            dst=int(self.link_dst[index]),
            alpha_us=float(self.link_alpha_us[index]),
            gb_per_s=float(self.link_gb_per_s[index]),
            channel=self.channels[self.link_channel[index]],
            flow_gb_per_s=float(self.link_flow_gb_per_s[index]),
            incast=self.incast_curves[curve] if curve >= 0 else (),
        )

    def nodes(self) -> Iterator[Node]:
        """All nodes in order, as `Node` objects."""
        return (self.node(i) for i in range(self.num_nodes))

    def links(self) -> Iterator[Link]:
        """All links in order, as `Link` objects."""
        return (self.link(i) for i in range(self.num_links))

    def link_name(self, index: int) -> str:
        """The name of a link for people: ``src>dst`` with the names of its nodes."""
        return f"{self.node_names[self.link_src[index]]}>{self.node_names[self.link_dst[index]]}"

    def routes(
        self,
        src: int,
        dst: int,
        *,
        nbytes: float = LARGE_MESSAGE,
        channels: Iterable[str] | None = None,
        limit: int = 16,
    ) -> list[tuple[int, ...]]:
        """The routes between two devices over which a message of `nbytes`, alone, takes the least time.

        A route takes the latencies of all its links and the time of the bytes on the slowest one. Of equally fast
        routes those with the fewest links are taken.

        Args:
            src: The device (or node) that the routes start at.
            dst: The device (or node) that they lead to.
            nbytes: The size of the message in bytes, >= 0; infinite for the widest routes.
            channels: The channels whose links may be used; all when not given.
            limit: The most routes to return, >= 1.

        Returns:
            Each route as its link indices in order; empty where there is no route.

        Raises:
            InvalidInput: A channel is unknown, or `nbytes` is negative.
        """
        count = self.num_routes(src, dst, nbytes=nbytes, channels=channels)
        pairs = np.arange(min(count, limit), dtype=np.int64)
        ends = np.ones(len(pairs), np.int32)
        ptr, links = self._router(channels).routes(src * ends, dst * ends, pairs, np.full(len(pairs), float(nbytes)))
        return [tuple(links[a:b].tolist()) for a, b in pairwise(ptr)]

    def num_routes(
        self, src: int, dst: int, *, nbytes: float = LARGE_MESSAGE, channels: Iterable[str] | None = None
    ) -> int:
        """How many equally fast routes there are between two devices.

        Args:
            src: The device (or node) that the routes start at.
            dst: The device (or node) that they lead to.
            nbytes: The size of the message in bytes, >= 0.
            channels: The channels whose links may be used; all when not given.

        Returns:
            Their number; 0 where there is no route.

        Raises:
            InvalidInput: A channel is unknown, or `nbytes` is negative.
        """
        _check_message(nbytes)
        return self._router(channels).count_paths(src, dst, nbytes)

    def route_table(
        self,
        src: NDArray[np.int32],
        dst: NDArray[np.int32],
        choice: NDArray[np.int64],
        *,
        nbytes: float | NDArray[np.float64] = LARGE_MESSAGE,
        channels: Iterable[str] | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Find one route of least time for each of many pairs of nodes.

        Args:
            src: The node that each route starts at.
            dst: The node that each route leads to.
            choice: Which of several equal routes to take, modulo their number; >= 0.
            nbytes: The size of the messages in bytes, one for all or one for each pair.
            channels: The channels whose links may be used; all when not given.

        Returns:
            ``(ptr, links)``: route i is ``links[ptr[i]:ptr[i+1]]``; it is empty where src equals dst.

        Raises:
            InvalidInput: Two nodes have no route between them, a channel is unknown, or a size is negative.
        """
        _check_message(nbytes)
        sizes = np.ascontiguousarray(np.broadcast_to(np.asarray(nbytes, np.float64), len(src)))
        ptr, links = self._router(channels).routes(src, dst, choice, sizes)
        empty = np.flatnonzero((ptr[1:] == ptr[:-1]) & (src != dst))
        if len(empty):
            a, b = int(src[empty[0]]), int(dst[empty[0]])
            over = f" over channels {', '.join(sorted(channels))}" if channels is not None else ""
            names = f"{self.node_names[a]} to {self.node_names[b]}"
            raise InvalidInput(
                f"cluster {self.name}: no route from {names}{over}{self._if_devices_forward(a, b, channels)}"
            )
        return ptr, links

    def _if_devices_forward(self, src: int, dst: int, channels: Iterable[str] | None) -> str:
        """What to do about two nodes without a route, if other devices could pass traffic on between them."""
        if self.devices_forward:
            return ""
        forwarding = replace(self, devices_forward=True)
        if not forwarding._router(channels).count_paths(src, dst, LARGE_MESSAGE):
            return ""
        return "; there is one through other devices, with devices_forward=true (as NCCL's PXN over rails)"

    def route_classes(
        self,
        src: NDArray[np.int32],
        dst: NDArray[np.int32],
        nbytes: NDArray[np.float64] | None = None,
        *,
        channels: Iterable[str] | None = None,
    ) -> NDArray[np.int32]:
        """Number the routes that messages take: those of a pair of nodes with the same number take equal routes.

        Of all routes of a pair only those count that no other route beats both in latency and in rate; they are
        numbered from the shortest latency to the highest rate.

        Args:
            src: The node that each message starts at.
            dst: The node that it leads to.
            nbytes: The size of each message in bytes. When not given, how many such routes each pair has.
            channels: The channels whose links may be used; all when not given.

        Returns:
            One number per message.

        Raises:
            InvalidInput: A channel is unknown.
        """
        router = self._router(channels)
        return router.num_classes(src, dst) if nbytes is None else router.classes(src, dst, nbytes)

    def unreachable(self) -> tuple[int, int] | None:
        """A pair of devices with no route between them, or None."""
        devices, forth = range(self.num_devices), self._router(None)
        forwards = (self.node_kind != DEVICE) | self.devices_forward
        allowed = np.ones(self.num_links, np.bool_)
        ends = self.link_dst, self.link_src
        back = _native.Router(self.num_nodes, *ends, self.link_alpha_us, self.link_gb_per_s, allowed, forwards)

        def reaches(router: _native.Router, src: int, dst: int) -> bool:
            return router.count_paths(src, dst, LARGE_MESSAGE) > 0

        degree = np.bincount(self.link_src, minlength=self.num_nodes) * forwards
        for hub in np.argsort(-degree, kind="stable")[:4].tolist():
            # One node that forwards, reached from every device and reaching every device, joins all pairs.
            if forwards[hub] and all(hub == d or (reaches(forth, hub, d) and reaches(back, hub, d)) for d in devices):
                return None
        pairs = ((a, b) for a in devices for b in devices if a != b)
        return next(((a, b) for a, b in pairs if not reaches(forth, a, b)), None)

    @cached_property
    def multicasts(self) -> bool:
        """Whether any node can copy what passes it."""
        return bool(self.node_multicast.any())

    def with_multicast(self, names: Iterable[str] | None = None) -> Cluster:
        """The same cluster in which these nodes (None: all switches) multicast, and no others do.

        >>> Cluster.preset("dgx2", nodes=2).with_multicast()
        <Cluster dgx2:2+multicast: 32 devices on 2 hosts, 160 links over nvlink, pcie, rdma>
        """
        if names is None:
            chosen = self.node_kind == SWITCH
            if not chosen.any():
                raise InvalidInput(f"multicast: {self.name} has no switch")
        else:
            chosen = np.zeros(self.num_nodes, np.bool_)
            places = {name: at for at, name in enumerate(self.node_names)}
            for name in names:
                if name not in places:
                    switches = [n for n, kind in zip(self.node_names, self.node_kind, strict=True) if kind != DEVICE]
                    raise unknown("switch", name, switches)
                chosen[places[name]] = True
        plain = self.name.removesuffix(MULTICAST)
        return replace(self, name=plain + MULTICAST if chosen.any() else plain, node_multicast=chosen)

    def _router(self, channels: Iterable[str] | None) -> _native.Router:
        key = None if channels is None else frozenset(channels)
        if key not in self._routers:
            allowed = np.ones(self.num_links, np.bool_)
            if key is not None:
                for channel in sorted(key):
                    if channel not in self.channels:
                        raise unknown("channel", channel, self.channels)
                wanted = [i for i, channel in enumerate(self.channels) if channel in key]
                allowed = np.isin(self.link_channel, wanted)
            self._routers[key] = _native.Router(
                self.num_nodes,
                self.link_src,
                self.link_dst,
                self.link_alpha_us,
                self.link_gb_per_s,
                allowed,
                (self.node_kind != DEVICE) | self.devices_forward,
            )
        return self._routers[key]

    @cached_property
    def _routers(self) -> dict[frozenset[str] | None, _native.Router]:
        return {}

    @cached_property
    def digest(self) -> str:
        """A short hash of the content, to tell whether two clusters are the same."""
        import hashlib

        state = hashlib.sha256()
        for key in sorted(self.__dataclass_fields__):
            value = getattr(self, key)
            # Clusters without multicast keep the digest of versions that did not know multicast: old files stay valid.
            if key != "notes" and (key != "node_multicast" or self.multicasts):
                state.update(key.encode() + b"=")
                state.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
        return state.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Cluster) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        dims = "x".join(str(d.size) for d in self.dimensions)
        return (
            f"<Cluster {self.name}: {self.num_devices} devices on {self.num_hosts} hosts, "
            f"{self.num_links} links over {', '.join(self.channels)}{f', dimensions {dims}' if dims else ''}>"
        )


def _validate(cluster: Cluster) -> None:
    nodes, links = cluster.num_nodes, cluster.num_links
    if not 1 <= nodes <= MAX_NODES:
        raise InvalidInput(f"nodes: a cluster has 1 to {MAX_NODES} nodes, this one has {nodes}")
    if links > MAX_LINKS:
        raise InvalidInput(f"links: a cluster has at most {MAX_LINKS} links, this one has {links}")
    if cluster.num_devices == 0:
        raise InvalidInput("nodes: a cluster needs at least one node of kind 'device'")
    if np.any(cluster.node_kind[: cluster.num_devices] != DEVICE):
        raise InvalidInput("nodes: devices come first")
    if len(cluster.node_multicast) != nodes:
        raise InvalidInput(f"multicast: has {len(cluster.node_multicast)} entries for {nodes} nodes")
    copies = np.flatnonzero(cluster.node_multicast & (cluster.node_kind == DEVICE))
    if len(copies):
        raise InvalidInput(f"nodes[{copies[0]}].multicast: only switches and NICs multicast, not devices")
    if len(set(cluster.node_names)) != nodes:
        raise InvalidInput(f"nodes: names must differ; {_repeated(cluster.node_names)!r} is used twice")
    for key in ("src", "dst"):
        ends = getattr(cluster, f"link_{key}")
        _each(ends, (ends >= 0) & (ends < nodes), key, f"must be a node 0..{nodes - 1}")
    other = cluster.link_src != cluster.link_dst
    _each(cluster.link_dst, other, "dst", "a link must not lead to its own source")
    for key in ("alpha_us", "gb_per_s", "flow_gb_per_s"):
        values = getattr(cluster, f"link_{key}")
        least = values >= 0 if key == "alpha_us" else values > 0
        finite = np.isfinite(values) | (key == "flow_gb_per_s")
        _each(values, least & finite, key, f"must be {'>= 0' if key == 'alpha_us' else '> 0'}")
        low, high = (0.0, MAX_ALPHA_US) if key == "alpha_us" else GB_PER_S
        _each(values, (values >= low) & (values <= high) | ~np.isfinite(values), key, f"must be {low:g} to {high:g}")
    for at, curve in enumerate(cluster.incast_curves):
        flows = [count for count, _ in curve]
        if flows != sorted(set(flows)) or any(not 0 < share <= 1 for _, share in curve) or min(flows) < 1:
            raise InvalidInput(f"incast[{at}]: pairs need rising flows >= 1 and shares in (0, 1]")
    if not 0 <= cluster.reduce_us_per_mb <= MAX_ALPHA_US:
        raise InvalidInput(f"reduce_us_per_mb: must be >= 0 and at most {MAX_ALPHA_US:g}")
    for at, dim in enumerate(cluster.dimensions):
        if dim.kind not in DIMENSION_KINDS:
            raise InvalidInput(f"dimensions[{at}].kind: {unknown('kind', dim.kind, DIMENSION_KINDS)}")
        if dim.size < 1 or not 0 < dim.gb_per_s <= GB_PER_S[1] or not 0 <= dim.alpha_us <= MAX_ALPHA_US:
            raise InvalidInput(f"dimensions[{at}]: size must be >= 1, gb_per_s > 0, alpha_us >= 0")
    size = math.prod(d.size for d in cluster.dimensions)
    if cluster.dimensions and size != cluster.num_devices:
        raise InvalidInput(f"dimensions: sizes multiply to {size}, there are {cluster.num_devices} devices")


def _check_message(nbytes: float | NDArray[np.float64]) -> None:
    if not np.all(np.asarray(nbytes) >= 0):
        raise InvalidInput("nbytes: must be >= 0")


def _each(values: NDArray[Any], good: NDArray[np.bool_], key: str, rule: str) -> None:
    bad = np.flatnonzero(~good)
    if len(bad):
        raise InvalidInput(f"links[{bad[0]}].{key}: {rule}, not {values[bad[0]]:g}")


def _repeated(names: Sequence[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
