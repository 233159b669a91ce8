# SPDX-License-Identifier: Apache-2.0
"""``stretto pipeline``: schedules of pipeline stages, drawn, timed, searched, and written for PyTorch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from ..pipeline import (
    MAKERS,
    PipelineRun,
    Schedule,
    StageCosts,
    StageMemory,
    check,
    eager_1f1b,
    in_flight,
    lower_bound_us,
    make,
    with_comms,
)
from ..pipeline import search as find
from ..pipeline import simulate as run_it
from ..pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT
from ..pipeline.check import ScheduleProof
from ..pipeline.drawing import LEGEND, draw
from ..pipeline.layouts import LAYOUTS, PipelineLayout, search_layouts
from ..pipeline.models import PAPER_MODELS, SYSTEMS, build, case, evaluate, paper_model
from ..pipeline.pipeline_model import PipelineModel
from ..pipeline.search import EVALUATIONS
from ..pipeline.simulation import STYLE_OF
from ..pipeline.workload import to_workload
from ..report.bars_html import bars_html
from ..report.html import timeline_section, write_html
from ..report.style import BOUND, color
from ..report.table import ResultTable
from ..units import format_bytes, format_us
from .common import about, out, parse_one_size, plot_width, progress, quoted
from .options import ClusterOption, HtmlOption, JsonOption, OneSizeOption
from .outputs import YAML, OutputFiles, output
from .pages import write_tables

ALL = "gpipe,1f1b,eager_1f1b,zb_h1,zb_h2"
MOST_STAGES = 64
MOST_SHOWN = 8
MOST_US = 1e12
_TINTS = {FORWARD: color(0), BACKWARD: color(1), INPUT: color(1), WEIGHT: color(2)}

app = typer.Typer(
    no_args_is_help=True,
    help="""Pipeline schedules: which stage computes which micro-batch when, and how the transfers between them hide.

    A schedule is a name or a CSV file of torch.distributed.pipelining. All times are in microseconds: one number for
    all stages, or one for each with commas.

    \b
    The schedules:
      gpipe        all forwards, then all backwards
      1f1b         as few micro-batches in flight as fill the pipeline
      interleaved  several stages on each rank (Megatron-LM)
      eager_1f1b   forwards run ahead, so that others hide the transfers
      zb_h1        zero bubble: weights' gradients fill the gaps, with 1F1B's memory
      zb_h2        the same with twice the memory, and no gaps

    \b
    Try:
      stretto pipeline show eager_1f1b --stages 4 --microbatches 8
      stretto pipeline simulate --stages 2 --microbatches 16 --forward 10 --transfer 6
      stretto pipeline simulate --model utrans
      stretto pipeline search --stages 4 --microbatches 16 --forward 10 --transfer 4 --activation 1G --cap 6G
      stretto pipeline meshes gpt -c p3_8xlarge:2 --microbatches 64 --cap 15G
      stretto pipeline export eager_1f1b --stages 2 --microbatches 8 -o schedule.csv
    """,
)

What = Annotated[str, typer.Argument(metavar="NAME|FILE.csv", help="A schedule by name, or a file.")]
Stages = Annotated[int, typer.Option(min=1, max=MOST_STAGES, help="How many stages (a file has its own).")]
Micro = Annotated[int, typer.Option(min=1, max=4096, help="Micro-batches of an iteration (a file has its own).")]
Delay = Annotated[
    int, typer.Option(min=-1, max=64, help="Delay the weights' gradients of eager_1f1b by so many; -1: do not split.")
]
Forward = Annotated[str, typer.Option(metavar="US", help="The forward of one micro-batch.")]
Backward = Annotated[str, typer.Option(metavar="US", help="The backward; if not given, twice the forward.")]
Transfer = Annotated[str, typer.Option(metavar="US", help="One transfer between a stage and the next.")]
Transport = Annotated[str, typer.Option(metavar="async|pair|blocking", help="How transfers and compute overlap.")]


@app.command()
def show(
    schedule: What,
    stages: Stages = 4,
    microbatches: Micro = 8,
    delay: Delay = -1,
    forward: Forward = "10",
    backward: Backward = "",
    transfer: Transfer = "2",
    transport: Transport = "async",
    html: HtmlOption = None,
    rows: JsonOption = None,
) -> None:
    """Draw a schedule on the clock, prove it, and say how many micro-batches every stage holds.

    \b
    Examples:
      stretto pipeline show eager_1f1b --stages 4 --microbatches 8
      stretto pipeline show 1f1b --stages 2 --transfer 6 --transport blocking
      stretto pipeline show zb_h1 --stages 4 --html schedule.html
      stretto pipeline show schedule.csv
    """
    plan = _schedule(schedule, stages, microbatches, delay)
    style = STYLE_OF.get(transport)
    if style is None:
        raise unknown("transport", transport, STYLE_OF)
    written = plan if plan.has_comms else with_comms(plan, style)
    proof = check(written)
    run = run_it(written, _costs(plan.num_stages, forward, backward, transfer), transport=transport)
    files = OutputFiles()
    files.json(rows, {
        "schedule": written.name, "time_us": run.total_us, "bubble": run.bubble, "in_flight": list(proof.in_flight),
        "transports": list(proof.transports), "ranks": [list(map(str, row)) for row in written.ranks],
    })  # fmt: skip
    files.write(html, lambda path: _page(path, run, proof))
    console = out()
    console.print(about(written), style="bold", markup=False, soft_wrap=True)
    console.print(about(run), markup=False, soft_wrap=True)
    _draw(console, run)
    for rank, row in enumerate(written.ranks):
        words = " ".join(map(str, row[:24])) + (" ..." if len(row) > 24 else "")
        console.print(f"rank {rank}: {words}", markup=False, soft_wrap=True)
    console.print(f"in flight at most: {' '.join(map(str, proof.in_flight))} micro-batches by stage")
    if proof.transports:
        console.print(f"cannot deadlock over: {', '.join(proof.transports)}")
    files.tell(f"stretto pipeline export {quoted(schedule)} --stages {plan.num_stages} -o schedule.csv")


@app.command()
def simulate(
    context: typer.Context,
    schedules: Annotated[str, typer.Option(metavar="NAME,NAME", help="Which to compare.")] = ALL,
    stages: Stages = 4,
    microbatches: Micro = 16,
    forward: Forward = "10",
    backward: Backward = "",
    transfer: Transfer = "2",
    model: Annotated[str, typer.Option(help="One of the paper's models instead: gpt_222, gpt_412, utrans.")] = "",
    html: HtmlOption = None,
    rows: JsonOption = None,
) -> None:
    """Times of schedules with blocking and with overlapped transfers, beside free transfers and the lower bound.

    \b
    Examples:
      stretto pipeline simulate --stages 2 --microbatches 16 --forward 10 --transfer 6
      stretto pipeline simulate --stages 4 --forward 10,10,10,14 --schedules 1f1b,eager_1f1b
      stretto pipeline simulate --model utrans --microbatches 32
    """
    if model:
        for option in ("schedules", "stages", "forward", "backward", "transfer"):
            if str(getattr(context.get_parameter_source(option), "name", "DEFAULT")) != "DEFAULT":
                raise InvalidInput(f"--{option}: --model {model} has its own; leave one of the two out")
        table, found = _model_table(model, microbatches)
    else:
        table, found = _schedule_table(schedules, stages, microbatches, forward, backward, transfer)
    files = OutputFiles()
    files.json(rows, {"rows": found})
    picture = _bars(found)
    files.write(html, lambda path: write_tables(path, model or f"Schedules of {stages} stages", table, picture=picture))
    out().print(table)
    files.tell()


@app.command()
def search(
    stages: Stages = 4,
    microbatches: Micro = 16,
    forward: Forward = "10",
    backward: Backward = "",
    transfer: Transfer = "2",
    transport: Transport = "async",
    activation: Annotated[str, typer.Option(metavar="SIZE", help="What one micro-batch in flight holds.")] = "1",
    fixed: Annotated[str, typer.Option(metavar="SIZE", help="Weights and optimiser of a stage.")] = "",
    cap: Annotated[str, typer.Option(metavar="SIZE", help="The most a device holds; without it all it takes.")] = "",
    target: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.csv", callback=output(".csv"), help="Write the schedule."),
    ] = None,
    html: HtmlOption = None,
    rows: JsonOption = None,
) -> None:
    """Find the warm-up depth and the delay of every stage for the least time under a memory cap.

    \b
    Examples:
      stretto pipeline search --stages 4 --microbatches 16 --forward 10 --transfer 4
      stretto pipeline search --stages 4 --forward 10 --transfer 4 --activation 1G --cap 6G -o best.csv
    """
    costs = _costs(stages, forward, backward, transfer)
    memory = StageMemory(
        fixed_bytes=float(parse_one_size(fixed, "--fixed")) if fixed else 0.0,
        activation_bytes=float(parse_one_size(activation, "--activation")),
    )
    limit = float(parse_one_size(cap, "--cap")) if cap else float("inf")
    with progress("searching", EVALUATIONS) as advance:
        found = find(
            costs, microbatches, memory=[memory] * stages, cap_bytes=limit, transport=transport,
            on_step=lambda count: advance(f"{count} schedules"),
        )  # fmt: skip
    files = OutputFiles()
    files.write(target, found.schedule.save, "format compute_only")
    files.json(rows, {
        "time_us": found.total_us, "bound_us": found.bound_us, "exhaustive": found.exhaustive,
        "warmup": list(found.warmup), "delay": list(found.delay), "peak_bytes": list(found.peak_bytes),
    })  # fmt: skip
    run = run_it(found.schedule, costs, transport=transport)
    files.write(html, lambda path: _page(path, run, check(found.schedule)))
    console = out()
    console.print(
        f"{format_us(found.total_us)}, {100 * found.gap:.2f} % above the lower bound of {format_us(found.bound_us)}"
        f"{'; no other warm-ups and delays are faster' if found.exhaustive else ''}",
        soft_wrap=True,
    )
    console.print(f"warm-up {_list(found.warmup)}, delay {_list(found.delay)} (-1: backward not split)")
    if memory.activation_bytes > 1:
        console.print(f"memory {', '.join(format_bytes(value) for value in found.peak_bytes)}")
    _draw(console, run)
    files.tell(f"stretto pipeline show {quoted(target)}" if target is not None else "")


@app.command()
def meshes(
    model: Annotated[str, typer.Argument(metavar="FILE.yaml|NAME", help="A model's layers, or gpt or utrans.")],
    cluster: ClusterOption,
    microbatches: Micro = 16,
    stages: Annotated[int, typer.Option(min=0, max=16, help="How many stages; 0 tries all numbers.")] = 0,
    cap: Annotated[str, typer.Option(metavar="SIZE", help="The most a device holds; without it all it takes.")] = "",
    layouts: Annotated[int, typer.Option(min=1, max=1000, help="The most layouts to plan and schedule.")] = LAYOUTS,
    target: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.csv", callback=output(".csv"), help="Write the best schedule."),
    ] = None,
    html: HtmlOption = None,
    rows: JsonOption = None,
) -> None:
    """Lay a model's stages out over a cluster: layers, devices and mesh of each stage, its warm-up and delay.

    Every layout uses all devices; transfers between stages, sums of split layers and gradients are planned on the
    cluster. The fastest predicted step comes first.

    \b
    Examples:
      stretto pipeline meshes gpt -c p3_8xlarge:2 --microbatches 64 --cap 15G
      stretto pipeline meshes model.yaml -c dgx_a100:2 --stages 4 -o best.csv --json layouts.json
    """
    what = paper_model(model) if model in PAPER_MODELS else PipelineModel.load(model)
    limit = float(parse_one_size(cap, "--cap")) if cap else float("inf")
    with progress("searching", layouts) as advance:
        found = search_layouts(
            what, Cluster.load(cluster), microbatches, stages=stages or None, cap_bytes=limit, layouts=layouts,
            on_step=lambda count: advance(f"{count} layouts"),
        )  # fmt: skip
    files = OutputFiles()
    files.write(target, found.best.result.schedule.save, "format compute_only")
    files.json(rows, {
        "considered": found.considered, "exhaustive": found.exhaustive,
        "layouts": [_layout_row(each) for each in found.layouts],
    })  # fmt: skip
    table = ResultTable(">step", ">of bound", "stages (layers on data x tensor devices)", "warm-up", "delay", "GB")
    for each in found.layouts[:MOST_SHOWN]:
        result = each.result
        table.add_row(
            format_us(each.total_us), f"{1 + result.gap:.3f}",
            _spread(each), _list(result.warmup), _list(result.delay),
            " ".join(f"{value / 1e9:.1f}" for value in result.peak_bytes),
        )  # fmt: skip
    names = [f"{len(each.stages)} stages: {_spread(each)}" for each in found.layouts[:MOST_SHOWN]]
    times = list(zip(names, (each.total_us for each in found.layouts), strict=False))
    picture = bars_html(times, bound_us=found.best.result.bound_us, label="A step of each layout, the best one's bound")
    files.write(html, lambda path: write_tables(path, f"Layouts of {model} on {cluster}", table, picture=picture))
    out().print(table)
    tried = "all others have a higher bound" if found.exhaustive else "others were not tried (--layouts)"
    out().print(f"{len(found.layouts)} of {found.considered} layouts that fit; {tried}", soft_wrap=True)
    files.tell(f"stretto pipeline show {quoted(target)}" if target is not None else "")


def _spread(layout: PipelineLayout) -> str:
    """The layers of each stage, and its devices."""
    return ", ".join(f"{stage.first}-{stage.last - 1} on {stage.data}x{stage.tensor}" for stage in layout.stages)


def _layout_row(layout: PipelineLayout) -> dict[str, Any]:
    costs, result = layout.costs, layout.result
    return {
        "time_us": layout.total_us, "bound_us": result.bound_us, "warmup": list(result.warmup),
        "delay": list(result.delay), "peak_bytes": list(result.peak_bytes),
        "activation_us": list(costs.activation_us), "gradient_us": list(costs.gradient_us),
        "stages": [
            {
                "layers": [stage.first, stage.last], "mesh": list(stage.shape), "devices": list(stage.devices),
                "forward_us": costs.forward_us[at], "backward_us": costs.input_us[at] + costs.weight_us[at],
                "reduce_us": costs.reduce_us[at],
            }
            for at, stage in enumerate(layout.stages)
        ],
    }  # fmt: skip


@app.command()
def export(
    schedule: What,
    stages: Stages = 2,
    microbatches: Micro = 8,
    delay: Delay = -1,
    comm: Annotated[
        str, typer.Option(metavar="ahead|mirrored|blocking|none", help="How to write out transfers.")
    ] = "ahead",
    target: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.csv", callback=output(".csv"), help="Else printed.")
    ] = None,
    workload: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", callback=output(*YAML), help="Also as a training step to plan."),
    ] = None,
    nbytes: OneSizeOption = "16M",
    forward: Forward = "10000",
    backward: Backward = "",
) -> None:
    """Write a proved schedule as the CSV that PyTorch's pipeline runtime loads, and as a workload for ``stretto plan``.

    \b
    Examples:
      stretto pipeline export eager_1f1b --stages 2 --microbatches 8 -o schedule.csv
      stretto pipeline export zb_h1 --stages 4 --comm mirrored
      stretto pipeline export 1f1b --workload step.yaml -b 64M --forward 20000
    """
    size = float(parse_one_size(nbytes))
    plan = _schedule(schedule, stages, microbatches, delay)
    written = plan.compute_only() if comm == "none" else with_comms(plan, comm)
    check(written)
    costs = _costs(plan.num_stages, forward, backward, "0")
    files = OutputFiles()
    files.write(target, written.save, f"format {'compute_comms' if written.has_comms else 'compute_only'}")
    if workload is not None:
        files.write(workload, to_workload(plan, costs, activation_bytes=[size] * (plan.num_stages - 1)).save)
    if target is None:
        print(written.to_csv(), end="")
    files.tell(f"stretto plan -w {quoted(workload)} -c CLUSTER" if workload is not None else "")


def _schedule(name: str, stages: int, microbatches: int, delay: int) -> Schedule:
    if delay >= 0 and name != "eager_1f1b":
        raise InvalidInput(f"--delay: {name} has none; only eager_1f1b takes one")
    if name in MAKERS:
        return eager_1f1b(stages, microbatches, delay=delay) if delay >= 0 else make(name, stages, microbatches)
    if not name.endswith(".csv"):
        raise unknown("schedule", name, (*MAKERS, "a .csv file"))
    loaded = Schedule.load(name)
    check(loaded)
    return loaded


def _numbers(option: str, text: str, count: int) -> tuple[float, ...]:
    """One number for all, or as many as are needed."""
    try:
        values = tuple(float(part[:40]) if part.isascii() else math.nan for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"{option} {text[:80]!r}: expected microseconds: 10, or one for each: 10,12,10") from None
    if any(not 0 <= value <= MOST_US for value in values):
        raise InvalidInput(f"{option} {text[:80]!r}: must be 0 to {MOST_US:g}")
    if len(values) == 1:
        return values * count
    if len(values) != count:
        raise InvalidInput(f"{option}: {len(values)} numbers where {count} are needed")
    return values


def _costs(stages: int, forward: str, backward: str, transfer: str) -> StageCosts:
    ahead = _numbers("--forward", forward, stages)
    back = _numbers("--backward", backward, stages) if backward else tuple(2 * value for value in ahead)
    half = tuple(value / 2 for value in back)
    between = _numbers("--transfer", transfer, stages - 1)
    return StageCosts(forward_us=ahead, input_us=half, weight_us=half, activation_us=between, gradient_us=between)


def _list(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def _draw(console: Any, run: PipelineRun) -> None:
    console.print()
    for line in draw(run, width=plot_width(console)):
        console.print(line)
    console.print(LEGEND, style="dim")
    console.print()


def _page(path: Path, run: PipelineRun, proof: ScheduleProof) -> None:
    """A page with the schedule on the clock."""
    timeline = run.timeline()
    tints = [_TINTS.get(span.action.kind, BOUND) for span in run.spans]
    safe = f" It cannot deadlock over {', '.join(proof.transports)}." if proof.transports else ""
    note = (
        f"{about(run)}. In flight at most {' '.join(map(str, proof.in_flight))} micro-batches by stage.{safe} "
        "Blue: forward, orange: backward, green: gradients of weights, grey: transfers."
    )
    section = timeline_section(timeline, "Who does what when", counted="actions", tints=tints)
    write_html(path, title=about(run.schedule), sections=[replace(section, note=f"{note} {section.note}")])


def _bars(found: list[dict[str, Any]]) -> str:
    """The rows of either table as bars."""
    key = "overlapped_us" if "overlapped_us" in found[0] else "iteration_us"
    bound_us = max((row.get("bound_us") or 0.0 for row in found), default=0.0)
    times = [(row.get("schedule") or row["system"], row[key]) for row in found]
    return bars_html(times, bound_us=bound_us, label="An iteration of each, transfers overlapped")


def _schedule_table(
    names: str, stages: int, microbatches: int, forward: str, backward: str, transfer: str
) -> tuple[ResultTable, list[dict[str, Any]]]:
    costs = _costs(stages, forward, backward, transfer)
    bound = lower_bound_us(costs, microbatches)
    table = ResultTable("schedule", ">blocking", ">overlapped", ">free", ">bubble", ">of bound", "in flight")
    found = []
    for name in names.split(","):
        schedule = make(name.strip(), stages, microbatches)
        blocking, overlapped = (run_it(schedule, costs, transport=way) for way in ("blocking", "async"))
        free = run_it(schedule, costs.free())
        # The bound is of one stage per rank.
        bounded = len(schedule.ranks) == stages and bound > 0
        over = f"{overlapped.total_us / bound:.3f}" if bounded else "-"
        table.add_row(
            name.strip(), *(format_us(run.total_us) for run in (blocking, overlapped, free)),
            f"{100 * overlapped.bubble:.1f} %", over, _list(in_flight(schedule)),
        )  # fmt: skip
        found.append({
            "schedule": name.strip(), "blocking_us": blocking.total_us, "overlapped_us": overlapped.total_us,
            "free_us": free.total_us, "bubble": overlapped.bubble,
            "bound_us": bound if bounded else None,
        })  # fmt: skip
    return table, found


def _model_table(name: str, microbatches: int) -> tuple[ResultTable, list[dict[str, Any]]]:
    built = build(case(name).with_batches(microbatches))
    results = {}
    with progress("simulating", len(SYSTEMS)) as advance:
        for system in SYSTEMS:
            advance(system)
            results[system] = evaluate(built, system)
    table = ResultTable("system", ">iteration", ">TFLOP/s", ">over Alpa", ">of free", "GB by stage")
    alpa, free = results["alpa"].iteration_us, results["upper_bound"].iteration_us
    found = []
    for system, result in results.items():
        table.add_row(
            system, format_us(result.iteration_us), f"{result.tflops:.1f}", f"{alpa / result.iteration_us:.3f}",
            f"{100 * free / result.iteration_us:.1f} %", " ".join(f"{value:.1f}" for value in result.peak_gb),
        )  # fmt: skip
        found.append({"model": name, "system": system, "iteration_us": result.iteration_us, "tflops": result.tflops})
    return table, found
