# SPDX-License-Identifier: Apache-2.0
"""Pipelines over device meshes on real processes: generated stages, layouts and schedules train as one process does."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import logging
import random
import runpy
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import highspy  # noqa: F401  imported once, before the forks, as is the next one for DTensor
import torch
import torch._dynamo
import torch.distributed as dist
from capture_scenarios import chosen, fork
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from stretto.errors import StrettoError
from stretto.pipeline import Schedule, eager_1f1b, gpipe, one_f_one_b, paced, zb_h1
from stretto.pipeline.meshes.stage import placed_here
from stretto.torch import MeshPipeline, StageMesh

LOSS = nn.functional.mse_loss
WIDTH, STEPS = 10, 2
SCHEDULES: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "eager": eager_1f1b,
    "delayed": lambda n, m: eager_1f1b(n, m, delay=1),
    "zb_h1": zb_h1,
    "mixed": lambda n, m: paced(n, m, warmup=[n - at for at in range(n)], delay=[at % 3 - 1 for at in range(n)]),
}
CASES: dict[str, tuple[list[Any], str, int, bool]] = {
    "columns to rows": ([[[0], [1]], [[2, 3]]], "delayed", 4, False),
    "three stages": ([[0], [1, 2], [3]], "zb_h1", 4, False),
    "interleaved ranks": ([[0, 2], [1, 3]], "eager", 3, False),
    "blocking": ([[[0, 1]], [[2], [3]]], "mixed", 2, True),
}


class Layers(nn.Module):
    """Some layers; where told so, what the stage began with travels along to the next, which joins both."""

    def __init__(self, seed: int, *, joins: bool, forks: bool) -> None:
        super().__init__()
        data = torch.Generator().manual_seed(seed)
        sizes = [(2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH), (WIDTH, WIDTH)]
        self.weights = nn.ParameterList(0.4 * torch.randn(size, generator=data) for size in sizes)
        self.bias = nn.Parameter(torch.randn(WIDTH, generator=data))
        self.joins, self.forks = joins, forks

    def forward(self, *given: torch.Tensor) -> Any:
        """The layers, one after the other."""
        first = given[0]
        hidden = torch.relu(nn.functional.linear(first, self.weights[0]))
        hidden = nn.functional.linear(hidden, self.weights[1])
        hidden = torch.tanh(nn.functional.linear(hidden, self.weights[2]) + self.bias)
        if self.joins:
            hidden = hidden + given[1]
        return (hidden, first) if self.forks else hidden


def modules(case: dict[str, Any]) -> list[Layers]:
    """All stages with the same weights every time."""
    count = len(case["grids"])
    skips = case["skip"] and count > 1
    return [Layers(case["seed"] + at, joins=skips and at == 1, forks=skips and at == 0) for at in range(count)]


def draw(rng: random.Random, grids: Any, name: str, microbatches: int) -> dict[str, Any]:
    """A case: layouts of inputs and weights are drawn, sizes need not divide."""

    def placements(grid: Any, dims: int) -> list[str]:
        axes = torch.tensor(grid).ndim
        return [rng.choice(["R", *(f"S({dim})" for dim in range(dims)), "S(0)"]) for _ in range(axes)]

    return {
        "grids": grids, "schedule": name, "microbatches": microbatches, "rows": rng.choice([1, 4, 5, 8]),
        "inputs": [placements(grid, 2) for grid in grids], "seed": rng.randrange(1000), "skip": rng.random() < 0.4,
        "weights": [[placements(grid, 2) for _ in range(3)] for grid in grids], "blocking": False,
    }  # fmt: skip


def parsed(texts: list[str]) -> list[Any]:
    """Placements of their texts."""
    return [Replicate() if text == "R" else Shard(int(text[2:-1])) for text in texts]


def batches(case: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The same data every time."""
    data = torch.Generator().manual_seed(case["seed"])
    shape = (case["microbatches"], case["rows"], WIDTH)
    return list(torch.randn(shape, generator=data)), list(torch.randn(shape, generator=data))


def alone(case: dict[str, Any]) -> tuple[list[list[float]], list[list[torch.Tensor]]]:
    """Losses of all steps, and the last gradients of every stage, in one process."""
    stages = modules(case)
    whole = nn.ModuleList(stages)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    inputs, targets = batches(case)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        found = []
        for rows, wanted in zip(inputs, targets, strict=True):
            given: Any = rows
            for stage in stages:
                given = stage(*given) if isinstance(given, tuple) else stage(given)
            found.append(LOSS(given, wanted))
        torch.autograd.backward(torch.stack(found).sum() / len(found))
        losses.append([loss.item() for loss in found])
        optimizer.step()
    return losses, [[p.grad for p in stage.parameters()] for stage in stages]  # type: ignore[misc]


def placed_module(case: dict[str, Any], at: int, mesh: Any) -> Layers:
    """A stage with its parameters as DTensors."""
    module = modules(case)[at]
    if mesh.size() == 1:
        return module
    for index, texts in enumerate(case["weights"][at]):
        made = placed_here("weight", module.weights[index].detach(), mesh, parsed(texts))
        module.weights[index] = nn.Parameter(made)
    module.bias = nn.Parameter(placed_here("bias", module.bias.detach(), mesh, [Replicate()] * mesh.ndim))
    return module


def trained(case: dict[str, Any]) -> str:
    """Empty if the pipeline trains as one process does; else what differs."""
    meshes = [DeviceMesh("cpu", grid) for grid in case["grids"]]
    stages = [StageMesh(mesh=m, inputs=parsed(i)) for m, i in zip(meshes, case["inputs"], strict=True)]
    me = dist.get_rank()
    if not any(me in stage.ranks for stage in stages):
        return ""
    at = next(at for at, stage in enumerate(stages) if me in stage.ranks)
    module = placed_module(case, at, meshes[at])
    schedule = SCHEDULES[case["schedule"]](len(stages), case["microbatches"])
    pipe = MeshPipeline(module, stages, schedule, loss_fn=LOSS, blocking=case["blocking"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs, targets = batches(case)
    want_losses, want_grads = alone(case)
    problems = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = pipe.step(inputs if at == 0 else (), targets if at == len(stages) - 1 else ())
        optimizer.step()
        if at == len(stages) - 1:
            worst = max(abs(a.item() - b) for a, b in zip(losses, want_losses[step], strict=True))
            problems += [f"losses of step {step}: off by {worst}"] * (worst > 1e-5)
    for index, (parameter, want) in enumerate(zip(module.parameters(), want_grads[at], strict=True)):
        grad: Any = parameter.grad
        if isinstance(parameter, DTensor) and grad.placements != parameter.placements:
            problems.append(f"gradient {index}: is {grad.placements}, its parameter {parameter.placements}")
        have = grad.full_tensor() if isinstance(grad, DTensor) else grad
        worst = (have - want).abs().max().item()
        problems += [f"gradient {index} of stage {at}: off by {worst}"] * (not worst < 1e-5)
    if len(stages) > 1 and not pipe.edges:
        problems.append("no edges")
    pipe.close()
    return "; ".join(problems)


def refusals() -> dict[str, str]:
    """What a rank is told about pipelines that cannot run."""
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    over = DeviceMesh("cpu", [1, 2, 3])
    me = dist.get_rank()
    shard: list[Any] = [Shard(0)]
    pair = [StageMesh(mesh=first, inputs=shard), StageMesh(mesh=second, inputs=shard)]

    def said(stages: list[StageMesh], schedule: Schedule) -> str:
        try:
            MeshPipeline(nn.Identity(), stages, schedule, loss_fn=LOSS).step([torch.ones(2, 2)] * 3)
        except StrettoError as error:
            return str(error)
        return "it was accepted"

    return {
        "rank in two stages": said([pair[0], StageMesh(mesh=over, inputs=shard)], one_f_one_b(2, 3)),
        "three stages on two meshes": said(pair, one_f_one_b(3, 3)),
        "placements of two axes": said([pair[0], StageMesh(mesh=second, inputs=shard * 2)], one_f_one_b(2, 3)),
        "one rank differs": said(pair, gpipe(2, 3) if me == 3 else one_f_one_b(2, 3)),
        "a wrong batch": said(pair[:1], one_f_one_b(1, 2)) if me < 2 else "inputs: must be a sequence of 2",
    }


def example() -> str:
    """What examples/train_mesh_pipeline.py prints on this rank."""
    path = Path(__file__).parents[2] / "examples" / "train_mesh_pipeline.py"
    said = io.StringIO()
    with (
        mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"),
        mock.patch.object(sys, "argv", [str(path)]), contextlib.redirect_stdout(said),
    ):  # fmt: skip
        runpy.run_path(str(path), run_name="__main__")
    return said.getvalue()


def main() -> None:
    """Every rank reports all scenarios."""
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rng = random.Random(5)
    cases = {name: draw(rng, *rest[:3]) | {"blocking": rest[3]} for name, rest in CASES.items()}
    scenarios: dict[str, Callable[[], Any]] = {name: partial(trained, case) for name, case in cases.items()}
    scenarios = chosen(scenarios | {"example": example, "refusals": refusals})

    def rank_main(rank: int) -> None:
        faulthandler.dump_traceback_later(540, exit=True)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
        )
        outcomes = {name: scenario() for name, scenario in scenarios.items()}
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        dist.barrier()
        dist.destroy_process_group()

    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
