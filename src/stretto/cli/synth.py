"""``stretto synth``: search the best program for a collective on a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..units import MAX_SEED
from .common import check_root, out, parse_limits, parse_ranks, progress_console, with_multicast, write_json
from .outputs import PROGRAM, Output, OutputFiles, output

if TYPE_CHECKING:
    from rich.console import Console

    from ..cluster import Cluster
    from ..collectives import Collective
    from ..synthesis import Candidate, Selection, Synthesis

SHOWN = 12


def synth(
    collective: Annotated[
        str, typer.Argument(metavar="COLLECTIVE", help="allgather, reduce_scatter, allreduce, alltoall, broadcast, ...")
    ],
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="A preset (dgx2), with a node count (dgx2:2), or a file.")
    ],
    nbytes: Annotated[
        str, typer.Option("--bytes", "-b", metavar="SIZE", help="The larger of one rank's send and receive buffer.")
    ] = "64M",
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE|DIR",
            callback=output(*PROGRAM, folder=True),
            help="Write the program (.txt, .xml for MSCCL, .json for MSCCL++) with its certificate beside it; "
            "with --sizes a folder.",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option("--format", metavar="xml|json|txt", help="Format of the files in that folder. Default: xml."),
    ] = None,
    min_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Smallest call that the written file is for. Default: half of --bytes."),
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Largest one; 0: no limit. Default: just below twice --bytes."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="LOW..HIGH", help="Find the best program for each of these sizes, and where to switch."),
    ] = None,
    factor: Annotated[float, typer.Option(help="By how much sizes grow in a range.")] = 4.0,
    multicast: Annotated[
        bool | None,
        typer.Option(
            "--multicast/--no-multicast",
            help="Whether switches can copy a message to several ports. Default: as the cluster says.",
        ),
    ] = None,
    ranks: Annotated[
        str | None, typer.Option(help="Devices that take part: a count or a list such as 0-7,16. Default: all.")
    ] = None,
    chunks: Annotated[int | None, typer.Option(help="Chunks per shard to begin with; makers may cut finer.")] = None,
    root: Annotated[int | None, typer.Option(help="Root of a broadcast, reduce, gather or scatter.")] = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Input and output share memory.")] = False,
    sketch: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A communication sketch: YAML, or TACCL's JSON.")
    ] = None,
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Search this long, for each size.")] = 30.0,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Makers that run at once, each in its own process.")] = 1,
    backend: Annotated[
        str, typer.Option(metavar="processes|ray", help="Where makers run at once: here, or as tasks of a Ray cluster.")
    ] = "processes",
    ray_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Ray's head node. Default: $RAY_ADDRESS, else a local Ray.")
    ] = None,
    makers: Annotated[
        str | None,
        typer.Option(metavar="NAME,NAME", help="Ask only these, such as forest,library:ring. Default: all."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="MAKER.KEY=VALUE", help="An option of one maker, such as forest.max_k=4."),
    ] = None,
    alpha: Annotated[
        str, typer.Option(metavar="pipelined|blocking", help="Whether latency also occupies the link.")
    ] = "pipelined",
    contention: Annotated[
        str | None, typer.Option(metavar="fifo|fair", help="How transfers share a link. Default: what its links need.")
    ] = None,
    lower: Annotated[
        bool,
        typer.Option(
            "--lower",
            help="Judge programs as instruction streams, search instances and FIFO depth. Implied by .xml and .json.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Same seed, same search.")] = 0,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Use results of earlier searches.")] = True,
    show_all: Annotated[bool, typer.Option("--all", help="List every candidate, not only each maker's best.")] = False,
    rows: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE.json", callback=output(".json"), help="Write all candidates."),
    ] = None,
) -> None:
    """Search the fastest program for a collective, and say how far it is from optimal.

    Everybody who can make one is asked: the algorithm library, spanning trees,
    flows, greedy search, sketches, exact search. Each program is proved right and
    simulated; the best is written with a certificate: its time, a bound that no
    algorithm beats, who made it and how long that took. A maker that fails is
    listed with its reason.

    \b
    Examples:
      stretto synth allgather --cluster dgx2:2 --bytes 64M -o ag.xml
      stretto synth allreduce --cluster ndv2:2 --bytes 1M --budget 60 --jobs 2
      stretto synth alltoall --cluster dgx2:2 --sizes 1K..1G -o tables/
      stretto synth allgather --cluster ndv2:2 --sketch my.yaml
      stretto synth allgather --cluster dgx_a100 --makers forest --set forest.max_k=2
      stretto synth allgather --cluster topology.xml --bytes 16M -o ag.xml
      stretto synth allgather --cluster dgx2:2 --multicast -o ag.txt
    """
    from ..cluster import Cluster
    from ..report.sweep import parse_sizes
    from ..synthesis import select, synthesize
    from ..units import parse_bytes

    limits = parse_limits(min_bytes, max_bytes)
    suffix, streams = _check_target(target, form, limits, table=sizes is not None)
    _check_rows(rows, target, table=sizes is not None)
    machine = with_multicast(Cluster.load(cluster), multicast)
    wanted = _collective(collective, machine, ranks, chunks, root, in_place)
    options: dict[str, Any] = {
        "budget_s": budget,
        "sketch": None if sketch is None else _sketch(sketch),
        "alpha": alpha,
        "contention": contention,
        "seed": seed,
        "jobs": jobs,
        "backend": backend,
        "ray_address": ray_address,
        "cache": cache,
        "makers": None if makers is None else [name.strip() for name in makers.split(",") if name.strip()],
        "maker_options": _maker_options(settings or []),
    }
    console, files = out(), OutputFiles()
    if sizes is not None:
        every = parse_sizes(sizes, factor=factor)
        with _live(budget * len(every)) as progress:
            table = select(wanted, machine, every, progress=progress, lower=streams or lower, **options)
        files.write(target, lambda path: table.save(path, suffix=suffix))
        files.write(rows, lambda path: write_json(path, {"rows": table.rows()}))
        _print_selection(console, table)
        files.tell()
        return
    with _live(budget) as progress:
        found = synthesize(wanted, machine, parse_bytes(nbytes), lower=streams or lower, progress=progress, **options)
    files.write(target, lambda path: found.save(path, **limits))
    candidates = [_row(found, candidate) for candidate in found.candidates]
    files.write(rows, lambda path: write_json(path, {"rows": candidates}))
    _print_candidates(console, found, show_all)
    files.tell()


def _check_target(target: Path | None, form: str | None, limits: dict[str, int], *, table: bool) -> tuple[str, str]:
    """The ending of the files to write and the format to lower for; a wrong path is refused before the search."""
    from ..errors import InvalidInput, unknown
    from ..programs.formats import SUFFIXES

    if form is not None and not (table and target is not None):
        raise InvalidInput("--format: is for the folder of --sizes and --output; a file's ending says its format")
    if limits and (table or target is None):
        option = next(iter(limits)).replace("_", "-")
        raise InvalidInput(f"--{option}: is for the file of --output; files of --sizes share all sizes among them")
    if target is None:
        return "", ""
    suffix = f".{form or 'xml'}" if table else target.suffix
    if table and suffix not in SUFFIXES:
        raise unknown("format", form or "", [ending.removeprefix(".") for ending in SUFFIXES])
    (Output(folder=True) if table else Output(suffixes=PROGRAM)).check(target, "--output")
    return suffix, "" if SUFFIXES[suffix] == "text" else SUFFIXES[suffix]


def _check_rows(rows: Path | None, target: Path | None, *, table: bool) -> None:
    """Refuse a file for the numbers that would replace one of the files that come with the programs."""
    from ..errors import InvalidInput
    from ..synthesis.certificate import certificate_path

    if rows is None or target is None:
        return
    if table and rows.resolve().parent == target.resolve():
        raise InvalidInput(f"--json: {rows}: lies in the folder of --output, which has an index of its own")
    if not table and rows.resolve() == certificate_path(target).resolve():
        raise InvalidInput(f"--json: {rows}: is also the certificate of --output, and would replace it")


def _maker_options(pairs: list[str]) -> dict[str, dict[str, str]]:
    """Options of makers as ``maker.key=value``; their values are read by the makers they are for."""
    from ..errors import InvalidInput

    found: dict[str, dict[str, str]] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        maker, dot, key = name.partition(".")
        if not (equals and dot and maker and key and value):
            raise InvalidInput(f"--set {pair!r}: expected MAKER.KEY=VALUE, such as forest.max_k=4")
        if key in found.setdefault(maker, {}):
            raise InvalidInput(f"--set {pair!r}: {name} is given twice")
        found[maker][key] = value
    return found


def _collective(
    text: str, cluster: Cluster, ranks: str | None, chunks: int | None, root: int | None, in_place: bool
) -> Collective:
    from ..algorithms import collective_kind
    from ..collectives import COLLECTIVES
    from ..errors import InvalidInput

    kind = collective_kind(text)
    devices = parse_ranks(ranks, cluster.num_devices)
    if kind in ("all_to_all_v", "permute"):
        raise InvalidInput(f"{kind}: its sizes have no place on a command line; call stretto.synthesize")
    options: dict[str, Any] = {"in_place": in_place}
    if chunks is not None:
        if not 1 <= chunks <= 1 << 16:
            raise InvalidInput(f"--chunks: must be 1..{1 << 16}, not {chunks}")
        options["chunks"] = chunks
    return COLLECTIVES[kind](devices, **options, **check_root(kind, root))


def _sketch(path: Path) -> Any:
    from ..synthesis.sketch import Sketch

    return Sketch.load(path)


@contextmanager
def _live(budget_s: float) -> Iterator[Callable[[str, float], None]]:
    """One line on stderr, if that is a terminal: the best so far, who is at work, how much time is left."""
    from rich.progress import BarColumn, Progress, TextColumn

    console = progress_console()
    bar = Progress(
        TextColumn("{task.fields[left]}"),
        BarColumn(bar_width=20),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
    )
    began = time.monotonic()
    task = bar.add_task("starting", total=1.0, left="")

    def progress(message: str, fraction: float) -> None:
        from rich.markup import escape

        left = max(0.0, budget_s - (time.monotonic() - began))
        bar.update(task, completed=fraction, description=escape(message), left=f"{left:.0f} s left")

    if not console.is_terminal:
        yield lambda message, fraction: None
        return
    with bar:
        yield progress


def _print_candidates(console: Console, found: Synthesis, show_all: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from ..units import format_bytes, format_us

    certificate = found.certificate
    timed = [c for c in found.candidates if c.time_us is not None]
    shown = timed if show_all else _best_of_each(timed, certificate.program)[:SHOWN]
    table = Table(box=None, pad_edge=False)
    for heading, justify in (("program", "left"), ("time", "right"), ("gap", "right"), ("made in", "right")):
        table.add_column(heading, justify="left" if justify == "left" else "right")
    table.add_column("maker")
    for candidate in shown:
        took = candidate.time_us or 0.0
        chosen = (candidate.name, candidate.maker) == (certificate.program, certificate.maker)
        table.add_row(
            Text(candidate.name),
            format_us(took),
            _gap(took, certificate.bound_us),
            f"{candidate.seconds:.2f} s",
            Text(f"{candidate.maker} (too long for a file)" if candidate.reason else candidate.maker),
            style="bold" if chosen else "dim" if candidate.reason else "",
        )
    table.add_row("lower bound", format_us(certificate.bound_us), "", "", Text(""), style="dim")
    console.print(table)
    if len(shown) < len(timed):
        console.print(f"{len(timed) - len(shown)} more candidates: --all lists them", style="dim")
    for candidate in found.candidates:
        if candidate.time_us is None:
            console.print(Text(f"{candidate.maker}: {candidate.reason}", style="dim"), soft_wrap=True)
    console.print()
    console.print(
        Text(
            f"{certificate.collective} of {format_bytes(certificate.nbytes)} on {certificate.cluster} "
            f"(alpha {certificate.alpha}, contention {certificate.contention}): "
        ),
        Text(format_us(certificate.time_us), style="bold"),
        Text(f"by {certificate.maker}, {_gap(certificate.time_us, certificate.bound_us)} above the lower bound"),
        soft_wrap=True,
    )
    console.print(Text(f"the bound: {certificate.bound_reason} ({certificate.bound_method})"), soft_wrap=True)
    source = "from the cache, proved and simulated anew" if found.cached else f"searched {certificate.search_s:.1f} s"
    console.print(source, style="dim")
    if found.lowering is not None:
        lowering = found.lowering
        console.print(
            Text(
                f"as instruction streams {format_us(lowering.time_us)}, "
                f"{_gap(lowering.time_us, certificate.bound_us)} above the bound: {lowering.instances} instances, "
                f"{lowering.lowered.num_channels} channels, FIFO depth {lowering.fifo_depth}"
            )
        )


def _print_selection(console: Console, table: Selection) -> None:
    from rich.table import Table
    from rich.text import Text

    from ..units import format_bytes, format_us

    view = Table(box=None, pad_edge=False, title=f"{table.collective} on {table.cluster}", title_justify="left")
    for heading in ("bytes", "time", "bound", "gap", "used for"):
        view.add_column(heading, justify="right")
    for heading in ("program", "maker"):
        view.add_column(heading)
    for row in table.rows():
        low, high = int(row["min_bytes"]), int(row["max_bytes"])
        used = f"{format_bytes(low) if low else '0'}..{format_bytes(high) if high else ''}"
        view.add_row(
            format_bytes(row["nbytes"]),
            format_us(row["time_us"]),
            format_us(row["bound_us"]),
            _gap(row["time_us"], row["bound_us"]),
            used,
            Text(row["program"]),
            Text(row["maker"]),
        )
    console.print(view)


def _best_of_each(timed: Sequence[Candidate], chosen: str) -> list[Candidate]:
    """The fastest candidate of every maker, and the chosen one; they come sorted."""
    first: dict[str, Candidate] = {}
    for candidate in timed:
        first.setdefault(candidate.maker, candidate)
    return [c for c in timed if first[c.maker] is c or c.name == chosen]


def _gap(time_us: float, bound_us: float) -> str:
    return f"{100 * (time_us / bound_us - 1):.2f} %" if bound_us > 0 else "-"


def _row(found: Synthesis, candidate: Candidate) -> dict[str, object]:
    certificate = found.certificate
    return {
        "case": f"{certificate.collective} on {certificate.cluster}",
        "system": "stretto",
        "maker": candidate.maker,
        "program": candidate.name,
        "cluster": certificate.cluster,
        "collective": certificate.collective,
        "nbytes": certificate.nbytes,
        "time_us": candidate.time_us,
        "bound_us": certificate.bound_us,
        "synth_s": candidate.seconds,
        "reason": candidate.reason,
    }
