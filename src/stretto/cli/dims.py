# SPDX-License-Identifier: Apache-2.0
"""``stretto dims``: collectives over networks with several dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cluster import Cluster
from ..dimensions import Dim, DimRun, DimSchedule, advisor, dims_of, ideal_us, simulate
from ..dimensions.advisor import Advice, BandwidthSplit
from ..dimensions.model import COLLECTIVES
from ..dimensions.schedule import MAX_CHUNKS
from ..dimensions.systems import SCHEDULERS, plan
from ..dimensions.training import SYSTEMS, iteration
from ..errors import InvalidInput, unknown
from ..report.bars_html import bars_html
from ..report.dims_html import activity_plot, activity_section, iteration_section, sweep_section
from ..report.html import write_html
from ..report.table import ResultTable
from ..units import format_bytes, format_us
from ..workload import Workload
from .common import about, out, parse_all_sizes, parse_one_size, plot_width, progress, quoted
from .options import BytesOption, ClusterOption, FactorOption, HtmlOption, JsonOption, OneSizeOption
from .outputs import OutputFiles, output
from .pages import write_tables

ALL = "baseline,themis_fifo,themis_scf,stretto"
GIGABITS = 8
"""Gb/s per GB/s: this is how the networks' vendors, and the paper, count."""
MOST_GIGABITS = 1e9
TRAIN_COLUMNS = ("iteration", "forward", "backward", "data", "model", "gain", "used")

app = typer.Typer(
    no_args_is_help=True,
    help="""Networks with several dimensions (package, host, pod, ...): which dimension each chunk visits when.

    A collective goes through the dimensions one after the other. The first it visits sees all its bytes, the last
    hardly any. The usual order, inner to outer and back, leaves much of the bandwidth unused; other orders for other
    chunks use it.

    \b
    The schedulers:
      baseline      every chunk from the inner to the outer dimension and back
      themis_fifo   Themis: each chunk visits the least loaded dimension first
      themis_scf    the same; in a dimension the smallest chunk goes first
      stretto       ours: a linear program balances the dimensions, a simulator picks sizes, turns and queues

    \b
    Try:
      stretto dims compare -c themis_3d_sw_sw_sw_homo -b 1G
      stretto dims plot -c themis_3d_sw_sw_sw_homo -b 1G --html activity.html
      stretto dims sweep -c themis_4d_ring_fc_ring_sw -b 100M
      stretto dims train themis:dlrm -c themis_2d_sw_sw
      stretto dims advise -c themis_3d_sw_sw_sw_homo --gbit-per-s 2400
    """,
)

Kind = Annotated[str, typer.Option("--collective", help="all_reduce, reduce_scatter or all_gather.")]
Chunks = Annotated[int, typer.Option(help="Pieces that the data is cut into.")]
Flight = Annotated[
    int, typer.Option("--in-flight", help="Stages that share a dimension at a time: their latencies overlap.")
]
Sharing = Annotated[
    str,
    typer.Option(metavar="ordered|equal", help="Whether the first of them gets a dimension's rate, or all alike."),
]
Tracker = Annotated[
    str,
    typer.Option(metavar="whole|literal", help="How Themis counts loads: as in its Fig. 7, or Algorithm 1 as printed."),
]
Offload = Annotated[
    str, typer.Option("--in-network", metavar="N,N", help="Dimensions (from 1) whose switches reduce and multicast.")
]
Systems = Annotated[str, typer.Option("--schedulers", "-s", metavar="NAME,NAME", help="Which to show.")]


@app.command()
def schedule(
    cluster: ClusterOption,
    nbytes: OneSizeOption = "256M",
    system: Annotated[str, typer.Option("--scheduler", "-s", help=f"One of {ALL}.")] = "stretto",
    collective: Kind = "all_reduce",
    chunks: Chunks = 64,
    in_flight: Flight = 16,
    sharing: Sharing = "ordered",
    tracker: Tracker = "whole",
    in_network: Offload = "",
    target: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE.json", callback=output(".json"), help="Write the schedule."),
    ] = None,
    rows: JsonOption = None,
) -> None:
    """One schedule: which way how many chunks go, and how busy that keeps each dimension.

    The file holds the order in which each dimension begins its stages, too, so that devices can never disagree.

    \b
    Examples:
      stretto dims schedule -c themis_2d_sw_sw -b 100M
      stretto dims schedule -c themis_3d_fc_ring_sw -s themis_scf --collective reduce_scatter
      stretto dims schedule -c themis_2d_sw_sw -o all_reduce.json
    """
    dims, size = _dims(cluster, in_network), _size(nbytes)
    planned = _plan(system, dims, collective, size, chunks, in_flight, sharing, tracker)
    run = simulate(planned, in_flight=in_flight, sharing=sharing)
    files = OutputFiles()
    if target is not None:
        fixed = run.enforced()
        files.write(target, fixed.save, f"digest {fixed.digest}")
    files.json(rows, {
        "scheduler": system, "nbytes": size, "time_us": run.total_us, "utilization": run.utilization,
        "dims": [
            {"kind": dim.kind, "size": dim.size, "gb_per_s": dim.gb_per_s, "busy_us": float(run.busy_us[at])}
            for at, dim in enumerate(run.dims)
        ],
    })  # fmt: skip
    console = out()
    console.print(about(planned), style="bold", markup=False)
    console.print(about(run), markup=False)
    console.print()
    console.print(_ways_table(planned))
    console.print()
    console.print(_dims_table(run))
    files.tell()


@app.command()
def compare(
    cluster: ClusterOption,
    nbytes: BytesOption = "100M,256M,512M,1G",
    factor: FactorOption = 4.0,
    collective: Kind = "all_reduce",
    chunks: Chunks = 64,
    in_flight: Flight = 16,
    sharing: Sharing = "ordered",
    tracker: Tracker = "whole",
    in_network: Offload = "",
    html: HtmlOption = None,
    rows: JsonOption = None,
) -> None:
    """All schedulers beside the ideal: time, and the share of all bandwidth that is used.

    \b
    Examples:
      stretto dims compare -c themis_3d_sw_sw_sw_homo
      stretto dims compare -c themis_2d_sw_sw -b 1M..1G --in-flight 4
      stretto dims compare -c themis_2d_sw_sw --in-network 1,2
      stretto dims compare -c themis_2d_sw_sw --tracker literal
    """
    dims = _dims(cluster, in_network)
    sizes = parse_all_sizes(nbytes, factor)
    found: list[dict[str, Any]] = []
    with progress("scheduling", len(sizes)) as advance:
        for size in sizes:
            advance(format_bytes(size))
            for name in SCHEDULERS:
                planned = _plan(name, dims, collective, size, chunks, in_flight, sharing, tracker)
                run = simulate(planned, in_flight=in_flight, sharing=sharing)
                found.append({"nbytes": size, "system": name, "time_us": run.total_us, "utilisation": run.utilization})
            best = ideal_us(dims, collective, size)
            found.append({"nbytes": size, "system": "ideal", "time_us": best, "utilisation": 1.0})
    times = ResultTable(">bytes", *(f">{name}" for name in (*SCHEDULERS, "ideal")), title="time")
    used = ResultTable(">bytes", *(f">{name}" for name in SCHEDULERS), title="share of all bandwidth that is used")
    for size in sizes:
        here = [row for row in found if row["nbytes"] == size]
        times.add_row(format_bytes(size), *(format_us(row["time_us"]) for row in here))
        used.add_row(format_bytes(size), *(f"{100 * row['utilisation']:.1f} %" for row in here[:-1]))
    about_it = _about(cluster, collective, chunks, in_flight, sharing)
    files = OutputFiles()
    files.json(rows, {"rows": found})
    last = [(row["system"], row["time_us"]) for row in found if row["nbytes"] == sizes[-1]]
    label = f"{format_bytes(sizes[-1])} beside the ideal time"
    picture = bars_html(last[:-1], bound_us=last[-1][1], label=label)
    title = f"{collective} on {cluster}"
    files.write(html, lambda path: write_tables(path, title, times, used, note=about_it, picture=picture))
    console = out()
    console.print(about_it, markup=False, soft_wrap=True)
    console.print(times)
    console.print()
    console.print(used)
    files.tell(
        f"stretto dims plot -c {quoted(cluster)} -b {format_bytes(sizes[-1]).replace(' ', '')} --html activity.html"
    )


@app.command()
def plot(
    cluster: ClusterOption,
    nbytes: OneSizeOption = "1G",
    systems: Systems = ALL,
    collective: Kind = "all_reduce",
    chunks: Chunks = 64,
    in_flight: Flight = 16,
    sharing: Sharing = "ordered",
    tracker: Tracker = "whole",
    in_network: Offload = "",
    window: Annotated[
        float | None,
        typer.Option(metavar="US", help="The curves of --html and --json average over so much time (default 100)."),
    ] = None,
    html: HtmlOption = None,
    rows: JsonOption = None,
) -> None:
    """When each dimension has something to do (the paper's Fig. 9), one line per dimension; taller means busier.

    \b
    Examples:
      stretto dims plot -c themis_3d_sw_sw_sw_homo
      stretto dims plot -c themis_3d_sw_sw_sw_homo -s baseline,stretto --html activity.html
    """
    if window is not None and html is None and rows is None:
        raise InvalidInput("--window: is for the curves of --html and --json, and neither is given")
    dims, size = _dims(cluster, in_network), _size(nbytes)
    runs = [
        simulate(
            _plan(name, dims, collective, size, chunks, in_flight, sharing, tracker),
            in_flight=in_flight,
            sharing=sharing,
        )
        for name in _names(systems)
    ]
    files = OutputFiles()
    title = f"{collective} on {cluster}"
    averaged_us = 100.0 if window is None else window
    files.write(
        html, lambda path: write_html(path, title=title, sections=[activity_section(runs, window_us=averaged_us)])
    )
    if rows is not None:
        files.json(rows, {"window_us": averaged_us, "runs": [
            {"scheduler": run.schedule.name, "time_us": run.total_us, "utilization": run.utilization,
             "active": [shares.round(4).tolist() for shares in run.activity(averaged_us)]}
            for run in runs
        ]})  # fmt: skip
    console = out()
    console.print(_about(cluster, collective, chunks, in_flight, sharing), markup=False, soft_wrap=True)
    console.print(activity_plot(runs, width=plot_width(console)))
    files.tell()


@app.command()
def sweep(
    cluster: ClusterOption,
    nbytes: OneSizeOption = "100M",
    counts: Annotated[str, typer.Option("--chunks", metavar="N,N", help="Numbers of chunks.")] = "4,8,16,32,64,128,512",
    systems: Systems = ALL,
    collective: Kind = "all_reduce",
    in_flight: Flight = 16,
    sharing: Sharing = "ordered",
    tracker: Tracker = "whole",
    header: Annotated[float, typer.Option(metavar="BYTES", help="Header of every packet.")] = 0.0,
    packet: Annotated[float, typer.Option(metavar="BYTES", help="Most payload of a packet.")] = 4096.0,
    rows: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """Utilisation over the number of chunks (the paper's Fig. 10): few cannot be balanced, many cost headers.

    \b
    Examples:
      stretto dims sweep -c themis_3d_sw_sw_sw_hetero
      stretto dims sweep -c themis_4d_ring_fc_ring_sw --header 42 --html chunks.html
    """
    dims = [replace(dim, header_bytes=header, packet_bytes=packet) for dim in _dims(cluster, "")]
    size, names, numbers = _size(nbytes), _names(systems), _counts(counts)
    series: dict[str, list[float]] = {name: [] for name in names}
    table = ResultTable(">chunks", *(f">{name}" for name in names))
    with progress("scheduling", len(numbers)) as advance:
        for number in numbers:
            advance(str(number))
            for name in names:
                planned = _plan(name, dims, collective, size, number, in_flight, sharing, tracker)
                series[name].append(simulate(planned, in_flight=in_flight, sharing=sharing).utilization)
            table.add_row(str(number), *(f"{100 * series[name][-1]:.2f} %" for name in names))
    found = [
        {"chunks": number, "system": name, "utilisation": value}
        for name in names
        for number, value in zip(numbers, series[name], strict=True)
    ]
    note = f"{collective} of {nbytes}; {in_flight} stages in flight, {sharing} sharing; {header:g} bytes of header."
    title = f"Chunks on {cluster}"
    files = OutputFiles()
    files.json(rows, {"rows": found})
    files.write(
        html,
        lambda path: write_html(path, title=title, sections=[sweep_section("Number of chunks", numbers, series, note)]),
    )
    console = out()
    console.print(_about(cluster, collective, None, in_flight, sharing), markup=False, soft_wrap=True)
    console.print(table)
    files.tell()


@app.command()
def train(
    workload: Annotated[str, typer.Argument(metavar="WORKLOAD", help="themis:resnet152, themis:dlrm,bucket_mb=25")],
    cluster: ClusterOption,
    chunks: Chunks = 64,
    in_flight: Flight = 16,
    sharing: Sharing = "ordered",
    rows: JsonOption = None,
    html: HtmlOption = None,
) -> None:
    """One training iteration: forward, backward, and the communication that nothing hides (the paper's Fig. 12).

    \b
    Examples:
      stretto dims train themis:dlrm -c themis_2d_sw_sw
      stretto dims train themis:resnet152,bucket_mb=25 -c themis_3d_fc_ring_sw --html step.html
      stretto dims train themis:transformer1t -c themis_4d_ring_sw_sw_sw
    """
    dims, loaded = _dims(cluster, ""), Workload.load(workload)
    table = ResultTable("system", *(f">{name}" for name in TRAIN_COLUMNS))
    found = []
    with progress("simulating", len(SYSTEMS)) as advance:
        for system in SYSTEMS:
            advance(system)
            found.append(iteration(loaded, dims, system, chunks=chunks, in_flight=in_flight, sharing=sharing))
    for each in found:
        times = (each.total_us, each.forward_us, each.backward_us, each.data_parallel_us, each.model_parallel_us)
        speed = found[0].total_us / each.total_us
        used = "-" if each.system == "ideal" else f"{100 * each.utilization:.1f} %"
        table.add_row(each.system, *map(format_us, times), f"{speed:.3f}", used)
    files = OutputFiles()
    files.json(rows, {"rows": [asdict(each) for each in found]})
    title = f"{workload} on {cluster}"
    files.write(
        html,
        lambda path: write_html(
            path, title=title, sections=[iteration_section("Where the time goes", found, f"{title}.")]
        ),
    )
    console = out()
    console.print(about(loaded), style="bold", markup=False)
    for note in loaded.notes:
        console.print(f"  {note}", style="dim", markup=False)
    console.print(_about(cluster, None, chunks, in_flight, sharing), markup=False, soft_wrap=True)
    console.print(table)
    console.print("data, model: exposed communication of either parallelism; used: bandwidth while communicating")
    console.print("ideal: a bound that no system can beat, bandwidth without latency shared at will")
    files.tell()


@app.command()
def advise(
    cluster: ClusterOption,
    gigabits: Annotated[
        float | None,
        typer.Option(
            "--gbit-per-s", metavar="Gb/s", help="Total Gb/s (not GB/s) per device to spread over dimensions."
        ),
    ] = None,
    increment: Annotated[float, typer.Option(help="Try so much of the total more, one dimension at a time.")] = 0.1,
    html: HtmlOption = None,
    rows: JsonOption = None,
) -> None:
    """Which dimensions have too much or too little bandwidth, what is the best possible, and where more of it pays.

    All for large all-reduces, where latency does not matter. Rates are Gb/s per device.

    \b
    Examples:
      stretto dims advise -c themis_3d_sw_sw_sw_homo
      stretto dims advise -c themis_2d_sw_sw --gbit-per-s 3000
    """
    dims = _dims(cluster, "")
    advice = advisor.advise(dims, increment=increment)
    splits = () if gigabits is None else _splits(dims, gigabits)
    pairs = ResultTable("pair", ">outer sends, of inner's time", "the outer one is")
    for pair in advice.pairs:
        pairs.add_row(f"dim{pair.inner + 1}, dim{pair.outer + 1}", f"{pair.ratio:.3g}", pair.verdict)
    tables = [pairs, _more_table(dims, advice)]
    if gigabits is not None:
        tables.append(_splits_table(dims, gigabits, splits))
    said = (
        f"the baseline can use {100 * advice.baseline_utilization:.1f} % of all bandwidth, "
        f"the best possible schedule {100 * advice.best_utilization:.1f} %"
    )
    files = OutputFiles()
    files.json(rows, {
        "baseline_utilization": advice.baseline_utilization, "best_utilization": advice.best_utilization,
        "pairs": [{"inner": p.inner, "outer": p.outer, "ratio": p.ratio, "verdict": p.verdict} for p in advice.pairs],
        "increments": [
            {"dim": g.dim, "gb_per_s": g.gb_per_s, "baseline_speedup": g.baseline_speedup,
             "best_speedup": g.best_speedup, "ideal_speedup": g.ideal_speedup, "pays": bool(g.pays)}
            for g in advice.increments
        ],
        "splits": [{"what": title, "gb_per_s": list(split.gb_per_s)} for title, split in splits],
    })  # fmt: skip
    files.write(html, lambda path: write_tables(path, f"Bandwidth of {cluster}", *tables, note=said))
    console = out()
    console.print(said)
    for number, table in enumerate(tables):
        console.print(*([""] if number else []), table, sep="\n")
    files.tell()


def _more_table(dims: Sequence[Dim], advice: Advice) -> ResultTable:
    """What more bandwidth in one dimension would bring."""
    table = ResultTable("dimension", ">Gb/s", ">usable", ">with more", ">baseline", ">best", ">ideal", ">pays")
    total = sum(each.gb_per_s for each in dims) * GIGABITS
    for dim, gain, (low, high) in zip(dims, advice.increments, advice.usable, strict=True):
        table.add_row(
            f"dim{gain.dim + 1} {dim.kind} of {dim.size}", f"{dim.gb_per_s * GIGABITS:g}",
            f"{low * total:.3g}..{high * total:.4g}", f"+{gain.gb_per_s * GIGABITS:.4g}",
            f"x{gain.baseline_speedup:.3f}", f"x{gain.best_speedup:.3f}", f"x{gain.ideal_speedup:.3f}",
            "yes" if gain.pays else "no",
        )  # fmt: skip
    return table


def _splits_table(dims: Sequence[Dim], gigabits: float, splits: Iterable[tuple[str, BandwidthSplit]]) -> ResultTable:
    names = (f">dim{at + 1}" for at in range(len(dims)))
    table = ResultTable(f"{gigabits:g} Gb/s spent", *names, ">baseline uses", ">best uses")
    for title, split in splits:
        rates = (f"{rate * GIGABITS:.4g}" for rate in split.gb_per_s)
        used = (f"{100 * share:.1f} %" for share in (split.baseline_utilization, split.best_utilization))
        table.add_row(title, *rates, *used)
    return table


def _splits(dims: tuple[Dim, ...], gigabits: float) -> tuple[tuple[str, BandwidthSplit], ...]:
    if not 0 < gigabits <= MOST_GIGABITS:
        raise InvalidInput(f"--gbit-per-s: must be Gb/s above 0 and at most {MOST_GIGABITS:g}, not {gigabits:g}")
    return (
        ("so that every scheduler uses it", advisor.just_enough(dims, gigabits / GIGABITS)),
        ("nearest to today's proportions", advisor.nearest(dims, gigabits / GIGABITS)),
    )


def _dims(cluster: str, in_network: str) -> tuple[Dim, ...]:
    numbers = _numbers("--in-network", in_network) if in_network else []
    loaded = Cluster.load(cluster)
    count = len(dims_of(loaded))
    if any(not 1 <= number <= count for number in numbers):
        raise InvalidInput(f"--in-network {in_network!r}: dimensions are counted from 1, here 1..{count}")
    return dims_of(loaded, in_network=[number - 1 for number in numbers])


def _plan(
    system: str,
    dims: Sequence[Dim],
    collective: str,
    nbytes: float,
    chunks: int,
    in_flight: int,
    sharing: str,
    tracker: str,
) -> DimSchedule:
    spelt = {kind.replace("_", ""): kind for kind in COLLECTIVES}
    kind = spelt.get(collective.lower().replace("_", "").replace("-", "").replace(" ", ""))
    if kind is None:
        raise unknown("collective", collective, COLLECTIVES)
    return plan(
        system, dims, kind, nbytes, chunks=chunks, in_flight=in_flight, sharing=sharing, tracker=tracker
    )  # fmt: skip


def _size(text: str) -> float:
    return float(parse_one_size(text))


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in SCHEDULERS:
            raise unknown("scheduler", name, SCHEDULERS)
    return names


def _counts(text: str) -> list[int]:
    numbers = _numbers("--chunks", text)
    if not all(1 <= number <= MAX_CHUNKS for number in numbers):
        raise InvalidInput(f"--chunks {text!r}: must be numbers 1..{MAX_CHUNKS}")
    return numbers


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 8 for part in parts):
        raise InvalidInput(f"{option} {text!r}: expected numbers such as 1,2")
    return [int(part) for part in parts]


def _about(cluster: str, collective: str | None, chunks: int | None, in_flight: int, sharing: str) -> str:
    what = f"{collective} on {cluster}" if collective else cluster
    pieces = f"{chunks} chunks, " if chunks else ""
    return f"{what}: {pieces}{in_flight} stages in flight per dimension, {sharing} sharing"


def _ways_table(planned: DimSchedule) -> ResultTable:
    def text(order: Iterable[int]) -> str:
        return " ".join(str(at + 1) for at in order) or "-"

    table = ResultTable(">chunks", ">of the data", "reduce-scatter", "all-gather")
    for chunk_way in dict.fromkeys((chunk.reduce_scatter, chunk.all_gather) for chunk in planned.chunks):
        mine = [chunk for chunk in planned.chunks if (chunk.reduce_scatter, chunk.all_gather) == chunk_way]
        share = sum(chunk.share for chunk in mine)
        table.add_row(str(len(mine)), f"{100 * share:.1f} %", *map(text, chunk_way))
    return table


def _dims_table(run: DimRun) -> ResultTable:
    table = ResultTable("dimension", ">Gb/s", ">stage latency", ">sends for", ">of the time")
    for at, dim in enumerate(run.dims):
        name = f"dim{at + 1} {dim.kind} of {dim.size}{', reduces' if dim.in_network else ''}"
        table.add_row(
            name, f"{dim.gb_per_s * GIGABITS:g}", format_us(dim.latency_us), format_us(float(run.busy_us[at])),
            f"{100 * run.dim_utilization[at]:.1f} %",
        )  # fmt: skip
    return table
