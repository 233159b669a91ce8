# SPDX-License-Identifier: Apache-2.0
"""``stretto simulate``: how long an algorithm, all of them, or a program file takes on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..algorithms import algorithm, algorithms, collective_kind
from ..algorithms import names as known_names
from ..algorithms.hierarchical import suited_to
from ..algorithms.registry import entry
from ..algorithms.symmetric import ONE_DIMENSION, symmetric_algorithm, symmetric_hierarchical
from ..cluster import Cluster
from ..collectives.files import load_collective
from ..errors import InvalidInput, StrettoError, VerificationError, unknown
from ..programs import Lowered, Program, SymmetricProgram
from ..programs.formats import SUFFIXES, load_program, save_program
from ..report import html, save_timeline, write_chrome_json, write_perfetto
from ..report.load_html import LOAD_SLOTS
from ..report.plots import busy_plot, sweep_plot
from ..report.sweep import Sweep, run_sweep
from ..report.tables import comparison_table, sweep_table, timeline_tables
from ..simulator import Runtime, Timeline
from ..simulator import simulate as simulated
from ..simulator.bounds import Bound, lower_bound
from . import plan
from .common import out, parse_all_sizes, parse_names, parse_options, parse_ranks, plot_width, progress, quoted
from .completion import algorithm_names, collective_names
from .options import (
    AlphaOption,
    BytesOption,
    ChannelsOption,
    ChunksOption,
    ContentionOption,
    FactorOption,
    HtmlOption,
    JsonOption,
    OptionalCluster,
    OptionalWorkload,
    RanksOption,
    RootOption,
    RuntimeOption,
    SettingsOption,
    TraceOption,
)
from .outputs import OutputFiles, output

Runnable = Program | SymmetricProgram | Lowered
ALL = "all"
MAX_HEAD = 200
"""The bytes of a file within which a plan says that it is one."""
MANY = 256
"""The most ranks for which an algorithm that has a symmetric form is simulated rank by rank all the same."""

WhatArgument = Annotated[
    str,
    typer.Argument(
        metavar="ALGORITHM|all|FILE",
        autocompletion=algorithm_names,
        help="An algorithm, all of them, a text or MSCCL file, or the plan of a training step.",
    ),
]
WhatForArgument = Annotated[
    str | None,
    typer.Argument(metavar="[COLLECTIVE]", autocompletion=collective_names, help="The same as --collective."),
]
CollectiveOption = Annotated[
    str | None,
    typer.Option(
        "--collective",
        metavar="NAME|FILE",
        autocompletion=collective_names,
        help="Default: all_reduce. For an MSCCL file of coll=custom: what it must achieve, a file.",
    ),
]
ProgramOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE.txt|xml|json",
        callback=output(*SUFFIXES),
        help="Write the program: text, MSCCL or MSCCL++.",
    ),
]


def simulate(
    context: typer.Context,
    what: WhatArgument,
    cluster: OptionalCluster = None,
    what_for: WhatForArgument = None,
    workload: OptionalWorkload = None,
    nbytes: BytesOption = "64M",
    factor: FactorOption = 4.0,
    collective: CollectiveOption = None,
    ranks: RanksOption = None,
    chunks: ChunksOption = None,
    root: RootOption = None,
    settings: SettingsOption = None,
    contention: ContentionOption = None,
    alpha: AlphaOption = "pipelined",
    channels: ChannelsOption = None,
    runtime: RuntimeOption = None,
    symmetric: Annotated[
        bool,
        typer.Option("--symmetric", help="Let one rank stand for all (hierarchical, on networks of dimensions)."),
    ] = False,
    program_file: ProgramOption = None,
    html_file: HtmlOption = None,
    rows: JsonOption = None,
    trace: TraceOption = None,
    chrome_json: Annotated[
        Path | None, typer.Option(metavar="FILE.json", callback=output(".json"), help="Write a Chrome trace.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE.json", callback=output(".json"), help="Write the timeline itself.")
    ] = None,
) -> None:
    """Say how long a collective takes on a cluster, and how far that is from the lower bound.

    One algorithm, one size: channels, busiest links, critical path, who sends when. Several of either: a plot against
    the bound and a table; files are then of the fastest algorithm at the largest size. Programs are verified first.

    \b
    Examples:
      stretto simulate ring -c dgx2:2 -b 64M
      stretto simulate all -c dgx2:2 -b 1K..1G --html sweep.html
      stretto simulate ring all_gather -c hgx2:4 --trace t.pftrace
      stretto simulate ring -c dgx_a100:2 --set rings=2 -o ring.xml
      stretto simulate my_algorithm.txt -c ndv2:2 -b 1M
      stretto simulate algorithm.xml -c dgx_a100 -b 64M
      stretto simulate all -c dgx_h200 -b 1K..1G --runtime mscclpp:h200
      stretto simulate hierarchical --symmetric --chunks 64 -c themis_2d_sw_sw
      stretto simulate plan.json --trace plan.pftrace
    """
    if _is_plan(what):
        _refuse_all_but(context, {"what", "cluster", "workload", "html_file", "trace", "rows"})
        plan.retime(Path(what), workload, cluster, html=html_file, trace=trace, rows=rows)
        return
    cluster = _cluster_of(what, cluster, workload)
    what, collective = _in_order(what, what_for, collective)
    sizes = parse_all_sizes(nbytes, factor)
    names = parse_names(channels)
    job = SimulationSetup(
        cluster=Cluster.load(cluster),
        contention=contention,
        alpha=alpha,
        channels=None if names is None else tuple(names),
        runtime=None if runtime is None else Runtime.load(runtime),
    )
    options = parse_options(settings or []) | ({} if root is None else {"root": root})
    alike = None if symmetric or ranks or options or runtime else _one_for_all(what, job, collective, chunks, sizes)
    find = _symmetric if symmetric else _programs
    programs, left_out = {} if alike is None else {what: alike}, dict[str, str]()
    if alike is None:
        programs, left_out = find(what, job.cluster, collective, ranks, chunks, options)
    sweep, fastest = job.sweep(programs, sizes, left_out)
    files = OutputFiles()
    files.json(rows, {"rows": sweep.rows()})
    files.write(program_file, lambda path: _save_program(programs[sweep.best(len(sizes) - 1)], job.cluster, path))
    if html_file is not None:
        fastest = job.run(programs[sweep.best(len(sizes) - 1)], sizes[-1], load_slots=LOAD_SLOTS)
    _write(files, fastest, sweep, page=html_file, trace=trace, chrome_json=chrome_json, timeline_file=timeline)
    _print(job, programs, sweep, fastest)
    then = f"stretto program verify {quoted(program_file)}" if program_file is not None else ""
    files.tell(then or f"stretto synth {sweep.collective} -c {quoted(cluster)} -b {quoted(nbytes)}")


def _is_plan(what: str) -> bool:
    """Whether a word is the file of a training step's plan."""
    path = Path(what)
    return path.suffix == ".json" and path.is_file() and b'"stretto": "plan"' in path.read_bytes()[:MAX_HEAD]


def _cluster_of(what: str, cluster: str | None, workload: str | None) -> str:
    """The cluster that an algorithm or a program needs; a workload is for plans alone."""
    if cluster is None:
        raise InvalidInput("Missing option '--cluster' / '-c'; see 'stretto simulate --help'")
    if workload is not None:
        raise InvalidInput(f"--workload: is for a plan of 'stretto plan -o', which {what} is not")
    return cluster


def _refuse_all_but(context: typer.Context, taken: Collection[str]) -> None:
    """Refuse options that say nothing about a plan, which has its programs, sizes and order in itself."""
    for param in context.command.params:
        source = getattr(context.get_parameter_source(param.name or ""), "name", "")
        if source == "COMMANDLINE" and param.name not in taken:
            raise InvalidInput(f"{max(param.opts, key=len)}: a plan says this itself")


def _in_order(what: str, what_for: str | None, collective: str | None) -> tuple[str, str | None]:
    """The algorithm and the collective, whichever of the two was named first."""
    if _is_collective(what) and what_for is None:
        raise InvalidInput(f"{what}: is a collective; say of which algorithm, or of all: stretto simulate all {what}")
    if what_for is not None and collective is not None:
        raise InvalidInput(f"--collective {collective}: {what_for} is given too; leave one of the two out")
    if _is_collective(what) and what_for is not None:
        what, what_for = what_for, what
    return what, what_for or collective


def _is_collective(text: str) -> bool:
    try:
        return text not in known_names() and bool(collective_kind(text))
    except InvalidInput:
        return False


def _print(job: SimulationSetup, programs: Mapping[str, Runnable], sweep: Sweep, fastest: Timeline) -> None:
    console = out()
    if len(programs) == len(sweep.sizes) == 1:
        _print_one(console, job, next(iter(programs.values())), fastest, sweep.sizes[0])
    else:
        _print_many(console, sweep)


def _save_program(program: Runnable, cluster: Cluster, path: Path) -> None:
    save_program(program, path, hosts=cluster.hosts_of(program.collective.ranks).tolist())


@dataclass(frozen=True, kw_only=True)
class SimulationSetup:
    """The cluster and how to simulate on it."""

    cluster: Cluster
    contention: str | None = None
    alpha: str = "pipelined"
    channels: tuple[str, ...] | None = None
    runtime: Runtime | None = None

    def run(self, program: Runnable, nbytes: int, *, load_slots: int = 0) -> Timeline:
        """One program at one size.

        Args:
            program: The program.
            nbytes: The size.
            load_slots: Into how many parts of the time the load of links is divided; 0: it is not recorded.

        Returns:
            What happens when.
        """
        return simulated(
            program,
            self.cluster,
            nbytes=nbytes,
            contention=self.contention,
            alpha=self.alpha,
            channels=self.channels,
            runtime=self.runtime,
            load_slots=load_slots,
        )

    def bound(self, program: Runnable, nbytes: int) -> Bound:
        """The least time for what the program does."""
        return lower_bound(program.collective, self.cluster, nbytes, channels=self.channels)

    def sweep(
        self, programs: Mapping[str, Runnable], sizes: Sequence[int], left_out: Mapping[str, str]
    ) -> tuple[Sweep, Timeline]:
        """The times, and the timeline of the fastest program at the last size.

        Args:
            programs: The programs by name.
            sizes: The sizes.
            left_out: Why others were left out, by name.

        Returns:
            The times of all of them.
        """
        first = next(iter(programs.values()))
        fastest: list[Timeline] = []

        def time_us(name: str, size: int) -> float:
            timeline = self.run(programs[name], size)
            if size == sizes[-1] and (not fastest or timeline.total_us < fastest[0].total_us):
                fastest[:] = [timeline]
            return timeline.total_us

        with progress("simulating", len(sizes) * (len(programs) + 1)) as advance:
            sweep = run_sweep(
                list(programs),
                sizes,
                cluster=self.cluster.name,
                collective=first.collective.kind,
                time_us=time_us,
                bound_us=lambda size: self.bound(first, size).total_us,
                advance=advance,
                facts=self._facts,
                left_out=left_out,
            )
        return sweep, fastest[0]

    @property
    def _facts(self) -> tuple[tuple[str, str], ...]:
        facts = {
            "contention": self.contention,
            "alpha": self.alpha,
            "channels": self.channels and "+".join(self.channels),
            "runtime": self.runtime and self.runtime.name,
        }
        return tuple((key, value) for key, value in facts.items() if value)


def _programs(
    what: str,
    cluster: Cluster,
    collective: str | None,
    ranks: str | None,
    chunks: int | None,
    options: dict[str, Any],
) -> tuple[dict[str, Runnable], dict[str, str]]:
    """The programs by name, and why others are left out."""
    if what != ALL and what not in known_names():
        if not Path(what).exists():
            raise unknown("algorithm or file", what, (ALL, *known_names()))
        given = {"--ranks": ranks, "--chunks": chunks, "--set or --root": options}
        for flag, value in given.items():
            if value not in (None, {}):
                raise InvalidInput(f"{flag}: a program file says this itself")
        if collective is not None and not Path(collective).suffix:
            raise InvalidInput("--collective: a program file says this itself; one of coll=custom takes a file")
        return {Path(what).name: _read(what, collective)}, {}
    for key in options.keys() & {"name", "collective", "ranks", "cluster", "chunks"}:
        raise InvalidInput(f"--set {key}: not an option of an algorithm; 'stretto algorithms' lists them")
    kind = collective_kind(collective or "all_reduce")
    devices = parse_ranks(ranks, cluster.num_devices)

    def build(name: str) -> Program:
        try:
            return algorithm(name, kind, devices, cluster=cluster, chunks=chunks, **options)
        except (TypeError, ValueError) as error:
            # What --set reads from text may have another type than the algorithm expects.
            if not options:
                raise
            raise InvalidInput(f"--set: {', '.join(options)}: {error}") from None

    names = [entry.name for entry in algorithms(kind)] if what == ALL else [what]
    programs: dict[str, Runnable] = {}
    left_out: dict[str, str] = {}
    with progress("building", len(names)) as advance:
        for name in names:
            advance(name)
            try:
                programs[name] = build(name)
            except StrettoError as error:
                if what != ALL:
                    raise
                left_out[name] = str(error)
    if not programs:
        raise InvalidInput("; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
    return programs, left_out


def _one_for_all(
    what: str, job: SimulationSetup, collective: str | None, chunks: int | None, sizes: Sequence[int]
) -> Runnable | None:
    """The symmetric form of an algorithm for many ranks, where one rank stands for all: the same time for less work."""
    if job.cluster.num_devices <= MANY or not job.cluster.dimensions or what not in (*ONE_DIMENSION, "hierarchical"):
        return None
    try:
        kind = collective_kind(collective or "all_reduce")
        program = symmetric_algorithm(what, kind, job.cluster, chunks=entry(what).chunks if chunks is None else chunks)
        job.run(program, sizes[0])
    except InvalidInput:
        return None
    return program


def _symmetric(
    what: str,
    cluster: Cluster,
    collective: str | None,
    ranks: str | None,
    chunks: int | None,
    options: dict[str, Any],
) -> tuple[dict[str, Runnable], dict[str, str]]:
    """The hierarchical program of the cluster's dimensions, stored as rank 0's part of it."""
    if what != "hierarchical":
        raise InvalidInput(f"--symmetric: only hierarchical has a symmetric form, not {what}")
    if not cluster.dimensions or ranks is not None:
        raise InvalidInput("--symmetric: needs all devices of a cluster with regular dimensions, such as torus or ring")
    if set(options) - {"inside"}:
        raise InvalidInput(f"--symmetric: takes --set inside=..., not {', '.join(sorted(set(options) - {'inside'}))}")
    inside = options.get("inside", suited_to(cluster.dimensions))
    program = symmetric_hierarchical(
        collective_kind(collective or "all_reduce"),
        [d.size for d in cluster.dimensions],
        chunks=1 if chunks is None else chunks,
        inside=inside,
    )
    return {"hierarchical": program}, {}


def _read(path: str, collective: str | None) -> Runnable:
    program = load_program(path, collective=None if collective is None else load_collective(collective))
    if not isinstance(program, Program | SymmetricProgram | Lowered):
        raise InvalidInput(
            f"{path}: an MSCCL++ plan can be executed ('stretto program run') but not simulated; "
            f"simulate the program or the MSCCL XML it was made from"
        )
    try:
        program.verify()
    except VerificationError as error:
        raise VerificationError(f"{path}: {error}") from None
    return program


def _print_one(console: Console, job: SimulationSetup, program: Runnable, timeline: Timeline, nbytes: int) -> None:
    with progress("summing up", 1) as advance:
        advance("where the time went")
        tables = timeline_tables(timeline, cluster=job.cluster, bound=job.bound(program, nbytes))
        busy = busy_plot(timeline, width=plot_width(console))
    console.print(tables)
    console.print(busy, end="")


def _print_many(console: Console, sweep: Sweep) -> None:
    if len(sweep.sizes) == 1:
        console.print(comparison_table(sweep))
    else:
        console.print(sweep_plot(sweep, width=plot_width(console)))
        console.print(sweep_table(sweep, width=console.width))
    for name, reason in sweep.left_out.items():
        console.print(f"left out: {name}: {reason}", style="dim", markup=False)


def _write(
    files: OutputFiles,
    timeline: Timeline,
    sweep: Sweep,
    *,
    page: Path | None,
    trace: Path | None,
    chrome_json: Path | None,
    timeline_file: Path | None,
) -> None:
    program = dict(timeline.facts).get("program", "")

    def write_page(path: Path) -> None:
        sections = [html.timeline_section(timeline, f"Link load: {program}, {sweep.largest}")]
        if len(sweep.sizes) > 1:
            sections = [html.sweep_section(sweep), html.sweep_table_section(sweep), *sections]
        else:
            sections = [html.comparison_section(sweep), *sections]
        html.write_html(path, title=f"{sweep.collective} on {sweep.cluster}", sections=sections)

    def traced(write: Callable[[Timeline, Path], int], path: Path) -> str:
        with progress("writing", 1) as advance:
            advance(path.name)
            written = write(timeline, path)
        if written == timeline.num_spans:
            return ""
        return f", the lowest ranks: {written} of its {timeline.num_spans} transfers"

    files.write(page, write_page)
    files.write(trace, lambda path: traced(write_perfetto, path), program)
    files.write(chrome_json, lambda path: traced(write_chrome_json, path), program)
    files.write(timeline_file, lambda path: save_timeline(timeline, path))
