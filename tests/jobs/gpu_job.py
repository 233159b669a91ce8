# SPDX-License-Identifier: Apache-2.0
"""Two ranks, each on a GPU (or both on the only one), on the process group `stretto`.

``torchrun --nproc-per-node 2 gpu_job.py FOLDER [SCENARIO...]``: collectives, training, cpu; all without names.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stretto.torch


def collectives(device: torch.device) -> Any:
    """Whole numbers through every collective; what each rank must get."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.arange(1000, device=device, dtype=torch.float32) + rank
    summed, gathered, shard = mine.clone(), torch.empty(1000 * world, device=device), torch.empty(500, device=device)
    dist.all_reduce(summed)
    dist.all_gather_into_tensor(gathered, mine)
    dist.reduce_scatter_tensor(shard, mine.clone())
    exchanged = torch.empty_like(mine)
    dist.all_to_all_single(exchanged, mine)
    told = mine.clone()
    dist.broadcast(told, 1)
    later = mine.clone()
    work = dist.all_reduce(later, async_op=True)
    assert work is not None
    work.wait()
    base = torch.arange(1000, device=device, dtype=torch.float32)
    total = 2 * base + 1
    halves = base.view(2, -1)[rank]
    return [
        torch.equal(summed, total),
        torch.equal(gathered.view(world, -1), torch.stack([base, base + 1])),
        torch.equal(shard, total.view(2, -1)[rank]),
        torch.equal(exchanged, torch.cat([halves, halves + 1])),
        torch.equal(told, base + 1),
        torch.equal(later, total),
    ]


def training(device: torch.device) -> Any:
    """DDP and FSDP2: losses go down, and parameters of all ranks agree."""
    found = []
    for how in ("ddp", "fsdp"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
        model: Any = DistributedDataParallel(net, device_ids=[device.index]) if how == "ddp" else fully_shard(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
        losses = []
        for _ in range(4):
            loss = (model(data) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        found.append(losses[-1] < losses[0])
    return found


def on_the_cpu() -> Any:
    """The same group moves tensors of the CPU too."""
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    return bool((tensor == dist.get_world_size()).all())


def main() -> None:
    """One rank; torchrun has set the environment."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    logging.basicConfig(filename=folder / f"log-{rank}", level=logging.INFO)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("stretto")
    scenarios: dict[str, Callable[[], Any]] = {
        "collectives": lambda: collectives(device), "training": lambda: training(device), "cpu": on_the_cpu
    }  # fmt: skip
    found = {name: scenarios[name]() for name in sys.argv[2:] or scenarios}
    found["choices"] = sorted({(c.op, c.backend, c.why) for c in stretto.torch.choices()})
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
