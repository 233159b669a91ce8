# SPDX-License-Identifier: Apache-2.0
"""Draws hosts and switch trees: devices in a row, switches and NICs above, direct links below."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from ..cluster.model import DEVICE, KINDS, NIC, Cluster
from ..cluster.shape import HostGroup, host_groups, levels, local_name, ranges
from .cluster_canvas import FAINT, Canvas

MAX_HOSTS, MAX_PER_HOST, MAX_LOOSE = 6, 32, 64
BOX_W, BOX_H, BAR, GAP = 46.0, 24.0, 24.0, 10.0
LEVEL = 66.0
SAG = 0.42


def fits(cluster: Cluster) -> bool:
    """Whether hosts (or devices without hosts) are few enough to draw each of them."""
    hosts = cluster.node_host[: cluster.num_devices]
    if np.all(hosts < 0):
        return cluster.num_devices <= MAX_LOOSE and cluster.num_nodes <= 3 * MAX_LOOSE
    _, per_host = np.unique(hosts, return_counts=True)
    return bool(np.all(hosts >= 0)) and int(per_host.max()) <= MAX_PER_HOST


def draw(canvas: Canvas) -> None:
    """Draw hosts side by side under the switches that join them; of equal hosts only two are drawn."""
    cluster = canvas.cluster
    if np.all(cluster.node_host[: cluster.num_devices] < 0):
        picture = _Host(cluster, list(range(cluster.num_nodes)))
        picture.place(canvas, 0.0, 10.0, picture.height)
        _links(canvas, picture.spot)
        return
    groups = host_groups(cluster)
    shown, hidden = _choose(groups)
    hosts = [_Host(cluster, [n for n in range(cluster.num_nodes) if cluster.node_host[n] == h]) for h in shown]
    fabric = [n for n in range(cluster.num_devices, cluster.num_nodes) if cluster.node_host[n] < 0]
    tall = max(h.height for h in hosts)
    bar = BAR + GAP
    top = len(fabric) * bar + 38.0 if fabric else 70.0 if _crosses(cluster) else 0.0
    x = 0.0
    spot: dict[int, _Spot] = {}
    for number, host in zip(shown, hosts, strict=True):
        canvas.frame(x, top, host.width + 32, tall + 46, f"host {number}")
        host.place(canvas, x + 16, top + 30, tall)
        spot |= host.spot
        x += host.width + 32 + 28
    if hidden:
        canvas.frame(x, top, 150, tall + 46, "")
        canvas.text(x + 75, top + tall / 2 + 10, f"+ {hidden} hosts", size=15, bold=True)
        canvas.text(x + 75, top + tall / 2 + 30, "like these", size=12, color=FAINT)
        x += 150 + 28
    wide = x - 28
    for at, node in enumerate(fabric):
        # The switches between hosts are stacked bars, so that the vertical line from a NIC to its switch passes behind
        # the other bars.
        spot[node] = _Spot(x=wide / 2, y=(len(fabric) - at - 0.5) * bar, w=wide, h=BAR)
        canvas.box(wide / 2, spot[node].y, wide, BAR, "switch", cluster.node_names[node], size=13)
    _links(canvas, spot)


def _crosses(cluster: Cluster) -> bool:
    """Whether devices of different hosts are linked directly."""
    kinds, hosts = cluster.node_kind, cluster.node_host
    a, b = cluster.link_src, cluster.link_dst
    return bool(np.any((kinds[a] == DEVICE) & (kinds[b] == DEVICE) & (hosts[a] != hosts[b])))


def _choose(groups: list[HostGroup]) -> tuple[list[int], int]:
    """At most two hosts of each kind, and the number of hosts that are not drawn."""
    shown = sorted(h for group in groups for h in group.hosts[:2])[:MAX_HOSTS]
    return shown, sum(len(group.hosts) for group in groups) - len(shown)


@dataclass
class _Spot:
    x: float
    y: float
    w: float = BOX_W
    h: float = BOX_H
    host: int = -1
    level: int = 99


@dataclass
class _Host:
    """The positions of one host's nodes; (0, 0) is the host's upper left corner."""

    cluster: Cluster
    nodes: list[int]
    spot: dict[int, _Spot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        cluster = self.cluster
        inside = set(self.nodes)
        self.near: dict[int, set[int]] = defaultdict(set)
        self.direct = 0
        order = {node: at for at, node in enumerate(self.nodes)}
        for a, b in zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True):
            if a in inside and b in inside:
                self.near[a].add(b)
                self.near[b].add(a)
                if cluster.node_kind[a] == cluster.node_kind[b] == DEVICE:
                    self.direct = max(self.direct, abs(order[a] - order[b]))
        devices = [n for n in self.nodes if cluster.node_kind[n] == DEVICE]
        # A switch that only joins devices (an NVSwitch) is drawn below them, apart from the other switches.
        loose = bool(np.all(cluster.node_host[: cluster.num_devices] < 0))
        outside = self._linked_outside(inside)
        below = [
            n
            for n in self.nodes
            if cluster.node_kind[n] not in (DEVICE, NIC)
            and not loose
            and self.near[n] == set(devices)
            and n not in outside
        ]
        self.below = below if len(below) == 1 and not self.direct else []
        depth = levels(cluster, self.nodes)
        self.rows: dict[int, list[int]] = defaultdict(list)
        for node in self.nodes:
            if node not in self.below:
                self.rows[depth[node]].append(node)
        widest = max(len(row) for row in self.rows.values())
        self.width = widest * (BOX_W + GAP) - GAP
        pitch = self.width / max(1, len(devices))
        arcs = 8 + SAG / 2 * self.direct * pitch if self.direct else 0.0
        self.under = 56.0 if self.below else arcs
        self.height = max(self.rows) * LEVEL + BOX_H + self.under

    def _linked_outside(self, inside: set[int]) -> set[int]:
        cluster = self.cluster
        a = np.isin(cluster.link_src, list(inside))
        b = np.isin(cluster.link_dst, list(inside))
        out = np.concatenate([cluster.link_src[a & ~b], cluster.link_dst[b & ~a]])
        return set(out.tolist())

    def place(self, canvas: Canvas, left: float, top: float, tall: float) -> None:
        cluster = self.cluster
        ground = top + tall - self.under - BOX_H / 2
        for level in sorted(self.rows):
            row = self.rows[level]
            if level:
                row.sort(key=lambda n: (self._center(n), n))
            pitch = self.width / len(row)
            even = level == 0 or cluster.node_host[row[0]] < 0
            wanted = [left + pitch * (at + 0.5) if even else self._center(n) for at, n in enumerate(row)]
            for node, x in zip(row, _spread(wanted, left, left + self.width), strict=True):
                host = int(cluster.node_host[node])
                self.spot[node] = _Spot(x=x, y=ground - level * LEVEL, host=host, level=level)
        for node in self.below:
            self.spot[node] = _Spot(x=left + self.width / 2, y=ground + 56 - BOX_H / 2 + 6, w=self.width, level=-1)
        for node, at in self.spot.items():
            kind = KINDS[cluster.node_kind[node]]
            canvas.box(at.x, at.y, at.w, BOX_H, kind, local_name(cluster, node))

    def _center(self, node: int) -> float:
        """The average x of the nodes that are linked with this one and already placed."""
        found = [self.spot[other].x for other in self.near[node] if other in self.spot]
        return sum(found) / len(found) if found else 0.0


def _spread(wanted: list[float], low: float, high: float) -> list[float]:
    """Positions near the wanted ones (which must rise), at least a box apart, within the bounds."""
    if not wanted:
        return []
    pitch = min(BOX_W + GAP, (high - low) / len(wanted))
    half = pitch / 2
    places = list(wanted)
    for at in range(len(places)):
        least = low + half if at == 0 else places[at - 1] + pitch
        places[at] = max(places[at], least)
    for at in reversed(range(len(places))):
        most = high - half if at == len(places) - 1 else places[at + 1] - pitch
        places[at] = min(places[at], most)
    return places


def _links(canvas: Canvas, spot: dict[int, _Spot]) -> None:
    """Draw one line per pair of linked nodes and link class; an arrow where only one direction exists."""
    cluster = canvas.cluster
    pairs: dict[tuple[int, int, int], list[bool]] = defaultdict(list)
    for at, (a, b) in enumerate(zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True)):
        if a in spot and b in spot:
            pairs[min(a, b), max(a, b), canvas.of_link[at]].append(a < b)
    for (a, b, kind), ways in pairs.items():
        one_way = len(set(ways)) == 1
        first, second = (a, b) if ways[0] else (b, a)
        canvas.path(_route(spot[first], spot[second]), canvas.classes[kind], arrow=one_way)


def _route(a: _Spot, b: _Spot) -> str:
    middle, far = (a.x + b.x) / 2, abs(a.x - b.x)
    if a.y == b.y and a.level == 0 and a.host == b.host:
        y = a.y + a.h / 2
        return f"M{a.x:.1f} {y:.1f}Q{middle:.1f} {y + 4 + SAG * far:.1f} {b.x:.1f} {y:.1f}"
    if a.y == b.y:
        y, rise = a.y - a.h / 2, 20 + (0.28 if a.level == 0 else 0.08) * far
        return f"M{a.x:.1f} {y:.1f}Q{middle:.1f} {y - rise:.1f} {b.x:.1f} {y:.1f}"
    low, high = (a, b) if a.y > b.y else (b, a)
    x1, x2 = low.x, high.x
    if high.w > BOX_W:
        x2 = min(max(x1, high.x - high.w / 2 + 8), high.x + high.w / 2 - 8)
    if low.w > BOX_W:
        x1 = min(max(x2, low.x - low.w / 2 + 8), low.x + low.w / 2 - 8)
    ends = [(x1, low.y - low.h / 2), (x2, high.y + high.h / 2)]
    if low is b:
        ends.reverse()
    return "M{:.1f} {:.1f}L{:.1f} {:.1f}".format(*ends[0], *ends[1])


def draw_summary(canvas: Canvas) -> None:
    """Draw one block per level and the links between levels, for clusters with too many parts."""
    cluster = canvas.cluster
    depth = levels(cluster, range(cluster.num_nodes))
    rank = np.array([depth[n] for n in range(cluster.num_nodes)])
    top = int(rank.max())
    for level in range(top, -1, -1):
        y = 30 + (top - level) * 110.0
        nodes = np.flatnonzero(rank == level)
        kinds = "/".join(sorted({KINDS[k] for k in cluster.node_kind[nodes].tolist()}))
        names = ranges(cluster.node_names[n] for n in nodes[:2000].tolist())
        canvas.box(240, y, 420, 50, "device" if level == 0 else "switch")
        canvas.text(240, y - 2, f"{len(nodes)} x {kinds}", size=15, bold=True)
        canvas.text(240, y + 16, names if len(names) < 60 else f"{names[:56]} ...", size=11, color=FAINT)
        for other in range(level, -1, -1):
            between = (rank[cluster.link_src] == level) & (rank[cluster.link_dst] == other)
            if not between.any() or other == level:
                continue
            kinds_used = sorted({canvas.of_link[at] for at in np.flatnonzero(between).tolist()})
            for row, kind in enumerate(kinds_used[:3]):
                x = 160 + 70 * row
                canvas.line(x, y + 25, x, 30 + (top - other) * 110.0 - 25, canvas.classes[kind])
            canvas.text(460, y + 58, f"{int(between.sum())} links each way", size=11, anchor="start", color=FAINT)
    canvas.reach(620, 30 + top * 110.0 + 30)
