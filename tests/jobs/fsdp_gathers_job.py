# SPDX-License-Identifier: Apache-2.0
"""Drawn models under FSDP2, gathered as ever, early, and early under a plan: ``fsdp_gathers_job.py FOLDER``."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import stretto.torch
from stretto.cluster import Cluster
from stretto.planner.api import plan
from stretto.planner.plan import Plan
from stretto.runtime.torch_backend.fsdp_gathers import gather_early_under_plans
from stretto.runtime.torch_backend.watch import RECORDING, SubmittedCall

RANKS = 2
STEPS = 20
MODELS = int(os.environ.get("MODELS", "1"))


class Calls:
    """Notes which collectives the application waits for at once."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, bool]] = []

    def seen(self, what: SubmittedCall, run: Callable[[], Any]) -> Any:
        self.noted.append((what.op, what.blocking))
        return run()


def model(seed: int, *, early: bool) -> nn.Module:
    """A drawn stack of layers, some sharded together, with prefetch in the forward pass."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    widths = [8, *(draw.choice((3, 8, 17, 32)) for _ in range(draw.randint(2, 4))), 1]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    net = nn.Sequential(*layers)
    mesh = DeviceMesh("cpu", list(range(RANKS)))
    sharded: list[Any] = [
        fully_shard(layer, mesh=mesh) for layer in layers if draw.random() < 0.8 or layer is layers[0]
    ]
    fully_shard(net, mesh=mesh)
    for one, following in pairwise(sharded):
        one.set_modules_to_forward_prefetch([following])
    if early:
        stretto.torch.early_gathers(net)
    return net


def train(net: nn.Module, steps: int, after: Callable[[], None] = lambda: None) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss = nn.functional.mse_loss(net(inputs), inputs.sum(1, keepdim=True))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after()
    return losses


def under_plan(seed: int, file: Path) -> tuple[list[float], int]:
    net = model(seed, early=True)
    with stretto.torch.capture(iterations=2, skip=1) as recorder:
        train(net, 3, recorder.step)
    cluster = Cluster.preset("ring", nodes=RANKS)
    if dist.get_rank() == 0:
        plan(recorder.workload, cluster, budget_s=0.2, seed=0).plan.save(file)
    dist.barrier()
    net = model(seed, early=True)
    with stretto.torch.enforce(Plan.load(file), recorder.workload, cluster=cluster) as enforcer:
        losses = train(net, STEPS, stretto.torch.step)
        return losses, enforcer.report().number


def as_under_run(seed: int) -> dict[str, Any]:
    """A script that calls nothing of ours: while somebody follows its calls, and while nobody does."""
    os.environ["STRETTO_EARLY_GATHERS"] = "on"
    undo = gather_early_under_plans()
    assert undo is not None
    net, calls = model(seed, early=False), Calls()
    RECORDING.current = calls
    losses = train(net, STEPS)
    RECORDING.current = None
    gathered: Any = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    asked: list[bool] = []

    def noted(*args: Any, async_op: bool = False, **more: Any) -> Any:
        asked.append(async_op)
        return gathered(*args, async_op=async_op, **more)

    setattr(dist, gathered.__name__, noted)
    train(net, 2)
    setattr(dist, gathered.__name__, gathered)
    undo()
    return {"losses": losses, "gathers": [b for op, b in calls.noted if op == "all_gather"], "asked": asked}


def rank_main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("stretto", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    told = []
    for seed in range(MODELS):
        each = {}
        for early in (False, True):
            calls = Calls()
            RECORDING.current = calls
            losses = train(model(seed, early=early), STEPS)
            RECORDING.current = None
            each[str(early)] = {"losses": losses, "gathers": [b for op, b in calls.noted if op == "all_gather"]}
        each["run"] = as_under_run(seed)
        told.append(each)
    losses, number = under_plan(0, folder / "plan.json")
    dist.destroy_process_group()
    (folder / f"rank{rank}.json").write_text(json.dumps({"each": told, "planned": losses, "number": number}))


def main() -> None:
    folder = Path(sys.argv[1])
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank_main, args=(folder, rank)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
