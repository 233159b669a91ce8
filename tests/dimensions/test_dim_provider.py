# SPDX-License-Identifier: Apache-2.0
"""The planner's provider of programs over a network's dimensions."""

from __future__ import annotations

import pytest

import stretto as st
from stretto.planner.algebra.recipes import MotifRequest
from stretto.planner.costs.costs import Motion, SimulatedCosts
from stretto.planner.costs.providers import BALANCED, DIM_CHUNKS, DIM_UNITS, providers_for


def ask(kind: str, count: int) -> MotifRequest:
    return MotifRequest(kind=kind, group=tuple(range(count)))


def test_a_cluster_with_dimensions_gets_it_without_any_time_for_synthesis() -> None:
    assert len(providers_for(st.Cluster.load("torus:3x5"))) == 1
    assert providers_for(st.Cluster.load("dgx2:2")) == ()
    assert providers_for(st.Cluster.load("torus:1x1")) == ()


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_its_program_is_the_same_whoever_asks_and_for_whatever_size(kind: str) -> None:
    cluster = st.Cluster.load("torus:3x5")
    made = [
        provider(ask(kind, 15), cluster, nbytes)[BALANCED]()
        for provider in (providers_for(cluster)[0], providers_for(cluster)[0])
        for nbytes in (1e3, 64e6)
    ]
    assert all(each == made[0] for each in made)
    assert BALANCED.endswith(f":{DIM_CHUNKS}")
    assert DIM_UNITS >= 8 * DIM_CHUNKS
    made[0].verify()
    bound = st.lower_bound(made[0].collective, cluster, 64e6).total_us
    assert st.simulate(made[0], cluster, nbytes=64e6).total_us < 1.01 * bound


def test_what_it_cannot_or_should_not_write_is_not_offered() -> None:
    large, small = st.Cluster.load("themis_2d_sw_sw"), st.Cluster.load("torus:4x4")
    assert providers_for(large)[0](ask("all_reduce", 1024), large, 1e8) == {}
    offer = providers_for(small)[0]
    assert list(offer(ask("all_reduce", 16), small, 1e8)) == [BALANCED]
    assert offer(ask("all_to_all", 16), small, 1e8) == {}
    assert offer(ask("all_reduce", 8), small, 1e8) == {}


def test_the_planner_prices_it_beside_the_library() -> None:
    cluster = st.Cluster.load("torus:3x5")
    costs = SimulatedCosts(cluster, providers=providers_for(cluster))
    motion = Motion(kind="all_gather", groups=(tuple(range(15)),), channels=tuple(cluster.channels))
    assert costs.algorithms(motion, 64e6)[-1] == BALANCED
    assert costs.cost(motion, 64e6, BALANCED).us < costs.cost(motion, 64e6, "ring", exact=True).us
