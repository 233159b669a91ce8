# SPDX-License-Identifier: Apache-2.0
"""What the training examples share: the command line, the job, and a loop that measures its iterations."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def arguments(text: str | None) -> argparse.ArgumentParser:
    """The options that every example has."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--backend", choices=["gloo", "stretto"], default="stretto")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="samples of each rank")
    parser.add_argument("--width", type=int, default=128, help="of the model's layers")
    parser.add_argument("--shuffle", type=int, default=0, help="deal the data out in another order, by this seed")
    parser.add_argument("--choices", action="store_true", help="print which program ran for which calls")
    return parser


def join(backend: str) -> None:
    """Join the job that torchrun (or the lab) has set up in the environment."""
    if backend == "stretto":
        import stretto.torch  # noqa: F401  registers the backend
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    torch.manual_seed(0)


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


def leave(choices: bool) -> None:
    """End the job, after the model has gone: a DDP model that outlives its group may wait for gloo for ever."""
    if choices and dist.get_rank() == 0 and dist.get_backend() == "stretto":
        print(*sys.modules["stretto.torch"].choices(), sep="\n")
    dist.barrier()
    dist.destroy_process_group()
