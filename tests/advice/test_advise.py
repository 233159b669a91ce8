# SPDX-License-Identifier: Apache-2.0
"""Advice on generated traces: measured waiting, simulated changes, and what is said when nothing is to be gained."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import stretto
from stretto.advice import BackendTrial, StepAdvice, advise
from stretto.advice.advice import EFFORTS
from stretto.advice.what_if import as_submitted_us
from stretto.cli import run
from stretto.control.messages import Status, encode_captured
from stretto.errors import InvalidInput
from stretto.planner.costs.costs import simulated_costs
from stretto.report.advice_text import advice_page, verdict
from stretto.units import MB
from stretto.workload import Dep, Op, Workload

DATA = Path(__file__).parents[1] / "workload" / "data"
TRACES = [DATA / f"gpu_nccl.{rank}.json" for rank in range(4)]
SLOW = "hosts: 2, gpus: 2 x a100, network: 25gbit"


def ddp_trace(rank: int, *, reduce_us: float, backward_us: float, ranks: int = 4, steps: int = 4) -> dict[str, Any]:
    """A rank that computes, reduces 40 MB in two buckets of which the first lies under compute, and updates."""
    spec = importlib.util.spec_from_file_location("make_traces", DATA / "make_traces.py")
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    recorder = maker._Recorder(rank)
    group = list(range(ranks))
    step_us = 200 + 2 * backward_us + reduce_us + 50 + max(0.0, reduce_us - backward_us)
    for step in range(steps):
        t = 1000.0 + step_us * step
        recorder.span("user_annotation", f"ProfilerStep#{step}", t - 100, step_us - 1, 1)
        recorder.kernel("forward", t - 90, t, 200.0, 7)
        recorder.span("cpu_op", "autograd::engine::evaluate_function: MmBackward0", t - 85, 40.0, 2)
        recorder.kernel("backward_0", t - 80, t + 200, backward_us, 7)
        calls = [maker._call("allreduce", 5_000_000, 5_000_000, "Float", group, "0", 2 * step + at) for at in range(2)]
        first = t + 200 + backward_us
        recorder.collective(calls[0], "ncclDevKernel_AllReduce(a)", t - 75, first, reduce_us, 20)
        recorder.kernel("backward_1", t - 70, first, backward_us, 7)
        second = first + max(backward_us, reduce_us)
        recorder.collective(calls[1], "ncclDevKernel_AllReduce(b)", t - 65, second, reduce_us, 20)
        for at, call in enumerate(calls):
            recorder.wait(call, t - 50 + at)
        recorder.span("user_annotation", "Optimizer.step#SGD.step", t - 40, 10.0, 1)
        recorder.kernel("update", t - 38, second + reduce_us, 50.0, 7)
    about = {"backend": "nccl", "rank": rank, "world_size": ranks}
    return {"distributedInfo": about, "host_name": "one", "traceEvents": recorder.events}


def written(folder: Path, **options: float | int) -> Path:
    for rank in range(4):
        (folder / f"rank{rank}.json").write_text(json.dumps(ddp_trace(rank, **options)))  # type: ignore[arg-type]
    return folder


def page(advice: StepAdvice) -> str:
    console = Console(width=100, highlight=False)
    with console.capture() as captured:
        console.print(advice_page(advice))
    return captured.get()


def test_the_waiting_of_a_known_step_is_exact_and_the_model_repeats_it(tmp_path: Path) -> None:
    found = advise(written(tmp_path, reduce_us=6000.0, backward_us=2000.0), SLOW, steps=30)
    # 200 + 2 x 2000 + 50 us of compute; the first reduction sticks out by 4000 us, the second one by all of its 6000.
    assert found.measured and found.step_us == pytest.approx(14250.0)
    assert found.waits_us == pytest.approx(10000.0) and found.waits_share == pytest.approx(10000 / 14250)
    assert found.model_us == pytest.approx(14250.0, rel=1e-3)
    assert found.confidence == "high"
    assert found.compute_us <= found.bound_us * (1 + 1e-9) <= found.model_us * (1 + 1e-9)


def test_a_trace_of_one_step_gives_no_high_confidence(tmp_path: Path) -> None:
    written(tmp_path, reduce_us=6000.0, backward_us=2000.0, steps=1)
    for found in (advise(tmp_path, SLOW, steps=30), advise(tmp_path)):
        assert found.confidence == "medium" and "of 1 step only: record 3 to 10" in found.confidence_why
        assert found.inputs[0].how == "the median of 1 step, 4 of 4 ranks"


def test_every_gain_is_a_simulated_step_over_the_step_as_it_is(tmp_path: Path) -> None:
    found = advise(written(tmp_path, reduce_us=6000.0, backward_us=2000.0), SLOW, steps=30)
    assert [change.effort for change in found.changes] == sorted(
        (change.effort for change in found.changes), key=EFFORTS.index
    )
    assert {change.effort for change in found.changes} == set(EFFORTS)
    for change in found.changes:
        assert change.gain == pytest.approx(found.step_us / change.step_us)
        assert change.worthwhile == (change.step_us <= 0.97 * found.step_us)
        assert "STEP" not in change.how and "CLUSTER" not in change.how
    plan = next(change for change in found.changes if change.effort == "plan")
    tuner = next(change for change in found.changes if change.effort == "tuner")
    assert found.bound_us <= plan.step_us * (1 + 1e-9)
    assert plan.step_us <= found.model_us * (1 + 1e-9)
    assert tuner.step_us >= plan.step_us * (1 - 1e-9)
    assert found.plan is not None and found.plan.plan.iteration_us <= plan.step_us * (1 + 1e-9)


def test_where_compute_hides_communication_it_says_that_nothing_is_to_be_gained(tmp_path: Path) -> None:
    found = advise(written(tmp_path, reduce_us=20.0, backward_us=9000.0), SLOW, steps=30)
    assert found.best is None
    assert verdict(found).startswith("Nothing is to be gained: only 0.1% of the step waits")
    assert "Nothing is to be gained" in page(found)


def test_a_network_that_is_slower_than_described_is_a_finding(tmp_path: Path) -> None:
    folder = written(tmp_path, reduce_us=6000.0, backward_us=2000.0)
    found = advise(folder, "hosts: 2, gpus: 2 x a100, network: 2 x 400gbit", steps=30)
    (finding,) = [change for change in found.changes if change.diagnosis]
    ((_, factor),) = found.factors
    assert factor > 10 and finding.gain > 1.5
    assert found.best is not finding
    assert "Look into the network" in verdict(found) and "Gloo" not in verdict(found)
    on_gloo = advise(folder, "hosts: 2, gpus: 2 x a100, network: 2 x 400gbit", steps=30, gpu=False)
    for each in (found, on_gloo):
        # The model takes collectives to stay as slow as they were: what another backend gains is not in it.
        said = "What is to be gained is unknown until `stretto run -- COMMAND` has measured it: collectives take 15.4"
        assert verdict(each).startswith(said)
        assert each.confidence == "low" and "is not known" in each.confidence_why
        assert "unknown until measured" in page(each)
        assert each.unexplained == factor and "Nothing is to be gained" not in verdict(each)
    assert "gloo's algorithms" in next(change.how for change in on_gloo.changes if change.diagnosis)


def job_step(compute_us: float, reduce_us: float, nbytes: float = 25 * MB) -> Workload:
    ops = (
        Op(name="work", phase="backward", duration_us=compute_us, after=(Dep(op="update", lag=1),)),
        Op(name="sum", kind="all_reduce", nbytes=nbytes, after=(Dep(op="work"),), duration_us=reduce_us),
        Op(name="update", phase="optimizer", duration_us=10.0, after=(Dep(op="sum", why="wait"),)),
    )
    return Workload(name="job", num_ranks=4, ops=ops)


@pytest.mark.parametrize("seed", range(4))
def test_all_times_of_a_page_are_on_the_base_of_the_measured_step(seed: int) -> None:
    measured_us = 30_000.0 * (1 + 0.03 * seed)
    found = advise(job_step(9_000.0, 21_000.0), SLOW, steps=20, gpu=False, measured_us=measured_us)
    assert found.step_us == measured_us and not found.unusable
    assert found.bound_us <= measured_us * (1 + 1e-9)
    for change in found.changes:
        assert found.step_us - change.step_us == pytest.approx(found.step_us * change.saves)
        assert change.effort != "plan" or change.step_us >= found.bound_us * (1 - 1e-9)
    assert "with these buckets" in page(found)


def test_a_model_that_the_measurement_contradicts_advises_nothing() -> None:
    # Computes 400 ms and reduces for 400 ms, one after the other, while a step was measured to take 497 ms.
    found = advise(job_step(400_000.0, 400_000.0), SLOW, steps=20, gpu=False, measured_us=497_000.0)
    assert "its least time, " in found.unusable and "longer than the 497 ms" in found.unusable
    assert (found.changes, found.advised, found.best, found.bound_us) == ((), (), None, 0.0)
    assert found.confidence == "low"
    assert found.waits_us + found.compute_us <= found.step_us * (1 + 1e-9)
    assert verdict(found).startswith("The model is unusable for this job, and nothing is advised from it: ")
    said = page(found)
    assert "at best" not in said and "bucket_cap_mb" not in said and "at most 96.99 ms" in said


@pytest.mark.parametrize(("tried_us", "kept", "begin"), [
    (503_500.0, False, "`stretto run` gains nothing on this job, measured just now: 0.99x (our backend"),
    (470_000.0, False, "`stretto run` gains nothing on this job, measured just now: 1.06x, too short to be sure (our"),
    (260_000.0, True, "`stretto run` makes this job 1.91 times as fast, measured just now (our backend, plain"),
])  # fmt: skip
@pytest.mark.parametrize("reduce_us", [400_000.0, 90_000.0])
def test_what_the_job_has_just_measured_comes_first(tried_us: float, kept: bool, begin: str, reduce_us: float) -> None:
    trial = BackendTrial(
        own="gloo", own_us=496_900.0, tried="our backend, plain order", tried_us=tried_us, kept=kept
    )  # fmt: skip
    found = advise(
        job_step(400_000.0, reduce_us), SLOW, steps=20, gpu=False, measured_us=496_900.0, probed=True, trial=trial
    )
    assert verdict(found).startswith(begin), verdict(found)
    assert bool(found.unusable) == (reduce_us > 1e5)
    (row,) = [change for change in found.changes if change.effort == "plan"]
    assert row.measured and row.worthwhile == kept and row.gain == pytest.approx(496_900 / tried_us)
    said = " ".join(page(found).split())
    assert "measures" not in verdict(found) and "as described" not in said and "probed by the job" in said


@pytest.mark.parametrize("buckets", [1, 2, 5])
def test_buckets_that_gloo_reduces_at_once_make_no_model_unusable(buckets: int) -> None:
    # All buckets are there after 20 ms of compute and end together after 200 ms more, as gloo's threads share the link.
    ops = [Op(name="backward", phase="backward", duration_us=20_000.0, after=(Dep(op="update", lag=1),))]
    for at in range(buckets):
        after = (Dep(op="backward"),)
        ops.append(Op(name=f"sum{at}", kind="all_reduce", nbytes=5e6, after=after, duration_us=200_000.0))
    ends = tuple(Dep(op=f"sum{at}") for at in range(buckets))
    ops.append(Op(name="update", phase="optimizer", duration_us=100.0, after=ends))
    step = Workload(name="job", num_ranks=4, ops=tuple(ops))
    found = advise(step, SLOW, steps=10, gpu=False, measured_us=220_100.0, probed=True)
    assert found.unusable == "" and found.model_us == pytest.approx(220_100.0, rel=0.02)
    assert found.bound_us <= found.step_us * (1 + 1e-9)


def test_iterations_that_were_recorded_on_a_busy_machine_do_not_contradict_the_measured_ones() -> None:
    found = advise(job_step(400_000.0, 400_000.0), SLOW, steps=10, gpu=False, measured_us=600_000.0, probed=True)
    assert found.unusable == "" and found.confidence == "low"
    assert "that were recorded took longer than those that were measured, 800" in found.confidence_why
    assert found.bound_us <= found.step_us * (1 + 1e-9)


def test_a_network_that_is_not_the_traces_is_no_model() -> None:
    found = advise(job_step(1_000.0, 5_000_000.0), "dgx_h100:2", steps=20)
    assert "more than 64 times as long as" in found.unusable and "it is another network" in found.unusable
    assert not found.changes and found.confidence == "low"


def test_a_step_of_gloo_on_links_of_gpus_is_told_so() -> None:
    found = advise(job_step(1_000.0, 5_000_000.0), "dgx_h100:1", steps=5, gpu=False)
    assert "gloo, on which the step was recorded, does not use it" in found.unusable


def test_ranks_that_leave_devices_free_are_placed_aloud(tmp_path: Path) -> None:
    placed = "4 ranks are placed on the first 4 of 16 devices, all on one of 2 hosts"
    found = advise(job_step(1_000.0, 200.0), "dgx_h100:2", steps=20)
    assert found.placed == placed and placed in page(found)
    assert f"warning: {placed}" in found.notes
    for rank in range(4):
        trace = ddp_trace(rank, reduce_us=300.0, backward_us=100.0) | {"host_name": f"host{rank // 2}"}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace))
    apart = advise(tmp_path, "dgx_h100:2", steps=20)
    assert "the ranks of the trace were on 2 hosts, those of the model are on 1" in apart.unusable
    assert not advise(tmp_path, "hosts: 2, gpus: 2 x h100, network: 100gbit", steps=20).unusable


def test_late_ranks_are_told_apart(tmp_path: Path) -> None:
    for rank in range(4):
        trace = ddp_trace(rank, reduce_us=4000.0, backward_us=1000.0)
        for each in trace["traceEvents"] if rank == 0 else ():
            if each["name"].startswith("ncclDevKernel"):
                # The first rank comes to every call after three quarters of it, for which all others wait.
                each["ts"], each["dur"] = each["ts"] + 3000.0, each["dur"] - 3000.0
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(trace))
    found = advise(tmp_path)
    # Three ranks of four wait 3000 of 4000 us in every call: 9000 of the 13000 us that all spend there.
    assert found.late_share == pytest.approx(9 / 13, abs=0.01)
    assert "even out their work first" in page(found)


def test_without_a_cluster_only_what_was_measured_is_said() -> None:
    found = stretto.advise(TRACES[0])
    assert (found.step_us, found.waits_us, found.changes, found.plan) == (600.0, 106.0, (), None)
    assert {one.what: one.known for one in found.inputs}["cluster"] == "missing"
    assert "Give a cluster" in verdict(found)


def test_a_model_is_compared_with_its_other_parallelisms() -> None:
    found = advise("gpt:125m,ranks=4,device=a100", SLOW, steps=20, budget_s=60.0)
    names = {change.name for change in found.changes if change.effort == "parallelism"}
    assert {"mode=zero3", "tensor=2"} <= names
    assert not found.measured and found.confidence == "low"


def test_a_step_without_communication_gains_nothing() -> None:
    alone = Workload(name="alone", num_ranks=2, ops=(Op(name="work", duration_us=10.0),))
    assert "nothing to gain" in verdict(advise(alone, SLOW))


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        ([], {}, "step: is empty"),
        ("no_such.json", {}, "no_such.json"),
        ("gpt:9x", {}, "unknown variant"),
        ("gpt:125m,ranks=4", {"cluster": "dgx9"}, "unknown preset"),
        ("gpt:125m,ranks=64", {"cluster": SLOW}, "do not fit"),
        ("gpt:125m,ranks=4", {"cluster": SLOW, "budget_s": 0.0}, "budget_s"),
        ("gpt:125m,ranks=4", {"measured_us": -1.0}, "measured_us"),
        ("gpt:125m,ranks=4", {"seed": -1}, "seed"),
    ],
)
def test_wrong_inputs_are_one_line(step: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        advise(step, **options)


def test_the_command_prints_one_page_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: tmp_path / f"advice.{name}" for name in ("json", "html")}
    where = ["--json", str(files["json"]), "--html", str(files["html"]), "-o", str(tmp_path / "plan.json")]
    code = run(["advise", *map(str, TRACES), "-c", "dgx_a100:1", "--steps", "20", *where])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "17.7% of the step" in printed.out and "confidence:" in printed.out
    rows = json.loads(files["json"].read_text())
    assert rows["waits_us"] == 106.0 and {row["effort"] for row in rows["changes"]} == set(EFFORTS)
    text = files["html"].read_text()
    assert "What to do" in text and "aria-label" in text and len(text) < 100_000
    assert stretto.Plan.load(tmp_path / "plan.json").workload == "gpu_nccl"
    assert len(printed.out.splitlines()) < 66


def test_a_job_is_recorded_and_advised_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Workload(
        name="job",
        num_ranks=2,
        ops=(
            Op(name="work", duration_us=1000.0, after=(Dep(op="update", lag=1),)),
            Op(name="sum", kind="all_reduce", nbytes=10 * MB, after=(Dep(op="work"),), duration_us=4000.0),
            Op(name="update", phase="update", duration_us=10.0, after=(Dep(op="sum"),)),
        ),
    )
    machine = stretto.Cluster.preset("ring", nodes=2)
    seen: list[list[str]] = []

    def recorded(command: list[str], budget: float) -> Any:
        seen.append(command)
        captured = encode_captured(step, machine) if "train" in command else None
        return (7 if "fails" in command else 0), Status(pid=1, jobs=()), captured

    monkeypatch.setattr("stretto.cli.run_job.recorded_run", recorded)
    assert run(["advise", "--steps", "10", "--", "python", "train", "--json", "x"]) == 0
    assert seen == [["python", "train", "--json", "x"]]
    assert "a plan for every collective" in capsys.readouterr().out
    assert run(["advise", "--steps", "10", "--", "python", "train", "fails"]) == 7
    capsys.readouterr()
    assert run(["advise", "--", "python", "nothing"]) == 2
    assert "recorded no training step" in capsys.readouterr().err


def test_the_model_of_a_step_as_it_is_is_plain_fifo() -> None:
    step = Workload.load("resnet:50,ranks=4")
    cluster = stretto.Cluster.load(SLOW)
    fifo = stretto.plan(step, cluster, steps=5, systems=("fifo",)).baselines_us["fifo"]
    assert as_submitted_us(step, cluster, simulated_costs(cluster)).period_us == pytest.approx(fifo)


@pytest.mark.parametrize(
    ("word", "said"), [("nosuch", "no such file"), ("tracs/", "no such file"), ("/etc/passwd", "is no trace")]
)
def test_what_is_neither_a_step_nor_a_command_is_not_run(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["advise", word, "-c", "dgx2"]) == 2
    assert f"{word}: {said}" in capsys.readouterr().err


def test_traces_and_a_command_together_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for first in (str(tmp_path), str(TRACES[0])):
        assert run(["advise", "--budget", "5", first, "--", "python", "train.py"]) == 2
        assert "python: give traces or a command, not both" in capsys.readouterr().err
