# SPDX-License-Identifier: Apache-2.0
"""What all benchmarks share: options, a table, the JSON form, the machine."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median, pstdev
from typing import Any

Row = dict[str, Any]
Case = Callable[[bool], list[Row]]
"""Measures something, quickly or in full."""


def machine() -> Row:
    """What the figures were measured on."""
    try:
        with open("/proc/cpuinfo") as cpus:
            model = next(line.split(":", 1)[1].strip() for line in cpus if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}


def provenance() -> str:
    """The line under which docs/results.md shows a table: the commit of the code, the date, the machine's load."""
    root = Path(__file__).parent.parent
    code = ["--", "src", "native", "benchmarks", "examples", "CMakeLists.txt", ":!benchmarks/all_costs.csv"]

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    changed = " with uncommitted changes" if git("status", "--porcelain", *code) else ""
    load, cores = os.getloadavg()[1], os.cpu_count()
    return f"Commit: {commit}{changed} ({datetime.date.today()}, load average {load:.1f} on {cores} cores)."


def require_gpu(device: str = "cuda") -> None:
    """End at once, with one line, where there is no GPU: ranks that fail one by one are waited for until the limit."""
    seen = any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None
    if device == "cuda" and not (seen and "+cpu" not in version("torch")):
        sys.exit(f"{Path(sys.argv[0]).name}: needs a GPU, and a PyTorch that is built for it")


def cpu_s() -> float:
    """User and system seconds of this process and of its children that have ended: hardly changed by other load."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def options(about: str | None, *, only: Sequence[str] = (), runs: int = 0) -> argparse.Namespace:
    """The command line; `only` names the parts of a benchmark that has several, `runs` says how often each is run."""
    parser = common_options(about)
    if runs:
        parser.add_argument("--runs", type=int, default=runs, help="how often each case is run (1 with --quick)")
    if only:
        parser.add_argument("--only", choices=only, help="one part of it")
    return parser.parse_args()


def common_options(about: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="end within a minute on two cores")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/results.md has it")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one case, in a process of its own
    return parser


def medians(runs: Sequence[Sequence[Row]], of: str) -> list[Row]:
    """One row for each case and system: the medians of several runs, and the relative standard deviation of one column.

    >>> medians([[{"case": "a", "us": 10.0, "ok": True}], [{"case": "a", "us": 14.0, "ok": True}]], "us")
    [{'case': 'a', 'us': 12.0, 'ok': True, 'runs': 2, 'deviation': 0.16666666666666666}]

    Args:
        runs: The rows of each run.
        of: The column whose deviation is wanted.

    Returns:
        The rows, in the order of the first run; what is not a number is the first run's.
    """
    rows: list[Row] = []
    for row in runs[0]:
        same = [other for rest in runs for other in rest if all(other.get(k) == row.get(k) for k in ("case", "system"))]
        made = dict(row)
        for column, value in row.items():
            numbers = [other[column] for other in same if isinstance(other.get(column), int | float)]
            if isinstance(value, int | float) and not isinstance(value, bool) and numbers:
                made[column] = median(numbers)
        times = [other[of] for other in same if isinstance(other.get(of), int | float)]
        if len(runs) > 1 and times:
            made |= {"runs": len(times), "deviation": pstdev(times) / median(times) if median(times) else 0.0}
        rows.append(made)
    return rows


def in_own_process(script: str, case: str, quick: bool) -> list[Row]:
    """Run one case of a benchmark by itself, so that its peak memory is its own; what it says on stderr is shown."""
    command = [sys.executable, script, "--case", case] + ["--quick"] * quick
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{case}: ended with code {done.returncode}")
    rows: list[Row] = json.loads(done.stdout)
    return rows


def announce(row: Row) -> None:
    """Say on stderr what a row has, as soon as it is there: a run that is ended early keeps what it has measured."""
    cells = ", ".join(f"{column} {_text(value)}" for column, value in row.items() if column not in ("case", "system"))
    print(f"{row['case']}: {row['system']}: {cells}", file=sys.stderr, flush=True)


def show(rows: list[Row], *, title: str) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    # Only whoever prints a table waits for these imports: jobs are timed as whole processes.
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "system") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_text(row.get(column)) for column in columns))
    Console(width=max(120, 14 * len(columns))).print(table)


def print_markdown(rows: list[Row], columns: Sequence[str] = ()) -> None:
    """Print where the table comes from, then the table, without columns that are empty in every row.

    Args:
        rows: What was measured.
        columns: Only these columns, in this order; all of them where none are named.
    """
    found = list(dict.fromkeys(key for row in rows for key in row if row[key] is not None))
    shown = [column for column in columns or found if column in found]
    print(provenance(), end="\n\n")
    for cells in (shown, ["---"] * len(shown), *([_text(row.get(c)) for c in shown] for row in rows)):
        print("| " + " | ".join(cells) + " |")
    print()


def finish(rows: list[Row], args: argparse.Namespace, *, title: str) -> None:
    if args.markdown:
        print_markdown(rows)
    else:
        show(rows, title=title)
    if args.json:
        save(rows, args.json)


def save(rows: list[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": rows, "machine": machine()}, indent=1) + "\n")


def run_cases(
    script: str,
    about: str | None,
    title: str,
    cases: Mapping[str, Case],
    *,
    quick: Sequence[str] = (),
) -> None:
    """Run every case in a process of its own, then print the rows.

    `--markdown` prints one table for neighbouring cases with the same columns, or one for all where `--columns` says
    which columns are wanted.

    Args:
        script: The file to start again for each case.
        about: The description of the command line.
        title: The heading of the table.
        cases: Every case by name. `--only` names cases or first words of their names.
        quick: The cases that `--quick` runs; all of them where none are named.
    """

    def known(text: str) -> list[str]:
        for word in _words(text):
            if not any(word in (name, name.split()[0]) for name in cases):
                raise argparse.ArgumentTypeError(f"{word} is none of {', '.join(cases)}")
        return _words(text)

    parser = common_options(about)
    parser.add_argument("--only", type=known, default=[], help=f"some of, by commas: {', '.join(cases)}")
    parser.add_argument("--columns", type=_words, default=[], help="columns of the table of --markdown, by commas")
    parser.add_argument("--rows", metavar="PATTERN", help="--markdown prints the cases that this expression matches")
    parser.add_argument("--wide", metavar="COLUMN", help="--markdown prints this column only, one row for each case")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(cases[args.case](args.quick)))
        return
    chosen = [name for name in cases if not args.quick or not quick or name in quick]
    if args.only:
        chosen = [name for name in cases if name in args.only or name.split()[0] in args.only]
    found = [in_own_process(script, name, args.quick) for name in chosen]
    rows = [row for group in found for row in group]
    if args.markdown:
        if args.rows:
            found = [[row for row in group if re.search(args.rows, row["case"])] for group in found]
        found = [_wide(group, args.wide) for group in found] if args.wide else found
        for table in [[row for group in found for row in group]] if args.columns else _alike(found):
            print_markdown(table, args.columns)
    else:
        show(rows, title=title)
    if args.json:
        save(rows, args.json)


def _alike(groups: list[list[Row]]) -> list[list[Row]]:
    """Join neighbouring groups whose rows have the same columns."""
    tables: list[list[Row]] = []
    before: set[str] = set()
    for group in groups:
        columns = {key for row in group for key in row}
        if not columns:
            continue
        if tables and columns == before:
            tables[-1] += group
        else:
            tables.append(list(group))
        before = columns
    return tables


def _wide(rows: list[Row], column: str) -> list[Row]:
    """One row for each case, with a column for each system and one for the figure of the system's paper, if any."""
    found: list[Row] = []
    for row in rows:
        if row.get(column) is None:
            continue
        if not found or found[-1]["case"] != row["case"] or row["system"] in found[-1]:
            found.append({"case": row["case"]})
        found[-1][row["system"]] = row[column]
        if row.get(f"paper_{column}") is not None:
            found[-1][f"{row['system']}, paper"] = row[f"paper_{column}"]
    return found


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if isinstance(value, float | int) else str(value)
