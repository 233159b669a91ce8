# SPDX-License-Identifier: Apache-2.0
"""A rank of `strategy_full.py`: a model with all its parameters, whose compute is a pause, under several strategies."""

from __future__ import annotations

import json
import resource
import sys
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from runtime_shaped_rank import hurry, measure
from torch import nn

import stretto.torch
from stretto.strategy import ModelSpec, build, zoo


class Use(torch.autograd.Function):
    """A layer as far as communication goes: takes its time, and gives its parameter a gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parameter: torch.Tensor, layer: tuple[float, float, float]) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(parameter)
        pause(layer[0])
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        pause(ctx.layer[1])
        return grad, torch.full_like(ctx.saved_tensors[0], ctx.layer[2]), None


def pause(us: float) -> None:
    """The time that a layer computes; processors stay free for the network."""
    if us > 50:
        time.sleep(us / 1e6)


class Replayed(nn.Module):
    """All parameters of a model by their names; forward and backward take the times of its layers."""

    def __init__(self, spec: ModelSpec, rank: int) -> None:
        super().__init__()
        self.layers: list[tuple[nn.Parameter, tuple[float, float, float]]] = []
        for variable in spec.variables:
            holder: nn.Module = self
            *path, leaf = variable.name.split(".")
            for word in path:
                if word not in dict(holder.named_children()):
                    holder.add_module(word, nn.Module())
                holder = holder.get_submodule(word)
            parameter = nn.Parameter(torch.zeros(variable.shape))
            holder.register_parameter(leaf, parameter)
            self.layers.append((parameter, (variable.forward_us, variable.backward_us, float(rank + 1))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for parameter, layer in self.layers:
            x = Use.apply(x, parameter, layer)  # type: ignore[no-untyped-call]
        return x


def run(case: dict[str, Any], job: dict[str, Any], trainers: Any) -> None:
    """Train under one strategy: a step to warm up, whose result is known, then steps for the clock."""
    rank, count, trains = dist.get_rank(), job["ranks"], case["trains"]
    times = case["times"]
    variables = tuple(
        replace(v, forward_us=times[v.name][0], backward_us=times[v.name][1])
        for v in zoo.model(case["model"]).variables
    )
    model = Replayed(ModelSpec(name=case["model"], variables=variables), rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    names = [f"h{at}.rank{at}" for at in range(count)]
    serve = names[trains:]
    spec = stretto.torch.model_spec(model, name=case["model"])
    strategy = build(job["builder"], spec, names, serve=serve, **job["options"])
    if rank >= trains:
        stretto.torch.serve(model, optimizer, strategy)
        return
    _, made = stretto.torch.distribute(model, optimizer, strategy)
    x = torch.zeros(1, requires_grad=True)

    def step() -> None:
        made.zero_grad()
        torch.autograd.backward(model(x))
        made.step()

    step()
    right = -sum(range(1, trains + 1)) / trains
    exact = all(bool((p == right).all()) for p in model.parameters())
    found = measure(step, case["steps"], group=trainers)
    made.close()
    peak = torch.tensor([float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)])
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=trainers)
    if rank == 0:
        print(json.dumps({"system": job["name"], "exact": exact, "peak_mb": float(peak) / 1e3, **found}), flush=True)


def main() -> None:
    """Cases come on the command line."""
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=600))
    trainers = dist.new_group(list(range(case["trains"])))
    hurry()
    for job in case["jobs"]:
        run(case, job, trainers)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
