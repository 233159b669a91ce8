# SPDX-License-Identifier: Apache-2.0
"""Price lists of GPU runtimes: what is timed, and that prices come back from times that were made with known ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stretto import Cluster
from stretto.errors import InvalidInput, StrettoError
from stretto.programs.formats import mscclpp_reader, mscclpp_wide
from stretto.runtime.probe.gpu_prices import (
    GPU_RUNTIMES,
    PlanTimer,
    PriceCase,
    fit_gpu,
    gpu_cases,
    measure_gpu,
)
from stretto.simulator.priced_fused import fused_time_us
from stretto.simulator.priced_wide import wide_time_us
from stretto.simulator.runtimes import PRESETS, Runtime

SHARED = Cluster.preset("shared_gpu", nodes=4)


class KnownPrices:
    """Takes as long as some prices say."""

    def __init__(self, truth: Runtime) -> None:
        self.truth, self.asked = truth, 0

    def time_us(self, case: PriceCase) -> float:
        self.asked += 1
        row = case.row
        if "form" in case.options:
            return wide_time_us(case.program, row.cluster, nbytes=row.nbytes, form=row.form, runtime=self.truth)
        case.options["blocks"] = 4
        return fused_time_us(row.lowered, row.cluster, nbytes=row.nbytes, blocks=4, runtime=self.truth)  # type: ignore[arg-type]


@pytest.mark.parametrize("runtime", list(GPU_RUNTIMES))
def test_prices_are_found_again(runtime: str) -> None:
    start = PRESETS[GPU_RUNTIMES[runtime]]
    truth = replace(start, step_us=3 * start.step_us, meet_us=2 * start.meet_us, memory_gb_per_s=1500.0, rank_us=1.5)
    cases = gpu_cases(runtime, SHARED, (4096, 1 << 18, 1 << 24))
    rows = measure_gpu(KnownPrices(truth), cases, budget_s=1e9)
    assert len(rows) == len(cases) > 20
    found = fit_gpu(runtime, rows, name="mine", device="a GPU")
    assert found.fit.error < 0.03, "the list at which the fit starts is far off"
    assert found.fit.runtime.name == "mine" and "judged on" in " ".join(found.fit.runtime.notes)
    assert len(found.judged) == len(rows) // 3


def test_plans_that_are_timed_are_right_and_fit_the_gpu() -> None:
    for case in gpu_cases("mscclpp", SHARED, (4096, 1 << 24)):
        form = case.options["form"]
        assert form.streams * form.slices <= 132 // 4 and case.row.nbytes % 64 == 0
    plan = mscclpp_reader.loads(mscclpp_wide.dumps(case.program, form=form))
    assert mscclpp_reader.check_plan(plan)


def test_it_ends_when_any_rank_says_so() -> None:
    cases, timer = gpu_cases("mscclpp", SHARED, (4096,)), KnownPrices(PRESETS["mscclpp:h200"])
    assert measure_gpu(timer, cases, budget_s=1e9, agree=lambda late: timer.asked >= 2 or late)[1:] and timer.asked == 2
    with pytest.raises(InvalidInput, match="2 are too few"):
        fit_gpu("mscclpp", measure_gpu(timer, cases[:2], budget_s=1e9), name="x", device="a GPU")


def test_a_wrong_result_is_no_time() -> None:
    class Wrong:
        def plan(self, text: str) -> str:
            return text

        def wrong(self, plan: str, kind: str, nbytes: int, in_place: bool) -> int:
            return 3

    case = gpu_cases("mscclpp", SHARED, (4096,))[0]
    with pytest.raises(StrettoError, match="3 elements are wrong"):
        PlanTimer(Wrong()).time_us(case)  # type: ignore[arg-type]
