# SPDX-License-Identifier: Apache-2.0
"""``stretto bound``: the least time any algorithm could take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..algorithms.base import collective_kind
from ..cluster import Cluster
from ..collectives import COLLECTIVES, Collective, load_collective
from ..errors import InvalidInput
from ..report.table import ResultTable
from ..simulator import lower_bound
from ..units import format_bytes, format_us
from .common import check_root, out, parse_all_sizes, parse_names, parse_ranks, progress, quoted
from .completion import collective_names
from .options import (
    BytesOption,
    ChannelsOption,
    ClusterOption,
    FactorOption,
    HtmlOption,
    JsonOption,
    RanksOption,
    RootOption,
)
from .outputs import OutputFiles
from .pages import write_tables


def bound(
    what: Annotated[
        str,
        typer.Argument(
            metavar="COLLECTIVE|FILE", autocompletion=collective_names, help="A collective, or a file that defines one."
        ),
    ],
    cluster: ClusterOption,
    nbytes: BytesOption = "64M",
    factor: FactorOption = 4.0,
    ranks: RanksOption = None,
    root: RootOption = None,
    channels: ChannelsOption = None,
    html: HtmlOption = None,
    rows: JsonOption = None,
) -> None:
    """A lower bound on the time of a collective, with the reason for it.

    \b
    Examples:
      stretto bound all_reduce -c dgx2:2 -b 1K..1G
      stretto bound broadcast -c ndv2:4 --root 3
      stretto bound my_collective.yaml -c torus:4x4 -b 1M
    """
    sizes = parse_all_sizes(nbytes, factor)
    where = Cluster.load(cluster)
    collective = _collective(what, where, ranks, root)
    bounds = []
    with progress("bounding", len(sizes)) as advance:
        for size in sizes:
            advance(format_bytes(size))
            bounds.append(lower_bound(collective, where, size, channels=parse_names(channels)))
    table = ResultTable(">bytes", ">bound", ">bandwidth", ">latency", ">GB/s", "because")
    for size, b in zip(sizes, bounds, strict=True):
        rate = f"{size / b.total_us / 1e3:.4g}" if b.total_us > 0 else "-"
        times = [format_us(us) for us in (b.total_us, b.bandwidth_us, b.latency_us)]
        table.add_row(format_bytes(size), *times, rate, b.reason)
    exact = "the bandwidth part can be reached" if bounds[-1].exact else "it may not be reachable"
    verdict = f"{collective.kind} on {where.name}: no algorithm is faster; {exact} ({bounds[-1].method})"
    files = OutputFiles()
    files.json(rows, {"rows": [
        {"collective": collective.kind, "cluster": where.name, "nbytes": size, "bound_us": b.total_us,
         "bandwidth_us": b.bandwidth_us, "latency_us": b.latency_us, "reason": b.reason, "method": b.method,
         "exact": b.exact}
        for size, b in zip(sizes, bounds, strict=True)
    ]})  # fmt: skip
    files.write(
        html, lambda path: write_tables(path, f"Lower bound of {collective.kind} on {where.name}", table, note=verdict)
    )
    console = out()
    console.print(table)
    console.print(verdict, markup=False)
    files.tell(
        f"stretto synth {collective.kind} -c {quoted(cluster)} -b {quoted(nbytes)}" if not Path(what).suffix else ""
    )


def _collective(what: str, cluster: Cluster, ranks: str | None, root: int | None) -> Collective:
    if Path(what).suffix or Path(what).exists():
        for option, given in (("--ranks", ranks), ("--root", root)):
            if given is not None:
                raise InvalidInput(f"{option}: a file says this itself")
        return load_collective(what)
    kind = collective_kind(what)
    rooted = check_root(kind, root)
    if kind in ("permute", "all_to_all_v"):
        raise InvalidInput(f"{kind}: needs pairs or counts; 'stretto collective show -o FILE' makes a file to edit")
    return COLLECTIVES[kind](parse_ranks(ranks, cluster.num_devices), **rooted)
