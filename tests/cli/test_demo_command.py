# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from stretto.cli import demo_lab
from stretto.cli.demo import _Tour
from stretto.cluster import Cluster
from stretto.lab import unavailable
from stretto.planner.plan import Plan
from stretto.programs import Lowered, Program
from stretto.programs.formats import load_program

Run = Callable[..., str]


def test_the_demo_goes_all_the_way_and_leaves_files_that_can_be_read(good: Run, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "demo"
    text = good("demo", "-o", str(folder))
    assert "NOT EQUAL" not in text
    for number in range(1, 9):
        assert f"\n{number}. " in text
    for file in folder.iterdir():
        assert file.stat().st_size > 0
        assert file.name in text.replace("\n", "")
    assert Cluster.load(str(folder / "cluster.yaml")) == Cluster.load("dgx2:2")
    assert ElementTree.parse(folder / "cluster.svg").getroot().tag.endswith("svg")
    for kind in ("all_reduce", "all_gather", "all_to_all"):
        program, streams = load_program(folder / f"{kind}.txt"), load_program(folder / f"{kind}.xml")
        assert isinstance(program, Program)
        assert isinstance(streams, Lowered)
        assert program.verify().fifo_depth == streams.verify().fifo_depth == 1
    assert "Plotly.newPlot(" in (folder / "report.html").read_text(encoding="utf-8")
    assert "multiple of the lower bound" in text
    if unavailable() is None:
        assert "measured" in text and "times as long" in text
        assert Cluster.load(str(folder / "lab.yaml")).name == "lab-2x2"
        assert (folder / "measured.pftrace").stat().st_size > 100
    else:
        assert "left out: lab:" in text
    plan = Plan.load(folder / "plan.json")
    assert plan.bound_us <= plan.iteration_us <= min(plan.baselines_us.values())


def test_where_nothing_can_be_run_one_line_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_lab, "missing", lambda: "no right to make network namespaces")
    console = Console(width=100, file=io.StringIO(), record=True)
    tour = _Tour(console=console, folder=tmp_path)
    tour.run()
    assert "left out: no right to make network namespaces\n" in console.export_text()
    assert not tour.files and not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_one_line(bad: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in bad("demo", "-o", str(tmp_path / "file"))
    assert "file" in bad("demo", "-o", str(tmp_path / "file" / "below"))
