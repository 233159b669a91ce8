# SPDX-License-Identifier: Apache-2.0
"""``stretto strategy``: how each variable of a model is synchronised; built, shown, timed and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from ..report.bars_html import WAITS, parted_bars_html
from ..report.style import color
from ..report.table import ResultTable
from ..strategy import (
    BUILDERS,
    ModelSpec,
    NodeConfig,
    Strategy,
    load_strategy,
    plan_strategy,
    save_strategy,
    simulate_strategy,
    zoo,
)
from ..strategy import build as make
from ..strategy import diff as changes_between
from ..strategy import explain as said
from ..strategy.compare import words
from ..strategy.simulate import SimulatedStrategy
from ..units import format_us, parse_number
from .common import next_step, out, parse_options, progress, quoted, wrote
from .completion import model_names
from .options import AllOption, ClusterOption, HtmlOption, JsonOption, OptionalCluster, SettingsOption
from .outputs import YAML, OutputFiles, output
from .pages import write_tables

SHOWN = 40
MAX_PLAN_S = 3600.0

app = typer.Typer(
    no_args_is_help=True,
    help="""Strategies: how each variable of a model is cut, placed, synchronised, encoded, and how late it may come.

    A model is a name of the zoo (bert_large), perhaps scaled (vgg16@0.1), or a file. A strategy is a file, or where
    it is timed also the name of a builder.

    \b
    Try:
      stretto strategy list
      stretto strategy build parallax -m lm1b -c autodist_b7 -o parallax.yaml
      stretto strategy explain parallax.yaml -m lm1b
      stretto strategy simulate parallax.yaml all_reduce partitioned_ps -m lm1b -c autodist_b7
      stretto strategy diff parallax.yaml other.yaml
    """,
)

Source = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="NAME|FILE", autocompletion=model_names, help="A model of the zoo, or a file."
    ),
]
Device = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="What a model of the zoo computes on: titan_x, m60, t4, a100, h100, h200, gb200 or mi300x.",
    ),
]
StrategyFile = Annotated[Path, typer.Argument(metavar="FILE", help="A strategy.")]


@app.command("list")
def list_(rows: JsonOption = None) -> None:
    """List the builders with their options, and the models of the zoo.

    \b
    Example:
      stretto strategy list
    """
    files = OutputFiles()
    files.json(rows, {
        "builders": [{"name": name, "about": i.about, "options": list(i.options)} for name, i in BUILDERS.items()],
        "models": list(zoo.MODELS),
    })  # fmt: skip
    console = out()
    table = ResultTable("name", "makes", "options (--set)", title="builders")
    for name, info in BUILDERS.items():
        table.add_row(name, info.about, ", ".join(info.options))
    console.print(table)
    console.print("all builders also take encoder=NAME[:AMOUNT] and staleness=STEPS", style="dim", markup=False)
    console.print()
    console.print(f"models: {', '.join(zoo.MODELS)}", markup=False)
    files.tell("stretto strategy simulate all -m bert_large -c autodist_b7")


@app.command()
def build(
    builder: Annotated[str, typer.Argument(metavar="BUILDER", help="Its name, as 'stretto strategy list' shows it.")],
    model: Source,
    target: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", callback=output(*YAML), help="YAML, or JSON by its name."),
    ],
    cluster: OptionalCluster = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=65536, help="Ranks by number, where there is no cluster.")
    ] = None,
    settings: SettingsOption = None,
    serve: Annotated[
        str, typer.Option(metavar="DEVICE,DEVICE", help="Devices (rank3) that do not train, but only serve.")
    ] = "",
    device: Device = "t4",
) -> None:
    """Make a strategy by one rule, as known systems do, and write it to a file that can be edited.

    \b
    Examples:
      stretto strategy build all_reduce -m vgg16 --ranks 8 --set chunk=64 -o ar.yaml
      stretto strategy build partitioned_ps -m bert_large -c autodist_b7 -o ps.yaml
      stretto strategy build ps_balanced -m vgg16 -c autodist_a1 --set staleness=2 -o stale.yaml
      stretto strategy build ps_balanced -m vgg16 --ranks 6 --serve rank4,rank5 -o served.yaml
    """
    if (cluster is None) == (ranks is None):
        raise InvalidInput("build: give either --cluster or --ranks")
    made = make(
        builder, zoo.load(model, device=device), Cluster.load(cluster) if cluster is not None else ranks or 1,
        serve=[name.strip() for name in serve.split(",") if name.strip()], **_numbers(parse_options(settings or [])),
    )  # fmt: skip
    save_strategy(made, target)
    wrote(out(), target, made.made_by)
    next_step(f"stretto strategy simulate {quoted(target)} -m {quoted(model)} -c {quoted(cluster or 'CLUSTER')}")


@app.command()
def show(
    strategy: StrategyFile,
    every: AllOption = False,
    rows: JsonOption = None,
) -> None:
    """Show what a strategy decides for each variable.

    \b
    Example:
      stretto strategy show parallax.yaml
    """
    made = load_strategy(strategy)
    files = OutputFiles()
    files.json(rows, {
        "name": made.name, "model": made.model, "lossless": made.is_lossless, "devices": len(made.devices),
        "variables": [_row(node) for node in made.nodes],
    })  # fmt: skip
    console = out()
    lossless = "lossless" if made.is_lossless else "lossy or stale"
    console.print(
        f"{made.name}: {made.model} ({made.model_digest}), {len(made.nodes)} variables on {len(made.devices)} devices, "
        f"{lossless}", markup=False,
    )  # fmt: skip
    for line in (made.made_by, *made.notes):
        if line:
            console.print(line, style="dim", markup=False)
    shown = made.nodes if every else made.nodes[:SHOWN]
    decided = [_row(node) for node in shown]
    # What nobody uses is not shown.
    used = [column for column in decided[0] if any(row[column] for row in decided)] if decided else []
    table = ResultTable(*(f">{column}" if column in ("group", "late") else column for column in used))
    for row in decided:
        table.add_row(*(row[column] for column in used))
    console.print(table)
    if len(shown) < len(made.nodes):
        console.print(f"and {len(made.nodes) - len(shown)} more: --all shows them", style="dim")
    files.tell()


def _row(node: NodeConfig) -> dict[str, str]:
    syncs = node.parts or (node.sync,)
    return {
        "variable": node.variable,
        "cut": "x".join(str(one) if isinstance(one, int) else str(list(one)) for one in node.partition),
        "synchroniser": _different([sync.kind for sync in syncs]),
        "where": _different([", ".join(sync.placement) for sync in syncs]),
        "group": _different([str(sync.group) if sync.group >= 0 else "" for sync in syncs]),
        "encoder": _different([sync.encoder.replace("none", "") for sync in syncs]),
        "late": _different([str(sync.staleness or "") for sync in syncs]),
    }


@app.command()
def explain(
    strategy: StrategyFile,
    model: Source,
    variable: Annotated[str | None, typer.Option(metavar="NAME", help="This variable only.")] = None,
    device: Device = "t4",
    rows: JsonOption = None,
) -> None:
    """Say in words what happens to the variables; those that are treated alike together.

    \b
    Examples:
      stretto strategy explain parallax.yaml -m lm1b
      stretto strategy explain parallax.yaml -m lm1b --variable softmax.weight
    """
    loaded, spec = load_strategy(strategy), zoo.load(model, device=device)
    text, files = said(loaded, spec, variable=variable), OutputFiles()
    files.json(rows, {"strategy": loaded.name, "model": loaded.model, "variables": [
        {"variable": one.name, "nbytes": one.nbytes, "decision": words(loaded.node(one.name), one)}
        for one in (spec.variables if variable is None else [spec.variable(variable)])
    ]})  # fmt: skip
    out().print(text, markup=False)
    files.tell()


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="FILE", help="A strategy.")],
    after: Annotated[Path, typer.Argument(metavar="FILE", help="Another one for the same model.")],
    every: AllOption = False,
    rows: JsonOption = None,
) -> None:
    """Show which decisions two strategies of one model make differently.

    \b
    Example:
      stretto strategy diff before.yaml after.yaml
    """
    changes = changes_between(load_strategy(before), load_strategy(after))
    files = OutputFiles()
    files.json(rows, {"changes": [
        {"variable": c.variable, "part": c.part, "what": c.what, "before": c.before, "after": c.after} for c in changes
    ]})  # fmt: skip
    console = out()
    if not changes:
        console.print("no decision differs")
        files.tell()
        return
    table = ResultTable("variable", ">part", "what", "before", "after", title=f"{len(changes)} decisions differ")
    for change in changes if every else changes[:SHOWN]:
        part = str(change.part) if change.part >= 0 else ""
        table.add_row(change.variable, part, change.what, change.before, change.after)
    console.print(table)
    if not every and len(changes) > SHOWN:
        console.print(f"and {len(changes) - SHOWN} more: --all shows them", style="dim")
    files.tell()


@app.command()
def simulate(
    strategies: Annotated[list[str], typer.Argument(metavar="FILE|BUILDER...", help="What to compare.")],
    model: Source,
    cluster: ClusterOption,
    device: Device = "t4",
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.json",
            callback=output(".json"),
            help="Write the plan that the joint planner makes of the fastest.",
        ),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option("--budget", metavar="SECONDS", help="Hand the fastest to the joint planner for so long."),
    ] = None,
    html: HtmlOption = None,
    rows: JsonOption = None,
) -> None:
    """Time an iteration under strategies: compute, what communication adds, the busiest link, and the bound.

    With --budget the fastest strategy goes to the joint planner, which decides pieces, order, channels and algorithms
    of its messages together.

    \b
    Examples:
      stretto strategy simulate all -m bert_large -c autodist_b7
      stretto strategy simulate mine.yaml all_reduce -m vgg16 -c autodist_a1 --device titan_x
      stretto strategy simulate all_reduce -m vgg16@0.2 -c autodist_b5 --budget 10 -o plan.json
    """
    if budget is not None and not 0 <= budget <= MAX_PLAN_S:
        raise InvalidInput(f"--budget: must be 0..{MAX_PLAN_S:g} seconds, not {budget:g}")
    if target is not None and not budget:
        raise InvalidInput("--output: needs --budget, the time for making what is written")
    where, what = Cluster.load(cluster), zoo.load(model, device=device)
    found = _timed(strategies, what, where)
    best = min(found, key=lambda name: found[name][1].iteration_us)
    table = _times_table(f"{what.name} on {where.name}", found)
    files = OutputFiles()
    files.json(rows, [
        {"system": name, "iteration_us": ran.iteration_us, "compute_us": ran.compute_us,
         "exposed_us": ran.exposed_us, "bound_us": ran.bound_us, "messages": ran.messages,
         "moved_bytes": ran.moved_bytes}
        for name, (_, ran) in found.items()
    ])  # fmt: skip
    picture = _times_bars(found)
    files.write(html, lambda path: write_tables(path, f"{what.name} on {where.name}", table, picture=picture))
    planned = _plan(files, target, found[best][0], what, where, budget) if budget else ""
    console = out()
    console.print(table)
    for name, (made, _) in found.items():
        if len(made.devices) < where.num_devices:
            fewer = f"{name}: trains on the first {len(made.devices)} of {where.num_devices} devices only"
            console.print(fewer, style="dim", markup=False)
    busiest = found[best][1]
    if busiest.busiest_link:
        said = f"{best}: the busiest link is {busiest.busiest_link}, for {format_us(busiest.busiest_us)}"
        console.print(said, style="dim", markup=False)
    if planned:
        console.print(f"planned {best}: {planned}", markup=False)
    files.tell(f"stretto plan show {quoted(target)}" if target is not None else "")


def _timed(strategies: list[str], model: ModelSpec, cluster: Cluster) -> dict[str, tuple[Strategy, SimulatedStrategy]]:
    """Every strategy with its simulated iteration, by the name that was given."""
    names = [name for given in strategies for name in (BUILDERS if given == "all" else (given,))]
    found = {}
    with progress("simulating", len(names)) as advance:
        for name in dict.fromkeys(names):
            advance(name)
            made = _loaded(name, model, cluster)
            found[name] = made, simulate_strategy(made, model, cluster)
    return found


def _times_bars(found: dict[str, tuple[Strategy, SimulatedStrategy]]) -> str:
    """Compute and exposed communication of the strategies as bars, beside the lower bound of the best."""
    rows = [
        (name, [("compute", ran.compute_us, color(0)), ("exposed communication", ran.exposed_us, WAITS)],
         format_us(ran.iteration_us))
        for name, (_, ran) in sorted(found.items(), key=lambda item: item[1][1].iteration_us)
    ]  # fmt: skip
    bound_us = min(ran.bound_us for _, ran in found.values())
    return parted_bars_html(rows, label="An iteration under each strategy", bound_us=bound_us, legend=True)


def _times_table(title: str, found: dict[str, tuple[Strategy, SimulatedStrategy]]) -> ResultTable:
    """The strategies, the fastest first."""
    table = ResultTable(
        "strategy", ">iteration", ">compute", ">exposed", ">link", ">of bound", ">messages", title=title
    )
    for name, (_, ran) in sorted(found.items(), key=lambda item: item[1][1].iteration_us):
        times = map(format_us, (ran.iteration_us, ran.compute_us, ran.exposed_us, ran.busiest_us))
        table.add_row(name, *times, f"{ran.iteration_us / ran.bound_us:.2f}x", str(ran.messages))
    return table


def _plan(
    files: OutputFiles, target: Path | None, strategy: Strategy, model: ModelSpec, cluster: Cluster, budget_s: float
) -> str:
    """Plan a strategy, write the plan, and say what it promises."""
    with progress("planning", 1) as advance:
        advance(strategy.name)
        made = plan_strategy(strategy, model, cluster, budget_s=budget_s).plan
    files.write(target, made.save, f"hash {made.hash}")
    fifo = format_us(made.baselines_us["fifo"])
    return f"{format_us(made.iteration_us)}, in order of submission {fifo}, bound {format_us(made.bound_us)}"


def _loaded(name: str, model: ModelSpec, cluster: Cluster) -> Strategy:
    if name in BUILDERS:
        return make(name, model, cluster)
    if not Path(name).suffix and not Path(name).exists():
        raise unknown("strategy, builder or file", name, BUILDERS)
    return load_strategy(name)


def _numbers(options: dict[str, Any]) -> dict[str, Any]:
    """Options with a point or a sign are numbers too."""
    found = dict(options)
    for key, value in options.items():
        number = parse_number(value) if isinstance(value, str) else None
        if number is not None:
            found[key] = number
    return found


def _different(values: list[str]) -> str:
    """Each different value once, with how often it occurs."""
    counts = {value: values.count(value) for value in dict.fromkeys(values)}
    if len(counts) == 1:
        return values[0]
    few = [f"{count} {value}" if value else f"{count} -" for value, count in list(counts.items())[:4]]
    return "; ".join(few) + ("; ..." if len(counts) > 4 else "")
