# SPDX-License-Identifier: Apache-2.0
"""``stretto plan``: decide how a training step communicates; show, compare and explain plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..cluster import Cluster
from ..errors import InvalidInput, PlanMismatch, StrettoError, unknown
from ..planner import api
from ..planner.algebra.options import problem as make_problem
from ..planner.api import SYSTEM, PlanResult, to_schedule
from ..planner.baselines import BASELINES
from ..planner.buckets import BucketPrediction, best_of, compare_buckets
from ..planner.compare import diff as compare
from ..planner.costs.costs import CostModel, SimulatedCosts, simulated_costs
from ..planner.costs.measured import LayeredCosts, MeasuredCosts, read_measurements
from ..planner.costs.priced import PricedCosts
from ..planner.costs.providers import providers_for, saved
from ..planner.plan import Plan
from ..planner.schedule.retime import retime as retimed
from ..planner.tuner_csv import PLUGINS, tuner_library, tuner_lines, write_tuner_csv
from ..planner.tuner_gain import with_tuner_alone
from ..report.plan_html import write_plan_html
from ..report.plan_tables import changes_table, motif_table, plan_tables, systems_table
from ..report.plan_trace import write_plan_trace
from ..report.table import ResultTable
from ..units import format_bytes, format_us, parse_bytes
from ..workload import Workload
from .common import SHOW_AFTER_S, out, progress_console, quoted
from .options import (
    BudgetOption,
    HtmlOption,
    JsonOption,
    OptionalCluster,
    OptionalWorkload,
    RuntimeOption,
    SeedOption,
    TraceOption,
)
from .outputs import OutputFiles, output
from .session import SESSION

app = typer.Typer(invoke_without_command=True)

COSTS_KEYS = {"collective": "all_reduce", "nranks": "8", "algorithm": "ring", "channels": "nvlink+rdma"}
"""What ``--costs`` may say about a file, each with an example."""


TunerOption = Annotated[
    Path | None,
    typer.Option(
        "--tuner",
        metavar="FILE.csv",
        callback=output(".csv", ".conf"),
        help="Write what NCCL can express, for its tuner plugin.",
    ),
]
PluginOption = Annotated[
    str,
    typer.Option(
        "--tuner-plugin",
        metavar="|".join(PLUGINS),
        help="The plugin that reads it: ours, which leaves the rest to NCCL, or NCCL's example.",
    ),
]
CostsOption = Annotated[
    str | None,
    typer.Option(
        "--costs",
        metavar="FILE[,KEY=VALUE...]",
        help="Measured costs (CSV, nccl-tests output); what a text leaves open as FILE,collective=all_reduce,"
        "nranks=8,algorithm=ring,channels=nvlink+rdma. Else simulated.",
    ),
]
SynthesizeOption = Annotated[
    float,
    typer.Option(
        "--synthesize",
        "--synthesise",
        metavar="SECONDS",
        help="Also offer algorithms made for this cluster, so long for each; 0: library only.",
    ),
]
BucketsOption = Annotated[
    str | None,
    typer.Option(
        "--buckets", metavar="SIZE,...", help="Also plan a recorded step of DDP with buckets of these sizes, as 1M,25M."
    ),
]
PlanOutput = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE.json", callback=output(".json"), help="Write the plan, with its hash."
    ),
]
StepsOption = Annotated[
    int | None, typer.Option(help="Search so many steps instead: then the result depends on the seed alone.")
]
LinkTurnsOption = Annotated[
    bool,
    typer.Option(
        "--link-turns/--no-link-turns",
        help="Let motifs of different groups take turns on the links of their hosts, where that is faster.",
    ),
]
PlanFile = Annotated[Path, typer.Argument(metavar="PLAN.json", help="A plan, as 'stretto plan -o' writes it.")]


@app.callback()
def plan(
    context: typer.Context,
    workload: OptionalWorkload = None,
    cluster: OptionalCluster = None,
    plan_file: PlanOutput = None,
    html: HtmlOption = None,
    rows: JsonOption = None,
    trace: TraceOption = None,
    tuner: TunerOption = None,
    plugin: PluginOption = "stretto",
    costs: CostsOption = None,
    runtime: RuntimeOption = None,
    synthesize: SynthesizeOption = 0.0,
    buckets: BucketsOption = None,
    against: Annotated[
        str, typer.Option(metavar="NAME", help="The system shown as 'before', such as fifo or bytescheduler+.")
    ] = "fifo",
    budget: BudgetOption = 30.0,
    steps: StepsOption = None,
    seed: SeedOption = 0,
    retime: Annotated[
        bool, typer.Option("--retime/--no-retime", help="Simulate the final plan link by link as well.")
    ] = True,
    branches: Annotated[
        int, typer.Option(metavar="N", help="Raise the lower bound by so many further bounds with divided options.")
    ] = 0,
    link_turns: LinkTurnsOption = True,
) -> None:
    """Decide how every byte of a training step moves: in which pieces, over which links, in which order.

    Each communication op may be cut and rewritten (motifs), bound to channels and algorithms, and moved in time; the
    search does all of it together. In the planner's time model (docs/planner.md says what that leaves out) the result
    is never slower than FIFO, TicTac, P3, ByteScheduler+, a hand-made schedule or SYNDICATE's own search over the same
    options. A lower bound says what is left.

    \b
    Examples:
      stretto plan -w dlrm:A2 -c hgx2:16 -o plan.json --html plan.html
      stretto plan -w step.yaml -c dgx_a100:4 --tuner nccl.csv
      stretto plan -w step.yaml -c dgx_h200 --runtime stretto-gpu:h200
      stretto plan -w step.yaml -c dgx_a100:4 --buckets 1M,4M,25M
      stretto plan show plan.json
      stretto plan explain plan.json a2a-emb-fwd
      stretto plan diff old.json new.json
      stretto plan retime plan.json -w dlrm:A2 -c hgx2:16
    """
    if context.invoked_subcommand is not None:
        return
    if workload is None or cluster is None:
        raise InvalidInput("plan: give --workload and --cluster, or one of show, explain, diff, retime")
    if against not in BASELINES:
        raise InvalidInput(f"--against: {unknown('system', against, BASELINES)}")
    if plugin not in PLUGINS:
        raise InvalidInput(f"--tuner-plugin: {unknown('plugin', plugin, PLUGINS)}")
    machine, step = Cluster.load(cluster), Workload.load(workload)
    priced = None
    if runtime is not None:
        priced = PricedCosts(machine, runtime, providers=providers_for(machine, synthesis_s=synthesize, seed=seed))
    model = _costs(costs, machine, priced) or priced
    with search_progress() as tell:
        found = api.plan(
            step, machine, budget_s=budget, steps=steps, seed=seed, costs=model,
            synthesis_s=synthesize, retime=retime, branches=branches, link_turns=link_turns,
            progress=tell,
        )  # fmt: skip
        others = _buckets(buckets, step, machine, budget, steps, seed, model)
    files = OutputFiles()
    files.write(plan_file, found.plan.save, f"hash {found.plan.hash}")
    files.write(html, lambda path: write_plan_html(path, found, against=against))
    files.write(trace, lambda path: _write_trace(found, against, path))
    files.json(rows, _rows(found) | ({"buckets": [asdict(one) for one in others]} if others else {}))
    alone = "" if tuner is None else _tuner_alone(found, machine, model, plugin)
    files.write(tuner, lambda path: _write_tuner(found, step, machine, path, model, plugin))
    _print(found, alone, others)
    if tuner is not None and plugin == "stretto":
        use = f"NCCL_TUNER_PLUGIN={quoted(tuner_library())} NCCL_TUNER_CONFIG_FILE={quoted(tuner)}"
        out().print(f"use it with {use}", soft_wrap=True)
    files.tell(_next(workload, cluster, runtime, plan_file))


def _next(workload: str, cluster: str, runtime: str | None, plan_file: Path | None) -> str:
    if plan_file is not None:
        return f"stretto plan explain {quoted(plan_file)}"
    priced = f" --runtime {quoted(runtime)}" if runtime else ""
    return f"stretto plan -w {quoted(workload)} -c {quoted(cluster)}{priced} -o plan.json --html plan.html"


def _print(found: PlanResult, alone: str, buckets: Sequence[BucketPrediction]) -> None:
    console = out()
    for note in found.problem.notes:
        if note.startswith("warning: "):
            console.print(note, markup=False, soft_wrap=True)
    console.print(systems_table(found.for_tables()))
    console.print()
    console.print(plan_tables(found.plan))
    if alone:
        console.print(alone, markup=False, soft_wrap=True)
    if buckets:
        table = ResultTable("buckets of at most", ">buckets", ">plain order", ">plan")
        for one in buckets:
            size = format_bytes(one.nbytes) if one.nbytes else "as recorded"
            table.add_row(size, str(one.buckets), format_us(one.plain_us), format_us(one.plan_us))
        console.print(table)
        best = best_of(buckets)
        wanted = f"bucket_cap_mb={best.cap_mb:.3g} (stretto run: STRETTO_BUCKET_MB)" if best.nbytes else "as they are"
        console.print(f"DDP's buckets: {wanted}", markup=False, soft_wrap=True)


def _buckets(
    sizes: str | None, step: Workload, cluster: Cluster, budget_s: float, steps: int | None, seed: int,
    costs: CostModel | None,
) -> list[BucketPrediction]:  # fmt: skip
    """The step with buckets of other sizes, where ``--buckets`` asks for them."""
    if sizes is None:
        return []
    wanted = [parse_bytes(size) for size in sizes.split(",")]
    return compare_buckets(step, cluster, wanted, budget_s=budget_s, steps=steps, seed=seed, costs=costs)


def _write_trace(found: PlanResult, against: str, path: Path) -> None:
    shown = {f"before ({against})": found.schedules[against], "after (plan)": found.schedules[SYSTEM]}
    write_plan_trace({name: one.timeline(found.problem) for name, one in shown.items()}, path)


def _rows(found: PlanResult) -> dict[str, object]:
    """Every system's iteration, and the plan's promise."""
    made = found.plan
    return {
        "workload": made.workload, "cluster": made.cluster, "hash": made.hash, "iteration_us": made.iteration_us,
        "retimed_us": made.retimed_us, "bound_us": made.bound_us,
        "rows": [
            {"system": name, "iteration_us": one.period_us, "exposed_us": float(one.exposed_us.max()),
             "idle": float(one.compute_idle.max()), "comm_idle": float(one.comm_idle.max()), "motifs": len(one.order)}
            for name, one in found.for_tables().items()
        ],
    }  # fmt: skip


def _tuner_alone(found: PlanResult, cluster: Cluster, costs: CostModel | None, plugin: str) -> str:
    """What of the plan NCCL would gain by itself, with the table of ``--tuner``."""
    problem, before = found.problem, found.schedules["fifo"].period_us
    lines, _ = tuner_lines(found.plan, problem.workload, cluster, costs, plugin=plugin)
    after = with_tuner_alone(lines, problem, cluster, costs).period_us
    return (
        f"with NCCL's tuner alone: {format_us(after)}, {before / after:.2f}x; with the whole plan: "
        f"{format_us(found.plan.iteration_us)}, {before / found.plan.iteration_us:.2f}x (of fifo, {format_us(before)})"
    )


def _write_tuner(
    found: PlanResult, workload: Workload, cluster: Cluster, path: Path, costs: CostModel | None, plugin: str
) -> str:
    """Write the tuner's table, and say how many things it leaves out."""
    left_out = write_tuner_csv(found.plan, workload, cluster, path, costs, plugin=plugin)
    return f"{len(left_out)} things that cannot be told to NCCL are comments" if left_out else ""


@app.command()
def show(path: PlanFile, rows: JsonOption = None) -> None:
    """What a plan promises and decides.

    \b
    Example:
      stretto plan show plan.json
    """
    made = Plan.load(path)
    files = OutputFiles()
    files.json(rows, {
        "name": made.name, "workload": made.workload, "cluster": made.cluster, "hash": made.hash,
        "iteration_us": made.iteration_us, "retimed_us": made.retimed_us, "bound_us": made.bound_us,
        "baselines_us": dict(made.baselines_us),
        "ops": [
            {"op": op.op, "kind": op.kind, "nbytes": op.nbytes, "option": op.option, "reason": op.reason,
             "motifs": len(op.motifs)}
            for op in made.by_turn
        ],
    })  # fmt: skip
    out().print(plan_tables(made))
    files.tell(f"stretto plan explain {quoted(path)}")


@app.command()
def explain(
    path: PlanFile,
    op: Annotated[str | None, typer.Argument(metavar="COMM-OP", help="Default: all of them.")] = None,
    rows: JsonOption = None,
) -> None:
    """Why each communication op runs as it does: its motifs, their order, costs and where those came from.

    \b
    Example:
      stretto plan explain plan.json a2a-emb-fwd
    """
    made = Plan.load(path)
    chosen = [made.op(op)] if op is not None else made.ops
    files, console = OutputFiles(), out()
    files.json(rows, {"plan": made.name, "ops": chosen})
    for one in chosen:
        console.print(motif_table(one))
        console.print()
    files.tell()


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="OLD.json", help="A plan.")],
    after: Annotated[Path, typer.Argument(metavar="NEW.json", help="Another plan for the same workload.")],
    rows: JsonOption = None,
) -> None:
    """What two plans for the same workload decide differently.

    \b
    Example:
      stretto plan diff old.json new.json
    """
    old, new = Plan.load(before), Plan.load(after)
    try:
        changes = compare(old, new)
    except PlanMismatch as error:
        raise PlanMismatch(f"{before}, {after}: {error}") from None
    files = OutputFiles()
    files.json(rows, {
        "before_us": old.iteration_us, "after_us": new.iteration_us,
        "changes": [{"op": c.op, "what": c.what, "before": c.before, "after": c.after} for c in changes],
    })  # fmt: skip
    console = out()
    if changes:
        console.print(changes_table(changes, before.name, after.name))
    else:
        console.print("the same decisions")
    console.print(f"iteration {format_us(old.iteration_us)} -> {format_us(new.iteration_us)}")
    files.tell()


@app.command()
def retime(
    path: PlanFile,
    workload: OptionalWorkload = None,
    cluster: OptionalCluster = None,
    costs: CostsOption = None,
    trace: TraceOption = None,
    rows: JsonOption = None,
) -> None:
    """Simulate a plan again, link by link: what an iteration takes as promised, by today's costs, and contending.

    The workload and the cluster need not be given where the plan was made for a model and a preset by their names.
    'stretto simulate PLAN.json' does the same.

    \b
    Examples:
      stretto plan retime plan.json --trace plan.pftrace
      stretto plan retime plan.json -w step.yaml -c cluster.yaml
    """
    made = Plan.load(path)
    step = _named(made.workload, workload, Workload.load, made.workload_digest, "--workload")
    machine = _named(made.cluster, cluster, Cluster.load, made.cluster_digest, "--cluster")
    made.check(step, machine)
    model = _costs(costs, machine)
    if model is None:
        # The plan's own programs take precedence over programs of the same name that are made anew.
        model = SimulatedCosts(machine, providers=(*providers_for(machine), saved(made.programs)))
    problem = make_problem(step, machine, model)
    schedule = to_schedule(made, problem)
    found = retimed(schedule, problem, machine, model, turns=api.turns_in(made, step))
    files = OutputFiles()
    files.write(trace, lambda path: write_plan_trace({"plan": schedule.timeline(problem)}, path))
    files.json(rows, {
        "promised_us": made.iteration_us, "today_us": schedule.period_us, "retimed_us": found.period_us,
        "meeting": found.meeting, "settled": found.settled,
    })  # fmt: skip
    how = f"{found.meeting} motifs meet on links" if found.meeting else "no two motifs meet on a link"
    table = ResultTable("", ">iteration", "", header=False)
    table.add_row("promised", format_us(made.iteration_us), f"plan {made.hash}")
    table.add_row("today's costs", format_us(schedule.period_us), problem.costs)
    steady = how if found.settled else f"{how}; no steady state, the mean is given"
    table.add_row("link by link", format_us(found.period_us), steady)
    out().print(table)
    files.tell()


Named = TypeVar("Named", Workload, Cluster)


def _named(name: str, given: str | None, load: Callable[[str], Named], digest: str, option: str) -> Named:
    """The workload or cluster that the user gave, else the one that a plan names, if it is still the same."""
    if given is not None:
        return load(given)
    missing = InvalidInput(
        f"{option}: must be given: the plan was made for {name!r} with options, from a file, or by another version"
    )
    try:
        found = load(name)
    except StrettoError:
        raise missing from None
    if found.digest != digest:
        raise missing
    return found


def _costs(given: str | None, cluster: Cluster, otherwise: CostModel | None = None) -> CostModel | None:
    """The cost model of ``--costs``: a file, and what it does not say itself."""
    if given is None:
        return None

    path, *parts = [given] if Path(given).exists() else given.split(",")
    said: dict[str, str] = {}
    for part in parts:
        key, equals, value = part.partition("=")
        if key not in COSTS_KEYS:
            raise unknown("key in --costs", key, COSTS_KEYS)
        if not equals or not value:
            raise InvalidInput(f"--costs: {key}: give it a value, as in {key}={COSTS_KEYS[key]}")
        said[key] = value
    nranks = said.get("nranks", "0")
    if not nranks.isascii() or not nranks.isdigit() or len(nranks) > 9:
        raise InvalidInput(f"--costs: nranks: must be a number, not {nranks[:40]!r}")
    rows = read_measurements(
        path, collective=said.get("collective"), algorithm=said.get("algorithm"), nranks=int(nranks) or None,
        channels=said["channels"].split("+") if "channels" in said else (),
    )  # fmt: skip
    return LayeredCosts(MeasuredCosts(cluster, rows), otherwise or simulated_costs(cluster))


@contextmanager
def search_progress() -> Iterator[Callable[[str, float], None]]:
    """A line on stderr that follows the search; a timer shows it once it takes more than two seconds."""
    bar = Progress(
        BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn(), console=progress_console(),
        transient=True,
    )  # fmt: skip
    task = bar.add_task("", total=1.0)
    timer = threading.Timer(SHOW_AFTER_S, bar.start)
    timer.daemon = True
    if bar.console.is_terminal and not SESSION.quiet:
        timer.start()
    try:
        yield lambda message, share: bar.update(task, description=message, completed=share)
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        if bar.live.is_started:
            bar.stop()
