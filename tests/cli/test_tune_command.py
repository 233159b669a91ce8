# SPDX-License-Identifier: Apache-2.0
"""``stretto tune``, with a job that answers as a training script in trial mode does, and with a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stretto.cli import run
from stretto.lab import LabLayout, unavailable
from stretto.strategy.files import load_strategy

FAKE = """
import json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["STRETTO_TRIAL"].partition(",")[2])
variables = [{"name": f"w{at}", "shape": [256, 64]} for at in range(6)]
(folder / "model.hosts").write_text("[0, 1]")
(folder / ".model").write_text(
    json.dumps({"stretto": "model", "version": 1, "name": "fake", "variables": variables})
)
(folder / ".model").replace(folder / "model.json")
for number in range(1000):
    path = folder / f"{number}.json"
    while not path.exists():
        time.sleep(0.005)
    asked = json.loads(path.read_text())
    if not asked["arms"]:
        break
    if asked["rounds"] > 1 and "FAKE_ENDS" in os.environ:
        sys.exit(0)
    times, fails = [], os.environ.get("FAKE_FAILS") == str(number)
    for arm in asked["arms"]:
        slow = float(os.environ.get("FAKE_DDP", "1"))
        if "strategy" in arm:
            nodes = json.loads(arm["strategy"])["nodes"]
            kinds = [one.get("kind") for node in nodes for one in node.get("parts", [node.get("sync", {})])]
            slow = sum(kind != "parameter_server" for kind in kinds) / len(kinds)
        times.append([1000.0 + 1000.0 * slow] * asked["rounds"])
    why = ["it broke" if fails else ""] * len(times)
    (folder / ".answer").write_text(json.dumps({"ranks": 2, "times_us": times, "why": why}))
    (folder / ".answer").replace(folder / f"{number}.answer")
sys.exit(86)
"""


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))


TRAIN = """
import sys, torch, torch.distributed as dist, stretto.torch
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8))
model, optimizer = stretto.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(int(sys.argv[1]) if sys.argv[1:] else 1_000_000):
    optimizer.zero_grad()
    model(torch.ones(4, 32)).sum().backward()
    optimizer.step()
if dist.get_rank() == 0:
    print("trained by", optimizer.strategy.name)
optimizer.close()
dist.destroy_process_group()
"""


@pytest.fixture
def fake(tmp_path: Path) -> list[str]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return [sys.executable, str(script)]


def test_it_finds_what_is_faster_and_writes_it(
    fake: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best, rows, model = tmp_path / "best.yaml", tmp_path / "rows.json", tmp_path / "model.yaml"
    files = ["-o", str(best), "--json", str(rows), "--save-model", str(model)]
    assert run(["tune", "--trials", "10", *files, "--", *fake]) == 0
    said = capsys.readouterr().out
    assert "6 variables" in said and "2 ranks on 2 hosts" in said
    trials = json.loads(rows.read_text())
    assert len(trials) == 10 and trials[0]["origin"] == "all_reduce" and trials[0]["iteration_us"] == 2000.0
    least = min(trial["iteration_us"] for trial in trials)
    assert least < 2000.0 and f"best: {least / 1000:.2f} ms per iteration, {2000 / least:.2f}x" in said
    assert f"{2000 / least:.2f}x DDP" in said
    kinds = [sync.kind for node in load_strategy(best).nodes for sync in (node.parts or (node.sync,))]
    assert 1000 + 1000 * sum(kind != "parameter_server" for kind in kinds) / len(kinds) == pytest.approx(least)
    assert run(["strategy", "explain", str(best), "-m", str(model)]) == 0


def test_ddp_is_kept_where_nothing_is_faster(
    fake: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_DDP", "-0.5")
    best = tmp_path / "best.yaml"
    assert run(["tune", "--trials", "4", "-o", str(best), "--", *fake]) == 0
    assert "keep DDP: 0.50 ms per iteration" in capsys.readouterr().out.replace("\n", " ")
    assert {node.sync.kind for node in load_strategy(best).nodes} == {"all_reduce"}


def test_trials_that_did_not_run_are_in_the_table(
    fake: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "3")
    assert run(["tune", "--no-ddp", "--trials", "4", "-o", str(tmp_path / "best.yaml"), "--", *fake]) == 0
    said = capsys.readouterr().out
    assert "1 trial did not run; the first: it broke" in said and said.count("given up") == 1


def test_a_script_that_ends_by_itself_is_told_to_train_for_longer(
    fake: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_ENDS", "1")
    assert run(["tune", "--trials", "2", "-o", str(tmp_path / "best.yaml"), "--", *fake]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "keep DDP: the runs in turn did not end, so no strategy was faster" in said and "inf ms" not in said
    assert run(["tune", "--", sys.executable, "-c", "pass"]) == 2
    assert "the script ended by itself, let it train for longer; exit code 0" in capsys.readouterr().err


def test_what_is_found_goes_to_the_joint_planner(
    fake: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, plan = tmp_path / "lab.yaml", tmp_path / "plan.json"
    LabLayout.of(hosts=2, ranks_per_host=1, uplinks={"eth": "300mbit"}).cluster().save(cluster)
    options = ["--trials", "2", "--cluster", str(cluster), "--plan", str(plan), "--budget", "0.5"]
    assert run(["tune", *options, "-o", str(tmp_path / "best.yaml"), "--", *fake]) == 0
    said = capsys.readouterr().out
    assert "planned: " in said and "in order of submission" in said
    assert run(["plan", "show", str(plan)]) == 0


def train(tmp_path: Path) -> str:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    return str(script)


SHORT = ["--trials", "2", "--warmup", "1", "--timed", "3", "--rounds", "2", "--timeout", "600"]


def test_a_real_script_is_described_tried_and_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    best = tmp_path / "best.yaml"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert run(["tune", *SHORT, "-o", str(best), "--", *torchrun, train(tmp_path)]) == 0, capfd.readouterr().err
    said = capfd.readouterr().out
    assert len(load_strategy(best).devices) == 2 and "DDP" in said and "did not run" not in said
    again = subprocess.run(
        [*torchrun, train(tmp_path), "7"], env={**os.environ, "STRETTO_STRATEGY": str(best)}, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip
    assert again.returncode == 0 and "trained by tuned-Sequential" in again.stdout, again.stderr


def test_a_script_in_the_lab_is_tuned_to_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    best = tmp_path / "best.yaml"
    lab = [sys.executable, "-m", "stretto", "lab", "run", "--hosts", "2", "--ranks", "1", "--uplink", "400mbit", "--"]
    job = [*lab, sys.executable, train(tmp_path)]
    code = run(["tune", *SHORT, "-o", str(best), "--", *job])
    if why := unavailable():
        assert code == 2 and why in capfd.readouterr().err
        return
    assert code == 0, capfd.readouterr().err
    said = capfd.readouterr().out
    assert "2 ranks on 2 hosts" in said and "did not run" not in said
    assert len(load_strategy(best).devices) == 2


@pytest.mark.parametrize(("options", "message"), [
    (["--rounds", "-1"], "--rounds: must be 0..1000, not -1"),
    (["--plan", "plan.json"], "--plan: the planner needs to know the network: give --cluster"),
    (["--trials", "0"], "--trials: must be 1..10000, not 0"),
    (["--method", "luck"], "--method: unknown method 'luck'; choose from: learned, random"),
    (["--timed", "0"], "timed: must be 1..100000 iterations, not 0"),
    (["--jobs", "0"], "--jobs: must be 1..1024, not 0"),
    (["--backend", "cloud"], "unknown backend 'cloud'; choose from: processes, ray"),
    (["-o", "no/such/folder/best.yaml"], "there is no directory no/such/folder"),
    (["-o", "/"], "--output: /: is a directory, not a file"),
    (["--allow-stale", "40"], "--allow-stale: must be 0..16, not 40"),
    (["--cluster", "dgx2"], "has 16 devices, the job 2 ranks"),
])  # fmt: skip
def test_wrong_options_are_one_line(
    options: list[str], message: str, fake: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", *options, "--", *fake]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_job_that_knows_nothing_of_us_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--", sys.executable, "-c", "print('hello')"]) == 2
    assert "does it call stretto.torch.distribute" in capsys.readouterr().err


def test_a_command_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--", "no-such-command"]) == 2
    assert "'no-such-command' is not an executable file" in capsys.readouterr().err
