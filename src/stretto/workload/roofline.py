# SPDX-License-Identifier: Apache-2.0
"""The time of a kernel: the larger of its arithmetic and its memory time, divided by the efficiency of real kernels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..errors import InvalidInput, unknown

EFFICIENCY = 0.998
"""The share of either roof that kernels reach on SYNDICATE's testbed, for A1 to A6: calibrated so that ByteScheduler+
idles 44.9 % on A2. The whole roof: Table 2 and FP32 overstate the compute, see ``docs/workloads.md``. What results are
without it is in ``docs/calibration.md``."""
TYPICAL = 0.5
"""The share of the data sheet's figures that well-tuned training reaches on other accelerators."""
LAUNCH_US = 5.0
"""Microseconds that one kernel takes at least."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """The arithmetic and memory rates of one device, and the share of them that real kernels reach.

    >>> v100 = accelerator("v100_hgx2", efficiency=1.0)
    >>> round(v100.compute_us(125e9, 0.0, "fp16"), 3), round(v100.compute_us(0.0, 900e6, "fp16"), 3)
    (1005.0, 1005.0)
    """

    name: str
    tflops: Mapping[str, float]
    """Peak 10^12 floating point operations per second, by data type."""
    hbm_gb_per_s: float
    efficiency: float = TYPICAL
    launch_us: float = LAUNCH_US

    def __post_init__(self) -> None:
        if not (math.isfinite(self.efficiency) and 0 < self.efficiency <= 1):
            raise InvalidInput(f"efficiency: must be above 0 and at most 1, not {self.efficiency:g}")

    def compute_us(self, flops: float, nbytes: float, dtype: str = "fp16", *, kernels: int = 1) -> float:
        """The time of some kernels that together do this much arithmetic and this much reading and writing.

        Args:
            flops: floating point operations of all kernels together.
            nbytes: bytes that all kernels together read and write.
            dtype: data type of the arithmetic, one of the keys of `tflops`.
            kernels: number of kernels, each of which also costs `launch_us`.

        Returns:
            Microseconds.

        Raises:
            InvalidInput: the device has no figure for the data type.
        """
        if dtype not in self.tflops:
            raise unknown(f"data type of {self.name}", dtype, self.tflops)
        roof_us = max(flops / (self.tflops[dtype] * 1e6), nbytes / (self.hbm_gb_per_s * 1e3))
        return roof_us / self.efficiency + kernels * self.launch_us


ACCELERATORS: dict[str, Accelerator] = {
    entry.name: entry
    for entry in (
        # An eighth of SYNDICATE's Table 1, which describes a node of eight.
        Accelerator(
            name="v100_hgx2", tflops={"fp32": 120 / 8, "fp16": 1000 / 8}, hbm_gb_per_s=7200 / 8, efficiency=EFFICIENCY
        ),
        Accelerator(
            name="a100", tflops={"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}, hbm_gb_per_s=2039.0
        ),
        Accelerator(
            name="h100",
            tflops={"fp32": 67.0, "tf32": 494.5, "fp16": 989.0, "bf16": 989.0, "fp8": 1979.0},
            hbm_gb_per_s=3350.0,
        ),
        # NVIDIA's data sheet of the H200 (SXM, dense figures): an H100 with more and faster memory.
        Accelerator(
            name="h200",
            tflops={"fp32": 67.0, "tf32": 494.5, "fp16": 989.0, "bf16": 989.0, "fp8": 1979.0},
            hbm_gb_per_s=4800.0,
        ),
        # NVIDIA's data sheet of the GB200 NVL72: half of a superchip, which has two GPUs; half of the sparse figures.
        Accelerator(
            name="gb200",
            tflops={"fp32": 80.0, "tf32": 1250.0, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0},
            hbm_gb_per_s=8000.0,
        ),
        # AMD's data sheet of the Instinct MI300X, dense figures.
        Accelerator(
            name="mi300x",
            tflops={"fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4, "fp8": 2614.9},
            hbm_gb_per_s=5300.0,
        ),
        # Themis 5.1: "roofline FP16 performance from the total FLOPS" of an A100, taken at its word.
        Accelerator(name="themis_npu", tflops={"fp16": 312.0}, hbm_gb_per_s=2039.0, efficiency=1.0, launch_us=0.0),
    )
}


def accelerator(name: str, *, efficiency: float | None = None) -> Accelerator:
    """The preset of this name; `efficiency`, if given, replaces the preset's."""
    if name not in ACCELERATORS:
        raise unknown("accelerator", name, ACCELERATORS)
    chosen = ACCELERATORS[name]
    return chosen if efficiency is None else replace(chosen, efficiency=efficiency)
