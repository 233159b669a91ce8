# SPDX-License-Identifier: Apache-2.0
"""One grammar for all commands: every test here runs over all of them."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

import stretto.cli
from stretto.cli import app, run
from stretto.cli.commands import ENTRIES
from stretto.cli.lab import refuse_many_launchers
from stretto.cli.old_names import OLD_NAMES, OUTPUT_ARGUMENTS
from stretto.errors import InvalidInput
from stretto.report.table import ResultTable

Run = Callable[..., str]
STEP = ("-w", "dlrm:A2,ranks=8", "-c", "hgx2:1")
LINES: dict[str, tuple[str, ...]] = {
    "advise": ("resnet:50,ranks=4", "-c", "ring:4", "--steps", "5"),
    "algorithms": (),
    "bound": ("all_reduce", "-c", "dgx2:2", "-b", "1K..1G"),
    "cluster check": ("hgx2:2",),
    "cluster list": (),
    "cluster renumber": ("dgx2:1",),
    "cluster show": ("dgx2:2",),
    "collective list": (),
    "collective show": ("all_to_all", "--ranks", "8"),
    "doctor": (),
    "dims advise": ("-c", "themis_4d_ring_fc_ring_sw", "--gbit-per-s", "2400"),
    "dims compare": ("-c", "themis_3d_fc_ring_sw", "-b", "100M,1G"),
    "dims plot": ("-c", "themis_3d_fc_ring_sw", "-b", "1G", "-s", "baseline"),
    "dims schedule": ("-c", "themis_4d_ring_fc_ring_sw", "-s", "themis_scf"),
    "dims sweep": ("-c", "torus:4x4", "-b", "1M", "--chunks", "4,8"),
    "dims train": ("themis:dlrm", "-c", "themis_2d_sw_sw"),
    "lab show": (),
    "motif list": (),
    "motif show": ("AR(T[0:1024], PG[0:8])", "-a", "segment:4"),
    "pipeline meshes": ("gpt", "-c", "p3_8xlarge:2", "--stages", "2", "--microbatches", "2", "--layouts", "1"),
    "pipeline search": ("--stages", "2", "--microbatches", "4", "--activation", "1G"),
    "pipeline show": ("eager_1f1b", "--stages", "4"),
    "pipeline simulate": ("--stages", "4", "--microbatches", "16"),
    "plan": (*STEP, "--steps", "20"),
    "plan diff": ("{plan}", "{plan}"),
    "plan explain": ("{plan}",),
    "plan retime": ("{plan}", *STEP),
    "plan show": ("{plan}",),
    "program run": ("{ring}",),
    "program show": ("{ring}", "--lower"),
    "program verify": ("{ring}", "{ring}"),
    "reshard": ("--src", "(2,4) S0RR", "--dst", "(3,4) S0RR", "--shape", "64,64,64", "-c", "p3_8xlarge:5"),
    "simulate": ("all", "-c", "dgx2:2", "-b", "1K..1G"),
    "strategy diff": ("{strategy}", "{other}"),
    "strategy explain": ("{strategy}", "-m", "vgg16@0.1"),
    "runtime list": (),
    "runtime show": ("mscclpp:h200",),
    "strategy list": (),
    "strategy show": ("{strategy}",),
    "strategy simulate": ("all", "-m", "bert_large@0.02", "-c", "autodist_b7"),
    "synth": ("allgather", "-c", "ring:4", "-b", "1K,1M", "--makers", "library", "--no-cache"),
    "weights explain": ("{weights}",),
    "weights plan": ("llama-3-70b", "--trainer", "fsdp=8", "--server", "tp=8", "-c", "dgx_h100:2"),
    "workload list": (),
    "workload show": ("gpt:125m,ranks=16,tensor=2,pipeline=2,micro_batches=4",),
}
"""A command line for every command that prints results; a name in braces is a file."""
OTHERS = {
    "bench", "cluster convert", "controller", "demo", "help", "lab clean", "lab run", "pipeline export",
    "probe", "program convert", "run", "runtime fit", "selftest", "status", "strategy build", "tune",
    "weights run", "workload convert",
}  # fmt: skip
"""Commands that need a job or a controller, or whose output is a file."""
NO_JSON = {
    "cluster convert", "controller", "demo", "help", "lab clean", "lab run", "pipeline export",
    "program convert", "strategy build", "workload convert",
}  # fmt: skip
"""Commands without numbers: they write a file of a form of its own, start something, or show what runs."""


@cache
def commands() -> list[tuple[str, Any]]:
    """Every command by the words that call it."""
    found: list[tuple[str, Any]] = []
    for name, command in typer.main.get_group(app).commands.items():
        inner = getattr(command, "commands", {})
        if not inner or name == "plan":
            found.append((name, command))
        found += ((f"{name} {word}", one) for word, one in inner.items())
    return found


def options(command: Any) -> dict[str, Any]:
    """The options of a command by each of their names."""
    return {name: param for param in command.params for name in param.opts if name.startswith("-")}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files that some commands read."""
    folder = tmp_path_factory.mktemp("grammar")
    names = ("plan.json", "ring.txt", "strategy.yaml", "other.yaml", "weights.json")
    made = {name: str(folder / name) for name in names}
    build = ("-m", "vgg16@0.1", "--ranks", "4", "-o")
    for line in (
        ("plan", *STEP, "--steps", "20", "-o", made["plan.json"]),
        ("simulate", "ring", "-c", "ring:4", "-o", made["ring.txt"]),
        ("strategy", "build", "all_reduce", *build, made["strategy.yaml"]),
        ("weights", "plan", *LINES["weights plan"], "-o", made["weights.json"]),
        ("strategy", "build", "ps", *build, made["other.yaml"]),
    ):
        assert run(line) == 0
    return {name.partition(".")[0]: path for name, path in made.items()}


def line_of(words: str, files: dict[str, str]) -> list[str]:
    return [*words.split(), *(part.format(**files) if part.startswith("{") else part for part in LINES[words])]


def test_every_command_is_tried_here() -> None:
    assert {words for words, _ in commands()} == {*LINES, *OTHERS}


def test_every_command_with_numbers_writes_them_as_json() -> None:
    assert {words for words, command in commands() if "--json" not in options(command)} == NO_JSON


@pytest.mark.parametrize("words", sorted(LINES))
def test_tables_fit_80_columns_and_json_is_all_there_is_and_the_same_as_in_a_file(
    words: str, files: dict[str, str], good: Run, tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    line = line_of(words, files)
    text = good(*line, "--json", str(path))
    assert f"wrote {path}\n" in text
    check_text(text.replace(f"wrote {path}\n", ""))
    printed = json.loads(good(*line, "--json", "-"))
    assert printed
    kept = json.loads(path.read_text())
    assert set(kept) == set(printed) if isinstance(kept, dict) else len(kept) == len(printed)


def check_text(text: str) -> None:
    """Nothing in a table is cut, too wide, or written for programmers."""
    lines = [line.rstrip() for line in text.splitlines()]
    # Lines that one may copy, and those of sentences, may be longer; no line of a table is.
    tables = [line for line in lines if "  " in line.strip() and not line.startswith("next: ")]
    assert [line for line in tables if len(line) > 80] == []
    assert "…" not in text
    assert not re.search(r"<[A-Z]\w+ ", text), "the repr of an object"
    assert not re.search(r"\d[KMG]B\b", text.partition("next: ")[0]), "a size that is not printed as all others"


@pytest.mark.parametrize(("name", "short"), [("--cluster", "-c"), ("--bytes", "-b"), ("--output", "-o"),
                                             ("--workload", "-w"), ("--model", "-m"), ("--jobs", "-j")])  # fmt: skip
def test_an_option_has_its_short_name_everywhere_and_nothing_else_has_it(name: str, short: str) -> None:
    for words, command in commands():
        found = options(command)
        owner = found.get(name)
        # Of 'pipeline export', the workload is a file to write; 'pipeline simulate' knows three models of its own.
        if owner is not None and (words, name) not in (
            ("pipeline export", "--workload"),
            ("pipeline simulate", "--model"),
        ):
            assert short in owner.opts, words
        assert short not in found or found[short] is owner, f"{words} {short}"


@pytest.mark.parametrize("name", ["--json", "--html", "--cluster", "--factor", "--ranks", "--root", "--seed", "--jobs",
                                  "--backend", "--ray-address", "--alpha", "--contention", "--trace"])  # fmt: skip
def test_an_option_takes_the_same_in_every_command(name: str) -> None:
    own = {
        ("--ranks", "lab run"), ("--ranks", "collective show"), ("--ranks", "algorithms"),
        ("--ranks", "strategy build"), ("--ranks", "selftest"), ("--root", "collective show"),
    }  # fmt: skip
    found = {
        (param.metavar, param.help)
        for words, command in commands()
        for param in [options(command).get(name)]
        if param is not None and (name, words) not in own
    }
    assert len(found) == 1, found


def test_a_budget_is_always_seconds() -> None:
    found = {words: options(command)["--budget"] for words, command in commands() if "--budget" in options(command)}
    assert {"advise", "plan", "synth", "bench", "run", "tune", "controller", "strategy simulate"} == set(found)
    assert {param.metavar for param in found.values()} == {"SECONDS"}


@pytest.mark.parametrize(
    ("words", "old", "new"), [(w, o, n) for w, names in OLD_NAMES.items() for o, n in names.items()]
)
def test_an_old_name_is_the_new_one_with_a_warning(
    words: str, old: str, new: str, capsys: pytest.CaptureFixture[str], good: Run
) -> None:
    command = dict(commands())[words]
    assert old not in options(command) and new in options(command)
    # The value is wrong for all of them, and the message names the new option.
    assert run([*words.split(), old, "/dev/null/x.y"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"stretto: warning: {old} is now {new}; the old name goes with the next release"
    assert len(said) == 2
    assert old not in re.sub("[<>'/,.]", " ", good(*words.split(), "--help")).split()


def test_old_names_still_do_their_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, program = tmp_path / "x.html", tmp_path / "x.txt"
    assert run(["simulate", "ring", "-c", "ring:4", f"--plot={page}", "--program", str(program)]) == 0
    assert page.exists() and program.exists()
    assert capsys.readouterr().err.count("warning") == 2


def test_words_of_another_program_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Everything after the command that a job starts with is the job's, whatever our options are called."""
    code = run(["run", "--budget", "0", "true", "--report", "-q"])
    said = capsys.readouterr().err
    assert code == 2 and "warning" not in said and "--budget: must be" in said


@pytest.mark.parametrize("words", OUTPUT_ARGUMENTS)
def test_the_last_argument_of_convert_may_be_an_option(words: str, tmp_path: Path, files: dict[str, str]) -> None:
    source = {"cluster": "ring:4", "program": files["ring"], "workload": "dlrm:A2,ranks=8"}[words.split()[0]]
    target = tmp_path / ("x.xml" if words.startswith("program") else "x.yaml")
    assert run([*words.split(), "-o", str(target), source]) == 0
    assert target.exists()


@pytest.mark.parametrize("where", [0, 2, 4])
def test_quiet_is_results_alone_wherever_it_stands(where: int, tmp_path: Path, good: Run) -> None:
    line = ["cluster", "show", "ring:4", "-o", str(tmp_path / "x.svg")]
    assert "wrote" in good(*line)
    line.insert(where if where != 4 else 5, "-q")
    assert good(*line) == ""


def test_verbose_tells_what_the_library_logs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "-v", "algorithms"], capture_output=True, text=True, timeout=120, check=True
    )
    assert "ring" in done.stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("cluster show dgx3", "did you mean 'dgx2'?"),
        ("synth allgatherr -c ndv2", "did you mean 'all_gather'?"),
        ("simulate rign -c dgx2:2", "did you mean 'ring'?"),
        ("workload show resent", "did you mean 'resnet'?"),
        ("clutser list", "Did you mean 'cluster'?"),
        ("cluster shwo", "Did you mean 'show'?"),
        ("simulate ring -c dgx2 --htm x.html", "Did you mean '--html'?|Possible options"),
        ("synth allgather -c ndv2 --budget 0", "error: --budget: must be finite and > 0"),
        ("plan -w dlrm:A2,ranks=8 -c hgx2:1 --budget 0", "error: --budget: must be finite and > 0"),
        ("plan -w dlrm:A2,ranks=8 -c hgx2:1 --steps 0", "error: --steps: must be"),
        ("simulate ring -c dgx2 -b 5X", "error: --bytes: size '5X'"),
        ("dims schedule -c torus:4x4 -b 1M,2M", "error: --bytes '1M,2M': one size"),
        ("pipeline search --cap 1X", "error: --cap: size"),
        ("dims plot -c torus:4x4 --window -3 --html /dev/null", "error: --window: must be"),
        ("bound all_reduce -c dgx2 --root 3", "--root: all_reduce has no root"),
        ("status --address foo:bar", "error: --address 'foo:bar': expected"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(line: str, said: str, bad: Run) -> None:
    found = bad(*line.split())
    assert any(part in found for part in said.split("|")), found


def test_commands_are_in_groups_and_in_the_list_as_they_are(good: Run) -> None:
    text = good("--help")
    at = [text.index(f"─ {panel} ─") for panel in dict.fromkeys(entry.panel for entry in ENTRIES)]
    assert at == sorted(at)
    for entry in ENTRIES:
        assert f" {entry.name} " in text
        assert entry.about in text
        assert entry.about.endswith(".")


def test_help_is_a_command_too(good: Run) -> None:
    assert good("help", "plan", "show") == good("plan", "show", "--help")
    assert good("help") == good("--help")


def test_no_type_is_shown_for_flags(good: Run) -> None:
    for words, _ in commands():
        assert "<bool>" not in good(*words.split(), "--help")
    assert "<bool>" not in good("--help")


@pytest.mark.parametrize("line", [["--help"], ["cluster", "show", "ring:4"], ["algorithms"]])
def test_a_command_loads_itself_alone(line: list[str]) -> None:
    script = f"""import sys, stretto.cli as c; c.run({line})
names = {[entry.name for entry in ENTRIES]}
print([n for n in names if 'stretto.cli.' + n in sys.modules and n != {line[0]!r}])"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_color_means_no_escapes(monkeypatch: pytest.MonkeyPatch, good: Run) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in good("algorithms")
    assert "\x1b" not in good("cluster", "list")


@pytest.mark.parametrize(
    ("words", "found"),
    [("stretto clus", "cluster"), ("stretto cluster sh", "show"), ("stretto simulate ring --clu", "--cluster"),
     ("stretto simulate ring --cluster dgx", "dgx2"), ("stretto simulate rin", "ring")],
)  # fmt: skip
def test_shells_complete_commands_options_and_names(words: str, found: str) -> None:
    environment = os.environ | {
        "_STRETTO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['stretto']; from stretto.cli import main; main()"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert found in done.stdout.split(), done


def test_no_function_is_longer_than_80_lines() -> None:
    folder = Path(stretto.cli.__file__).parent
    long = [
        f"{path.name}: {node.name}"
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 80
    ]
    assert long == []


def test_tables_are_made_in_one_place() -> None:
    folder = Path(stretto.cli.__file__).parent
    for path in (*folder.glob("*.py"), *(folder.parent / "report").glob("*.py")):
        # The drawing of a cluster has tables of its own kind.
        if path.name not in ("table.py", "table_html.py", "pages.py", "cluster_drawing.py"):
            assert "rich.table" not in path.read_text(), path


def test_a_table_that_is_too_wide_is_printed_in_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    table = ResultTable("name", *(f">number {i}" for i in range(12)))
    table.add_row("row", *(f"{i}.000 ms" for i in range(12)))
    Console(width=80).print(table)
    text = capsys.readouterr().out
    assert text.count("row") > 1
    assert all(f"{i}.000 ms" in text for i in range(12))
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("command", [["torchrun", "--nproc-per-node", "2", "a.py"], ["/usr/bin/torchrun", "a.py"],
                                     ["python", "-m", "torch.distributed.run", "a.py"]])  # fmt: skip
def test_a_launcher_in_the_lab_is_refused_unless_there_is_one_for_each_host(command: list[str]) -> None:
    for hosts, ranks in ((2, 4), (1, 2), (2, 1)):
        with pytest.raises(InvalidInput, match=f"so {hosts * ranks} torchruns with a job each: leave torchrun out"):
            refuse_many_launchers(command, hosts, ranks)
    refuse_many_launchers(command, 1, 1)
    refuse_many_launchers([command[0], *command[1:-1], "--nnodes=2", "a.py"], 2, 1)
    refuse_many_launchers(["python", "torchrun.py"], 2, 4)


@pytest.mark.parametrize("words", [words for words, _ in commands()])
def test_the_page_of_the_command_line_names_every_command(words: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert f"| `stretto {words}" in page, f"docs/cli.md has no row for stretto {words}"
