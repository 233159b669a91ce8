"""``stretto strategy``: how each variable of a model is synchronised; built, shown, timed and compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidInput
from ..units import parse_number
from .common import out, parse_options, progress, write_json, wrote
from .outputs import YAML, OutputFiles, output

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..strategy import ModelSpec, NodeConfig, Strategy

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

Source = Annotated[str, typer.Option("--model", "-m", metavar="NAME|FILE", help="A model of the zoo, or a file.")]
Where = Annotated[str, typer.Option("--cluster", "-c", help="A preset with a node count, or a file.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="What a model of the zoo computes on: titan_x, m60 or t4.")]
StrategyFile = Annotated[Path, typer.Argument(metavar="FILE", help="A strategy.")]
Rows = Annotated[
    Path | None, typer.Option("--json", metavar="FILE.json", callback=output(".json"), help="Also write the numbers.")
]


@app.command("list")
def list_() -> None:
    """List the builders with their options, and the models of the zoo.

    \b
    Example:
      stretto strategy list
    """
    from rich.table import Table

    from ..strategy import BUILDERS, zoo

    console = out()
    table = Table(box=None, title="builders", title_justify="left")
    for column in ("name", "makes", "options (--set)"):
        table.add_column(column, overflow="fold")
    for name, info in BUILDERS.items():
        table.add_row(name, info.about, ", ".join(info.options))
    console.print(table)
    console.print("all builders also take encoder=NAME[:AMOUNT] and staleness=STEPS", style="dim")
    console.print()
    console.print(f"models: {', '.join(zoo.MODELS)}", markup=False)


@app.command()
def build(
    builder: Annotated[str, typer.Argument(metavar="BUILDER", help="Its name, as 'stretto strategy list' shows it.")],
    model: Source,
    target: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", callback=output(*YAML), help="YAML, or JSON by its name."),
    ],
    cluster: Annotated[str | None, typer.Option("--cluster", "-c", help="A preset with a count, or a file.")] = None,
    ranks: Annotated[int, typer.Option(min=0, max=65536, help="Ranks by number, where there is no cluster.")] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the builder.")
    ] = None,
    device: Device = "t4",
) -> None:
    """Make a strategy by one rule, as known systems do, and write it to a file that can be edited.

    \b
    Examples:
      stretto strategy build all_reduce -m vgg16 --ranks 8 --set chunk=64 -o ar.yaml
      stretto strategy build partitioned_ps -m bert_large -c autodist_b7 -o ps.yaml
      stretto strategy build ps_balanced -m vgg16 -c autodist_a1 --set staleness=2 -o stale.yaml
    """
    from ..cluster import Cluster
    from ..strategy import build as make
    from ..strategy import save_strategy, zoo

    if (cluster is None) == (ranks == 0):
        raise InvalidInput("build: give either --cluster or --ranks")
    made = make(
        builder, zoo.load(model, device=device), Cluster.load(cluster) if cluster is not None else ranks,
        **_numbers(parse_options(settings or [])),
    )  # fmt: skip
    save_strategy(made, target)
    wrote(out(), target, made.made_by)


@app.command()
def show(
    strategy: StrategyFile,
    every: Annotated[bool, typer.Option("--all", help="All variables, not only the first.")] = False,
) -> None:
    """Show what a strategy decides for each variable.

    \b
    Example:
      stretto strategy show parallax.yaml
    """
    from rich.table import Table

    from ..strategy import load_strategy

    made = load_strategy(strategy)
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
    table = Table(box=None)
    for column in used:
        table.add_column(column, overflow="fold", justify="right" if column in ("group", "late") else "left")
    for row in decided:
        table.add_row(*(row[column] for column in used))
    console.print(table)
    if len(shown) < len(made.nodes):
        console.print(f"and {len(made.nodes) - len(shown)} more: --all shows them", style="dim")


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
) -> None:
    """Say in words what happens to the variables; those that are treated alike together.

    \b
    Examples:
      stretto strategy explain parallax.yaml -m lm1b
      stretto strategy explain parallax.yaml -m lm1b --variable softmax.weight
    """
    from ..strategy import explain as said
    from ..strategy import load_strategy, zoo

    out().print(said(load_strategy(strategy), zoo.load(model, device=device), variable=variable), markup=False)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="FILE", help="A strategy.")],
    after: Annotated[Path, typer.Argument(metavar="FILE", help="Another one for the same model.")],
    every: Annotated[bool, typer.Option("--all", help="All changes, not only the first.")] = False,
) -> None:
    """Show which decisions two strategies of one model make differently.

    \b
    Example:
      stretto strategy diff before.yaml after.yaml
    """
    from rich.table import Table

    from ..strategy import diff as changes_between
    from ..strategy import load_strategy

    console = out()
    changes = changes_between(load_strategy(before), load_strategy(after))
    if not changes:
        console.print("no decision differs")
        return
    table = Table(box=None, title=f"{len(changes)} decisions differ", title_justify="left")
    for column in ("variable", "part", "what", "before", "after"):
        table.add_column(column, overflow="fold")
    for change in changes if every else changes[:SHOWN]:
        part = str(change.part) if change.part >= 0 else ""
        table.add_row(change.variable, part, change.what, change.before, change.after)
    console.print(table)
    if not every and len(changes) > SHOWN:
        console.print(f"and {len(changes) - SHOWN} more: --all shows them", style="dim")


@app.command()
def simulate(
    strategies: Annotated[list[str], typer.Argument(metavar="FILE|BUILDER...", help="What to compare.")],
    model: Source,
    cluster: Where,
    device: Device = "t4",
    plan: Annotated[
        float, typer.Option(metavar="SECONDS", help="Hand the fastest to the joint planner for so long.")
    ] = 0.0,
    target: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.json", callback=output(".json"), help="Write that plan."),
    ] = None,
    rows: Rows = None,
) -> None:
    """Time an iteration under strategies: compute, what communication adds, the busiest link, and the bound.

    With --plan the fastest strategy goes to the joint planner, which decides pieces, order, channels and algorithms
    of its messages together.

    \b
    Examples:
      stretto strategy simulate all -m bert_large -c autodist_b7
      stretto strategy simulate mine.yaml all_reduce -m vgg16 -c autodist_a1 --device titan_x
      stretto strategy simulate all_reduce -m vgg16@0.2 -c autodist_b5 --plan 10 -o plan.json
    """
    from rich.table import Table

    from ..cluster import Cluster
    from ..strategy import BUILDERS, plan_strategy, simulate_strategy, zoo
    from ..units import format_us

    if not 0 <= plan <= MAX_PLAN_S:
        raise InvalidInput(f"--plan: must be 0..{MAX_PLAN_S:g} seconds, not {plan:g}")
    if target is not None and not plan:
        raise InvalidInput("--output: needs --plan, which makes what is written")
    where, what = Cluster.load(cluster), zoo.load(model, device=device)
    names = [name for given in strategies for name in (BUILDERS if given == "all" else (given,))]
    found = {}
    with progress("simulating", len(names)) as advance:
        for name in dict.fromkeys(names):
            advance(name)
            made = _loaded(name, what, where)
            found[name] = made, simulate_strategy(made, what, where)
    best = min(found, key=lambda name: found[name][1].iteration_us)
    files = OutputFiles()
    files.write(rows, lambda path: write_json(path, [
        {"system": name, "iteration_us": ran.iteration_us, "compute_us": ran.compute_us,
         "exposed_us": ran.exposed_us, "bound_us": ran.bound_us, "messages": ran.messages,
         "moved_bytes": ran.moved_bytes}
        for name, (_, ran) in found.items()
    ]))  # fmt: skip
    planned = ""
    if plan:
        with progress("planning", 1) as advance:
            advance(best)
            made_plan = plan_strategy(found[best][0], what, where, budget_s=plan).plan
        files.write(target, made_plan.save, f"hash {made_plan.hash}")
        planned = (
            f"planned {best}: {format_us(made_plan.iteration_us)}, in order of submission "
            f"{format_us(made_plan.baselines_us['fifo'])}, bound {format_us(made_plan.bound_us)}"
        )
    console = out()
    table = Table(box=None, title=f"{what.name} on {where.name}", title_justify="left")
    for column in ("strategy", "iteration", "compute", "exposed", "link", "of bound", "messages"):
        table.add_column(column, justify="left" if column == "strategy" else "right", overflow="fold")
    for name, (_, ran) in sorted(found.items(), key=lambda item: item[1][1].iteration_us):
        table.add_row(
            name, format_us(ran.iteration_us), format_us(ran.compute_us), format_us(ran.exposed_us),
            format_us(ran.busiest_us), f"{ran.iteration_us / ran.bound_us:.2f}x", str(ran.messages),
        )  # fmt: skip
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
        console.print(planned, markup=False)
    files.tell()


def _loaded(name: str, model: ModelSpec, cluster: Cluster) -> Strategy:
    from ..strategy import BUILDERS, load_strategy
    from ..strategy import build as make

    if name in BUILDERS:
        return make(name, model, cluster)
    if not Path(name).suffix and not Path(name).exists():
        raise InvalidInput(f"strategy {name!r}: no such file, and no builder; choose from: {', '.join(BUILDERS)}")
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
    """Of values that are mostly alike each once, with how often."""
    counts = {value: values.count(value) for value in dict.fromkeys(values)}
    if len(counts) == 1:
        return values[0]
    few = [f"{count} {value}" if value else f"{count} -" for value, count in list(counts.items())[:4]]
    return "; ".join(few) + ("; ..." if len(counts) > 4 else "")
