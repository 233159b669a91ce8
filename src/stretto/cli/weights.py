# SPDX-License-Identifier: Apache-2.0
"""``stretto weights``: the weights of a model from trainers to servers."""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from ..cluster import Cluster
from ..cluster.model import KINDS
from ..errors import InvalidInput
from ..report import write_perfetto
from ..report.bars_html import bars_html
from ..report.html import Section, timeline_section, write_html
from ..report.load_html import LOAD_SLOTS
from ..report.table import ResultTable
from ..report.table_html import table_html
from ..resharding import ReshardPlan, load_plan, save_plan
from ..runtime.probe.join import place
from ..simulator import Timeline
from ..units import format_bytes, format_us
from ..weights import DTYPES, MODELS, WeightPlan, model_of_size, plan_weights
from .common import out, parse_one_size, quoted
from .options import ClusterOption, HtmlOption, JsonOption, OneSizeOption, RankJsonOption, TraceOption
from .outputs import OutputFiles, output

if TYPE_CHECKING:
    from ..resharding.tensors.weight_run import WeightRun

SHOWN = 12
SYSTEMS = ("stretto", "send_recv", "gather_broadcast")
GPU_SYSTEMS = ("nccl_send_recv", "nccl_gather_broadcast")

app = typer.Typer(
    no_args_is_help=True,
    help="""Weights of a model from trainers to servers, in whatever layouts both sides have.

    A side is its degrees: pp (pipeline stages), dp (copies), fsdp (FSDP2 shards), tp (tensor parallel, innermost); it
    takes pp * dp * fsdp * tp devices. ep puts whole experts on each of so many devices of a stage. '@0-63,72-135' names
    the devices; without it a side takes the next free ones, trainers first.

    \b
    Try:
      stretto weights plan llama-3-70b --trainer fsdp=64 --server tp=8,dp=8 -c dgx_h100:16
      stretto weights plan qwen3-235b --trainer pp=4,dp=8,tp=2,ep=16@0-63 \\
          --server tp=8,dp=8@72-135 -c gb200_nvl72:2 -o plan.json --html plan.html
      stretto weights explain plan.json
      stretto lab run --hosts 4 --ranks 4 --uplink eth=400mbit -- \\
          stretto weights run --trainer fsdp=8 --server tp=4,dp=2 --bytes 64M
    """,
)

Side = Annotated[str, typer.Option(metavar="DEGREES[@DEVICES]", help="fsdp=64, or pp=4,dp=32,ep=16@0-127.")]


@app.command()
def plan(
    model: Annotated[str, typer.Argument(metavar="|".join(MODELS), help="A public model.")],
    trainer: Side,
    server: Side,
    cluster: ClusterOption,
    dtype: Annotated[
        str, typer.Option(metavar="|".join(DTYPES), help="What is sent; fp8 with a scale for each 128 x 128 weights.")
    ] = "bf16",
    target: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.json", callback=output(".json"), help="Write the plan."),
    ] = None,
    html: HtmlOption = None,
    rows: JsonOption = None,
    trace: TraceOption = None,
) -> None:
    """Plan one update of all weights: the time, how far that is from the bound, and which links are full.

    \b
    Examples:
      stretto weights plan llama-3-70b --trainer fsdp=64 --server tp=8,dp=8 -c dgx_h100:16
      stretto weights plan deepseek-v3 --trainer pp=4,dp=32,ep=16@0-63,72-135 \\
          --server tp=8,dp=16@144-207,216-279 -c gb200_nvl72:4 --dtype fp8 --html plan.html
    """
    found = plan_weights(model, trainer=trainer, server=server, cluster=Cluster.load(cluster), dtype=dtype)
    files = OutputFiles()
    files.write(target, partial(save_plan, found.reshard))
    files.json(rows, _row(found))
    timeline = found.reshard.simulate("fair")
    if timeline is not None:
        files.write(trace, partial(_traced, timeline, found.reshard))
        files.write(html, partial(_page, f"{found.model.name}: {found.trainer} to {found.server}", found.reshard))
    console = out()
    console.print(_summary(found))
    if timeline is not None:
        console.print(f"bound: {found.reshard.bound_reason}", style="dim", markup=False)
        console.print(_busiest(found.reshard, timeline))
    files.tell(f"stretto weights explain {quoted(target)}" if target is not None else "")


@app.command()
def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan that 'weights plan -o' wrote.")],
    html: HtmlOption = None,
    rows: JsonOption = None,
) -> None:
    """Show who sends what when under a plan in a file, and which links are full; its program is proved first.

    \b
    Examples:
      stretto weights explain plan.json
      stretto weights explain plan.json --html plan.html
    """
    found = load_plan(path)
    files = OutputFiles()
    timeline = found.simulate("fair")
    if timeline is None:
        raise InvalidInput(f"{path}: nothing is moved by this plan")
    files.write(html, partial(_page, path.stem, found))
    files.json(rows, {"time_us": timeline.total_us, "bound_us": found.bound_us, "senders": _senders(found, timeline)})
    console = out()
    ratio = timeline.total_us / found.bound_us
    console.print(
        f"{format_us(timeline.total_us)} on {found.cluster.name}, {ratio:.3f}x the bound: {found.bound_reason}",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    console.print(_senders_table(found, timeline))
    console.print(_busiest(found, timeline))
    files.tell()


@app.command()
def run(
    trainer: Side,
    server: Side,
    nbytes: OneSizeOption = "64M",
    runs: Annotated[int, typer.Option(metavar="N", help="How often each system runs for the clock.")] = 3,
    system: Annotated[
        list[str] | None,
        typer.Option(metavar="|".join(SYSTEMS + GPU_SYSTEMS), help="Run this one only; may be repeated."),
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where the weights are.")] = "cpu",
    staging: Annotated[str, typer.Option(metavar="SIZE", help="The most bytes that a rank packs at a time.")] = "256M",
    rows: RankJsonOption = None,
) -> None:
    """Send real weights between the ranks of a job and time it. Every rank runs this command.

    \b
    The model is a dense transformer of so many bytes in bf16. Beside ours run plain
    messages (send_recv) and everything gathered on one rank and broadcast
    (gather_broadcast, as vLLM's own engine does). STRETTO_CLUSTER names the
    cluster to plan for and to say the bound of. On GPUs (--device cuda) both run on
    our executor with their own plans; nccl_send_recv and nccl_gather_broadcast are
    NCCL's.

    \b
    Examples:
      torchrun --nproc-per-node 8 -m stretto weights run --trainer fsdp=4 --server tp=2,dp=2
      stretto lab run --hosts 4 --ranks 4 --uplink eth=400mbit -- \\
          stretto weights run --trainer fsdp=8 --server tp=4,dp=2 --bytes 64M
    """
    import torch
    import torch.distributed as dist

    from ..resharding.tensors.weight_run import run_weights

    place(command="weights run")
    if not 1 <= runs <= 1000:
        raise InvalidInput(f"--runs: must be 1..1000, not {runs}")
    torch.set_num_threads(1)
    model = model_of_size(parse_one_size(nbytes))
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % max(1, torch.cuda.device_count()))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        found = run_weights(
            model, trainer=trainer, server=server, runs=runs, systems=system or SYSTEMS, device=device,
            staging_bytes=parse_one_size(staging),
        )  # fmt: skip
        if dist.get_rank() == 0:
            files = OutputFiles()
            files.json(rows, _run_rows(found))
            out().print(_run_table(found))
            files.tell()
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _run_rows(run: WeightRun) -> dict[str, Any]:
    return {
        "model": run.model.name, "nbytes": run.nbytes, "bound_us": run.bound_us, "predicted_us": run.predicted_us,
        "training_slowdown": run.slowdown, "route": run.route, "copied_us": run.copied_us,
        "systems": [
            {"system": s.system, "exact": s.exact, "time_us": s.time_s * 1e6, "stopped_us": s.stopped_s * 1e6}
            for s in run.systems
        ],
    }  # fmt: skip


def _run_table(run: WeightRun) -> ResultTable:
    network = "" if os.environ.get("STRETTO_CLUSTER") else " (of an assumed network: STRETTO_CLUSTER names yours)"
    title = f"{format_bytes(run.nbytes)} in {len(run.model.tensors)} tensors: "
    title += f"bound {format_us(run.bound_us)}{network}, "
    title += f"predicted {format_us(run.predicted_us)}, a training step {run.slowdown:.2f}x as long meanwhile"
    if run.copied_us:
        title += f"; copying once takes {format_us(run.copied_us)} (route: {run.route})"
    table = ResultTable("system", ">time", ">over the bound", ">servers stopped", ">bits", title=title)
    for s in run.systems:
        over = f"{s.time_s * 1e6 / run.bound_us:.2f}x" if run.bound_us > 0 else "-"
        table.add_row(
            s.system, format_us(s.time_s * 1e6), over, format_us(s.stopped_s * 1e6), "exact" if s.exact else "WRONG"
        )
    return table


def _row(plan: WeightPlan) -> dict[str, Any]:
    return {
        "model": plan.model.name, "parameters": plan.model.parameters, "trainer": str(plan.trainer),
        "server": str(plan.server), "dtype": plan.dtype, "cluster": plan.reshard.cluster.name, "nbytes": plan.nbytes,
        "tensors": len(plan.model.tensors), "unit_tasks": len(plan.reshard.tasks),
        "transfers": plan.reshard.program.num_transfers if plan.reshard.program is not None else 0,
        "plan_cpu_s": plan.cpu_s, "fair_us": plan.times_us["fair"], "fifo_us": plan.times_us.get("fifo"),
        "bound_us": plan.reshard.bound_us, "ratio": plan.ratio,
    }  # fmt: skip


def _summary(plan: WeightPlan) -> ResultTable:
    table = ResultTable("", "", title=f"{plan.model.name}: {plan.trainer} to {plan.server}")
    sizes = f"{plan.model.parameters / 1e9:.1f} billion parameters, {format_bytes(plan.nbytes)} as {plan.dtype}"
    table.add_row("model", f"{sizes} in {len(plan.model.tensors):,} tensors")
    table.add_row("planned in", f"{plan.cpu_s:.1f} s")
    table.add_row(
        "time", f"{format_us(plan.time_us)}, {plan.ratio:.3f}x the bound of {format_us(plan.reshard.bound_us)}"
    )
    if "fifo" in plan.times_us:
        table.add_row("", f"{format_us(plan.times_us['fifo'])} where links send one message at a time")
    return table


def _traced(timeline: Timeline, plan: ReshardPlan, path: Path) -> str:
    devices = {rank: f"device {device}" for rank, device in enumerate(plan.devices)}
    return f"{write_perfetto(timeline, path, processes=devices)} spans"


def _busiest(plan: ReshardPlan, timeline: Timeline) -> ResultTable:
    """The links that are busy for the largest share of the time, those of one kind and share together."""
    cluster = plan.cluster
    busy = timeline.link_utilization
    kinds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for link in np.flatnonzero(timeline.link_bytes).tolist():
        ends = [KINDS[cluster.node_kind[node]] for node in (cluster.link_src[link], cluster.link_dst[link])]
        kinds[cluster.channels[cluster.link_channel[link]], " to ".join(ends)].append(float(busy[link]))
    table = ResultTable("links", "between", ">used", ">mean busy", ">most busy", title="which links are full")
    for (channel, between), shares in sorted(kinds.items(), key=lambda item: -max(item[1])):
        mean, most = 100 * sum(shares) / len(shares), 100 * max(shares)
        table.add_row(channel, between, str(len(shares)), f"{mean:.1f} %", f"{most:.1f} %")
    return table


def _senders(plan: ReshardPlan, timeline: Timeline) -> list[dict[str, Any]]:
    """For each device that sends: how much, to how many, from when to when."""
    program = plan.program
    assert program is not None
    sizes = np.add.reduceat(program.collective.chunk_bytes(plan.nbytes)[program.chunk], program.chunk_ptr[:-1])
    found = []
    for rank, device in enumerate(plan.devices):
        mine = np.flatnonzero(program.src == rank)
        if len(mine):
            found.append({
                "device": device, "nbytes": float(sizes[mine].sum()), "receivers": len(np.unique(program.dst[mine])),
                "first_us": float(timeline.start_us[mine].min()), "last_us": float(timeline.end_us[mine].max()),
            })  # fmt: skip
    return found


def _senders_table(plan: ReshardPlan, timeline: Timeline, most: int = SHOWN) -> ResultTable:
    table = ResultTable(">device", ">sends", ">to devices", ">from", ">until", title="who sends")
    rows = _senders(plan, timeline)
    for row in rows[:most]:
        table.add_row(
            str(row["device"]), format_bytes(row["nbytes"]), str(row["receivers"]), format_us(row["first_us"]),
            format_us(row["last_us"]),
        )  # fmt: skip
    if len(rows) > most:
        table.add_row("...", f"and {len(rows) - most} more")
    return table


def _page(title: str, plan: ReshardPlan, path: Path) -> None:
    timeline = plan.simulate("fair", load_slots=LOAD_SLOTS)
    assert timeline is not None
    about = f"{format_us(timeline.total_us)}, {timeline.total_us / plan.bound_us:.3f}x the bound: {plan.bound_reason}."
    write_html(path, title=title, sections=[
        Section(heading="Time against the lower bound", note=about, body=bars_html(
            [(title, timeline.total_us)], bound_us=plan.bound_us, label="Time against the lower bound")),
        timeline_section(timeline, "Link load"),
        Section(heading="Which links are full", body=table_html(_busiest(plan, timeline))),
        Section(heading="Who sends what", body=table_html(_senders_table(plan, timeline, most=1 << 16))),
    ])  # fmt: skip
