# SPDX-License-Identifier: Apache-2.0
"""What README and docs say can be traced: tables name their commit, figures stand in a table, commands are accepted."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import DOCS, PAGES, ROOT, command_line, stretto_lines

BENCHMARKS = ROOT / "benchmarks"
SHORT = [ROOT / "README.md", ROOT / "docs" / "results-short.md"]
"""Pages that quote results."""
RESULTS = [page for page in sorted((ROOT / "docs").glob("results*.md")) if page not in SHORT]
"""Pages with tables that benchmarks printed."""
GENERATED = {"cli-commands.md", "contributing.md", "changelog.md"}
"""Pages of the site that scripts/docs_hooks.py makes."""
COMMIT = re.compile(r"Commit: ([0-9a-f]{7,})( with uncommitted changes)? \(\d{4}-\d\d-\d\d[,;] .+\)\.")
"""As `--markdown` prints it, or with the reason why the table was not rerun instead of the machine's load."""


def tables(text: str) -> Iterator[tuple[int, str]]:
    """The line number of every table's head, and the last line before it that is not empty."""
    before, inside = "", False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("|") and not inside:
            yield number, before
        inside = line.startswith("|")
        before = line or before


def test_every_table_of_results_names_the_commit_that_printed_it() -> None:
    found = [(page.name, number, before) for page in RESULTS for number, before in tables(page.read_text())]
    assert len(found) > 80
    assert [(page, number, before[:80]) for page, number, before in found if not COMMIT.fullmatch(before)] == []


def test_the_commits_that_results_name_are_in_the_history() -> None:
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("no whole history here")
    names = {match[1] for page in RESULTS for match in COMMIT.finditer(page.read_text())}
    # A commit that was rebased away may still be an object here, and is in nobody else's clone.
    assert [name for name in sorted(names) if git("merge-base", "--is-ancestor", name, "HEAD").returncode] == []


def section(page: str, title: str) -> str:
    """The part of a page of results under a heading, named as a link names it."""
    parts = re.split(r"^## (.+)$", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    bodies = {re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-"): body for head, body in zip(
        parts[1::2], parts[2::2], strict=True
    )}  # fmt: skip
    assert title in bodies, f"docs/{page} has no section #{title}"
    return bodies[title]


def quoted_rows() -> list[tuple[str, str, str, str]]:
    """What, figures, and the named page and section of every row that quotes results."""
    link = r"\[.+?\]\((?:docs/)?(results[\w-]*\.md)#([\w-]+)\)"
    row = re.compile(rf"^\| (.+?) \| (.+?) \| .+? \| {link} \|$", re.MULTILINE)
    found = [row.findall(page.read_text()) for page in SHORT]
    assert [len(rows) >= 4 for rows in found] == [True, True]
    return [each for rows in found for each in rows]


def stands(figure: str, known: set[str], percent: bool = False) -> bool:
    """Whether a figure is one of a section, or one of them rounded or, where asked, in percent."""
    digits = len(figure.partition(".")[2])
    longer = [float(n) for n in known if len(n.partition(".")[2]) > digits]
    said = {figure, figure.rstrip("0").rstrip(".") if digits else figure}  # tables leave zeros at the end out
    return bool(said & known) or any(f"{n * by:.{digits}f}" == figure for n in longer for by in (1, 100)[: 1 + percent])


@pytest.mark.parametrize(("what", "figures", "page", "title"), quoted_rows(), ids=lambda text: str(text)[:30])
def test_every_quoted_figure_stands_in_the_section_it_names(what: str, figures: str, page: str, title: str) -> None:
    known = set(re.findall(r"\d+(?:\.\d+)?", section(page, title).replace(",", "")))
    said = re.findall(r"\d+(?:\.\d+)?", figures)
    assert [number for number in said if not stands(number, known, "%" in figures)] == []


def test_figures_may_be_rounded_and_nothing_else() -> None:
    known = {"1.947", "0.9966", "12"}
    assert all(stands(figure, known) for figure in ("1.947", "1.95", "1.9", "0.997", "12", "12.0"))
    assert not any(stands(figure, known) for figure in ("1.94", "0.996", "120", "13", "99.7"))
    assert stands("99.7", known, percent=True) and not stands("99.6", known, percent=True)


def commands() -> list[tuple[str, str]]:
    """Every command line of README and docs that runs a benchmark."""
    found = {}
    for page in PAGES:
        fenced = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
        text = page.read_text()
        inline = re.findall(r"`([^`\n]+)`", fenced.sub("", text))
        for line in [line for block in fenced.findall(text) for line in block.splitlines()] + inline:
            match = re.search(r"benchmarks/(\w+)\.py( .*)?$", line)
            if match and (match[2] or "").strip():
                found[line.strip()] = page.name
    assert len(found) > 20
    return [(page, line) for line, page in found.items()]


class Accepted(Exception):
    """A script has parsed its command line."""


def test_benchmarks_accept_the_commands_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: Any, **more: Any) -> None:
        parse(self, *args, **more)
        raise Accepted

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    refused = []
    for page, line in commands():
        words = shlex.split(line[line.index("benchmarks/") :])
        monkeypatch.setattr(sys, "argv", words)
        try:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
            refused.append(f"{page}: {line}: parsed nothing")
        except Accepted:
            continue
        except (SystemExit, OSError) as error:
            refused.append(f"{page}: {line}: {error}")
    assert refused == []


def test_miniatures_are_called_by_the_number_of_their_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import strategy_models
    import strategy_rank

    assert set(strategy_models.LABELS) == set(strategy_rank.MODELS)
    for name, (make, _) in strategy_rank.MODELS.items():
        millions = sum(parameter.numel() for parameter in make().parameters()) / 1e6
        said = re.search(r"-like ([\d.]+)M", strategy_models.LABELS[name])
        assert said and float(said[1]) == pytest.approx(millions, rel=0.02), name


def test_a_table_is_printed_under_its_commit(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import common

    rows = [
        {"case": "one", "system": "ours", "ratio": 2.0, "paper_ratio": 1.5, "empty": None},
        {"case": "one", "system": "theirs", "ratio": 1.0, "empty": None},
        {"case": "two", "system": "ours", "ratio": 3.0},
    ]
    common.print_markdown(rows, ["case", "ratio", "empty"])
    head, _, *table = capsys.readouterr().out.splitlines()
    assert COMMIT.fullmatch(head) or head.startswith("Commit: unknown")
    assert table[:3] == ["| case | ratio |", "| --- | --- |", "| one | 2 |"]
    assert common._wide(rows, "ratio") == [
        {"case": "one", "ours": 2.0, "ours, paper": 1.5, "theirs": 1.0}, {"case": "two", "ours": 3.0},
    ]  # fmt: skip


def test_a_simulator_beside_ours_gets_the_same_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import astra_sim

    fake = tmp_path / "peer"
    fake.write_text(f"#!/bin/sh\necho sys[0] finished, 2415001 cycles\ncp -r . {tmp_path / 'seen'}\n")
    fake.chmod(0o755)
    row = astra_sim.compare(0, fake)
    assert (row["time_us"], row["astra_time_us"]) == (pytest.approx(2415.0), 2415.001)
    assert min(row["cpu_s"], row["astra_cpu_s"]) > 0
    assert len(list((tmp_path / "seen" / "trace").glob("job.*.et"))) == 16
    network = (tmp_path / "seen" / "network.yml").read_text()
    assert "topology: [ Ring ]" in network and "npus_count: [ 16 ]" in network
    assert float(network.split("bandwidth: [")[1].split("]")[0]) * 2**30 == pytest.approx(50e9)


def test_every_page_is_in_the_menu_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = [page for part in config["nav"] for pages in part.values() for page in pages]
    assert sorted(listed) == sorted({*(page.name for page in DOCS), *GENERATED})


def anchors(path: Path) -> set[str]:
    """The anchors that headings of a page get."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M)
    words = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", head).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-") for text in words}


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.S)
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name) if name else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            wrong.append(target)
    assert wrong == []


def test_what_is_supported_is_said_in_three_words() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .*\|$", (ROOT / "docs" / "supported.md").read_text(), re.M)
    assert [row for row in rows if not re.match(r"(run here|without hardware|no)\b", row[1])] == []
    names = " ".join(name for name, _ in rows)
    systems = "PyTorch Python CUDA NCCL DDP FSDP2 DTensor pipelining Megatron DeepSpeed torchtitan ROCm"
    for wanted in systems.split():
        assert wanted in names, wanted


def test_the_table_of_environment_variables_is_complete() -> None:
    table = set(re.findall(r"`(STRETTO_[A-Z_]+)`", (ROOT / "docs" / "environment.md").read_text()))
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "native").rglob("*.c")]
    sources = [path.read_text() for path in files]
    used = {name for text in sources for name in re.findall(r"[\"'](STRETTO_[A-Z_]+[A-Z])[\"']", text)}
    assert used == table


def refused(line: str) -> str:
    """Why our command line refuses the words of a line; empty where it takes them."""
    command, words = command_line(), [word for word in shlex.split(line)[1:] if word not in ("-q", "-v")]
    while words and hasattr(command, "commands") and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    if command is command_line():
        return "no such command"
    context = command.context_class(command, info_name="stretto")
    try:
        _, left, _ = command.make_parser(context).parse_args(words)
    except Exception as error:  # Typer may bring a click of its own.
        return str(error)
    return f"too many words: {left}" if left and not command.allow_extra_args and "--" not in words else ""


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
def test_documented_commands_are_accepted(page: Path) -> None:
    assert [(line, why) for line in stretto_lines(page) if (why := refused(line))] == []


def test_wrong_commands_are_refused() -> None:
    for line in ("stretto nosuch", "stretto plan --nosuch 1", "stretto bound all_reduce -c", "stretto doctor a b c"):
        assert refused(line), line
    assert refused("stretto run -- torchrun --nproc-per-node 2 train.py") == ""


def python_blocks() -> list[tuple[str, str]]:
    """The Python of all pages, without what is only a part of a statement."""
    found = []
    for page in PAGES:
        for body in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
            found.append((page.name, body if ">>>" not in body else ""))
    return found


def test_python_in_pages_is_well_formed_and_names_what_exists() -> None:
    wrong = []
    for page, body in python_blocks():
        tree = ast.parse(body, page)
        names = {"st": "stretto", "stretto": "stretto"}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "stretto":
                paths = [f"{node.module}.{one.name}" for one in node.names]
                wrong += [f"{page}: {path}" for path in paths if not exists(path)]
        attributes = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        for text in attributes:
            first, _, rest = text.partition(".")
            if first in names and re.fullmatch(r"[\w.]+", rest) and not exists(f"stretto.{rest}"):
                wrong.append(f"{page}: {text}")
    assert wrong == []


@cache
def exists(path: str) -> bool:
    """Whether a dotted name leads to a module, or to something in one."""
    module, names = path, list[str]()
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, name = module.rpartition(".")
            names.insert(0, name)
            if not module:
                return False
    for name in names:
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


def test_many_commands_are_checked() -> None:
    assert sum(len(list(stretto_lines(page))) for page in PAGES) > 60
