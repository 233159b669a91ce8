# SPDX-License-Identifier: Apache-2.0
"""`stretto.torch.distribute` in training loops: accumulation, clipping, saving, unused layers, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import stretto.torch
from stretto import InvalidInput
from stretto.strategy.distribute import model_spec

Outcomes = dict[str, list[Any]]
REASSOCIATION = 1e-5  # Sums of some hundred float32 terms in another order; CPUs with other vector widths differ, too.
PLACES = ("all_reduce", "partitioned_ps", "zero2")


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Outcomes], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return job("distribute_features_job.py", tmp_path_factory.mktemp("features"), ranks=4)


@pytest.mark.parametrize("model", ["mlp", "ncf", "mixed"])
@pytest.mark.parametrize("builder", PLACES)
@pytest.mark.parametrize("inside", [True, False])
def test_accumulated_gradients_are_one_batch(outcomes: Outcomes, model: str, builder: str, inside: bool) -> None:
    assert max(outcomes[f"accumulated {model} {builder} {inside}"]) < REASSOCIATION


@pytest.mark.parametrize("builder", PLACES)
def test_clipping_sees_the_norm_of_all(outcomes: Outcomes, builder: str) -> None:
    assert max(outcomes[f"clipped {builder}"]) < REASSOCIATION


@pytest.mark.parametrize("kind", ["momentum", "adagrad"])
def test_rows_come_back_as_the_optimizer_moves_them(outcomes: Outcomes, kind: str) -> None:
    assert max(outcomes[f"rows {kind}"]) < REASSOCIATION


@pytest.mark.parametrize("model", ["mlp", "ncf", "mixed"])
@pytest.mark.parametrize("change", ["partitioned_ps zero2", "zero2 all_reduce", "all_reduce partitioned_ps"])
def test_what_is_saved_fits_every_strategy(outcomes: Outcomes, model: str, change: str) -> None:
    assert max(outcomes[f"resumed {model} {change}"]) < REASSOCIATION


def test_accumulation_and_saving_on_our_backend(outcomes: Outcomes) -> None:
    for rank in outcomes["on our backend"]:
        assert len(rank) == 6
        assert all(apart < REASSOCIATION for apart in rank.values()), rank


def test_in_32_bits_only_a_gradient_that_is_rounding_alone_makes_a_difference(outcomes: Outcomes) -> None:
    for of_key, rest in outcomes["in 32 bits"]:
        assert rest < REASSOCIATION < of_key


def test_a_scaler_works_where_every_rank_has_the_gradients_and_is_refused_elsewhere(outcomes: Outcomes) -> None:
    assert max(outcomes["scaled"]) < REASSOCIATION
    for said in outcomes["scaled elsewhere"]:
        assert re.search(r"\.kind: GradScaler looks for infinities in this rank's gradients", said)


def test_gradients_that_a_script_keeps_stay_as_they_were(outcomes: Outcomes) -> None:
    assert outcomes["kept"] == [[True] * len(PLACES)] * 4


def test_a_step_without_a_layer_leaves_its_weights_and_its_kept_gradient_and_closing_leaves_no_hooks(
    outcomes: Outcomes,
) -> None:
    assert outcomes["kept unused"] == [[[False, True, True, True, True]] * 2] * 4


def only_what_was_used_moved(outcomes: Outcomes, label: str) -> None:
    for rank in outcomes[f"unused {label}"]:
        assert all(rank.values()), rank


@pytest.mark.parametrize("builder", ["all_reduce", "ps", "zero1", "parallax"])
def test_layers_that_some_or_none_use(outcomes: Outcomes, builder: str) -> None:
    only_what_was_used_moved(outcomes, builder)


@pytest.mark.parametrize("builder", ["all_reduce", "ps_balanced"])
@pytest.mark.parametrize("encoder", ["float16", "powersgd:1", "topk:0.1", "onebit", "sufficient_factors"])
def test_encoders_leave_alone_what_nobody_uses(outcomes: Outcomes, builder: str, encoder: str) -> None:
    only_what_was_used_moved(outcomes, f"{builder} {encoder}")


def test_a_stale_server_leaves_alone_what_nobody_uses(outcomes: Outcomes) -> None:
    assert all(rank["some moved"] and rank["nobody stayed"] for rank in outcomes["unused ps stale"])


@pytest.mark.parametrize("builder", ["all_reduce", "ps_balanced"])
@pytest.mark.parametrize("encoder", ["powersgd:1", "topk:0.1", "onebit"])
def test_what_is_kept_back_is_not_lost_when_layers_pause(outcomes: Outcomes, builder: str, encoder: str) -> None:
    assert max(outcomes[f"lost {builder} {encoder}"]) < 1e-5


def test_a_group_of_some_ranks_trains_by_itself(outcomes: Outcomes) -> None:
    assert outcomes["some ranks"] == [True] * 4


def test_the_environment_names_a_strategy(outcomes: Outcomes) -> None:
    assert outcomes["named by the environment"] == ["zero2"] * 4


@pytest.mark.parametrize(("what", "said"), [
    ("clipped by hand", "changed between backward and step, .* clip with optimizer.clip_grad_norm_"),
    ("twice", r"second backward pass before optimizer.step\(\)"),
    ("another model", "was made for Mlp, not for Conv"),
    ("ranks", "is for 5 devices, this job has 4 ranks"),
    ("own", "unknown one 'Own'; choose from: SGD, Adam"),
    ("differently", "rank [12] has another strategy"),
    ("foreign", r"param_groups\[0\].params\[0\]: is no parameter of the model"),
    ("file", "No such file"),
])  # fmt: skip
def test_what_is_refused_is_named(outcomes: Outcomes, what: str, said: str) -> None:
    for rank in outcomes["errors"]:
        assert re.search(said, rank[what])


def test_without_a_job_it_says_so() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidInput, match=r"call torch\.distributed\.init_process_group first"):
        stretto.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_what_is_no_model_optimizer_or_strategy_is_named() -> None:
    model: Any = nn.Linear(2, 2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0)
    five: Any = 5
    for given, said in (
        ((five, optimizer), r"model: must be a torch\.nn\.Module, not int"),
        ((model, model), r"optimizer: must be a torch\.optim\.Optimizer, not Linear"),
        ((model, optimizer, five), "strategy: must be a Strategy, a file's path or None, not int"),
    ):
        with pytest.raises(InvalidInput, match=said):
            stretto.torch.distribute(*given)


def test_a_spec_has_order_rows_factors_and_ties() -> None:
    class Odd(nn.Module):
        """Registered in another order than it runs."""

        def __init__(self) -> None:
            super().__init__()
            self.late = nn.Linear(4, 3)
            self.early = nn.Embedding(9, 4, sparse=True)
            self.again = nn.Linear(4, 3)
            self.again.weight = self.late.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside = self.early(x)
            return torch.as_tensor(self.late(inside) + self.again(inside))

    model = Odd()
    spec = model_spec(model, torch.tensor([1, 1, 5]))
    assert [v.name for v in spec.variables] == ["early.weight", "late.weight", "late.bias", "again.bias"]
    early, late = spec.variables[:2]
    assert (early.sparse, early.rows, spec.batch) == (True, 2, 3)
    # Nobody sees the factors of both layers that use this weight.
    assert late.also == ("again.weight",) and late.factors == 0
    assert model_spec(nn.Linear(4, 3), torch.zeros(3, 4)).variables[0].factors == 3
    assert all(v.forward_us > 0 and v.backward_us > 0 for v in spec.variables)
    assert spec.digest == model_spec(model).digest
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(InvalidInput, match="sample: the model does not run on it"):
        model_spec(nn.Linear(3, 3), torch.zeros(2, 5))
