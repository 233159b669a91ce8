# SPDX-License-Identifier: Apache-2.0
"""NCCL's ring and tree on DGX-like clusters: the layout of NCCL's own sources, and an even load of the NICs."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from stretto import Cluster, algorithm, simulate
from stretto.algorithms.nccl_tree import host_tree
from stretto.algorithms.orders import rails

BOXES = ("dgx2", "dgx_a100", "dgx_h100")


def nic_bytes(source: str, name: str, nbytes: float) -> tuple[Cluster, NDArray[np.float64], float]:
    cluster = Cluster.load(source)
    program = algorithm(name, "all_reduce", cluster.num_devices, cluster=cluster)
    timeline = simulate(program, cluster, nbytes=nbytes)
    leaving = (cluster.node_host[cluster.link_src] >= 0) & (cluster.node_host[cluster.link_dst] < 0)
    return cluster, timeline.link_bytes[leaving], timeline.total_us


@pytest.mark.parametrize("hosts", [2, 3, 4])
@pytest.mark.parametrize("box", BOXES)
def test_every_nic_carries_one_ring(box: str, hosts: int) -> None:
    cluster, sent, total_us = nic_bytes(f"{box}:{hosts}", "nccl_ring", 64e6)
    n = cluster.num_devices
    share = 2 * (n - 1) / n * 64e6 / rails(cluster, range(n))
    assert sent == pytest.approx(np.full(8 * hosts, share))
    slowest = cluster.link_gb_per_s[np.isin(cluster.link_dst, cluster.link_src)].min()
    least_us = share / slowest / 1e3
    assert least_us <= total_us <= 1.1 * least_us + 4 * n


@pytest.mark.parametrize("box", BOXES)
def test_the_trees_of_a_box_pair_load_its_nics_alike(box: str) -> None:
    _, sent, _ = nic_bytes(f"{box}:2", "nccl_tree", 64e6)
    # Half of the trees have their root on either host, so a NIC sends its share of the data once up and once down.
    assert sent == pytest.approx(np.full(16, 64e6 / 8))


def test_the_tree_over_hosts_is_that_of_nccls_sources() -> None:
    # The figure in src/graph/trees.cc: 14 hosts.
    children: dict[int, list[int]] = {}
    parent, child = host_tree(14)
    for host, above in enumerate(parent.tolist()):
        children.setdefault(above, []).append(host)
    assert children == {-1: [0], 0: [8], 8: [4, 12], 4: [2, 6], 12: [10, 13], 2: [1, 3], 6: [5, 7], 10: [9, 11]}
    assert [child[host] for host in (1, 3, 4, 8, 12, 13)] == [0, 1, 0, 1, 1, 1]


@pytest.mark.parametrize("count", range(1, 20))
def test_a_host_is_a_leaf_in_one_of_the_two_trees(count: int) -> None:
    program = algorithm("nccl_tree", "all_reduce", count, hosts=[1] * count, chunks=1)
    for lane in (0, 1):
        up = (program.lane == lane) & program.reduce
        assert len(set(program.src[up].tolist())) == count - 1
        assert np.count_nonzero(up) == count - 1
    inner = [set(program.dst[(program.lane == lane) & program.reduce].tolist()) for lane in (0, 1)]
    # With an odd number of hosts one host has children in both trees.
    assert len(inner[0] & inner[1]) <= count % 2
