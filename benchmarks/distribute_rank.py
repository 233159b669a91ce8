# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/distribute.py: every system has its own copy of the model, and they take turns.

``distribute_rank.py MODEL BACKEND ROUNDS ITERATIONS SYSTEM...``; the first rank prints the times of all rounds.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from strategy_rank import MODELS, Batch
from torch import nn

import stretto
import stretto.torch
from stretto.strategy.builders import build

WARMUP = 3


def stepper(model_name: str, data: Batch, system: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """An iteration under a system and a bucket size in MiB (``ddp default``, ``stretto 1``, ...), and how to end it.

    DDP's default is 25 MiB with a first bucket of 1 MiB; a size that is given is the first one's too.
    """
    torch.manual_seed(0)
    model: Any = MODELS[model_name][0]()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    kind, _, size = system.partition(" ")
    trained: nn.Module = model
    close: Callable[[], None] = lambda: None  # noqa: E731
    if kind == "stretto":
        spec = stretto.torch.model_spec(model, data)
        sizes: dict[str, Any] = {}
        if size != "default":
            sizes = dict.fromkeys(("bucket_mb", "first_mb"), float(size) * 1.048576)
        strategy = build("all_reduce", spec, dist.get_world_size(), **sizes)
        trained, optimizer = stretto.torch.distribute(model, optimizer, strategy)
        close = optimizer.close
    else:
        lean: dict[str, Any] = {}
        if kind == "ddp_lean":
            lean = {"gradient_as_bucket_view": True, "forward_sync_buffers": False}
        cap = None if size == "default" else float(size)
        trained = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=cap, **lean)

    def iterate() -> None:
        optimizer.zero_grad()
        trained(*data).square().mean().backward()
        optimizer.step()

    return iterate, close


def main() -> None:
    torch.set_num_threads(1)
    model_name, backend, rounds, iterations, *systems = sys.argv[1:]
    dist.init_process_group(backend)
    torch.manual_seed(1 + dist.get_rank())
    data = MODELS[model_name][1]()
    made = {system: stepper(model_name, data, system) for system in systems}
    times: dict[str, list[float]] = {system: [] for system in systems}
    for number in range(int(rounds) + 1):
        # Each round begins with another system, so that none is always measured behind the same one.
        order = systems[number % len(systems) :] + systems[: number % len(systems)]
        for system in order:
            iterate = made[system][0]
            for _ in range(WARMUP if number == 0 else 1):
                iterate()
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(int(iterations)):
                iterate()
            slowest = torch.tensor([(time.perf_counter() - begin) / int(iterations)], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number:
                times[system].append(float(slowest) * 1e3)
    for _, close in made.values():
        close()
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(times), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
