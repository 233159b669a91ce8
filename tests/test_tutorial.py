# SPDX-License-Identifier: Apache-2.0
"""What the tutorial and the how-to pages say to type is run, or at least well formed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stretto.cli import run
from stretto.lab import unavailable

ROOT = Path(__file__).parents[1]
TORN_DOWN_TOO_EARLY = "terminate called without an active exception"
"""What plain PyTorch says, rarely: DDP leaves gloo's threads behind, and one may want the interpreter after its end."""


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of these languages ("" for none)."""
    text = (ROOT / page).read_text()
    return [body for name, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if name in languages]


@pytest.mark.parametrize("page", ["docs/tutorial.md", "docs/howto.md"])
def test_scripts_are_well_formed(page: str) -> None:
    for block in blocks(page, "sh"):
        subprocess.run(["sh", "-n"], input=block, text=True, check=True)
    for block in blocks(page, "yaml"):
        assert all(isinstance(each, dict) for each in yaml.safe_load_all(block))
    for block in blocks(page, "python"):
        compile(block, page, "exec")


def test_the_job_of_the_tutorial_trains(tmp_path: Path) -> None:
    script = next(block for block in blocks("docs/tutorial.md", "python") if "init_process_group" in block)
    (tmp_path / "train.py").write_text(script)
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "STEPS": "3"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rank 0: loss ")


def test_the_recorder_of_the_tutorial_leaves_a_trace(tmp_path: Path) -> None:
    script = next(block for block in blocks("docs/tutorial.md", "python") if "def recorder" in block)
    loop = """
import torch
with recorder(0) as profiler:
    for _ in range(9):
        torch.ones(2).sum()
        profiler.step()
"""
    (tmp_path / "record.py").write_text(script + loop)
    subprocess.run([sys.executable, "record.py"], cwd=tmp_path, capture_output=True, timeout=300, check=True)
    assert (tmp_path / "traces" / "rank0.json.gz").exists()


@pytest.mark.skipif(unavailable() is not None, reason="no lab can be built here")
def test_the_lab_commands_of_the_tutorial_train(tmp_path: Path) -> None:
    lines = [line for block in blocks("docs/tutorial.md", "sh") for line in block.splitlines() if " lab run " in line]
    plain, *wrapped, two_channels = lines
    assert len(wrapped) == 2 and all(line.endswith(f"-- {plain}") for line in wrapped), "the others run the same"
    again = re.sub(r"--uplink rdma=(\w+) --uplink eth=\w+", r"--uplink \1", two_channels)
    assert two_channels.count("--uplink") == 2 and again.endswith(f"-- {plain}"), "the last one has a channel more"
    script = next(block for block in blocks("docs/tutorial.md", "python") if "init_process_group" in block)
    (tmp_path / "train.py").write_text(script)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for _ in range(3):
        done = subprocess.run(
            shlex.split(plain), cwd=tmp_path, env=os.environ | {"STEPS": "2", "PATH": path}, capture_output=True,
            text=True, timeout=600, check=False,
        )  # fmt: skip
        if TORN_DOWN_TOO_EARLY not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition(": loss ")[0] for line in done.stdout.splitlines()) == [
        f"[{rank}] rank {rank}" for rank in range(4)
    ]


def test_the_snippet_of_advise_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = blocks("docs/advise.md", "python")
    exec(compile(snippet, "docs/advise.md", "exec"), {})
    assert "low" in capsys.readouterr().out


def test_the_commands_of_the_tutorial_answer_for_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("traces").mkdir()
    for trace in (ROOT / "tests" / "workload" / "data").glob("gpu_nccl.*.json"):
        shutil.copy(trace, Path("traces"))
    shutil.copy(ROOT / "tests" / "cluster" / "data" / "smi_dgx_a100.txt", "topo.txt")
    shown = (line for block in blocks("docs/tutorial.md", "sh") for line in block.splitlines())
    lines = [line for line in shown if re.match(r"stretto .* traces/", line)]
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line)[1:]
        assert run([*words, "--steps", "10"]) == 0, capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} >= {"advice.html", "plan.json", "plan.html", "nccl.csv"}
