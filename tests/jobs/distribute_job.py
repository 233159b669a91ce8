# SPDX-License-Identifier: Apache-2.0
"""Every builder on every model, on both backends, beside training in one process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers need it: imported once, before the forks
import torch.distributed as dist
from capture_scenarios import fork
from distribute_models import MODELS, STEPS, alone, batch, loss_of, made, optimizer_of, strategies, weights

import stretto
import stretto.torch
from stretto.strategy import ModelSpec
from stretto.strategy.builders import BUILDERS, build
from stretto.strategy.distribute import model_spec

DEVICES = ("h0.gpu0", "h0.gpu1", "h1.gpu0", "h1.gpu1")


def trained(
    name: str, strategy: Any, *, kind: str = "", steps: int = STEPS, clip: float = 0.0, group: Any = None
) -> list[float]:
    """The weights after an ordinary loop."""
    model = made(name)
    if dist.get_rank():
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()  # rank 0's are sent to all
    model, optimizer = stretto.torch.distribute(model, optimizer_of(name, model, kind), strategy, group=group)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, batch(name, step, dist.get_rank())).backward()  # type: ignore[no-untyped-call]
        if clip:
            optimizer.clip_grad_norm_(clip)
        optimizer.step()
        scheduler.step()
    found = weights(model)
    optimizer.close()
    return found


def apart(got: list[float], want: list[float]) -> float:
    """The largest difference, relative to the largest weight."""
    return max(abs(g - w) for g, w in zip(got, want, strict=True)) / max(map(abs, want))


def all_strategies(spec: ModelSpec) -> dict[str, Any]:
    """Every builder's, small parts included, and our own."""
    found: dict[str, Any] = {}
    for builder, info in BUILDERS.items():
        small: dict[str, Any] = {"part_mb": 0.0, "bucket_mb": 0.0003}
        options = {key: value for key, value in small.items() if key in info.options}
        found[builder] = build(builder, spec, DEVICES, **options)
    return found | dict(strategies(spec, DEVICES))


def comparisons(names: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """How far strategies end from training in one process."""
    outcomes: dict[str, Any] = {}
    for name in names:
        want = alone(name, dist.get_world_size())
        spec = model_spec(made(name), batch(name, 0, 0))
        for label, strategy in all_strategies(spec).items():
            if label in labels or not labels:
                outcomes[f"{name} {label}"] = apart(trained(name, strategy), want)
        outcomes[f"{name} default"] = apart(trained(name, None), want)
    return outcomes


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    some = ("partitioned_ps", "parallax", "zero2", "two_level", "ordered")
    runs: dict[str, tuple[Sequence[str], Sequence[str]]] = {
        "gloo": (list(MODELS), ()), "stretto": (["mlp", "ncf", "mixed"], some),
    }  # fmt: skip

    def rank_main(rank: int) -> None:
        outcomes: dict[str, Any] = {}
        for backend, (names, labels) in runs.items():
            store = f"file://{folder}/store-{backend}"
            dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks)
            outcomes[backend] = comparisons(names, labels)
            dist.barrier()
            dist.destroy_process_group()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))

    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
