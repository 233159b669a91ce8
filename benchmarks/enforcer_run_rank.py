# SPDX-License-Identifier: Apache-2.0
"""One rank of the case `cut`: plain data-parallel training that notes its times, losses, and the plan of each step.

Gradients are rounded so that every order of adding them gives the same sum. Losses must then be those of training on
one rank, bit for bit, whatever plans did: nothing but the order of sums may ever differ. BACKEND is gloo or nccl, with
a larger model on the GPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stretto.runtime.torch_backend.current import CURRENT
from stretto.runtime.torch_backend.own_backend import OWN_BACKEND

BACKEND = os.environ.get("BACKEND", "gloo")
DEVICE = "cuda" if BACKEND == "nccl" else "cpu"
WIDTH, LAYERS, BATCH = (768 if DEVICE == "cuda" else 256), 5, 16
LOOK_EVERY = 10
GRAIN = 1 << 16


def model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(32, WIDTH)]
    for _ in range(LAYERS - 1):
        layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, 1)).to(DEVICE)


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(rank))
    return inputs.to(DEVICE), inputs.sin().sum(1, keepdim=True).to(DEVICE)


def exact(net: nn.Module) -> None:
    """Gradients become multiples of a power of two, and small: sums of them are the same in every order."""
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: (gradient * GRAIN).round() / GRAIN)  # type: ignore[no-untyped-call]


def on_one_rank(size: int, steps: int) -> list[list[float]]:
    """The same training without communication: the losses of every rank."""
    net = model()
    exact(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = [batch(rank) for rank in range(size)]
    losses: list[list[float]] = [[] for _ in batches]
    for _ in range(steps):
        sums = [torch.zeros_like(parameter) for parameter in net.parameters()]
        for rank, (inputs, wanted) in enumerate(batches):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(inputs), wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            losses[rank].append(float(loss.detach()))
            for total, parameter in zip(sums, net.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad
        for total, parameter in zip(sums, net.parameters(), strict=True):
            parameter.grad = total / size
        optimizer.step()
    return losses


def number_of_plan() -> int:
    enforcer: Any = CURRENT.enforcer
    return enforcer.report().number if enforcer is not None else 0


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    # Several ranks on one GPU work with NCCL when each believes to be on a host of its own.
    os.environ.setdefault("NCCL_HOSTID", f"rank{os.environ['RANK']}")
    dist.init_process_group(BACKEND)
    rank, size = dist.get_rank(), dist.get_world_size()
    aside = dist.new_group(backend="gloo")
    net = model()
    exact(net)
    parallel = DistributedDataParallel(net, bucket_cap_mb=1)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    inputs, wanted = batch(rank)
    times: list[float] = []
    losses: list[float] = []
    plans: list[int] = []
    own: list[bool] = []
    offset = -1
    stop = torch.zeros(1)
    while not stop.item():
        plans.append(number_of_plan())
        own.append(OWN_BACKEND.runs)
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(parallel(inputs), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        # It waits for a GPU, too.
        losses.append(float(loss.detach()))
        times.append((time.perf_counter() - begin) * 1e6)
        if offset < 0 and CURRENT.enforcer is not None:
            # The enforcer counts iterations from here on.
            offset = len(times)
        if len(times) % LOOK_EVERY == 0:
            stop.fill_(float((folder / "stop").exists()))
            dist.all_reduce(stop, dist.ReduceOp.MAX, group=aside)
    found: dict[str, Any] = {"times_us": times, "plans": plans, "own": own, "offset": offset}
    dist.destroy_process_group()
    want = on_one_rank(size, len(losses))[rank]
    found["loss_off"] = max(abs(a - b) for a, b in zip(want, losses, strict=True))
    found["largest_loss"], found["last_loss"] = max(losses), losses[-1]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
