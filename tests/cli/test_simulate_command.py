# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.report import load_timeline

Run = Callable[..., str]


def test_one_algorithm_shows_total_bound_channels_and_path(good: Run) -> None:
    text = good("simulate", "ring", "--cluster", "dgx2:2", "--bytes", "64M")
    for word in (
        "total",
        "lower bound",
        "x the bound",
        "nvlink",
        "rdma",
        "busiest links",
        "critical path",
        "ranks",
    ):
        assert word in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_sweep_plots_all_algorithms_against_the_bound(good: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    text = good("simulate", "all", "--cluster", "ring:4", "--bytes", "1K..1M", "--factor", "10", "--json", str(rows))
    assert "multiple of the lower bound" in text
    assert max(len(line) for line in text.splitlines() if str(rows) not in line) <= 80
    data = json.loads(rows.read_text())["rows"]
    assert {row["nbytes"] for row in data} == {1000, 10_000, 100_000, 1_000_000}
    assert {"ring", "direct"} <= {row["system"] for row in data}
    assert all(row["time_us"] >= row["bound_us"] * (1 - 1e-9) > 0 for row in data)


def test_all_at_one_size_is_a_table(good: Run) -> None:
    text = good("simulate", "all", "--cluster", "ring:4", "--collective", "all-gather", "--bytes", "1M")
    lines = text.splitlines()
    assert lines[0].split()[:2] == ["algorithm", "time"]
    assert any(line.startswith("lower bound") for line in lines)


@pytest.mark.parametrize(
    "words", [("ring", "all_gather"), ("all-gather", "ring"), ("ring", "--collective", "AllGather")]
)
def test_the_algorithm_and_the_collective_are_named_in_either_order(good: Run, words: tuple[str, ...]) -> None:
    assert " 12, 3 MB in all" in good("simulate", *words, "-c", "ring:4", "-b", "1M"), "an all-reduce has 24 transfers"


def test_a_collective_alone_or_twice_is_refused_with_the_way_out(bad: Run) -> None:
    assert "stretto simulate all all_reduce" in bad("simulate", "all_reduce", "-c", "ring:4")
    assert "leave one of the two out" in bad("simulate", "ring", "all_gather", "-c", "ring:4", "--collective", "reduce")


def test_every_output_is_written(good: Run, tmp_path: Path) -> None:
    files = {
        "--trace": tmp_path / "t.pftrace",
        "--chrome-json": tmp_path / "c.json",
        "--timeline": tmp_path / "t.json",
        "--html": tmp_path / "p.html",
        "--json": tmp_path / "r.json",
        "-o": tmp_path / "p.txt",
    }
    flags = [text for flag, path in files.items() for text in (flag, str(path))]
    text = good("simulate", "ring", "--cluster", "ring:4", "--bytes", "1M", *flags)
    for path in files.values():
        assert path.stat().st_size > 0
        assert path.name in text.replace("\n", "")
    timeline = load_timeline(files["--timeline"])
    assert timeline.num_spans == 24
    (row,) = json.loads(files["--json"].read_text())["rows"]
    assert row["time_us"] == timeline.total_us
    again = tmp_path / "again.json"
    good("simulate", str(files["-o"]), "--cluster", "ring:4", "--bytes", "1M", "--json", str(again))
    (row,) = json.loads(again.read_text())["rows"]
    assert (row["system"], row["time_us"]) == ("p.txt", timeline.total_us)


def test_names_from_outside_are_not_taken_for_markup(good: Run, tmp_path: Path) -> None:
    path = tmp_path / "[bold]p[red].txt"
    assert f"wrote {path}" in good("simulate", "ring", "--cluster", "ring:4", "-o", str(path))
    assert path.name in good("simulate", str(path), "--cluster", "ring:4", "--bytes", "1K,1M")


def test_options_reach_the_simulator(good: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    good(
        "simulate", "ring", "--cluster", "dgx2:2", "--ranks", "0-3", "--channels", "nvlink",
        "--alpha", "blocking", "--contention", "fair", "--chunks", "2", "--timeline", str(path),
    )  # fmt: skip
    facts = dict(load_timeline(path).facts)
    assert (facts["contention"], facts["alpha"], facts["channels"]) == ("fair", "blocking", "nvlink")
    assert "chunks=2" in facts["program"]


def test_a_root_and_an_option_reach_the_algorithm(good: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    arguments = ("--cluster", "ring:4", "--bytes", "1M", "--timeline", str(path))
    good("simulate", "chain", "--collective", "broadcast", "--root", "2", *arguments)
    timeline = load_timeline(path)
    assert timeline.rank[timeline.start_us.argmin()] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ring", "--cluster", "dgx9"), "unknown preset 'dgx9'"),
        (("ring", "--cluster", "dgx2:0"), "nodes"),
        (("ring", "--cluster", "missing.yaml"), "missing.yaml"),
        (("ring", "--cluster", "ring:4", "--bytes", "12Q"), "size '12Q'"),
        (("ring", "--cluster", "ring:4", "--bytes", "1M..1K"), "the range must rise"),
        (("ring", "--cluster", "ring:4", "--bytes", "1K..1G", "--factor", "1"), "factor"),
        (
            ("ring", "--cluster", "ring:4", "--collective", "all_sing"),
            "unknown collective 'all_sing'; choose from",
        ),
        (("ring", "--cluster", "ring:4", "--collective", "broadcast"), "ring does not do broadcast"),
        (("ring", "--cluster", "ring:4", "--contention", "loud"), "'loud'; choose from: fifo, fair"),
        (("ring", "--cluster", "ring:4", "--alpha", "beta"), "'beta'; choose from: pipelined, blocking"),
        (("ring", "--cluster", "ring:4", "--channels", "telegraph"), "unknown channel 'telegraph'"),
        (("ring", "--cluster", "ring:4", "--ranks", "5"), "--ranks: must be 1..4"),
        (("ring", "--cluster", "ring:4", "--chunks", "0"), "chunks"),
        (("ring", "--cluster", "ring:4", "--root", "1"), "root"),
        (("ring", "--cluster", "ring:4", "--set", "nonsense=1"), "unknown option of ring 'nonsense'"),
        (("ring", "--cluster", "ring:4", "--set", "order=9,9,9,9"), "order"),
        (("ring", "--cluster", "ring:4", "--set", "order=fast"), "order"),
        (("ring", "--cluster", "ring:4", "--trace", "/nonexistent/t.pftrace"), "/nonexistent/t.pftrace"),
        (("ring", "--cluster", "ring:4", "--json", "/"), "directory"),
        (("nonsense.xml", "--cluster", "ring:4"), "unknown algorithm or file 'nonsense.xml'"),
        (("ring", "--cluster", "ring:4", "-o", "p.doc"), "unknown ending '.doc'; choose from: .txt"),
        (("all", "--cluster", "ring:4", "--set", "nonsense=1"), "nonsense"),
    ],
)
def test_bad_input_is_one_line_with_the_field_and_the_choices(
    arguments: tuple[str, ...], message: str, bad: Run
) -> None:
    assert message in bad("simulate", *arguments)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"{",
        b"{}",
        b"[]",
        b"nonsense",
        b"<algo",
        b"<other/>",
        b'<!DOCTYPE a [<!ENTITY b "c">]><algo>&b;</algo>',
        b'<algo name="x" proto="Simple" nchannels="1" ngpus="999999999999" coll="allreduce"/>',
    ],
)
@pytest.mark.parametrize("suffix", [".xml", ".json", ".txt"])
def test_hostile_program_files_are_one_line(content: bytes, suffix: str, bad: Run, tmp_path: Path) -> None:
    path = tmp_path / f"program{suffix}"
    path.write_bytes(content)
    assert len(bad("simulate", str(path), "--cluster", "ring:4")) > len("stretto: error: ")


def test_an_msccl_file_takes_as_long_as_the_program_it_was_made_from(good: Run, bad: Run, tmp_path: Path) -> None:
    path = tmp_path / "ring.xml"
    times = []
    for what, extra in (("ring", ("-o", str(path))), (str(path), ())):
        rows = tmp_path / "rows.json"
        good("simulate", what, "--cluster", "ring:4", "--json", str(rows), *extra)
        times.append(json.loads(rows.read_text())["rows"][0]["time_us"])
    assert times[0] == pytest.approx(times[1])
    plan = tmp_path / "ring.json"
    good("simulate", "ring", "--cluster", "ring:4", "-o", str(plan))
    assert "can be executed" in bad("simulate", str(plan), "--cluster", "ring:4")


def test_one_rank_may_stand_for_all(good: Run, bad: Run, tmp_path: Path) -> None:
    times = []
    for symmetric in (("--symmetric",), ()):
        rows = tmp_path / "rows.json"
        good("simulate", "hierarchical", "--cluster", "torus:16", "--chunks", "2", "--json", str(rows), *symmetric)
        times.append(json.loads(rows.read_text())["rows"][0]["time_us"])
    assert times[0] == pytest.approx(times[1])
    assert "only hierarchical" in bad("simulate", "ring", "--symmetric", "--cluster", "torus:16")
    assert "regular dimensions" in bad("simulate", "hierarchical", "--symmetric", "--cluster", "dgx2:2")


def test_a_file_says_its_collective_itself(bad: Run, tmp_path: Path) -> None:
    path = tmp_path / "program.xml"
    path.write_text("<algo/>")
    assert "--collective" in bad("simulate", str(path), "--cluster", "ring:4", "--collective", "all_reduce")


def test_a_file_that_is_wrong_is_named(good: Run, bad: Run, tmp_path: Path) -> None:
    path = tmp_path / "program.txt"
    good("simulate", "ring", "-c", "ring:4", "-o", str(path))
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert f"{path}: ring: rank " in bad("simulate", str(path), "--cluster", "ring:4")


def test_pairs_and_counts_are_given_as_the_text_form_writes_them(good: Run, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    for kind, option in (("permute", "pairs=0>1,1>2"), ("all_to_all_v", "counts=0,1,2;2,0,1;1,1,0")):
        good("simulate", "direct", "-c", "ring:3", "--collective", kind, "--set", option, "-o", str(file))
        assert option.replace("=", " ") in file.read_text()


def test_a_custom_msccl_file_is_simulated_with_the_collective_it_is_for(good: Run, bad: Run, tmp_path: Path) -> None:
    wanted, program, custom = tmp_path / "want.yaml", tmp_path / "ag.xml", tmp_path / "custom.xml"
    good("collective", "show", "all_gather", "-n", "3", "-o", str(wanted))
    good("simulate", "ring", "-c", "ring:3", "--collective", "all_gather", "-o", str(program))
    custom.write_text(program.read_text().replace('coll="allgather"', 'coll="custom"'))
    assert "give the collective" in bad("simulate", str(custom), "-c", "ring:3")
    assert "takes a file" in bad("simulate", str(custom), "-c", "ring:3", "--collective", "all_gather")
    assert "lower bound" in good("simulate", str(custom), "-c", "ring:3", "--collective", str(wanted))
    assert "not for in-place" in bad("program", "verify", str(custom), "--collective", str(wanted), "--in-place")
