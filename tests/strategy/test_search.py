# SPDX-License-Identifier: Apache-2.0
"""Algorithm 1 on simulated iterations, and on runs that fail or lie."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from stretto.cluster import Cluster
from stretto.errors import Infeasible, InvalidInput
from stretto.strategy import ModelSpec, Strategy, zoo
from stretto.strategy.builders import BUILDERS, build
from stretto.strategy.experience import Experience
from stretto.strategy.requests import Arm, Reference
from stretto.strategy.search import BUILT, StrategyResult, StrategyTrial, search
from stretto.strategy.simulate import iteration_us

MODEL = zoo.model("ncf_dense", scale=0.2)
CLUSTER = Cluster.preset("autodist_b5")


def simulated(strategy: Strategy) -> float:
    return iteration_us(strategy, MODEL, CLUSTER)


def found(trials: int = 12, **options: int | str | bool) -> StrategyResult:
    # The Gaussian process learns in a fraction of the time, and what is tested here is the search around it.
    return search(MODEL, CLUSTER, simulated, trials=trials, **{"ranker": "gaussian"} | options)  # type: ignore[arg-type]


def test_it_is_never_slower_than_all_reduce_and_spends_its_trials() -> None:
    result = found(16)
    assert len(result.trials) == 16
    assert result.usual_us == simulated(build("all_reduce", MODEL, CLUSTER))
    assert result.best_us < result.usual_us
    assert simulated(result.best) == result.best_us
    result.best.check(MODEL)
    assert result.best.is_lossless


def test_it_beats_the_guided_sampler_alone_on_the_same_budget() -> None:
    learned = [found(20, seed=seed).best_us for seed in range(2)]
    drawn = [found(20, seed=seed, method="random").best_us for seed in range(2)]
    assert sum(learned) < sum(drawn)


def test_the_same_seed_gives_the_same_search() -> None:
    first, second = found(10, seed=4), found(10, seed=4)
    assert [trial.strategy for trial in first.trials] == [trial.strategy for trial in second.trials]


def test_no_strategy_is_tried_twice_but_to_compare_it() -> None:
    result = found(16)
    tried = [trial.strategy.nodes for trial in result.trials]
    assert len(set(tried)) == len(tried)
    assert result.decision is not None and len(result.finalists) == 4
    assert all(any(arm is trial.strategy for trial in result.trials) for _, arm in result.finalists)


def test_different_builders_come_first_with_a_quarter_of_the_trials() -> None:
    origins = [trial.origin for trial in found(20).trials]
    names = [origin.partition(",")[0] for origin in origins]
    assert names[0] == "all_reduce" and set(names[:5]) <= set(BUILDERS) and "sampled" in names[5:]
    assert len(set(origins[:5])) == 5


def test_a_later_search_begins_with_what_an_earlier_one_found() -> None:
    taught = found(16)
    assert taught.lesson is not None
    past = Experience().plus(taught.lesson)
    other, there = zoo.model("ncf_dense", scale=0.1), Cluster.preset("autodist_b7")
    result = search(other, there, lambda each: iteration_us(each, other, there), trials=8, experience=past, confirm=0)
    assert result.trials[1].origin == f"as for {MODEL.name}"
    assert result.trials[1].iteration_us < result.usual_us


def test_the_recurrent_model_searches_too() -> None:
    result = found(10, ranker="recurrent", confirm=0)
    assert result.best_us < result.usual_us
    with pytest.raises(InvalidInput, match="recurrent, gaussian"):
        found(2, ranker="transformer")


def test_with_enough_trials_it_is_never_slower_than_the_best_builder() -> None:
    best = min(simulated(build(name, MODEL, CLUSTER, **options)) for name, options in BUILT)
    assert found(2 * len(BUILT)).best_us <= best


def test_a_lucky_run_does_not_win_when_repeated() -> None:
    seen: list[Strategy] = []

    def lucky(strategy: Strategy) -> float:
        again = any(strategy.nodes == other.nodes for other in seen)
        seen.append(strategy)
        return 1.0 if len(seen) == 4 and not again else simulated(strategy)

    result = search(MODEL, CLUSTER, lucky, trials=16, ranker="gaussian")
    assert result.trials[3].iteration_us == 1.0 and result.best_us > 1.0
    assert result.best_us == simulated(result.best)


def test_strategies_that_do_not_run_are_passed_over() -> None:
    def fragile(strategy: Strategy) -> float:
        if any(sync.kind == "sharded" for node in strategy.nodes for sync in (node.sync, *node.parts)):
            raise Infeasible("no sharding here")
        return simulated(strategy)

    heard: list[StrategyTrial] = []
    result = search(MODEL, CLUSTER, fragile, trials=20, ranker="gaussian", on_trial=heard.append)
    assert len(heard) == 20 and math.isfinite(result.best_us)
    assert all(trial.why == "no sharding here" for trial in heard if math.isinf(trial.iteration_us))


def test_when_nothing_runs_the_reason_is_given() -> None:
    def broken(strategy: Strategy) -> float:
        raise Infeasible("the job left no result: exit code 1")

    with pytest.raises(Infeasible, match="no strategy ran: the job left no result"):
        search(MODEL, CLUSTER, broken, trials=3)


class Machine:
    """A bench with places for several, where DDP takes a time of its own and everything varies."""

    def __init__(self, ddp_us: dict[float, float], places: int = 1) -> None:
        self.ddp_us, self.places = ddp_us, places
        self.sizes: list[int] = []
        self._random = random.Random(1)

    def run_all(self, arms: Sequence[Arm]) -> list[float | Infeasible]:
        self.sizes.append(len(arms))
        found: list[float | Infeasible] = []
        for arm in arms:
            if isinstance(arm, Reference) and arm.bucket_mb not in self.ddp_us:
                found.append(Infeasible("DDP does not run"))
                continue
            time_us = self.ddp_us[arm.bucket_mb] if isinstance(arm, Reference) else simulated(arm)
            found.append(time_us * self._random.uniform(0.98, 1.02))
        return found

    def rounds(self, arms: Sequence[Arm], rounds: int) -> list[list[float] | Infeasible]:
        turns = [self.run_all(arms) for _ in range(rounds)]
        return [[time for time in each if isinstance(time, float)] for each in zip(*turns, strict=True)]


def test_several_at_once_are_tried_together() -> None:
    bench = Machine({}, places=6)
    search(MODEL, CLUSTER, bench, trials=14, ranker="gaussian", confirm=0)
    assert sum(bench.sizes) == 14 and max(bench.sizes) == 6


def test_ddp_is_kept_where_nothing_is_faster_and_its_best_bucket_is_known() -> None:
    bench = Machine({25.0: 900.0, 1.0: 500.0, 4.0: 700.0})
    references = [Reference(bucket_mb=mb) for mb in (25.0, 0.25, 1.0, 4.0)]
    result = search(MODEL, CLUSTER, bench, trials=8, references=references)
    assert result.kept == Reference(bucket_mb=1.0)
    assert result.best.nodes == build("all_reduce", MODEL, CLUSTER, bucket_mb=1.048576, first_mb=1.048576).nodes
    assert result.best_us == pytest.approx(500.0, rel=0.05)
    assert dict(result.references)[Reference(bucket_mb=0.25)] == math.inf
    assert [arm for _, arm in result.finalists[:2]] == [Reference(), Reference(bucket_mb=1.0)]
    assert len(result.times(Reference())) >= 4


def test_ddp_is_left_for_what_is_faster_with_confidence() -> None:
    result = search(MODEL, CLUSTER, Machine({25.0: 1e9}), trials=8, references=[Reference()])
    assert result.kept is None and result.decision is not None and result.decision.gain(0) > 1.5


def test_the_curve_falls_and_hits_are_counted() -> None:
    result = found(12, method="random")
    curve = result.curve()
    assert curve == sorted(curve, reverse=True) and curve[-1] == result.best_us
    assert result.hits(math.inf) == 1.0 and result.hits(0.0) == 0.0


def test_a_model_of_one_variable_ends_when_there_is_nothing_more_to_try() -> None:
    from stretto.strategy import Variable

    model = ModelSpec(name="one", variables=(Variable(name="w", shape=(4,)),))
    result = search(model, 2, lambda strategy: 1.0, trials=200, ranker="gaussian")
    assert len(result.trials) < 200


@pytest.mark.parametrize(("options", "message"), [
    ({"trials": 0}, "trials: must be 1..100000, not 0"),
    ({"confirm": -1}, "confirm: must be 0..1000 rounds, not -1"),
    ({"method": "luck"}, "unknown method 'luck'; choose from: learned, random"),
    ({"staleness": 99}, "staleness: must be 0..16, not 99"),
])  # fmt: skip
def test_bad_options_are_refused(options: dict[str, int | str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        found(**options)  # type: ignore[arg-type]
