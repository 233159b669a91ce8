# SPDX-License-Identifier: Apache-2.0
"""The paper's models: sizes, memory, the order of the systems; and the planner takes a pipeline as a training step."""

from __future__ import annotations

import pytest

import stretto
from stretto.errors import InvalidInput
from stretto.pipeline import StageCosts, eager_1f1b, interleaved, one_f_one_b
from stretto.pipeline.models import CASES, SYSTEMS, CaseResult, build, case, evaluate
from stretto.pipeline.workload import to_workload
from stretto.workload.catalog.cross_mesh import balanced_cut, crossing, gpt_layers, unet_layers


def test_models_have_the_papers_numbers_of_parameters() -> None:
    assert sum(layer.parameters for layer in gpt_layers()) == pytest.approx(2.6e9, rel=0.08)
    assert sum(layer.parameters for layer in unet_layers()) == pytest.approx(2.1e9, rel=0.02)


def test_stages_are_balanced_and_skips_cross() -> None:
    layers = unet_layers()
    cut = balanced_cut(layers)
    share = sum(layer.flops for layer in layers[:cut]) / sum(layer.flops for layer in layers)
    assert 0.45 < share < 0.55
    assert crossing(layers, cut) == [(32, 32, 672), (16, 16, 1344), (8, 8, 2688)]
    # In the middle every skip connection that is used crosses, and the last output.
    middle = next(at for at, layer in enumerate(layers) if layer.name == "middle.1")
    assert len(crossing(layers, middle)) == 6
    assert crossing(gpt_layers(), 10) == [(1024, 2560)]


def test_earlier_stages_recompute_more_and_all_fits() -> None:
    for what in CASES.values():
        built = build(what)
        first, last = (len(names) / len(layers) for names, layers in zip(built.recomputed, what.stages, strict=True))
        assert first > last
        assert max(evaluate(built, "eager_1f1b").peak_gb) <= 15.0
    assert build(case("utrans")).recomputed[1] == ()


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, CaseResult]]:
    return {name: {system: evaluate(build(what), system) for system in SYSTEMS} for name, what in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_systems_are_in_the_papers_order(results: dict[str, dict[str, CaseResult]], name: str) -> None:
    mine = results[name]
    times = [mine[system].iteration_us for system in ("send_recv", "alpa", "overlap", "eager_1f1b", "stretto")]
    assert times == sorted(times, reverse=True)
    assert mine["broadcast"].iteration_us == pytest.approx(mine["alpa"].iteration_us, rel=0.01)
    assert mine["upper_bound"].iteration_us >= 0.97 * mine["eager_1f1b"].iteration_us
    for result in mine.values():
        assert result.bound_us <= result.iteration_us * (1 + 1e-9)


def test_ratios_are_about_the_papers(results: dict[str, dict[str, CaseResult]]) -> None:
    def ratio(name: str, slow: str, fast: str) -> float:
        return results[name][slow].iteration_us / results[name][fast].iteration_us

    assert ratio("gpt_222", "alpa", "eager_1f1b") == pytest.approx(1.1, abs=0.1)
    assert ratio("gpt_412", "alpa", "eager_1f1b") == pytest.approx(1.1, abs=0.1)
    assert ratio("utrans", "alpa", "eager_1f1b") == pytest.approx(1.5, abs=0.1)
    assert ratio("utrans", "broadcast", "overlap") == pytest.approx(1.3, abs=0.1)
    assert ratio("utrans", "overlap", "eager_1f1b") == pytest.approx(1.15, abs=0.05)


def test_with_two_micro_batches_there_is_nothing_to_run_ahead_of() -> None:
    built = build(case("utrans").with_batches(2))
    assert evaluate(built, "eager_1f1b").iteration_us == evaluate(built, "overlap").iteration_us


def test_unknown_models_and_systems_list_the_choices() -> None:
    with pytest.raises(InvalidInput, match="unknown model 'bert'; choose from: gpt_222"):
        case("bert")
    with pytest.raises(InvalidInput, match="unknown system 'x'; choose from: send_recv"):
        evaluate(build(case("utrans")), "x")


def test_a_pipeline_is_planned_as_a_training_step() -> None:
    costs = StageCosts.even(2, forward_us=5000.0)
    schedule = eager_1f1b(2, 4, delay=1)
    step = to_workload(schedule, costs, activation_bytes=[4e6], meshes=[range(4), range(4, 8)])
    assert [op.name for op in step.ops if op.ranks == (0, 1, 2, 3)] == [str(action) for action in schedule.ranks[0]]
    send = step.op("1SEND_B2")
    assert (send.nbytes, send.groups) == (1e6, ((4, 0), (5, 1), (6, 2), (7, 3)))
    assert [dep.op for dep in send.after] == ["1I2"]
    assert {dep.op for dep in step.op("0I2").after} == {"1SEND_B2"}
    plan = stretto.plan(step, stretto.Cluster.load("p3_8xlarge:2"), budget_s=1.0)
    assert plan.iteration_us >= step.compute_us


def test_several_stages_of_a_rank_and_reductions_are_ops_too() -> None:
    costs = StageCosts.even(4, forward_us=10.0)
    step = to_workload(interleaved(4, 4), costs, activation_bytes=[1e6] * 3)
    assert step.num_ranks == 2
    assert len(step.comm_ops) == 2 * 3 * 4
    with pytest.raises(InvalidInput, match="activation_bytes: 2 stages need 1"):
        to_workload(one_f_one_b(2, 2), StageCosts.even(2), activation_bytes=[])
