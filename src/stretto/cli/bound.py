"""``stretto bound``: the least time any algorithm could take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .common import check_root, out, parse_ranks, progress

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..collectives import Collective


def bound(
    what: Annotated[str, typer.Argument(metavar="COLLECTIVE|FILE", help="A collective, or a file that defines one.")],
    cluster: Annotated[str, typer.Option("--cluster", "-c", help="A preset (dgx2), with a node count, or a file.")],
    nbytes: Annotated[
        str, typer.Option("--bytes", "-b", metavar="SIZE|LOW..HIGH", help="One size, a list, or a range.")
    ] = "64M",
    ranks: Annotated[str | None, typer.Option(help="Devices that take part: a count or a list such as 0-7,16.")] = None,
    root: Annotated[int | None, typer.Option(help="Root of a broadcast, reduce, gather or scatter.")] = None,
    channels: Annotated[str | None, typer.Option(metavar="NAME,NAME", help="Use only links of these channels.")] = None,
    factor: Annotated[float, typer.Option(help="By how much sizes grow in a range.")] = 4.0,
) -> None:
    """A lower bound on the time of a collective, with the reason for it.

    \b
    Examples:
      stretto bound all_reduce --cluster dgx2:2 --bytes 1K..1G
      stretto bound broadcast --cluster ndv2:4 --root 3
      stretto bound my_collective.yaml --cluster torus:4x4 --bytes 1M
    """
    from rich.table import Table

    from ..cluster import Cluster
    from ..report.sweep import parse_sizes
    from ..simulator import lower_bound
    from ..units import format_bytes, format_us

    where = Cluster.load(cluster)
    collective = _collective(what, where, ranks, root)
    sizes = parse_sizes(nbytes, factor=factor)
    names = None if channels is None else [name.strip() for name in channels.split(",")]
    with progress("bounding", len(sizes)) as advance:
        bounds = []
        for size in sizes:
            advance(format_bytes(size))
            bounds.append(lower_bound(collective, where, size, channels=names))
    table = Table(box=None)
    for column in ("bytes", "bound", "bandwidth", "latency", "GB/s"):
        table.add_column(column, justify="right")
    table.add_column("because", overflow="fold")
    for size, b in zip(sizes, bounds, strict=True):
        rate = f"{size / b.total_us / 1e3:.4g}" if b.total_us > 0 else "-"
        times = [format_us(us) for us in (b.total_us, b.bandwidth_us, b.latency_us)]
        table.add_row(format_bytes(size), *times, rate, b.reason)
    console = out()
    console.print(table)
    exact = "the bandwidth part can be reached" if bounds[-1].exact else "it may not be reachable"
    verdict = f"{collective.kind} on {where.name}: no algorithm is faster; {exact} ({bounds[-1].method})"
    console.print(verdict, markup=False)


def _collective(what: str, cluster: Cluster, ranks: str | None, root: int | None) -> Collective:
    from ..algorithms.base import collective_kind
    from ..collectives import COLLECTIVES, load_collective
    from ..errors import InvalidInput

    if Path(what).suffix or Path(what).exists():
        for option, given in (("--ranks", ranks), ("--root", root)):
            if given is not None:
                raise InvalidInput(f"{option}: a file says this itself")
        return load_collective(what)
    kind = collective_kind(what)
    rooted = check_root(kind, root)
    if kind in ("permute", "all_to_all_v"):
        raise InvalidInput(f"{kind}: needs pairs or counts; 'stretto collective show --save' makes a file to edit")
    return COLLECTIVES[kind](parse_ranks(ranks, cluster.num_devices), **rooted)
