# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/enforcer_nccl.py: a model trained with plain NCCL, with our backend, and under two plans.

Every system trains its own copy from the same start on the same data, so that losses can be compared step by step; a
round gives each of them some iterations in turn. What the joint plan is made for is measured here: how fast two of
NCCL's communicators are at the same time, and what a collective of a few bytes takes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from enforcer_rank import identity, shared
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import stretto.torch
from stretto import Cluster, Plan, Workload
from stretto.control.refine import RefinedCosts
from stretto.lab import Lab
from stretto.planner import api
from stretto.planner.costs.costs import simulated_costs
from stretto.runtime.torch_backend.watch import RECORDING, SubmittedCall
from stretto.workload import Dep, Op

WARM = 3
PROBED_BYTES = 8 << 20
MOST_MBIT = 40_000
"""As fast as a lab's description can say; above it the cost of any motif counts, not the rate."""


class Trained:
    """One system's copy of the model, its losses and times."""

    def __init__(self, shape: dict[str, Any], group: Any, device: torch.device) -> None:
        torch.manual_seed(0)
        width = shape["width"]
        layers = [torch.nn.Linear(width, width, device=device) for _ in range(shape["layers"])]
        net = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))
        self.model: Any
        if shape["how"] == "ddp":
            self.model = DistributedDataParallel(
                net, device_ids=[device.index], process_group=group, bucket_cap_mb=shape["bucket_mb"]
            )
        else:
            mesh = None if group is None else DeviceMesh.from_group(group, "cuda")
            for layer in layers:
                fully_shard(layer, mesh=mesh)
            self.model = fully_shard(net, mesh=mesh)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        own = torch.Generator().manual_seed(1 + dist.get_rank())
        self.data = torch.randn(shape["batch"], width, generator=own).to(device)
        self.losses: list[float] = []
        self.times: list[float] = []

    def step(self) -> float:
        """One iteration, and its microseconds; reading the loss waits for the GPU."""
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        loss = (self.model(self.data) - 0.5).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(float(loss.detach()))
        stretto.torch.step()
        return (time.perf_counter() - begin) * 1e6

    def turn(self, times: int) -> None:
        """Some iterations; the first do not count."""
        self.times += [self.step() for _ in range(WARM + times)][WARM:]

    def planned_turn(self, plan: Plan, workload: Workload, times: int) -> int:
        """The same under a plan; how many motifs it has."""
        with stretto.torch.enforce(plan, workload, every=2, carrier="nccl") as enforcer:
            while not enforcer.report().number:
                self.step()
            self.turn(times)
            told = enforcer.report()
        if told.fell_back:
            raise SystemExit(f"the plan was given up: {told.fell_back}")
        return len(told.motifs)


class Seen:
    """What a step submits, and how long its stream computed before each."""

    def __init__(self) -> None:
        self.calls: list[tuple[SubmittedCall, Any]] = []

    def seen(self, what: SubmittedCall, run: Callable[[], Any]) -> Any:
        """A call comes."""
        self.calls.append((what, self.mark()))
        return run()

    @staticmethod
    def mark() -> Any:
        """This moment on the current stream."""
        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        event.record()
        return event


def observed(trained: Trained) -> Workload:
    """One iteration as a workload: compute between submissions as the GPU measured it, waits at the end.

    FSDP2 waits inside of each call, on a stream of its own: there a plan cuts, but cannot change the order.
    """
    seen = Seen()
    begin = seen.mark()
    RECORDING.current = seen
    try:
        trained.step()
    finally:
        RECORDING.current = None
    torch.cuda.synchronize()
    ops: list[Op] = []
    before = begin
    for number, (what, event) in enumerate(seen.calls):
        after: tuple[Dep, ...] = (Dep(op=f"compute.{number - 1}"),) if number else ()
        if number and seen.calls[number - 1][0].blocking:
            after += (Dep(op=ops[-1].name, why="wait"),)
        ops.append(Op(name=f"compute.{number}", duration_us=max(1e3 * before.elapsed_time(event), 1.0), after=after))
        given = (Dep(op=f"compute.{number}", why="submit"),)
        ops.append(Op(name=f"{what.op}.{number}", kind=what.op, nbytes=float(what.nbytes), root=what.root, after=given))
        before = event
    waits = tuple(Dep(op=op.name, why="wait") for op in ops if op.is_comm)
    ops.append(Op(name="use", duration_us=100.0, after=(Dep(op=f"compute.{len(seen.calls) - 1}"), *waits)))
    return Workload(name="observed", num_ranks=dist.get_world_size(), ops=tuple(ops))


def beside(groups: list[Any], nbytes: int, device: torch.device) -> float:
    """Microseconds for a sum of so many bytes on each of some communicators, all at once."""
    tensors = [torch.ones(nbytes // 4, device=device) for _ in groups]
    took = []
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        works = [dist.all_reduce(t, group=g, async_op=True) for t, g in zip(tensors, groups, strict=True)]
        for work in works:
            assert work is not None
            work.wait()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - begin) * 1e6)
    return slowest(took[2:], groups[0], device)


def probed(groups: list[Any], device: torch.device) -> tuple[Cluster, float]:
    """Two channels, each as fast as a communicator is while the other is used too; and the cost of any motif."""
    ranks = dist.get_world_size()
    small_us = beside(groups, 64, device)
    large_us = max(beside(groups, PROBED_BYTES, device) - small_us, 1.0)
    bits = 8 * PROBED_BYTES * 2 * (ranks - 1) / ranks
    rate = f"{min(max(1, round(bits / large_us)), MOST_MBIT)}mbit"
    return Lab(hosts=ranks, ranks_per_host=1, uplinks={"a": rate, "b": rate}).cluster(), small_us


def measured(asked: dict[str, Any], folder: Path, device: torch.device) -> dict[str, Any]:
    plain = [dist.new_group(backend="nccl") for _ in range(2)]
    cluster, small_us = probed(plain, device)
    costs = RefinedCosts(simulated_costs(cluster), {}, small_us)
    systems = {name: Trained(asked, plain[0] if name == "nccl" else None, device) for name in ("nccl", "backend")}
    for one in systems.values():
        one.turn(WARM)
    workload = shared_workload(observed(systems["backend"]), folder)
    plans = {
        "identity": shared(lambda: identity(workload, cluster, "a"), folder / "identity.json"),
        "joint": shared(
            lambda: api.plan(workload, cluster, budget_s=asked["budget_s"], costs=costs).plan, folder / "joint.json"
        ),
    }
    motifs: dict[str, int] = {}
    for name in plans:
        systems[name] = Trained(asked, None, device)
        systems[name].turn(WARM)
    for one in systems.values():
        one.times.clear()
    for _ in range(asked["rounds"]):
        for name, one in systems.items():
            if name in plans:
                motifs[name] = one.planned_turn(plans[name], workload, asked["times"])
            else:
                one.turn(asked["times"])
    steps = min(len(one.losses) for one in systems.values())
    want = systems["nccl"].losses[:steps]
    return {
        "times": {name: slowest(one.times, plain[0], device) for name, one in systems.items()},
        "losses_off": {
            name: max(abs(a - b) for a, b in zip(one.losses[:steps], want, strict=True))
            for name, one in systems.items()
        },
        "predicted_us": {"joint": plans["joint"].retimed_us or plans["joint"].iteration_us},
        "motifs": motifs,
    }  # fmt: skip


def shared_workload(workload: Workload, folder: Path) -> Workload:
    """The first rank's, on all."""
    if dist.get_rank() == 0:
        workload.save(folder / "workload.yaml")
    dist.barrier()
    return Workload.load(folder / "workload.yaml")


def slowest(times: list[float], group: Any, device: torch.device) -> float:
    """The median over iterations of the slowest rank's time."""
    values = torch.tensor(times, device=device)
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return float(median(values.tolist()))


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    asked = json.loads((folder / "asked.json").read_text())
    torch.set_num_threads(1)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group(
        "stretto", init_method=f"file://{folder}/store", rank=rank, world_size=int(os.environ["WORLD_SIZE"])
    )
    found = measured(asked, folder, device)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
