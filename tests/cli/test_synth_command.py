# SPDX-License-Identifier: Apache-2.0
"""``stretto synth``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stretto import AllGather, Cluster, synthesize
from stretto.cli import run
from stretto.cli.synth import _bound_text, _search_text

Run = Callable[..., str]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path / "cache"))


def test_it_writes_a_file_that_the_verifier_and_the_interpreter_accept(good: Run, tmp_path: Path) -> None:
    path = tmp_path / "ag.xml"
    said = good("synth", "allgather", "-c", "ndv2", "--bytes", "1M", "--makers", "library:ring", "-o", str(path))
    assert "lower bound" in said and "as instruction streams" in said and f"wrote {path}" in " ".join(said.split())
    assert "right" in good("program", "verify", str(path))
    assert "are right" in good("program", "run", str(path), "--fifo-depth", "2")
    certificate = json.loads((tmp_path / "ag.certificate.json").read_text())["certificate"]
    assert certificate["cluster"] == "ndv2:1"
    assert certificate["time_us"] >= certificate["bound_us"]


def test_in_place_files_say_so(good: Run, tmp_path: Path) -> None:
    path = tmp_path / "ar.xml"
    good("synth", "allreduce", "-c", "ring:4", "--in-place", "--makers", "library:ring", "-o", str(path))
    assert 'inplace="1"' in path.read_text()


def test_the_second_search_comes_from_the_cache(good: Run) -> None:
    command = ("synth", "allgather", "-c", "ring:4", "--makers", "library")
    assert "searched" in good(*command)
    assert "from the cache" in good(*command)
    assert "searched" in good(*command, "--no-cache")


def test_every_candidate_is_listed_on_request(good: Run, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    command = ("synth", "broadcast", "-c", "ring:4", "--root", "2", "--makers", "library", "--json", str(rows))
    short, long = good(*command), good(*command, "--all")
    listed = json.loads(rows.read_text())["rows"]
    assert len(long.splitlines()) > len(short.splitlines())
    assert {row["system"] for row in listed} == {"stretto"}
    assert all(row["time_us"] is not None or row["reason"] for row in listed)


def test_a_size_table_is_written_as_files_and_an_index(good: Run, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    said = good(
        "synth",
        "allgather",
        "-c",
        "ndv2",
        "--bytes",
        "1K..1M",
        "--factor",
        "32",
        "--makers",
        "library:ring,library:bruck",
        "-o",
        str(folder),
    )
    assert "used for" in said
    index = json.loads((folder / "index.json").read_text())
    assert [row["nbytes"] for row in index["rows"]] == [1000, 32000, 1000000]
    assert (folder / "index.csv").read_text().startswith("file,program,maker,min_bytes,max_bytes,nbytes,time_us")
    for row in index["rows"]:
        assert "right" in good("program", "verify", str(folder / row["file"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allgahter", "-c", "ndv2"], "unknown collective 'allgahter'; choose from: all_gather"),
        (["allgather", "-c", "ndv9"], "unknown"),
        (["allgather", "-c", "ndv2", "--bytes", "lots"], "size 'lots'"),
        (["allgather", "-c", "ndv2", "--makers", "magic"], "unknown maker 'magic'; choose from: library"),
        (["allgather", "-c", "ndv2", "-o", "ag.yaml"], "unknown ending '.yaml'; choose from: .txt"),
        (["allgather", "-c", "ndv2", "--budget", "0"], "--budget: must be finite and > 0"),
        (["allgather", "-c", "ndv2", "--makers", ""], "--makers: none is named; choose from: library"),
        (["allgather", "-c", "ndv2", "--chunks", "0"], "--chunks: must be 1..65536, not 0"),
        (["allgather", "-c", "ndv2", "--alpha", "none"], "unknown alpha mode 'none'"),
        (["broadcast", "-c", "ndv2", "--root", "9"], "root: must be a rank 0..7, not 9"),
        (["allgather", "-c", "ndv2", "--root", "1"], "--root: all_gather has no root; rooted are broadcast"),
        (["allgather", "-c", "ndv2", "--bytes", "1M..1K"], "the range must rise"),
        (["permute", "-c", "ndv2"], "permute: its sizes have no place on a command line"),
        (["allgather", "-c", "ndv2", "--sketch", "nowhere.yaml"], "nowhere.yaml: No such file"),
    ],
)
def test_wrong_input_is_one_line(bad: Run, arguments: list[str], message: str) -> None:
    assert message in bad("synth", *arguments)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    run(["synth", "--help"])
    said = capsys.readouterr().out
    for word in ("Examples:", "--bytes", "--sketch", "--budget", "certificate"):
        assert word in said


def test_switches_multicast_when_told_so(good: Run, tmp_path: Path) -> None:
    path = tmp_path / "ag.txt"
    command = ("synth", "allgather", "-c", "dgx2_teccl", "-b", "1M", "--makers", "forest", "--budget", "3")
    said = good(*command, "--multicast", "-o", str(path))
    assert "dgx2_teccl:1+multicast" in said and " cast 0" in path.read_text()
    assert "right" in good("program", "verify", str(path))
    assert "multicast" in good("simulate", str(path), "-c", "dgx2_teccl+multicast", "-b", "1M")
    plain = good("synth", "allgather", "-c", "dgx2_teccl+multicast", *command[4:], "--no-multicast")
    assert "multicast" not in plain


def test_no_word_is_said_twice(good: Run) -> None:
    said = good("synth", "all_gather", "-c", "dgx2:1", "-b", "1M", "--makers", "timetable,library", "--no-cache")
    assert "timetable: is for devices that are joined by direct links" in said
    assert "timetable: timetable" not in said
    small = good("synth", "all_gather", "-c", "ring:8", "-b", "1", "--makers", "library", "--no-cache")
    assert "the bound: latency: " in small and "(shortest path)" not in small


def test_a_search_that_took_longer_than_its_budget_says_so(good: Run) -> None:
    found = synthesize(AllGather(4), Cluster.preset("ring", nodes=4), 1e6, makers=["library"], cache=False)
    late = replace(found.certificate, budget_s=1.0, search_s=3.0)
    assert _search_text(late) == (
        "searched 3.0 s, with a budget of 1 s: what was under way was finished, proved and simulated"
    )
    assert _search_text(replace(late, search_s=0.9)) == "searched 0.9 s"
    timed = replace(late, bound_reason="timed cut: x must receive 1 KB", bound_method="timed cut")
    assert _bound_text(timed) == "timed cut: x must receive 1 KB"
