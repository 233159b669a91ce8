"""``stretto collective``: what each collective starts from and must achieve."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InvalidInput
from .common import out, progress
from .outputs import YAML, OutputFiles, output

if TYPE_CHECKING:
    from ..collectives import Collective

app = typer.Typer(no_args_is_help=True, help="What a collective starts from and must achieve.")

_MAX_ROWS = 16


@app.command("list")
def list_all() -> None:
    """List the collectives that are known by name.

    \b
    Example:
      stretto collective list
    """
    from rich.table import Table
    from rich.text import Text

    from ..collectives import COLLECTIVES

    table = Table(box=None, pad_edge=False)
    table.add_column("collective")
    table.add_column("what must be true afterwards")
    for kind, build in COLLECTIVES.items():
        table.add_row(kind, Text((build.__doc__ or "").strip().split("\n")[0].replace("`", "")))
    console = out()
    console.print(table)
    console.print("\nOthers can be written down in a file; see 'stretto collective show --help'.")


@app.command()
def show(
    what: Annotated[str, typer.Argument(metavar="KIND|FILE", help="A collective's name, or a file.")],
    ranks: Annotated[int | None, typer.Option("--ranks", "-n", help="How many ranks (for a name; default 4).")] = None,
    chunks: Annotated[int | None, typer.Option(help="Pieces per shard (for a name).")] = None,
    root: Annotated[int | None, typer.Option(help="The root, where there is one (default 0).")] = None,
    in_place: Annotated[bool | None, typer.Option("--in-place", help="Input and output share memory.")] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", callback=output(*YAML), help="Also write it down, as a start for one's own."),
    ] = None,
) -> None:
    """Show every rank's buffers before and after.

    \b
    Examples:
      stretto collective show all_gather
      stretto collective show broadcast --ranks 8 --root 3
      stretto collective show all_to_all --save mine.yaml
      stretto collective show mine.yaml

    A chunk is written c3, and c3[0,2] where it is made of the parts of ranks 0 and 2.
    """
    from rich.table import Table

    from ..collectives.files import save_collective

    given = {"ranks": ranks, "chunks": chunks, "root": root, "in_place": in_place}
    with progress("building", 1) as advance:
        advance(what)
        collective = _load(what, {key: value for key, value in given.items() if value is not None})
    files = OutputFiles()
    files.write(save, lambda path: save_collective(collective, path))
    table = Table(box=None, pad_edge=False)
    for heading in ("rank", "device", "starts with", "must end with"):
        table.add_column(heading, overflow="fold")
    for rank in range(min(collective.num_ranks, _MAX_ROWS)):
        low, high = collective.in_ptr[rank], collective.in_ptr[rank + 1]
        starts = [
            (c, (p,))
            for c, p in zip(collective.in_chunk[low:high].tolist(), collective.in_part[low:high].tolist(), strict=True)
        ]
        low, high = collective.out_ptr[rank], collective.out_ptr[rank + 1]
        ends = [(int(collective.out_chunk[at]), collective.parts_of(at)) for at in range(low, high)]
        table.add_row(str(rank), str(collective.ranks[rank]), _buffer(starts), _buffer(ends))
    console = out()
    console.print(f"{collective!r}"[1:-1], markup=False)
    console.print(table)
    if collective.num_ranks > _MAX_ROWS:
        console.print(f"{collective.num_ranks - _MAX_ROWS} more ranks")
    files.tell()


def _load(what: str, given: dict[str, Any]) -> Collective:
    """A collective by name with the options that were given, or a file, which takes none."""
    from ..algorithms.base import collective_kind
    from ..collectives import COLLECTIVES, ROOTED
    from ..collectives.conditions import MAX_ENTRIES, as_ranks

    if Path(what).suffix or Path(what).exists():
        from ..collectives.files import load_collective

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
    texts = [f"c{a}{f'..c{b}' if b > a else ''}\\[{_span(parts)}]" for a, b, parts in runs]
    shown = texts if len(texts) <= 8 else [*texts[:7], f"... {len(texts) - 7} more"]
    return " ".join(shown) or "-"


def _span(parts: tuple[int, ...]) -> str:
    if len(parts) > 2 and parts == tuple(range(parts[0], parts[-1] + 1)):
        return f"{parts[0]}-{parts[-1]}"
    return ",".join(str(p) for p in (parts if len(parts) <= 8 else [*parts[:7], "..."]))
