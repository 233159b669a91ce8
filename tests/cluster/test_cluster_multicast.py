# SPDX-License-Identifier: Apache-2.0
"""Switches that multicast: a property of nodes that files, names and digests keep."""

from __future__ import annotations

from pathlib import Path

import pytest

import stretto as st
from stretto.cluster import yaml_form
from stretto.cluster.model import Link, Node
from stretto.errors import InvalidInput


def test_presets_do_not_multicast_unless_asked() -> None:
    plain = st.Cluster.load("dgx2:2")
    assert not plain.multicasts
    copying = st.Cluster.load("dgx2:2+multicast")
    assert copying == plain.with_multicast() != plain
    assert [node.name for node in copying.nodes() if node.multicast] == ["h0.nvswitch", "h1.nvswitch", "ib"]
    assert copying.with_multicast(()) == plain
    some = plain.with_multicast(["ib"])
    assert some.name == "dgx2:2+multicast" and int(some.node_multicast.sum()) == 1 and some != copying


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_files_keep_it(tmp_path: Path, suffix: str) -> None:
    cluster = st.Cluster.load("dgx2:2").with_multicast(["h1.nvswitch"])
    path = tmp_path / f"c{suffix}"
    cluster.save(path)
    assert st.Cluster.load(path) == cluster
    assert path.read_text().count("multicast: true" if suffix == ".yaml" else '"multicast": true') == 1
    everyone = st.Cluster.load(f"{path}+multicast")
    assert everyone.node_multicast.sum() == 3


def test_one_host_is_repeated_with_its_switches() -> None:
    nodes = [Node(name="a"), Node(name="b"), Node(name="s", kind="switch", multicast=True)]
    links = [Link(src=i, dst=2, alpha_us=1.0, gb_per_s=1.0) for i in (0, 1)]
    box = st.Cluster.build("box", nodes=nodes, links=links)
    from stretto.cluster.replicate import NicPort, replicate

    two = replicate(box, 2, {2: NicPort(gb_per_s=1.0, alpha_us=1.0, channel="rdma")}, name="two")
    assert [node.name for node in two.nodes() if node.multicast] == ["h0.s", "h1.s"]


def test_devices_and_unknown_switches_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"nodes\[0\].multicast: only switches and NICs multicast"):
        st.Cluster.build("x", nodes=[Node(name="a", multicast=True)], links=[])
    data = {"stretto": "cluster", "version": 1, "name": "x", "links": []}
    with pytest.raises(InvalidInput, match=r"\$.nodes\[0\].multicast: only switches and NICs multicast"):
        yaml_form.read(data | {"nodes": [{"kind": "device", "multicast": True, "names": "a"}]}, "x")
    with pytest.raises(InvalidInput, match="no switch"):
        st.Cluster.preset("ring", nodes=4).with_multicast()
    with pytest.raises(InvalidInput, match="nvswitch"):
        st.Cluster.load("dgx2").with_multicast(["nvswitc"])
