# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/enforcer_models.py: a model trained with gloo, with our backend, and under a joint plan.

Every system trains its own copy from the same start on the same data, so that losses can be compared step by step; a
round gives each of them some iterations in turn.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from enforcer_models_splits import BUILD as UNEQUAL
from enforcer_rank import shared
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from models import cnn, dlrm, gpt

import stretto.torch
from stretto import Cluster, Plan, Workload
from stretto.control.autopilot import small_us
from stretto.control.refine import RefinedCosts
from stretto.planner import api
from stretto.planner.costs.costs import simulated_costs
from stretto.planner.plan import PLAIN

LossOf = Callable[[], torch.Tensor]
SKIP, RECORD = 3, 4
WARM = 2
"""Iterations of each turn that are not counted."""
LEAST_GAIN = 0.03
"""What a plan has to promise; else the step stays as it is, as under a controller."""


def data(shuffle: int) -> torch.Generator:
    """This rank's, or another's: then sums are the same but for the order in which they are added."""
    ranks = dist.get_world_size()
    return torch.Generator().manual_seed((dist.get_rank() + shuffle) % ranks)


def build_dlrm(group: Any, shuffle: int, shape: dict[str, int]) -> tuple[torch.nn.Module, LossOf]:
    # Tables are spread: shuffled data must still meet the same ones.
    torch.manual_seed(1 + dist.get_rank())
    model = dlrm.DLRM(dlrm.Shape(**shape), group=group, bucket_mb=1.0)
    dense, indices, clicks = model.batch(data(shuffle))
    return model, lambda: binary_cross_entropy_with_logits(model(dense, indices), clicks)


def build_gpt(group: Any, shuffle: int, shape: dict[str, int]) -> tuple[torch.nn.Module, LossOf]:
    torch.manual_seed(1)
    plain = gpt.GPT(gpt.Shape(**shape))
    tokens = plain.batch(data(shuffle))
    model = gpt.distributed(plain, "fsdp", group=group)
    return model, lambda: model(tokens)


def build_cnn(group: Any, shuffle: int, shape: dict[str, int]) -> tuple[torch.nn.Module, LossOf]:
    torch.manual_seed(1)
    plain = cnn.CNN(cnn.Shape(**shape))
    images, labels = plain.batch(data(shuffle))
    model = DistributedDataParallel(plain, process_group=group, bucket_cap_mb=1)
    return model, lambda: model(images, labels)


BUILD = {"dlrm": build_dlrm, "gpt": build_gpt, "cnn": build_cnn, "cnn_compute": build_cnn, **UNEQUAL}


class Trained:
    """One system's copy of the model, its losses and times."""

    def __init__(self, made: tuple[torch.nn.Module, LossOf]) -> None:
        self.model, self.loss_of = made
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.losses: list[float] = []
        self.times: list[float] = []

    def step(self) -> float:
        """One iteration, and its microseconds."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        stretto.torch.step()
        return (time.perf_counter() - begin) * 1e6

    def turn(self, times: int) -> None:
        """Some iterations; the first do not count."""
        self.times += [self.step() for _ in range(WARM + times)][WARM:]

    def planned_turn(self, plan: Plan, workload: Workload, cluster: Cluster, times: int) -> None:
        """The same under a plan."""
        with stretto.torch.enforce(plan, workload, every=2, cluster=cluster) as enforcer:
            while not enforcer.report().number:
                self.step()
            self.turn(times)
            told = enforcer.report()
        if told.fell_back:
            raise SystemExit(f"the plan was given up: {told.fell_back}")


def compute_us(workload: Workload) -> float:
    """What the step computes on a rank, in all."""
    return sum(op.duration_us for op in workload.ops if not op.is_comm)


def measured(asked: dict[str, Any], cluster: Cluster, folder: Path) -> dict[str, Any]:
    gloo = dist.new_group(backend="gloo")
    build, shape = BUILD[asked["case"]], asked["shape"]
    systems = {name: Trained(build(gloo if name == "gloo" else None, 0, shape)) for name in ("gloo", "backend")}
    with stretto.torch.capture(iterations=RECORD, skip=SKIP, name=asked["case"]) as recorder:
        for _ in range(SKIP + RECORD):
            systems["backend"].step()
            recorder.step()
    workload = recorder.workload
    costs = RefinedCosts(simulated_costs(cluster), {}, small_us())
    plan = shared(
        lambda: api.plan(workload, cluster, budget_s=asked["budget_s"], costs=costs, least_gain=LEAST_GAIN).plan,
        folder / "plan.json",
    )
    systems["stretto"] = Trained(build(None, 0, shape))
    for _ in range(WARM):
        systems["stretto"].step()
    for _ in range(asked["rounds"]):
        for name, one in systems.items():
            if name == "stretto" and plan.name != PLAIN:
                one.planned_turn(plan, workload, cluster, asked["times"])
            else:
                one.turn(asked["times"])
    steps = min([asked["compared"], *(len(one.losses) for one in systems.values())])
    losses = {name: over_ranks(one.losses[:steps], gloo) for name, one in systems.items()}
    shuffled = []
    for shuffle in range(1, dist.get_world_size()):
        other = Trained(build(gloo, shuffle, shape))
        for _ in range(steps):
            other.step()
        shuffled.append(over_ranks(other.losses, gloo))

    def off(values: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(values, losses["gloo"], strict=True))

    return {
        "times": {name: slowest(one.times, gloo) for name, one in systems.items()},
        "losses_off": {name: off(values) for name, values in losses.items()},
        "spread": max(map(off, shuffled)),
        "last_loss": losses["stretto"][-1],
        "compute_us": compute_us(workload),
        "predicted_us": plan.retimed_us or plan.iteration_us,
        "plan": plan.name,
        "options": {op.op: op.option for op in plan.ops},
    }


def over_ranks(losses: list[float], group: Any) -> list[float]:
    """Their means."""
    values = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(values, group=group)
    return [float(value) / dist.get_world_size() for value in values]


def slowest(times: list[float], group: Any) -> float:
    """The median over iterations of the slowest rank's time."""
    values = torch.tensor(times)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return float(median(values.tolist()))


def main() -> None:
    folder = Path(sys.argv[1])
    asked = json.loads((folder / "asked.json").read_text())
    torch.set_num_threads(1)
    dist.init_process_group("stretto")
    found = measured(asked, Cluster.load(folder / "truth.yaml"), folder)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
