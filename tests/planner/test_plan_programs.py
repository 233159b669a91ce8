# SPDX-License-Identifier: Apache-2.0
"""Plans with algorithms that no name stands for bring their programs along."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stretto import Cluster, InvalidInput, Plan, Workload
from stretto.planner import api
from stretto.planner.algebra.recipes import MotifRequest, library
from stretto.planner.plan import MAX_PROGRAM_CHARS, ProgramPlan
from stretto.programs.formats.text import loads
from stretto.workload import Dep, Op

CLUSTER = Cluster.load("torus:3x3")
STEP = Workload(
    name="step", num_ranks=9,
    ops=(
        Op(name="backward", duration_us=100.0, after=(Dep(op="gradients", lag=1),)),
        Op(name="gradients", kind="all_reduce", nbytes=64e6, after=(Dep(op="backward"),)),
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> Plan:
    return api.plan(STEP, CLUSTER, steps=20, budget_s=5.0, retime=False).plan


def test_every_motif_runs_as_the_library_or_as_a_program_of_the_plan(plan: Plan, tmp_path: Path) -> None:
    assert plan.programs, "the dimensions' own schedule is the fastest here"
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == plan and read.hash == plan.hash
    brought = {(one.algorithm, one.kind, one.channels) for one in read.programs}
    for op in read.ops:
        for motif in op.motifs:
            known = motif.algorithm in library(MotifRequest(kind=op.kind, group=tuple(range(9))))
            assert known or any(name == motif.algorithm and on == motif.channels for name, _, on in brought)
    for one in read.programs:
        program = loads(one.text)
        program.verify()
        assert program.collective.kind == one.kind
        assert all(len(group) == program.collective.num_ranks for group in one.groups)


def test_the_hash_covers_the_programs(plan: Plan) -> None:
    first = plan.programs[0]
    other = replace(plan, programs=(replace(first, text=first.text + "# more\n"), *plan.programs[1:]))
    assert other.hash != plan.hash


def test_programs_are_bounded(plan: Plan) -> None:
    text = " " * (MAX_PROGRAM_CHARS + 1)
    huge = ProgramPlan(algorithm="synthesised", kind="all_reduce", channels=("x",), groups=((0, 1),), text=text)
    with pytest.raises(InvalidInput, match=r"programs: at most 16777216 characters"):
        replace(plan, programs=(huge,))
