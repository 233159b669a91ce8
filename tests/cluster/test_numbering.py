# SPDX-License-Identifier: Apache-2.0
"""Orders of a host's GPUs, on hosts that are shuffled and on drawn ones, beside trying all orders."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from stretto.cluster import Cluster, Link, Node
from stretto.cluster.numbering import FAR, numbering, structure, visible_devices
from stretto.errors import InvalidInput

DATA = Path(__file__).parent / "data"
HOSTS = ("nccl_dgx1.xml", "nccl_hgx_h100.xml", "smi_dgx1.txt", "smi_dgx_a100.txt", "smi_pcie.txt")


def shuffled(host: Cluster, order: NDArray[np.int64]) -> Cluster:
    """The same host with its GPUs in another order: number i is what was `order[i]`."""
    new = np.arange(host.num_nodes)
    new[order] = np.arange(len(order))
    nodes = [host.node(int(order[at]) if at < len(order) else at) for at in range(host.num_nodes)]
    links = [
        Link(src=int(new[x.src]), dst=int(new[x.dst]), alpha_us=x.alpha_us, gb_per_s=x.gb_per_s, channel=x.channel)
        for x in host.links()
    ]
    return Cluster.build("shuffled", nodes=nodes, links=links)


def looks(host: Cluster, order: tuple[int, ...]) -> tuple[list[float], list[int], list[tuple[int, int]]]:
    """All that tells the host's GPUs apart, in an order."""
    found = structure(host)
    at = np.ix_(order, order)
    return found.direct[at].ravel().tolist(), found.near[at].ravel().tolist(), [found.nics[gpu] for gpu in order]


@pytest.mark.parametrize("source", HOSTS)
def test_a_shuffled_host_is_put_in_order_again(source: str) -> None:
    host = Cluster.load(DATA / source)
    for seed in range(6):
        other = shuffled(host, np.random.default_rng(seed).permutation(host.num_devices))
        order = numbering(other, host)
        assert order is not None
        assert looks(other, order) == looks(host, tuple(range(host.num_devices)))


def drawn(seed: int) -> Cluster:
    """A host of up to 5 GPUs below switches of one socket or two, with NICs and links of their own."""
    rng = np.random.default_rng(seed)
    gpus, switches, sockets, nics = (int(rng.integers(low, high)) for low, high in ((2, 6), (1, 4), (1, 3), (0, 3)))
    nodes = [Node(name=f"gpu{at}", host=0) for at in range(gpus)]
    nodes += [Node(name=f"nic{at}", kind="nic", host=0) for at in range(nics)]
    nodes += [Node(name=f"node{at}", kind="switch", host=0) for at in range(switches + sockets)]
    first = gpus + nics
    ends = [(at, first + int(rng.integers(switches))) for at in range(first)]
    ends += [(first + at, first + switches + int(rng.integers(sockets))) for at in range(switches)]
    ends += [(first + switches, first + switches + 1)] if sockets > 1 else []
    pairs = [(a, b, "pcie", 13.0) for a, b in ends]
    pairs += [
        (a, b, "nvlink", float(rng.choice([25.0, 50.0]))) for a in range(gpus) for b in range(a) if rng.random() < 0.5
    ]
    links = [
        Link(src=x, dst=y, alpha_us=0.0, gb_per_s=rate, channel=channel)
        for a, b, channel, rate in pairs
        for x, y in ((a, b), (b, a))
    ]
    return Cluster.build("drawn", nodes=nodes, links=links)


@pytest.mark.parametrize("seed", range(12))
def test_drawn_hosts_beside_all_orders(seed: int) -> None:
    host, other = drawn(seed), drawn(seed + 1000)
    count = host.num_devices
    plain = looks(host, tuple(range(count)))
    same = [order for order in permutations(range(count)) if looks(host, order)[:2] == plain[:2]]
    best = min(([structure(host).nics[gpu][0] for gpu in order], order) for order in same)
    order = numbering(host)
    assert order is not None
    assert [structure(host).nics[gpu][0] for gpu in order] == best[0]
    assert looks(host, order)[:2] == plain[:2]
    there = other.num_devices == count and any(looks(other, order) == plain for order in permutations(range(count)))
    assert (numbering(other, host) is not None) == there


def test_the_gpus_beside_the_nic_come_first_and_the_links_stay() -> None:
    host = Cluster.load(DATA / "nccl_dgx1.xml")
    # Only the NIC at the last switch is left, as on NDv2.
    gone = {at for at in range(host.num_nodes) if host.node(at).kind == "nic"} - {host.node_names.index("mlx5_3")}
    kept = [at for at in range(host.num_nodes) if at not in gone]
    new = {old: at for at, old in enumerate(kept)}
    links = [
        Link(src=new[x.src], dst=new[x.dst], alpha_us=x.alpha_us, gb_per_s=x.gb_per_s, channel=x.channel)
        for x in host.links()
        if x.src in new and x.dst in new
    ]
    one = Cluster.build("one NIC", nodes=[host.node(at) for at in kept], links=links)
    order = numbering(one)
    assert order is not None
    assert set(order[:2]) == {6, 7}
    assert looks(one, order)[:2] == looks(one, tuple(range(8)))[:2]
    assert visible_devices(order).startswith(("6,7", "7,6"))


def test_hosts_that_differ_and_clusters_of_several() -> None:
    dgx, hgx = (Cluster.load(DATA / name) for name in ("nccl_dgx1.xml", "nccl_hgx_h100.xml"))
    assert numbering(dgx, hgx) is None
    assert structure(Cluster.preset("fully_connected", nodes=1)).nics[0][0] == FAR
    with pytest.raises(InvalidInput, match="inside one host"):
        numbering(Cluster.preset("ndv2", nodes=2))
