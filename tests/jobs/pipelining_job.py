# SPDX-License-Identifier: Apache-2.0
"""A model with a skip connection in two stages under PyTorch's pipeline runtime, by many schedules; and wrong ones."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capture_scenarios import fork
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from train_pipeline import Stage

from stretto.errors import StrettoError
from stretto.pipeline import Schedule, eager_1f1b, gpipe, one_f_one_b, paced, with_comms, zb_h1, zb_h2
from stretto.pipeline.torch_runtime import pipeline

MICROBATCHES, ROWS, WIDTH, DEPTH, STEPS = 6, 4, 8, 2, 2
SCHEDULES = {
    "gpipe": gpipe(2, MICROBATCHES),
    "1f1b": one_f_one_b(2, MICROBATCHES),
    "mirrored": with_comms(eager_1f1b(2, MICROBATCHES), "mirrored"),
    "eager": eager_1f1b(2, MICROBATCHES),
    "delayed": eager_1f1b(2, MICROBATCHES, delay=2),
    "zb_h1": zb_h1(2, MICROBATCHES),
    "zb_h2": zb_h2(2, MICROBATCHES),
    "mixed": paced(2, MICROBATCHES, warmup=[4, 2], delay=[-1, 1]),
}


def module_of(stage: int) -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(stage)
    return Stage(WIDTH, DEPTH)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """The same data every time."""
    data = torch.Generator().manual_seed(7)
    shape = (ROWS * MICROBATCHES, WIDTH)
    return torch.randn(shape, generator=data), torch.randn(shape, generator=data)


def outcome(module: nn.Module, step: Callable[[], list[float]]) -> dict[str, Any]:
    """Train some steps; the losses, and the gradients of the last."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(step())
        optimizer.step()
    return {"losses": losses, "grads": [parameter.grad.sum().item() for parameter in module.parameters()]}  # type: ignore[union-attr]


def trained(rank: int, make: Callable[[PipelineStage], Any]) -> dict[str, Any]:
    """This rank's stage under a runtime."""
    module = module_of(rank)
    runtime = make(PipelineStage(module, rank, 2, torch.device("cpu")))
    inputs, targets = batch()

    def step() -> list[float]:
        losses: list[torch.Tensor] = []
        if rank == 0:
            runtime.step(inputs)
        else:
            runtime.step(target=targets, losses=losses)
        return [loss.item() for loss in losses]

    return outcome(module, step)


def alone() -> list[dict[str, Any]]:
    """Both stages in one process, without any pipeline."""
    first, second = module_of(0), module_of(1)
    both = nn.ModuleList([first, second])
    inputs, targets = batch()

    def step() -> list[float]:
        losses = [
            nn.functional.mse_loss(second(*first(rows)), wanted)
            for rows, wanted in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True)
        ]
        torch.autograd.backward(torch.stack(losses).sum() / MICROBATCHES)
        return [loss.item() for loss in losses]

    found = outcome(both, step)
    count = len(list(first.parameters()))
    return [
        {"losses": [[] for _ in range(STEPS)], "grads": found["grads"][:count]},
        {"losses": found["losses"], "grads": found["grads"][count:]},
    ]


def refused(rank: int, schedule: Schedule, *, stage: int | None = None) -> str:
    """What a rank is told about a schedule that cannot run."""
    where = rank if stage is None else stage
    try:
        pipeline(schedule, [PipelineStage(module_of(where), where, 2, torch.device("cpu"))])
    except StrettoError as error:
        return str(error)
    return "it was accepted"


def main() -> None:
    """Every rank reports all scenarios."""
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")

    def rank_main(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        loss = nn.functional.mse_loss
        found: dict[str, Any] = {"alone": alone()[rank]}
        found["stock"] = trained(rank, lambda stage: Schedule1F1B(stage, MICROBATCHES, loss_fn=loss))
        for name, schedule in SCHEDULES.items():
            found[name] = trained(rank, lambda stage, plan=schedule: pipeline(plan, [stage], loss_fn=loss))  # type: ignore[misc]
        found["blocking"] = trained(
            rank, lambda stage: pipeline(one_f_one_b(2, MICROBATCHES), [stage], loss_fn=loss, blocking=True)
        )
        right = with_comms(one_f_one_b(2, 3), "mirrored").to_csv()
        wrong = right.replace("1RECV_F0,1F0,1RECV_F1", "1RECV_F1,1RECV_F0,1F0")
        found["swapped"] = refused(rank, Schedule.from_csv(wrong))
        found["one_rank_differs"] = refused(rank, one_f_one_b(2, 4) if rank == 0 else gpipe(2, 4))
        found["one_rank_wrong"] = refused(rank, Schedule.from_csv(wrong) if rank == 1 else one_f_one_b(2, 3))
        found["three_stages"] = refused(rank, one_f_one_b(3, 4))
        found["other_stage"] = refused(rank, one_f_one_b(2, 4), stage=1 - rank)
        dist.barrier()
        dist.destroy_process_group()
        (folder / f"{rank}.json").write_text(json.dumps(found))

    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
