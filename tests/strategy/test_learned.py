# SPDX-License-Identifier: Apache-2.0
"""The learned ranking: what it starts from, what trials teach it, and how far it is trusted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stretto.strategy.cost import Floats
from stretto.strategy.learned import Ranker, fidelity, kendall_tau


def made(count: int, seed: int, *, noise: float = 0.0) -> tuple[list[Floats], list[float]]:
    """Strategies with an estimate that knows half of the truth."""
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(count, 6))
    speed = features[:, 1] - 0.8 * features[:, 2] + 0.5 * features[:, 3]
    estimate = -features[:, 1] + rng.normal(size=count)
    vectors = [np.array([estimate[at], *features[at]]) for at in range(count)]
    times = np.exp(-0.3 * speed + noise * rng.normal(size=count)) * 1e5
    return vectors, times.tolist()


def test_without_trials_it_is_the_estimate() -> None:
    vectors, _ = made(10, 0)
    assert np.argsort(Ranker().score(vectors)).tolist() == np.argsort([-v[0] for v in vectors]).tolist()


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_twenty_trials_teach_it_to_rank_what_it_has_not_seen(noise: float) -> None:
    vectors, times = made(60, 3, noise=noise)
    ranker = Ranker()
    before = kendall_tau(ranker.score(vectors[20:]).tolist(), times[20:])
    ranker.fit(vectors[:20], times[:20])
    after = kendall_tau(ranker.score(vectors[20:]).tolist(), times[20:])
    assert after > before + 0.1 and after > 0.55


def test_more_trials_make_it_surer_near_them() -> None:
    vectors, times = made(30, 1)
    ranker = Ranker()
    unknown = ranker.doubt(vectors)
    ranker.fit(vectors, times)
    assert (ranker.doubt(vectors) < unknown).all()
    far = vectors[0] + 50.0
    assert ranker.doubt([far])[0] > ranker.doubt([vectors[0]])[0]


def test_only_the_order_and_ratios_of_times_matter() -> None:
    vectors, times = made(15, 2)
    first, second = Ranker(), Ranker()
    first.fit(vectors, times)
    second.fit(vectors, [1000.0 * time for time in times])
    assert first.score(vectors) == pytest.approx(second.score(vectors), abs=1e-6)


def test_features_that_never_vary_do_no_harm() -> None:
    vectors, times = made(12, 4)
    constant = [np.append(v, 7.0) for v in vectors]
    ranker = Ranker()
    ranker.fit(constant, times)
    assert np.isfinite(ranker.score(constant)).all()


def test_equal_trials_are_equal() -> None:
    ranker = Ranker()
    vector = np.array([1.0, 2.0])
    ranker.fit([vector, vector, vector + 1], [5.0, 5.0, 5.0])
    assert np.isfinite(ranker.score([vector])).all()


def test_the_fidelity_level_is_where_ranking_begins_to_fail() -> None:
    # The slow half is ranked right, the fast half backwards.
    scores = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    times = [80.0, 70.0, 60.0, 50.0, 10.0, 20.0, 30.0, 40.0]
    level = fidelity(scores, times)
    assert 5.0 <= level < 8.0
    assert fidelity(scores, times[::-1]) == -math.inf
    assert fidelity(scores, sorted(times, reverse=True)) == 8.0
    assert fidelity([1.0], [1.0]) == -math.inf


def test_kendalls_tau_of_known_orders() -> None:
    assert kendall_tau([1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]) == 1.0
    assert kendall_tau([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]) == -1.0
    assert kendall_tau([1.0, 2.0, 3.0], [2.0, 3.0, 1.0]) == pytest.approx(1 / 3)
    assert kendall_tau([1.0, 1.0], [1.0, 2.0]) == 0.0
