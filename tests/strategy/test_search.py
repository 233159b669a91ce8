"""Algorithm 1 on simulated iterations, and on runs that fail or lie."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from stretto.cluster import Cluster
from stretto.errors import Infeasible, InvalidInput
from stretto.strategy import ModelSpec, Strategy, zoo
from stretto.strategy.builders import build
from stretto.strategy.search import Found, Trial, search
from stretto.strategy.simulate import iteration_us

MODEL = zoo.model("ncf_dense", scale=0.2)
CLUSTER = Cluster.preset("autodist_b5")


def simulated(strategy: Strategy) -> float:
    return iteration_us(strategy, MODEL, CLUSTER)


def found(trials: int = 12, **options: int | str | bool) -> Found:
    return search(MODEL, CLUSTER, simulated, trials=trials, **options)  # type: ignore[arg-type]


def test_it_is_never_slower_than_all_reduce_and_spends_its_trials() -> None:
    result = found(16)
    assert len(result.trials) in (15, 16)
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


def test_no_strategy_is_tried_twice_but_to_confirm_it() -> None:
    result = found(16)
    fresh = [trial.strategy.nodes for trial in result.trials if trial.again < 0]
    assert len(set(fresh)) == len(fresh)
    again = [trial for trial in result.trials if trial.again >= 0]
    assert again and all(trial.strategy == result.trials[trial.again].strategy for trial in again)


def test_a_lucky_run_does_not_win_when_repeated() -> None:
    seen: list[Strategy] = []

    def lucky(strategy: Strategy) -> float:
        again = any(strategy.nodes == other.nodes for other in seen)
        seen.append(strategy)
        return 1.0 if len(seen) == 4 and not again else simulated(strategy)

    result = search(MODEL, CLUSTER, lucky, trials=16)
    runs = [trial for trial in result.trials if trial.number == 3 or trial.again == 3]
    assert len(runs) > 1 and result.best_us > 1.0
    assert result.best_us == simulated(result.best)


def test_strategies_that_do_not_run_are_passed_over() -> None:
    def fragile(strategy: Strategy) -> float:
        if any(sync.kind == "sharded" for node in strategy.nodes for sync in (node.sync, *node.parts)):
            raise Infeasible("no sharding here")
        return simulated(strategy)

    heard: list[Trial] = []
    result = search(MODEL, CLUSTER, fragile, trials=20, on_trial=heard.append)
    assert len(heard) in (18, 19, 20) and math.isfinite(result.best_us)
    assert all(trial.why == "no sharding here" for trial in heard if math.isinf(trial.iteration_us))


def test_when_nothing_runs_the_reason_is_given() -> None:
    def broken(strategy: Strategy) -> float:
        raise Infeasible("the job left no result: exit code 1")

    with pytest.raises(Infeasible, match="no strategy ran: the job left no result"):
        search(MODEL, CLUSTER, broken, trials=3)


def test_several_at_once_are_tried_together() -> None:
    sizes: list[int] = []

    def together(strategies: Sequence[Strategy]) -> list[float | Infeasible]:
        sizes.append(len(strategies))
        return [simulated(strategy) for strategy in strategies]

    search(MODEL, CLUSTER, simulated, run_all=together, at_once=6, trials=14, confirm=0)
    assert sizes == [1, 6, 6, 1]


def test_the_curve_falls_and_hits_are_counted() -> None:
    result = found(12, method="random")
    curve = result.curve()
    assert curve == sorted(curve, reverse=True) and curve[-1] == result.best_us
    assert result.hits(math.inf) == 1.0 and result.hits(0.0) == 0.0


def test_a_model_of_one_variable_ends_when_there_is_nothing_more_to_try() -> None:
    from stretto.strategy import Variable

    model = ModelSpec(name="one", variables=(Variable(name="w", shape=(4,)),))
    result = search(model, 2, lambda strategy: 1.0, trials=200)
    assert len(result.trials) < 200


@pytest.mark.parametrize(("options", "message"), [
    ({"trials": 0}, "trials: must be 1..100000, not 0"),
    ({"method": "luck"}, "unknown method 'luck'; choose from: learned, random"),
    ({"staleness": 99}, "staleness: must be 0..16, not 99"),
])  # fmt: skip
def test_bad_options_are_refused(options: dict[str, int | str], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        found(**options)  # type: ignore[arg-type]
