# SPDX-License-Identifier: Apache-2.0
"""``stretto selftest``: every algorithm on the user's own hardware, with a report."""

from __future__ import annotations

from typing import Annotated

import typer

from ..doctor import SelfTest, SelfTestRow, gpu_selftest
from ..errors import InvalidInput
from ..report.table import ResultTable
from ..units import format_bytes, format_us
from .common import out, parse_all_sizes
from .options import BytesOption, FactorOption, JsonOption
from .outputs import OutputFiles

WRONG = 1
"""The exit code where a result was not right."""


def selftest(
    gpu: Annotated[bool, typer.Option("--gpu", help="Run collectives on this machine's GPUs.")] = False,
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="How many ranks; default: one for each GPU, at least two.")
    ] = None,
    nbytes: BytesOption = "1Ki,64Ki,1Mi,16Mi",
    factor: FactorOption = 4.0,
    limit: Annotated[float, typer.Option("--limit", help="Seconds after which the ranks are ended.")] = 600.0,
    report: JsonOption = None,
) -> None:
    """Run every algorithm on this machine's GPUs, check every bit, and time it beside NCCL.

    \b
    Ends with 1 where a result was wrong. The report (--json) holds the names of the
    GPUs, versions, the topology that nvidia-smi prints, and every time.

    \b
    Examples:
      stretto selftest --gpu
      stretto selftest --gpu --ranks 8 -b 1Ki..64Mi --json report.json
    """
    if not gpu:
        raise InvalidInput("selftest: say what to test: --gpu")
    found = gpu_selftest(ranks=ranks, sizes=[int(size) for size in parse_all_sizes(nbytes, factor)], limit_s=limit)
    files = OutputFiles()
    files.json(report, found.to_dict())
    _tell(found)
    files.tell()
    if found.wrong or not found.finished or found.machine.refusal:
        raise typer.Exit(WRONG)


def _tell(found: SelfTest) -> None:
    """The fastest algorithm of every case, beside NCCL, and what was wrong."""
    console, about = out(), found.machine
    best: dict[tuple[str, int], SelfTestRow] = {}
    for row in found.rows:
        key = row.collective, row.nbytes
        if row.right and row.dtype == found.rows[0].dtype and (key not in best or row.us < best[key].us):
            best[key] = row
    names = ", ".join(dict.fromkeys(about.gpus))
    table = ResultTable("collective", ">bytes", "fastest", ">time", ">NCCL", title=f"{about.ranks} ranks on {names}")
    for row in best.values():
        nccl = format_us(row.nccl_us) if row.nccl_us else ""
        name = row.algorithm if row.memory == "staged" else f"{row.algorithm}, {row.memory}"
        table.add_row(row.collective, format_bytes(row.nbytes), name, format_us(row.us), nccl)
    console.print(table)
    for row in found.wrong:
        why = row.error or "wrong result"
        how = "".join(f" {word}" for word in (row.memory, row.reduce) if word not in ("staged", "sum"))
        console.print(f"{row.collective} {row.algorithm}{how} {row.dtype} {row.nbytes} bytes: {why}", markup=False)
    if about.refusal:
        console.print(f"no program ran on GPU memory: {about.refusal}", markup=False)
    if not found.finished:
        console.print("the ranks did not come to the end")
    held = format_bytes(about.held_bytes) if about.held_bytes else "none"
    console.print(f"{len(found.rows)} runs, {len(found.wrong)} wrong; GPU memory held by a rank: {held}", markup=False)
