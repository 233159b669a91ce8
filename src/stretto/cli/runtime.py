# SPDX-License-Identifier: Apache-2.0
"""``stretto runtime``: what the instructions of a runtime cost: list, show, and fit to measured times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..programs.fused import Fused
from ..report.table import ResultTable
from ..simulator import Runtime
from ..simulator.runtime_fit import FUSED_PRICES, fit_runtime
from ..simulator.runtimes import PRESETS
from ..units import format_bytes, format_us
from .common import out, parse_names, progress, quoted
from .options import JsonOption
from .outputs import OutputFiles, output

app = typer.Typer(no_args_is_help=True, help="What the instructions of a runtime cost: list, show, fit.")

FREE = ("launch_us", "instruction_us", "signal_us", "handover_us", "put", "reduce", "copy", "receive")


@app.command("list")
def list_all(rows: JsonOption = None) -> None:
    """List the runtimes that have a name.

    \b
    Examples:
      stretto runtime list
    """
    files = OutputFiles()
    files.json(rows, {"runtimes": [{"name": name, "notes": list(r.notes)} for name, r in PRESETS.items()]})
    for name, runtime in PRESETS.items():
        out().print(name, style="bold")
        for note in runtime.notes:
            out().print(f"    {note}", style="dim", soft_wrap=True, markup=False)
    files.tell("stretto runtime show mscclpp:h200")


@app.command()
def show(
    runtime: Annotated[str, typer.Argument(metavar="NAME|FILE", help="A runtime of the list, or its file.")],
    target: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE.yaml", callback=output(".yaml"), help="Write it as a file to edit."
        ),
    ] = None,
    rows: JsonOption = None,
) -> None:
    """Show the prices of a runtime.

    \b
    Examples:
      stretto runtime show mscclpp:h200
      stretto runtime show mscclpp:h200 -o mine.yaml
    """
    found = Runtime.load(runtime)
    prices = price_rows(found)
    files = OutputFiles()
    files.write(target, found.save)
    files.json(rows, {"name": found.name, "prices": dict(prices), "notes": list(found.notes)})
    table = ResultTable("what", ">price", title=found.name)
    for what, price in prices:
        table.add_row(what, price)
    out().print(table)
    for note in found.notes:
        out().print(note, style="dim", soft_wrap=True, markup=False)
    files.tell(f"stretto simulate ring -c dgx_h200 --runtime {quoted(runtime if target is None else target)}")


def price_rows(runtime: Runtime) -> list[tuple[str, str]]:
    """The prices of a runtime as lines for people: what is paid for, and how much."""
    kinds: dict[float, list[str]] = {}
    for kind, price in runtime.instruction_us.items():
        kinds.setdefault(price, []).append(kind)
    found = [
        ("launch", format_us(runtime.launch_us)),
        *((f"an instruction ({', '.join(those)})", format_us(price)) for price, those in kinds.items()),
        ("a wide step", format_us(runtime.step_us)),
        ("a wide step that waits for peers", format_us(runtime.meet_us)),
        ("one of these peers (3: twice, 7: three times)", format_us(runtime.peer_us)),
        ("each place of a wide step", format_us(runtime.place_us)),
        ("each block on a GPU, of a plan of wide steps", format_us(runtime.block_us)),
        ("blocks of 1024 threads", format_us(runtime.thread_us)),
        ("two ranks that share a GPU (4: twice, 8: three times)", format_us(runtime.rank_us)),
        ("memory of a GPU", f"{runtime.memory_gb_per_s:g} GB/s" if runtime.memory_gb_per_s else "no limit"),
        *([("its cache", f"{runtime.cache_gb_per_s:g} GB/s for {runtime.cache_mb:g} MB")] * bool(runtime.cache_mb)),
        ("waiting for another block of the rank", format_us(runtime.handover_us)),
        *((f"a signal ({name})", format_us(p.signal_us)) for name, p in runtime.protocols.items()),
        *(
            (f"{what} ({name})", format_us(price))
            for name, p in runtime.protocols.items()
            for what, price in (
                ("a step", p.step_us),
                ("packets that are read", p.poll_us),
                ("packets that are sent", p.send_us),
            )
            if price
        ),
        *((f"bytes on the wire ({name})", f"{p.bytes_factor:g}x") for name, p in runtime.protocols.items()),
        *((f"one block: {work}", f"{rate:g} GB/s") for work, rate in runtime.block_gb_per_s.items()),
        ("messages under way on a connection", str(runtime.window or "any number")),
        ("blocks of a rank side by side", str(runtime.max_blocks or "any number")),
        ("blocks of a GPU side by side", str(runtime.gpu_blocks or "any number")),
    ]
    return found


@app.command()
def fit(
    measured: Annotated[
        Path, typer.Argument(metavar="ROWS.json|ROWS.csv", help="Measured times; see docs/runtimes.md.")
    ],
    target: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE.yaml", callback=output(".yaml"), help="Write the runtime.")
    ],
    start: Annotated[
        str, typer.Option("--from", metavar="NAME|FILE", help="Where to start; what is not fitted stays.")
    ] = "mscclpp:h200",
    name: Annotated[str | None, typer.Option(help="The new runtime's name. Default: the file's.")] = None,
    free: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help=f"The prices to fit. Default: {','.join(FREE)}; for a table {','.join(FUSED_PRICES)}.",
        ),
    ] = None,
    rows: JsonOption = None,
) -> None:
    """Fit the prices of a runtime to measured times, and say how well it tells the times that it has not seen.

    \b
    Examples:
      stretto runtime fit measured.json -o mine.yaml
      stretto runtime fit measured.json --free put,reduce -o mine.yaml
      stretto runtime fit benchmarks/gpu_h200.csv -o stretto-gpu.yaml
    """
    from dataclasses import replace

    from .runtime_rows import read_rows

    given = read_rows(measured)
    table = any(isinstance(row.lowered, Fused) for _, row, _ in given)
    seen = [(label, row) for label, row, judge in given if not judge]
    unseen = [(label, row) for label, row, judge in given if judge]
    base = replace(Runtime.load(start), name=name or target.stem, notes=(f"fitted to {len(seen)} times",))
    if table:
        # The GPU executor has no instruction streams, and as many blocks as were measured.
        work = {key: rate for key, rate in base.block_gb_per_s.items() if key in ("read", "add", "write")}
        most = max(row.blocks for _, row, _ in given)
        base = replace(base, instruction_us={}, block_gb_per_s=work, handover_us=0.0, window=0, max_blocks=most)
        base = replace(base, thread_us=0.0, holds_block=False)
    with progress("fitting", 1) as advance:
        found = fit_runtime(
            [row for _, row in seen],
            base,
            free=parse_names(free) or (FUSED_PRICES if table else FREE),
            judge=[row for _, row in unseen],
            report=advance,
        )
    files = OutputFiles()
    files.write(target, found.runtime.save)
    shown = ResultTable("program", ">bytes", ">measured", ">predicted over it", "")
    lines = [
        *((*pair, ratio, "") for pair, ratio in zip(seen, found.fitted, strict=True)),
        *((*pair, ratio, "not fitted") for pair, ratio in zip(unseen, found.judged, strict=True)),
    ]
    for label, row, ratio, note in lines:
        shown.add_row(label, format_bytes(row.nbytes), format_us(row.time_us), f"{ratio:.2f}", note)
    files.json(rows, {"rows": [
        {"program": label, "nbytes": row.nbytes, "time_us": row.time_us, "ratio": ratio, "fitted": not note}
        for label, row, ratio, note in lines
    ]})  # fmt: skip
    out().print(shown)
    judged = "of those that were not fitted" if unseen else "(all were fitted)"
    out().print(f"mean deviation {100 * found.error:.1f} % {judged}")
    files.tell(f"stretto runtime show {quoted(target)}")
