# SPDX-License-Identifier: Apache-2.0
"""All-to-all in phases on trees of switches with many roots: in a phase, no two messages meet on a link.

In phase k rank r sends to rank r + k, so every device sends and receives once. Where leaf switches are joined by
several planes (the parts into which the switches above fall when the leaves are taken away), the messages of a phase
between leaves are edges of a bipartite graph, and a coloring of these edges (König) is a choice of planes in which
every leaf uses each of its links once. Inside a plane the same holds again, up to the roots.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster
from ..cluster.model import DEVICE
from ..collectives import AllToAll, Collective
from ..errors import Infeasible
from ..programs import Program

Progress = Callable[[str, float], None]
Hops = tuple[int, ...]
Ends = list[tuple[int, int]]


def synthesize(
    collective: Collective,
    cluster: Cluster,
    *,
    nbytes: float,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    alpha: str = "pipelined",
) -> Program:
    """An all-to-all in which the messages of a phase take routes that do not meet.

    Args:
        collective: An all-to-all with the standard layout and one chunk for each pair of ranks.
        cluster: The cluster: each device on one leaf switch, leaves joined by planes of switches.
        nbytes: The size in bytes, > 0.
        budget_s: Ignored: there is nothing to search.
        seed: Ignored: there is no chance involved.
        progress: Called with a line of text and the fraction done, 0..1.
        alpha: "pipelined" or "blocking"; the routes are the same.

    Returns:
        The verified program.

    Raises:
        Infeasible: The collective is no standard all-to-all, or the network no such tree.

    >>> tree = Cluster.load("fat_tree:16")
    >>> program = synthesize(AllToAll(16), tree, nbytes=1e6)
    >>> from stretto import lower_bound, simulate
    >>> round(simulate(program, tree, nbytes=1e8).total_us / lower_bound(AllToAll(16), tree, 1e8).total_us, 3)
    1.001
    """
    del budget_s, seed, nbytes, alpha
    tell = progress or (lambda message, fraction: None)
    network = require_tree(collective, cluster)
    n, began = collective.num_ranks, time.monotonic()
    routes: dict[Hops, int] = {}
    src, dst, route = [], [], []
    for turn in range(1, n):
        pairs = [(rank, (rank + turn) % n) for rank in range(n)]
        for (a, b), hops in zip(pairs, network.routes(pairs), strict=True):
            src.append(a)
            dst.append(b)
            route.append(routes.setdefault(hops, len(routes)))
        if turn % 64 == 0:
            tell(f"{turn} of {n - 1} phases routed in {time.monotonic() - began:.3g} s", turn / n)
    sender, receiver = np.array(src), np.array(dst)
    program = Program.from_steps(
        "phases",
        collective,
        src=sender,
        dst=receiver,
        chunk=sender * n + receiver,
        step=np.zeros(len(src), np.int64),
        route=np.array(route),
        routes=tuple(routes),
        routes_digest=cluster.digest,
    )
    program.verify()
    return program


def require_tree(collective: Collective, cluster: Cluster) -> LeafNetwork:
    """The leaves and planes of the cluster; raises `Infeasible` where it has none, or for another collective."""
    if collective.kind != "all_to_all" or collective.num_ranks < 2:
        raise Infeasible(f"phases: serves all_to_all of two or more ranks, not {collective.kind}")
    if collective != AllToAll(collective.ranks, in_place=collective.in_place):
        raise Infeasible("phases: serves the standard all_to_all with one chunk for each pair of ranks")
    return LeafNetwork.of(cluster, collective.ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Level:
    """Leaves that planes join: by leaf and plane the link up and the link down, and what lies in each plane."""

    planes: int
    up: dict[tuple[int, int], tuple[int, int]]
    """(leaf, plane) to (link, the switch at its upper end)."""
    down: dict[tuple[int, int], tuple[int, int]]
    above: tuple[_Level | None, ...]

    @classmethod
    def of(cls, nodes: set[int], leaves: set[int], links: Sequence[tuple[int, int]]) -> _Level:
        """Split the switches above the leaves into planes, which every leaf must reach by one link each way."""
        number = _parts(nodes - leaves, links)
        planes = max(number.values(), default=-1) + 1
        if not planes:
            raise Infeasible("phases: leaf switches without switches above them")
        up: dict[tuple[int, int], tuple[int, int]] = {}
        down: dict[tuple[int, int], tuple[int, int]] = {}
        tops: list[set[int]] = [set() for _ in range(planes)]
        for link, (a, b) in enumerate(links):
            if a in leaves and b in leaves:
                raise Infeasible("phases: leaf switches are joined directly")
            table, leaf, top = (up, a, b) if a in leaves else (down, b, a)
            if leaf not in leaves or top not in number:
                continue
            if table.setdefault((leaf, number[top]), (link, top))[0] != link:
                raise Infeasible("phases: a leaf switch has several links to one plane")
            tops[number[top]].add(top)
        if len(up) != len(leaves) * planes or up.keys() != down.keys():
            raise Infeasible("phases: a leaf switch does not reach every plane")
        above: list[_Level | None] = []
        for plane, entries in enumerate(tops):
            inside = {node for node, at in number.items() if at == plane}
            above.append(None if len(inside) == 1 else cls.of(inside, entries, _within(inside, links)))
        return cls(planes=planes, up=up, down=down, above=tuple(above))

    def routes(self, ends: Ends) -> list[Hops]:
        """The links between pairs of leaves, so that none is taken twice as far as that is possible."""
        apart = [at for at, (a, b) in enumerate(ends) if a != b]
        found: list[Hops] = [()] * len(ends)
        by_plane = defaultdict(list)
        for at, color in zip(apart, edge_colors([ends[at] for at in apart], self.planes), strict=True):
            by_plane[color % self.planes].append(at)
        for plane, members in by_plane.items():
            climbs = [(self.up[ends[at][0], plane], self.down[ends[at][1], plane]) for at in members]
            level = self.above[plane]
            inner = [()] * len(members) if level is None else level.routes([(u[1], d[1]) for u, d in climbs])
            for at, (u, d), between in zip(members, climbs, inner, strict=True):
                found[at] = (u[0], *between, d[0])
        return found


def _within(inside: set[int], links: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The links with those that leave the inside marked as unused, so that links keep their numbers."""
    return [(a, b) if a in inside and b in inside else (-1, -1) for a, b in links]


def _parts(nodes: set[int], links: Sequence[tuple[int, int]]) -> dict[int, int]:
    """The number of the connected part that each node belongs to."""
    beside = defaultdict(list)
    for a, b in links:
        if a in nodes and b in nodes:
            beside[a].append(b)
            beside[b].append(a)
    number: dict[int, int] = {}
    for first in sorted(nodes):
        if first in number:
            continue
        part = max(number.values(), default=-1) + 1
        waiting = [first]
        while waiting:
            node = waiting.pop()
            if node not in number:
                number[node] = part
                waiting += beside[node]
    return number


@dataclass(frozen=True, kw_only=True, eq=False)
class LeafNetwork:
    """The leaf of each rank, its links to and from it, and the planes between leaves."""

    leaf: list[int]
    up: list[int]
    down: list[int]
    level: _Level

    @classmethod
    def of(cls, cluster: Cluster, ranks: Sequence[int]) -> LeafNetwork:
        """The network of these ranks' devices; raises `Infeasible` where there are no leaves and planes."""
        links = list(zip(cluster.link_src.tolist(), cluster.link_dst.tolist(), strict=True))
        devices = set(np.flatnonzero(cluster.node_kind == DEVICE).tolist())
        out, into = defaultdict(list), defaultdict(list)
        for link, (a, b) in enumerate(links):
            out[a].append(link)
            into[b].append(link)
        leaf, up, down = [], [], []
        for rank in ranks:
            if len(out[rank]) != 1 or len(into[rank]) != 1 or links[out[rank][0]][1] != links[into[rank][0]][0]:
                raise Infeasible("phases: a device is not on one leaf switch")
            up.append(out[rank][0])
            down.append(into[rank][0])
            leaf.append(links[up[-1]][1])
        switches = {node for link in links for node in link} - devices
        if devices & set(leaf):
            raise Infeasible("phases: devices are joined directly")
        level = _Level.of(switches, set(leaf), _within(switches, links))
        return cls(leaf=leaf, up=up, down=down, level=level)

    def routes(self, pairs: Ends) -> list[Hops]:
        """The links of each message from rank to rank."""
        inner = self.level.routes([(self.leaf[a], self.leaf[b]) for a, b in pairs])
        return [(self.up[a], *between, self.down[b]) for (a, b), between in zip(pairs, inner, strict=True)]


def edge_colors(edges: Ends, colors: int) -> list[int]:
    """Color the edges of a bipartite graph, so that no two of one color meet at either side.

    Args:
        edges: The edges (left, right); several may join the same two.
        colors: The colors to use; more, in multiples of these, where some node has more edges.

    Returns:
        The color of each edge.

    >>> edge_colors([(0, 0), (0, 1), (1, 0)], 2)
    [0, 1, 1]
    """
    degree: dict[tuple[int, int], int] = defaultdict(int)
    for a, b in edges:
        degree[0, a] += 1
        degree[1, b] += 1
    most = max(degree.values(), default=1)
    count = -(-most // colors) * colors
    taken: dict[tuple[int, int], list[int]] = {node: [-1] * count for node in degree}
    given = [-1] * len(edges)
    for edge, (a, b) in enumerate(edges):
        left, right = taken[0, a], taken[1, b]
        here, there = left.index(-1), right.index(-1)
        if right[here] >= 0 and left[there] >= 0:
            # Along the path of edges colored in turn `here` and `there` that begins at b, the two are exchanged.
            path, node, color = [], (1, b), here
            while (step := taken[node][color]) >= 0:
                path.append(step)
                x, y = edges[step]
                node = (0, x) if node[0] else (1, y)
                color = there if color == here else here
            for step in path:
                x, y = edges[step]
                taken[0, x][given[step]] = taken[1, y][given[step]] = -1
            for step in path:
                x, y = edges[step]
                given[step] = there if given[step] == here else here
                taken[0, x][given[step]] = taken[1, y][given[step]] = step
        color = here if right[here] < 0 else there
        given[edge] = color
        left[color] = right[color] = edge
    return given
