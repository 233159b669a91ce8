"""``stretto algorithms``: what the library knows."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import out


def algorithms(
    collective: Annotated[
        str | None, typer.Option("--collective", "-c", help="Only algorithms for this collective.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Only algorithms that are defined for this many ranks.")] = None,
) -> None:
    """List the algorithms, what they serve and for which rank counts.

    \b
    Examples:
      stretto algorithms
      stretto algorithms --collective all_to_all
      stretto algorithms --collective all_reduce --ranks 24
    """
    from rich.table import Table

    from ..algorithms.base import collective_kind
    from ..algorithms.registry import algorithms as known
    from ..errors import InvalidInput

    if ranks is not None and ranks < 1:
        raise InvalidInput(f"--ranks: must be >= 1, not {ranks}")
    kind = collective_kind(collective) if collective is not None else None
    table = Table(box=None, pad_edge=False)
    for heading in ("algorithm", "what it does", "collectives", "ranks", "options (--set)"):
        table.add_column(heading, overflow="fold")
    for entry in known():
        kinds = [k for k in entry.collectives if kind in (None, k)]
        if ranks is not None:
            kinds = [k for k in kinds if entry.refusal(k, ranks) is None]
        if kinds:
            options = ", ".join(entry.options)
            table.add_row(entry.name, entry.summary, ", ".join(kinds), entry.where, options or "-")
    console = out()
    if table.row_count:
        console.print(table)
    else:
        console.print("no algorithm fits")
