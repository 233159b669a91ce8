from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from stretto.cluster import Cluster
from stretto.planner.plan import Plan
from stretto.programs import Lowered, Program
from stretto.programs.formats import load_program

Run = Callable[..., str]


def test_the_demo_goes_all_the_way_and_leaves_files_that_can_be_read(good: Run, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "demo"
    text = good("demo", "--out", str(folder))
    assert "NOT EQUAL" not in text
    for number in range(1, 8):
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
    plan = Plan.load(folder / "plan.json")
    assert plan.bound_us <= plan.iteration_us <= min(plan.baselines_us.values())


def test_a_folder_that_cannot_be_made_is_one_line(bad: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file" in bad("demo", "--out", str(tmp_path / "file"))
    assert "file" in bad("demo", "--out", str(tmp_path / "file" / "below"))
