# SPDX-License-Identifier: Apache-2.0
"""The examples that need no job, run as their first lines say; and every example is tested somewhere."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TESTED_IN = {
    "advise_traces": "tests/examples/test_examples.py",
    "capture_dlrm": "tests/jobs/capture_examples_job.py",
    "capture_gpt": "tests/jobs/capture_examples_job.py",
    "compare_algorithms": "tests/examples/test_examples.py",
    "own_algorithm": "tests/examples/test_examples.py",
    "own_carrier": "tests/jobs/enforcer_carrier_job.py",
    "plan_step": "tests/examples/test_examples.py",
    "sync_weights": "tests/examples/test_examples_jobs.py",
    "topology_to_file": "tests/examples/test_examples.py",
    "train_ddp": "tests/jobs/backend_examples_job.py",
    "train_fsdp": "tests/jobs/backend_examples_job.py",
    "train_hybrid": "tests/jobs/backend_examples_job.py",
    "train_job": "examples/train_ddp.py",
    "train_loop": "examples/train_ddp.py",
    "train_mesh_pipeline": "tests/jobs/mesh_pipeline_job.py",
    "train_pipeline": "tests/examples/test_examples_jobs.py",
    "train_strategy": "tests/examples/test_examples_jobs.py",
    "train_unchanged": "tests/cli/test_run_command.py",
}
"""What runs each example; `own_carrier`, `train_job` and `train_loop` are parts of others."""


def run(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *words])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_every_example_is_tested() -> None:
    assert sorted(TESTED_IN) == sorted(path.stem for path in EXAMPLES.glob("*.py"))
    assert [name for name, where in TESTED_IN.items() if name not in (ROOT / where).read_text()] == []


def test_examples_say_how_to_run_them() -> None:
    for name in TESTED_IN.keys() - {"own_carrier", "train_job", "train_loop"}:
        assert f"examples/{name}.py" in (EXAMPLES / f"{name}.py").read_text().split('"""')[1]


def test_examples_are_short() -> None:
    lines = {name: len((EXAMPLES / f"{name}.py").read_text().splitlines()) for name in TESTED_IN}
    assert {name: count for name, count in lines.items() if count >= 60} == {}


def test_an_algorithm_by_hand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "own_algorithm")
    refused, proved, timed = capsys.readouterr().out.splitlines()
    assert refused.startswith("refused: ") and "rank 1" in refused
    assert proved.startswith("proved: ") and "us" in timed


def test_algorithms_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "compare_algorithms")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(float(line.split()[-3].removesuffix("x")) >= 1 for line in lines), "no time is below the bound"


def test_advice_on_traces(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    traces = [str(ROOT / "tests" / "workload" / "data" / f"gpu_nccl.{rank}.json") for rank in range(4)]
    run(monkeypatch, "advise_traces", *traces, "gpus: 4 x a100", "--steps", "10")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "waits for communication: 17.7% of 0.6 ms" and "a plan for every collective" in "".join(said)


def test_a_step_by_hand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(monkeypatch, "plan_step", "--steps", "50", "--output", str(tmp_path / "plan.json"))
    plain, plan, bound = (float(text) for text in re.findall(r"[0-9]+", capsys.readouterr().out))
    assert bound <= plan <= plain and (tmp_path / "plan.json").exists()


def test_a_topology_becomes_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))
    run(monkeypatch, "topology_to_file")
    assert capsys.readouterr().out.rstrip().endswith("read back, proved, and run on data of 4 ranks")
