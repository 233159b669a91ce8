# SPDX-License-Identifier: Apache-2.0
"""``stretto workload``: list, show and convert training steps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from ..errors import InvalidInput
from ..report.table import ResultTable
from ..units import format_bytes, format_us
from ..workload import Dep, Op, Workload, chakra_write
from ..workload.registry import MODELS
from .common import about, next_step, out, progress, quoted, wrote
from .completion import workload_names
from .options import JsonOption
from .outputs import YAML, OutputFiles, output

app = typer.Typer(
    no_args_is_help=True,
    help="""Training steps: what is computed, what is communicated, and what waits for what.

    \b
    A WORKLOAD is
      dlrm:A2                     a model and its variant (see 'stretto workload list')
      dlrm:A2,ranks=64,tables=2   with options
      gpt:13b,tensor=4,pipeline=4
      step.yaml, step.json        Stretto's own file form (docs/workloads.md)
      trace.json, traces/         PyTorch profiler (Kineto), of one rank or of all
      job.0.et, traces/           Chakra execution traces

    \b
    Next:
      stretto workload convert dlrm:A2 mine.yaml   a file to edit
    """,
)

WorkloadArgument = Annotated[
    str,
    typer.Argument(
        metavar="WORKLOAD", autocompletion=workload_names, help="A model such as dlrm:A2, or the path of a file."
    ),
]


MOST_NAME = 36
"""Columns that the name of an op gets before it is folded."""


@app.command("list")
def list_models(
    options: Annotated[bool, typer.Option("--options", help="Also what can be set, with its default.")] = False,
    rows: JsonOption = None,
) -> None:
    """The models, their variants, and what can be set.

    \b
    Examples:
      stretto workload list
      stretto workload list --options
    """
    files = OutputFiles()
    files.json(rows, {"models": [
        {"name": entry.name, "what": entry.what, "variants": list(entry.variants),
         "options": {key: option.default for key, option in entry.options.items()}}
        for entry in MODELS.values()
    ]})  # fmt: skip
    console = out()
    for entry in MODELS.values():
        console.print(Text(entry.name, style="bold").append(f"  {entry.what}", style="not bold"))
        names = ", ".join(f"{entry.name}:{variant}" for variant in entry.variants)
        console.print(Padding(Text(names, style="dim"), (0, 0, 0, 4), expand=False))
        if options:
            pairs = (
                key if option.default is None else f"{key}={option.default}" for key, option in entry.options.items()
            )
            console.print(Padding(Text(", ".join(pairs), style="dim"), (0, 0, 0, 4), expand=False))
    files.tell("stretto workload show dlrm:A2")


@app.command()
def show(
    workload: WorkloadArgument,
    most: Annotated[int, typer.Option("--ops", metavar="N", help="Show at most this many ops (0: all).")] = 60,
    rows: JsonOption = None,
) -> None:
    """The ops of one iteration in the order of submission, and what they add up to.

    \b
    Examples:
      stretto workload show dlrm:A2
      stretto workload show gpt:125m,ranks=16,tensor=2,pipeline=2,micro_batches=4 --ops 0
      stretto workload show trace.json
    """
    if most < 0:
        raise InvalidInput(f"--ops: must be >= 0, not {most}")
    loaded = _load(workload)
    files = OutputFiles()
    files.json(rows, {
        "name": loaded.name, "ranks": loaded.num_ranks, "digest": loaded.digest, "notes": list(loaded.notes),
        "ops": [
            {"name": op.name, "kind": op.kind, "phase": op.phase, "nbytes": op.nbytes if op.is_comm else None,
             "duration_us": None if op.is_comm else max(op.durations_us, default=op.duration_us),
             "after": [dep.op for dep in op.after]}
            for op in loaded.ops
        ],
    })  # fmt: skip
    console = out()
    console.print(Text(about(loaded), style="bold"))
    for note in loaded.notes:
        console.print(Text(f"  {note}", style="dim"))
    console.print()
    console.print(_ops_table(loaded, most or len(loaded.ops)))
    if most and len(loaded.ops) > most:
        console.print(Text(f"{len(loaded.ops) - most} more ops; --ops 0 shows all", style="dim"))
    console.print()
    console.print(_totals(loaded))
    files.tell(f"stretto plan -w {quoted(workload)} -c CLUSTER")


@app.command()
def convert(
    workload: WorkloadArgument,
    target: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            callback=output(*YAML, folder=True),
            help="A file: .yaml, .yml or .json; or a directory for Chakra traces.",
        ),
    ],
) -> None:
    """Write any workload in Stretto's own file form, which keeps everything, or as Chakra traces, one per rank.

    \b
    Examples:
      stretto workload convert dlrm:A2 a2.yaml
      stretto workload convert trace.json step.json
      stretto workload convert gpt:125m,ranks=8 chakra/
    """
    console = out()
    loaded = _load(workload)
    if target.suffix in YAML:
        loaded.save(target)
        wrote(console, target, f"digest {loaded.digest}")
    else:
        files = chakra_write.write(loaded, target)
        wrote(console, target, f"{len(files)} files")
    next_step(f"stretto plan -w {quoted(target)} -c CLUSTER")


def _load(source: str) -> Workload:
    with progress("reading", 1) as advance:
        advance(source)
        return Workload.load(source)


def _ops_table(workload: Workload, most: int) -> RenderableType:
    table = ResultTable("op", "kind", "phase", ">size or time", "where", "waits for")
    # Names tell ops apart, often only by their ends: they are never cut.
    table.columns[0].min_width = min(MOST_NAME, max(len(op.name) for op in workload.ops[:most]))
    for op in workload.ops[:most]:
        style = "cyan" if op.is_comm else ""
        waits = ", ".join(_wait(dep) for dep in op.after)
        cells = (op.name, op.kind, op.phase, _amount(op), _where(op), waits)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def _wait(dep: Dep) -> str:
    ago = f" -{dep.lag}" if dep.lag else ""
    return f"{dep.op}{ago}" if dep.why == "data" else f"{dep.op}{ago} ({dep.why})"


def _amount(op: Op) -> str:
    if op.is_comm:
        return ("<= " if op.at_most else "") + format_bytes(op.nbytes)
    return format_us(max(op.durations_us, default=op.duration_us))


def _where(op: Op) -> str:
    if op.is_comm and op.groups:
        return f"{len(op.groups)} x {len(op.groups[0])}"
    if not op.is_comm and op.ranks:
        return f"{len(op.ranks)} ranks"
    return "all"


def _totals(workload: Workload) -> RenderableType:
    table = ResultTable("", ">", "", header=False)
    phases: dict[str, float] = {}
    for op, places, each_us in zip(workload.ops, workload.op_places, workload.op_durations_us, strict=True):
        if not op.is_comm and 0 in places:
            phase = op.phase or "other"
            phases[phase] = phases.get(phase, 0.0) + each_us[places.index(0)]
    where = "" if len(workload.places) == 1 else f"rank {workload.places[0].ranks[0]}"
    for phase, total in phases.items():
        table.add_row(Text(f"compute, {phase}"), format_us(total), where)
    if not workload.comm_ops:
        table.add_row("no communication", "", "")
    counts: Counter[str] = Counter(op.kind for op in workload.comm_ops)
    for kind, count in counts.items():
        moved = sum(op.nbytes for op in workload.comm_ops if op.kind == kind)
        table.add_row(kind, format_bytes(moved), f"in {count} op{'s' if count > 1 else ''}")
    if workload.samples:
        table.add_row(Text(workload.unit), f"{workload.samples:,.10g}", "per iteration")
    return table
