# SPDX-License-Identifier: Apache-2.0
"""Steps and plans for the enforcer's tests, written down by hand where a search would choose otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import stretto.torch
from stretto import Cluster, Plan, Workload
from stretto.lab import Lab
from stretto.planner.algebra.rewrites import Rewrite, rewrites
from stretto.planner.plan import MotifPlan, OpPlan, ProgramPlan
from stretto.runtime.enforcer.enforcer import Enforcer
from stretto.runtime.executor import join as executor_join
from stretto.runtime.torch_backend import meeting as backend_meet
from stretto.workload import Dep, Op

ALGORITHMS = {"all_reduce": "ring", "all_gather": "ring", "reduce_scatter": "ring"}
Step = Callable[[int], object]


def cluster_of(ranks_per_host: int = 2) -> Cluster:
    """Two hosts with two channels between them."""
    return Lab(hosts=2, ranks_per_host=ranks_per_host, uplinks={"rdma": "400mbit", "eth": "200mbit"}).cluster()


def join(
    folder: Path, rank: int, ranks: int, name: str = "store", backend: str = "stretto", timeout: timedelta | None = None
) -> None:
    """A group whose first ranks believe to be on another host than the last, with two networks between."""
    os.environ |= {"STRETTO_CHANNELS": "rdma=lo;eth=lo", "GLOO_SOCKET_IFNAME": "lo"}
    host = "a" if rank < ranks // 2 else "b"
    with (
        mock.patch.multiple(backend_meet, host_key=lambda: host),
        mock.patch.multiple(executor_join, host_key=lambda: host),
    ):
        dist.init_process_group(
            backend, init_method=f"file://{folder}/{name}", rank=rank, world_size=ranks, timeout=timeout
        )


def whole(channels: Sequence[str], *, seq: int, ahead: int = 0, algorithm: str = "") -> Callable[[Op, Rewrite], OpPlan]:
    """An op in one motif."""

    def made(op: Op, rewrite: Rewrite) -> OpPlan:
        return op_plan(op, rewrite, seqs=[seq], channels=[tuple(channels)], ahead=ahead, algorithm=algorithm)

    return made


def op_plan(
    op: Op, rewrite: Rewrite, *, seqs: Sequence[int], channels: Sequence[tuple[str, ...]], ahead: int = 0,
    algorithm: str = "",
) -> OpPlan:  # fmt: skip
    """What becomes of an op: the stages of a rewrite in a given order on given channels."""
    motifs = tuple(
        MotifPlan(
            motif=stage.motif, algorithm=algorithm or ALGORITHMS.get(stage.kind, "direct"),
            channels=channels[at % len(channels)], seq=seqs[at], ahead=ahead, after=stage.after, nbytes=stage.nbytes,
            duration_us=5000.0,
        )
        for at, stage in enumerate(rewrite.stages)
    )  # fmt: skip
    return OpPlan(
        op=op.name, kind=op.kind, nbytes=op.nbytes, option=" ".join(rewrite.steps), expression=rewrite.text,
        motifs=motifs,
    )  # fmt: skip


def plan_of(
    workload: Workload, cluster: Cluster, ops: Sequence[OpPlan], *, name: str = "by hand",
    programs: Sequence[ProgramPlan] = (),
) -> Plan:  # fmt: skip
    """A plan of these."""
    return Plan(
        name=name, workload=workload.name, workload_digest=workload.digest, cluster=cluster.name,
        cluster_digest=cluster.digest, iteration_us=1.0, ops=tuple(ops), programs=tuple(programs),
    )  # fmt: skip


def simple_plan(workload: Workload, cluster: Cluster, how: Sequence[Callable[[Op, Rewrite], OpPlan]]) -> Plan:
    """A plan of whole ops, each as `how` says."""
    return plan_of(
        workload,
        cluster,
        [
            make(op, next(rewrites(op, workload.groups_of(op), cluster)))
            for op, make in zip(workload.comm_ops, how, strict=True)
        ],
    )


def variant_plans(workload: Workload, cluster: Cluster, most: int) -> list[Plan]:
    """Plans that together rewrite every op in every way, motifs spread over both channels."""
    ways = {op.name: list(rewrites(op, workload.groups_of(op), cluster)) for op in workload.comm_ops}
    plans = []
    for number in range(min(most, max(map(len, ways.values())))):
        seq, ops = 0, []
        for op in workload.comm_ops:
            rewrite = ways[op.name][number % len(ways[op.name])]
            seqs = list(range(seq, seq + len(rewrite.stages)))
            seq += len(seqs)
            ops.append(op_plan(op, rewrite, seqs=seqs, channels=[("rdma",), ("shm", "eth"), ("eth",)]))
        plans.append(plan_of(workload, cluster, ops, name=f"variant {number}"))
    return plans


def step_of(kinds: Sequence[tuple[str, float, int]], ranks: int, *, waits: bool = True) -> Workload:
    """A step that submits ops one after the other, and waits for all at the end."""
    names = [f"{kind}.{number}" for number, (kind, _, _) in enumerate(kinds)]
    ops = [Op(name="work", duration_us=100.0)]
    ops += [
        Op(name=name, kind=kind, nbytes=nbytes, root=root, after=(Dep(op="work", why="submit"),))
        for name, (kind, nbytes, root) in zip(names, kinds, strict=True)
    ]
    if waits:
        ops.append(Op(name="use", duration_us=10.0, after=tuple(Dep(op=name, why="wait") for name in names)))
    return Workload(name="by hand", num_ranks=ranks, ops=tuple(ops))


def enforced(
    workload: Workload, plan: Plan, step: Step, times: int, **options: object
) -> tuple[list[object], Enforcer]:
    """What a step returns in so many iterations under a plan; the enforcer is closed afterwards."""
    enforcer = stretto.torch.enforce(plan, workload, every=1, **options)  # type: ignore[arg-type]
    outcomes = []
    with enforcer:
        for number in range(times):
            outcomes.append(step(number))
            stretto.torch.step()
    return outcomes, enforcer


def numbers(count: int, rank: int, salt: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Whole numbers that differ between ranks, places and iterations."""
    return ((torch.arange(count) * 7 + rank * 13 + salt * 31) % 101).to(dtype)


def arguments() -> tuple[Path, int]:
    """Where to report, and how many ranks."""
    return Path(sys.argv[1]), int(sys.argv[2])
