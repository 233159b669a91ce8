# SPDX-License-Identifier: Apache-2.0
"""``stretto synth``: search the best program for a collective on a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from ..algorithms import collective_kind
from ..cluster import Cluster
from ..collectives import COLLECTIVES, Collective
from ..errors import InvalidInput, unknown
from ..files import read_text
from ..programs import Program
from ..programs.formats import SUFFIXES, load_program
from ..report.bars_html import bars_html
from ..report.html import Section, sweep_section, timeline_section, write_html
from ..report.load_html import LOAD_SLOTS
from ..report.sweep import Sweep
from ..report.table import ResultTable
from ..report.table_html import table_html
from ..simulator import Runtime, simulate
from ..synthesis import Candidate, SearchStopped, Selection, Synthesis, select, synthesize
from ..synthesis import certificate as certificates
from ..synthesis.certificate import Certificate, Lowering, certificate_path
from ..synthesis.helpers import in_words
from ..synthesis.sketch import Sketch
from ..units import format_bytes, format_us
from .common import (
    check_root,
    out,
    parse_all_sizes,
    parse_limits,
    parse_names,
    parse_ranks,
    progress_console,
    quoted,
    with_multicast,
)
from .completion import collective_names
from .options import (
    AllOption,
    AlphaOption,
    BackendOption,
    BudgetOption,
    BytesOption,
    ClusterOption,
    ContentionOption,
    FactorOption,
    HtmlOption,
    JobsOption,
    JsonOption,
    RanksOption,
    RayOption,
    RootOption,
    RuntimeOption,
    SeedOption,
)
from .outputs import Output, OutputFiles, output
from .session import INTERRUPTED, SESSION

Found = TypeVar("Found")
SHOWN = 12
LOSS = 0.02
"""The share of its time that a file may lose to its program before that is said."""

TargetOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE|DIR",
        callback=output(*SUFFIXES, folder=True),
        help="Write the program (.txt, .xml for MSCCL, .json for MSCCL++) with its certificate beside it; "
        "for several sizes a folder.",
    ),
]
FormatOption = Annotated[
    str | None,
    typer.Option("--format", metavar="xml|json|txt", help="Format of the files in that folder. Default: xml."),
]
LowOption = Annotated[
    str | None,
    typer.Option(
        "--min-bytes", metavar="SIZE", help="Smallest call that the written file is for. Default: half of --bytes."
    ),
]
HighOption = Annotated[
    str | None,
    typer.Option("--max-bytes", metavar="SIZE", help="Largest one; 0: no limit. Default: just below twice --bytes."),
]
MulticastOption = Annotated[
    bool | None,
    typer.Option(
        "--multicast/--no-multicast",
        help="Whether switches can copy a message to several ports. Default: as the cluster says.",
    ),
]
HelpersOption = Annotated[
    str | None,
    typer.Option(
        "--helpers",
        metavar="none|host|all|LIST",
        help="Devices outside --ranks that may forward and add: those on its hosts, all, or a list such as 4-7. "
        "Default: none, or where the group is apart without them those on its hosts.",
    ),
]
FromOption = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="The .txt program of the cluster before links failed or became slower, with its certificate beside it: "
        "search from there, in a tenth of --budget.",
    ),
]
BY_SWITCH = "a switch adds up and copies: proved by the reader, not run on a GPU, its price not measured"
LowerOption = Annotated[
    bool,
    typer.Option(
        "--lower",
        help="Judge programs as instruction streams, search instances and FIFO depth. Implied by .xml and .json.",
    ),
]

SketchOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A communication sketch: YAML, or TACCL's JSON.")
]
MakersOption = Annotated[
    str | None,
    typer.Option(metavar="NAME,NAME", help="Ask only these, such as forest,library:ring. Default: all."),
]
MakerSettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="MAKER.KEY=VALUE", help="An option of one maker, such as forest.max_k=4."),
]
CollectiveArgument = Annotated[
    str,
    typer.Argument(
        metavar="COLLECTIVE",
        autocompletion=collective_names,
        help="allgather, reduce_scatter, allreduce, alltoall, broadcast, ...",
    ),
]


def synth(
    collective: CollectiveArgument,
    cluster: ClusterOption,
    nbytes: BytesOption = "64M",
    factor: FactorOption = 4.0,
    target: TargetOption = None,
    form: FormatOption = None,
    min_bytes: LowOption = None,
    max_bytes: HighOption = None,
    multicast: MulticastOption = None,
    ranks: RanksOption = None,
    helpers: HelpersOption = None,
    base: FromOption = None,
    chunks: Annotated[int | None, typer.Option(help="Chunks per shard to begin with; makers may cut finer.")] = None,
    root: RootOption = None,
    in_place: Annotated[bool, typer.Option("--in-place", help="Input and output share memory.")] = False,
    sketch: SketchOption = None,
    budget: BudgetOption = 30.0,
    jobs: JobsOption = 1,
    backend: BackendOption = "processes",
    ray_address: RayOption = None,
    makers: MakersOption = None,
    settings: MakerSettingsOption = None,
    alpha: AlphaOption = "pipelined",
    contention: ContentionOption = None,
    lower: LowerOption = False,
    runtime: RuntimeOption = None,
    seed: SeedOption = 0,
    cache: Annotated[bool, typer.Option("--cache/--no-cache", help="Use results of earlier searches.")] = True,
    show_all: AllOption = False,
    html: HtmlOption = None,
    rows: JsonOption = None,
) -> None:
    """Search the fastest program for a collective, and say how far it is from optimal.

    Everybody who can make one is asked: the algorithm library, spanning trees, flows, greedy search, sketches, exact
    search. Each program is proved right and simulated; the best is written with a certificate: its time, a bound that
    no algorithm beats, who made it and how long that took. For several sizes: where to switch. Ctrl-C ends the search
    with what was found so far.

    \b
    Examples:
      stretto synth allgather -c dgx2:2 -b 64M -o ag.xml
      stretto synth allreduce -c ndv2:2 -b 1M --budget 60 --jobs 2
      stretto synth alltoall -c dgx2:2 -b 1K..1G -o tables/
      stretto synth allgather -c ndv2:2 --sketch my.yaml
      stretto synth allgather -c dgx_a100 --makers forest --set forest.max_k=2
      stretto synth allgather -c topology.xml -b 16M -o ag.xml
      stretto synth allgather -c dgx2:2 --multicast -o ag.txt
      stretto synth allgather -c broken.yaml -b 64M --from ag.txt -o repaired.txt
      stretto synth allreduce -c dgx_h200 -b 1M --runtime mscclpp:h200 -o ar.json
      stretto synth allgather -c dgx_h100:4 --ranks 0,8,16,24 --helpers host -o ag.txt
    """
    sizes = parse_all_sizes(nbytes, factor)
    limits = parse_limits(min_bytes, max_bytes)
    suffix, streams = _check_target(target, form, limits, table=len(sizes) > 1)
    _check_rows(rows, target, table=len(sizes) > 1)
    machine = with_multicast(Cluster.load(cluster), multicast)
    wanted = _collective(collective, machine, ranks, chunks, root, in_place)
    options: dict[str, Any] = {
        "budget_s": budget, "sketch": None if sketch is None else Sketch.load(sketch), "alpha": alpha,
        "contention": contention, "seed": seed, "jobs": jobs, "backend": backend, "ray_address": ray_address,
        "cache": cache, "makers": parse_names(makers), "maker_options": _maker_options(settings or []),
        "lower": streams or lower, "runtime": None if runtime is None else Runtime.load(runtime),
        "helpers": _helpers(helpers, machine),
        "base": None if base is None else _base(base),
    }  # fmt: skip
    if len(sizes) > 1:
        _table(wanted, machine, sizes, options, target=target, suffix=suffix, html=html, rows=rows)
    else:
        _single(wanted, machine, sizes[0], options, target=target, limits=limits, html=html, rows=rows, every=show_all)


def _single(
    wanted: Collective, machine: Cluster, nbytes: int, options: dict[str, Any], *, target: Path | None,
    limits: dict[str, int], html: Path | None, rows: Path | None, every: bool,
) -> None:  # fmt: skip
    """The best program for one size."""
    with _live(options["budget_s"]) as progress:
        found, stopped = _searched(lambda: synthesize(wanted, machine, nbytes, progress=progress, **options))
    table = _candidates_table(found, every)
    files = OutputFiles()
    files.write(target, lambda path: found.save(path, **limits))
    files.json(rows, {"rows": [_row(found, candidate) for candidate in found.candidates]})
    title = f"{wanted.kind} of {format_bytes(nbytes)} on {machine.name}"
    files.write(html, lambda path: _page(path, title, found, table, machine, options))
    _print_candidates(out(), found, table, every)
    files.tell(f"stretto program run {quoted(target)}" if target is not None else "")
    _end(stopped)


def _searched(search: Callable[[], Found]) -> tuple[Found, bool]:
    """What a search returns, or had found when Ctrl-C stopped it; and whether it was stopped."""
    try:
        return search(), False
    except SearchStopped as stop:
        return stop.found, True


def _end(stopped: bool) -> None:
    """End the command with the exit code of Ctrl-C where the search was stopped, although there are results."""
    if stopped:
        raise typer.Exit(INTERRUPTED)


def _page(
    path: Path, title: str, found: Synthesis, table: ResultTable, cluster: Cluster, options: dict[str, Any]
) -> None:
    """The page of one size: what was found beside the bound, and the links of the best over time."""
    certificate, heading = found.certificate, "Programs against the lower bound"
    times = [(candidate.name, candidate.time_us or 0.0) for candidate in _shown(found, every=False)]
    modes = {key: options[key] for key in ("contention", "alpha")}
    timeline = simulate(found.program, cluster, nbytes=certificate.nbytes, load_slots=LOAD_SLOTS, **modes)
    bars = bars_html(times, bound_us=certificate.bound_us, label=heading)
    write_html(path, title=title, sections=[
        Section(heading=heading, body=bars + table_html(table)),
        timeline_section(timeline, f"Link load: {certificate.program}"),
    ])  # fmt: skip


def _table(
    wanted: Collective, machine: Cluster, sizes: Sequence[int], options: dict[str, Any], *, target: Path | None,
    suffix: str, html: Path | None, rows: Path | None,
) -> None:  # fmt: skip
    """The best program for each of several sizes, and where to switch from one to the next."""
    with _live(options["budget_s"] * len(sizes)) as progress:
        chosen, stopped = _searched(lambda: select(wanted, machine, sizes, progress=progress, **options))
    view = _selection_table(chosen)
    files = OutputFiles()
    files.write(target, lambda path: chosen.save(path, suffix=suffix))
    files.json(rows, {"rows": chosen.rows()})
    files.write(html, lambda path: _sizes_page(path, chosen, view))
    out().print(view)
    for note in dict.fromkeys(choice.synthesis.certificate.cut for choice in chosen.choices):
        if note:
            out().print(Text(f"with more time a better one may be found: {note}"), soft_wrap=True)
    searched = {point[0] for choice in chosen.choices for point in choice.points}
    late = [format_bytes(size) for size in sizes if size not in searched]
    if late:
        out().print(Text(f"not searched: {', '.join(late)}"), soft_wrap=True)
    if any(choice.synthesis.certificate.by_switch for choice in chosen.choices):
        out().print(BY_SWITCH, soft_wrap=True)
    lost = _lost(chosen) if target is not None and options["runtime"] is None else ""
    if lost:
        out().print(lost, markup=False)
    files.tell()
    _end(stopped)


def _lost(chosen: Selection) -> str:
    """What files of instruction streams lose against the best program, where that is more than `LOSS`; else nothing."""
    worst = 0.0
    for synthesis in (choice.synthesis for choice in chosen.choices):
        took_us = synthesis.certificate.lowered_us
        times = [candidate.time_us for candidate in synthesis.candidates if candidate.time_us is not None]
        if took_us is not None and times and min(times) > 0:
            worst = max(worst, took_us / min(times) - 1)
    if worst <= LOSS:
        return ""
    return (
        f"these files are up to {100 * worst:.0f} % slower than the best programs, whose routes they cannot name; "
        "--format txt keeps them whole, for the backend stretto (STRETTO_TABLE)"
    )


def _sizes_page(path: Path, chosen: Selection, view: ResultTable) -> None:
    """The page of several sizes: the best of each against the bound."""
    found = chosen.rows()
    sweep = Sweep(
        cluster=chosen.cluster, collective=chosen.collective, sizes=tuple(int(row["nbytes"]) for row in found),
        bound_us=tuple(float(row["bound_us"]) for row in found),
        time_us={"best found": tuple(float(row["time_us"]) for row in found)},
    )  # fmt: skip
    table = Section(heading="Programs", body=table_html(view))
    write_html(path, title=f"{chosen.collective} on {chosen.cluster}", sections=[sweep_section(sweep), table])


def _check_target(target: Path | None, form: str | None, limits: dict[str, int], *, table: bool) -> tuple[str, str]:
    """The ending of the files to write and the format to lower for; a wrong path is refused before the search."""
    if form is not None and not (table and target is not None):
        raise InvalidInput(
            "--format: is for the folder of several --bytes and --output; a file's ending says its format"
        )
    if limits and (table or target is None):
        option = next(iter(limits)).replace("_", "-")
        raise InvalidInput(
            f"--{option}: is for the file of --output; files of several --bytes share all sizes among them"
        )
    if target is None:
        return "", ""
    suffix = f".{form or 'xml'}" if table else target.suffix
    if table and suffix not in SUFFIXES:
        raise unknown("format", form or "", [ending.removeprefix(".") for ending in SUFFIXES])
    if table and target.suffix in SUFFIXES and not target.is_dir():
        raise InvalidInput(
            f"--output: {target}: several --bytes make several files; name a directory, without an ending"
        )
    (Output(folder=True) if table else Output(suffixes=tuple(SUFFIXES))).check(target, "--output")
    return suffix, "" if SUFFIXES[suffix] == "text" else SUFFIXES[suffix]


def _check_rows(rows: Path | None, target: Path | None, *, table: bool) -> None:
    """Refuse a file for the numbers that would replace one of the files that come with the programs."""
    if rows is None or target is None:
        return
    if table and rows.resolve().parent == target.resolve():
        raise InvalidInput(f"--json: {rows}: lies in the folder of --output, which has an index of its own")
    if not table and rows.resolve() == certificate_path(target).resolve():
        raise InvalidInput(f"--json: {rows}: is also the certificate of --output, and would replace it")


def _base(path: Path) -> Synthesis | Program:
    """The program of an earlier search, with its certificate where that stands beside it."""
    program = load_program(path)
    if not isinstance(program, Program):
        raise InvalidInput(f"--from {path}: must be a program in the text form (.txt)")
    beside = certificate_path(path)
    if not beside.exists():
        return program
    certificate, candidates = certificates.loads(read_text(beside), where=str(beside))
    return Synthesis(program=program, certificate=certificate, candidates=candidates)


def _helpers(text: str | None, cluster: Cluster) -> str | tuple[int, ...] | None:
    """The devices that may help: a word as it is, or a list of devices."""
    if text is None or not any(letter.isdecimal() for letter in text):
        return text
    return parse_ranks(text if "," in text or "-" in text else f"{text}-{text}", cluster.num_devices, "--helpers")


def _maker_options(pairs: list[str]) -> dict[str, dict[str, str]]:
    """Options of makers as ``maker.key=value``; their values are read by the makers they are for."""
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


@contextmanager
def _live(budget_s: float) -> Iterator[Callable[[str, float], None]]:
    """One line on stderr, if that is a terminal: the best so far, who is at work, how much time is left."""
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
        left = max(0.0, budget_s - (time.monotonic() - began))
        bar.update(task, completed=fraction, description=escape(message), left=f"{left:.0f} s left")

    if not console.is_terminal or SESSION.quiet:
        yield lambda message, fraction: None
        return
    with bar:
        yield progress


def _candidates_table(found: Synthesis, every: bool) -> ResultTable:
    """What was timed, the fastest first, and the bound."""
    certificate = found.certificate
    table = ResultTable("program", ">time", ">gap", ">made in", "maker")
    for candidate in _shown(found, every):
        took = candidate.time_us or 0.0
        chosen = (candidate.name, candidate.maker) == (certificate.program, certificate.maker)
        table.add_row(
            candidate.name,
            format_us(took),
            _gap(took, certificate.bound_us),
            f"{candidate.seconds:.2f} s",
            f"{candidate.maker} (too long for a file)" if candidate.reason else candidate.maker,
            style="bold" if chosen else "dim" if candidate.reason else "",
        )
    table.add_row("lower bound", format_us(certificate.bound_us), "", "", "", style="dim")
    return table


def _shown(found: Synthesis, every: bool) -> list[Candidate]:
    timed = [candidate for candidate in found.candidates if candidate.time_us is not None]
    return timed if every else _best_of_each(timed, found.certificate.program)[:SHOWN]


def _print_candidates(console: Console, found: Synthesis, table: ResultTable, every: bool) -> None:
    certificate = found.certificate
    console.print(table)
    hidden = sum(candidate.time_us is not None for candidate in found.candidates) - len(_shown(found, every))
    if hidden:
        console.print(f"{hidden} more candidates: --all lists them", style="dim")
    for candidate in found.candidates:
        if candidate.time_us is None:
            why = candidate.reason.removeprefix(f"{candidate.maker.partition(':')[0]}: ")
            console.print(Text(f"{candidate.maker}: {why}", style="dim"), soft_wrap=True)
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
    console.print(Text(f"the bound: {_bound_text(certificate)}"), soft_wrap=True)
    if certificate.helpers:
        console.print(Text(in_words(certificate.helpers)), soft_wrap=True)
    console.print(
        "from the cache, proved and simulated anew" if found.cached else _search_text(certificate), style="dim"
    )
    if found.lowering is not None:
        console.print(Text(_lowering_text(found.lowering, certificate)), soft_wrap=True)
        if certificate.by_switch:
            console.print(BY_SWITCH, soft_wrap=True)
        if certificate.unfit_for_old:
            console.print(f"the original MSCCL runtime cannot load it: {certificate.unfit_for_old}", soft_wrap=True)
    if certificate.cut:
        console.print(Text(f"with more time a better one may be found: {certificate.cut}"), soft_wrap=True)


def _bound_text(certificate: Certificate) -> str:
    """The argument of the lower bound, with its method where the argument does not name it."""
    reason, method = certificate.bound_reason, certificate.bound_method
    return reason if method in reason or reason.startswith("latency: ") else f"{reason} ({method})"


def _search_text(certificate: Certificate) -> str:
    """How long the search took, and why where that is more than it was given."""
    took = f"searched {certificate.search_s:.1f} s"
    if certificate.search_s < certificate.budget_s * 1.05 + 0.1:
        return took
    return f"{took}, with a budget of {certificate.budget_s:g} s: what was under way was finished, proved and simulated"


def _lowering_text(lowering: Lowering, certificate: Certificate) -> str:
    """How the program is carried out, and what that takes."""
    where = f" on {certificate.runtime}" if certificate.runtime else ""
    took = f"{format_us(lowering.time_us)}{where}, {certificate.runtime_gap_text}"
    if lowering.form is not None:
        return f"as a plan of wide steps {took}: {lowering.form}"
    if lowering.steps:
        return f"as fused steps {took}: {lowering.steps}"
    parts = (
        f"{lowering.instances} instances, {lowering.lowered.num_channels} channels, FIFO depth {lowering.fifo_depth}"
    )
    return f"as instruction streams {took}: {parts}"


def _selection_table(chosen: Selection) -> ResultTable:
    view = ResultTable(">bytes", ">time", ">bound", ">gap", ">used for", "program", "maker",
                       title=f"{chosen.collective} on {chosen.cluster}")  # fmt: skip
    for row in chosen.rows():
        low, high = int(row["min_bytes"]), int(row["max_bytes"])
        view.add_row(
            format_bytes(row["nbytes"]),
            format_us(row["time_us"]),
            format_us(row["bound_us"]),
            _gap(row["time_us"], row["bound_us"]),
            f"{format_bytes(low) if low else '0'}..{format_bytes(high) if high else ''}",
            row["program"],
            row["maker"],
        )
    return view


def _best_of_each(timed: Sequence[Candidate], chosen: str) -> list[Candidate]:
    """The fastest candidate of every maker, and the chosen one; they come sorted."""
    first: dict[str, Candidate] = {}
    for candidate in timed:
        first.setdefault(candidate.maker, candidate)
    return [c for c in timed if first[c.maker] is c or c.name == chosen]


def _gap(time_us: float, bound_us: float) -> str:
    return f"{100 * (time_us / bound_us - 1) + 0.0:.2f} %".replace("-0.00", "0.00") if bound_us > 0 else "-"


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
