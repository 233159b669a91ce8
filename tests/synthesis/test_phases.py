# SPDX-License-Identifier: Apache-2.0
"""All-to-all in phases: routes of drawn trees of switches do not meet, and colorings of drawn graphs are right."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

import stretto as st
from stretto.errors import Infeasible
from stretto.synthesis import phases


def tree(draw: random.Random) -> st.Cluster:
    """Leaves and spines, or pods of leaves under planes; with as many links up as devices, or more, and gaps."""
    planes, pods = draw.randint(2, 4), draw.randint(2, 4)
    cores = draw.randint(1, 3) if draw.random() < 0.5 else 0
    leaves = draw.randint(2, 4) if not cores else draw.randint(1, cores + 1)
    names = [f"d{k}" for k in range(draw.randint(3, pods * leaves * planes))]
    nodes = [st.Node(name=name) for name in names]
    at: dict[tuple[object, ...], int] = {}

    def switch(*key: object) -> int:
        if key not in at:
            at[key] = len(nodes)
            nodes.append(st.Node(name="s" + "-".join(map(str, key)), kind="switch"))
        return at[key]

    pairs: set[tuple[int, int]] = set()
    for k in range(len(names)):
        leaf = k // planes
        pairs.add((k, switch("leaf", leaf)))
        for plane in range(planes):
            above = switch("agg", leaf // leaves, plane) if cores else switch("spine", plane)
            pairs.add((switch("leaf", leaf), above))
            for core in range(cores):
                pairs.add((above, switch("core", plane, core)))
    links = [st.Link(src=x, dst=y, gb_per_s=10.0, alpha_us=0.1) for a, b in sorted(pairs) for x, y in ((a, b), (b, a))]
    return st.Cluster.build("tree", nodes=nodes, links=links)


@pytest.mark.parametrize("seed", range(40))
def test_no_two_messages_of_a_phase_meet_on_drawn_trees(seed: int) -> None:
    cluster = tree(random.Random(seed))
    n = cluster.num_devices
    program = phases.synthesize(st.AllToAll(n), cluster, nbytes=1e6)
    turn = (program.dst - program.src) % n
    for phase in range(1, n):
        used: Counter[int] = Counter()
        for at in np.flatnonzero(turn == phase).tolist():
            route = program.routes[program.route[at]]
            ends = [(int(cluster.link_src[link]), int(cluster.link_dst[link])) for link in route]
            assert ends[0][0] == program.src[at] and ends[-1][1] == program.dst[at]
            assert all(a[1] == b[0] for a, b in pairwise(ends))
            used.update(route)
        most = max(used.values())
        # With fewer roots than leaves of a pod have links up, some links are shared, evenly.
        roots = [name for name in cluster.node_names if name.startswith("score")]
        assert most == 1 or roots


@pytest.mark.parametrize("seed", range(30))
def test_colors_of_drawn_graphs(seed: int) -> None:
    draw = random.Random(seed)
    edges = [(draw.randint(0, 9), draw.randint(0, 9)) for _ in range(draw.randint(0, 60))]
    colors = draw.randint(1, 6)
    given = phases.edge_colors(edges, colors)
    most = max([*Counter(a for a, _ in edges).values(), *Counter(b for _, b in edges).values()], default=1)
    assert all(0 <= color < -(-most // colors) * colors for color in given)
    for side in (0, 1):
        assert len({(edge[side], color) for edge, color in zip(edges, given, strict=True)}) == len(edges)


def test_a_fat_tree_is_at_the_bound() -> None:
    cluster = st.Cluster.load("fat_tree:54")
    found = st.synthesize(st.AllToAll(54), cluster, 64 * st.MB, makers=["phases"], cache=False)
    assert found.certificate.gap < 0.01


@pytest.mark.parametrize("source", ["ring:6", "torus:3x3", "dgx_h100:2", "ndv2"])
def test_other_networks_are_refused(source: str) -> None:
    cluster = st.Cluster.load(source)
    with pytest.raises(Infeasible, match=r"^phases: "):
        phases.synthesize(st.AllToAll(cluster.num_devices), cluster, nbytes=1e6)
    with pytest.raises(Infeasible, match="serves all_to_all"):
        phases.synthesize(st.AllGather(cluster.num_devices), cluster, nbytes=1e6)
