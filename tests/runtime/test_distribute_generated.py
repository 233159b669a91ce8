# SPDX-License-Identifier: Apache-2.0
"""Every builder with every aspect of a strategy, drawn at random: trained as one process trains, or refused at once.

The longer campaign: ``python tests/jobs/distribute_generated_job.py FOLDER 3 ROUNDS FIRST``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
from distribute_draw import LABELS, LOOPS, OPTIMIZERS, OPTIONS, PLAIN, Drawer, aspects

from stretto.errors import InvalidInput
from stretto.strategy import ModelSpec, NodeConfig, Strategy, Sync, Variable
from stretto.strategy.builders import BUILDERS
from stretto.strategy.model import DTYPE_BYTES
from stretto.strategy.representation import ENCODERS, SYNCHRONIZERS

Outcomes = list[dict[str, Any]]
AXES = 4


@pytest.fixture(scope="module")
def outcomes(job: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    found = job("distribute_generated_job.py", tmp_path_factory.mktemp("generated"), ranks=3, reporting=1)
    return [one for ranks in ("2", "3", "2 and a server") for one in found[ranks][0]]


def test_nothing_is_accepted_and_wrong(outcomes: Outcomes) -> None:
    wrong = [one for one in outcomes if "wrong" in one or one.get("off", 0.0) > 1.0]
    assert not wrong, "\n".join(f"{one['title']}: {one.get('wrong') or one['where']}" for one in wrong)
    assert all("refused" in one or "off" in one for one in outcomes)


def test_refusals_name_the_field(outcomes: Outcomes) -> None:
    refused = [one["refused"] for one in outcomes if "refused" in one]
    assert refused
    for said in refused:
        assert ": " in said and "\n" not in said, said


def test_every_aspect_of_a_strategy_can_be_drawn() -> None:
    known = {field.name for one in (Strategy, NodeConfig, Sync) for field in fields(one)}
    assert known == {*aspects(), *LABELS, "devices", "nodes", "sync"}
    assert all(hasattr(Drawer, name) for name in aspects() if name != "parts")
    assert {option for info in BUILDERS.values() for option in info.options} == set(OPTIONS)


def test_everything_was_trained_and_no_combination_left_out(outcomes: Outcomes) -> None:
    """A builder, a field, a synchroniser or an encoder that is added has to be drawn here before this holds again."""
    trained = {feature for one in outcomes if "off" in one for feature in one["features"]}
    assert sorted(wanted() - trained) == []
    drawn = {feature for one in outcomes for feature in one["features"]}
    assert {f"optimizer {name}" for name in OPTIMIZERS} <= drawn


def wanted() -> set[str]:
    """What has to be trained, as far as registries and data classes know it."""
    found = {f"builder {name}" for name in BUILDERS}
    found |= {f"{name} x {field}" for name in BUILDERS for field in aspects()}
    found |= {f"option {name}.{option}" for name, info in BUILDERS.items() for option in info.options}
    found |= {f"kind {name}" for name in SYNCHRONIZERS} | {f"encoder {name}" for name in ENCODERS}
    found |= {f"field {name}" for name in aspects()} | {f"optimizer {name}" for name in PLAIN}
    found |= {f"loop {name}" for name in LOOPS} | {f"dtype {name}" for name in DTYPE_BYTES}
    found |= {f"cut along {axis}" for axis in range(AXES)} | {"axes cut 2", "uneven", "hosts True", "hosts False"}
    found |= {f"{kind} with sequence" for kind in ("all_reduce", "sharded", "sparse_all_gather")}
    found |= {f"{kind} with transfer" for kind in ("all_reduce", "parameter_server")}
    found |= {f"{kind} with group" for kind in SYNCHRONIZERS}
    found |= {f"{kind} with {encoder}" for kind in SYNCHRONIZERS for encoder in ENCODERS if allowed(kind, encoder)}
    return found


def allowed(kind: str, encoder: str) -> bool:
    """Whether any variable can be synchronised and encoded so: the strategy itself says it."""
    amount = {"powersgd": ":1", "topk": ":0.5"}.get(encoder, "")
    placement = ("rank0",) if kind == "parameter_server" else ()
    sync = Sync(kind=kind, placement=placement, encoder=encoder + amount)
    linear = Variable(name="v", shape=(2, 2), factors=1)
    for variable in (linear, replace(linear, factors=0, sparse=True, rows=1)):
        model = ModelSpec(name="m", variables=(variable,))
        try:
            Strategy(
                name="s", model="m", model_digest=model.digest, devices=("rank0", "rank1"),
                nodes=(NodeConfig(variable="v", sync=sync),),
            ).check(model)  # fmt: skip
        except InvalidInput:
            continue
        return True
    return False
