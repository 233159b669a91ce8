# SPDX-License-Identifier: Apache-2.0
"""The command ``stretto reshard``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto import Program
from stretto.programs.formats import load_program

Run = Callable[..., str]
CASE6 = ("--src", "(2,4) S0RR", "--dst", "(3,4) S0RR", "--shape", "1024,1024,512", "--cluster", "p3_8xlarge:5")


def test_it_prints_tasks_strategies_and_schedule(good: Run) -> None:
    text = good("reshard", *CASE6)
    for word in ("4 unit tasks", "342:512", "send_recv", "global_allgather", "1.001x", "from 4 to 12,13,14,15"):
        assert word in text


def test_it_writes_a_page_a_trace_numbers_and_a_program_that_verifies(good: Run, tmp_path: Path) -> None:
    names = ("a.html", "a.pftrace", "a.json", "a.txt")
    page, trace, rows, program = (tmp_path / name for name in names)
    files = ("--html", str(page), "--trace", str(trace), "--json", str(rows), "-o", str(program))
    small = ("--src", "(2,2) S0R", "--dst", "(2,2) RS0", "--shape", "256,256", "-c", "p3_8xlarge:4")
    good("reshard", *small, *files)
    assert "stretto: 1." in page.read_text()
    assert trace.stat().st_size > 0
    assert {row["system"] for row in json.loads(rows.read_text())} >= {"send_recv", "broadcast", "stretto"}
    loaded = load_program(program)
    assert isinstance(loaded, Program)
    loaded.verify()


def test_errors_name_the_option_and_how_to_take_the_same_devices(bad: Run) -> None:
    on = ("--shape", "64,64", "-c", "dgx_a100:1")
    said = bad("reshard", "--src", "(2,4) S0R", "--dst", "(2,4) RS1", *on)
    assert "--dst: mesh (2,4): needs 8 devices" in said and "to use the same devices write (2,4)@0-7" in said
    assert "--src: S0RR: is for 3 dimensions" in bad(
        "reshard", "--src", "(2,4)@0-7 S0RR", "--dst", "(2,4)@0-7 RS0", *on
    )


def test_pending_sums_and_tensors_in_place(good: Run) -> None:
    on = ("--shape", "64,64", "-c", "p3_8xlarge:4")
    assert "stretto" in good("reshard", "--src", "(4,4)@0-15 RRP01", "--dst", "(4,4)@0-15 S01R", *on)
    assert "in place already" in good("reshard", "--src", "(4,4)@0-15 S0R", "--dst", "(4,4)@0-15 S01R", *on)


def test_what_was_asked_for_is_never_left_out_silently(good: Run, tmp_path: Path) -> None:
    on = ("--shape", "64,64", "-c", "p3_8xlarge:4")
    there = ("--src", "(4,4)@0-15 S0R", "--dst", "(4,4)@0-15 S01R")
    rows = tmp_path / "a.json"
    text = good("reshard", *there, *on, "--json", str(rows), "--trace", str(tmp_path / "a.pftrace"))
    assert {row["time_us"] for row in json.loads(rows.read_text())} == {0.0}
    assert "no trace to write" in text
    pending = ("--src", "(4,4)@0-15 RRP01", "--dst", "(4,4)@0-15 S01R")
    assert "broadcast" in good("reshard", *pending, *on, "--strategies", "broadcast")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("--src", "(2,4) S0XR"), "expected one of S"),
        (("--src", "nonsense"), "expected a mesh and a spec"),
        (("--dst", "(9,9) S0RR"), "needs 81 devices"),
        (("--shape", "12,x"), "--shape '12,x': expected sizes"),
        (("--shape", "12,12"), "is for 3 dimensions, the tensor has 2"),
        (("--dtype", "float31"), "unknown dtype 'float31'; choose from: float64"),
        (("--strategies", "magic"), "unknown strategy 'magic'; choose from: send_recv"),
        (("--rounding", "up"), "unknown rounding 'up'; choose from: chunk, balanced"),
        (("--cluster", "p3_8xlarg:2"), "p3_8xlarg"),
    ],
)
def test_wrong_input_is_one_line(bad: Run, change: tuple[str, str], message: str) -> None:
    assert message in bad("reshard", *CASE6, *change)
