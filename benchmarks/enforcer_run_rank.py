"""One rank of the case `cut`: plain data-parallel training that notes its times, losses, and the plan of each step."""

from __future__ import annotations

import json
import sys
import time
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stretto.runtime.enforcer.current import Current

WIDTH, LAYERS, BATCH = 256, 5, 16
LOOK_EVERY = 10


def model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(32, WIDTH)]
    for _ in range(LAYERS - 1):
        layers += [nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, 1))


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(rank))
    return inputs, inputs.sin().sum(1, keepdim=True)


def on_one_rank(order: list[int], steps: int) -> list[float]:
    """The same training without communication: losses of all ranks' data, gradients added in some order."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for rank in order:
            inputs, wanted = batch(rank)
            loss = nn.functional.mse_loss(net(inputs), wanted)
            (loss / len(order)).backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        optimizer.step()
        losses.append(total / len(order))
    return losses


def number_of_plan() -> int:
    enforcer: Any = Current.enforcer
    return enforcer.report().number if enforcer is not None else 0


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    aside = dist.new_group(backend="gloo")
    parallel = DistributedDataParallel(model(), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.01)
    inputs, wanted = batch(rank)
    times: list[float] = []
    losses: list[float] = []
    plans: list[int] = []
    offset = -1
    stop = torch.zeros(1)
    while not stop.item():
        plans.append(number_of_plan())
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(parallel(inputs), wanted)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        times.append((time.perf_counter() - begin) * 1e6)
        losses.append(float(loss.detach()))
        if offset < 0 and Current.enforcer is not None:
            # The enforcer counts iterations from here on.
            offset = len(times)
        if len(times) % LOOK_EVERY == 0:
            stop.fill_(float((folder / "stop").exists()))
            dist.all_reduce(stop, dist.ReduceOp.MAX, group=aside)
    every = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(every, group=aside)
    found: dict[str, Any] = {"times_us": times, "plans": plans, "offset": offset}
    dist.destroy_process_group()
    if rank == 0:
        # Two orders that begin with the same pair add alike; these twelve do not.
        orders = [list(order) for order in permutations(range(size)) if order[0] < order[1]]
        alone, *others = (on_one_rank(order, len(losses)) for order in orders)
        found["loss_off"] = max(abs(a - float(b) / size) for a, b in zip(alone, every, strict=True))
        found["spread"] = max(abs(a - b) for other in others for a, b in zip(alone, other, strict=True))
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
