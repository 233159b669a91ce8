# SPDX-License-Identifier: Apache-2.0
"""An NCCL job that knows nothing of Stretto: ``gpu_run_job.py STYLE FOLDER``, styles ddp, fsdp and hand.

Style early is fsdp with Stretto's early gathers. Every rank writes its losses to the folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS, WIDTH = 160, 256


class Block(nn.Module):
    """Two products and what is around them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With a way past it."""
        out: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return out


def wrapped(model: nn.Sequential, style: str) -> Any:
    """As scripts do."""
    if style == "ddp":
        return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1)
    if style in ("fsdp", "early"):
        from torch.distributed.fsdp import fully_shard

        for block in list(model)[:-1]:
            fully_shard(block)
        fully_shard(model)
    if style == "early":
        import stretto.torch

        stretto.torch.early_gathers(model)
    return model


def main(style: str, folder: Path) -> None:
    """One rank."""
    torch.manual_seed(0)
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = wrapped(nn.Sequential(*[Block() for _ in range(4)], nn.Linear(WIDTH, 10)).cuda(), style)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    draw = torch.Generator(device="cuda").manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(32, WIDTH, device="cuda", generator=draw)
        wanted = torch.randint(10, (32,), device="cuda", generator=draw)
        loss = nn.functional.cross_entropy(model(inputs), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        if style == "hand":
            works: list[Any] = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
            for work in works:
                work.wait()
            for parameter in model.parameters():
                parameter.grad /= size
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    (folder / f"{rank}.json").write_text(json.dumps([float(loss) for loss in losses]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
