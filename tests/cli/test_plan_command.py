# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest

from stretto.planner.plan import Plan
from stretto.planner.tuner_csv import read_tuner_csv
from stretto.workload import Dep, Op, Workload

Run = Callable[..., str]

STEP = Workload(
    name="small",
    num_ranks=8,
    ops=(
        Op(name="prep", kind="all_to_all", nbytes=2e6),
        Op(name="forward", duration_us=150.0, after=(Dep(op="prep"), Dep(op="gradients", lag=1))),
        Op(name="backward", duration_us=200.0),
        Op(name="gradients", kind="all_reduce", nbytes=1.6e7, after=(Dep(op="backward"),)),
    ),
)
QUICK = ("--cluster", "hgx2:1", "--steps", "100")


@pytest.fixture
def step(tmp_path: Path) -> str:
    path = tmp_path / "step.yaml"
    STEP.save(path)
    return str(path)


@pytest.fixture
def plan(good: Run, step: str, tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    good("plan", "-w", step, *QUICK, "-o", str(path))
    return str(path)


def test_everything_is_written_and_said(good: Run, step: str, tmp_path: Path) -> None:
    files = {key: tmp_path / f"out.{key}" for key in ("json", "html", "pftrace", "csv")}
    text = good(
        "plan", "--workload", step, *QUICK, "-o", str(files["json"]), "--html", str(files["html"]),
        "--trace", str(files["pftrace"]), "--tuner", str(files["csv"]), "--against", "bytescheduler+",
    )  # fmt: skip
    for word in ("system", "hand_optimised", "stretto", "link by link", "lower bound", "prep", "gradients"):
        assert word in text
    assert text.count("hand_optimised") == 2
    for path in files.values():
        assert path.stat().st_size > 0
        assert f"wrote {path}" in text
    made = Plan.load(files["json"])
    assert f"hash {made.hash}" in text
    assert "bytescheduler+ above" in files["html"].read_text()
    assert b"before (bytescheduler+), rank 0" in files["pftrace"].read_bytes()
    assert "cannot be told to NCCL are comments" in text
    assert "NCCL_TUNER_PLUGIN=" in text and "libnccl-tuner-stretto.so" in text
    lines = read_tuner_csv(files["csv"])
    assert {line.collective for line in lines} == {"allreduce"}
    good("plan", "-w", step, *QUICK, "--tuner", str(files["csv"]), "--tuner-plugin", "example")
    lines = read_tuner_csv(files["csv"])
    assert {line.collective for line in lines} >= {"allreduce", "allgather", "reducescatter", "broadcast", "reduce"}
    assert all(line.channels >= 1 for line in lines)


def test_steps_and_seed_decide(good: Run, step: str, tmp_path: Path) -> None:
    plans = []
    for name, seed in (("a", "4"), ("b", "4"), ("c", "5")):
        good("plan", "-w", step, *QUICK, "--seed", seed, "-o", str(tmp_path / name))
        plans.append(Plan.load(tmp_path / name))
    assert plans[0].hash == plans[1].hash
    assert plans[2].seed == 5


def test_retiming_can_be_left_out(good: Run, step: str) -> None:
    assert "link by link" not in good("plan", "-w", step, *QUICK, "--no-retime")


def test_measured_costs_are_used_and_said(good: Run, step: str, tmp_path: Path) -> None:
    table = tmp_path / "measured.csv"
    rows = [f"all_reduce,nccl,nvlink,8,{size},{size / 1e5}" for size in (1000, 100_000_000)]
    table.write_text("\n".join(["collective,algorithm,channels,nranks,nbytes,time_us", *rows]))
    text = good("plan", "-w", step, *QUICK, "--costs", str(table), "-o", str(tmp_path / "p.json"))
    made = Plan.load(tmp_path / "p.json")
    assert "measured" in made.costs
    assert " motifs measured (measured.csv)" in made.costs
    assert made.costs in " ".join(text.split())
    assert made.op("gradients").motifs[0].algorithm == "nccl"
    assert made.retimed_us == pytest.approx(made.iteration_us, rel=0.05)


def test_what_a_text_does_not_say_is_said_beside_it(good: Run, bad: Run, step: str, tmp_path: Path) -> None:
    table = tmp_path / "all,reduce.txt"
    table.write_text("# size count type redop root time algbw busbw #wrong\n16000000 1 float sum -1 150 1 1 0\n")
    assert f"--costs {table.name},collective=all_reduce" in bad("plan", "-w", step, *QUICK, "--costs", str(table))
    table = table.rename(tmp_path / "ar.txt")
    given = f"{table},collective=all_reduce,nranks=8,algorithm=ring"
    good("plan", "-w", step, *QUICK, "--costs", given, "-o", str(tmp_path / "p.json"))
    assert "motifs measured (ar.txt)" in Plan.load(tmp_path / "p.json").costs
    for wrong, message in (
        ("ranks=8", "unknown key in --costs 'ranks'; choose from: collective, nranks"),
        ("nranks", "--costs: nranks: give it a value, as in nranks=8"),
        ("nranks=many", "--costs: nranks: must be a number, not 'many'"),
        ("collective=all", "unknown collective 'all'"),
        ("collective=all_reduce,nranks=8,channels=xgmi", "unknown channel in"),
    ):
        assert message in bad("plan", "-w", step, *QUICK, "--costs", f"{table},{wrong}")


def test_a_table_that_fits_nothing_is_warned_about(good: Run, step: str, tmp_path: Path) -> None:
    table = tmp_path / "other.csv"
    table.write_text("collective,algorithm,channels,nranks,nbytes,time_us\nall_reduce,ring,nvlink,7,1000,5\n")
    text = " ".join(good("plan", "-w", step, *QUICK, "--costs", str(table)).split())
    assert "warning: no measurement of other.csv fits any motif of this step" in text
    assert "motifs measured (other.csv)" in text


def test_a_plan_is_shown(good: Run, plan: str) -> None:
    text = good("plan", "show", plan)
    assert Plan.load(plan).hash in text
    assert "small on hgx2:1" in text
    assert "times ours" in text


def test_a_plan_is_explained(good: Run, plan: str) -> None:
    text = good("plan", "explain", plan)
    assert text.count("why: ") == 2
    assert text.count("costs: simulated") == 2
    one = good("plan", "explain", plan, "gradients")
    assert "gradients: all_reduce of 16 MB as " in one
    assert "prep: " not in one


def test_two_plans_are_compared(good: Run, bad: Run, plan: str, step: str, tmp_path: Path) -> None:
    assert "the same decisions" in good("plan", "diff", plan, plan)
    other = tmp_path / "other.json"
    made = Plan.load(plan)
    replace(made, ops=(replace(made.ops[0], option="by pigeon"), *made.ops[1:])).save(other)
    text = good("plan", "diff", plan, str(other))
    assert "by pigeon" in text
    assert "iteration " in text
    replace(made, workload_digest="other").save(other)
    assert f"{plan}, {other}: the plans are for different workloads: small" in bad("plan", "diff", plan, str(other))


def test_a_plan_with_programs_of_no_library_is_simulated_again(good: Run, tmp_path: Path) -> None:
    step, path = tmp_path / "torus.yaml", tmp_path / "torus.json"
    ops = (
        Op(name="backward", duration_us=100.0),
        Op(name="gradients", kind="all_reduce", nbytes=6.4e7, after=(Dep(op="backward"),)),
    )
    Workload(name="torus", num_ranks=9, ops=ops).save(step)
    good("plan", "-w", str(step), "-c", "torus:3x3", "--steps", "20", "-o", str(path))
    made = Plan.load(path)
    assert any(motif.algorithm.startswith("dimensions") for op in made.ops for motif in op.motifs)
    again = tmp_path / "again.json"
    good("plan", "retime", str(path), "-w", str(step), "-c", "torus:3x3", "--json", str(again))
    found = json.loads(again.read_text())
    assert found["today_us"] == pytest.approx(found["promised_us"])
    assert found["retimed_us"] == pytest.approx(made.retimed_us)


def test_a_plan_is_simulated_again(good: Run, bad: Run, plan: str, step: str, tmp_path: Path) -> None:
    trace = tmp_path / "t.pftrace"
    text = good("plan", "retime", plan, "-w", step, "-c", "hgx2:1", "--trace", str(trace))
    assert [line.split("  ")[0] for line in text.splitlines()[:3]] == ["promised", "today's costs", "link by link"]
    assert "no two motifs meet on a link" in text
    assert b"plan, rank 0" in trace.read_bytes()
    assert "was made for workload small" in bad("plan", "retime", plan, "-w", "dlrm:A1", "-c", "hgx2:1")
    assert "was made for cluster hgx2:1" in bad("plan", "retime", plan, "-w", step, "-c", "hgx2:2")
    assert "--workload: must be given: the plan was made for 'small'" in bad("plan", "retime", plan)
    assert good("simulate", plan, "-w", step) == good("plan", "retime", plan, "-w", step, "-c", "hgx2:1")
    for option, value in (("--bytes", "1M"), ("--set", "rings=2"), ("--chrome-json", str(tmp_path / "x.json"))):
        assert f"{option}: a plan says this itself" in bad("simulate", plan, "-w", step, option, value)
    assert "--workload: is for a plan" in bad("simulate", "ring", "-c", "ring:4", "-w", step)


def test_a_plan_of_names_needs_no_others_to_be_simulated(good: Run, tmp_path: Path) -> None:
    path, trace = tmp_path / "plan.json", tmp_path / "t.pftrace"
    good("plan", "-w", "dlrm:A2", "-c", "hgx2:16", "--steps", "1", "--no-retime", "-o", str(path))
    assert "promised" in good("simulate", str(path), "--trace", str(trace))
    assert trace.exists()


def test_a_plan_of_a_model_with_options_needs_no_others_to_be_simulated(good: Run, bad: Run, tmp_path: Path) -> None:
    path, page = tmp_path / "plan.json", tmp_path / "plan.html"
    good("plan", "-w", "dlrm:A2,ranks=8", "-c", "hgx2:1", "--steps", "1", "--no-retime", "-o", str(path))
    made = Plan.load(path)
    assert (made.workload, made.workload_spec) == ("dlrm:A2", "dlrm:A2,ranks=8")
    assert "promised" in good("simulate", str(path), "--html", str(page))
    assert "link by link" in page.read_text()
    # A plan of a version that kept no options names the model alone, which has another number of ranks.
    replace(made, workload_spec="").save(path)
    assert "--workload: must be given" in bad("simulate", str(path))


def test_pages_of_plans_have_the_figures_that_are_printed(good: Run, plan: str, step: str, tmp_path: Path) -> None:
    made, page = Plan.load(plan), tmp_path / "page.html"
    assert f"wrote {page}" in good("plan", "show", plan, "--html", str(page))
    text = page.read_text()
    for word in (made.hash, *made.baselines_us, *(op.op for op in made.ops), *(op.option for op in made.ops)):
        assert escape(word) in text
    assert text.count("class=bar>") == len(made.baselines_us) + 2
    again = good("plan", "retime", plan, "-w", step, "-c", "hgx2:1", "--html", str(page))
    times = [line.split("  ")[1].strip() for line in again.splitlines()[1:3]]
    assert all(time in page.read_text() for time in times) and text != page.read_text()


def test_help_teaches(good: Run) -> None:
    text = good("plan", "--help")
    for word in ("stretto plan -w dlrm:A2", "show", "explain", "diff", "retime", "--budget", "never slower"):
        assert word in text
    for name in ("show", "explain", "diff", "retime"):
        assert f"stretto plan {name} " in good("plan", name, "--help")


def test_wrong_input_is_one_line(bad: Run, step: str, plan: str, tmp_path: Path) -> None:
    assert "plan: give --workload and --cluster, or one of show" in bad("plan")
    assert "plan: give --workload and --cluster" in bad("plan", "--workload", step)
    assert "plan: give --workload and --cluster" in bad("plan", "--cluster", "hgx2:1")
    assert "--against: unknown system 'gpipe'; choose from: fifo, nccl_ring" in bad(
        "plan", "-w", step, *QUICK, "--against", "gpipe"
    )
    assert "unknown model 'bert'" in bad("plan", "-w", "bert", *QUICK)
    assert "unknown preset 'hgx9'" in bad("plan", "-w", step, "-c", "hgx9")
    assert "small: 8 ranks do not fit on 4 devices" in bad("plan", "-w", step, "-c", "ring:4")
    for value in ("0", "-1", "nan", "inf"):
        assert "--budget: must be finite and > 0" in bad("plan", "-w", step, "-c", "hgx2:1", "--budget", value)
    assert "--steps: must be > 0, not 0" in bad("plan", "-w", step, "-c", "hgx2:1", "--steps", "0")
    assert "No such file" in bad("plan", "-w", step, *QUICK, "--costs", str(tmp_path / "none.csv"))
    lost = tmp_path / "none" / "p.json"
    assert f"{lost}: there is no directory" in bad("plan", "-w", step, "-c", "hgx2:1", "-o", str(lost))
    assert "No such command" in bad("plan", "paint")


def test_wrong_plans_are_one_line(bad: Run, plan: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text(Path(plan).read_text()[:-40])
    other = tmp_path / "other.json"
    value = json.loads(Path(plan).read_text())
    other.write_text(json.dumps({**value, "iteration_us": 1.0}))
    for command in (("show",), ("explain",)):
        assert "not valid JSON" in bad("plan", *command, str(broken))
        assert "does not fit the content" in bad("plan", *command, str(other))
        assert "No such file" in bad("plan", *command, str(tmp_path / "none.json"))
    assert "not valid JSON" in bad("plan", "diff", plan, str(broken))
    assert "unknown comm-op 'x'; choose from: prep, gradients" in bad("plan", "explain", plan, "x")
    assert "Missing argument" in bad("plan", "show")


def test_buckets_of_other_sizes_are_planned_beside_those_of_a_recorded_step(
    good: Run, bad: Run, step: str, tmp_path: Path
) -> None:
    renamed = [replace(op, name="backward.all_reduce.bucket.0") if op.name == "gradients" else op for op in STEP.ops]
    moved = [
        replace(op, after=(Dep(op="prep"), Dep(op="backward.all_reduce.bucket.0", lag=1)))
        if op.name == "forward"
        else op
        for op in renamed
    ]
    recorded, rows = tmp_path / "recorded.yaml", tmp_path / "rows.json"
    replace(STEP, ops=tuple(moved)).save(recorded)
    text = good("plan", "-w", str(recorded), *QUICK, "--buckets", "4M,1G", "--json", str(rows))
    assert "as recorded" in text and "DDP's buckets: " in text
    assert [row["buckets"] for row in json.loads(rows.read_text())["buckets"]] == [1, 4, 1]
    assert "has no buckets of DDP's" in bad("plan", "-w", step, *QUICK, "--buckets", "4M")
