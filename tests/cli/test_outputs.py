# SPDX-License-Identifier: Apache-2.0
"""Whatever a command writes: paths are checked first, files are whole and there before a line is printed.

All options that write are found in the application itself, so that a new command cannot be forgotten.
"""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from stretto.cli import app, run
from stretto.cli.outputs import Output, QuietStdout

READS = {
    "bench cluster", "controller token_file", "controller tls_ca", "controller tls_cert", "controller tls_key",
    "plan diff after", "plan diff before", "plan explain path", "plan retime path", "plan show path",
    "program convert collective", "program convert source", "program run collective", "program run file",
    "program show collective", "program show file", "program verify collective", "program verify files",
    "run token_file", "runtime fit measured", "status tls_ca", "status tls_cert", "status tls_key",
    "status token_file", "strategy diff after", "strategy diff before", "strategy explain strategy",
    "strategy show strategy", "synth base", "synth sketch", "tune scratch", "weights explain path",
}  # fmt: skip
"""Parameters that name files to read (a controller makes its token where there is none)."""
NO_FILES = {"motif show expand", "pipeline export comm", "runtime fit free", "synth max_bytes", "synth min_bytes"}
"""Parameters whose help speaks of writing and that name no file."""
LIVE = {
    "bench": "needs a job of several ranks (tests/runtime/test_probe_bench.py)",
    "controller": "runs until it is interrupted (tests/cli/test_controller_command.py)",
    "demo": "prints each step as it ends",
    "lab run": "needs network namespaces (tests/cli/test_lab_command.py)",
    "probe": "needs a job of several ranks (tests/cli/test_probe_command.py)",
    "run": "needs a job (tests/cli/test_run_command.py)",
    "status": "needs a controller (tests/cli/test_controller_command.py)",
    "tune": "needs a job (tests/cli/test_tune_command.py)",
    "weights run": "needs a job of several ranks (tests/runtime/test_reshard_plugins.py)",
}
RESHARD = ("--src", "(2,2) S0R", "--dst", "(2,2) RS0", "--shape", "64,64", "-c", "p3_8xlarge:4")
WEIGHTS = ("llama-3-70b", "--trainer", "fsdp=8", "--server", "tp=8", "-c", "dgx_h100:2")
CASES: dict[str, tuple[str, ...]] = {
    "advise": ("resnet:50,ranks=4", "-c", "ring:4", "--steps", "5", "-o", "{plan_file}.json", "--html", "{html}.html"),
    "cluster convert": ("dgx2", "{target}.yaml"),
    "cluster show": ("ring:4", "-o", "{svg}.svg"),
    "collective show": ("all_gather", "-o", "{target}.yaml"),
    "dims advise": ("-c", "torus:4x4", "--json", "{rows}.json", "--html", "{html}.html"),
    "dims compare": ("-c", "torus:4x4", "-b", "1M", "--json", "{rows}.json", "--html", "{html}.html"),
    "bound": ("all_reduce", "-c", "ring:4", "--json", "{rows}.json", "--html", "{html}.html"),
    "dims plot": ("-c", "torus:4x4", "-b", "1M", "-s", "baseline", "--html", "{html}.html"),
    "dims schedule": ("-c", "torus:4x4", "-b", "1M", "-s", "baseline", "-o", "{target}.json"),
    "dims sweep": (
        "-c", "torus:4x4", "-b", "1M", "--chunks", "4", "-s", "baseline", "--json", "{rows}.json", "--html",
        "{html}.html",
    ),
    "dims train": ("themis:dlrm", "-c", "themis_2d_sw_sw", "--json", "{rows}.json", "--html", "{html}.html"),
    "motif show": ("AR(T[0:64], PG[0:4])", "-o", "{target}.txt"),
    "pipeline export": ("1f1b", "-o", "{target}.csv", "--workload", "{workload}.yaml"),
    "pipeline meshes": (
        "gpt", "-c", "p3_8xlarge:2", "--stages", "2", "--microbatches", "2", "--layouts", "1", "-o", "{target}.csv",
        "--html", "{html}.html",
    ),
    "pipeline search": ("--stages", "2", "--microbatches", "2", "-o", "{target}.csv", "--html", "{html}.html"),
    "pipeline show": ("1f1b", "--stages", "2", "--microbatches", "2", "--html", "{html}.html"),
    "pipeline simulate": (
        "--stages", "2", "--microbatches", "2", "--schedules", "1f1b", "--json", "{rows}.json", "--html",
        "{html}.html",
    ),
    "plan": (
        "-w", "dlrm:A2,ranks=8", "-c", "hgx2:1", "--steps", "20", "-o", "{plan_file}.json", "--html", "{html}.html",
        "--trace", "{trace}.pftrace", "--tuner", "{tuner}.csv",
    ),
    "plan retime": (
        "{made}", "-w", "dlrm:A2,ranks=8", "-c", "hgx2:1", "--trace", "{trace}.pftrace", "--html", "{html}.html",
    ),
    "plan show": ("{made}", "--html", "{html}.html"),
    "program convert": ("{ring}", "{target}.xml"),
    "reshard": (
        *RESHARD, "--html", "{html}.html", "--trace", "{trace}.pftrace", "-o", "{target}.txt", "--json",
        "{rows}.json",
    ),
    "runtime fit": ("{times}", "--free", "put", "-o", "{target}.yaml"),
    "runtime show": ("network", "-o", "{target}.yaml"),
    "simulate": (
        "ring", "-c", "ring:4", "--html", "{html_file}.html", "--trace", "{trace}.pftrace", "--chrome-json",
        "{chrome_json}.json", "--timeline", "{timeline}.json", "-o", "{program_file}.xml", "--json", "{rows}.json",
    ),
    "strategy build": ("all_reduce", "-m", "vgg16@0.1", "--ranks", "4", "-o", "{target}.yaml"),
    "strategy simulate": (
        "all_reduce", "-m", "vgg16@0.02", "-c", "autodist_b5", "--budget", "0.2", "-o", "{target}.json", "--json",
        "{rows}.json", "--html", "{html}.html",
    ),
    "synth": (
        "allgather", "-c", "ring:4", "--makers", "library:ring", "--no-cache", "-o", "{target}.xml", "--json",
        "{rows}.json", "--html", "{html}.html",
    ),
    "weights explain": ("{weights}", "--html", "{html}.html"),
    "weights plan": (*WEIGHTS, "-o", "{target}.json", "--html", "{html}.html", "--trace", "{trace}.pftrace"),
    "workload convert": ("dlrm:A2,ranks=8", "{target}.yaml"),
}  # fmt: skip
"""A small command line for every command that writes; a name in braces becomes a path."""


def commands() -> Iterator[tuple[str, Any]]:
    """Every command of the application by the words that call it."""
    left: list[tuple[str, Any]] = [("", typer.main.get_command(app))]
    while left:
        words, command = left.pop()
        yield words, command
        left += [(f"{words} {name}".strip(), inner) for name, inner in getattr(command, "commands", {}).items()]


@cache
def outputs() -> dict[str, tuple[str, Any, Output]]:
    """Every parameter that names an output, as ``command parameter``."""
    return {
        f"{words} {parameter.name}": (words, parameter, parameter.callback.output)
        for words, command in commands()
        for parameter in command.params
        if hasattr(parameter.callback, "output")
    }


def test_every_parameter_that_names_a_file_is_known_to_read_or_to_write() -> None:
    unknown = []
    for words, command in commands():
        for parameter in command.params:
            name = f"{words} {parameter.name}"
            is_path = "Path" in str(getattr(parameter.type_descriptor, "annotation", parameter.type_descriptor))
            speaks = "write" in (getattr(parameter, "help", "") or "").lower()
            known = name in READS | NO_FILES or hasattr(parameter.callback, "output")
            if (is_path or speaks) and not known:
                unknown.append(name)
    assert unknown == [], "use callback=output(...) of stretto.cli.outputs, or add what only reads to READS"


def test_every_output_is_tried() -> None:
    missing = [
        name
        for name, (words, parameter, kind) in outputs().items()
        if words not in LIVE
        and not any(f"{{{parameter.name}}}" in part for part in CASES.get(words, ()))
        # tests/cli/test_grammar.py tries --json of every command.
        and not kind.stdout
    ]
    assert missing == []


@pytest.mark.parametrize("name", outputs())
def test_a_path_that_cannot_be_written_is_refused_before_any_work(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other arguments are missing or point nowhere: had any work begun, the message would be about them."""
    words, parameter, kind = outputs()[name]
    monkeypatch.setenv("RANK", "0")
    ending = kind.suffixes[0] if kind.suffixes else ""
    (tmp_path / "file").touch()
    (tmp_path / f"dir{ending}").mkdir()
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    access = os.access
    # Root may do everything; nobody else may write here.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked and access(path, mode))
    bad = {tmp_path / "file" / f"x{ending}": "is not a directory|Not a directory", locked / f"x{ending}": "may not be"}
    if not kind.folder:
        bad[tmp_path / "none" / f"x{ending}"] = "there is no directory"
        bad[tmp_path / f"dir{ending}"] = "is a directory, not a file"
    if kind.suffixes:
        bad[tmp_path / "x.foo"] = rf"unknown ending '.foo'; choose from: {ending}"
    for path, message in bad.items():
        is_option = parameter.opts[0].startswith("-")
        given = [parameter.opts[0], str(path)] if is_option else ["nowhere.none", str(path)]
        assert run([*words.split(), *given]) == 2
        said = capsys.readouterr()
        assert said.err.count("\n") == 1
        assert any(part in said.err for part in message.split("|")), said.err
        option = max(parameter.opts, key=len) if is_option else "OUT"
        assert said.err.startswith(f"stretto: error: {option}: {path}: ")
        assert said.out == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["file", f"dir{ending}", "locked"])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files that some commands read."""
    folder = tmp_path_factory.mktemp("made")
    plan, ring = folder / "plan.json", folder / "ring.txt"
    assert run(["plan", "-w", "dlrm:A2,ranks=8", "-c", "hgx2:1", "--steps", "20", "-o", str(plan)]) == 0
    assert run(["simulate", "ring", "-c", "ring:4", "-o", str(ring)]) == 0
    times = folder / "times.json"
    times.write_text('{"cluster": "ring:4", "rows": [{"program": "ring.txt", "nbytes": 1000, "time_us": 50.0}]}')
    weights = folder / "weights.json"
    assert run(["weights", "plan", *WEIGHTS, "-o", str(weights)]) == 0
    return {"made": str(plan), "ring": str(ring), "times": str(times), "weights": str(weights)}


def arguments(words: str, folder: Path, made: dict[str, str]) -> tuple[list[str], list[Path]]:
    """The command line of a case, and the files that it is to write."""
    given = {parameter.name: str(folder / parameter.name) for w, parameter, _ in outputs().values() if w == words}
    line = [part.format(**given, **made) if part.startswith("{") else part for part in CASES[words]]
    return [*words.split(), *line], [Path(part) for part in line if Path(part).parent == folder]


class Witness(QuietStdout):
    """A standard output that nobody reads, and that notes which files are there when the first line is printed."""

    def __init__(self, files: list[Path]) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        super().__init__(io.BufferedWriter(io.FileIO(writer, "wb"), 16), encoding="utf-8", write_through=True)
        self.files = files
        self.there: list[Path] | None = None

    def write(self, text: str, /) -> int:
        if self.there is None and text:
            self.there = [path for path in self.files if path.exists()]
        return super().write(text)


@pytest.mark.parametrize("words", CASES)
def test_files_are_written_before_anything_is_printed_and_without_a_reader(
    words: str, tmp_path: Path, made: dict[str, str], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    line, files = arguments(words, tmp_path, made)
    witness = Witness(files)
    monkeypatch.setattr(sys, "stdout", witness)
    assert run(line) == 0
    assert witness.there == files
    assert all(path.stat().st_size > 0 for path in files)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    monkeypatch.undo()
    witness.close()
    assert capsys.readouterr().err == ""


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file can grow beyond so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("words", CASES)
def test_a_full_disk_is_one_line_and_leaves_files_as_they_were(
    words: str, tmp_path: Path, made: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    line, files = arguments(words, tmp_path, made)
    files[0].write_text("old")
    with full_disk(20):
        assert run(line) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    for path in files:
        assert f"{path}: File too large" in said.err
    assert files[0].read_text() == "old"
    assert list(tmp_path.iterdir()) == [files[0]]


def test_two_outputs_in_one_file_are_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["simulate", "ring", "-c", "ring:4"]
    assert run([*line, "--json", "x.json", "--timeline", str(tmp_path / "x.json")]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "x.json: is also the file of --" in said.err
    assert list(tmp_path.iterdir()) == []
    assert run([*line, "--json", "/dev/null", "--timeline", "/dev/null"]) == 0
    assert run([*line, "--json", "x.json", "--timeline", "y.json"]) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["-o", "x.xml", "--json", "x.certificate.json"], "is also the certificate of --output"),
        (["--bytes", "1K,1M", "-o", "t", "--json", "t/index.json"], "lies in the folder of --output"),
    ],
)
def test_numbers_do_not_replace_what_comes_with_programs(
    more: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t").mkdir()
    assert run(["synth", "allgather", "-c", "nowhere", *more]) == 2
    assert message in capsys.readouterr().err


def test_a_link_into_a_folder_that_is_not_there_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "none" / "x.json")
    assert run(["simulate", "nothing", "-c", "nowhere", "--json", str(link)]) == 2
    assert f"there is no directory {tmp_path}/none" in capsys.readouterr().err


def test_folders_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = tmp_path / "a" / "b"
    assert run(["workload", "convert", "dlrm:A2,ranks=8", str(new)]) == 0
    assert len(list(new.glob("*.et"))) == 8
    quick = ["synth", "allgather", "-c", "ring:4", "--makers", "library:ring", "--no-cache", "--bytes", "1K,1M"]
    assert run([*quick, "-o", str(tmp_path / "table")]) == 0
    assert (tmp_path / "table" / "index.csv").exists()
    capsys.readouterr()
    assert run([*quick, "-o", str(tmp_path / "table" / "index.csv" / "x")]) == 2
    assert run([*quick, "-o", str(tmp_path / "table" / "index.csv")]) == 2
    assert run([*quick, "--format", "yaml", "-o", str(tmp_path / "t")]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "unknown format 'yaml'; choose from: txt, prog, xml, json" in said.err


def test_head_gets_its_lines_and_all_files_are_there(tmp_path: Path) -> None:
    """In a real process: the reader goes after the first line, the command ends well and says nothing more."""
    files = [tmp_path / name for name in ("p.json", "r.html", "t.csv")]
    command = [
        sys.executable, "-m", "stretto", "plan", "-w", "dlrm:A2,ranks=8", "-c", "hgx2:1", "--steps", "20",
        "-o", str(files[0]), "--html", str(files[1]), "--tuner", str(files[2]),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait(timeout=180) == 0
    assert said == ""
    assert all(path.stat().st_size > 0 for path in files)


def test_a_link_stays_a_link_and_permissions_stay(tmp_path: Path) -> None:
    real, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    assert run(["cluster", "convert", "ring:4", str(link)]) == 0
    assert link.is_symlink()
    assert "ring" in real.read_text()
    assert real.stat().st_mode & 0o777 == 0o640
    assert run(["simulate", "ring", "-c", "ring:4", "--json", "/dev/null"]) == 0
    assert not Path("/dev/null").is_file()


@pytest.mark.parametrize(("closing", "code"), [("<&- >&- 2>&-", 0), (">&-", 0), ("2>/dev/full --nodes", 2)])
def test_closed_or_full_standard_streams_cost_neither_files_nor_the_exit_code(
    closing: str, code: int, tmp_path: Path
) -> None:
    command = f"{sys.executable} -m stretto simulate ring -c ring:4 --json rows.json {closing}"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
    assert code or b'"rows"' in (tmp_path / "rows.json").read_bytes()


def test_a_format_of_programs_that_is_added_is_an_ending_of_every_command(tmp_path: Path) -> None:
    lines = [
        "simulate ring -c ring:4 -b 1K -o a.own",
        "program convert a.own b.own",
        "motif show 'AR(T[0:8], PG[0:4])' -o c.own",
        "synth all_gather -c ring:2 -b 1K --makers library --no-cache -o d.own",
        "reshard --src '(2,1) S0R' --dst '(2,1) RS0' --shape 8,8 -c ring:4 -o e.own",
    ]
    code = f"""
import shlex
from stretto.programs import formats
formats.SUFFIXES[".own"] = "text"
from stretto.cli import run
for line in {lines}:
    run(shlex.split(line))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "unknown ending" not in result.stderr, result.stderr
    assert {path.name for path in tmp_path.glob("*.own")} == {f"{name}.own" for name in "abcde"}, result.stderr
