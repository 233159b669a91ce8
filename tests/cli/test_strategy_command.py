# SPDX-License-Identifier: Apache-2.0
"""The command ``stretto strategy``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto import Plan

Run = Callable[..., str]
ON = ("-m", "vgg16@0.1", "-c", "autodist_b5")


@pytest.fixture
def made(good: Run, tmp_path: Path) -> Path:
    """A strategy in a file."""
    path = tmp_path / "made.yaml"
    good("strategy", "build", "partitioned_ps", *ON, "--set", "part_mb=0.1", "-o", str(path))
    return path


def test_it_lists_builders_and_models(good: Run) -> None:
    text = good("strategy", "list")
    for word in ("partitioned_all_reduce", "zero2", "chunk, bucket_mb", "ncf_sparse"):
        assert word in text


def test_what_is_built_can_be_shown_explained_and_timed(good: Run, made: Path) -> None:
    shown = " ".join(good("strategy", "show", str(made)).split())
    assert "32 variables on 8 devices, lossless" in shown
    assert "parameter_server" in shown
    words = good("strategy", "explain", str(made), "-m", "vgg16@0.1")
    assert "cut 2 along axis 0; sums to 2 servers (h1.gpu0, h0.gpu0)" in " ".join(words.split())
    one = good("strategy", "explain", str(made), "-m", "vgg16@0.1", "--variable", "features.0.bias")
    assert "sums to server h" in one
    text = good("strategy", "simulate", str(made), "all", *ON)
    assert "partitioned_all_reduce" in text
    assert "busiest link" in text


def test_a_strategy_for_fewer_ranks_than_the_cluster_has_is_said_to_be_one(good: Run, tmp_path: Path) -> None:
    few = tmp_path / "few.yaml"
    good("strategy", "build", "all_reduce", "-m", "vgg16@0.1", "--ranks", "4", "-o", str(few))
    text = "".join(good("strategy", "simulate", str(few), "all_reduce", *ON).split())
    assert "few.yaml:trainsonthefirst4of8devicesonly" in text
    assert "all_reduce: trains" not in text


def test_differences_are_counted(good: Run, made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    good("strategy", "build", "all_reduce", *ON, "--set", "chunk=8", "-o", str(other))
    assert "decisions differ" in good("strategy", "diff", str(made), str(other))
    assert "no decision differs" in good("strategy", "diff", str(made), str(made))


def test_numbers_and_a_plan_are_written(good: Run, tmp_path: Path) -> None:
    rows, plan = tmp_path / "rows.json", tmp_path / "plan.json"
    text = good("strategy", "simulate", "all_reduce", "ps", *ON, "--json", str(rows), "--budget", "1", "-o", str(plan))
    assert "planned all_reduce" in text
    assert {row["system"] for row in json.loads(rows.read_text())} == {"all_reduce", "ps"}
    assert Plan.load(plan).workload == "vgg16@0.1:all_reduce"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("build", "magic", *ON, "-o", "x.yaml"), "unknown builder 'magic'"),
        (("build", "ps", "-m", "vgg16", "-o", "x.yaml"), "give either --cluster or --ranks"),
        (("build", "ps", *ON, "--set", "speed=9", "-o", "x.yaml"), "unknown option of builder ps 'speed'"),
        (("build", "ps", "-m", "vgg17", "--ranks", "2", "-o", "x.yaml"), "unknown model 'vgg17'"),
        (("show", "missing.yaml"), "missing.yaml: No such file"),
        (("simulate", "magic", *ON), "unknown strategy, builder or file"),
        (("simulate", "ps", *ON, "--budget", "-1"), "--budget: must be 0..3600 seconds"),
        (("simulate", "ps", *ON, "--output", "p.json"), "--output: needs --budget"),
        (("simulate", "ps", "-m", "vgg16", "-c", "autodist_b5", "--device", "h900"), "unknown device 'h900'"),
    ],
)
def test_wrong_input_is_one_line(bad: Run, arguments: tuple[str, ...], message: str) -> None:
    assert message in bad("strategy", *arguments)


def test_a_strategy_for_another_model_or_cluster_is_refused(bad: Run, made: Path) -> None:
    assert "was made for vgg16@0.1, not for lm1b" in bad("strategy", "explain", str(made), "-m", "lm1b")
    other = bad("strategy", "simulate", str(made), "-m", "vgg16@0.1", "-c", "dgx2:1")
    assert "unknown device 'h1.gpu0'; choose from: h0.gpu0" in other


@pytest.mark.parametrize(
    ("line", "instead", "message"),
    [
        ("partition: [2, 1]", "partition: [[200, 300], 1]", "partition[0]: sizes [200, 300] must be > 0 and add up to"),
        ("partition: [2, 1]", "partition: [3, 1]", "parts: must be 3 (as cut), not 2"),
        ("placement: [h1.gpu0]", "placement: [h9.gpu0]", "sync.placement: unknown device 'h9.gpu0'; choose from: h0"),
    ],
)
def test_cuts_and_devices_that_do_not_fit_are_refused(
    bad: Run, made: Path, line: str, instead: str, message: str
) -> None:
    made.write_text(made.read_text().replace(line, instead, 1))
    for command in (("explain", str(made), "-m", "vgg16@0.1"), ("simulate", str(made), *ON)):
        assert message in " ".join(bad("strategy", *command).split())


def test_strategies_of_two_models_are_not_compared(good: Run, bad: Run, made: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    good("strategy", "build", "ps", "-m", "ncf_dense@0.1", "-c", "autodist_b5", "-o", str(other))
    assert "partitioned_ps is for vgg16@0.1" in bad("strategy", "diff", str(made), str(other))


@pytest.mark.parametrize("command", ["build", "show", "simulate", "diff", "explain"])
def test_help_teaches_by_example(good: Run, command: str) -> None:
    assert f"stretto strategy {command} " in good("strategy", command, "--help").partition("Example")[2]
