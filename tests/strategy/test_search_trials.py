"""Trials through a command: a job that answers as `stretto.distribute` does in trial mode, without a training step."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from stretto.errors import Infeasible, InvalidInput
from stretto.strategy import ModelSpec, Variable
from stretto.strategy.builders import build
from stretto.strategy.files import load_strategy, save_model
from stretto.strategy.trials import Trials, command, named

MODEL = ModelSpec(name="two", variables=(Variable(name="w", shape=(64, 64)), Variable(name="b", shape=(64,))))


def answers(variables: Mapping[str, str], timeout_s: float) -> str:
    """A job of four ranks on two hosts that is as slow as it has servers."""
    first, _, rest = variables["STRETTO_TRIAL"].partition(",")
    if first == "describe":
        save_model(MODEL, rest)
        Path(rest).with_suffix(".hosts").write_text("[0, 0, 1, 1]")
        return "exit code 86"
    strategy = load_strategy(variables["STRETTO_STRATEGY"])
    served = sum(node.sync.kind == "parameter_server" for node in strategy.nodes)
    timed, _, path = rest.partition(",")
    found = {"ranks": 4, "median_us": 1000.0 * (1 + served), "iteration_us": 2000.0, "timed": int(timed)}
    Path(path).write_text(json.dumps(found))
    return "exit code 86"


def test_a_job_describes_its_model_and_its_hosts() -> None:
    model, there = Trials(launch=answers).describe()
    assert model == MODEL
    assert there == named([0, 0, 1, 1]) and there.by_host == ((0, 1), (2, 3))


def test_a_strategy_is_handed_over_and_timed() -> None:
    trials = Trials(launch=answers)
    assert trials.run(build("ps", MODEL, 4)) == 3000.0
    assert trials.run(build("all_reduce", MODEL, 4)) == 1000.0


def test_a_job_of_another_size_is_refused() -> None:
    with pytest.raises(Infeasible, match="the job has 4 ranks, the strategy 2"):
        Trials(launch=answers).run(build("all_reduce", MODEL, 2))


@pytest.mark.parametrize(("text", "message"), [
    ('{"ranks": 4}', "median_us"), ('{"ranks": 4, "median_us": -1}', "median_us"), ("{", "not valid JSON"),
    ('{"ranks": 0, "median_us": 1}', "ranks"), ("[]", "result"),
])  # fmt: skip
def test_a_result_that_is_none_is_refused(text: str, message: str) -> None:
    def wrong(variables: Mapping[str, str], timeout_s: float) -> str:
        Path(variables["STRETTO_TRIAL"].split(",", 2)[2]).write_text(text)
        return ""

    with pytest.raises(InvalidInput, match=message):
        Trials(launch=wrong).run(build("all_reduce", MODEL, 4))


def test_a_command_runs_with_the_variables_and_its_last_words_are_kept() -> None:
    script = "import os; print('said', os.environ['STRETTO_TRIAL']); raise SystemExit(3)"
    launch = command([sys.executable, "-c", script])
    assert launch({"STRETTO_TRIAL": "describe,x"}, 60.0) == "exit code 3: said describe,x"


def test_a_job_that_knows_nothing_of_trials_says_so() -> None:
    trials = Trials(launch=command([sys.executable, "-c", "print('trained')"]))
    with pytest.raises(Infeasible, match=r"does it call stretto\.distribute.*exit code 0: trained"):
        trials.describe()
    with pytest.raises(Infeasible, match="left no result: exit code 0: trained"):
        trials.run(build("all_reduce", MODEL, 4))


def test_what_takes_too_long_ends_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "child"
    script = (
        "import subprocess, sys, pathlib;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid)); child.wait()"
    )
    said = command([sys.executable, "-c", script])({}, 5.0)
    assert said.startswith("ended after 5 s")
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
        Trials(launch=answers, **options)  # type: ignore[arg-type]


def test_a_command_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'no-such-command' is not an executable file"):
        command(["no-such-command"])
