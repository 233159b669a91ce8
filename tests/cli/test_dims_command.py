# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.dimensions import DimSchedule

Run = Callable[..., str]
HOMO = "themis_3d_sw_sw_sw_homo"


def test_a_schedule_is_shown_and_written_with_its_order(good: Run, tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    text = good("dims", "schedule", "-c", "themis_3d_fc_ring_sw", "--bytes", "100M", "-o", str(path))
    for word in ("stretto: all_reduce of 100 MB over 8x16x8", "16 in flight, ordered", "dim2 ring of 16", "10.5 us"):
        assert word in text
    schedule = DimSchedule.load(path)
    assert schedule.digest in text
    assert len(schedule.order) == 3
    assert sum(map(len, schedule.order)) == 64 * 6


def test_halves_of_an_all_reduce_and_other_schedulers(good: Run) -> None:
    text = good("dims", "schedule", "-c", HOMO, "-s", "themis_scf", "--collective", "reduce-scatter", "--chunks", "8")
    assert "themis_scf: reduce_scatter of 256 MB" in text
    assert " - " in text


def test_all_schedulers_are_compared_beside_the_ideal(good: Run, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    text = good("dims", "compare", "-c", HOMO, "--bytes", "100M,1G", "--json", str(path))
    assert "16 stages in flight per dimension, ordered sharing" in text
    rows = json.loads(path.read_text())["rows"]
    assert [row["system"] for row in rows[:5]] == ["baseline", "themis_fifo", "themis_scf", "stretto", "ideal"]
    used = {row["system"]: row["utilisation"] for row in rows[5:]}
    assert used["baseline"] < 0.4 < 0.95 < used["themis_scf"] < used["stretto"] < used["ideal"]
    assert f"{100 * used['stretto']:.1f} %" in text


def test_themis_counts_its_loads_as_printed_when_asked(good: Run, bad: Run) -> None:
    whole, literal = (good("dims", "compare", "-c", HOMO, "-b", "1G", "--tracker", t) for t in ("whole", "literal"))
    assert whole == good("dims", "compare", "-c", HOMO, "-b", "1G") != literal
    assert "unknown tracker 'first'; choose from: whole, literal" in bad(
        "dims", "compare", "-c", HOMO, "--tracker", "first"
    )


def test_switches_that_reduce_are_counted_from_one(good: Run, bad: Run) -> None:
    assert "dim1 switch of 16, reduces" in good("dims", "schedule", "-c", HOMO, "--in-network", "1,2")
    for wrong in ("0", "4"):
        assert "counted from 1, here 1..3" in bad("dims", "schedule", "-c", HOMO, "--in-network", wrong)


def test_activity_is_drawn_and_written(good: Run, tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    text = good("dims", "plot", "-c", HOMO, "-s", "baseline,stretto", "--html", str(page))
    lines = [line for line in text.splitlines() if line.startswith("dim")]
    assert len(lines) == 6
    assert lines[0].endswith("100.0 %")
    assert "plotly-graph-div" in page.read_text()


def test_the_number_of_chunks_is_swept(good: Run, tmp_path: Path) -> None:
    page, rows = tmp_path / "s.html", tmp_path / "s.json"
    arguments = ["-c", "themis_2d_sw_sw", "--chunks", "4,64", "-s", "baseline,themis_scf", "--header", "42"]
    good("dims", "sweep", *arguments, "--html", str(page), "--json", str(rows))
    found = {(row["system"], row["chunks"]): row["utilisation"] for row in json.loads(rows.read_text())["rows"]}
    assert found["themis_scf", 64] > found["themis_scf", 4]
    assert "plotly-graph-div" in page.read_text()


def test_an_iteration_is_split(good: Run, tmp_path: Path) -> None:
    page = tmp_path / "t.html"
    text = good("dims", "train", "themis:dlrm", "-c", "themis_2d_sw_sw", "--html", str(page))
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert {"baseline", "themis_fifo", "themis_scf", "stretto", "ideal"} <= rows.keys()
    assert rows["baseline"].split()[-3] == "1.000"  # the gain, before "65.9 %"
    assert "exposed, data parallel" in page.read_text()


def test_advice_names_verdicts_and_spends_a_budget(good: Run) -> None:
    text = good("dims", "advise", "-c", HOMO, "--gbit-per-s", "2400")
    assert text.count("over-provisioned") == 3
    assert "35.5 % of all bandwidth" in text
    assert "so that every scheduler uses it" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "-c", "dgx2:2"], "has no dimensions"),
        (["schedule", "-c", HOMO, "-s", "magic"], "unknown scheduler 'magic'"),
        (["schedule", "-c", HOMO, "--collective", "broadcast"], "choose from: all_reduce, reduce_scatter, all_gather"),
        (["schedule", "-c", "torus:1x1"], "has only one device"),
        (["schedule", "-c", HOMO, "--in-network", "1", "--chunks", "4"], "chunks: must be >= 8 where switches reduce"),
        (["schedule", "-c", HOMO, "--chunks", "0"], "chunks: must be 1..65536"),
        (["schedule", "-c", HOMO, "--in-flight", "0"], "--in-flight: must be 1"),
        (["schedule", "-c", HOMO, "--sharing", "fair"], "unknown sharing"),
        (["plot", "-c", HOMO, "-s", "baseline,x"], "unknown scheduler 'x'"),
        (["plot", "-c", HOMO, "--window", "-1", "--html", "/dev/null"], "--window: must be"),
        (["plot", "-c", HOMO, "--window", "inf", "--html", "/dev/null"], "--window: must be"),
        (["plot", "-c", HOMO, "--window", "-3"], "--window: is for the curves of --html"),
        (["sweep", "-c", HOMO, "--chunks", "many"], "--chunks 'many'"),
        (["sweep", "-c", HOMO, "--header", "-4"], "header_bytes must be 0"),
        (["train", "themis:bert", "-c", HOMO], "unknown variant of themis 'bert'"),
        (["train", "themis:gnmt,ranks=64", "-c", HOMO], "the workload has 64, the network 16x8x8"),
        (["advise", "-c", HOMO, "--gbit-per-s", "-5"], "--gbit-per-s: must be Gb/s above 0"),
    ],
)
def test_wrong_input_is_one_line(bad: Run, arguments: list[str], message: str) -> None:
    assert message in bad("dims", *arguments)


def test_one_byte_is_scheduled(good: Run) -> None:
    assert "all_reduce of 1 B over 16x64" in good("dims", "schedule", "-c", "themis_2d_sw_sw", "--bytes", "1")


def test_help_teaches(good: Run) -> None:
    text = good("dims", "--help")
    for word in ("themis_scf", "stretto dims compare", "linear program"):
        assert word in text
    for command in ("schedule", "compare", "plot", "sweep", "train", "advise"):
        assert "Examples:" in good("dims", command, "--help")
