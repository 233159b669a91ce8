# SPDX-License-Identifier: Apache-2.0
"""Bounds that add latencies and bytes, against an exhaustive search on tiny random clusters and values by hand."""

from __future__ import annotations

import random
from itertools import permutations

import networkx as nx
import numpy as np
import pytest
from exhaustive import bounds_and_optima, tiny

import stretto as st
from stretto import _native


@pytest.mark.parametrize("seed", range(16))
def test_no_bound_is_above_the_best_program_of_an_exhaustive_search(seed: int) -> None:
    case = tiny(random.Random(seed), 3 + seed % 2)
    for kind, bound, best in bounds_and_optima(case):
        assert bound <= best * (1 + 1e-9), kind


def h100(hosts: int) -> st.Cluster:
    """Hosts of 8 GPUs on an NVSwitch, one 50 GB/s NIC each, and one switch for the NICs of equal number."""
    nodes = [st.Node(name=f"h{h}g{k}", host=h) for h in range(hosts) for k in range(8)]
    nodes += [st.Node(name=f"s{k}", kind="switch") for k in range(hosts + 8)]
    links = []
    for h in range(hosts):
        for k in range(8):
            for switch, rate, alpha in ((8 * hosts + h, 450.0, 0.35), (9 * hosts + k, 50.0, 1.25)):
                ends = ((8 * h + k, switch), (switch, 8 * h + k))
                links += [st.Link(src=a, dst=b, gb_per_s=rate, alpha_us=alpha) for a, b in ends]
    return st.Cluster.build("h100", nodes=nodes, links=links)


@pytest.mark.parametrize("collective", [st.AllGather(16), st.ReduceScatter(16)])
def test_a_hop_between_hosts_and_a_hop_inside_add_up(collective: st.Collective) -> None:
    # A byte enters a host after 2.5 us and is with its neighbours 0.7 us later: 50 (T - 2.5) + 350 (T - 3.2) >= 500 KB.
    bound = st.lower_bound(collective, h100(2), 1e6)
    assert bound.total_us == pytest.approx((500 + 50 * 2.5 + 350 * 3.2) / 400)
    assert bound.method == "timed cut" and bound.bandwidth_us < bound.total_us


def test_what_nobody_can_relay_in_time_is_received_by_everyone() -> None:
    # In less than two hops (2 us) nothing is relayed or added up, so everybody takes in what 7 others have.
    nodes = [st.Node(name=f"d{i}") for i in range(8)] + [st.Node(name="s", kind="switch")]
    links = [st.Link(src=a, dst=b, gb_per_s=10.0, alpha_us=0.5) for i in range(8) for a, b in ((i, 8), (8, i))]
    star = st.Cluster.build("star", nodes=nodes, links=links)
    assert st.lower_bound(st.AllReduce(8), star, 1e3).total_us == pytest.approx(1.0 + 7 * 0.1)
    assert st.lower_bound(st.AllReduce(8), star, 1e6).total_us > 101.8


@pytest.mark.parametrize("seed", range(12))
def test_flows_over_time_agree_with_flows_in_a_network_of_moments(seed: int) -> None:
    draw = random.Random(seed)
    count, horizon = draw.randint(3, 6), 12
    pairs = [pair for pair in permutations(range(count), 2) if draw.random() < 0.6] or [(0, 1)]
    length, rate = [[draw.randint(low, 3) for _ in pairs] for low in (0, 1)]
    ends = np.array(pairs, np.int32)
    ptr, speed, offset = _native.cheapest_flows(
        count, ends[:, 0].copy(), ends[:, 1].copy(), np.array(length, float), np.array(rate, float),
        np.array([0], np.int32), np.array([count - 1], np.int32), 64,
    )  # fmt: skip
    assert ptr.tolist() == [0, len(speed)]
    for moments in range(1, horizon + 1):
        graph = nx.DiGraph()
        graph.add_nodes_from([(0, 0), (count - 1, moments)])
        for now in range(moments + 1):
            for node in range(count if now < moments else 0):
                graph.add_edge((node, now), (node, now + 1))
            for (a, b), late, wide in zip(pairs, length, rate, strict=True):
                if now < moments and now + late < moments:
                    graph.add_edge((a, now), (b, now + late), capacity=wide)
        # What arrives within the last moment has arrived.
        most = nx.maximum_flow_value(graph, (0, 0), (count - 1, moments))
        assert float(speed @ np.maximum(moments - offset, 0.0)) == pytest.approx(most)


def test_what_one_rank_has_comes_to_the_farthest_one() -> None:
    # d0 has one link out (1 MB over 10 GB/s: 100 us); the last byte then has five hops of 2 us before it.
    links = [st.Link(src=a, dst=b, gb_per_s=10.0, alpha_us=2.0) for k in range(5) for a, b in ((k, k + 1), (k + 1, k))]
    line = st.Cluster.build("line", nodes=[st.Node(name=f"d{k}") for k in range(6)], links=links)
    assert st.lower_bound(st.AllReduce(6), line, 1e6).total_us == pytest.approx(110.0)


def test_groups_are_entered_between_the_first_sum_and_the_last_spreading() -> None:
    # Three rings of four, joined by their first devices. The sum over a deep rank of each passes 2 us of a ring first,
    # and 2 us last: 4 entries of 1 MB into rings that take in 60 GB/s together, and 3 us between rings.
    links = []
    for ring in range(3):
        for k in range(4):
            links += [(4 * ring + k, 4 * ring + (k + 1) % 4, 100.0, 1.0)]
        links += [(4 * ring, 4 * ((ring + 1) % 3), 10.0, 3.0)]
    both = [st.Link(src=x, dst=y, gb_per_s=g, alpha_us=u) for a, b, g, u in links for x, y in ((a, b), (b, a))]
    nodes = [st.Node(name=f"d{k}", host=k // 4) for k in range(12)]
    bound = st.lower_bound(st.AllReduce(12), st.Cluster.build("rings", nodes=nodes, links=both), 1e6)
    assert bound.method == "timed counting"
    assert bound.total_us == pytest.approx(4e6 / 60e3 + 2 + 3 + 2)
