"""``stretto reshard``: a tensor from one mesh and layout to another."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InvalidInput, unknown
from .common import out, plot_width, progress, write_json
from .outputs import HTML, TRACE, OutputFiles, output

if TYPE_CHECKING:
    from rich.table import Table

    from ..resharding import ReshardPlan
    from ..simulator import Timeline

DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int64": 8, "int32": 4, "int8": 1}
SHOWN = 12


def reshard(
    src: Annotated[str, typer.Option("--src", metavar="MESH SPEC", help="Where it is: '(2,4) S0RR'.")],
    dst: Annotated[str, typer.Option("--dst", metavar="MESH SPEC", help="Where it should be: '(3,4) S0RR'.")],
    shape: Annotated[str, typer.Option("--shape", metavar="N,N,...", help="The tensor's shape: 1024,1024,512.")],
    cluster: Annotated[str, typer.Option("--cluster", "-c", help="A preset with a node count, or a file.")],
    dtype: Annotated[str, typer.Option("--dtype", help="Element type, or the bytes of one element.")] = "float32",
    rounding: Annotated[
        str, typer.Option(metavar="chunk|balanced", help="Where sizes do not divide: as torch.chunk, or balanced.")
    ] = "chunk",
    only: Annotated[
        str | None, typer.Option("--strategies", "-s", metavar="NAME,NAME", help="Which to show; default: all.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE.html", callback=output(*HTML), help="Draw it: who sends what when.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.pftrace", callback=output(*TRACE), help="Write a Perfetto trace of ours."),
    ] = None,
    program: Annotated[
        Path | None,
        typer.Option(metavar="FILE.txt|xml", callback=output(".txt", ".prog", ".xml"), help="Write our program."),
    ] = None,
    rows: Annotated[
        Path | None, typer.Option("--json", metavar="FILE.json", callback=output(".json"), help="Write the numbers.")
    ] = None,
) -> None:
    """Bring a tensor from one device mesh to another: unit tasks, schedule, time against baselines and the bound.

    A side is a mesh and a spec with one entry for each tensor dimension: S and the mesh axes that cut it, or R where it
    is whole; P and mesh axes at the end where a sum is pending. '(2,4) RS01R': dimension 1 is cut over both axes.
    A mesh takes the next free hosts, one for each row; '(2,2)@0-1,4-5 S0R' names the devices, which may overlap.

    \b
    The strategies:
      send_recv          every receiver gets its slice by itself
      local_allgather    one copy to every host, spread inside it
      global_allgather   one copy in slices, gathered through all hosts (Alpa)
      broadcast          pipelined from host to host, tasks ordered by search
      stretto            ours: senders balanced exactly, chunks of all tasks interleaved

    \b
    Examples:
      stretto reshard --src "(2,4) S0RR" --dst "(3,4) S0RR" \\
          --shape 1024,1024,512 --cluster p3_8xlarge:5
      stretto reshard --src "(2,4) RS01R" --dst "(2,4) S01RR" \\
          --shape 1024,1024,512 --cluster p3_8xlarge:4 --html case4.html
      stretto reshard --src "(4,4)@0-15 RRP01" --dst "(4,4)@0-15 S01R" \\
          --shape 4096,4096 --cluster p3_8xlarge:4
    """
    from ..cluster import Cluster
    from ..programs.formats import save_program
    from ..report.plots import busy_plot
    from ..resharding import SYSTEMS, Tensor, place, plan_tensors
    from ..resharding.plan import OURS

    where = Cluster.load(cluster)
    sides = place(src, dst, where, rounding=rounding)
    tensor = Tensor(shape=_shape(shape), dtype_bytes=_dtype_bytes(dtype), src=sides[0], dst=sides[1])
    names = list(SYSTEMS) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in SYSTEMS:
            raise unknown("strategy", name, SYSTEMS)
    if only is None and tensor.src.spec.partial:
        names = [OURS]
    plans: dict[str, ReshardPlan] = {}
    with progress("planning", len({*names, OURS})) as advance:
        for name in dict.fromkeys([*names, OURS]):
            advance(name)
            plans[name] = plan_tensors([tensor], where, strategy=name)
            plans[name].time_us  # noqa: B018  (simulated while the bar shows)
    ours = plans[OURS]
    files = OutputFiles()
    if ours.timeline is not None and ours.program is not None:
        files.write(program, partial(save_program, ours.program))
        devices = {rank: f"device {device}" for rank, device in enumerate(ours.devices)}
        files.write(trace, partial(_traced, ours.timeline, devices))
    files.write(html, lambda path: _draw(path, plans))
    files.write(rows, lambda path: write_json(path, [_row(name, plan) for name, plan in plans.items()]))
    console = out()
    console.print(f"{tensor.src}  to  {tensor.dst}", style="bold", markup=False)
    console.print(ours.explain().splitlines()[0], markup=False)
    console.print()
    console.print(_tasks(ours))
    if ours.timeline is not None and ours.program is not None:
        console.print()
        console.print(_systems({name: plans[name] for name in names}))
        console.print(f"bound: {ours.bound_reason}", style="dim", markup=False)
        console.print()
        console.print("\n".join(ours.explain().splitlines()[1:]), markup=False)
        console.print()
        console.print(busy_plot(ours.timeline, width=plot_width(console)))
    elif program is not None or trace is not None:
        console.print("nothing is moved, so there is no program and no trace to write")
    files.tell()


def _traced(timeline: Timeline, devices: dict[int, str], path: Path) -> str:
    from ..report import write_perfetto

    return f"{write_perfetto(timeline, path, processes=devices)} spans"


def _tasks(plan: ReshardPlan) -> Table:
    from rich.table import Table

    from ..units import format_bytes

    table = Table(box=None, title="unit tasks", title_justify="left")
    for column in ("task", "region", "size", "held by", "wanted by"):
        table.add_column(column, justify="right" if column in ("task", "size") else "left", overflow="fold")
    for number, task in enumerate(plan.tasks[:SHOWN]):
        box = " ".join(f"{a}:{b}" for a, b in task.box)
        held = " + ".join(_few(alike) for alike in task.holders[:4]) + (" + ..." if len(task.holders) > 4 else "")
        table.add_row(str(number), box, format_bytes(task.nbytes), held, _few(task.receivers))
    if len(plan.tasks) > SHOWN:
        table.add_row("...", f"and {len(plan.tasks) - SHOWN} more")
    return table


def _systems(plans: dict[str, ReshardPlan]) -> Table:
    from rich.table import Table

    from ..units import format_us

    table = Table(box=None, title="strategies", title_justify="left")
    for column in ("strategy", "order", "fifo", "fair", "of bound", "transfers"):
        table.add_column(column, justify="left" if column in ("strategy", "order") else "right")
    for name, plan in plans.items():
        both = [_time(plan, contention) for contention in ("fifo", "fair")]
        shown = [format_us(us) if us is not None else "-" for us in both]
        count = plan.program.num_transfers if plan.program is not None else 0
        table.add_row(name, plan.order, *shown, f"{plan.ratio:.3f}x", f"{count:,}")
    return table


def _row(name: str, plan: ReshardPlan) -> dict[str, object]:
    return {
        "system": name, "order": plan.order, "unit_tasks": len(plan.tasks), "time_us": plan.time_us,
        "fifo_us": _time(plan, "fifo"), "fair_us": _time(plan, "fair"), "bound_us": plan.bound_us, "ratio": plan.ratio,
    }  # fmt: skip


def _time(plan: ReshardPlan, contention: str) -> float | None:
    """None on clusters that fifo cannot express."""
    try:
        timeline = plan.simulate(contention)
    except InvalidInput:
        return None
    return timeline.total_us if timeline is not None else 0.0


def _draw(path: Path, plans: dict[str, ReshardPlan]) -> None:
    from html import escape

    from ..report.html import Section, timeline_section, write_html

    ours = plans["stretto"]
    sections = [Section(heading="Schedule", note="", body=f"<pre>{escape(ours.explain())}</pre>")]
    for name, plan in sorted(plans.items(), key=lambda item: item[1].time_us):
        if plan.timeline is not None:
            sections.append(timeline_section(plan.timeline, f"{name}: {plan.ratio:.3f}x the bound"))
    tensor = ours.tensors[0]
    write_html(path, title=f"{tensor.src} to {tensor.dst}", sections=sections)


def _few(devices: tuple[int, ...]) -> str:
    return ",".join(str(d) for d in devices[:8]) + (",..." if len(devices) > 8 else "")


def _shape(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 16 for part in parts) or len(parts) > 16:
        raise InvalidInput(f"--shape {text[:80]!r}: expected sizes such as 1024,1024,512")
    return tuple(int(part) for part in parts)


def _dtype_bytes(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) < 4:
        return int(text)
    if text not in DTYPES:
        raise unknown("dtype", text, DTYPES)
    return DTYPES[text]
