# SPDX-License-Identifier: Apache-2.0
"""Which sets of channels motifs can be bound to."""

from __future__ import annotations

import numpy as np
import pytest

from stretto import Cluster
from stretto.errors import Infeasible, InvalidInput
from stretto.planner.costs.channels import (
    bindings,
    bindings_for,
    connected,
    default_binding,
    require_connected,
    restrict,
    scope_of,
)


def names(cluster: str) -> list[str]:
    return [binding.name for binding in bindings(Cluster.load(cluster))]


def test_intra_and_inter_channels_of_an_hgx2_bind_separately() -> None:
    found = {b.name: (b.intra, b.inter, b.cpu_driven) for b in bindings(Cluster.preset("hgx2", nodes=4))}
    assert found["nvlink+rdma"] == (("nvlink",), ("rdma",), False)
    assert found["pcie+ethernet"] == (("pcie",), ("pcie", "ethernet"), True)
    assert found["nvlink"] == (("nvlink",), (), False)
    assert found["rdma"] == ((), ("rdma",), False)
    assert {"nvlink+pcie+ethernet", "pcie+rdma", "pcie"} < set(found)


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("hgx2:1", ["nvlink", "pcie"]),
        ("dgx2:1", ["nvlink"]),
        ("dgx2:2", ["nvlink+pcie+rdma", "nvlink", "pcie+rdma"]),
        ("dgx_h100:2", ["nvlink+pcie+rdma", "nvlink", "pcie+rdma"]),
        ("ndv2:1", ["nvlink+pcie", "nvlink", "pcie"]),
        ("torus:9", ["dim0+dim1"]),
        ("fat_tree:16", ["link"]),
    ],
)
def test_bindings_follow_from_links_and_hosts(cluster: str, expected: list[str]) -> None:
    assert names(cluster) == expected


@pytest.mark.parametrize("cluster", ["hgx2:2", "dgx2:2", "ndv2:2", "dgx_a100:2", "p3_8xlarge:2", "autodist_b9:2"])
def test_the_first_binding_is_what_the_routes_take_and_every_binding_restricts(cluster: str) -> None:
    whole = Cluster.load(cluster)
    assert bindings(whole)[0] == default_binding(whole)
    for binding in bindings(whole):
        part = restrict(whole, binding.channels)
        assert part.channels == binding.channels
        assert part.node_names == whole.node_names
        hosts = whole.node_host[: whole.num_devices]
        for host in set(hosts.tolist()) if not binding.inter else ():
            assert connected(whole, np.flatnonzero(hosts == host).tolist(), binding.channels)
        assert set(binding.channels) == {*binding.intra, *binding.inter}


def test_groups_hold_only_the_fabric_they_need() -> None:
    hgx2 = Cluster.preset("hgx2", nodes=4)
    assert [b.name for b in bindings_for(hgx2, [range(8), range(8, 16)])] == ["nvlink", "pcie"]
    assert [b.name for b in bindings_for(hgx2, [(0, 8, 16), (1, 9, 17)])] == ["rdma", "pcie+ethernet"]
    assert bindings_for(hgx2, [range(32)])[0].name == "nvlink+rdma"
    # On rails a GPU's traffic does not pass through another GPU; across rails it does.
    h100 = Cluster.preset("dgx_h100", nodes=2)
    assert bindings_for(h100, [(0, 8)])[0].name == "pcie+rdma"
    assert [b.name for b in bindings_for(h100, [(0, 9)])] == ["nvlink+pcie+rdma"]


def test_scope_is_inside_hosts_between_them_or_both() -> None:
    hgx2 = Cluster.preset("hgx2", nodes=2)
    assert scope_of(hgx2, [range(8)]) == "intra"
    assert scope_of(hgx2, [(0, 8)]) == "inter"
    assert scope_of(hgx2, [(0, 1, 8)]) == "mixed"
    assert scope_of(hgx2, [(0, 1), (2, 8)]) == "mixed"


def test_a_restricted_cluster_routes_over_what_remains() -> None:
    whole = Cluster.preset("hgx2", nodes=2)
    part = restrict(whole, ["ethernet", "pcie"])
    assert set(part.channels) == {"pcie", "ethernet"}
    route = part.routes(0, 15)[0]
    assert {part.link(at).channel for at in route} == {"pcie", "ethernet"}
    assert part.incast_curves == whole.incast_curves
    assert np.count_nonzero(part.link_incast >= 0) == 4
    assert restrict(whole, whole.channels) is whole


def test_channels_that_join_nothing_are_refused_in_one_line() -> None:
    hgx2 = Cluster.preset("hgx2", nodes=2)
    with pytest.raises(Infeasible, match=r"^channels: ethernet join no two devices of hgx2:2$"):
        restrict(hgx2, ["ethernet"])
    with pytest.raises(Infeasible, match=r"^channels: nvlink do not join h0.gpu0 and h1.gpu0 of hgx2:2$"):
        require_connected(hgx2, [(0, 8)], ["nvlink"])
    with pytest.raises(InvalidInput, match="unknown channel 'nvlnk'; choose from: nvlink"):
        restrict(hgx2, ["nvlnk"])
    with pytest.raises(InvalidInput, match=r"has only devices 0\.\.15"):
        scope_of(hgx2, [(0, 16)])
