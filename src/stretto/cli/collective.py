# SPDX-License-Identifier: Apache-2.0
"""``stretto collective``: what each collective starts from and must achieve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ..algorithms.base import collective_kind
from ..collectives import COLLECTIVES, ROOTED, Collective
from ..collectives.conditions import MAX_ENTRIES, as_ranks
from ..collectives.files import load_collective, save_collective
from ..errors import InvalidInput
from ..report.table import ResultTable
from .common import about, out, progress, quoted
from .completion import collective_names
from .options import JsonOption
from .outputs import YAML, OutputFiles, output

app = typer.Typer(no_args_is_help=True, help="What a collective starts from and must achieve.")

_MAX_ROWS = 16


@app.command("list")
def list_all(rows: JsonOption = None) -> None:
    """List the collectives that are known by name.

    \b
    Example:
      stretto collective list
    """
    said = {kind: (build.__doc__ or "").strip().split("\n")[0].replace("`", "") for kind, build in COLLECTIVES.items()}
    table = ResultTable("collective", "what must be true afterwards")
    for kind, text in said.items():
        table.add_row(kind, text)
    files = OutputFiles()
    files.json(rows, {"collectives": [{"name": kind, "what": text} for kind, text in said.items()]})
    console = out()
    console.print(table)
    console.print("\nOthers can be written down in a file; see 'stretto collective show --help'.")
    files.tell("stretto collective show all_gather")


@app.command()
def show(
    what: Annotated[
        str,
        typer.Argument(metavar="KIND|FILE", autocompletion=collective_names, help="A collective's name, or a file."),
    ],
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", help="How many ranks (for a name; default 4).")] = None,
    chunks: Annotated[int | None, typer.Option(help="Pieces per shard (for a name).")] = None,
    root: Annotated[int | None, typer.Option(help="The root, where there is one (default 0).")] = None,
    in_place: Annotated[bool | None, typer.Option("--in-place", help="Input and output share memory.")] = None,
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.yaml",
            callback=output(*YAML),
            help="Also write it down, as a start for one's own.",
        ),
    ] = None,
    rows: JsonOption = None,
) -> None:
    """Show every rank's buffers before and after.

    \b
    Examples:
      stretto collective show all_gather
      stretto collective show broadcast --ranks 8 --root 3
      stretto collective show all_to_all -o mine.yaml
      stretto collective show mine.yaml

    A chunk is written c3, and c3[0,2] where it is made of the parts of ranks 0 and 2.
    """
    given = {"ranks": ranks, "chunks": chunks, "root": root, "in_place": in_place}
    with progress("building", 1) as advance:
        advance(what)
        collective = _load(what, {key: value for key, value in given.items() if value is not None})
    shown = [
        (str(rank), str(collective.ranks[rank]), *_buffers(collective, rank))
        for rank in range(min(collective.num_ranks, _MAX_ROWS))
    ]
    files = OutputFiles()
    files.write(target, lambda path: save_collective(collective, path))
    files.json(rows, {"kind": collective.kind, "num_ranks": collective.num_ranks, "num_chunks": collective.num_chunks,
        "ranks": [{"rank": int(r), "device": int(d), "starts": a, "ends": b} for r, d, a, b in shown]})  # fmt: skip
    table = ResultTable(">rank", ">device", "starts with", "must end with")
    for row in shown:
        table.add_row(*row)
    console = out()
    console.print(about(collective), markup=False)
    console.print(table)
    if collective.num_ranks > _MAX_ROWS:
        console.print(f"{collective.num_ranks - _MAX_ROWS} more ranks")
    files.tell(f"stretto bound {quoted(target)} -c CLUSTER" if target is not None else "")


def _buffers(collective: Collective, rank: int) -> tuple[str, str]:
    """What a rank starts with, and what it must end with."""
    low, high = collective.in_ptr[rank], collective.in_ptr[rank + 1]
    chunks, parts = collective.in_chunk[low:high].tolist(), collective.in_part[low:high].tolist()
    starts = [(c, (p,)) for c, p in zip(chunks, parts, strict=True)]
    low, high = collective.out_ptr[rank], collective.out_ptr[rank + 1]
    ends = [(int(collective.out_chunk[at]), collective.parts_of(at)) for at in range(low, high)]
    return _buffer(starts), _buffer(ends)


def _load(what: str, given: dict[str, Any]) -> Collective:
    """A collective by name with the options that were given, or a file, which takes none."""
    if Path(what).suffix or Path(what).exists():
        _refuse(given, given, "a file says this itself")
        return load_collective(what)
    kind = collective_kind(what)
    if kind not in ROOTED:
        _refuse(given, ("root",), f"{kind} has no root; rooted are {', '.join(ROOTED)}")
    ranks = given.pop("ranks", 4)
    as_ranks(ranks)
    if kind == "permute":
        given["pairs"] = [(r, (r + 1) % ranks) for r in range(ranks)]
    elif kind == "all_to_all_v":
        if ranks * ranks > MAX_ENTRIES:
            raise InvalidInput(f"--ranks: {kind} over {ranks} ranks would have over {MAX_ENTRIES} chunks")
        given["counts"] = [[(r + q) % ranks for q in range(ranks)] for r in range(ranks)]
    return COLLECTIVES[kind](ranks, **given)


def _refuse(given: Mapping[str, Any], options: Iterable[str], why: str) -> None:
    for key in options:
        if key in given:
            raise InvalidInput(f"--{key.replace('_', '-')}: {why}")


def _buffer(entries: Sequence[tuple[int, tuple[int, ...]]]) -> str:
    """Chunks in buffer order; runs of neighbours with the same parts are drawn together."""
    runs: list[tuple[int, int, tuple[int, ...]]] = []
    for chunk, parts in entries:
        if runs and runs[-1][1] + 1 == chunk and runs[-1][2] == parts:
            runs[-1] = (runs[-1][0], chunk, parts)
        else:
            runs.append((chunk, chunk, parts))
    texts = [f"c{a}{f'..c{b}' if b > a else ''}[{_span(parts)}]" for a, b, parts in runs]
    shown = texts if len(texts) <= 8 else [*texts[:7], f"... {len(texts) - 7} more"]
    return " ".join(shown) or "-"


def _span(parts: tuple[int, ...]) -> str:
    if len(parts) > 2 and parts == tuple(range(parts[0], parts[-1] + 1)):
        return f"{parts[0]}-{parts[-1]}"
    return ",".join(str(p) for p in (parts if len(parts) <= 8 else [*parts[:7], "..."]))
