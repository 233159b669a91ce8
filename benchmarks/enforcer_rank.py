# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/enforcer.py: a training step in plain order and under plans, in turn, in one run.

The first rank plans; all take the plan from the folder that they share. A round measures every system once, so that
what else the machine does falls on all of them alike.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import stretto.torch
from stretto import Cluster, Plan, Workload
from stretto.control.autopilot import small_us
from stretto.control.refine import RefinedCosts
from stretto.planner import api
from stretto.planner.algebra.motif import motif_of
from stretto.planner.costs.channels import restrict
from stretto.planner.costs.costs import simulated_costs
from stretto.planner.plan import MotifPlan, OpPlan

WARM = 3
Step = Callable[[], object]


def exchange_and_sum(nbytes: int) -> Step:
    """An all-to-all and an all-reduce of so many bytes, in flight together; nothing else."""
    count = nbytes // 4
    x, y, g = torch.ones(count), torch.zeros(count), torch.ones(count)

    def step() -> None:
        works = [dist.all_to_all_single(y, x, async_op=True), dist.all_reduce(g, dist.ReduceOp.MAX, async_op=True)]
        for work in works:
            assert work is not None
            work.wait()

    return step


def buckets(nbytes: int, number: int, work: int) -> Step:
    """What data-parallel training does: a bucket is summed while the next one is computed."""
    grads = [torch.ones(nbytes // 4) for _ in range(number)]
    a = torch.ones(work, work)

    def step() -> None:
        works = []
        for grad in grads:
            torch.mm(a, a)
            works.append(dist.all_reduce(grad, dist.ReduceOp.MAX, async_op=True))
        for one in works:
            assert one is not None
            one.wait()

    return step


def messages(nbytes: int, *, both: bool) -> Step:
    """Two neighboring stages: the first sends, with `both` the second does at the same time; then a small sum."""
    given, taken, total = torch.ones(nbytes // 4), torch.zeros(nbytes // 4), torch.ones(256)
    rank = dist.get_rank()

    def step() -> None:
        works = []
        if both or rank == 1:
            works.append(dist.irecv(taken, 1 - rank))
        if both or rank == 0:
            works.append(dist.isend(given, 1 - rank))
        for work in works:
            assert work is not None
            work.wait()
        dist.all_reduce(total, dist.ReduceOp.MAX)

    return step


def captured(step: Step) -> Workload:
    with stretto.torch.capture(iterations=4, skip=2) as recorder:
        for _ in range(6):
            step()
            recorder.step()
    return recorder.workload


def timed(step: Step, times: int) -> list[float]:
    """Microseconds of iterations that follow one another; the slowest rank's."""
    taken = []
    for number in range(WARM + times):
        begin = time.perf_counter()
        step()
        stretto.torch.step()
        if number >= WARM:
            taken.append((time.perf_counter() - begin) * 1e6)
    return taken


def under(plan: Plan, workload: Workload, cluster: Cluster, step: Step, times: int, carrier: str) -> list[float]:
    with stretto.torch.enforce(plan, workload, cluster=cluster, carrier=carrier) as enforcer:
        while not enforcer.report().number:
            step()
            stretto.torch.step()
        taken = timed(step, times)
        told = enforcer.report()
    if told.fell_back:
        raise SystemExit(f"the plan was given up: {told.fell_back}")
    return taken


def shared(make: Callable[[], Plan], path: Path) -> Plan:
    """What the first rank makes, on all."""
    if dist.get_rank() == 0:
        make().save(path)
    dist.barrier()
    return Plan.load(path)


def identity(workload: Workload, cluster: Cluster, channel: str) -> Plan:
    """The application's order, whole ops, and the program that the backend would take."""
    ops = []
    for seq, op in enumerate(workload.comm_ops):
        text = str(motif_of(op.kind, workload.groups_of(op)[0], op.nbytes, op.root))
        only = MotifPlan(motif=text, algorithm="direct", channels=(channel,), seq=seq, nbytes=op.nbytes)
        ops.append(OpPlan(op=op.name, kind=op.kind, nbytes=op.nbytes, option="whole", expression=text, motifs=(only,)))
    return Plan(
        name="identity", workload=workload.name, workload_digest=workload.digest, cluster=cluster.name,
        cluster_digest=cluster.digest, iteration_us=1.0, ops=tuple(ops),
    )  # fmt: skip


def channels(asked: dict[str, Any], cluster: Cluster, folder: Path) -> dict[str, Any]:
    step = exchange_and_sum(asked["nbytes"])
    workload = captured(step)
    # The best that can be done on the faster channel: there ops can only follow one another.
    faster = restrict(cluster, ["shm", "rdma"])
    motif_us = small_us()

    def planned(on: Cluster) -> Plan:
        costs = RefinedCosts(simulated_costs(on), {}, motif_us)
        return api.plan(workload, on, budget_s=asked["budget_s"], systems=("fifo", "syndicate"), costs=costs).plan

    one, joint = (
        shared(lambda on=on: planned(on), folder / f"{name}.json")  # type: ignore[misc]
        for name, on in (("one", faster), ("joint", cluster))
    )
    times: dict[str, list[float]] = {"backend": [], "one channel": [], "stretto": []}
    for _ in range(asked["rounds"]):
        times["backend"] += timed(step, asked["times"])
        times["one channel"] += under(one, workload, faster, step, asked["times"], "executor")
        times["stretto"] += under(joint, workload, cluster, step, asked["times"], "executor")
    return {
        "times": times,
        "predicted_us": {"one channel": one.iteration_us, "stretto": joint.retimed_us or joint.iteration_us},
        "options": [op.option for op in joint.ops],
    }


def overhead(asked: dict[str, Any], cluster: Cluster, folder: Path) -> dict[str, Any]:
    step = buckets(asked["nbytes"], asked["buckets"], asked["work"])
    workload = replace(captured(step), name="buckets")
    plan = shared(lambda: identity(workload, cluster, asked["channel"]), folder / "identity.json")
    times: dict[str, list[float]] = {"backend": [], "identity": []}
    for number in range(asked["rounds"]):
        # Who goes first changes, so that what drifts falls on both alike.
        for system in list(times)[:: 1 if number % 2 else -1]:
            if system == "backend":
                times[system] += timed(step, asked["times"])
            else:
                times[system] += under(plan, workload, cluster, step, asked["times"], "executor")
    return {"times": times, "turn": asked["times"]}


def duplex(asked: dict[str, Any], cluster: Cluster, folder: Path) -> dict[str, Any]:
    times: dict[str, list[float]] = {}
    predicted = {}
    for name, both in (("one way", False), ("both ways", True)):
        step = messages(asked["nbytes"], both=both)
        workload = captured(step)
        plan = shared(
            lambda workload=workload: api.plan(workload, cluster, budget_s=asked["budget_s"]).plan,  # type: ignore[misc]
            folder / f"{name}.json",
        )
        times[f"{name}, backend"] = timed(step, asked["times"])
        times[f"{name}, plan"] = under(plan, workload, cluster, step, asked["times"], "executor")
        predicted[f"{name}, plan"] = plan.retimed_us or plan.iteration_us
    return {"times": times, "predicted_us": predicted}


def turns(times: list[float], size: int) -> list[float]:
    """The median of every turn."""
    return [median(times[at : at + size]) for at in range(0, len(times), size)]


CASES = {"channels": channels, "overhead": overhead, "duplex": duplex}


def main() -> None:
    folder = Path(sys.argv[1])
    asked = json.loads((folder / "asked.json").read_text())
    torch.set_num_threads(1)
    dist.init_process_group("stretto")
    found = CASES[asked["case"]](asked, Cluster.load(folder / "truth.yaml"), folder)
    slowest = {system: torch.tensor(times) for system, times in found["times"].items()}
    for times in slowest.values():
        dist.all_reduce(times, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        if "turn" in found:
            first, second = (turns(times.tolist(), found["turn"]) for times in slowest.values())
            found["ratio"] = median(b / a for a, b in zip(first, second, strict=True))
        found["times"] = {system: median(times.tolist()) for system, times in slowest.items()}
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
