# SPDX-License-Identifier: Apache-2.0
"""``stretto doctor``: what works on this machine, and what to do about the rest."""

from __future__ import annotations

import typer

from .. import __version__
from ..doctor import examine
from ..report.table import ResultTable
from .common import out
from .options import JsonOption
from .outputs import OutputFiles

BROKEN_BASE = 1
"""The exit code where something is broken that all of Stretto needs."""


def doctor(rows: JsonOption = None) -> None:
    """Say what works here: packages, the executor and UCX, GPUs and NCCL, RDMA, the lab, compilers.

    Looks and changes nothing. Ends with 0 unless something is broken that all of Stretto needs.

    \b
    Examples:
      stretto doctor
      stretto doctor --json -
    """
    found = examine()
    files = OutputFiles()
    files.json(rows, {
        "version": __version__,
        "findings": [
            {"area": one.area, "name": one.name, "state": one.state, "about": one.about, "remedy": one.remedy}
            for one in found
        ],
    })  # fmt: skip
    console = out()
    table = ResultTable("", "", "", title=f"stretto {__version__}", header=False)
    for one in found:
        table.add_row(one.name, one.state, one.about)
    console.print(table)
    for one in found:
        if one.remedy:
            console.print(f"{one.name}: {one.remedy}", markup=False, soft_wrap=True)
    broken = [one.name for one in found if one.needed and one.state != "works"]
    if broken:
        console.print(f"broken, and needed by everything: {', '.join(broken)}", style="bold", markup=False)
    else:
        console.print("everything that planning, synthesis and simulation need works", style="bold")
    files.tell("" if broken else "stretto demo")
    if broken:
        raise typer.Exit(BROKEN_BASE)
