# SPDX-License-Identifier: Apache-2.0
"""Pictures: what they show, that they stay small, and that the SVG is well-formed."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from stretto import Cluster, Link, Node
from stretto.cluster.files import load
from stretto.cluster.presets import presets
from stretto.cluster.shape import coordinates, host_groups, levels, link_classes, ranges
from stretto.report.cluster_drawing import to_svg, to_text

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", [entry.name for entry in presets()])
def test_every_preset_has_a_picture_of_bounded_size(name: str) -> None:
    cluster = Cluster.preset(name)
    text = to_text(cluster)
    assert all(len(line) <= 100 for line in text.splitlines())
    assert text.count("\n") < 90
    assert cluster.name in text
    svg = to_svg(cluster)
    assert len(svg) < 200_000
    root = ElementTree.fromstring(svg)
    words = ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]
    assert cluster.name in words
    for kind in link_classes(cluster)[0]:
        assert kind.rate in text
        assert any(kind.label in word for word in words)


def test_a_ring_is_drawn_like_this() -> None:
    assert to_text(Cluster.preset("ring", nodes=4)) == (
        "ring:4: 4 devices, 8 links; devices pass traffic on\n"
        "\n"
        "╭─ 0 ── 1 ── 2 ── 3 ─╮\n"
        "╰────────────────────╯\n"
        "\n"
        "dim    kind   size   per device   per link   latency   one line of it\n"
        "────────────────────────────────────────────────────────────────────────────────\n"
        "dim0   ring      4     100 GB/s    50 GB/s   0.5 us    0 - 1 - 2 - 3 - back to 0\n"
        "\n"
        "device at (c0, c1, ...): c0\n"
        "\n"
        "channel      rate   latency   links\n"
        "───────────────────────────────────\n"
        "dim0      50 GB/s   0.5 us        8\n"
    )


def test_identical_hosts_are_drawn_once_and_nic_sharing_is_shown() -> None:
    text = to_text(Cluster.preset("dgx2", nodes=16))
    assert "hosts 0..15 (16 alike)" in text
    assert "nic3      gpu6 gpu7  pcie 13 GB/s" in text
    assert "ib  128 NICs of 16 hosts: nic0..7 of each  rdma 9.524 GB/s" in text
    svg = to_svg(Cluster.preset("dgx2", nodes=16))
    assert "+ 14 hosts" in svg


def test_direct_links_stand_in_a_matrix_and_one_way_links_say_so() -> None:
    text = to_text(Cluster.preset("ndv2_teccl", nodes=3))
    assert "gpu0    -   50   25   25   50    .    .    ." in text
    assert "from 3 devices of 3 hosts: gpu0 of each" in text
    assert "to 3 devices of 3 hosts: gpu1 of each" in text
    assert "marker-end" in to_svg(Cluster.preset("ndv2_teccl", nodes=2))
    assert "h0.gpu0 > h1.gpu1" in to_text(Cluster.preset("ndv2_teccl", nodes=2))


def test_unlike_hosts_are_told_apart() -> None:
    groups = host_groups(Cluster.preset("autodist_b11"))
    assert [group.hosts for group in groups] == [(0, 1), (2, 3)]
    assert len(host_groups(Cluster.preset("hgx2"))) == 1


def test_grids_are_recognised_with_and_without_dimensions() -> None:
    mesh, torus = Cluster.preset("mesh", dims=(3, 4, 2)), Cluster.preset("torus", dims=(3, 4, 2))
    for cluster in (mesh, torus):
        where = coordinates(cluster)
        assert where is not None
        assert where[17].tolist() == [2, 1, 1]
    assert coordinates(Cluster.preset("dgx2")) is None
    assert "9 ── 10 ── 11" in to_text(Cluster.preset("mesh", nodes=12))
    assert "wrap around" in to_svg(Cluster.preset("torus", nodes=16))


def test_levels_count_hops_above_the_devices() -> None:
    cluster = Cluster.preset("fat_tree", nodes=16)
    depth = levels(cluster, range(cluster.num_nodes))
    found = {cluster.node_names[n].rstrip("0123456789"): d for n, d in depth.items()}
    assert found == {"d": 0, "edge": 1, "agg": 2, "core": 3}


@pytest.mark.parametrize(
    "source",
    ["torus:1024", "torus:32x32", "fat_tree:1024", "fully_connected:1024", "ndv2:1024", "mesh:1024", "ring:4096"],
)
def test_large_clusters_get_a_summary(source: str) -> None:
    cluster = load(source)
    assert len(to_svg(cluster)) < 60_000
    text = to_text(cluster)
    assert text.count("\n") < 50
    assert all(len(line) <= 100 for line in text.splitlines())


def test_every_device_and_link_of_a_small_cluster_is_in_the_drawing() -> None:
    cluster = Cluster.preset("hgx2", nodes=2)
    root = ElementTree.fromstring(to_svg(cluster))
    words = [element.text for element in root.iter(f"{SVG}text")]
    for name in cluster.node_names:
        assert words.count(name.split(".")[-1]) >= (2 if "." in name else 1)
    strokes = [e for e in root.iter(f"{SVG}path") if e.get("stroke-opacity")]
    assert len(strokes) == cluster.num_links // 2


def test_names_are_escaped() -> None:
    cluster = Cluster.build(
        "<b>&", nodes=[Node(name="<x>"), Node(name="&y")], links=[Link(src=0, dst=1, alpha_us=0, gb_per_s=1)]
    )
    svg = to_svg(cluster)
    words = ["".join(e.itertext()) for e in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert {"<b>&", "<x>", "&y"} <= set(words)


def test_clusters_without_links_or_with_one_device_are_drawn_too() -> None:
    for nodes in ([Node(name="a")], [Node(name="a"), Node(name="b", kind="switch", host=0)]):
        cluster = Cluster.build("bare", nodes=nodes, links=[])
        assert "bare" in to_text(cluster)
        assert ElementTree.fromstring(to_svg(cluster)).tag == f"{SVG}svg"


def test_ranges_draw_runs_together() -> None:
    assert ranges(["a0", "a1", "a2", "a4", "b", "a5"]) == "a0..2 a4 b a5"
    assert ranges([]) == ""
