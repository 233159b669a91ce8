# SPDX-License-Identifier: Apache-2.0
"""What a call under a plan costs this process beside its communication: an executor that moves nothing stands in.

`call_us` is the time from the call to the end of its ``wait()`` in the enforcer, the least of many rounds; so other
load on the machine hardly changes it. No lab is needed: one process believes to be the first of two ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import Row
from torch._C._distributed_c10d import HashStore

from stretto.cluster import Cluster
from stretto.planner.algebra.motif import motif_of
from stretto.planner.plan import MotifPlan, OpPlan, Plan
from stretto.runtime.enforcer.enforcer import Enforcer
from stretto.runtime.torch_backend.buffers import CollectiveCall
from stretto.workload import Dep, Op, Workload

OPS, COUNT = 8, 256
KINDS = ("all_reduce", "all_gather")


class Moved:
    """A program that has ended as soon as it was started."""

    done, error, elapsed_us, id = True, None, 1.0, 0

    def wait(self, timeout_s: float | None = None) -> bool:
        """There is nothing to wait for."""
        return True


class StillExecutor:
    """Takes programs as the executor does, and moves nothing."""

    world_size = 2

    def load(self, program: Any, **bound: Any) -> Any:
        """A handle of no use."""
        return SimpleNamespace(me=0)

    def start(self, *given: Any, **more: Any) -> Moved:
        """Over at once."""
        return Moved()

    def wait_any(self, timeout_s: float) -> list[int]:
        """Nothing ever ends late."""
        time.sleep(timeout_s)
        return []


def call_cost(quick: bool) -> list[Row]:
    """Each kind as one whole motif, waited for at once and later."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return [row for kind in KINDS for row in _cost_of(kind, rounds=200 if quick else 2000)]


def _cost_of(kind: str, *, rounds: int) -> list[Row]:
    cluster = Cluster.load("dgx2:2")
    workload = _step(kind)
    group = _group()
    rows = []
    with Enforcer(workload, every=1, carrier="executor", group=group) as enforcer:
        plan = _identity(workload, cluster)
        enforcer.prepare(plan, workload, 1)
        enforcer.commit(1, plan.hash)
        for _ in range(3):
            enforcer.step()
        assert enforcer.report().number == 1
        for system, blocking in (("blocking", True), ("asynchronous", False)):
            call_us = _least(enforcer, group, kind, blocking=blocking, rounds=rounds)
            rows.append({"case": f"call {kind}", "system": system, "call_us": call_us})
        assert not enforcer.report().fell_back
    return rows


def _least(enforcer: Enforcer, group: Any, kind: str, *, blocking: bool, rounds: int) -> float:
    """The least time of a call among those of many iterations, in microseconds."""
    opts = SimpleNamespace(asyncOp=not blocking)
    given, out = torch.ones(COUNT), torch.ones(2 * COUNT)
    reduces = kind == "all_reduce"
    inputs, outputs = ([given], [given]) if reduces else ([given], [out])
    least = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(OPS):
            call = CollectiveCall.of(kind, inputs, outputs=outputs, reduce=dist.ReduceOp.SUM if reduces else None)
            work = enforcer.take(group, call, outputs, opts, _never)
            assert work is not None
            work.wait()
        least = min(least, time.perf_counter() - begin)
        enforcer.step()
    return 1e6 * least / OPS


def _group() -> Any:
    job = SimpleNamespace(executor=StillExecutor(), why="", max_communicators=256, next=1)
    engine = SimpleNamespace(
        job=job, rank=0, size=2, timeout_s=60.0, refusal=lambda call: "", selector=SimpleNamespace(devices=(0, 1))
    )
    return SimpleNamespace(
        engine=engine, cards=[SimpleNamespace(host="a")] * 2, explain=lambda error: error, alone=True, coalescing=False
    )


def _step(kind: str) -> Workload:
    nbytes = 4.0 * COUNT * (1 if kind == "all_reduce" else 2)
    names = [f"{kind}.{number}" for number in range(OPS)]
    before = (Dep(op="work", why="submit"),)
    ops = [Op(name="work", duration_us=1.0), *(Op(name=n, kind=kind, nbytes=nbytes, after=before) for n in names)]
    return Workload(name="calls", num_ranks=2, ops=tuple(ops))


def _identity(workload: Workload, cluster: Cluster) -> Plan:
    """Whole ops in the application's order on one channel."""
    ops = []
    for seq, op in enumerate(workload.comm_ops):
        text = str(motif_of(op.kind, (0, 1), op.nbytes, op.root))
        only = MotifPlan(motif=text, algorithm="direct", channels=("shm",), seq=seq, nbytes=op.nbytes)
        ops.append(OpPlan(op=op.name, kind=op.kind, nbytes=op.nbytes, option="whole", expression=text, motifs=(only,)))
    return Plan(
        name="identity", workload=workload.name, workload_digest=workload.digest, cluster=cluster.name,
        cluster_digest=cluster.digest, iteration_us=1.0, ops=tuple(ops),
    )  # fmt: skip


def _never(**options: Any) -> Any:
    raise AssertionError("the plan runs it")


CASES: dict[str, Callable[[bool], list[Row]]] = {"call": call_cost}
