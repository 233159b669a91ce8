# SPDX-License-Identifier: Apache-2.0
"""Four ranks, on GPUs or all on the only one: strategies on NCCL beside training in one process.

``torchrun --nproc-per-node 4 gpu_distribute_job.py FOLDER [MODEL...]``; with models only what strategies do to these.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distribute_job import DEVICES, all_strategies, apart
from distribute_models import STEPS, batch, loss_of, made, optimizer_of, weights
from torch import nn

import stretto.torch
from stretto.strategy.builders import build
from stretto.strategy.distribute import model_spec

LOSSY = [(encoder, 0) for encoder in ("float16", "bfloat16", "powersgd:2", "topk:0.1", "onebit", "sufficient_factors")]


def trained(name: str, strategy: Any, device: torch.device) -> list[float]:
    """The weights after training on all ranks, or without a strategy on all of their batches in one process."""
    model = made(name).to(device)
    optimizer: Any = optimizer_of(name, model)
    ranks = range(dist.get_world_size())
    if strategy is not None:
        model, optimizer = stretto.torch.distribute(model, optimizer, strategy)
        ranks = range(dist.get_rank(), dist.get_rank() + 1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(name, step, rank) for rank in ranks]).to(device)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step == 1 and strategy is not None:
            optimizer.load_state_dict(optimizer.state_dict())
    found = weights(model)
    if strategy is not None:
        optimizer.close()
    return found


def learns(encoder: str, staleness: int, builder: str, device: torch.device) -> float:
    """The loss at the end of a linear problem, relative to the beginning."""
    torch.manual_seed(2)
    model: nn.Module = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6)).to(device)
    target = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)).to(device)
    spec = model_spec(model, torch.zeros(4, 8, device=device))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = build(builder, spec, DEVICES, encoder=encoder, staleness=staleness)
    model, optimizer = stretto.torch.distribute(model, optimizer, strategy)
    losses = []
    for step in range(40):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank())).to(device)
        optimizer.zero_grad()
        loss = (model(x) - x @ target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    optimizer.close()
    return losses[-1] / losses[0]


def main() -> None:
    """One rank."""
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = False
    dist.init_process_group("nccl")
    same: dict[str, float] = {}
    asked = sys.argv[2:]
    for name in asked or ("mlp", "conv", "ncf", "mixed"):
        want = trained(name, None, device)
        spec = model_spec(made(name).to(device), batch(name, 0, 0).to(device))
        for label, strategy in all_strategies(spec).items():
            same[f"{name} {label}"] = apart(trained(name, strategy, device), want)
    learned = (
        {}
        if asked
        else {
            f"{builder} {encoder} {staleness}": learns(encoder, staleness, builder, device)
            for builder in ("all_reduce", "ps_balanced")
            for encoder, staleness in [*LOSSY, *([("none", 1), ("float16", -1)] if builder == "ps_balanced" else [])]
        }
    )
    (folder / f"{rank}.json").write_text(json.dumps({"same": same, "learned": learned}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
