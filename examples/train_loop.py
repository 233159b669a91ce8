# SPDX-License-Identifier: Apache-2.0
"""What the training examples share: the data of each rank, and a loop that measures its iterations."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def data_of_this_rank(shuffle: int) -> torch.Generator:
    """Random numbers for this rank's data: its own, or with `shuffle` those of another rank; together the same data."""
    order = torch.randperm(dist.get_world_size(), generator=torch.Generator().manual_seed(shuffle))
    return torch.Generator().manual_seed(int(order[dist.get_rank()]) if shuffle else dist.get_rank())


def train(model: nn.Module, loss_of: Callable[[nn.Module], Any], iterations: int) -> None:
    """Train with SGD; rank 0 prints the mean loss over all ranks and the median iteration time."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, times = [], []
    for _ in range(iterations):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
        dist.all_reduce(total := loss.detach().double().reshape(1))
        losses.append(float(total) / dist.get_world_size())
    if dist.get_rank() == 0:
        late = times[min(3, len(times) - 1) :]  # the first ones set up connections, buckets and programs
        print(f"backend {dist.get_backend()}, {dist.get_world_size()} ranks")
        print("loss", *(f"{loss:.9f}" for loss in losses))
        print(f"iteration {1e3 * statistics.median(late):.2f} ms (median of {len(late)})")
