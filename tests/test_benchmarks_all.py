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


def test_every_section_with_a_table_has_a_command(everything: Any) -> None:
    lines = {command.line for command in everything.commands()}
    parts = re.split(r"^#+ (.+)$", (ROOT / "docs" / "results.md").read_text(), flags=re.MULTILINE)
    bodies = dict(zip(parts[1::2], parts[2::2], strict=True))
    without = {head for head, _ in everything.tables() if not any(line in bodies[head] for line in lines)}
    assert without <= {"A second attempt to break it"}, "its scripts are not kept, as its table says"


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
    assert everything.main() == 1
    assert everything.main() == 0
    assert ran == ["benchmarks/good.py", "benchmarks/bad.py", "benchmarks/bad.py"]
    assert "| a table |" in (tmp_path / "feed" / "01-good-py-markdown.md").read_text()
