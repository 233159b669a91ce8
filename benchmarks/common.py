"""What all benchmarks share: options, a table, the JSON form, the machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def machine() -> Row:
    """What the figures were measured on."""
    try:
        with open("/proc/cpuinfo") as cpus:
            model = next(line.split(":", 1)[1].strip() for line in cpus if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version(), "system": platform.system()}


def options(about: str | None, *, only: Sequence[str] = ()) -> argparse.Namespace:
    """The command line; `only` names the parts of a benchmark that has several."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="end within a minute on two cores")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/results.md has it")
    if only:
        parser.add_argument("--only", choices=only, help="one part of it")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one case, in a process of its own
    return parser.parse_args()


def in_own_process(script: str, case: str, quick: bool) -> list[Row]:
    """Run one case of a benchmark by itself, so that its peak memory is its own."""
    command = [sys.executable, script, "--case", case] + ["--quick"] * quick
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{case}: {done.stderr.strip()}")
    rows: list[Row] = json.loads(done.stdout)
    return rows


def show(rows: list[Row], *, title: str) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "system") else "right", overflow="fold")
    for row in rows:
        table.add_row(*(_text(row.get(column)) for column in columns))
    Console(width=max(120, 14 * len(columns))).print(table)


def print_markdown(rows: list[Row]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for cells in (columns, ["---"] * len(columns), *([_text(row.get(c)) for c in columns] for row in rows)):
        print("| " + " | ".join(cells) + " |")


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


def run_cases(script: str, about: str | None, title: str, cases: dict[str, Callable[[bool], list[Row]]]) -> None:
    """Every case in a process of its own, then one table."""
    args = options(about)
    if args.case:
        print(json.dumps(cases[args.case](args.quick)))
        return
    finish([row for case in cases for row in in_own_process(script, case, args.quick)], args, title=title)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if isinstance(value, float | int) else str(value)
