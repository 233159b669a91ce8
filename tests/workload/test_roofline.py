# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from stretto.errors import InvalidInput
from stretto.workload.roofline import ACCELERATORS, EFFICIENCY, accelerator


def test_the_higher_roof_decides() -> None:
    v100 = accelerator("v100_hgx2", efficiency=0.5)
    assert v100.compute_us(15e12, 0.0, "fp32") == pytest.approx(2e6 + v100.launch_us)
    assert v100.compute_us(15e12, 1.0, "fp16") == pytest.approx(2e6 * 15 / 125 + v100.launch_us)
    assert v100.compute_us(1.0, 900e9, "fp32", kernels=3) == pytest.approx(2e6 + 3 * v100.launch_us)


def test_presets_are_an_eighth_of_the_papers_node() -> None:
    v100 = ACCELERATORS["v100_hgx2"]
    assert (8 * v100.tflops["fp32"], 8 * v100.tflops["fp16"], 8 * v100.hbm_gb_per_s) == (120, 1000, 7200)
    assert v100.efficiency == EFFICIENCY
    assert accelerator("themis_npu").compute_us(312e6, 0.0) == pytest.approx(1.0)


def test_wrong_values_are_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown accelerator 'tpu'; choose from: v100_hgx2"):
        accelerator("tpu")
    for efficiency in (0.0, -1.0, 1.5, float("nan"), float("inf")):
        with pytest.raises(InvalidInput, match="efficiency: must be above 0"):
            accelerator("a100", efficiency=efficiency)
    with pytest.raises(InvalidInput, match="unknown data type of v100_hgx2 'fp8'; choose from: fp32, fp16"):
        accelerator("v100_hgx2").compute_us(1.0, 1.0, "fp8")
