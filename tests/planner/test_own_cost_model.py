# SPDX-License-Identifier: Apache-2.0
"""A cost model of somebody else's: what it says is checked as far as it can be, and plans say what only it knows."""

from __future__ import annotations

import math

import pytest

import stretto as st
from stretto.algorithms import Algorithm, register_algorithm
from stretto.algorithms import registry as algorithm_registry
from stretto.algorithms.ring import ALGORITHM as RING
from stretto.planner import Cost, Motion, SimulatedCosts
from stretto.planner.algebra.recipes import MotifRequest, library


class OwnCosts:
    """All-reduces by one algorithm in a fixed time; all others are simulated."""

    def __init__(self, cluster: st.Cluster, name: str, us: float) -> None:
        self.cluster, self.name, self.us = cluster, name, us
        self.others = SimulatedCosts(cluster)

    def algorithms(self, motion: Motion, nbytes: float) -> list[str]:
        return [self.name] if motion.kind == "all_reduce" else self.others.algorithms(motion, nbytes)

    def cost(self, motion: Motion, nbytes: float, algorithm: str, *, exact: bool = False) -> Cost:
        if motion.kind != "all_reduce":
            return self.others.cost(motion, nbytes, algorithm, exact=exact)
        return Cost(us=self.us + nbytes / 1e6, source="formula: mine")


def planned(name: str, us: float) -> st.Plan:
    cluster = st.Cluster.preset("dgx_h100", nodes=1)
    step = st.workloads.gpt("125m", ranks=8)
    return st.plan(step, cluster, costs=OwnCosts(cluster, name, us), steps=5).plan


def test_a_plan_by_an_algorithm_that_nothing_here_knows_says_so() -> None:
    notes = [note for note in planned("magic", 1.0).notes if "magic" in note]
    assert len(notes) == 1 and "our executor cannot carry it out" in notes[0]
    assert not any("no algorithm is called" in note for note in planned("ring", 1.0).notes)


@pytest.mark.parametrize("us", [-5.0, math.nan, math.inf])
def test_a_cost_that_is_no_time_is_refused(us: float) -> None:
    with pytest.raises(st.InvalidInput, match=r"us: the cost of a motif must be a number >= 0, not .*formula: mine"):
        planned("ring", us)


def test_an_algorithm_that_was_registered_late_is_a_recipe() -> None:
    ask = MotifRequest(kind="all_gather", group=(0, 1, 2))
    assert "late_ring" not in library(ask)
    register_algorithm(
        Algorithm(name="late_ring", collectives=RING.collectives, build=RING.build, summary="late", where="anywhere")
    )
    try:
        assert "late_ring" in library(ask)
    finally:
        algorithm_registry._OTHERS.forget("late_ring")
    assert "late_ring" not in library(ask)
