# SPDX-License-Identifier: Apache-2.0
"""Dimensions are found in the links of regular networks, and nowhere else."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

import stretto as st
from stretto.cluster.grid import regular
from stretto.dimensions.discovery import discover
from stretto.lab import Lab

DRAWN = 40
KINDS = ("ring", "fully_connected", "switch")


def drawn(draw: random.Random) -> st.Cluster:
    """A network of two to four dimensions, which does not say so."""
    while True:
        dims = [
            st.Dimension(
                kind=draw.choice(KINDS), size=draw.randint(2, 6), gb_per_s=draw.choice([10.0, 25.0, 50.0, 200.0]),
                alpha_us=draw.choice([0.5, 1.0, 3.0]),
            )
            for _ in range(draw.randint(2, 4))
        ]  # fmt: skip
        if math.prod(dim.size for dim in dims) <= 48:
            return regular("drawn", dims)


def hidden(cluster: st.Cluster) -> st.Cluster:
    return replace(cluster, dimensions=())


def said(dims: tuple[st.Dimension, ...]) -> list[tuple[str, int, float, float]]:
    """A ring of two or three devices is fully connected."""
    return [
        ("fully_connected" if dim.kind == "ring" and dim.size <= 3 else dim.kind, dim.size, dim.gb_per_s, dim.alpha_us)
        for dim in dims
    ]


@pytest.mark.parametrize("seed", range(DRAWN))
def test_the_dimensions_of_regular_networks_are_found(seed: int) -> None:
    cluster = drawn(random.Random(seed))
    assert said(discover(hidden(cluster))) == said(cluster.dimensions)


@pytest.mark.parametrize("seed", range(10))
def test_rates_that_differ_as_measured_ones_do_are_the_same(seed: int) -> None:
    cluster = drawn(random.Random(seed))
    noise = np.random.default_rng(seed).uniform(0.97, 1.03, cluster.num_links)
    found = discover(hidden(replace(cluster, link_gb_per_s=cluster.link_gb_per_s * noise)))
    assert [dim.size for dim in found] == [dim.size for dim in cluster.dimensions]
    for one, other in zip(found, cluster.dimensions, strict=True):
        assert one.gb_per_s == pytest.approx(other.gb_per_s, rel=0.05)


@pytest.mark.parametrize("seed", range(10))
def test_a_network_with_one_slow_link_has_none(seed: int) -> None:
    cluster = drawn(random.Random(seed))
    rates = cluster.link_gb_per_s.copy()
    rates[random.Random(seed).randrange(len(rates))] *= 0.5
    assert discover(hidden(replace(cluster, link_gb_per_s=rates))) == ()


@pytest.mark.parametrize("name", ["ndv2:2", "ring:8", "torus:1x6", "themis_2d_sw_sw"])
def test_other_clusters_have_none(name: str) -> None:
    assert discover(hidden(st.Cluster.load(name))) == ()


def test_ranks_that_share_an_uplink_share_its_rate() -> None:
    found = discover(Lab(hosts=2, ranks_per_host=4, uplinks={"rdma": "400mbit", "eth": "200mbit"}).cluster())
    assert [(dim.kind, dim.size) for dim in found] == [("switch", 4), ("switch", 2)]
    assert found[1].gb_per_s == pytest.approx(0.05 / 4)
    dealt = discover(Lab(hosts=2, ranks_per_host=4, uplinks={"eth": "200mbit"}, order="interleaved").cluster())
    assert [(dim.size, dim.gb_per_s < 1) for dim in dealt] == [(2, True), (4, False)]
    assert discover(Lab(hosts=3, ranks_per_host=2, uplinks={"eth": "1gbit,1gbit,100mbit"}).cluster()) == ()
