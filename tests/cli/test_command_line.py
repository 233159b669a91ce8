# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import typer.main

import stretto
import stretto.cli
from stretto.cli import app, run
from stretto.cli.common import parse_options, parse_ranks, progress
from stretto.errors import InvalidInput

Run = Callable[..., str]


def stretto_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stretto", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_version_is_printed(good: Run) -> None:
    assert good("--version") == f"stretto {stretto.__version__}\n"


def test_nothing_asked_prints_help(good: Run) -> None:
    assert "stretto demo" in good()


def every_command() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for name, command in typer.main.get_group(app).commands.items():
        found += [(name, inner) for inner in getattr(command, "commands", ())]
        if not getattr(command, "commands", ()) or name == "plan":
            found.append((name,))
    return found


@pytest.mark.parametrize("command", every_command(), ids=" ".join)
def test_every_command_teaches_by_example(command: tuple[str, ...], good: Run) -> None:
    usage, example, examples = good(*command, "--help").partition("Example")
    assert example, usage
    assert f"stretto {' '.join(command)}" in examples


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nonsense",), "No such command 'nonsense'"),
        (("--nonsense",), "No such option"),
        (("simulate",), "Missing argument"),
        (("simulate", "ring"), "Missing option '--cluster'"),
        (("simulate", "ring", "--cluster"), "requires an argument"),
        (("simulate", "ring", "all_reduce", "extra", "--cluster", "dgx2"), "unexpected extra argument"),
        (
            ("simulate", "ring", "--cluster", "dgx2", "--chunks", "many"),
            "'--chunks': Input should be a valid integer",
        ),
        (("collective", "nonsense"), "No such command 'nonsense'"),
    ],
)
def test_usage_errors_are_one_line_that_names_the_help(arguments: tuple[str, ...], message: str, bad: Run) -> None:
    line = bad(*arguments)
    assert message in line
    assert "--help'" in line


def test_exit_codes_of_the_real_process() -> None:
    done = stretto_process("--version")
    assert (done.returncode, done.stderr) == (0, "")
    wrong = stretto_process("simulate", "nonsense", "--cluster", "dgx2")
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("stretto: error: unknown algorithm or file 'nonsense'; choose from: all, ring")
    assert wrong.stderr.count("\n") == 1
    assert wrong.stdout == ""


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "stretto", "algorithms"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stretto.cli, "app", interrupted)
    assert run(["demo"]) == 130


def test_help_loads_nothing_heavy() -> None:
    heavy = ("plotly", "perfetto", "google.protobuf", "torch")
    script = f"import sys, stretto.cli as c; c.run(['--help']); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1] == "[]"


def test_rank_lists() -> None:
    assert parse_ranks("0-2,7", 8) == (0, 1, 2, 7)
    for text in ("0", "9", "0-9", "3-1", "x", "1,1", "", "-1", "0-", "1,,2", "9" * 30):
        with pytest.raises(InvalidInput, match="--ranks"):
            parse_ranks(text, 8)


def test_algorithm_options() -> None:
    assert parse_options(["a=1", "b=x", "c=1,2"]) == {"a": 1, "b": "x", "c": [1, 2]}
    for text in ("a", "=1", "a=", "a b=1"):
        with pytest.raises(InvalidInput, match="--set"):
            parse_options([text])
    with pytest.raises(InvalidInput, match="twice"):
        parse_options(["a=1", "a=2"])


def test_progress_stays_silent_when_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("working", 3) as advance:
        for label in "abc":
            advance(label)
    assert capsys.readouterr() == ("", "")
