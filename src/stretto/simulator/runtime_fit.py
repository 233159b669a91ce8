# SPDX-License-Identifier: Apache-2.0
"""`fit_runtime`: the prices of a runtime from measured times, judged on times that the fit has not seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import numpy as np

from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from ..programs.formats.mscclpp_wide import PlanForm
from ..programs.fused import Fused
from ..programs.lowered import OPS, Lowered
from ..programs.wide import WideProgram
from ..units import LARGEST
from .priced import run_priced
from .priced_fused import fused_time_us
from .priced_wide import wide_time_us
from .runtimes import WIDE_PRICES, WORK, Runtime

STEPS = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02)
"""By how much the logarithm of a price is moved, from coarse to fine."""
MAX_ROUNDS = 12


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

    Each free price is moved up and down by factors, from coarse to fine, for as long as that helps. Same input, same
    result.

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
    best = _loss(rows, _with(start, prices))
    for step in STEPS:
        for _ in range(MAX_ROUNDS):
            before = best
            for name in free:
                for factor in (exp(step), exp(-step)):
                    moved = prices | {name: prices[name] * factor}
                    loss = _loss(rows, _with(start, moved))
                    if loss < best * (1 - 1e-9):
                        best, prices = loss, moved
                        break
            report(f"mean deviation {100 * (exp(best) - 1):.1f} %")
            if best >= before * (1 - 1e-6):
                break
    found = _with(start, {name: float(f"{value:.4g}") for name, value in prices.items()})
    return RuntimeFit(
        runtime=found,
        fitted=tuple(_ratio(row, found) for row in rows),
        judged=tuple(_ratio(row, found) for row in judge),
    )


def _ratio(row: RuntimeRow, runtime: Runtime) -> float:
    if isinstance(row.lowered, WideProgram):
        return wide_time_us(row.lowered, row.cluster, nbytes=row.nbytes, form=row.form, runtime=runtime) / row.time_us
    if isinstance(row.lowered, Fused):
        took = fused_time_us(row.lowered, row.cluster, nbytes=row.nbytes, blocks=row.blocks, runtime=runtime)
        return took / row.time_us
    prices = runtime.without("receive") if row.zero_copy else runtime
    return run_priced(row.lowered, row.cluster, nbytes=row.nbytes, runtime=prices).total_us / row.time_us


def _loss(rows: Sequence[RuntimeRow], runtime: Runtime) -> float:
    return float(np.mean([abs(log(max(_ratio(row, runtime), 1e-12))) for row in rows]))


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
