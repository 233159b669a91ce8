# SPDX-License-Identifier: Apache-2.0
"""``stretto runtime``, and ``--runtime`` of other commands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., str]


def test_runtimes_are_listed_and_shown(good: Run, bad: Run, tmp_path: Path) -> None:
    assert "mscclpp:h200" in good("runtime", "list")
    file = tmp_path / "mine.yaml"
    assert "42 GB/s" in good("runtime", "show", "mscclpp:h200", "-o", str(file))
    assert good("runtime", "show", str(file)).splitlines()[0].strip() == "mscclpp:h200"
    assert "network" in bad("runtime", "show", "netwrok")


def test_a_runtime_makes_programs_slower(good: Run, bad: Run, tmp_path: Path) -> None:
    times = []
    for more in ((), ("--runtime", "mscclpp:h200")):
        rows = tmp_path / "rows.json"
        good("simulate", "ring", "-c", "shared_gpu:4", "-b", "1M", "--json", str(rows), *more)
        times.append(json.loads(rows.read_text())["rows"][0]["time_us"])
    assert times[1] > times[0]
    assert "expanded" in bad("simulate", "hierarchical", "--symmetric", "-c", "torus:16", "--runtime", "network")


def test_synth_says_the_time_on_the_runtime(good: Run, tmp_path: Path) -> None:
    said = good(
        "synth", "allgather", "-c", "shared_gpu:2", "-b", "1M", "--runtime", "mscclpp:h200", "--makers", "library",
        "--no-cache", "-o", str(tmp_path / "ag.json"),
    )  # fmt: skip
    assert "on mscclpp:h200" in said
    assert json.loads((tmp_path / "ag.certificate.json").read_text())["certificate"]["runtime"] == "mscclpp:h200"


def test_prices_are_fitted_to_a_file_of_times(good: Run, bad: Run, tmp_path: Path) -> None:
    good("simulate", "ring", "-c", "shared_gpu:2", "--collective", "all_gather", "-o", str(tmp_path / "ag.xml"))
    rows = [
        {"program": "ag.xml", "nbytes": nbytes, "time_us": time_us, "judge": judge}
        for nbytes, time_us, judge in ((1000, 8.0, False), (10**7, 300.0, False), (10**6, 40.0, True))
    ]
    measured, made = tmp_path / "measured.json", tmp_path / "made.yaml"
    measured.write_text(json.dumps({"cluster": "shared_gpu:2", "rows": rows}))
    assert "not fitted" in good("runtime", "fit", str(measured), "-o", str(made), "--free", "put,instruction_us")
    assert "made" in good("runtime", "show", str(made))
    for wrong in (-1.0, 1e308, 2**64):
        rows[1]["time_us"] = wrong
        measured.write_text(json.dumps({"cluster": "shared_gpu:2", "rows": rows}))
        assert "rows[1].time_us: must be > 0" in bad("runtime", "fit", str(measured), "-o", str(made))
