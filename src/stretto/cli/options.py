# SPDX-License-Identifier: Apache-2.0
"""Options that several commands have: one name, one meaning and one text each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..units import MAX_SEED
from .completion import cluster_names, workload_names
from .outputs import HTML, TRACE, output

_CLUSTER = typer.Option(
    "--cluster",
    "-c",
    metavar="CLUSTER",
    autocompletion=cluster_names,
    help='A preset (dgx2:2), a file, or lines such as "hosts: 2, gpus: 8 x h100, network: 8 x 400gbit".',
)
ClusterOption = Annotated[str, _CLUSTER]
OptionalCluster = Annotated[str | None, _CLUSTER]

_WORKLOAD = typer.Option(
    "--workload",
    "-w",
    metavar="WORKLOAD",
    autocompletion=workload_names,
    help="A model (dlrm:A2), a workload file, or a profiler trace.",
)
WorkloadOption = Annotated[str, _WORKLOAD]
OptionalWorkload = Annotated[str | None, _WORKLOAD]

BytesOption = Annotated[
    str,
    typer.Option(
        "--bytes",
        "-b",
        metavar="SIZE|LIST|LOW..HIGH",
        help="One size (64M), a list (1M,4M) or a range (1K..1G).",
    ),
]
OneSizeOption = Annotated[str, typer.Option("--bytes", "-b", metavar="SIZE", help="One size, such as 64M or 32 MiB.")]
FactorOption = Annotated[float, typer.Option("--factor", help="By how much sizes grow in a range.")]

RanksOption = Annotated[
    str | None,
    typer.Option(
        "--ranks", metavar="N|LIST", help="Devices that take part: a count or a list such as 0-7,16. Default: all."
    ),
]
RootOption = Annotated[int | None, typer.Option("--root", help="Root of a broadcast, reduce, gather or scatter.")]
ChunksOption = Annotated[int | None, typer.Option("--chunks", help="Pieces to pipeline. Default: the algorithm's own.")]
ChannelsOption = Annotated[
    str | None, typer.Option("--channels", metavar="NAME,NAME", help="Use only links of these channels.")
]
SettingsOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of the algorithm; may be repeated.")
]
AlphaOption = Annotated[
    str, typer.Option("--alpha", metavar="pipelined|blocking", help="Whether latency also occupies the link.")
]
RuntimeOption = Annotated[
    str | None,
    typer.Option(
        "--runtime",
        metavar="NAME|FILE",
        help="Charge what this runtime's instructions cost, too ('stretto runtime list'). Default: links alone.",
    ),
]
ContentionOption = Annotated[
    str | None,
    typer.Option(
        "--contention",
        metavar="fifo|fair",
        help="A link serves one transfer at a time, or all in fair shares. Default: what its links need.",
    ),
]

BudgetOption = Annotated[float, typer.Option("--budget", metavar="SECONDS", help="How long to search or to measure.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, max=MAX_SEED, help="Same seed, same result.")]
JobsOption = Annotated[int, typer.Option("--jobs", "-j", help="How many work at once.")]
BackendOption = Annotated[
    str, typer.Option("--backend", metavar="processes|ray", help="Where work is done: here, or on a Ray cluster.")
]
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray-address", metavar="HOST:PORT", help="Ray's head node. Default: $RAY_ADDRESS, else a local Ray."
    ),
]
AllOption = Annotated[bool, typer.Option("--all", help="Everything, not only the first rows.")]

JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        callback=output(".json", stdout=True),
        help="Write the numbers as JSON; -: to standard output, and nothing else there.",
    ),
]
RankJsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE|-",
        callback=output(".json", stdout=True, only_rank_0=True),
        help="Write the numbers as JSON; -: to standard output, and nothing else there.",
    ),
]
"""`--json` of commands that every rank of a job runs: rank 0 alone writes."""
HtmlOption = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE.html", callback=output(*HTML), help="Write one page that needs no network."),
]
PlansOption = Annotated[
    str,
    typer.Option(
        "--plans", metavar="DIR|off", help="Keep plans there for the next start; else STRETTO_PLANS, or cache."
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE.pftrace", callback=output(*TRACE), help="Write a trace for Perfetto."),
]
