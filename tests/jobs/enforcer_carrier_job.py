# SPDX-License-Identifier: Apache-2.0
"""Two ranks that run a plan above a carrier of their own, and above ours."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from capture_scenarios import fork
from enforcer_plans import arguments, cluster_of, enforced, join, numbers, op_plan, plan_of, step_of
from own_carrier import StoreCarrier

import stretto.torch
from stretto.errors import StrettoError
from stretto.planner.algebra.rewrites import rewrites
from stretto.runtime.enforcer.carrier import CarrierMaker

RANKS, COUNT = 2, 400
CLUSTER = cluster_of(1)
STEP = step_of([("all_reduce", 4.0 * COUNT, 0), ("all_reduce", 8.0 * COUNT, 0), ("all_reduce", 4.0, 0)], RANKS)


def _plan() -> Any:
    """The first op in two pieces on two channels behind the second one; the third is what the carrier refuses."""
    first, second, third = STEP.comm_ops
    ways = {op.name: list(rewrites(op, STEP.groups_of(op), CLUSTER)) for op in STEP.comm_ops}
    cut = next(way for way in ways[first.name] if "segment:parts=2" in way.steps)
    return plan_of(
        STEP,
        CLUSTER,
        [
            op_plan(first, cut, seqs=[1, 2], channels=[("rdma",), ("eth",)]),
            op_plan(second, ways[second.name][0], seqs=[0], channels=[("rdma",)]),
            op_plan(third, ways[third.name][0], seqs=[3], channels=[("eth",)]),
        ],
    )


def _step(number: int) -> list[list[int]]:
    rank = dist.get_rank()
    first, second = numbers(COUNT, rank, number), numbers(COUNT, rank, number, torch.int64)
    most = torch.tensor([rank + number], dtype=torch.int32)
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
    works.append(dist.all_reduce(most, dist.ReduceOp.MAX, async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    return [first.tolist(), second.tolist(), most.tolist()]


def under(carrier: str | CarrierMaker) -> dict[str, Any]:
    """What a few iterations give, and which motifs were measured."""
    found, enforcer = enforced(STEP, _plan(), _step, 6, carrier=carrier)
    report = enforcer.report()
    return {
        "found": found, "number": report.number, "fell_back": report.fell_back,
        "motifs": [[motif.op, motif.motif] for motif in report.motifs],
    }  # fmt: skip


def refused() -> str:
    """A plan that the carrier cannot carry out."""
    workload = step_of([("all_gather", 4.0 * COUNT, 0)], RANKS)
    (op,) = workload.comm_ops
    way = next(rewrites(op, workload.groups_of(op), CLUSTER))
    plan = plan_of(workload, CLUSTER, [op_plan(op, way, seqs=[0], channels=[("rdma",)])])
    try:
        stretto.torch.enforce(plan, workload, carrier=StoreCarrier)
    except StrettoError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    folder, ranks = arguments()

    def rank_main(rank: int) -> None:
        join(folder, rank, ranks, timeout=timedelta(seconds=100))
        outcomes = {
            "own": under("own_carrier:StoreCarrier"),
            "executor": under("executor"),
            "gloo": under("gloo"),
            "no": refused(),
        }
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        dist.destroy_process_group()

    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
