# SPDX-License-Identifier: Apache-2.0
"""Two of three ranks train, close and train again; one of them is in a group more than the other.

``distribute_again_job.py FOLDER 3`` writes ``RANK.json``: how far the weights of each training are from one process's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch._dynamo  # optimizers need it: imported once, before the forks
import torch.distributed as dist
from capture_scenarios import fork
from torch import nn

import stretto.torch
from stretto.strategy.builders import build
from stretto.strategy.distribute import model_spec

MEMBERS, STEPS, BUILDERS = (2, 0), 2, ("ps", "zero2", "ps")


def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model and optimizer at every call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(step: int, member: int) -> torch.Tensor:
    """What a member trains on."""
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + member)).double()


def weights(model: nn.Module) -> list[float]:
    """All of them in one row."""
    return [float(x) for p in model.parameters() for x in p.detach().flatten()]


def alone() -> list[float]:
    """Both members' data in one process."""
    model, optimizer = pair()
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = [model(batch(step, member)).square().mean() for member in range(len(MEMBERS))]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return weights(model)


def trained(builder: str, group: dist.ProcessGroup) -> list[float]:
    """One training of the members, closed at its end."""
    model, plain = pair()
    strategy = build(builder, model_spec(model, batch(0, 0)), len(MEMBERS))
    model, optimizer = stretto.torch.distribute(model, plain, strategy, group=group)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank(group))).square().mean().backward()
        optimizer.step()
    optimizer.close()
    return weights(model)


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        dist.new_group([0, 1])
        group = dist.new_group(list(MEMBERS))
        found = []
        for builder in BUILDERS if rank in MEMBERS else ():
            found.append(max(abs(a - b) for a, b in zip(trained(builder, group), alone(), strict=True)))
        (folder / f"{rank}.json").write_text(json.dumps({"apart": found}))
        dist.barrier()
        dist.destroy_process_group()

    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
