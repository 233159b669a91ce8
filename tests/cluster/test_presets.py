# SPDX-License-Identifier: Apache-2.0
"""Presets hold the published numbers, reach everything, and refuse bad counts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest

from stretto import Cluster, InvalidInput
from stretto.cluster.grid import factor, lines
from stretto.cluster.presets import presets

DATA = Path(__file__).parent / "data"
NAMES = [entry.name for entry in presets()]


def links(cluster: Cluster) -> dict[tuple[str, str], tuple[float, float, str]]:
    """(from, to) names: (GB/s, us, channel)."""
    names = cluster.node_names
    return {(names[x.src], names[x.dst]): (x.gb_per_s, x.alpha_us, x.channel) for x in cluster.links()}


def path_cost(cluster: Cluster, a: str, b: str, channels: tuple[str, ...] | None = None) -> tuple[float, float]:
    """Summed latency and slowest link of the first route between two devices."""
    src, dst = cluster.node_names.index(a), cluster.node_names.index(b)
    route = list(cluster.routes(src, dst, channels=channels)[0])
    return float(cluster.link_alpha_us[route].sum()), float(cluster.link_gb_per_s[route].min())


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_reaches_every_device_with_default_and_more_nodes(name: str) -> None:
    default = Cluster.preset(name)
    assert default.unreachable() is None
    bigger = Cluster.preset(name, nodes=4 * next(e.default_nodes for e in presets() if e.name == name))
    assert bigger.num_devices > default.num_devices
    assert bigger.unreachable() is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("nodes", [0, -1, 10**9, 1 << 70, 2.5, True, "4"])
def test_bad_node_counts_are_refused_in_one_line_that_names_them(name: str, nodes: object) -> None:
    with pytest.raises(InvalidInput, match=r"^nodes: [^\n]*$"):
        Cluster.preset(name, nodes=nodes)  # type: ignore[arg-type]


def test_an_unknown_preset_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(InvalidInput, match=r"unknown preset 'dgx9'; choose from: ndv2, .*did you mean 'dgx2'"):
        Cluster.preset("dgx9")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gb_per_s": -1}, "gb_per_s: must be a number > 0, not -1"),
        ({"gb_per_s": math.nan}, "gb_per_s: must be a number > 0, not nan"),
        ({"gb_per_s": math.inf}, "gb_per_s: must be a number > 0, not inf"),
        ({"alpha_us": -0.5}, "alpha_us: must be a number >= 0, not -0.5"),
        ({"alpha_us": "fast"}, "alpha_us: must be a number >= 0, not 'fast'"),
        ({"dims": (4,)}, "dims: must be two or three sides"),
        ({"dims": (0, 4)}, "dims: must be whole numbers >= 1"),
        ({"dims": (10**5, 10**5)}, "dims: 100000x100000 is more than 65536 devices"),
        ({"speed": 1}, "unknown option of preset torus 'speed'; choose from: nodes, gb_per_s, alpha_us, dims"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        Cluster.preset("torus", **options)
    assert str(error.value).startswith(message)


def test_ndv2_has_taccls_nvlinks_and_one_nic_behind_the_first_pcie_switch() -> None:
    found = links(Cluster.preset("ndv2", nodes=2))
    double = {(0, 1), (0, 4), (1, 3), (2, 3), (2, 6), (4, 5), (5, 7), (6, 7)}
    single = {(0, 2), (0, 3), (1, 2), (1, 5), (3, 7), (4, 6), (4, 7), (5, 6)}
    for host in range(2):
        for a in range(8):
            for b in range(8):
                link = found.get((f"h{host}.gpu{a}", f"h{host}.gpu{b}"))
                pair = (min(a, b), max(a, b))
                if pair in double:
                    assert link == (1000 / 23, 0.3, "nvlink")
                elif pair in single:
                    assert link == (1000 / 46, 0.3, "nvlink")
                else:
                    assert link is None
    assert found["h0.nic", "ib"] == (1000 / 105, 2.6, "rdma")
    assert found["ib", "h0.nic"] == (1000 / 105, 0.0, "rdma")
    hangs_on = {b for a, b in found if a == "h0.nic"}
    assert hangs_on == {"ib", "h0.pcie0"}
    assert {a for a, b in found if b == "h1.pcie2" and "gpu" in a} == {"h1.gpu4", "h1.gpu5"}


def test_a_path_between_hosts_pays_the_published_latency_once_and_the_nic_is_its_bottleneck() -> None:
    assert path_cost(Cluster.preset("ndv2", nodes=2), "h0.gpu0", "h1.gpu1") == (2.6, 1000 / 105)
    assert path_cost(Cluster.preset("dgx2", nodes=2), "h0.gpu3", "h1.gpu9") == (2.6, 1000 / 105)
    assert path_cost(Cluster.preset("dgx2", nodes=2), "h0.gpu3", "h0.gpu9") == (0.3, 125.0)
    assert path_cost(Cluster.preset("p3_8xlarge", nodes=2), "h0.gpu0", "h1.gpu3")[1] == 1.25
    assert path_cost(Cluster.preset("dgx_h100", nodes=2), "h0.gpu5", "h1.gpu5") == (2.6, 50.0)
    assert path_cost(Cluster.preset("dgx_a100", nodes=2), "h0.gpu5", "h1.gpu5") == (2.6, 25.0)


def test_gpu_pairs_of_a_dgx2_share_a_nic() -> None:
    found = links(Cluster.preset("dgx2", nodes=2))
    for nic in range(8):
        sharing = {a for a, b in found if b == f"h1.nic{nic}" and a != "ib"}
        assert sharing == {f"h1.gpu{2 * nic}", f"h1.gpu{2 * nic + 1}"}
    assert sum(b == "ib" for _, b in found) == 16


@pytest.mark.parametrize(
    ("key", "name", "nodes"), [("NDv2_2", "ndv2_teccl", 2), ("NDv2_4", "ndv2_teccl", 4), ("DGX2_2", "dgx2_teccl", 2)]
)
def test_teccl_presets_are_the_published_link_lists(key: str, name: str, nodes: int) -> None:
    published = json.loads((DATA / "teccl_links.json").read_text())[key]
    gpus = [n for n in range(published["nodes"]) if n not in published["switches"]]
    ours = {old: new for new, old in enumerate([*gpus, *published["switches"]])}
    expected = {(ours[a], ours[b], rate, alpha) for a, b, rate, alpha in published["links"]}
    cluster = Cluster.preset(name, nodes=nodes)
    found = {(x.src, x.dst, x.gb_per_s, x.alpha_us) for x in cluster.links()}
    assert found == expected
    assert cluster.num_links == len(expected)


def test_hgx2_without_incast_has_the_same_links_and_loses_nothing_to_many_senders() -> None:
    assumed, plain = Cluster.preset("hgx2", nodes=3), Cluster.preset("hgx2_no_incast", nodes=3)
    assert links(plain) == links(assumed)
    assert assumed.incast_curves and not plain.incast_curves
    assert (plain.link_incast < 0).all()


def test_hgx2_has_two_channel_sets_that_share_no_link_and_each_reach_everything() -> None:
    cluster = Cluster.preset("hgx2", nodes=3)
    assert set(cluster.channels) == {"nvlink", "rdma", "pcie", "ethernet"}
    for channels in (("nvlink", "rdma"), ("pcie", "ethernet")):
        for dst in range(1, cluster.num_devices):
            assert cluster.routes(0, dst, channels=channels)
    assert path_cost(cluster, "h0.gpu0", "h0.gpu7", ("nvlink", "rdma"))[1] == 150.0
    assert path_cost(cluster, "h0.gpu0", "h1.gpu7", ("nvlink", "rdma"))[1] == 12.5
    assert path_cost(cluster, "h0.gpu0", "h1.gpu7", ("pcie", "ethernet"))[1] == 12.5
    found = links(cluster)
    assert sum(b == "roce" for _, b in found) == 24
    assert sum(b == "ethernet" for _, b in found) == 6


@pytest.mark.parametrize(
    ("name", "kinds", "sizes", "gbit", "ns"),
    [
        ("themis_2d_sw_sw", "SS", (16, 64), (1200, 800), (700, 1700)),
        ("themis_3d_sw_sw_sw_homo", "SSS", (16, 8, 8), (800, 800, 800), (700, 700, 1700)),
        ("themis_3d_sw_sw_sw_hetero", "SSS", (16, 8, 8), (1600, 800, 400), (700, 700, 1700)),
        ("themis_3d_fc_ring_sw", "FRS", (8, 16, 8), (1400, 800, 400), (700, 700, 1700)),
        ("themis_4d_ring_sw_sw_sw", "RSSS", (4, 4, 8, 8), (2000, 1600, 800, 400), (20, 700, 700, 1700)),
        ("themis_4d_ring_fc_ring_sw", "RFRS", (4, 8, 4, 8), (3000, 1400, 1200, 800), (20, 700, 700, 1700)),
    ],
)
def test_themis_networks_have_the_published_rates_per_npu(
    name: str, kinds: str, sizes: tuple[int, ...], gbit: tuple[int, ...], ns: tuple[int, ...]
) -> None:
    cluster = Cluster.preset(name)
    assert cluster.num_devices == 1024
    full = {"S": "switch", "F": "fully_connected", "R": "ring"}
    assert [d.kind for d in cluster.dimensions] == [full[k] for k in kinds]
    assert [d.size for d in cluster.dimensions] == list(sizes)
    for dim, (rate, latency) in enumerate(zip(gbit, ns, strict=True)):
        assert cluster.dimensions[dim].gb_per_s == rate / 8
        assert cluster.dimensions[dim].alpha_us == latency / 1000
        out = (cluster.link_channel == cluster.channels.index(f"dim{dim}")) & (cluster.link_src < 1024)
        per_npu = np.bincount(cluster.link_src[out], cluster.link_gb_per_s[out], minlength=1024)
        assert per_npu == pytest.approx(rate / 8)
        neighbour = math.prod(sizes[:dim])
        route = list(cluster.routes(0, neighbour, channels=[f"dim{dim}"])[0])
        assert float(cluster.link_alpha_us[route].sum()) == latency / 1000


def test_a_themis_network_grows_in_its_last_dimension() -> None:
    assert [d.size for d in Cluster.preset("themis_2d_sw_sw", nodes=48).dimensions] == [16, 3]
    with pytest.raises(InvalidInput, match="nodes: themis_2d_sw_sw takes a multiple of 16 from 32 on"):
        Cluster.preset("themis_2d_sw_sw", nodes=40)


@pytest.mark.parametrize(
    ("name", "gpus", "gbit"),
    [
        ("a1", [1] * 16, [40] * 16),
        ("a2", [1] * 11, [40] * 11),
        ("b1", [4] * 2, [25] * 2),
        ("b2", [4] * 3, [25] * 3),
        ("b3", [4] * 4, [25] * 4),
        ("b4", [4], []),
        ("b5", [4] * 2, [50] * 2),
        ("b6", [4] * 3, [50] * 3),
        ("b7", [4] * 4, [50] * 4),
        ("b8", [4] * 8, [50] * 8),
        ("b9", [1, 4], [10, 25]),
        ("b10", [4, 4], [25, 50]),
        ("b11", [4] * 4, [25, 25, 50, 50]),
        ("b12", [1, 4], [25, 50]),
    ],
)
def test_autodist_clusters_have_the_hosts_of_its_table(name: str, gpus: list[int], gbit: list[int]) -> None:
    cluster = Cluster.preset(f"autodist_{name}")
    assert np.bincount(cluster.node_host[: cluster.num_devices]).tolist() == gpus
    nics = [x for x in cluster.links() if x.channel == "ethernet" and x.alpha_us > 0]
    assert [8 * x.gb_per_s for x in nics] == gbit
    assert {x.flow_gb_per_s for x in nics} <= {math.inf if name.startswith("a") else 1.25}


def optimal_all_gather_gb_per_s(cluster: Cluster, claim: float) -> bool:
    """Whether the certified rate `claim` fits the cuts and a slightly higher one does not (by max-flow)."""
    n = cluster.num_devices

    def feasible(rate: float) -> bool:
        graph = nx.DiGraph()
        for x in cluster.links():
            before = graph.get_edge_data(x.src, x.dst, {"capacity": 0.0})["capacity"]
            graph.add_edge(x.src, x.dst, capacity=before + x.gb_per_s)
        for device in range(n):
            graph.add_edge("source", device, capacity=rate / n)
        sinks = np.flatnonzero(cluster.node_host[:n] == 0).tolist()  # boxes are alike
        return all(nx.maximum_flow_value(graph, "source", sink) >= rate * (1 - 1e-9) for sink in sinks)

    return feasible(claim * (1 - 2e-4)) and not feasible(claim * (1 + 2e-3))


@pytest.mark.parametrize(
    ("name", "nodes", "claim"),
    [
        ("dgx_a100", 1, 342.9),
        ("dgx_a100", 2, 346.7),
        ("dgx_a100", 4, 266.7),
        ("dgx_a100", 8, 228.6),
        ("mi250", 1, 342.9),
        ("mi250", 2, 354.1),
        ("mi250", 4, 341.3),
    ],
)
def test_boxes_have_the_published_optimal_all_gather_rate(name: str, nodes: int, claim: float) -> None:
    assert optimal_all_gather_gb_per_s(Cluster.preset(name, nodes=nodes), claim)


def test_regular_networks_have_the_degrees_their_names_promise() -> None:
    def degrees(name: str, **options: Any) -> set[int]:
        cluster = Cluster.preset(name, **options)
        return set(np.bincount(cluster.link_src, minlength=cluster.num_devices).tolist())

    assert degrees("ring", nodes=5) == {2}
    assert degrees("ring", nodes=2) == {1}
    assert degrees("fully_connected", nodes=6) == {5}
    assert degrees("torus", nodes=12) == {4}
    assert degrees("torus", dims=(3, 3, 3)) == {6}
    assert degrees("torus", dims=(2, 4)) == {3}
    assert degrees("mesh", nodes=12) == {2, 3, 4}
    assert degrees("mesh", dims=(3, 3, 3)) == {3, 4, 5, 6}
    assert degrees("hypercube", nodes=32) == {5}


@pytest.mark.parametrize("name", ["ring", "fully_connected", "torus", "hypercube"])
def test_regular_networks_tell_their_dimensions_as_aggregate_rates(name: str) -> None:
    cluster = Cluster.preset(name, nodes=8, gb_per_s=10.0, alpha_us=2.0)
    for at, dim in enumerate(cluster.dimensions):
        out = (cluster.link_channel == at) & (cluster.link_src == 0)
        assert float(cluster.link_gb_per_s[out].sum()) == pytest.approx(dim.gb_per_s)
        assert dim.alpha_us == 2.0
    assert set(cluster.link_gb_per_s.tolist()) == {10.0}


def test_torus_neighbours_differ_by_one_step_in_one_coordinate() -> None:
    cluster = Cluster.preset("torus", dims=(3, 4, 5))
    sizes = [3, 4, 5]
    for link in cluster.links():
        axis = cluster.channels.index(link.channel)
        where = [(link.src // math.prod(sizes[:k]) % sizes[k]) for k in range(3)]
        to = [(link.dst // math.prod(sizes[:k]) % sizes[k]) for k in range(3)]
        assert [k for k in range(3) if where[k] != to[k]] == [axis]
        assert (where[axis] - to[axis]) % sizes[axis] in (1, sizes[axis] - 1)


@pytest.mark.parametrize("nodes", [1, 2, 5, 16, 17, 54, 128])
def test_a_fat_tree_reaches_all_and_leaves_full_bisection_above_every_level(nodes: int) -> None:
    cluster = Cluster.preset("fat_tree", nodes=nodes)
    assert cluster.num_devices == nodes
    assert cluster.unreachable() is None
    ends = np.array([name.rstrip("0123456789") for name in cluster.node_names])
    up = {a: np.count_nonzero((ends[cluster.link_src] == a) & (ends[cluster.link_dst] == b))
          for a, b in (("d", "edge"), ("edge", "agg"), ("agg", "core"))}  # fmt: skip
    assert up["d"] == nodes
    if up["agg"]:
        assert up["edge"] >= nodes
        assert up["agg"] >= nodes


def test_counts_that_do_not_factor_say_what_would() -> None:
    with pytest.raises(InvalidInput, match=r"nodes: a hypercube needs a power of two such as 4, 8, 16.*, not 12"):
        Cluster.preset("hypercube", nodes=12)
    with pytest.raises(InvalidInput, match="nodes: 13 devices do not make a grid"):
        Cluster.preset("mesh", nodes=13)


def test_factor_and_lines_agree_with_their_definitions() -> None:
    for count in range(2, 200):
        sides = factor(count)
        choices = [(a, count // a) for a in range(2, count) if count % a == 0 and a <= count // a]
        assert sides == (max(choices) if choices else None)
    rows = lines([2, 3, 4], 2)
    assert sorted(rows.ravel().tolist()) == list(range(24))
    assert np.all(np.diff(rows, axis=1) == 6)


@pytest.mark.parametrize(("name", "nodes"), [("torus", 65536), ("ndv2", 8192), ("fat_tree", 16384)])
def test_the_largest_presets_can_be_built(name: str, nodes: int) -> None:
    cluster = Cluster.preset(name, nodes=nodes)
    assert cluster.num_devices >= nodes
    assert cluster.unreachable() is None
