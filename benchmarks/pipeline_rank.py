# SPDX-License-Identifier: Apache-2.0
"""A rank of `pipeline.py --only real`: the model of examples/train_pipeline.py under several systems in turns.

stretto lab run --hosts 2 --ranks 1 --uplink eth=300mbit -- python benchmarks/pipeline_rank.py --systems 1f1b,eager_1f1b
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from stretto.pipeline import FULL, eager_1f1b, one_f_one_b, zb_h1
from stretto.torch import pipeline

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from train_pipeline import STAGES, Stage

SYSTEMS = {
    "torch_1f1b": "PyTorch's own Schedule1F1B",
    "1f1b": "1F1B; every transfer is waited for, as without overlap",
    "overlap": "1F1B; transfers overlap",
    "eager_1f1b": "eager-1F1B",
    "eager_1f1b+delay": "eager-1F1B with delayed weights' gradients",
    "zb_h1": "zero bubble",
}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="eager_1f1b", help=f"some of {','.join(SYSTEMS)}")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rows", type=int, default=256, help="of one micro-batch")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=6, help="layers of each stage")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=1, help="all systems take turns so many times")
    parser.add_argument("--json", action="store_true", help="print losses, times and stage times as JSON")
    return parser.parse_args()


def runtime_of(system: str, stage: PipelineStage, microbatches: int) -> Any:
    """The runtime that a system stands for."""
    loss = nn.functional.mse_loss
    if system == "torch_1f1b":
        return Schedule1F1B(stage, microbatches, loss_fn=loss)
    if system.startswith("eager_1f1b"):
        schedule = eager_1f1b(STAGES, microbatches, delay=1 if system.endswith("+delay") else FULL)
    else:
        schedule = zb_h1(STAGES, microbatches) if system == "zb_h1" else one_f_one_b(STAGES, microbatches)
    return pipeline(schedule, [stage], loss_fn=loss, blocking=system == "1f1b")


def stage_times_us(module: nn.Module, inputs: tuple[Tensor, ...], repeats: int = 5) -> tuple[float, float]:
    """Forward and backward of one micro-batch on this rank, without any communication, but with the other computing."""
    ahead, back = [], []
    for _ in range(repeats):
        given = tuple(tensor.detach().requires_grad_() for tensor in inputs)
        begin = time.perf_counter()
        outputs = module(*given)
        middle = time.perf_counter()
        joined = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(joined, [torch.ones_like(tensor) for tensor in joined])
        back.append(time.perf_counter() - middle)
        ahead.append(middle - begin)
    module.zero_grad()
    return 1e6 * statistics.median(ahead), 1e6 * statistics.median(back)


def train(system: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train from the same weights on the same data; the losses are known on the last stage only."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    module = Stage(options.width, options.depth)
    dist.barrier()
    one = torch.zeros(options.rows, options.width)
    forward_us, backward_us = stage_times_us(module, (one,) * (rank + 1))
    runtime = runtime_of(system, PipelineStage(module, rank, STAGES, torch.device("cpu")), options.microbatches)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(7)
    shape = (options.rows * options.microbatches, options.width)
    inputs, targets = torch.randn(shape, generator=data), torch.randn(shape, generator=data)
    losses, times = [], []
    for _ in range(options.iterations):
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        parts: list[Tensor] = []
        if rank == 0:
            runtime.step(inputs)
        else:
            runtime.step(target=targets, losses=parts)
        optimizer.step()
        dist.barrier()
        times.append(time.perf_counter() - begin)
        losses.append(sum(float(part.detach()) for part in parts) / options.microbatches)
    return {
        "system": system, "losses": losses, "times_s": times, "forward_us": forward_us, "backward_us": backward_us,
    }  # fmt: skip


def main() -> None:
    """The losses are those of any other schedule; the time is what the schedule makes of it."""
    options = arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_world_size() != STAGES:
        raise SystemExit(f"this model has {STAGES} stages: start it on as many ranks")
    for _ in range(options.rounds):
        for system in options.systems.split(","):
            if system not in SYSTEMS:
                raise SystemExit(f"unknown system {system!r}; choose from: {', '.join(SYSTEMS)}")
            found = train(system, options)
            late = found["times_s"][1:] or found["times_s"]
            if options.json:
                print(json.dumps(found), flush=True)
            elif dist.get_rank() == STAGES - 1:
                print(f"{system}: loss", *(f"{loss:.6f}" for loss in found["losses"]))
                print(f"{system}: iteration {1e3 * statistics.median(late):.1f} ms (median of {len(late)})", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
