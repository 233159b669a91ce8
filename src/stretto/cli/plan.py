"""``stretto plan``: decide how a training step communicates; show, compare and explain plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import InvalidInput
from ..units import MAX_SEED
from .common import SHOW_AFTER_S, out, progress_console
from .outputs import HTML, TRACE, OutputFiles, output

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..planner.api import PlanResult
    from ..planner.costs.costs import CostModel
    from ..workload import Workload

app = typer.Typer(invoke_without_command=True)

MAX_BUDGET_S = 1e6
COSTS_KEYS = {"collective": "all_reduce", "nranks": "8", "algorithm": "ring", "channels": "nvlink+rdma"}
"""What ``--costs`` may say about a file, each with an example."""


@app.callback()
def plan(
    context: typer.Context,
    workload: Annotated[
        str | None, typer.Option("--workload", "-w", help="A model (dlrm:A2), a workload file, or a profiler trace.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", "-c", help="A preset (hgx2), with a node count (hgx2:16), or a file.")
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE.json", callback=output(".json"), help="Write the plan, with its hash."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html", callback=output(*HTML), help="Write one page: timelines before and after, decisions."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.pftrace", callback=output(*TRACE), help="Write an iteration before and after for Perfetto."
        ),
    ] = None,
    tuner: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            callback=output(".csv", ".conf"),
            help="Write what NCCL can express, for its tuner plugin.",
        ),
    ] = None,
    costs: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[,KEY=VALUE...]",
            help="Measured costs (CSV, nccl-tests output); what a text leaves open as FILE,collective=all_reduce,"
            "nranks=8,algorithm=ring,channels=nvlink+rdma. Else simulated.",
        ),
    ] = None,
    synthesize: Annotated[
        float,
        typer.Option(
            "--synthesize",
            "--synthesise",
            metavar="SECONDS",
            help="Also offer algorithms made for this cluster, so long for each; 0: library only.",
        ),
    ] = 0.0,
    against: Annotated[
        str, typer.Option(metavar="NAME", help="The system shown as 'before', such as fifo or bytescheduler+.")
    ] = "fifo",
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Search this long.")] = 30.0,
    steps: Annotated[
        int | None, typer.Option(help="Search so many steps instead: then the result depends on the seed alone.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Same seed, same search.")] = 0,
    retime: Annotated[
        bool, typer.Option("--retime/--no-retime", help="Simulate the final plan link by link as well.")
    ] = True,
) -> None:
    """Decide how every byte of a training step moves: in which pieces, over which links, in which order.

    Each communication op may be cut and rewritten (motifs), bound to channels and
    algorithms, and moved in time; the search does all of it together. The result
    is never slower than FIFO, TicTac, P3, ByteScheduler+, a hand-made schedule or
    SYNDICATE's own search over the same options, in the planner's time model
    (docs/planner.md says what that leaves out). A lower bound says what is left.

    \b
    Examples:
      stretto plan -w dlrm:A2 -c hgx2:16 -o plan.json --report plan.html
      stretto plan -w step.yaml -c dgx_a100:4 --tuner nccl.csv
      stretto plan show plan.json
      stretto plan explain plan.json a2a-emb-fwd
      stretto plan diff old.json new.json
      stretto plan retime plan.json -w dlrm:A2 -c hgx2:16
    """
    if context.invoked_subcommand is not None:
        return
    if workload is None or cluster is None:
        raise InvalidInput("plan: give --workload and --cluster, or one of show, explain, diff, retime")
    from ..cluster import Cluster
    from ..planner import api
    from ..planner.api import SYSTEM
    from ..planner.baselines import BASELINES
    from ..report.plan_html import write_plan_html
    from ..report.plan_tables import plan_tables, systems_table
    from ..report.plan_trace import write_plan_trace
    from ..workload import Workload

    if against not in BASELINES:
        raise InvalidInput(f"--against: must be one of {', '.join(BASELINES)}, not {against!r}")
    if not 0 < budget < MAX_BUDGET_S:
        raise InvalidInput(f"--budget: must be > 0 and below {MAX_BUDGET_S:g} seconds, not {budget:g}")
    if steps is not None and steps < 1:
        raise InvalidInput(f"--steps: must be > 0, not {steps}")
    machine, step = Cluster.load(cluster), Workload.load(workload)
    model = _costs(costs, machine)
    with _progress() as tell:
        found = api.plan(
            step, machine, budget_s=budget, steps=steps, seed=seed, costs=model,
            synthesis_s=synthesize, retime=retime,
            progress=tell,
        )  # fmt: skip
    files = OutputFiles()
    files.write(plan_file, found.plan.save, f"hash {found.plan.hash}")
    files.write(report, lambda path: write_plan_html(path, found, against=against))
    shown = {f"before ({against})": found.schedules[against], "after (plan)": found.schedules[SYSTEM]}
    files.write(
        trace,
        lambda path: write_plan_trace({name: one.timeline(found.problem) for name, one in shown.items()}, path),
    )
    alone = [] if tuner is None else [_tuner_alone(found, machine, model)]
    files.write(tuner, lambda path: _write_tuner(found, step, machine, path, model))
    console = out()
    for note in found.problem.notes:
        if note.startswith("warning: "):
            console.print(note, markup=False, soft_wrap=True)
    console.print(systems_table(found.schedules))
    console.print()
    console.print(plan_tables(found.plan))
    for line in alone:
        console.print(line, markup=False, soft_wrap=True)
    files.tell()


def _tuner_alone(found: PlanResult, cluster: Cluster, costs: CostModel | None) -> str:
    """What of the plan NCCL would gain by itself, with the table of ``--tuner``."""
    from ..planner.tuner_csv import tuner_lines
    from ..planner.tuner_gain import with_tuner_alone
    from ..units import format_us

    problem, before = found.problem, found.schedules["fifo"].period_us
    lines, _ = tuner_lines(found.plan, problem.workload, cluster, costs)
    after = with_tuner_alone(lines, problem, cluster, costs).period_us
    return (
        f"with NCCL's tuner alone: {format_us(after)}, {before / after:.2f}x; with the whole plan: "
        f"{format_us(found.plan.iteration_us)}, {before / found.plan.iteration_us:.2f}x (of fifo, {format_us(before)})"
    )


def _write_tuner(found: PlanResult, workload: Workload, cluster: Cluster, path: Path, costs: CostModel | None) -> str:
    """Write the tuner's table, and say how many things it leaves out."""
    from ..planner.tuner_csv import write_tuner_csv

    left_out = write_tuner_csv(found.plan, workload, cluster, path, costs)
    return f"{len(left_out)} things that cannot be told to NCCL are comments" if left_out else ""


@app.command()
def show(path: Annotated[Path, typer.Argument(metavar="PLAN.json")]) -> None:
    """What a plan promises and decides.

    \b
    Example:
      stretto plan show plan.json
    """
    from ..planner.plan import Plan
    from ..report.plan_tables import plan_tables

    out().print(plan_tables(Plan.load(path)))


@app.command()
def explain(
    path: Annotated[Path, typer.Argument(metavar="PLAN.json")],
    op: Annotated[str | None, typer.Argument(metavar="COMM-OP", help="Default: all of them.")] = None,
) -> None:
    """Why each communication op runs as it does: its motifs, their order, costs and where those came from.

    \b
    Example:
      stretto plan explain plan.json a2a-emb-fwd
    """
    from ..planner.plan import Plan
    from ..report.plan_tables import motif_table

    plan = Plan.load(path)
    console = out()
    for chosen in [plan.op(op)] if op is not None else plan.ops:
        console.print(motif_table(chosen))
        console.print()


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="OLD.json")],
    after: Annotated[Path, typer.Argument(metavar="NEW.json")],
) -> None:
    """What two plans for the same workload decide differently.

    \b
    Example:
      stretto plan diff old.json new.json
    """
    from ..errors import PlanMismatch
    from ..planner.compare import diff as compare
    from ..planner.plan import Plan
    from ..report.plan_tables import changes_table
    from ..units import format_us

    old, new = Plan.load(before), Plan.load(after)
    try:
        changes = compare(old, new)
    except PlanMismatch as error:
        raise PlanMismatch(f"{before}, {after}: {error}") from None
    console = out()
    if changes:
        console.print(changes_table(changes, before.name, after.name))
    else:
        console.print("the same decisions")
    console.print(f"iteration {format_us(old.iteration_us)} -> {format_us(new.iteration_us)}")


@app.command()
def retime(
    path: Annotated[Path, typer.Argument(metavar="PLAN.json")],
    workload: Annotated[str, typer.Option("--workload", "-w", help="The workload that the plan was made for.")],
    cluster: Annotated[str, typer.Option("--cluster", "-c", help="The cluster that the plan was made for.")],
    costs: Annotated[
        str | None, typer.Option(metavar="FILE[,KEY=VALUE...]", help="Measured costs; else simulated.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE.pftrace", callback=output(*TRACE), help="Write an iteration for Perfetto."),
    ] = None,
) -> None:
    """Simulate a plan again, link by link: what an iteration takes as promised, by today's costs, and contending.

    \b
    Example:
      stretto plan retime plan.json -w dlrm:A2 -c hgx2:16 --trace plan.pftrace
    """
    from ..cluster import Cluster
    from ..planner.algebra.options import problem as make_problem
    from ..planner.api import to_schedule
    from ..planner.costs.costs import simulated_costs
    from ..planner.plan import Plan
    from ..planner.schedule.retime import retime as retimed
    from ..report.plan_trace import write_plan_trace
    from ..units import format_us
    from ..workload import Workload

    made, step, machine = Plan.load(path), Workload.load(workload), Cluster.load(cluster)
    made.check(step, machine)
    model = _costs(costs, machine) or simulated_costs(machine)
    problem = make_problem(step, machine, model)
    schedule = to_schedule(made, problem)
    found = retimed(schedule, problem, machine, model)
    files = OutputFiles()
    files.write(trace, lambda path: write_plan_trace({"plan": schedule.timeline(problem)}, path))
    console = out()
    how = f"{found.meeting} motifs meet on links" if found.meeting else "no two motifs meet on a link"
    for name, time_us, note in (
        ("promised", made.iteration_us, f"plan {made.hash}"),
        ("today's costs", schedule.period_us, problem.costs),
        ("link by link", found.period_us, how if found.settled else f"{how}; no steady state, the mean is given"),
    ):
        console.print(f"{name:14}{format_us(time_us):>10}  {note}", markup=False, soft_wrap=True)
    files.tell()


def _costs(given: str | None, cluster: Cluster) -> CostModel | None:
    """The cost model of ``--costs``: a file, and what it does not say itself."""
    if given is None:
        return None
    from ..errors import unknown
    from ..planner.costs.costs import simulated_costs
    from ..planner.costs.measured import LayeredCosts, MeasuredCosts, read_measurements

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
    return LayeredCosts(MeasuredCosts(cluster, rows), simulated_costs(cluster))


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A line on stderr that follows the search; a timer shows it once it takes more than two seconds."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn(), console=progress_console(),
        transient=True,
    )  # fmt: skip
    task = bar.add_task("", total=1.0)
    timer = threading.Timer(SHOW_AFTER_S, bar.start)
    timer.daemon = True
    if bar.console.is_terminal:
        timer.start()
    try:
        yield lambda message, share: bar.update(task, description=message, completed=share)
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        if bar.live.is_started:
            bar.stop()
