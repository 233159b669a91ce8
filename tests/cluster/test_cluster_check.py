# SPDX-License-Identifier: Apache-2.0
"""``check``: what is refused and what is only odd."""

from __future__ import annotations

import pytest

from stretto import Cluster, InvalidInput, Link, Node
from stretto.cluster.check import channel_groups, oddities, require_reachable


def cluster_of(*ends: tuple[int, int, float]) -> Cluster:
    nodes = [*(Node(name=n) for n in "abcd"), Node(name="s", kind="switch")]
    links = [Link(src=a, dst=b, alpha_us=0, gb_per_s=rate) for a, b, rate in ends]
    return Cluster.build("odd", nodes=nodes, links=links)


def test_disconnected_devices_are_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"^links: no route from a to b$"):
        require_reachable(cluster_of((2, 3, 1), (3, 2, 1)))


def test_devices_that_only_programs_can_join_are_odd_but_accepted() -> None:
    ring = cluster_of((0, 1, 1), (1, 2, 1), (2, 3, 1), (3, 0, 1))
    require_reachable(ring)
    assert "no route from a to c but through devices, which do not forward (devices_forward is false)" in oddities(ring)


def test_asymmetric_parallel_isolated_and_dead_ends_are_odd() -> None:
    found = oddities(cluster_of((0, 1, 1), (1, 0, 2), (0, 2, 1), (2, 0, 1), (2, 0, 1), (0, 4, 1)))
    assert found == [
        "1 links have no link back: a>s",
        "2 pairs have another rate each way: a>b, a>c",
        "1 pairs have parallel links of one channel: c>a",
        "1 devices have no link: d",
        "1 switches or NICs lead nowhere: s",
    ]


@pytest.mark.parametrize("name", ["ndv2", "dgx2", "hgx2", "dgx_h100", "mi250", "torus", "fat_tree", "themis_2d_sw_sw"])
def test_presets_of_equal_hosts_are_not_odd(name: str) -> None:
    assert oddities(Cluster.preset(name)) == []


def test_unlike_hosts_are_odd() -> None:
    assert oddities(Cluster.preset("autodist_b12")) == ["hosts are of 2 kinds: 0; 1"]


def test_channel_groups_say_what_each_channel_joins() -> None:
    assert channel_groups(Cluster.preset("hgx2", nodes=3)) == {
        "nvlink": [8, 8, 8],
        "pcie": [8, 8, 8],
        "rdma": [24],
        "ethernet": [1] * 24,
    }
    assert channel_groups(Cluster.preset("ring", nodes=300)) == {"dim0": [300]}
