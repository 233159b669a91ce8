# SPDX-License-Identifier: Apache-2.0
"""``stretto lab run`` in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from stretto import Cluster
from stretto.cli import run
from stretto.lab import Lab

pytestmark = pytest.mark.real_lab

SMALL = ("lab", "run", "--hosts", "2", "--ranks", "1", "--uplink", "rdma=400mbit", "--uplink", "eth=200mbit")


def test_output_carries_the_rank_and_the_failing_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    script = 'echo "got $X on $STRETTO_LAB_HOST"; [ $RANK = 0 ] || { sleep 0.3; echo wrong >&2; exit 9; }'
    assert run([*SMALL, "--env", "X=a=b", "--keep-going", "--", "sh", "-c", script]) == 9
    said = capsys.readouterr()
    assert sorted(said.out.splitlines()) == ["[0] got a=b on 0", "[1] got a=b on 1"]
    first, wrong, last = said.err.splitlines()
    assert first.startswith("stretto lab: 2 hosts x 1 rank, host order, rdma=400mbit eth=200mbit (tbf), ")
    assert wrong == "[1] wrong"
    assert last == "stretto lab: rank 1 on h1 ended with exit code 9"


def test_quiet_shows_only_the_end_of_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    script = "seq 100; [ $RANK = 0 ] || exit 3"
    assert run([*SMALL, "--quiet", "--keep-going", "--", "sh", "-c", script]) == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[1:-1] == [f"[1] {number}" for number in range(81, 101)]


def test_options_of_the_command_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "echo", "--hosts", "-q"]) == 0
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] --hosts -q", "[1] --hosts -q"]


def test_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--timeout", "0.5", "--", "sleep", "1000"]) == 124
    assert capsys.readouterr().err.splitlines()[-1] == "stretto lab: time was up after 0.5 s"


def test_the_truth_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "truth.yaml"
    assert run([*SMALL, "-o", str(file), "--", "true"]) == 0
    assert str(file) in capsys.readouterr().out
    lab = Lab(hosts=2, ranks_per_host=1, uplinks={"rdma": "400mbit", "eth": "200mbit"})
    assert Cluster.load(str(file)) == lab.cluster()


def test_a_command_that_does_not_exist_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SMALL, "--", "no-such-command"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("stretto: error: command: 'no-such-command' is not")
