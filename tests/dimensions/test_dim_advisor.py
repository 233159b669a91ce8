# SPDX-License-Identifier: Apache-2.0
"""Who has too much bandwidth, who too little, and where more pays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import Cluster, InvalidInput
from stretto.dimensions import Dim, baseline, dims_of, simulate, stretto
from stretto.dimensions.advisor import JUST_ENOUGH, OVER, UNDER, advise, just_enough, nearest


def switches(*rates: float, size: int = 4) -> list[Dim]:
    return [Dim(kind="switch", size=size, gb_per_s=rate, step_us=0.0) for rate in rates]


@pytest.mark.parametrize(("outer", "verdict"), [(25.0, JUST_ENOUGH), (50.0, OVER), (10.0, UNDER)])
def test_the_papers_three_scenarios(outer: float, verdict: str) -> None:
    advice = advise(switches(100, outer))
    assert [pair.verdict for pair in advice.pairs] == [verdict]
    assert (advice.best_utilization > 0.999) == (verdict != UNDER)
    assert (advice.baseline_utilization > 0.999) == (verdict == JUST_ENOUGH)


def test_an_underprovisioned_pair_is_helped_only_by_its_outer_dimension() -> None:
    inner, outer = advise(switches(100, 10)).increments
    assert not inner.pays
    assert inner.best_speedup == pytest.approx(1.0)
    assert outer.best_speedup > outer.ideal_speedup


def test_the_homogeneous_network_of_the_paper_wastes_750_and_794_gb_per_s_in_the_baseline() -> None:
    dims = dims_of(Cluster.load("themis_3d_sw_sw_sw_homo"))
    advice = advise(dims)
    assert {pair.verdict for pair in advice.pairs} == {OVER}
    # 800 of 2400 Gb/s in the first dimension, 50 in the second, 6.25 in the third, by the paper's rule.
    assert advice.baseline_utilization == pytest.approx((800 + 50 + 6.25) / 2400, rel=0.01)
    assert advice.best_utilization == pytest.approx(1.0)


def test_what_the_advisor_says_the_simulator_confirms() -> None:
    for name in ("themis_2d_sw_sw", "themis_4d_ring_fc_ring_sw"):
        dims = dims_of(Cluster.load(name))
        advice = advise(dims)
        assert simulate(baseline(dims, "all_reduce", 10e9)).utilization == pytest.approx(
            advice.baseline_utilization, rel=0.02
        )
        assert simulate(stretto(dims, "all_reduce", 10e9)).utilization == pytest.approx(
            advice.best_utilization, rel=0.01
        )


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(2, 16), st.floats(1, 1000)), min_size=1, max_size=4), st.floats(1, 1e4))
def test_the_splits_spend_the_budget_and_can_be_used(shape: list[tuple[int, float]], budget: float) -> None:
    dims = [Dim(kind="ring", size=size, gb_per_s=rate, step_us=0.0) for size, rate in shape]
    every = just_enough(dims, budget)
    assert sum(every.gb_per_s) == pytest.approx(budget)
    assert every.baseline_utilization == pytest.approx(1.0)
    near = nearest(dims, budget)
    assert sum(near.gb_per_s) == pytest.approx(budget)
    assert near.best_utilization == pytest.approx(1.0, abs=1e-5)
    for (low, high), rate in zip(advise(dims).usable, near.gb_per_s, strict=True):
        assert low - 1e-6 <= rate / budget <= high + 1e-6


def test_a_network_that_can_be_used_fully_is_left_as_it_is() -> None:
    dims = dims_of(Cluster.load("themis_3d_sw_sw_sw_hetero"))
    assert nearest(dims, 350.0).gb_per_s == pytest.approx([200.0, 100.0, 50.0])


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(InvalidInput, match="budget: must be > 0, not 0"):
        just_enough(switches(1, 1), 0.0)
    with pytest.raises(InvalidInput, match="increment: must be above 0"):
        advise(switches(1, 1), increment=0.0)
    with pytest.raises(InvalidInput, match="at most 6, not 7"):
        advise(switches(*[1.0] * 7))
