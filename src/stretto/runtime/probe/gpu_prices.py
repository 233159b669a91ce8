# SPDX-License-Identifier: Apache-2.0
"""The price list of a GPU runtime on a job's GPUs: plans of many forms are timed, and prices fitted to the times."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ...algorithms import algorithm
from ...cluster import Cluster
from ...errors import InvalidInput, StrettoError
from ...programs import Program
from ...programs.formats import mscclpp_wide
from ...programs.formats.mscclpp_wide import PlanForm, widen_in
from ...programs.fused import fuse
from ...simulator.runtime_fit import FUSED_PRICES, WIDE_STEP_PRICES, RuntimeFit, RuntimeRow, fit_runtime
from ...simulator.runtimes import PRESETS, Runtime
from ...synthesis.plan_search import forms_for

if TYPE_CHECKING:
    from ..gpu import GpuCommunicator
    from .mscclpp_ranks import MscclppRanks

GPU_RUNTIMES = {"mscclpp": "mscclpp:h200", "stretto-gpu": "stretto-gpu:h200"}
"""The GPU runtimes that can be measured, each with the price list at which the fit starts."""
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
MOST_FORMS = 6
"""Forms of each collective and size, from few threadblocks to many."""
ALGORITHMS = {"all_reduce": ("direct", "ring"), "all_gather": ("direct", "ring"), "reduce_scatter": ("direct", "ring")}
"""What the GPU executor is timed with; other collectives have only the direct algorithm."""
PACKET_BYTES = 1 << 20
JUDGED = 3
"""One of this many measured times, drawn by a seed, is not fitted but judges the fit."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PriceCase:
    """One thing to time: a program in some form at some size, and the row that its time becomes."""

    label: str
    kind: str
    program: Program
    row: RuntimeRow
    options: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class GpuPrices:
    """The price list, and the rows that it was fitted to and judged on, each with its label."""

    fit: RuntimeFit
    fitted: tuple[tuple[str, RuntimeRow], ...]
    judged: tuple[tuple[str, RuntimeRow], ...]


class Timer(Protocol):
    """Runs cases on a job's GPUs; all ranks ask for the same ones."""

    def time_us(self, case: PriceCase) -> float:
        """The median time of a case on the slowest rank; raises `StrettoError` where a result is wrong."""


def gpu_cases(runtime: str, cluster: Cluster, sizes: Sequence[int]) -> list[PriceCase]:
    """What to time, the same on every rank.

    Args:
        runtime: One of `GPU_RUNTIMES`.
        cluster: The job's cluster.
        sizes: The sizes in bytes; each is rounded up to what ranks can divide.

    Returns:
        The cases, by rising size.
    """
    unit = 16 * cluster.num_devices
    make = _plans if runtime == "mscclpp" else _fused
    return [
        case for nbytes in sorted(sizes) for kind in KINDS for case in make(cluster, kind, -(-nbytes // unit) * unit)
    ]


def _plans(cluster: Cluster, kind: str, nbytes: int) -> list[PriceCase]:
    program = algorithm("direct", kind, cluster.num_devices, in_place=kind != "all_to_all")
    forms = [f for f in forms_for(program, nbytes, PRESETS[GPU_RUNTIMES["mscclpp"]], cluster) if not f.loop_bytes]
    forms.sort(key=lambda form: (form.protocol, form.streams * form.slices, str(form)))
    step = max(1, len(forms) // MOST_FORMS)
    return [
        PriceCase(
            label=f"{kind} {form}", kind=kind, program=program, options={"form": form},
            row=RuntimeRow(lowered=widen_in(program, form), cluster=cluster, nbytes=nbytes, time_us=1.0, form=form),
        )
        for form in forms[::-step][:MOST_FORMS]
    ]  # fmt: skip


def _fused(cluster: Cluster, kind: str, nbytes: int) -> list[PriceCase]:
    found = []
    for name in ALGORITHMS.get(kind, ("direct",)):
        program = algorithm(name, kind, cluster.num_devices)
        modes: list[dict[str, Any]] = [{"protocol": "simple", "symmetric": True}, {"protocol": "simple"}]
        modes += [{"protocol": "ll"}] if nbytes <= PACKET_BYTES else []
        for mode in modes:
            row = RuntimeRow(lowered=fuse(program, **mode), cluster=cluster, nbytes=nbytes, time_us=1.0)
            memory = "symmetric" if mode.get("symmetric") else "staged"
            label = f"{kind} {program.name} {mode['protocol']} {memory}"
            found.append(PriceCase(label=label, kind=kind, program=program, row=row, options=mode))
    return found


class PlanTimer:
    """Times cases on the executor of MSCCL++."""

    def __init__(self, ranks: MscclppRanks) -> None:
        self._ranks = ranks

    def time_us(self, case: PriceCase) -> float:
        """Write the plan, check it on data, and time it."""
        form: PlanForm = case.options["form"]
        plan = self._ranks.plan(mscclpp_wide.dumps(case.program, form=form))
        what = case.kind, int(case.row.nbytes), case.program.collective.in_place
        wrong = self._ranks.wrong(plan, *what)
        if wrong:
            raise StrettoError(f"{case.label} of {case.row.nbytes:g} bytes: {wrong} elements are wrong on MSCCL++")
        times = self._ranks.times_us(plan, *what)
        return times[len(times) // 2]


class FusedTimer:
    """Times cases on our own executor on GPU memory."""

    def __init__(self, communicator: GpuCommunicator) -> None:
        self._communicator = communicator

    def time_us(self, case: PriceCase) -> float:
        """Load the program and time it."""
        import torch

        from .mscclpp_ranks import graph_times_us, slowest

        comm = self._communicator
        loaded = comm.load(case.program, dtype="float32", nbytes=int(case.row.nbytes), **case.options)
        counts = max(loaded.encoded.inputs), max(loaded.encoded.outputs)
        symmetric = bool(case.options.get("symmetric"))
        given, made = (
            comm.empty(count, torch.float32) if symmetric else torch.zeros(count, device=comm.device)
            for count in counts
        )  # fmt: skip
        given, made = given[: loaded.encoded.inputs[comm.rank]], made[: loaded.encoded.outputs[comm.rank]]
        given.zero_()
        case.options["blocks"] = loaded.encoded.blocks
        times = slowest(graph_times_us(partial(comm.launch, loaded, given, made), 20 if counts[0] > 1 << 20 else 80))
        return times[len(times) // 2]


def measure_gpu(
    timer: Timer,
    cases: Sequence[PriceCase],
    *,
    budget_s: float,
    agree: Callable[[bool], bool] = bool,
    advance: Callable[[str], None] = lambda label: None,
) -> list[tuple[str, RuntimeRow]]:
    """Time cases until the time is spent.

    Args:
        timer: Runs them.
        cases: What to time.
        budget_s: Seconds after which no case is begun.
        agree: Whether any rank says so: all end together.
        advance: Called with the label of each case.

    Returns:
        The label and the measured row of each case.

    Raises:
        StrettoError: A result was wrong.
    """
    found, until = [], time.monotonic() + budget_s
    for case in cases:
        if agree(time.monotonic() > until):
            break
        advance(case.label)
        took = timer.time_us(case)
        blocks = int(case.options.get("blocks", 1))
        found.append((case.label, replace(case.row, time_us=took, blocks=blocks)))
    return found


def fit_gpu(runtime: str, rows: Sequence[tuple[str, RuntimeRow]], *, name: str, device: str) -> GpuPrices:
    """Fit prices to two thirds of the rows and judge them on the others.

    Args:
        runtime: One of `GPU_RUNTIMES`.
        rows: What `measure_gpu` found.
        name: The new runtime's name.
        device: What it was measured on, for the notes.

    Returns:
        The prices.

    Raises:
        InvalidInput: There are too few rows.
    """
    drawn = set(random.Random(0).sample(range(len(rows)), len(rows) // JUDGED))  # in turn, all would be of one mode
    seen = [row for at, row in enumerate(rows) if at not in drawn]
    unseen = [row for at, row in enumerate(rows) if at in drawn]
    if len(unseen) < 2:
        raise InvalidInput(f"measurements: {len(rows)} are too few to fit prices to; raise --budget or add sizes")
    ranks = rows[0][1].cluster.num_devices
    notes = (
        f"{runtime} on {device}, {ranks} ranks of {rows[0][1].cluster.name}",
        f"fitted to {len(seen)} measured times, judged on {len(unseen)} others (stretto bench --runtime)",
    )
    base: Runtime = replace(PRESETS[GPU_RUNTIMES[runtime]], name=name, notes=notes)
    free = WIDE_STEP_PRICES if runtime == "mscclpp" else FUSED_PRICES
    fit = fit_runtime([row for _, row in seen], base, free=free, judge=[row for _, row in unseen])
    error = f"{100 * fit.error:.0f} % off in the mean on those"
    fit = replace(fit, runtime=replace(fit.runtime, notes=(*notes, error)))
    return GpuPrices(fit=fit, fitted=tuple(seen), judged=tuple(unseen))
