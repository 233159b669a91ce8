# SPDX-License-Identifier: Apache-2.0
"""The price list of our executor on this machine: programs that differ in how many instructions they have are timed on
a job's own ranks, and the prices are fitted to two thirds of the times and judged on the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...cluster import Cluster
from ...errors import InvalidInput, unknown
from ...planner.costs.costs import Motion, SimulatedCosts
from ...planner.costs.measured import Measurement
from ...programs.lower import lower
from ...simulator import Runtime
from ...simulator.runtime_fit import RuntimeFit, RuntimeRow, fit_runtime
from ...simulator.runtimes import PRESETS
from .bench import BenchCase, best_cases
from .gpu_prices import GPU_RUNTIMES

EXECUTOR = "executor"
MEASURABLE = (EXECUTOR, *GPU_RUNTIMES)
KINDS = ("all_reduce", "all_gather", "all_to_all")
FREE = ("launch_us", "instruction_us", "signal_us", "handover_us", "copy", "reduce")
MOST = 6
"""Algorithms of each collective and size: fast ones, and some with many more instructions."""
JUDGED = 3
"""One of this many measured times is not fitted but judges the fit."""


@dataclass(frozen=True, kw_only=True)
class MeasuredPrices:
    """The price list, and the measurements that it was fitted to and judged on."""

    fit: RuntimeFit
    fitted: tuple[Measurement, ...]
    judged: tuple[Measurement, ...]


def check_measurable(runtime: str) -> None:
    """Refuse runtimes whose prices no bench measures; raises `InvalidInput`."""
    if runtime not in MEASURABLE:
        raise unknown("runtime to measure", runtime, MEASURABLE)


def price_cases(cluster: Cluster, *, channels: Sequence[str], sizes: Sequence[int]) -> list[tuple[BenchCase, ...]]:
    """What to time: collectives over all ranks by several algorithms, on the first network; the same on every rank.

    Args:
        cluster: The job's cluster.
        channels: The networks of the job.
        sizes: The sizes in bytes.

    Returns:
        One case at a time.

    Raises:
        InvalidInput: The cluster has none of the job's channels.
    """
    costs, everyone = SimulatedCosts(cluster), (tuple(range(cluster.num_devices)),)
    one_host = len({int(host) for host in cluster.node_host[: cluster.num_devices]}) == 1
    network = None if one_host or not channels else channels[0]
    found: list[tuple[BenchCase, ...]] = [
        (case,)
        for nbytes in sizes
        for kind in KINDS
        for case in best_cases(costs, kind, everyone, network, nbytes, MOST)
    ]
    if not found:
        raise InvalidInput(f"cluster: nothing to time: {cluster.name} has {', '.join(cluster.channels)}")
    return found


def fit_prices(cluster: Cluster, measured: Sequence[Measurement], *, name: str) -> MeasuredPrices:
    """Fit the executor's prices to measurements.

    Args:
        cluster: The job's cluster.
        measured: What `bench` measured of `price_cases`.
        name: The new runtime's name.

    Returns:
        The prices.

    Raises:
        InvalidInput: There are too few measurements.
    """
    rows = [(one, _row(cluster, one)) for one in _once(measured)]
    seen = [pair for at, pair in enumerate(rows) if at % JUDGED != JUDGED - 1]
    unseen = [pair for at, pair in enumerate(rows) if at % JUDGED == JUDGED - 1]
    if not unseen:
        raise InvalidInput(f"measurements: {len(rows)} are too few to fit prices to; raise --budget")
    notes = (
        f"Stretto's executor on CPUs, {cluster.num_devices} ranks of {cluster.name}",
        f"fitted to {len(seen)} measured times, judged on {len(unseen)} others (stretto bench --runtime)",
    )
    base: Runtime = replace(PRESETS[EXECUTOR], name=name, notes=notes)
    found = fit_runtime([row for _, row in seen], base, free=FREE, judge=[row for _, row in unseen])
    error = f"{100 * found.error:.0f} % off in the mean on those"
    found = replace(found, runtime=replace(found.runtime, notes=(*notes, error)))
    return MeasuredPrices(
        fit=found, fitted=tuple(one for one, _ in seen), judged=tuple(one for one, _ in unseen)
    )  # fmt: skip


def _once(measured: Sequence[Measurement]) -> list[Measurement]:
    """One run may stand for several sets of channels."""
    found: dict[tuple[object, ...], Measurement] = {}
    for one in measured:
        found.setdefault((one.collective, one.algorithm, one.nbytes), one)
    return list(found.values())


def _row(cluster: Cluster, one: Measurement) -> RuntimeRow:
    motion = Motion(kind=one.collective, groups=(tuple(range(cluster.num_devices)),), channels=one.channels)
    program = SimulatedCosts(cluster).program(motion, one.nbytes, one.algorithm)
    return RuntimeRow(lowered=lower(program), cluster=cluster, nbytes=one.nbytes, time_us=one.time_us)
