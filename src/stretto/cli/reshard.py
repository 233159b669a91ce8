# SPDX-License-Identifier: Apache-2.0
"""``stretto reshard``: a tensor from one mesh and layout to another."""

from __future__ import annotations

from functools import partial
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from ..programs.formats import SUFFIXES, save_program
from ..report import write_perfetto
from ..report.bars_html import bars_html
from ..report.html import Section, timeline_section, write_html
from ..report.load_html import LOAD_SLOTS
from ..report.plots import busy_plot
from ..report.table import ResultTable
from ..report.table_html import table_html
from ..resharding import ORDERS, SYSTEMS, ReshardPlan, Tensor, place, plan_tensors, save_plan
from ..resharding.plan import OURS
from ..simulator import Timeline
from ..units import format_bytes, format_us
from .common import out, parse_names, plot_width, progress, quoted
from .options import ClusterOption, HtmlOption, JsonOption, TraceOption
from .outputs import OutputFiles, output

DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int64": 8, "int32": 4, "int8": 1}
SHOWN = 12

OrdersOption = Annotated[
    str | None,
    typer.Option(
        "--orders",
        metavar="NAME,NAME",
        help="Senders and orders of the baselines, each in a row of its own; all: every one. Default: their own.",
    ),
]
PlanOutput = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE.json|txt|xml",
        callback=output(".json", *(ending for ending in SUFFIXES if ending != ".json")),
        help="Write our plan (JSON), or its program: text or MSCCL.",
    ),
]


def reshard(
    src: Annotated[str, typer.Option("--src", metavar="MESH SPEC", help="Where it is: '(2,4) S0RR'.")],
    dst: Annotated[str, typer.Option("--dst", metavar="MESH SPEC", help="Where it should be: '(3,4) S0RR'.")],
    shape: Annotated[str, typer.Option("--shape", metavar="N,N,...", help="The tensor's shape: 1024,1024,512.")],
    cluster: ClusterOption,
    dtype: Annotated[str, typer.Option("--dtype", help="Element type, or the bytes of one element.")] = "float32",
    rounding: Annotated[
        str, typer.Option(metavar="chunk|balanced", help="Where sizes do not divide: as torch.chunk, or balanced.")
    ] = "chunk",
    only: Annotated[
        str | None, typer.Option("--strategies", "-s", metavar="NAME,NAME", help="Which to show; default: all.")
    ] = None,
    orders: OrdersOption = None,
    target: PlanOutput = None,
    html: HtmlOption = None,
    rows: JsonOption = None,
    trace: TraceOption = None,
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
    The orders of baselines (who sends, and in which order):
      naive, in_order    the first, or the least loaded holder; tasks as they come
      load_balance_only  longest tasks first, by the least loaded holder
      dfs                depth-first search; says where it gave up
      greedy, ensemble   sets of tasks without common hosts; the better of the two

    \b
    Examples:
      stretto reshard --src "(2,4) S0RR" --dst "(3,4) S0RR" \\
          --shape 1024,1024,512 -c p3_8xlarge:5
      stretto reshard --src "(2,4) RS01R" --dst "(2,4) S01RR" \\
          --shape 1024,1024,512 -c p3_8xlarge:4 --html case4.html
      stretto reshard --src "(4,4)@0-15 RRP01" --dst "(4,4)@0-15 S01R" \\
          --shape 4096,4096 -c p3_8xlarge:4
    """
    where = Cluster.load(cluster)
    sides = place(src, dst, where, rounding=rounding)
    tensor = Tensor(shape=_shape(shape), dtype_bytes=_dtype_bytes(dtype), src=sides[0], dst=sides[1])
    names = _names(only)
    plans = _plans(tensor, where, names, _orders(orders))
    ours = plans[OURS]
    files = OutputFiles()
    if ours.timeline is not None and ours.program is not None:
        whole = target is not None and target.suffix == ".json"
        files.write(target, partial(save_plan, ours) if whole else partial(save_program, ours.program))
        devices = {rank: f"device {device}" for rank, device in enumerate(ours.devices)}
        files.write(trace, partial(_traced, ours.timeline, devices))
    files.write(html, lambda path: _draw(path, plans))
    files.json(rows, [_row(plan) for plan in plans.values()])
    shown = {name: plan for name, plan in plans.items() if plan.strategy in names}
    _print(tensor, shown, ours, wanted=target is not None or trace is not None)
    again = "weights explain" if target is not None and target.suffix == ".json" else "program run"
    files.tell(f"stretto {again} {quoted(target)}" if target is not None and ours.program is not None else "")


def _orders(text: str | None) -> list[str | None]:
    """The orders that baselines are shown with; None is a baseline's own."""
    if text is None:
        return [None]
    names = list(ORDERS) if text.strip() == "all" else parse_names(text) or []
    for name in names:
        if name not in ORDERS:
            raise unknown("order", name, ORDERS)
    return list(names)


def _names(only: str | None) -> list[str]:
    """The strategies to show."""
    if only is None:
        return list(SYSTEMS)
    names = parse_names(only) or []
    for name in names:
        if name not in SYSTEMS:
            raise unknown("strategy", name, SYSTEMS)
    return names


def _plans(tensor: Tensor, where: Cluster, names: list[str], orders: list[str | None]) -> dict[str, ReshardPlan]:
    plans: dict[str, ReshardPlan] = {}
    todo = [(name, order) for name in dict.fromkeys([*names, OURS]) for order in (orders if name != OURS else [None])]
    with progress("planning", len(todo)) as advance:
        for name, order in todo:
            advance(name)
            key = name if len(orders) == 1 or name == OURS else f"{name} {order}"
            plans[key] = plan_tensors([tensor], where, strategy=name, order=order)
            plans[key].time_us  # noqa: B018  (simulated while the bar shows)
    return plans


def _print(tensor: Tensor, shown: dict[str, ReshardPlan], ours: ReshardPlan, *, wanted: bool) -> None:
    console = out()
    console.print(f"{tensor.src}  to  {tensor.dst}", style="bold", markup=False)
    console.print(ours.explain().splitlines()[0], markup=False)
    console.print()
    console.print(_tasks(ours))
    if ours.timeline is not None and ours.program is not None:
        console.print()
        console.print(_systems(shown))
        console.print(f"bound: {ours.bound_reason}", style="dim", markup=False)
        for note in dict.fromkeys(plan.note for plan in shown.values() if plan.note):
            console.print(note, style="dim", markup=False)
        console.print()
        console.print("\n".join(ours.explain().splitlines()[1:]), markup=False)
        console.print()
        console.print(busy_plot(ours.timeline, width=plot_width(console)))
    elif wanted:
        console.print("nothing is moved, so there is no program and no trace to write")


def _traced(timeline: Timeline, devices: dict[int, str], path: Path) -> str:
    return f"{write_perfetto(timeline, path, processes=devices)} spans"


def _tasks(plan: ReshardPlan) -> ResultTable:
    table = ResultTable(">task", "region", ">size", "held by", "wanted by", title="unit tasks")
    for number, task in enumerate(plan.tasks[:SHOWN]):
        box = " ".join(f"{a}:{b}" for a, b in task.box)
        held = " + ".join(_few(alike) for alike in task.holders[:4]) + (" + ..." if len(task.holders) > 4 else "")
        table.add_row(str(number), box, format_bytes(task.nbytes), held, _few(task.receivers))
    if len(plan.tasks) > SHOWN:
        table.add_row("...", f"and {len(plan.tasks) - SHOWN} more")
    return table


def _systems(plans: dict[str, ReshardPlan]) -> ResultTable:
    table = ResultTable("strategy", "order", ">fifo", ">fair", ">of bound", ">transfers", title="strategies")
    for plan in plans.values():
        both = [_time(plan, contention) for contention in ("fifo", "fair")]
        shown = [format_us(us) if us is not None else "-" for us in both]
        count = plan.program.num_transfers if plan.program is not None else 0
        table.add_row(plan.strategy, plan.order, *shown, f"{plan.ratio:.3f}x", f"{count:,}")
    return table


def _row(plan: ReshardPlan) -> dict[str, object]:
    return {
        "system": plan.strategy, "order": plan.order, "unit_tasks": len(plan.tasks), "time_us": plan.time_us,
        "fifo_us": _time(plan, "fifo"), "fair_us": _time(plan, "fair"), "bound_us": plan.bound_us, "ratio": plan.ratio,
        "note": plan.note,
    }  # fmt: skip


def _time(plan: ReshardPlan, contention: str) -> float | None:
    """The plan's time; None on clusters that fifo cannot express."""
    try:
        timeline = plan.simulate(contention)
    except InvalidInput:
        return None
    return timeline.total_us if timeline is not None else 0.0


def _draw(path: Path, plans: dict[str, ReshardPlan]) -> None:
    """A page: all strategies as bars and as a table, then the links of each over time on one clock."""
    ours, heading = plans[OURS], "Strategies against the lower bound"
    ranked = dict(sorted(plans.items(), key=lambda item: item[1].time_us))
    bars = bars_html([(name, plan.time_us) for name, plan in ranked.items()], bound_us=ours.bound_us, label=heading)
    about = f"{ours.explain().splitlines()[0]}. The bound: {ours.bound_reason}."
    sections = [Section(heading=heading, note=about, body=bars + table_html(_systems(ranked)))]
    longest_us = max(plan.time_us for plan in plans.values())
    for name, plan in ranked.items():
        timeline = plan.simulate(load_slots=LOAD_SLOTS)
        if timeline is not None:
            title = f"{name}: {plan.ratio:.3f}x the bound"
            sections.append(timeline_section(timeline, title, until_us=longest_us))
    sections.append(Section(heading="Schedule", body=f"<pre>{escape(ours.explain())}</pre>"))
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
