# SPDX-License-Identifier: Apache-2.0
"""benchmarks/all.py: finds the commands of the page, runs what is missing, and goes on where it stopped."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def everything() -> Any:
    spec = importlib.util.spec_from_file_location("benchmarks_all", ROOT / "benchmarks" / "all.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_command_of_the_page_is_found_once(everything: Any) -> None:
    found = everything.commands()
    assert len(found) > 30 and len({command.line for command in found}) == len(found)
    assert all((ROOT / command.words[1]).is_file() for command in found if command.words[0] != "sh")
    assert {command.needs for command in found} == {"", "a GPU", "ASTRA-sim", "ForestColl and TACOS"}


def test_every_table_has_a_command_above_it_that_all_runs_or_names(everything: Any) -> None:
    lines = {command.line for command in everything.commands()}
    found = everything.tables()
    assert len(found) > 80
    assert [table for table in found if table.kept and table.command not in lines] == []


def test_a_part_that_the_text_names_is_a_command(everything: Any) -> None:
    commands = [command.line for command in everything.commands()]
    text = re.sub(r"^```\w*\n.*?^```", "", (ROOT / "docs" / "results.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`(?:\S*python )?benchmarks/(\w+\.py) --only\s+([\w,]+)", text)
    missing = [
        (script, part) for script, parts in named for part in parts.split(",")
        if not any(script in line and re.search(rf"\b{part}\b", line) for line in commands)
    ]  # fmt: skip
    assert missing == []


def test_a_second_call_runs_only_what_failed(everything: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "results.md"
    page.write_text("```\npython benchmarks/good.py --markdown\npython benchmarks/bad.py\n```\n")
    found = everything.commands(page)
    ran: list[str] = []

    def fake(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        ran.append(words[1])
        code = int("bad" in words[1] and ran.count(words[1]) == 1)
        return subprocess.CompletedProcess(words, code, stdout="| a table |\n")

    monkeypatch.setattr(everything, "commands", lambda: found)
    monkeypatch.setattr(everything, "commit", lambda: "feed")
    monkeypatch.setattr(everything.subprocess, "run", fake)
    monkeypatch.setattr(sys, "argv", ["all.py", "--output", str(tmp_path)])
    monkeypatch.setattr(everything, "COSTS", tmp_path / "costs.csv")
    monkeypatch.setattr(everything.note_cost, "__defaults__", (tmp_path / "costs.csv",))
    assert everything.main() == 1
    assert everything.main() == 0
    assert set(everything.costs(tmp_path / "costs.csv")) == {command.line for command in found}
    assert ran == ["benchmarks/good.py", "benchmarks/bad.py", "benchmarks/bad.py"]
    assert "| a table |" in (tmp_path / "feed" / "01-good-py-markdown.md").read_text()
