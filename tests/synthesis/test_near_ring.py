# SPDX-License-Identifier: Apache-2.0
"""Orders of ranks along rings: the best of all orders on small networks, and what they win behind switches."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

import stretto as st
from stretto.cluster.model import Link, Node
from stretto.synthesis.near_ring import near_order


def switches(seed: int) -> st.Cluster:
    """Six devices on three switches that are joined by links of drawn latencies, numbered at random."""
    draw = np.random.default_rng(seed)
    at = draw.permutation(np.repeat(np.arange(3), 2)).tolist()
    ends = [(k, 6 + at[k], float(draw.choice([0.2, 0.4]))) for k in range(6)]
    ends += [(6 + a, 6 + b, float(draw.choice([0.5, 1.0, 2.0, 3.0]))) for a, b in ((0, 1), (1, 2), (0, 2))]
    nodes = [Node(name=f"d{k}") for k in range(6)] + [Node(name=f"s{k}", kind="switch") for k in range(3)]
    links = [Link(src=a, dst=b, gb_per_s=20, alpha_us=alpha) for x, y, alpha in ends for a, b in ((x, y), (y, x))]
    return st.Cluster.build(f"switches{seed}", nodes=nodes, links=links)


@pytest.mark.parametrize("seed", range(8))
def test_the_longest_hop_is_as_short_as_in_any_order(seed: int) -> None:
    cluster = switches(seed)

    def hops(order: tuple[int, ...]) -> list[float]:
        pairs = zip(order, (*order[1:], order[0]), strict=True)
        return [float(cluster.link_alpha_us[list(cluster.routes(a, b)[0])].sum()) for a, b in pairs]

    found = near_order(cluster, tuple(range(6)), 1e3) or tuple(range(6))
    assert sorted(found) == list(range(6))
    assert max(hops(found)) == pytest.approx(min(max(hops((0, *rest))) for rest in permutations(range(1, 6))))


def test_two_rings_of_near_ranks_end_sooner() -> None:
    cluster = switches(1)
    order = near_order(cluster, tuple(range(6)), 1e5)
    assert order is not None
    near, own = (
        st.algorithm("ring", "all_reduce", 6, order=(way, way[::-1]), chunks=8) for way in (order, tuple(range(6)))
    )
    near.verify()
    assert st.simulate(near, cluster, nbytes=1e6).total_us < st.simulate(own, cluster, nbytes=1e6).total_us


def test_where_there_is_no_better_order_there_is_none() -> None:
    assert near_order(st.Cluster.load("dgx_h100:1"), tuple(range(8)), 1e3) is None
    assert near_order(st.Cluster.load("ring:6"), tuple(range(6)), 1e3) is None
    assert near_order(switches(0), (0, 1, 2), 1e3) is None
