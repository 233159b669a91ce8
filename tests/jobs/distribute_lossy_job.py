# SPDX-License-Identifier: Apache-2.0
"""Lossy encoders, stale parameters with a slow rank, and scripts in trial mode."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers need it: imported once, before the forks
import torch.distributed as dist
from capture_scenarios import _start, fork
from distribute_job import DEVICES, trained
from torch import nn

import stretto.torch
from stretto.strategy import Strategy
from stretto.strategy.builders import build
from stretto.strategy.distribute import model_spec
from stretto.strategy.files import load_model

FREELY = 12
"""So far ahead is a rank that nothing holds back."""
ENCODERS = ("float16", "bfloat16", "powersgd:2", "topk:0.1", "onebit", "sufficient_factors")


def fitted(strategy: Strategy | None, *, steps: int = 40, pause: Callable[[int], None] | None = None) -> list[Any]:
    """A linear problem with one answer: the loss at the end, relative to the beginning; and the optimizer."""
    torch.manual_seed(2)
    model: nn.Module = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    target = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
    if strategy is not None:
        model, optimizer = stretto.torch.distribute(model, optimizer, strategy)
    losses = []
    for step in range(steps):
        if pause is not None:
            pause(step)
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        optimizer.zero_grad()
        loss = (model(x) - x @ target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return [losses[-1] / losses[0], optimizer]


def lossy(encoder: str, builder: str) -> float:
    """Training with an encoder."""
    spec = model_spec(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6)), torch.zeros(4, 8))
    share, optimizer = fitted(build(builder, spec, DEVICES, encoder=encoder))
    optimizer.close()
    return float(share)


def stale(folder: Path, staleness: int) -> list[Any]:
    """Training with a rank that sends nothing before another is as far ahead as it may be; the loss, and how far."""
    spec = model_spec(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 6)))
    strategy = build("ps_balanced", spec, DEVICES, staleness=staleness)
    far = FREELY if staleness < 0 else staleness
    told = folder / f"far-{staleness}"

    def pause(step: int) -> None:
        if dist.get_rank() == 0 and step == far:
            told.touch()
        deadline = time.monotonic() + 100
        while dist.get_rank() == 3 and step == 0 and not told.exists() and time.monotonic() < deadline:
            time.sleep(0.005)

    share, optimizer = fitted(strategy, pause=pause)
    optimizer.close()
    ahead = max((depot.most_ahead for depot in optimizer._depots if depot.owner == dist.get_rank()), default=0)
    return [float(share), ahead]


def trial(folder: Path, rank: int, ranks: int, text: str) -> None:
    """A script in trial mode: it does not get to its end."""
    os.environ["STRETTO_TRIAL"] = text
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{len(text)}", rank=rank, world_size=ranks)
    trained("ncf", None, steps=1000)


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])

    def rank_main(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        outcomes: dict[str, Any] = {"none all_reduce": lossy("none", "all_reduce")}
        for encoder in ENCODERS:
            for builder in ("all_reduce", "ps_balanced"):
                outcomes[f"{encoder} {builder}"] = lossy(encoder, builder)
        for staleness in (0, 1, 3, -1):
            outcomes[f"stale {staleness}"] = stale(folder, staleness)
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        dist.barrier()
        dist.destroy_process_group()

    fork(ranks, rank_main)
    codes: list[int] = []
    for text in (f"2,5,{folder}/result.json", f"describe,{folder}/model.yaml"):
        for _ in [_start(rank, lambda rank, text=text: trial(folder, rank, 2, text)) for rank in range(2)]:  # type: ignore[misc]
            codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
    model = load_model(folder / "model.yaml")
    for rank in range(ranks):
        outcomes = json.loads((folder / f"{rank}.json").read_text())
        outcomes["trial"] = [codes, json.loads((folder / "result.json").read_text())]
        outcomes["described"] = [[v.name, v.rows, v.factors, v.forward_us > 0] for v in model.variables]
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
