# SPDX-License-Identifier: Apache-2.0
"""``stretto algorithms``: what the library knows."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.padding import Padding

from ..algorithms import algorithms as known
from ..algorithms import collective_kind
from ..errors import InvalidInput
from .common import out
from .completion import collective_names
from .options import JsonOption
from .outputs import OutputFiles


def algorithms(
    collective: Annotated[
        str | None,
        typer.Option(
            "--collective", metavar="NAME", autocompletion=collective_names, help="Only algorithms for this collective."
        ),
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Only algorithms that are defined for this many ranks.")] = None,
    rows: JsonOption = None,
) -> None:
    """List the algorithms, what they serve and for which rank counts.

    \b
    Examples:
      stretto algorithms
      stretto algorithms --collective all_to_all
      stretto algorithms --collective all_reduce --ranks 24
    """
    if ranks is not None and ranks < 1:
        raise InvalidInput(f"--ranks: must be >= 1, not {ranks}")
    kind = collective_kind(collective) if collective is not None else None
    found = []
    for entry in known():
        kinds = [k for k in entry.collectives if kind in (None, k)]
        if ranks is not None:
            kinds = [k for k in kinds if entry.refusal(k, ranks) is None]
        if kinds:
            found.append((entry, kinds))
    files = OutputFiles()
    files.json(rows, {"algorithms": [
        {"name": entry.name, "summary": entry.summary, "collectives": kinds, "where": entry.where,
         "chunks": entry.chunks, "options": list(entry.options)}
        for entry, kinds in found
    ]})  # fmt: skip
    console = out()
    for entry, kinds in found:
        options = f"; --set {', '.join(entry.options)}" if entry.options else ""
        console.print(entry.name, style="bold")
        for line, style in (
            (entry.summary, ""),
            (", ".join(kinds), "dim"),
            (f"{entry.where}; --chunks (default {entry.chunks}){options}", "dim"),
        ):
            console.print(Padding(line, (0, 0, 0, 4), style=style, expand=False))
    if not found:
        console.print("no algorithm fits")
    files.tell()
