# SPDX-License-Identifier: Apache-2.0
"""``stretto bench``: what motifs really cost on a job's ranks, for the planner."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from ..algorithms import collective_kind
from ..cluster import Cluster
from ..errors import InvalidInput
from ..planner.costs.measured import Measurement, overlaps, write_measurements
from ..report.table import ResultTable
from ..runtime.probe.bench import KINDS, BenchResult, runs
from ..runtime.probe.bench import bench as measure
from ..runtime.probe.gpu_prices import (
    GPU_RUNTIMES,
    FusedTimer,
    GpuPrices,
    PlanTimer,
    fit_gpu,
    gpu_cases,
    measure_gpu,
)
from ..runtime.probe.join import joined, place
from ..runtime.probe.prices import MeasuredPrices, check_measurable, fit_prices, price_cases
from ..units import format_bytes, format_us
from .common import out, parse_all_sizes, parse_names, progress, quoted
from .options import BudgetOption, BytesOption, ClusterOption, FactorOption, RankJsonOption
from .outputs import OutputFiles, output

TOO_LONG = 1.5
"""Predicted over measured from which on prices, which can only add, cannot mend it."""


def bench(
    target: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.csv|FILE.yaml",
            callback=output(".csv", ".yaml", only_rank_0=True),
            help="Where rank 0 writes the table, or the prices.",
        ),
    ],
    cluster: ClusterOption,
    nbytes: BytesOption = "64K..4M",
    factor: FactorOption = 4.0,
    collectives: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Only these; by default the five that training uses.")
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="executor|mscclpp|stretto-gpu",
            help="Measure the price list of a runtime instead (docs/runtimes.md); the last two on GPUs.",
        ),
    ] = None,
    budget: BudgetOption = 60.0,
    rows: RankJsonOption = None,
) -> None:
    """Time motifs on a job's ranks, alone and in overlapping pairs. Every rank runs this command.

    \b
    Of every collective over all ranks, inside hosts and between them, on each
    channel, the algorithms that look best are run for real. The table is what
    'stretto plan --costs' reads.

    \b
    Examples:
      torchrun --nproc-per-node 4 -m stretto bench -c c.yaml -o costs.csv
      stretto lab run --uplink 400mbit -- \\
          stretto bench -c c.yaml -o costs.csv -b 64K,1M
      stretto plan -w mine.json -c c.yaml --costs costs.csv
      torchrun --nproc-per-node 4 -m stretto bench -c c.yaml \\
          --runtime executor -o mine.yaml
      torchrun --nproc-per-node 8 -m stretto bench -c dgx_h200 \\
          --runtime mscclpp -b 1K..256M -o mine.yaml
    """
    _check_options(runtime, target, collectives, budget)
    rank, world = place(command="bench")
    known = Cluster.load(cluster)
    if known.num_devices != world:
        raise InvalidInput(f"--cluster: {known.name} has {known.num_devices} devices, the job {world} ranks")
    sizes = parse_all_sizes(nbytes, factor)
    kinds = tuple(map(collective_kind, parse_names(collectives) or ())) or KINDS
    if runtime in GPU_RUNTIMES:
        found = _measured_on_gpus(runtime, known, sizes, budget, target.stem)
        if rank == 0:
            _tell_gpu_prices(found, target, rows)
        return

    with ExitStack() as stack:
        executor = stack.enter_context(joined())
        todo = (
            runs(known, channels=executor.channels, kinds=kinds, sizes=sizes)
            if runtime is None
            else price_cases(known, channels=executor.channels, sizes=sizes)
        )
        advance = stack.enter_context(progress("bench", len(todo))) if rank == 0 else lambda label: None
        done = measure(executor, known, todo, budget_s=budget, advance=advance)
    if rank == 0 and runtime is not None:
        _tell_prices(fit_prices(known, done.measurements, name=target.stem), target, rows)
    elif rank == 0:
        files = OutputFiles()
        files.write(
            target,
            lambda path: write_measurements(path, done.measurements),
            f"{len(done.measurements)} measurements in {done.seconds:.0f} s",
        )
        files.json(rows, {"seconds": done.seconds, "left_out": len(done.left_out), "measurements": done.measurements})
        _tell(done)
        files.tell(f"stretto plan -w WORKLOAD -c {quoted(cluster)} --costs {quoted(target)}")


def _check_options(runtime: str | None, target: Path, collectives: str | None, budget: float) -> None:
    """Raise `InvalidInput` where options do not go together, before a rank joins."""
    if runtime is not None:
        check_measurable(runtime)
    wanted = ".csv" if runtime is None else ".yaml"
    if target.suffix != wanted:
        raise InvalidInput(f"--output: must end with {wanted}, not {target.name}")
    if runtime is not None and collectives is not None:
        raise InvalidInput("--collectives: is not for --runtime, which times collectives of its own choice")
    if not 0 < budget < 1e6:
        raise InvalidInput(f"--budget: must be more than 0 and less than 1e6 seconds, not {budget:g}")


def _measured_on_gpus(runtime: str, cluster: Cluster, sizes: Sequence[int], budget_s: float, name: str) -> GpuPrices:
    """Time plans on this job's GPUs, and fit prices to the times."""
    import torch
    import torch.distributed as dist

    from ..runtime.probe.mscclpp_ranks import MscclppRanks, anybody, join_gpus

    rank = join_gpus()
    cases = gpu_cases(runtime, cluster, sizes)
    timer: PlanTimer | FusedTimer
    if runtime == "mscclpp":
        timer = PlanTimer(MscclppRanks(int(max(case.row.nbytes for case in cases))))
    else:
        from ..runtime.gpu import GpuCommunicator

        assert dist.group.WORLD is not None
        timer = FusedTimer(GpuCommunicator(dist.group.WORLD))
    with ExitStack() as stack:
        advance = stack.enter_context(progress("bench", len(cases))) if rank == 0 else lambda label: None
        measured = measure_gpu(timer, cases, budget_s=budget_s, agree=anybody, advance=advance)
    return fit_gpu(runtime, measured, name=name, device=torch.cuda.get_device_name())


def _tell_gpu_prices(found: GpuPrices, target: Path, rows: Path | None) -> None:
    """The prices, and how well they tell each time."""
    files = OutputFiles()
    files.write(target, found.fit.runtime.save)
    lines = [
        *((*pair, ratio, "") for pair, ratio in zip(found.fitted, found.fit.fitted, strict=True)),
        *((*pair, ratio, "not fitted") for pair, ratio in zip(found.judged, found.fit.judged, strict=True)),
    ]
    files.json(rows, {"error": found.fit.error, "rows": [
        {"program": label, "nbytes": row.nbytes, "time_us": row.time_us, "ratio": ratio, "fitted": not note}
        for label, row, ratio, note in lines
    ]})  # fmt: skip
    table = ResultTable("program", ">bytes", ">measured", ">predicted over it", "")
    for label, row, ratio, note in lines:
        table.add_row(label, format_bytes(row.nbytes), format_us(row.time_us), f"{ratio:.2f}", note)
    out().print(table)
    out().print(f"mean deviation {100 * found.fit.error:.1f} % of those that were not fitted")
    files.tell(f"stretto runtime show {quoted(target)}")


def _tell_prices(found: MeasuredPrices, target: Path, rows: Path | None) -> None:
    """The prices, and how well they tell each time."""
    fit, files = found.fit, OutputFiles()
    files.write(target, fit.runtime.save)
    lines = [
        *((one, ratio, True) for one, ratio in zip(found.fitted, fit.fitted, strict=True)),
        *((one, ratio, False) for one, ratio in zip(found.judged, fit.judged, strict=True)),
    ]
    files.json(rows, {"error": fit.error, "rows": [
        {"collective": one.collective, "algorithm": one.algorithm, "nbytes": one.nbytes, "time_us": one.time_us,
         "ratio": ratio, "fitted": fitted} for one, ratio, fitted in lines
    ]})  # fmt: skip
    table = ResultTable("collective", "algorithm", ">bytes", ">measured", ">predicted over it", "")
    for one, ratio, fitted in lines:
        note = "" if fitted else "not fitted"
        table.add_row(
            one.collective, one.algorithm, format_bytes(one.nbytes), format_us(one.time_us), f"{ratio:.2f}", note
        )  # fmt: skip
    out().print(table)
    out().print(f"mean deviation {100 * fit.error:.1f} % of those that were not fitted")
    if median([*fit.fitted, *fit.judged]) > TOO_LONG:
        out().print("most took far less than the links of the cluster say alone: probe again on a quieter machine")
    files.tell(f"stretto runtime show {quoted(target)}")


def _tell(done: BenchResult) -> None:
    """The fastest of every motif, and how much overlapped pairs slow each other."""
    best: dict[tuple[object, ...], Measurement] = {}
    for row in done.measurements:
        key = row.collective, row.nranks, row.groups, row.channels, row.nbytes
        if row.beside is None and (key not in best or row.time_us < best[key].time_us):
            best[key] = row
    table = ResultTable("collective", "ranks", "channels", ">bytes", "fastest", ">time")
    for row in best.values():
        ranks = f"{row.groups} x {row.nranks}" if row.groups > 1 else str(row.nranks)
        size, taken = format_bytes(row.nbytes), format_us(row.time_us)
        table.add_row(row.collective, ranks, "+".join(row.channels), size, row.algorithm, taken)
    console = out()
    console.print(table)
    for pair in overlaps(done.measurements):
        row = pair.alone
        what = f"{row.collective} of {format_bytes(row.nbytes)} on {'+'.join(row.channels)}"
        console.print(f"{what} beside {pair.together.beside}: {pair.slowdown:.2f} times as long", markup=False)
    if done.left_out:
        console.print(f"{len(done.left_out)} runs did not fit into the time (--budget)")
