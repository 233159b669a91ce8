# SPDX-License-Identifier: Apache-2.0
"""``stretto motif``: rewrite collectives into motifs, and have each rewriting proved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text
from rich.tree import Tree

from ..errors import InvalidInput, StrettoError
from ..planner.algebra.lowering import check, default_algorithm
from ..planner.algebra.motif import KINDS, Expr, Motif, Par
from ..planner.algebra.motif import Path as Place
from ..planner.algebra.notation import parse
from ..planner.algebra.notation import show as written
from ..planner.algebra.rules import parse_step, rules
from ..programs.formats import SUFFIXES, save_program
from ..units import format_bytes
from .common import out
from .options import JsonOption
from .outputs import OutputFiles, output

app = typer.Typer(no_args_is_help=True, help="Rewrite collectives into motifs, and have each rewriting proved.")

MAX_ROWS = 60


@app.command("list")
def list_all(
    kind: Annotated[str | None, typer.Option("--kind", "-k", help="Only rules for this motif (AR, AA, ...).")] = None,
    rows: JsonOption = None,
) -> None:
    """List the rules, what they rewrite and their parameters.

    \b
    Examples:
      stretto motif list
      stretto motif list --kind AA
    """
    found = list(rules(kind))
    files = OutputFiles()
    files.json(rows, {"rules": [
        {"name": rule.name, "summary": rule.summary, "kinds": list(rule.kinds), "parameters": list(rule.parameters)}
        for rule in found
    ]})  # fmt: skip
    console = out()
    for rule in found:
        console.print(rule.name, style="bold")
        given = ", ".join(rule.parameters)
        for line, style in (
            (rule.summary, ""),
            (f"rewrites {', '.join(rule.kinds)}{f'; parameters {given}' if given else ''}", "dim"),
        ):
            console.print(Padding(line, (0, 0, 0, 4), style=style, expand=False))
    if kind is None:
        console.print("\nMotifs: " + ", ".join(f"{code} {name}" for code, name in KINDS.items()))
    files.tell()


def _original(text: str) -> Motif:
    """The motif of ``--of``."""
    try:
        found = parse(text)
    except InvalidInput as error:
        raise InvalidInput(f"--of: {error}") from None
    if not isinstance(found, Motif):
        raise InvalidInput("--of: must be a single motif")
    return found


@app.command()
def show(
    text: Annotated[
        str, typer.Argument(metavar="EXPRESSION", help="In the notation, such as 'AR(T[0:1024], PG[0:8])'.")
    ],
    steps: Annotated[
        list[str] | None,
        typer.Option("--apply", "-a", metavar="RULE[:VALUE,KEY=VALUE][@PATH]", help="Apply a rule; repeat for more."),
    ] = None,
    original: Annotated[
        str | None, typer.Option("--of", metavar="MOTIF", help="What several motifs should be together.")
    ] = None,
    expand: Annotated[bool, typer.Option("--expand", help="Write every motif out.")] = False,
    target: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            callback=output(*SUFFIXES),
            help="Write the whole as a program (.txt, .xml or .json); an MSCCL++ plan (.json) is for one host.",
        ),
    ] = None,
    rows: JsonOption = None,
) -> None:
    """Show an expression as a tree, after rewriting it, and prove that it still is the original collective.

    \b
    Examples:
      stretto motif show "AR(T[0:1024], PG[0:8])" --apply segment:4
      stretto motif show "AR(T[0:1024], PG[0:16])" -a hierarchical:8 -a ring@1.0
      stretto motif show "AA(T[0:8, 0:64], PG[0:8])" -a spline:4 -o aa.txt

    A rule is applied to every motif it serves, or to the one at a path: @1.0 is the first child of the second.
    Without --of the expression that is given is the original, if it is a single motif.
    """
    expr = start = parse(text)
    whole = _original(original) if original is not None else start
    for step in steps or []:
        expr = parse_step(step)(expr)
    if target is not None and not isinstance(whole, Motif):
        raise InvalidInput("--of: say what the motifs should be together, such as --of 'AR(T[0:64], PG[0:4])'")
    files, proved, wrong = OutputFiles(), None, None
    if isinstance(whole, Motif):
        try:
            proved = check(expr, whole)
        except StrettoError as error:
            wrong = error  # the motifs are shown all the same
        else:
            files.write(target, partial(save_program, proved))
    if wrong is None:
        files.json(rows, {
            "expression": written(expr, expand=expand), "motifs": len(expr.leaves), "proved": proved is not None,
            "transfers": proved.num_transfers if proved is not None else None,
        })  # fmt: skip
    _print(expr, expand=expand)
    if wrong is not None:
        raise wrong
    console = out()
    if proved is None:
        console.print("not proved: --of says what these motifs should be together", soft_wrap=True)
    else:
        count = len(expr.leaves)
        said = f"proved: {count} motif{'s' * (count > 1)}, {proved.num_transfers} transfers, "
        console.print(f"{said}{proved.collective.num_chunks} chunks: {whole}", markup=False, soft_wrap=True)
    files.tell()


def _print(expr: Expr, *, expand: bool) -> None:
    console = out()
    console.print(written(expr, expand=expand), markup=False, soft_wrap=True)
    if expr.children:
        console.print()
        console.print(_tree(expr))
    console.print()


def _tree(expr: Expr) -> Tree:
    """The tree, cut short where it is long."""
    rows = 0

    def label(here: Expr, path: Place) -> Text:
        where = ".".join(map(str, path))
        if isinstance(here, Motif):
            return Text.assemble((f"{where}  ", "dim"), str(here), (f"  {_what(here)}", "dim"))
        word = "|| in parallel" if isinstance(here, Par) else "-> one after the other"
        return Text.assemble((f"{where}  " if where else "", "dim"), (word, "bold"))

    def grow(node: Tree, here: Expr, path: Place) -> None:
        nonlocal rows
        for number, child in enumerate(here.children):
            if rows >= MAX_ROWS:
                left = len(here.children) - number
                node.add(Text(f"... {left} more", style="dim"))
                return
            rows += 1
            grow(node.add(label(child, (*path, number))), child, (*path, number))

    top = Tree(label(expr, ()))
    grow(top, expr, ())
    return top


def _what(motif: Motif) -> str:
    return f"{motif.collective_kind}, {format_bytes(motif.nbytes)}, {default_algorithm(motif)}"
