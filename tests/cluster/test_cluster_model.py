# SPDX-License-Identifier: Apache-2.0
"""`Cluster`: validation, routing against networkx, reachability."""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import Cluster, InvalidInput, Link, Node
from stretto.cluster.model import DEVICE

CHANNELS = ("red", "blue")


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Random small clusters: any kinds, hosts, channels, rates; possibly disconnected."""
    devices = draw(st.integers(1, 6))
    kinds = ["device"] * devices + draw(st.lists(st.sampled_from(["switch", "nic"]), max_size=5))
    count = len(kinds)
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=24)) if pairs else []
    links = [
        Link(
            src=a,
            dst=b,
            alpha_us=draw(st.sampled_from([0.0, 0.5, 2.0])),
            gb_per_s=draw(st.sampled_from([1.0, 2.0, 4.0])),
            channel=draw(st.sampled_from(CHANNELS)),
            flow_gb_per_s=draw(st.sampled_from([math.inf, 0.5])),
            incast=draw(st.sampled_from([(), ((2, 0.9), (8, 0.5)), ((4, 1.0),)])),
        )
        for a, b in chosen
    ]
    nodes = [Node(name=f"{kind}{at}", kind=kind, host=draw(st.integers(-1, 2))) for at, kind in enumerate(kinds)]
    return Cluster.build("random", nodes=nodes, links=links, devices_forward=draw(st.booleans()))


def graph_of(cluster: Cluster, src: int, channels: frozenset[str] | None) -> nx.DiGraph:
    """What a route from `src` may use, with the rate of the widest parallel link."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(cluster.num_nodes))
    for link in cluster.links():
        forwards = cluster.devices_forward or cluster.node_kind[link.src] != DEVICE
        if (link.src == src or forwards) and (channels is None or link.channel in channels):
            old = graph.get_edge_data(link.src, link.dst, {"rate": 0.0})["rate"]
            graph.add_edge(link.src, link.dst, rate=max(old, link.gb_per_s))
    return graph


@settings(max_examples=150, deadline=None)
@given(cluster=clusters())
def test_unreachable_names_a_pair_without_a_route_exactly_when_there_is_one(cluster: Cluster) -> None:
    broken = {
        (a, b)
        for a in range(cluster.num_devices)
        for b in range(cluster.num_devices)
        if a != b and not nx.has_path(graph_of(cluster, a, None), a, b)
    }
    found = cluster.unreachable()
    assert (found in broken) if broken else found is None


def test_reaching_one_device_from_all_is_not_enough_where_devices_do_not_forward() -> None:
    ends = [(0, 1), (1, 0), (1, 2), (2, 1)]
    line = Cluster.build(
        "line",
        nodes=[Node(name=n) for n in "abc"],
        links=[Link(src=a, dst=b, alpha_us=0, gb_per_s=1) for a, b in ends],
    )
    assert line.unreachable() == (0, 2)
    src, dst, choice = np.array([0], np.int32), np.array([2], np.int32), np.array([0], np.int64)
    with pytest.raises(InvalidInput, match="no route from a to c; there is one through other devices, with devices_fo"):
        line.route_table(src, dst, choice)


def test_route_table_names_devices_and_channels_without_a_route() -> None:
    cluster = Cluster.preset("hgx2", nodes=2)
    src, dst, choice = np.array([0], np.int32), np.array([8], np.int32), np.array([0], np.int64)
    with pytest.raises(InvalidInput, match=r"no route from h0.gpu0 to h1.gpu0 over channels nvlink"):
        cluster.route_table(src, dst, choice, channels=["nvlink"])
    with pytest.raises(InvalidInput, match="unknown channel 'wifi'; choose from: nvlink, pcie, rdma, ethernet"):
        cluster.routes(0, 1, channels=["wifi"])


def test_route_table_spreads_choices_over_equal_routes() -> None:
    cluster = Cluster.preset("fat_tree", nodes=16)
    choice = np.arange(8, dtype=np.int64)
    ptr, links = cluster.route_table(np.zeros(8, np.int32), np.full(8, 15, np.int32), choice)
    routes = {tuple(links[a:b].tolist()) for a, b in nx.utils.pairwise(ptr.tolist())}
    assert routes == set(cluster.routes(0, 15))
    assert len(routes) == 4


def one_link(**changes: object) -> Cluster:
    link: dict[str, object] = {"src": 0, "dst": 1, "alpha_us": 1.0, "gb_per_s": 1.0}
    return Cluster.build(
        "two",
        nodes=[Node(name="a"), Node(name="b")],
        links=[Link(**(link | changes))],  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gb_per_s": -5}, "links[0].gb_per_s: must be > 0, not -5"),
        ({"gb_per_s": 0}, "links[0].gb_per_s: must be > 0, not 0"),
        ({"gb_per_s": math.nan}, "links[0].gb_per_s: must be > 0, not nan"),
        ({"gb_per_s": math.inf}, "links[0].gb_per_s: must be > 0, not inf"),
        ({"gb_per_s": 1e-308}, "links[0].gb_per_s: must be 1e-09 to 1e+09, not 1e-308"),
        ({"alpha_us": 1e308}, "links[0].alpha_us: must be 0 to 1e+09, not 1e+308"),
        ({"alpha_us": -1}, "links[0].alpha_us: must be >= 0, not -1"),
        ({"alpha_us": math.nan}, "links[0].alpha_us: must be >= 0, not nan"),
        ({"flow_gb_per_s": 0}, "links[0].flow_gb_per_s: must be > 0, not 0"),
        ({"dst": 0}, "links[0].dst: a link must not lead to its own source"),
        ({"dst": 7}, "links[0].dst: no node 7; there are 2 nodes"),
        ({"incast": ((4, 0.5), (2, 0.9))}, "incast[0]: pairs need rising flows"),
    ],
)
def test_bad_links_are_refused_by_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        one_link(**changes)
    assert str(error.value).startswith(message)


def test_bad_nodes_are_refused_by_field() -> None:
    with pytest.raises(InvalidInput, match="names must differ; 'a' is used twice"):
        Cluster.build("x", nodes=[Node(name="a"), Node(name="a")], links=[])
    with pytest.raises(InvalidInput, match=r"nodes\[1\].kind: unknown kind 'router'; choose from: device"):
        Cluster.build("x", nodes=[Node(name="a"), Node(name="b", kind="router")], links=[])
    with pytest.raises(InvalidInput, match="at least one node of kind 'device'"):
        Cluster.build("x", nodes=[Node(name="a", kind="switch")], links=[])


def test_building_moves_devices_to_the_front_and_keeps_links_right() -> None:
    cluster = Cluster.build(
        "x",
        nodes=[Node(name="hub", kind="switch"), Node(name="a"), Node(name="b")],
        links=[Link(src=1, dst=0, alpha_us=0, gb_per_s=1), Link(src=0, dst=2, alpha_us=0, gb_per_s=1)],
    )
    assert cluster.node_names == ("a", "b", "hub")
    assert cluster.routes(0, 1) == [(0, 1)]


def test_equality_is_by_content_and_arrays_are_read_only() -> None:
    a, b = Cluster.preset("dgx2", nodes=2), Cluster.preset("dgx2", nodes=2)
    assert a == b
    assert hash(a) == hash(b)
    assert a != Cluster.preset("dgx2", nodes=3)
    with pytest.raises(ValueError, match="read-only"):
        a.link_gb_per_s[0] = 1.0
