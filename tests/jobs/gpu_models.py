# SPDX-License-Identifier: Apache-2.0
"""Small models on GPUs, trained with DDP or FSDP2 on a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WIDTH = 257


class Trained:
    """A model that starts the same whatever moves its gradients."""

    def __init__(self, how: str, group: Any, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(WIDTH, WIDTH, device=device) for _ in range(4)]
        net = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
        self.model: Any
        if how == "ddp":
            self.model = DistributedDataParallel(net, device_ids=[device.index], process_group=group, bucket_cap_mb=0.3)
        else:
            mesh = None if group is None else DeviceMesh.from_group(group, "cuda")
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            self.model = fully_shard(net, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        own = torch.Generator().manual_seed(1 + dist.get_rank())
        self.data = torch.randn(16, WIDTH, generator=own).to(device)

    def step(self) -> float:
        """One iteration, and its loss."""
        loss = (self.model(self.data) - 0.5).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def losses_of(trained: Trained, times: int) -> list[float]:
    """Of so many iterations."""
    return [trained.step() for _ in range(times)]
