# SPDX-License-Identifier: Apache-2.0
"""Train a model with a long skip connection in two pipeline stages, under PyTorch's own pipeline runtime.

torchrun --nproc-per-node 2 examples/train_pipeline.py --schedule eager_1f1b
stretto lab run --hosts 2 --ranks 1 --uplink eth=300mbit -- python examples/train_pipeline.py --schedule 1f1b
"""

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from stretto.pipeline import eager_1f1b, one_f_one_b, zb_h1
from stretto.torch import pipeline

STAGES, MICROBATCHES, ROWS = 2, 8, 64
SCHEDULES = {"1f1b": one_f_one_b, "eager_1f1b": eager_1f1b, "zb_h1": zb_h1}


class Stage(nn.Module):
    """One of both stages; what the first ends with, and what it began with for the skip, travel to the last."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.one = nn.Linear(width, width)
        self.deep = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth)))

    def forward(self, *given: Tensor) -> Any:
        """The last stage gets both tensors, and joins them behind the deep layers."""
        if len(given) == 2:
            return self.one(self.deep(given[0]) + given[1])
        return self.deep(skip := torch.tanh(self.one(*given))), skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=SCHEDULES, default="eager_1f1b")
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(rank := dist.get_rank())
    module = Stage(options.width, depth=6)
    stage = PipelineStage(module, rank, STAGES, torch.device("cpu"))
    runtime = pipeline(SCHEDULES[options.schedule](STAGES, MICROBATCHES), [stage], loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs, targets = torch.randn(2, ROWS * MICROBATCHES, options.width, generator=torch.manual_seed(7))
    for step in range(5):
        begin, losses = time.perf_counter(), list[Tensor]()
        runtime.step(inputs) if rank == 0 else runtime.step(target=targets, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if rank == STAGES - 1:
            mean, took_ms = torch.stack(losses).mean(), 1e3 * (time.perf_counter() - begin)
            print(f"step {step}: {took_ms:.1f} ms, loss {mean:.6f}", flush=True)
    dist.destroy_process_group()
