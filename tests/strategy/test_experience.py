# SPDX-License-Identifier: Apache-2.0
"""What one search leaves for the next: the file, habits on other models, and corrections that are borne out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stretto.cluster import Cluster
from stretto.errors import InvalidInput
from stretto.strategy import zoo
from stretto.strategy.experience import MAX_SEARCHES, Experience, Hint, PastSearch, PastTrial
from stretto.strategy.habits import Habit, follow, habit_of
from stretto.strategy.sampler import Sampler

NAMES = tuple(f"f{at}" for at in range(9))
HABIT = Habit(
    classes=(), servers="hosts", groups=2, server_groups=1, two_level=False, by_rate=True, by_host=False, apart=False
)


def past(seed: int, *, slope: float, count: int = 20) -> PastSearch:
    """A search in which estimates were wrong by `slope` times the last feature."""
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(count, len(NAMES)))
    vectors[0] = 0.0
    slower = vectors[:, 0] - slope * vectors[:, -1]
    return PastSearch(
        model=f"m{seed}", devices=4, hosts=2, names=NAMES, usual=tuple(vectors[0].tolist()),
        trials=tuple(
            PastTrial(vector=tuple(vector), slower=float(time), habit=HABIT)
            for vector, time in zip(vectors.tolist(), slower - slower[0], strict=True)
        ),
    )  # fmt: skip


def test_a_file_says_what_was_saved_and_keeps_the_latest(tmp_path: Path) -> None:
    known = Experience()
    for seed in range(MAX_SEARCHES + 2):
        known = known.plus(past(seed, slope=0.5, count=3))
    known.save(tmp_path / "e.json")
    assert Experience.load(tmp_path / "e.json") == known
    assert [known.searches[0].model, len(known.searches)] == ["m2", MAX_SEARCHES]


def test_files_of_others_are_refused_with_the_place(tmp_path: Path) -> None:
    file = tmp_path / "e.json"
    Experience().plus(past(0, slope=0.5, count=3)).save(file)
    plain = json.loads(file.read_text())
    plain["searches"][0]["usual"] = [1.0]
    file.write_text(json.dumps(plain))
    with pytest.raises(InvalidInput, match=r"searches\[0\]: every vector must have the 9 features"):
        Experience.load(file)
    file.write_text("{}x")
    with pytest.raises(InvalidInput, match=r"e\.json"):
        Experience.load(file)


def test_what_was_wrong_before_is_corrected_and_chance_is_not() -> None:
    here, fresh = past(9, slope=0.5), np.random.default_rng(1).normal(size=(50, len(NAMES)))
    right = Hint([past(seed, slope=0.5) for seed in range(6)], here)
    assert right.share > 0.5
    assert np.corrcoef(right(fresh), fresh[:, -1])[0, 1] > 0.8
    mixed = Hint([past(seed, slope=(-1.0) ** seed) for seed in range(6)], here)
    assert mixed.share < 0.2
    assert not Hint([], here)(fresh).any()


@pytest.mark.parametrize("seed", range(6))
def test_a_habit_can_be_followed_anywhere_and_means_the_same_at_home(seed: int) -> None:
    home = Sampler(
        zoo.model("ncf_sparse", scale=0.1), Cluster.preset("autodist_b5"), lossy=True, staleness=2, seed=seed
    )
    recipe, _ = home.sample()
    habit = habit_of(recipe, home)
    again, _ = follow(habit, home)
    assert habit_of(again, home).classes == habit.classes
    for name, there in (("bert_3l", 3), ("vgg16", 1)):
        model = zoo.model(name, scale=0.1)
        _, strategy = follow(habit, Sampler(model, there))
        strategy.check(model)
        assert strategy.is_lossless
