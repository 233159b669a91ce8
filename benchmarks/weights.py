# SPDX-License-Identifier: Apache-2.0
"""Weights of whole models from trainers to servers, planned at full size: the bound and published times.

Shapes are those of public configurations (`stretto.weights.MODELS`); layouts of the two M2N cases are those that NCCL
M2N publishes, on its racks of 64 GB200s; the others are ours. `fair_ms` is with links that are shared fairly, `fifo_ms`
with links that send one message at a time; `of_bound` is the longer of the two over the bound, which no algorithm beats
on these links; `fair_of_bound` is of the first alone. `plan_cpu_s` is everything from shapes to the verified program.
`published_ms` was measured by others on real hardware, with kernels, memory and software that a plan does not have; it
says how far a network of these links is from being used, not which implementation is faster.
"""

from __future__ import annotations

from functools import partial

from common import Row, run_cases

import stretto as st
from stretto.weights import plan_weights

CASES: dict[str, tuple[str, str, str, str, str, float, str]] = {
    "DeepSeek-V3 128 to 128": (
        "deepseek-v3", "pp=4,dp=32,ep=16", "tp=8,dp=16", "gb200_nvl72:4,trays=16", "fp8", 1447.0, "NCCL M2N, GB200",
    ),
    "Qwen3-235B 64 to 64": (
        "qwen3-235b", "pp=4,dp=8,tp=2,ep=16", "tp=8,dp=8", "gb200_nvl72:2,trays=16", "bf16", 989.0, "NCCL M2N, GB200",
    ),
    "Kimi-K2 256 to 128": (
        "kimi-k2", "fsdp=256,ep=32", "dp=128,ep=128", "dgx_h100:48", "fp8", 1300.0, "Perplexity, 400 Gbit/s a GPU",
    ),
    "Kimi-K2 256 to 256": (
        "kimi-k2", "fsdp=256,ep=32", "dp=256,ep=128", "dgx_h100:64", "fp8", 16040.0, "checkpoint-engine, H20",
    ),
    "Llama-3-70B FSDP 64 to TP8 x 8": (
        "llama-3-70b", "fsdp=64", "tp=8,dp=8", "dgx_h100:16", "bf16", 0.0, "",
    ),
    "DeepSeek-V3 128 to EP 128": (
        "deepseek-v3", "pp=8,dp=16,ep=16", "tp=8,dp=16,ep=128", "dgx_h100:32", "fp8", 0.0, "",
    ),
}  # fmt: skip
"""Model, trainer, server, cluster, dtype, published milliseconds, and who published them."""


def case(name: str, quick: bool) -> list[Row]:
    """One row: the plan's times, bound and costs."""
    model, trainer, server, cluster, dtype, published, source = CASES[name]
    plan = plan_weights(model, trainer=trainer, server=server, cluster=st.Cluster.load(cluster), dtype=dtype)
    bound, times = plan.reshard.bound_us, plan.times_us
    return [{
        "case": name, "cluster": cluster, "sent_gb": plan.nbytes / 1e9, "bound_ms": bound / 1e3,
        "fair_ms": times["fair"] / 1e3, "fifo_ms": times["fifo"] / 1e3, "fair_of_bound": times["fair"] / bound,
        "of_bound": max(times.values()) / bound, "plan_cpu_s": plan.cpu_s, "published_ms": published or None,
        "published_by": source,
    }]  # fmt: skip


if __name__ == "__main__":
    run_cases(
        __file__, __doc__, "Weights from trainers to servers", {name: partial(case, name) for name in CASES},
        quick=("Llama-3-70B FSDP 64 to TP8 x 8", "Qwen3-235B 64 to 64"),
    )  # fmt: skip
