"""``stretto tune``, with a job that answers as a training script in trial mode does, and with a real one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stretto.cli import run
from stretto.strategy.files import load_strategy

FAKE = """
import json, os, pathlib, sys
first, _, rest = os.environ["STRETTO_TRIAL"].partition(",")
if first == "describe":
    variables = [{"name": f"w{at}", "shape": [256, 64]} for at in range(6)]
    model = {"stretto": "model", "version": 1, "name": "fake", "variables": variables}
    pathlib.Path(rest).write_text(json.dumps(model))
    pathlib.Path(rest).with_suffix(".hosts").write_text("[0, 1]")
else:
    strategy = json.loads(pathlib.Path(os.environ["STRETTO_STRATEGY"]).read_text())
    kinds = [one.get("kind") for node in strategy["nodes"] for one in node.get("parts", [node.get("sync", {})])]
    slow = sum(kind != "parameter_server" for kind in kinds) / len(kinds)
    found = {"ranks": 2, "median_us": 1000.0 + 1000.0 * slow, "iteration_us": 1.0}
    pathlib.Path(rest.partition(",")[2]).write_text(json.dumps(found))
sys.exit(86)
"""

TRAIN = """
import torch, torch.distributed as dist, stretto
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 8))
model, optimizer = stretto.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(1000):
    optimizer.zero_grad()
    model(torch.ones(4, 32)).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def fake(tmp_path: Path) -> list[str]:
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    return [sys.executable, str(script)]


def test_it_finds_what_is_faster_and_writes_it(
    fake: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best, rows = tmp_path / "best.yaml", tmp_path / "rows.json"
    assert run(["tune", "--trials", "10", "-o", str(best), "--json", str(rows), "--", *fake]) == 0
    said = capsys.readouterr().out
    assert "6 variables" in said and "2 ranks on 2 hosts" in said
    trials = json.loads(rows.read_text())
    assert len(trials) == 10 and trials[0]["origin"] == "all_reduce" and trials[0]["iteration_us"] == 2000.0
    least = min(trial["iteration_us"] for trial in trials)
    assert least < 2000.0 and f"best: {least / 1000:.2f} ms per iteration, {2000 / least:.2f}x" in said
    kinds = [sync.kind for node in load_strategy(best).nodes for sync in (node.parts or (node.sync,))]
    assert 1000 + 1000 * sum(kind != "parameter_server" for kind in kinds) / len(kinds) == pytest.approx(least)


def test_a_real_script_is_described_tried_and_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script, best = tmp_path / "train.py", tmp_path / "best.yaml"
    script.write_text(TRAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    options = ["--trials", "1", "--warmup", "1", "--timed", "3", "--timeout", "120", "-o", str(best)]
    assert run(["tune", *options, "--", *torchrun]) == 0, capfd.readouterr().err
    assert len(load_strategy(best).devices) == 2


@pytest.mark.parametrize(("options", "message"), [
    (["--trials", "0"], "--trials: must be 1..10000, not 0"),
    (["--method", "luck"], "--method: must be one of learned, random, not 'luck'"),
    (["--timed", "0"], "timed: must be 1..100000 iterations, not 0"),
    (["--jobs", "0"], "--jobs: must be 1..1024, not 0"),
    (["--backend", "cloud"], "unknown backend 'cloud'; choose from: processes, ray"),
    (["-o", "no/such/folder/best.yaml"], "there is no such folder"),
    (["--allow-stale", "40"], "staleness: must be 0..16, not 40"),
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
    assert "does it call stretto.distribute" in capsys.readouterr().err


def test_a_command_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "--", "no-such-command"]) == 2
    assert "'no-such-command' is not an executable file" in capsys.readouterr().err
