# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/results.md, from one commit: runs the page's commands, goes on where it stopped, writes the page.

python benchmarks/all.py                    # the commands of docs/results.md, all of one commit; less than an hour
python benchmarks/all.py --write            # and put what they have printed into the page
python benchmarks/all.py --only planner     # the commands whose text holds a word
python benchmarks/all.py --every            # those of the other pages of results, too; hours
python benchmarks/all.py --list             # what would be run, what is done, and the CPU seconds that each took last
python benchmarks/all.py --limit 60         # only what ends within 60 CPU seconds; the rest is noted as longer
python benchmarks/all.py --tables           # the tables of all pages, and how many changes of the code ago each is

What a command prints goes to results/COMMIT/NAME.md, so that a second call runs only what is missing; what it cost goes
to benchmarks/all_costs.csv. In docs/results.md each command and its output stand between two marks, and nothing is
written there by hand. Commands that need a GPU or a program of others are listed, and left to whoever has it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
"""The page whose tables are of one commit."""
OTHERS = sorted(PAGE.parent.glob("results-*.md"))
"""Pages whose tables are of several commits: what takes hours, a GPU, or a program of others."""
BEGIN, END = "<!-- printed -->", "<!-- end of what was printed -->"
"""Marks in the page: between them stand one command and what it printed."""
ELSEWHERE = {
    "--only nccl": "a GPU", "/gpu": "a GPU", "--device cuda": "a GPU", "--astra-sim": "ASTRA-sim",
    "--forestcoll": "ForestColl and TACOS",
}  # fmt: skip
"""Parts of command lines, and what those commands need."""
BENCHMARK = r"^\S*python benchmarks/"
OTHER = r"^[A-Z_]+=\S+ .*python |python tests/jobs/|^torchrun |^scripts/repeat-tests|^stretto (lab run|plan) "
"""What prints a table and is not just a benchmark: soaks, rounds of tests, jobs in the lab or on GPUs, settings."""
COSTS = ROOT / "benchmarks" / "all_costs.csv"
"""CPU seconds of each command, where they were measured, and the commit: `cpu_s,commit,command`."""


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
        """The file for what the command prints: it is found again where the page has changed around the command."""
        name = re.sub(r"[^a-z0-9]+", "-", (self.line.partition("benchmarks/")[2] or self.line).lower())[:60].strip("-")
        return folder / f"{name}-{hashlib.sha256(self.line.encode()).hexdigest()[:6]}.md"


def commands(*pages: Path) -> list[TableCommand]:
    """The command lines in blocks of pages (docs/results.md if none is given) that print tables, each once."""
    text = "\n".join(page.read_text() for page in pages or (PAGE,))
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines() if re.search(f"{BENCHMARK}|{OTHER}", line)]
    return [TableCommand(number=at, line=line) for at, line in enumerate(dict.fromkeys(lines), start=1)]


@dataclass(frozen=True, kw_only=True)
class PageTable:
    """One table of the page: its section, the commit that printed it, and the command (None: its text says why)."""

    section: str
    commit: str
    command: str | None
    kept: bool


def tables(page: Path = PAGE) -> list[PageTable]:
    """Every table of the page, in order; its command is the last one above it in its section."""
    found: list[PageTable] = []
    section, command = "", None
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            section, command = line.strip("# "), None
        elif re.search(f"{BENCHMARK}|{OTHER}", line.strip()):
            command = line.strip()
        elif match := re.match(r"Commit: ([0-9a-f]{7,})", line):
            kept = "scripts are not kept" not in line
            found.append(PageTable(section=section, commit=match[1], command=command, kept=kept))
    return found


def costs(path: Path = COSTS) -> dict[str, str]:
    """What each command cost when it was run last, as text: "12", or "over 60"."""
    rows = (line.split(",", 2) for line in path.read_text().splitlines()[1:]) if path.exists() else ()
    return {command: cpu_s for cpu_s, _, command in rows}


def note_cost(command: TableCommand, cpu_s: str, path: Path = COSTS) -> None:
    """Keep what a command cost, in place of what was known."""
    rows = path.read_text().splitlines()[1:] if path.exists() else []
    rows = [row for row in rows if row.split(",", 2)[2] != command.line] + [f"{cpu_s},{commit()},{command.line}"]
    path.write_text("\n".join(["cpu_s,commit,command", *sorted(rows, key=lambda row: row.split(",", 2)[2])]) + "\n")


def written(text: str, folder: Path) -> str:
    """A page's text with what its commands have printed between its marks.

    Args:
        text: The page as it is.
        folder: Where the outputs of one commit are.

    Returns:
        The new text.

    Raises:
        FileNotFoundError: A command has no output in the folder.
    """

    def block(match: re.Match[str]) -> str:
        line = next(line for line in match[1].splitlines() if re.search(f"{BENCHMARK}|{OTHER}", line))
        said = TableCommand(number=0, line=line).output(folder).read_text().split("\n\n", 1)[1].strip()
        begun = re.search(r"^Commit: ", said, re.MULTILINE)
        shown = said[begun.start() :] if begun else f"```text\n{said}\n```"
        return f"{BEGIN}\n\n```\n{line}\n```\n\n{shown}\n\n{END}"

    return re.sub(f"{BEGIN}(.*?){END}", block, text, flags=re.DOTALL)


def changes_since(name: str) -> int:
    """How many commits have changed the code since this one."""
    said = subprocess.run(
        ["git", "rev-list", "--count", f"{name}..HEAD", "--", "src", "native"], cwd=ROOT, capture_output=True,
        text=True, check=True,
    )  # fmt: skip
    return int(said.stdout)


def commit() -> str:
    """The commit that is checked out, marked where files other than the costs and pages differ from it."""
    git = ["git", "-C", str(ROOT)]
    said = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    code = [".", f":!{COSTS.relative_to(ROOT)}", ":!docs", ":!README.md", ":!CHANGELOG.md"]
    same = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *code], check=False)
    return said.stdout.strip() + "-dirty" * bool(same.returncode)


def run(command: TableCommand, path: Path, limit_s: int = 0) -> bool:
    """Run a command; its output appears under its name only when it has ended well.

    Args:
        command: The command.
        path: Where its output goes.
        limit_s: CPU seconds of one process after which it is ended; none where 0.

    Returns:
        Whether it has ended well, or was ended because of the limit.
    """
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["sh", "-c", f'ulimit -t {limit_s}; exec "$@"', "sh", *command.words] if limit_s else command.words
    path_with_us = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False, env=path_with_us)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"  {time.monotonic() - begun:.0f} s, {cpu_s:.0f} CPU s, exit code {done.returncode}", flush=True)
    if done.returncode and limit_s and cpu_s >= limit_s:
        note_cost(command, f"over {limit_s}")
        return True
    if done.returncode:
        return False
    part = path.with_suffix(".part")
    part.write_text(f"`{command.line}`\n\n{done.stdout}")
    part.rename(path)
    note_cost(command, f"{cpu_s:.0f}")
    return True


def main() -> int:
    """Run what is missing; the exit code is 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="the commands whose text holds this")
    parser.add_argument("--list", action="store_true", help="print the commands and their state, and run nothing")
    parser.add_argument("--tables", action="store_true", help="print how old each table is, and run nothing")
    parser.add_argument("--every", action="store_true", help="the commands of the other pages of results, too")
    parser.add_argument("--write", action="store_true", help="put what the page's commands have printed into the page")
    parser.add_argument("--limit", type=int, default=0, metavar="S", help="end what takes more CPU seconds than this")
    parser.add_argument("--output", type=Path, default=ROOT / "results", help="where results go")
    options = parser.parse_args()
    if options.tables:
        for page in (PAGE, *OTHERS):
            for table in tables(page):
                since = changes_since(table.commit)
                print(f"{table.commit}  {since:4d} changes of the code since  {page.name}: {table.section}")
        return 0
    folder = options.output / commit()
    failed, known = 0, costs()
    for command in commands(PAGE, *(OTHERS if options.every else ())):
        path = command.output(folder)
        state = "done" if path.exists() else f"needs {command.needs}" if command.needs else "missing"
        if options.only not in command.line:
            continue
        cost = known.get(command.line, "?")
        print(f"{command.number:3d} {state:12} {cost:>9} CPU s  {command.line}", flush=True)
        longer = options.limit and cost.startswith("over") and int(cost.split()[1]) >= options.limit
        if state == "missing" and not options.list and not longer:
            folder.mkdir(parents=True, exist_ok=True)
            failed += not run(command, path, options.limit)
    if options.write and not options.list and not failed:
        PAGE.write_text(written(PAGE.read_text(), folder))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
