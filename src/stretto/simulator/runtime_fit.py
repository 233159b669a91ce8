# SPDX-License-Identifier: Apache-2.0
"""`fit_runtime`: the prices of a runtime from measured times, judged on times that the fit has not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp
from typing import Any

import numpy as np

from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from ..programs.formats.mscclpp_wide import PlanForm
from ..programs.fused import Fused
from ..programs.lowered import OPS, Lowered
from ..programs.wide import WideProgram
from ..units import LARGEST
from .price_graph import EventCost, PriceGraph
from .priced import run_priced
from .priced_fused import fused_graph
from .priced_wide import wide_graph
from .runtimes import WIDE_PRICES, WORK, Runtime

STEPS = (0.5, 0.25, 0.1, 0.05, 0.02)
"""By how much the logarithm of a price is moved, from coarse to fine."""
WIDE_STEP_PRICES = (
    "step_us", "meet_us", "peer_us", "place_us", "block_us", "thread_us", "rank_us", "memory_gb_per_s",
    "cache_gb_per_s", "step_us:LL", "poll_us:LL", "send_us:LL", "signal_us:LL", "read", "add", "write",
)  # fmt: skip
"""What is fitted to times of plans of wide steps."""
FUSED_PRICES = ("launch_us", *(name for name in WIDE_STEP_PRICES if name != "thread_us"))
"""What is fitted to times of our executor on GPU memory."""
MAX_ROUNDS = 6
MAX_DESCENTS, MAX_DAMPINGS, DAMPING, TINY, SMALL_ERROR = 30, 8, 1e-3, 1e-3, 0.02
"""Of the descent with all prices: how often, how often it is shortened, by what at first; the step with which slopes
are measured; and the error below which a row weighs no more."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RuntimeRow:
    """One measurement: streams that ran on a cluster with so many bytes, and the time that they took."""

    lowered: Lowered | WideProgram | Fused
    cluster: Cluster
    nbytes: float
    time_us: float
    zero_copy: bool = False
    """Whether messages were written straight to their place: taking them out of slots then costs nothing."""
    form: PlanForm | None = None
    """How wide steps were carried out."""
    blocks: int = 1
    """The blocks of each rank that ran fused steps."""

    def __post_init__(self) -> None:
        for key in ("nbytes", "time_us"):
            # NumPy does not take whole numbers of any size, which a file may have.
            if not 0 < getattr(self, key) <= LARGEST:
                raise InvalidInput(f"{key}: must be > 0 and at most {LARGEST:g}, not {str(getattr(self, key))[:40]}")


@dataclass(frozen=True, kw_only=True)
class RuntimeFit:
    """The runtime that fits best, and predicted over measured time of every row: those it was fitted on, and others."""

    runtime: Runtime
    fitted: tuple[float, ...]
    judged: tuple[float, ...]

    @property
    def error(self) -> float:
        """The mean deviation of the rows that were not fitted (of all where there are no others), as a share."""
        ratios = self.judged or self.fitted
        return float(np.mean([abs(ratio - 1) for ratio in ratios]))


def fit_runtime(
    rows: Sequence[RuntimeRow],
    start: Runtime,
    *,
    free: Sequence[str],
    judge: Sequence[RuntimeRow] = (),
    report: Callable[[str], None] = lambda message: None,
) -> RuntimeFit:
    """Find the prices at which simulated times are closest to measured ones (mean of ``|log ratio|``).

    First all prices are moved together along their slopes, then each up and down by factors, from coarse to fine, for
    as long as that helps. Same input, same result.

    Args:
        rows: The measurements to fit.
        start: Where to start; its other fields stay as they are. A free price that is 0 starts at 1.
        free: The prices to move: ``launch_us``, ``handover_us``, ``instruction_us`` (all kinds in proportion),
            ``signal_us`` (protocol Simple), those of packets (``signal_us:LL``, ``step_us:LL``, ``poll_us:LL``,
            ``send_us:LL``), those of wide steps (`WIDE_PRICES`), or the block's ``copy``, ``reduce``, ``put``,
            ``receive``, ``read``, ``add``, ``write``.
        judge: Measurements that the fit does not see.
        report: Called with a line of text after every round.

    Returns:
        The runtime and the ratios.

    Raises:
        InvalidInput: There are no rows, or a free price is unknown.
    """
    if not rows:
        raise InvalidInput("rows: must have at least one measurement")
    prices = {name: _get(start, name) or 1.0 for name in free}
    timed = _Times(rows, _with(start, prices))
    fit = _Fit(timed, start, tuple(free), report)
    found = fit.polished(fit.descended(np.log([prices[name] for name in free]))) if prices else np.zeros(0)
    rounded = _with(start, {name: float(f"{value:.4g}") for name, value in fit.prices(found).items()})
    return RuntimeFit(
        runtime=rounded,
        fitted=tuple(timed.ratios(rounded).tolist()),
        judged=tuple(_Times(judge, rounded).ratios(rounded).tolist()) if judge else (),
    )


class _Fit:
    """The search over the logarithms of prices for the least mean of ``|log ratio|``."""

    def __init__(self, timed: _Times, start: Runtime, free: tuple[str, ...], report: Callable[[str], None]) -> None:
        self._timed, self._start, self._free, self._report = timed, start, free, report

    def prices(self, logs: np.ndarray) -> dict[str, float]:
        return {name: exp(value) for name, value in zip(self._free, logs.tolist(), strict=True)}

    def _errors(self, logs: np.ndarray) -> np.ndarray:
        ratios = self._timed.ratios(_with(self._start, self.prices(logs)))
        return np.asarray(np.log(np.maximum(ratios, 1e-12)))

    def descended(self, logs: np.ndarray) -> np.ndarray:
        """All prices at once along what each of them changes: least squares, where large errors weigh less."""
        errors = self._errors(logs)
        best, damping = float(np.abs(errors).mean()), DAMPING
        for _ in range(MAX_DESCENTS):
            slopes = np.stack([(self._errors(logs + step) - errors) / TINY for step in TINY * np.eye(len(logs))], 1)
            weighed = slopes.T / np.maximum(np.abs(errors), SMALL_ERROR)
            for _ in range(MAX_DAMPINGS):
                normal = weighed @ slopes + damping * len(errors) * np.eye(len(logs))
                moved = logs - np.clip(np.linalg.solve(normal, weighed @ errors), -1.0, 1.0)
                tried = self._errors(moved)
                loss = float(np.abs(tried).mean())
                if loss < best:
                    break
                damping *= 4
            else:
                return logs
            gain, best, logs, errors, damping = best - loss, loss, moved, tried, damping / 4
            self._report(f"mean deviation {100 * (exp(best) - 1):.1f} %")
            if gain < 1e-3 * best:
                break
        return logs

    def polished(self, logs: np.ndarray) -> np.ndarray:
        """Each price up and down by factors, from coarse to fine, for as long as that helps."""
        best = float(np.abs(self._errors(logs)).mean())
        for step in STEPS:
            for _ in range(MAX_ROUNDS):
                before = best
                for move in step * np.eye(len(logs)):
                    for moved in (logs + move, logs - move):
                        loss = float(np.abs(self._errors(moved)).mean())
                        if loss < best * (1 - 1e-9):
                            best, logs = loss, moved
                            break
                self._report(f"mean deviation {100 * (exp(best) - 1):.1f} %")
                if best >= before * (1 - 1e-3):
                    break
        return logs


class _Times:
    """Predicted over measured times of many rows with any prices.

    The events of steps are made once, and those of all rows whose ranks share a GPU, so that nothing travels over
    links, are run together: level by level of what waits for what.
    """

    def __init__(self, rows: Sequence[RuntimeRow], start: Runtime) -> None:
        self._measured = np.array([row.time_us for row in rows])
        self._streams = [(at, row) for at, row in enumerate(rows) if isinstance(row.lowered, Lowered)]
        graphs = [(at, _graph(row, start)) for at, row in enumerate(rows) if not isinstance(row.lowered, Lowered)]
        self._linked = [(at, graph) for at, graph in graphs if graph.message]
        self._free = [(at, graph) for at, graph in graphs if not graph.message]
        level: list[int] = []
        waits: list[list[int]] = []
        self._costs: list[tuple[PriceGraph, EventCost]] = []
        cost_of: list[int] = []
        self._ends: list[int] = []
        for _, graph in self._free:
            first, number = len(level), {cost: len(self._costs) + k for k, cost in enumerate(dict.fromkeys(graph.cost))}
            self._costs += [(graph, cost) for cost in number]
            cost_of += [number[cost] for cost in graph.cost]
            for after in graph.after:
                waits.append([first + a for a in after])
                level.append(1 + max((level[first + a] for a in after), default=-1))
            self._ends.append(first)
        self._cost_of = np.array(cost_of, np.int64)
        self._levels = []
        for which in range(1, max(level, default=0) + 1):
            events = [e for e in np.flatnonzero(np.array(level) == which).tolist()]
            sizes = [len(waits[e]) for e in events]
            before = np.array([a for e in events for a in waits[e]])
            self._levels.append((np.array(events), before, np.cumsum([0, *sizes[:-1]])))

    def ratios(self, prices: Runtime) -> np.ndarray:
        found = np.empty(len(self._measured))
        for at, row in self._streams:
            assert isinstance(row.lowered, Lowered)
            mine = prices.without("receive") if row.zero_copy else prices
            found[at] = run_priced(row.lowered, row.cluster, nbytes=row.nbytes, runtime=mine).total_us
        for at, graph in self._linked:
            found[at] = graph.total_us(prices)
        if self._free:
            delays = np.array([graph.delay_us(cost, prices) for graph, cost in self._costs])
            done = delays[self._cost_of]
            for events, before, starts in self._levels:
                done[events] += np.maximum.reduceat(done[before], starts)
            found[[at for at, _ in self._free]] = np.maximum.reduceat(done, self._ends)
        return np.asarray(found / self._measured)


def _graph(row: RuntimeRow, start: Runtime) -> PriceGraph:
    """The events of wide or fused steps."""
    if isinstance(row.lowered, WideProgram):
        form = row.form or PlanForm()
        return wide_graph(row.lowered, row.cluster, nbytes=row.nbytes, form=form, runtime=start)
    assert isinstance(row.lowered, Fused)
    return fused_graph(row.lowered, row.cluster, nbytes=row.nbytes, blocks=row.blocks, runtime=start)


PLAIN = ("launch_us", "handover_us", *WIDE_PRICES)
OF_PROTOCOL = ("signal_us", "step_us", "poll_us", "send_us")
CHOICES = (*PLAIN, "instruction_us", "signal_us", *(f"{name}:LL" for name in OF_PROTOCOL), *WORK)


def _get(runtime: Runtime, name: str) -> float:
    if name not in CHOICES:
        raise unknown("price to fit", name, CHOICES)
    if name in PLAIN:
        return float(getattr(runtime, name))
    if name == "instruction_us":
        return max(runtime.instruction_us.values(), default=0.0)
    price, _, protocol = name.partition(":")
    if price in OF_PROTOCOL:
        return float(getattr(runtime.protocol(protocol or "Simple"), price))
    return runtime.block_gb_per_s.get(name, 0.0)


def _with(runtime: Runtime, prices: dict[str, float]) -> Runtime:
    for name, value in prices.items():
        if name in PLAIN:
            change: dict[str, Any] = {name: value}
            runtime = replace(runtime, **change)
        elif name == "instruction_us":
            now = dict(runtime.instruction_us) or dict.fromkeys(OPS[1:], 1.0)
            most = max(now.values())
            runtime = replace(runtime, instruction_us={kind: price / most * value for kind, price in now.items()})
        elif name.partition(":")[0] in OF_PROTOCOL:
            price, _, protocol = name.partition(":")
            of_protocol: dict[str, Any] = {price: value}
            changed = replace(runtime.protocol(protocol or "Simple"), **of_protocol)
            runtime = replace(runtime, protocols={**runtime.protocols, protocol or "Simple": changed})
        else:
            runtime = replace(runtime, block_gb_per_s={**runtime.block_gb_per_s, name: value})
    return runtime
