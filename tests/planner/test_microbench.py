# SPDX-License-Identifier: Apache-2.0
"""The shapes of SYNDICATE's figures 16 to 18."""

from __future__ import annotations

import pytest
from judges.microbenchmarks import Figure, all_reduce_plans, all_to_all_plans, overlapped_pair

from stretto import Cluster
from stretto.errors import InvalidInput
from stretto.planner.costs.costs import SimulatedCosts
from stretto.units import GB, KB, MB


@pytest.fixture(scope="module")
def costs() -> SimulatedCosts:
    return SimulatedCosts(Cluster.preset("hgx2", nodes=16))


def test_the_tree_wins_small_all_reduces_and_the_ring_large_ones(costs: SimulatedCosts) -> None:
    figure = all_reduce_plans(costs, sizes=[16 * KB, 128 * KB, 16 * MB, 256 * MB])
    assert figure.winners == ("tree", "tree", "ring", "ring")
    assert figure.holds
    assert figure.says.endswith("as in the paper")


def test_one_two_and_four_way_splining_wins_small_medium_and_large_all_to_alls(costs: SimulatedCosts) -> None:
    figure = all_to_all_plans(costs, sizes=[128 * KB, 512 * KB, 2 * MB, 64 * MB, GB])
    assert figure.winners == ("1-way", "1-way", "2-way", "4-way", "4-way")
    assert figure.holds


def test_disjoint_channels_win_for_the_overlapped_pair(costs: SimulatedCosts) -> None:
    figure = overlapped_pair(costs, sizes=[8 * MB])
    assert figure.holds
    assert figure.winners == ("all-reduce on nvlink+rdma, all-to-all on pcie+ethernet",)
    assert figure.note.startswith("from ")
    assert len(figure.rows()) == 2


def test_a_shape_that_comes_back_does_not_hold() -> None:
    times = {"a": (1.0, 2.0, 1.0), "b": (2.0, 1.0, 2.0)}
    figure = Figure(name="f", sizes=(1, 2, 3), times_us=times, expected=("a", "b"))
    assert not figure.holds
    assert "not as in the paper" in figure.says


def test_a_cluster_with_one_set_of_channels_has_no_pair() -> None:
    with pytest.raises(InvalidInput, match="no two sets of channels are disjoint"):
        overlapped_pair(SimulatedCosts(Cluster.preset("dgx2")))
