# SPDX-License-Identifier: Apache-2.0
"""A rank of `pipeline.py --only meshes`: stages on device meshes, several systems in turns, on the lab's shaped links.

Tensors are real, and so are gradients, which are compared with one process. The time of a stage is a pause of given
length beside the small computation: processors stay idle, as those of hosts with GPUs do.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from pipeline_mesh_lanes import GatherLane, PlainLane, SignalLane
from runtime_shaped_rank import hurry, measure
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from stretto.pipeline import Schedule
from stretto.pipeline.meshes.lane import Lane
from stretto.pipeline.meshes.stage import placed_here
from stretto.torch import MeshPipeline, StageMesh

HIDDEN, CLASSES = 64, 8
LANES: dict[str, type[Lane]] = {
    "program": Lane,
    "send_recv": PlainLane,
    "gather_broadcast": GatherLane,
    "signal": SignalLane,
}


class Pause(torch.autograd.Function):
    """The same tensor, after a pause; its gradient, after another."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, ahead_s: float, back_s: float) -> Any:
        ctx.back_s = back_s
        time.sleep(ahead_s)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        time.sleep(ctx.back_s)
        return grad, None, None


def paused(tensor: Any, ahead_s: float, back_s: float) -> Any:
    return Pause.apply(tensor, ahead_s, back_s)  # type: ignore[no-untyped-call]


class Stage(nn.Module):
    """Takes the tensors of the stage before, adds something to the first, and passes all on; or ends in classes."""

    def __init__(self, case: dict[str, Any], at: int) -> None:
        super().__init__()
        data = torch.Generator().manual_seed(at)
        widths = case["widths"]
        self.last, self.first = at == len(case["grids"]) - 1, at == 0
        self.times_s = [case[key][at] / 1e6 for key in ("forward_us", "input_us", "weight_us")]
        self.down = nn.Parameter(torch.randn(HIDDEN, HIDDEN if self.first else widths[0], generator=data) / 30)
        ends = [CLASSES] if self.last else widths if self.first else widths[:1]
        self.ups = nn.ParameterList(torch.randn(width, HIDDEN, generator=data) / 30 for width in ends)
        rest = widths[1:] if self.last else []
        self.joins = nn.ParameterList(torch.randn(CLASSES, width, generator=data) / 30 for width in rest)

    def forward(self, *given: torch.Tensor) -> Any:
        """The layers, with their pauses: one for the gradient of inputs and one for that of the weights."""
        ahead_s, input_s, weight_s = self.times_s
        late = paused(self.down, 0.0, weight_s)
        hidden = torch.tanh(paused(nn.functional.linear(given[0], late), ahead_s, input_s))
        made = [nn.functional.linear(hidden, up) for up in self.ups]
        if self.last:
            out = made[0]
            for tensor, join in zip(given[1:], self.joins, strict=True):
                out = out + nn.functional.linear(tensor, join)
            return out
        found = made if self.first else [given[0] + made[0], *(one * 1.0 for one in given[1:])]
        return found[0] if len(found) == 1 else tuple(found)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets)


def batches(case: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same data every time."""
    data = torch.Generator().manual_seed(11)
    count, rows = case["microbatches"], case["rows"]
    return (
        list(torch.randn(count, *rows, HIDDEN, generator=data)),
        list(torch.randn(count, *rows, CLASSES, generator=data)),
    )


def alone(case: dict[str, Any]) -> tuple[float, list[list[torch.Tensor]]]:
    """The loss and the gradients of every stage, in one process and without pauses."""
    still = case | {key: [0.0] * len(case["grids"]) for key in ("forward_us", "input_us", "weight_us")}
    stages = [Stage(still, at) for at in range(len(case["grids"]))]
    total = 0.0
    for inputs, targets in zip(*batches(case), strict=True):
        given: Any = (inputs,)
        for stage in stages:
            out = stage(*given)
            given = out if isinstance(out, tuple) else (out,)
        loss = loss_fn(given[0], targets) / case["microbatches"]
        torch.autograd.backward(loss)
        total += float(loss)
    return total, [[p.grad for p in stage.parameters()] for stage in stages]  # type: ignore[misc]


def placed_stage(case: dict[str, Any], at: int, mesh: DeviceMesh) -> Stage:
    """A stage with weights split over the mesh's second axis: first by outputs, then by inputs."""
    module = Stage(case, at)
    for name, parameter in list(module.named_parameters()):
        split = Shard(0) if name == "down" else Shard(1) if name.startswith("ups") else Replicate()
        made = nn.Parameter(placed_here(name, parameter.detach(), mesh, [Replicate(), split]))
        if name == "down":
            module.down = made
        else:
            holder, index = name.split(".")
            getattr(module, holder)[int(index)] = made
    return module


def stage_times_us(module: Stage, case: dict[str, Any], at: int, mesh: DeviceMesh) -> list[float]:
    """Forward, backward and the sum of gradients of one micro-batch, without the other stages; the slowest rank's."""
    rows = case["rows"]
    widths = [HIDDEN] if module.first else case["widths"]
    best = [float("inf")] * 3
    for _ in range(3):
        given = [
            placed_here("input", torch.ones(*rows, width), mesh, [Shard(0), Replicate()]).requires_grad_(at > 0)
            for width in widths
        ]
        begin = time.perf_counter()
        out = module(*given)
        if module.last:
            out = loss_fn(out.full_tensor(), torch.ones(*rows, CLASSES))
        middle = time.perf_counter()
        many = out if isinstance(out, tuple) else (out,)
        torch.autograd.backward(many, [torch.ones_like(one) for one in many])
        behind = time.perf_counter()
        for parameter in module.parameters():
            grad: Any = parameter.grad
            grad.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        times = [middle - begin, behind - middle, time.perf_counter() - behind]
        best = [min(a, b) for a, b in zip(best, times, strict=True)]
        module.zero_grad()
    slowest = torch.tensor(best)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=STAGE_GROUPS[at])
    return [1e6 * float(value) for value in slowest]


STAGE_GROUPS: list[Any] = []


def wrong(module: Stage, want: list[torch.Tensor]) -> float:
    """The largest difference of a gradient from that of one process, as a share of its largest entry."""
    worst = 0.0
    for parameter, right in zip(module.parameters(), want, strict=True):
        grad: Any = parameter.grad
        have = grad.full_tensor() if isinstance(grad, DTensor) else grad
        worst = max(worst, float((have - right).abs().max() / right.abs().max()))
    return worst


def run_system(case: dict[str, Any], system: dict[str, Any], stages: list[StageMesh], share: float) -> None:
    """One step to plan and to compare gradients, then steps for the clock; rank 0 prints what came out."""
    me = dist.get_rank()
    at = next(at for at, stage in enumerate(stages) if me in stage.ranks)
    module = placed_stage(case, at, stages[at].mesh)

    class Compared(MeshPipeline):
        lane_type = LANES[system["lane"]]

    pipe = Compared(module, stages, Schedule.from_csv(system["csv"]), loss_fn=loss_fn, blocking=system["blocking"])
    inputs, targets = batches(case)
    ours = inputs if at == 0 else (), targets if at == len(stages) - 1 else ()
    pipe.step(*ours)
    word = torch.tensor([wrong(module, alone(case)[1][at])])
    dist.all_reduce(word, dist.ReduceOp.MAX)
    times_us = []
    if case["measured"]:
        module.zero_grad()
        times_us = stage_times_us(module, case, at, stages[at].mesh)

    def step() -> None:
        module.zero_grad()
        pipe.step(*ours)

    found = measure(step, case["steps"])
    edges = {
        f"{src} {dst}": sum(each.mover.predicted_us(share) for each in lane.transfer.rounds)
        for (src, dst), lane in pipe._lanes.items()
        if lane.transfer is not None
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (at, times_us, edges))
    if me == 0:
        print(json.dumps({
            "system": system["name"], "wrong": float(word), **found,
            "stage_times_us": [next(t for s, t, _ in everyone if s == stage) for stage in range(len(stages))],
            "edges_us": {key: value for _, _, each in everyone for key, value in each.items()},
        }), flush=True)  # fmt: skip
    dist.barrier()
    pipe.close()


def main() -> None:
    """Systems come on the command line: name, schedule, lane, and whether every transfer is waited for."""
    case, share = json.loads(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    meshes = [DeviceMesh("cpu", grid) for grid in case["grids"]]
    stages = [StageMesh(mesh=mesh, inputs=[Shard(0), Replicate()]) for mesh in meshes]
    STAGE_GROUPS.extend(dist.new_group(list(stage.ranks)) for stage in stages)
    for one in range(len(stages) - 1):
        for name, src, dst in (("activations", one, one + 1), ("gradients", one + 1, one)):
            root = stages[src].ranks[0]
            GatherLane.groups[f"{name} {src} to {dst}"] = dist.new_group(sorted([root, *stages[dst].ranks]))
    if case["urgent"]:
        hurry()
    for system in case["systems"]:
        run_system(case, system, stages, share)
        case["measured"] = False
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
