# SPDX-License-Identifier: Apache-2.0
"""The executor's price list: what is timed, and that prices come back from times that were made with known ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from probe_world import SimulatedMeter, network

from stretto.errors import InvalidInput
from stretto.planner.costs.measured import Measurement
from stretto.runtime.probe.find import find
from stretto.runtime.probe.prices import EXECUTOR, _row, check_measurable, fit_prices, price_cases
from stretto.runtime.probe.probe import conclude
from stretto.simulator.priced import run_priced
from stretto.simulator.runtimes import PRESETS, Protocol

CLUSTER = conclude(find(SimulatedMeter(network(((0, 1), (2, 3)), uplinks={"eth": [0.05] * 2})))).cluster
SIZES = (4096,)
HELD = ("eth", "shm")


def measured(**prices: object) -> list[Measurement]:
    """What an executor with these prices would take."""
    truth = replace(PRESETS[EXECUTOR], **prices)  # type: ignore[arg-type]
    found = []
    for (case,) in price_cases(CLUSTER, channels=("eth",), sizes=SIZES):
        one = Measurement(
            collective=case.kind, algorithm=case.algorithm, channels=HELD, nranks=4, nbytes=case.nbytes,
            time_us=1.0, groups=1,
        )  # fmt: skip
        row = _row(CLUSTER, one)
        took = run_priced(row.lowered, CLUSTER, nbytes=one.nbytes, runtime=truth).total_us  # type: ignore[arg-type]
        found.append(replace(one, time_us=took))
    return found


def test_prices_are_found_again() -> None:
    rows = measured(launch_us=20.0, protocols={"Simple": Protocol(signal_us=8.0)})[:6]
    found = fit_prices(CLUSTER, [*rows, *rows], name="mine")
    assert len(found.fitted) + len(found.judged) == len(rows), "a run that stands for two bindings counts once"
    assert found.judged and found.fit.error < fit_error(rows) / 2
    assert found.fit.runtime.name == "mine" and "judged on" in " ".join(found.fit.runtime.notes)


def fit_error(rows: list[Measurement]) -> float:
    """How far off the links alone are."""
    off = []
    for one in rows:
        row = _row(CLUSTER, one)
        links = run_priced(row.lowered, CLUSTER, nbytes=one.nbytes, runtime=PRESETS[EXECUTOR])  # type: ignore[arg-type]
        off.append(abs(links.total_us / one.time_us - 1))
    return sum(off) / len(off)


def test_too_few_times_and_other_runtimes_are_refused() -> None:
    with pytest.raises(InvalidInput, match="2 are too few"):
        fit_prices(CLUSTER, measured()[:2], name="x")
    for name in ("mscclpp:h200", "x"):
        with pytest.raises(InvalidInput, match=r"executor, mscclpp, stretto-gpu|did you mean"):
            check_measurable(name)
