# SPDX-License-Identifier: Apache-2.0
"""A seed that no generator takes is refused at the door, by every function that has one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from judges.drawn_steps import figure6
from judges.planner_exact import solve_exactly

import stretto as st
from stretto.cli import run
from stretto.dimensions import Dim
from stretto.dimensions import stretto as dimension_schedule
from stretto.errors import InvalidInput
from stretto.pipeline.search import search as search_pipeline
from stretto.pipeline.simulation import StageCosts
from stretto.planner import api
from stretto.planner.schedule.search import search as search_plan
from stretto.programs import interpret
from stretto.programs.formats import mscclpp_json, mscclpp_reader, text
from stretto.strategy.model import ModelSpec, Variable
from stretto.strategy.sampler import Sampler
from stretto.strategy.search import search as search_strategy
from stretto.workload.dag import Op

GATHER = st.AllGather(4)
RING = st.Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=1.0)
STEP = st.Workload(name="x", num_ranks=4, ops=(Op(name="sum", kind="all_reduce", nbytes=1e6),))
MODEL = ModelSpec(name="m", variables=(Variable(name="v", shape=(4, 4)),))
PROGRAM = st.algorithm("ring", "all_gather", 4)
MAKERS = ("greedy", "flow", "exact", "three_stage", "compose")


def _mscclpp(**options: Any) -> object:
    return mscclpp_reader.check_plan(mscclpp_reader.loads(mscclpp_json.dumps(PROGRAM.lower())), **options)


DOORS: dict[str, Callable[[Any], object]] = {
    "synthesize": lambda seed: st.synthesize(GATHER, RING, st.MB, seed=seed),
    **{
        name: partial(
            lambda name, seed: import_module(f"stretto.synthesis.{name}").synthesize(
                GATHER, RING, nbytes=st.MB, seed=seed
            ),
            name,
        )
        for name in MAKERS
    },
    "plan": lambda seed: st.plan(STEP, RING, seed=seed),
    "planned": lambda seed: api.plan(STEP, RING, seed=seed),
    "search of plans": lambda seed: search_plan(figure6(), seed=seed),
    "exact plans": lambda seed: solve_exactly(figure6(), seed=seed),
    "interpret": lambda seed: interpret.interpret(PROGRAM.lower(), seed=seed),
    "check": lambda seed: interpret.check(PROGRAM.lower(), seed=seed),
    "check MSCCL++": lambda seed: _mscclpp(seeds=(seed,)),
    "reshard": lambda seed: st.plan_reshard(
        src="(2,2) RR", dst="(2,2) S0R", shape=(8, 8), cluster=st.Cluster.preset("ring", nodes=8), seed=seed
    ),
    "sampler": lambda seed: Sampler(MODEL, 4, seed=seed),
    "strategies": lambda seed: search_strategy(MODEL, 4, lambda strategy: 1.0, ranker="gaussian", seed=seed),
    "pipeline": lambda seed: search_pipeline(StageCosts.even(2, forward_us=1.0), 4, seed=seed),
    "dimensions": lambda seed: dimension_schedule(
        [Dim(kind="ring", size=4, gb_per_s=1.0, step_us=1.0)], "all_reduce", 1e6, seed=seed
    ),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_bad_seed_is_refused_in_python(door: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    for seed in (-1, 1 << 63, 1.5, True, "1"):
        with pytest.raises(InvalidInput, match=r"seed: must be a whole number 0\.\.4611686018427387904"):
            DOORS[door](seed)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("command", [
    "synth all_gather -c ring:4 --budget 1", "plan -w dlrm:A1 -c dgx_a100:2", "tune -- true",
    "program run PROGRAM",
])  # fmt: skip
def test_a_bad_seed_is_refused_by_commands(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    (tmp_path / "p.txt").write_text(text.dumps(PROGRAM))
    first, *rest = command.replace("PROGRAM", str(tmp_path / "p.txt")).split()
    head = [first, rest.pop(0)] if first == "program" else [first]
    for seed in ("-1", "99999999999999999999"):
        assert run([*head, "--seed", seed, *rest]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "--seed" in said
    assert not (tmp_path / "cache").exists()
