# SPDX-License-Identifier: Apache-2.0
"""Every table of docs/results.md, from one commit: runs the commands that the page names, and goes on where it stopped.

python benchmarks/all.py                    # all that needs no other hardware or program; hours
python benchmarks/all.py --only planner     # the commands whose text holds a word
python benchmarks/all.py --list             # what would be run, and what is done
python benchmarks/all.py --tables           # the page's tables: of which commit, and how many changes of the code ago

What a command prints goes to results/COMMIT/NUMBER-NAME.md, so that a second call runs only what is missing. Commands
that need a GPU or a program of others are listed, and left to whoever has it.
"""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "--only nccl": "a GPU", "gpu_jobs.py": "a GPU", "gpu_worker.py": "a GPU", "--astra-sim": "ASTRA-sim",
    "--forestcoll": "ForestColl and TACOS",
}  # fmt: skip
"""Parts of command lines, and what those commands need."""
BENCHMARK = r"^\S*python benchmarks/"
OTHER = r"python tests/jobs/|^torchrun .*tests/jobs/|^scripts/repeat-tests"
"""What prints a table and is no benchmark: soaks, rounds of tests, jobs on GPUs."""


@dataclass(frozen=True, kw_only=True)
class TableCommand:
    """One command of the page."""

    number: int
    line: str

    @property
    def needs(self) -> str:
        """What this command needs that `all.py` does not bring; empty where nothing."""
        return next((what for part, what in ELSEWHERE.items() if part in self.line), "")

    @property
    def words(self) -> list[str]:
        """The command for this Python, or for a shell where it is no benchmark."""
        if re.match(BENCHMARK, self.line):
            return [sys.executable, *shlex.split(self.line)[1:]]
        return ["sh", "-c", self.line]

    def output(self, folder: Path) -> Path:
        """The file for what the command prints."""
        name = re.sub(r"[^a-z0-9]+", "-", (self.line.partition("benchmarks/")[2] or self.line).lower())[:60].strip("-")
        return folder / f"{self.number:02d}-{name}.md"


def commands(page: Path = ROOT / "docs" / "results.md") -> list[TableCommand]:
    """The command lines in the page's blocks that print tables, in order, each once."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines() if re.search(f"{BENCHMARK}|{OTHER}", line)]
    return [TableCommand(number=at, line=line) for at, line in enumerate(dict.fromkeys(lines), start=1)]


def tables(page: Path = ROOT / "docs" / "results.md") -> list[tuple[str, str]]:
    """The section of every table of the page, and the commit that printed it."""
    found, section = [], ""
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            section = line.strip("# ")
        elif match := re.match(r"Commit: ([0-9a-f]{7,})", line):
            found.append((section, match[1]))
    return found


def changes_since(name: str) -> int:
    """How many commits have changed the code since this one."""
    said = subprocess.run(
        ["git", "rev-list", "--count", f"{name}..HEAD", "--", "src", "native"], cwd=ROOT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return int(said.stdout)


def commit() -> str:
    """The commit that is checked out, marked where files differ from it."""
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    return said.stdout.strip()


def run(command: TableCommand, path: Path) -> bool:
    """Run a command; its output appears under its name only when it has ended well."""
    begun = time.monotonic()
    done = subprocess.run(command.words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(f"  {time.monotonic() - begun:.0f} s, exit code {done.returncode}", flush=True)
    if done.returncode:
        return False
    part = path.with_suffix(".part")
    part.write_text(f"`{command.line}`\n\n{done.stdout}")
    part.rename(path)
    return True


def main() -> int:
    """Run what is missing; the exit code is 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="the commands whose text holds this")
    parser.add_argument("--list", action="store_true", help="print the commands and their state, and run nothing")
    parser.add_argument("--tables", action="store_true", help="print how old each table is, and run nothing")
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="where results go")
    options = parser.parse_args()
    if options.tables:
        for section, name in tables():
            print(f"{name}  {changes_since(name):4d} changes of the code since  {section}")
        return 0
    folder = options.output / commit()
    failed = 0
    for command in commands():
        path = command.output(folder)
        state = "done" if path.exists() else f"needs {command.needs}" if command.needs else "missing"
        if options.only not in command.line:
            continue
        print(f"{command.number:3d} {state:12} {command.line}", flush=True)
        if state == "missing" and not options.list:
            folder.mkdir(parents=True, exist_ok=True)
            failed += not run(command, path)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
