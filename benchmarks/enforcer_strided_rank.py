# SPDX-License-Identifier: Apache-2.0
"""One rank of a case ``strided`` of benchmarks/enforcer.py: a stage of a pipeline with replicas on other hosts.

A stage is a PyTorch module with tables of the size of its activations, so that links have much to carry and processors
little to compute. Micro-batches go forward through all stages and then back (GPipe, or 1F1B); each table's gradient is
summed over the replicas of the stage as soon as the last backward pass of the stage has made it.

Stages wait for each other, but not all at once: a stage that is late in one iteration is early in the next. So a turn's
time is the mean of its iterations on each rank, and of these the slowest rank's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from enforcer_rank import Step, captured, shared, timed
from torch import Tensor, nn

import stretto.torch
from stretto import Cluster, Plan, Workload
from stretto.planner import api

PLANS = {"stretto without turns": False, "stretto": True}
"""The plans, and whether motifs of different stages may take turns on links; the first only where that is looked at."""


class Stage(nn.Module):
    """Some tables that are multiplied with the activations, and one dense layer."""

    def __init__(self, rows: int, width: int, tables: int) -> None:
        super().__init__()
        self.tables = nn.ParameterList(nn.Parameter(torch.rand(rows, width)) for _ in range(tables))
        self.dense = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """A micro-batch."""
        for table in self.tables:
            x = torch.tanh(x * table)
        out: Tensor = self.dense(x)
        return out


def layout(layout: str, hosts: int, each: int) -> list[list[int]]:
    """The ranks of every stage, one for each replica; all stages have their replicas on different hosts.

    With ``inside`` and ``turns`` a pipeline stays on its host; else each of its stages is on another host than the one
    before it.
    """
    shift = 0 if layout in ("inside", "turns") else 1
    return [[(replica + shift * stage) % hosts * each + stage for replica in range(hosts)] for stage in range(each)]


def actions(stage: int, stages: int, batches: int, order: str) -> Iterator[tuple[str, int]]:
    """What a stage does, in order."""
    warm = min(stages - stage, batches) if order == "1f1b" else batches
    yield from (("F", batch) for batch in range(warm))
    for batch in range(batches):
        yield "B", batch
        if warm + batch < batches:
            yield "F", warm + batch


class Pipeline:
    """This rank's stage of its replica's pipeline."""

    def __init__(self, asked: dict[str, Any], stages: list[list[int]], groups: list[Any]) -> None:
        rank = dist.get_rank()
        self.asked, self.number = asked, len(stages)
        self.at = next(at for at, ranks in enumerate(stages) if rank in ranks)
        replica = stages[self.at].index(rank)
        self.group = groups[self.at]
        self.before = stages[self.at - 1][replica] if self.at else None
        self.behind = stages[self.at + 1][replica] if self.at + 1 < self.number else None
        self.shape = (asked["rows"], asked["width"])
        self.module = Stage(*self.shape, asked["tables"])
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3)

    def step(self) -> None:
        """One iteration."""
        self.optimizer.zero_grad(set_to_none=True)
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        works: list[Any] = []
        for action, batch in actions(self.at, self.number, self.asked["batches"], self.asked["order"]):
            time.sleep(self.asked["busy_s"] * (1 if action == "F" else 2))
            if action == "F":
                given = torch.rand(self.shape) if self.before is None else self.received(self.before)
                given.requires_grad_()
                out = self.module(given)
                kept[batch] = given, out
                if self.behind is not None:
                    works.append(dist.isend(out.detach(), self.behind))
                continue
            given, out = kept.pop(batch)
            if self.behind is None:
                torch.autograd.backward(out.square().mean())
            else:
                torch.autograd.backward(out, self.received(self.behind))
            if self.before is not None:
                assert given.grad is not None
                works.append(dist.isend(given.grad, self.before))
        works += [
            dist.all_reduce(parameter.grad, group=self.group, async_op=True)
            for parameter in self.module.parameters()
            if parameter.grad is not None and parameter.grad.numel() > self.asked["width"] ** 2
        ]
        for work in works:
            work.wait()
        self.optimizer.step()

    def received(self, source: int) -> Tensor:
        """The next tensor from another stage."""
        taken = torch.empty(self.shape)
        dist.recv(taken, source)
        return taken


def under(plan: Plan, workload: Workload, cluster: Cluster, step: Step, times: int) -> list[float]:
    """Microseconds of each iteration under a plan."""
    with stretto.torch.enforce(plan, workload, cluster=cluster, every=1) as enforcer:
        while not enforcer.report().number:
            step()
            stretto.torch.step()
        taken = timed(step, times)
        told = enforcer.report()
    if told.fell_back:
        raise SystemExit(f"the plan was given up: {told.fell_back}")
    return taken


def strided(asked: dict[str, Any], cluster: Cluster, folder: Path) -> dict[str, Any]:
    """Plain order and under a plan, in turn."""
    each = asked["each"]
    stages = layout(asked["layout"], dist.get_world_size() // each, each)
    pipe = Pipeline(asked, stages, [dist.new_group(sorted(ranks)) for ranks in stages])
    step: Step = pipe.step
    workload = captured(step)
    plans = {
        name: shared(
            lambda link_turns=link_turns: (
                api.plan(  # type: ignore[misc]
                    workload, cluster, budget_s=asked["budget_s"], link_turns=link_turns
                ).plan
            ),
            folder / f"plan{number}.json",
        )
        for number, (name, link_turns) in enumerate(PLANS.items())
        if link_turns or asked["busy_s"]
    }
    if dist.get_rank() == 0:
        workload.save(folder / "workload.json")
    times: dict[str, list[float]] = {"plain order": [], **{name: [] for name in plans}}
    begun = time.process_time()
    for _ in range(asked["rounds"]):
        times["plain order"].append(mean(timed(step, asked["times"])))
        for name, plan in plans.items():
            times[name].append(mean(under(plan, workload, cluster, step, asked["times"])))
    cpu_us = (time.process_time() - begun) * 1e6
    return {
        "times": times,
        "predicted_us": {
            "plain order": plans["stretto"].baselines_us.get("fifo"),
            **{name: plan.retimed_us or plan.iteration_us for name, plan in plans.items()},
        },
        "link_turns": len(plans["stretto"].link_turns),
        "bound_us": plans["stretto"].bound_us,
        "cpu_us": cpu_us,
    }


def main() -> None:
    folder = Path(sys.argv[1])
    asked = json.loads((folder / "asked.json").read_text())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("stretto")
    found = strided(asked, Cluster.load(folder / "truth.yaml"), folder)
    slowest = {system: torch.tensor(times) for system, times in found["times"].items()}
    for times in slowest.values():
        dist.all_reduce(times, dist.ReduceOp.MAX)
    cpu = torch.tensor([found["cpu_us"]])
    dist.all_reduce(cpu)
    if dist.get_rank() == 0:
        found["cpu_us"] = float(cpu) / (len(found["times"]) * asked["rounds"] * asked["times"])
        found["times"] = {system: median(times.tolist()) for system, times in slowest.items()}
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
