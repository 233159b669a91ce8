# SPDX-License-Identifier: Apache-2.0
"""Plans that a price list chooses: the same by command and from Python, whatever budget suffices."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stretto import AllGather, AllReduce, Cluster, Reduce, algorithm, simulate, synthesize
from stretto.cli import app
from stretto.cluster import Link, Node
from stretto.collectives import COLLECTIVES
from stretto.errors import InvalidInput
from stretto.programs.formats.mscclpp_folder import plans_of
from stretto.programs.formats.mscclpp_reader import check_plan, loads
from stretto.simulator import Runtime
from stretto.synthesis.certificate import ProvedProgram
from stretto.synthesis.plan_search import direct_fills_links, search_plans
from stretto.synthesis.problem import SynthesisProblem

RUNTIME = "mscclpp:h200"
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def written(kind: str, ranks: int, sizes: list[int], folder: Path, budget: int) -> dict[str, str]:
    """The files that the command writes."""
    command = ["synth", kind, "-c", f"shared_gpu:{ranks}", "-b", ",".join(map(str, sizes)), "--format", "json"]
    command += ["--runtime", RUNTIME, "--budget", str(budget), "--no-cache", "-o", str(folder)]
    command += ["--in-place"] if kind != "all_to_all" else []
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_command_writes_what_python_chooses_whatever_the_budget(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    kind, ranks = rng.choice(KINDS), rng.choice((2, 3, 4))
    sizes = sorted(int(2 ** rng.uniform(10, 28)) // 4096 * 4096 + 4096 for _ in range(2))
    first = written(kind, ranks, sizes, tmp_path / "first", 400)
    assert first == written(kind, ranks, sizes, tmp_path / "second", 4000)
    collective = COLLECTIVES[kind](ranks, in_place=kind != "all_to_all")
    for row in json.loads(first["index.json"])["rows"]:
        cluster = Cluster.preset("shared_gpu", nodes=ranks)
        alone = synthesize(collective, cluster, row["nbytes"], runtime=RUNTIME, budget_s=900, cache=False)
        assert (row["program"], row["form"], row["cut"]) == (alone.program.name, alone.certificate.form, "")
        assert alone.certificate.lowered_us == pytest.approx(row["time_us"])
    for plan in plans_of(tmp_path / "first"):
        check_plan(loads(plan.path.read_text()), seeds=[seed])


def test_a_search_that_runs_out_of_time_says_so() -> None:
    cluster = Cluster.preset("shared_gpu", nodes=4)
    found = synthesize(AllReduce(4), cluster, 65536, runtime=RUNTIME, budget_s=1e-3, cache=False)
    assert found.certificate.form and "budget ended before" in found.certificate.cut


def test_a_plan_from_the_cache_is_the_plan_that_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path))
    cluster = Cluster.preset("shared_gpu", nodes=2)
    found, again = (synthesize(AllGather(2), cluster, 65536, runtime=RUNTIME, budget_s=400) for _ in range(2))
    assert again.cached and found.lowering is not None and again.lowering is not None
    assert (again.lowering.form, again.lowering.time_us) == (found.lowering.form, found.lowering.time_us)


@pytest.mark.parametrize(("cluster", "fills"), [("shared_gpu:4", True), ("dgx_h200", True), ("ndv2", False)])
def test_other_makers_are_asked_only_where_links_differ(cluster: str, fills: bool) -> None:
    machine = Cluster.load(cluster)
    for kind in KINDS:
        wanted = COLLECTIVES[kind](machine.num_devices)
        assert direct_fills_links(SynthesisProblem(collective=wanted, cluster=machine, nbytes=1e6)) is fills


def test_trees_are_tried_where_links_differ_even_without_time() -> None:
    cluster = Cluster.preset("ndv2")
    found = synthesize(AllGather(8, in_place=True), cluster, 1e9, runtime=RUNTIME, budget_s=1e-3, cache=False)
    assert found.program.name.startswith("loop_trees") and found.certificate.cut


def test_other_programs_are_tried_even_without_time() -> None:
    """On an NDv2 the direct algorithm sends over PCIe where pairs have no NVLink."""
    cluster, collective = Cluster.preset("ndv2"), AllGather(8)
    problem = SynthesisProblem(
        collective=collective, cluster=cluster, nbytes=400_000, lower="mscclpp", runtime=Runtime.load(RUNTIME)
    )
    ring = algorithm("ring", "all_gather", 8, cluster=cluster)
    took = simulate(ring, cluster, nbytes=400_000).total_us
    programs = [ProvedProgram(maker="library:ring", program=ring, time_us=took, seconds=0.0)]
    made, plan, tried = search_plans(programs, problem, budget_s=0.0)
    assert made is not None and plan is not None and made.program is ring
    direct = [one.time_us for one in tried if one.maker == "library:direct" and one.time_us is not None]
    assert plan.time_us < min(direct) and "budget ended before" in plan.cut


def test_plans_are_found_where_ranks_have_no_route_to_each_other() -> None:
    line = Cluster.build(
        "line",
        nodes=[Node(name=f"gpu{at}", host=0) for at in range(4)],
        links=[Link(src=a, dst=b, alpha_us=1.0, gb_per_s=25.0) for a in range(4) for b in range(4) if abs(a - b) == 1],
    )
    found = synthesize(
        AllGather(4), line, 65536, runtime=RUNTIME, budget_s=20, cache=False, makers=["forest", "library"]
    )
    assert found.certificate.form and found.certificate.lowered_us is not None


def test_every_chunk_may_be_a_stream() -> None:
    cluster = Cluster.preset("ndv2")
    problem = SynthesisProblem(
        collective=AllGather(8), cluster=cluster, nbytes=4e6, lower="mscclpp", runtime=Runtime.load(RUNTIME)
    )
    ring = algorithm("ring", "all_gather", 8, cluster=cluster, chunks=6)
    programs = [ProvedProgram(maker="library:ring", program=ring, time_us=1.0, seconds=0.0)]
    tried = search_plans(programs, problem, budget_s=600.0)[2]
    assert f"{ring.name} protocol=Simple,streams=48" in [one.name for one in tried]


def test_a_collective_that_mscclpp_does_not_have_is_refused_before_any_search() -> None:
    told: list[str] = []
    with pytest.raises(InvalidInput, match=r"unknown collective for MSCCL\+\+ 'reduce'; choose from: all_gather, "):
        synthesize(
            Reduce(8, root=0),
            Cluster.preset("dgx_h100"),
            65536,
            runtime=RUNTIME,
            progress=lambda text, _: told.append(text),
        )
    assert told == []
