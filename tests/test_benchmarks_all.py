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
    found = everything.commands(everything.PAGE, *everything.OTHERS)
    assert len(found) > 80 and len({command.line for command in found}) == len(found)
    assert {command.needs for command in everything.commands()} == {""}
    assert len({command.output(ROOT) for command in found}) == len(found)
    assert all((ROOT / command.words[1]).is_file() for command in found if command.words[0] != "sh")
    assert {command.needs for command in found} == {"", "a GPU", "ASTRA-sim", "ForestColl and TACOS"}


def test_every_table_has_a_command_above_it_that_all_runs_or_names(everything: Any) -> None:
    pages = everything.PAGE, *everything.OTHERS
    lines = {command.line for command in everything.commands(*pages)}
    found = [table for page in pages for table in everything.tables(page)]
    assert len(found) > 80
    assert [table for table in found if table.kept and table.command not in lines] == []


def test_a_part_that_the_text_names_is_a_command(everything: Any) -> None:
    pages = everything.PAGE, *everything.OTHERS
    commands = [command.line for command in everything.commands(*pages)]
    whole = "\n".join(page.read_text() for page in pages)
    text = re.sub(r"^```\w*\n.*?^```", "", whole, flags=re.MULTILINE | re.DOTALL)
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

    monkeypatch.setattr(everything, "commands", lambda *_: found)
    monkeypatch.setattr(everything, "commit", lambda: "feed")
    monkeypatch.setattr(everything.subprocess, "run", fake)
    monkeypatch.setattr(sys, "argv", ["all.py", "--output", str(tmp_path)])
    monkeypatch.setattr(everything, "COSTS", tmp_path / "costs.csv")
    monkeypatch.setattr(everything.note_cost, "__defaults__", (tmp_path / "costs.csv",))
    assert everything.main() == 1
    assert everything.main() == 0
    assert set(everything.costs(tmp_path / "costs.csv")) == {command.line for command in found}
    assert ran == ["benchmarks/good.py", "benchmarks/bad.py", "benchmarks/bad.py"]
    assert "| a table |" in found[0].output(tmp_path / "feed").read_text()


def test_what_was_printed_is_written_between_the_marks_and_nowhere_else(everything: Any, tmp_path: Path) -> None:
    good, bare = "python benchmarks/good.py --markdown", "stretto plan -w x -c y"
    marked = [f"{everything.BEGIN}\n```\n{line}\n```\n| old |\n{everything.END}" for line in (good, bare)]
    page = "\n\n".join(["# A page", marked[0], "Prose of 12 us.", marked[1], "The end."])
    for line, said in ((good, "progress\nCommit: feed (a day).\n\n| new |\n"), (bare, "1.00x\n")):
        everything.TableCommand(number=0, line=line).output(tmp_path).write_text(f"`{line}`\n\n{said}")
    made = everything.written(page, tmp_path)
    assert "old" not in made and "progress" not in made
    assert "Prose of 12 us." in made and made.endswith("The end.")
    assert "Commit: feed (a day).\n\n| new |" in made and "```text\n1.00x\n```" in made
    assert everything.written(made, tmp_path) == made
    everything.TableCommand(number=0, line=good).output(tmp_path).unlink()
    with pytest.raises(FileNotFoundError):
        everything.written(page, tmp_path)


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="there is a GPU")
def test_a_benchmark_of_gpus_ends_at_once_where_there_is_none() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "weights_real.py"), "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (1, "weights_real.py: needs a GPU, and a PyTorch that is built for it\n")
