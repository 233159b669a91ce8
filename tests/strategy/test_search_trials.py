# SPDX-License-Identifier: Apache-2.0
"""Trials through a command: a job that answers as `stretto.torch.distribute` does in a session, without training."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from stretto.errors import Infeasible, InvalidInput
from stretto.strategy import ModelSpec, Variable
from stretto.strategy.builders import build
from stretto.strategy.files import model_text
from stretto.strategy.requests import Arm, Reference, leave, read_answer, read_request, request
from stretto.strategy.trials import Trials, command, named

MODEL = ModelSpec(name="two", variables=(Variable(name="w", shape=(64, 64)), Variable(name="b", shape=(64,))))
JOB = """
import json, os, pathlib, sys, time
folder = pathlib.Path(os.environ["STRETTO_TRIAL"].partition(",")[2])
(folder / "model.hosts").write_text("[0, 0, 1, 1]")
(folder / ".model").write_text(MODEL)
(folder / ".model").replace(folder / "model.json")
number = 0
while True:
    path = folder / f"{number}.json"
    while not path.exists():
        time.sleep(0.01)
    asked = json.loads(path.read_text())
    if not asked["arms"]:
        print("asked to end")
        sys.exit(86)
    times, why = [], []
    for arm in asked["arms"]:
        strategy = json.loads(arm["strategy"]) if "strategy" in arm else {"name": "ddp", "nodes": []}
        if strategy["name"] == "zero1":
            raise SystemExit("cannot shard")
        if strategy["name"] == "zero2":
            time.sleep(600)
        served = sum(node.get("sync", {}).get("kind") == "parameter_server" for node in strategy["nodes"])
        times.append([1000.0 * (1 + served) + arm.get("ddp_mb", 0) + asked["timed"]] * asked["rounds"])
        why.append("not for this job" if strategy["name"] == "random_axis" else "")
    (folder / ".answer").write_text(json.dumps({"ranks": 4, "times_us": times, "why": why}))
    (folder / ".answer").replace(folder / f"{number}.answer")
    number += 1
"""


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    script = tmp_path / "job.py"
    script.write_text(f"MODEL = {model_text(MODEL, as_json=True)!r}\n{JOB}")
    return [sys.executable, str(script)]


def test_a_job_is_started_once_described_and_asked(job: list[str], tmp_path: Path) -> None:
    with Trials(command(job), timed=40, folder=str(tmp_path)) as trials:
        model, there = trials.describe()
        assert model == MODEL
        assert there == named([0, 0, 1, 1]) and there.by_host == ((0, 1), (2, 3))
        assert trials.run(build("ps", MODEL, 4)) == 3040.0
        assert trials.run_all([build("all_reduce", MODEL, 4), Reference()]) == [1040.0, 1065.0]
        found = trials.rounds([build("all_reduce", MODEL, 4), Reference(bucket_mb=1.0)], 3)
        assert found == [[1010.0] * 3, [1011.0] * 3]
        assert trials.starts == 1
    assert not list(tmp_path.glob("stretto-tune-*"))


def test_a_job_that_dies_or_stands_still_is_started_again(job: list[str]) -> None:
    with Trials(command(job), timeout_s=300.0) as trials:
        died, ran, refused = trials.run_all([build(name, MODEL, 4) for name in ("zero1", "all_reduce", "random_axis")])
        assert isinstance(died, Infeasible) and "left no result: exit code 1: cannot shard" in str(died)
        assert ran == 1040.0 and str(refused) == "not for this job" and trials.starts == 2
        trials.timeout_s = 1.0
        with pytest.raises(Infeasible, match=r"left no result: ended after 1 s"):
            trials.run(build("zero2", MODEL, 4))
        trials.timeout_s = 300.0
        assert trials.run(build("all_reduce", MODEL, 4)) == 1040.0 and trials.starts == 3


def test_a_job_of_another_size_is_refused(job: list[str]) -> None:
    with (
        Trials(command(job)) as trials,
        pytest.raises(Infeasible, match="the job has 4 ranks, the strategy 2"),
    ):
        trials.run(build("all_reduce", MODEL, 2))


@pytest.mark.parametrize(("answer", "message"), [
    ('{"ranks": 4, "why": []}', "times_us"), ('{"ranks": 4, "times_us": [[-1]], "why": [""]}', "times_us"),
    ("{", "not valid JSON"), ('{"ranks": 0, "times_us": [[1]], "why": [""]}', "ranks"), ("[]", "answer"),
])  # fmt: skip
def test_an_answer_that_is_none_is_refused(answer: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "0.answer"
    path.write_text(answer)
    with pytest.raises(InvalidInput, match=message):
        read_answer(path)


def test_a_request_comes_back_as_it_was(tmp_path: Path) -> None:
    arms: list[Arm] = [build("ps", MODEL, 4), Reference(bucket_mb=2.5)]
    leave(request(arms, rounds=3, warmup=1, timed=2), tmp_path / "0.json")
    asked = read_request(tmp_path / "0.json")
    assert [asked.arm(at) for at in range(2)] == arms
    assert (asked.rounds, asked.warmup, asked.timed) == (3, 1, 2)


@pytest.mark.parametrize("change", [{"rounds": 0}, {"timed": 0}, {"warmup": -1}, {"arms": [{"ddp_mb": -1}]}])
def test_a_request_for_nothing_sensible_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    path.write_text(json.dumps({"arms": [], "rounds": 1, "warmup": 0, "timed": 1} | change))
    with pytest.raises(InvalidInput, match=next(iter(change))):
        read_request(path)


def test_a_command_runs_with_the_variables_and_its_last_words_are_kept() -> None:
    script = "import os; print('said', os.environ['STRETTO_TRIAL']); raise SystemExit(3)"
    running = command([sys.executable, "-c", script])({"STRETTO_TRIAL": "x"})
    assert running.end() == "exit code 3: said x" == running.ended()


def test_of_a_launchers_many_words_the_error_is_kept() -> None:
    script = "print('[rank0]: ValueError: no such thing'); print('x\\n' * 50); raise SystemExit(1)"
    assert command([sys.executable, "-c", script])({}).end() == "exit code 1: [rank0]: ValueError: no such thing"


def test_a_job_that_knows_nothing_of_trials_says_so() -> None:
    with Trials(command([sys.executable, "-c", "print('trained')"])) as trials:
        with pytest.raises(Infeasible, match=r"does it call stretto\.torch\.distribute.*exit code 0: trained"):
            trials.describe()
        with pytest.raises(Infeasible, match=r"left no result: the script ended by itself.*exit code 0: trained"):
            trials.run(build("all_reduce", MODEL, 4))


def test_what_does_not_end_by_itself_ends_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "child"
    script = (
        "import subprocess, sys, pathlib;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid)); child.wait()"
    )
    running = command([sys.executable, "-c", script])({})
    while not note.exists() or not note.read_text():
        assert running.ended() is None
        time.sleep(0.02)
    assert running.end().startswith("exit code -15")
    child = int(note.read_text())
    for _ in range(200):
        if not _alive(child):
            break
        time.sleep(0.05)
    assert not _alive(child)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(("options", "message"), [
    ({"timed": 0}, r"timed: must be 1\.\.100000 iterations, not 0"), ({"warmup": -1}, "warmup: must be"),
    ({"timeout_s": 0.0}, "timeout: must be more than 0"),
])  # fmt: skip
def test_bad_options_of_trials_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Trials(command([sys.executable]), **options)  # type: ignore[arg-type]


def test_a_command_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'no-such-command' is not an executable file"):
        command(["no-such-command"])
