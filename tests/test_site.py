# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: pages are in the menu, links lead somewhere, and what pages say to type is accepted."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from stretto.cli import app, run

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
GENERATED = {"cli-commands.md", "contributing.md", "changelog.md"}
"""Pages that scripts/docs_hooks.py makes."""
TYPED = ["README.md", *(f"docs/{page.name}" for page in PAGES)]


def blocks(page: str, *languages: str) -> list[str]:
    """The fenced blocks of a page in one of these languages ("" for none)."""
    text = (ROOT / page).read_text()
    return [body for name, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S) if name in languages]


def test_every_page_is_in_the_menu_once() -> None:
    # The file has a tag of mkdocs' own that plain YAML readers do not know.
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = [page for part in config["nav"] for pages in part.values() for page in pages]
    assert sorted(listed) == sorted({*(page.name for page in PAGES), *GENERATED})


def anchors(path: Path) -> set[str]:
    """The anchors that headings of a page get."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M)
    words = (re.sub(r"\[(.*?)\]\(.*?\)", r"\1", head).lower() for head in heads)
    return {re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-") for text in words}


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda page: page.name)
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


def test_the_table_of_environment_variables_is_complete() -> None:
    table = set(re.findall(r"`(STRETTO_[A-Z_]+)`", (DOCS / "environment.md").read_text()))
    sources = [path.read_text() for path in (ROOT / "src").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"[\"'](STRETTO_[A-Z_]+[A-Z])[\"']", text)}
    assert used == table


@cache
def command_line() -> Any:
    return typer.main.get_command(app)


def stretto_lines(page: str) -> Iterator[str]:
    """The command lines of ours in a page, without what stands beside them."""
    for block in blocks(page, "", "sh"):
        for line in block.replace("\\\n", " ").splitlines():
            for found in re.findall(r"^(?:\$ |srun )?(stretto [a-z].*)", re.sub(r"(?<=\S)  +", "  ", line)):
                yield found.partition("  ")[0].rstrip(" &")


@pytest.mark.parametrize("page", TYPED)
def test_options_of_documented_commands_exist(page: str) -> None:
    for line in stretto_lines(page):
        command, words = command_line(), shlex.split(line)[1:]
        while words and hasattr(command, "commands") and not words[0].startswith("-"):
            if words[0] not in command.commands:
                break
            command = command.commands[words.pop(0)]
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        own = words[: words.index("--")] if "--" in words else words
        options = [word.partition("=")[0] for word in own if re.match(r"--?[a-z]", word)]
        assert [option for option in options if option not in {*known, "-q", "-v"}] == [], line
        assert command is not command_line(), line


def test_many_commands_are_checked() -> None:
    assert sum(len(list(stretto_lines(page))) for page in TYPED) > 80


@pytest.mark.parametrize("page", ["docs/tutorial.md", "docs/howto.md"])
def test_scripts_are_well_formed(page: str) -> None:
    for block in blocks(page, "sh"):
        subprocess.run(["sh", "-n"], input=block, text=True, check=True)
    for block in blocks(page, "yaml"):
        assert all(isinstance(each, dict) for each in yaml.safe_load_all(block))
    for block in blocks(page, "python"):
        compile(block, page, "exec")


def test_the_job_of_the_tutorial_trains(tmp_path: Path) -> None:
    script = next(block for block in blocks("docs/tutorial.md", "python") if "init_process_group" in block)
    (tmp_path / "train.py").write_text(script)
    env = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "STEPS": "3"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rank 0: loss ")


def test_the_snippet_of_advise_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (snippet,) = blocks("docs/advise.md", "python")
    exec(compile(snippet, "docs/advise.md", "exec"), {})
    assert "low" in capsys.readouterr().out


def test_the_commands_of_the_tutorial_answer_for_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("traces").mkdir()
    for trace in (ROOT / "tests" / "workload" / "data").glob("gpu_nccl.*.json"):
        shutil.copy(trace, Path("traces"))
    shutil.copy(ROOT / "tests" / "cluster" / "data" / "smi_dgx_a100.txt", "topo.txt")
    lines = [line for line in stretto_lines("docs/tutorial.md") if " traces/" in line]
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line)[1:]
        assert run([*words, "--steps", "10"]) == 0, capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} >= {"advice.html", "plan.json", "plan.html", "nccl.csv"}
