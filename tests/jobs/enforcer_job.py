# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the enforcer's tests run: every scenario on one group, outcomes reported as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from capture_scenarios import chosen, fork
from enforcer_plans import arguments, cluster_of, enforced, join, numbers, op_plan, plan_of, step_of, variant_plans

import stretto.torch
from stretto import synthesize
from stretto.collectives import COLLECTIVES
from stretto.dimensions import Dim
from stretto.dimensions.balance import stretto as balanced
from stretto.dimensions.program import program as dims_program
from stretto.planner.algebra.rewrites import rewrites
from stretto.planner.plan import OpPlan, ProgramPlan
from stretto.programs.formats.text import dumps
from stretto.runtime.enforcer import binding
from stretto.runtime.enforcer.enforcer import Enforcer
from stretto.workload import Workload

RANKS = 4
CLUSTER = cluster_of()
KINDS = [
    ("all_reduce", 4 * 1003, 0), ("all_gather", 4 * 1001, 0), ("reduce_scatter", 4 * 1008, 0),
    ("all_to_all", 4 * 1012, 0), ("broadcast", 4 * 997, 2), ("reduce", 4 * 1003, 1), ("gather", 4 * 36, 3),
    ("scatter", 4 * 44, 1),
]  # fmt: skip


def every_kind(salt: int, dtype: torch.dtype = torch.int32) -> list[list[int]]:
    """All collectives in flight at once; what this rank gets."""
    rank, out = dist.get_rank(), []
    works = []
    x = numbers(1003, rank, salt, dtype)
    works.append(dist.all_reduce(x, async_op=True))
    gathered = torch.zeros(4 * 250, dtype=dtype)
    works.append(dist.all_gather_into_tensor(gathered, numbers(250, rank, salt, dtype), async_op=True))
    shard = torch.zeros(252, dtype=dtype)
    works.append(dist.reduce_scatter_tensor(shard, numbers(1008, rank, salt, dtype), async_op=True))
    exchanged = torch.zeros(1012, dtype=dtype)
    works.append(dist.all_to_all_single(exchanged, numbers(1012, rank, salt, dtype), async_op=True))
    told = numbers(997, rank, salt, dtype)
    works.append(dist.broadcast(told, 2, async_op=True))
    reduced = numbers(1003, rank, salt, dtype)
    works.append(dist.reduce(reduced, 1, async_op=True))
    parts = [torch.zeros(9, dtype=dtype) for _ in range(RANKS)] if rank == 3 else None
    works.append(dist.gather(numbers(9, rank, salt, dtype), parts, 3, async_op=True))
    mine = torch.zeros(11, dtype=dtype)
    given = [numbers(11, r, salt, dtype) for r in range(RANKS)] if rank == 1 else None
    works.append(dist.scatter(mine, given, 1, async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    out = [x, gathered, shard, exchanged, told, mine]
    out += [reduced] if rank == 1 else []
    out += parts or []
    return [tensor.tolist() for tensor in out]


def kinds_step() -> Workload:
    sizes = {1: 4 * 1000}
    kinds = [(kind, float(sizes.get(at, nbytes)), root) for at, (kind, nbytes, root) in enumerate(KINDS)]
    return step_of(kinds, RANKS)


def variants() -> Any:
    """Every kind of op in every way that the rules know, one plan after the other in one run."""
    workload = kinds_step()
    plans = variant_plans(workload, CLUSTER, most=10)
    wrong, seen = [], []
    with Enforcer(workload, every=1, cluster=CLUSTER) as enforcer:
        for number, plan in enumerate(plans, 1):
            want = every_kind(number)
            enforcer.prepare(plan, workload, number)
            enforcer.commit(number, plan.hash)
            for _ in range(3):
                if every_kind(number) != want:
                    wrong.append((plan.name, [op.option for op in plan.ops]))
            seen.append(enforcer.report().number)
        fell_back = enforcer.report().fell_back
    # Most scripts ask when all is over.
    ended = enforcer.report()
    assert (ended.number, bool(ended.motifs)) == (len(plans), True)
    return {"plans": len(plans), "wrong": wrong, "seen": seen, "fell_back": fell_back}


def above_gloo() -> Any:
    """The same with gloo underneath, one communicator for each channel."""
    workload = kinds_step()
    plans = variant_plans(workload, CLUSTER, most=10)
    wrong = []
    with Enforcer(workload, every=1, carrier="gloo") as enforcer:
        for number in (5, 10):
            plan = plans[min(number, len(plans)) - 1]
            want = every_kind(number)
            enforcer.prepare(plan, workload, number)
            enforcer.commit(number, plan.hash)
            for _ in range(3):
                if every_kind(number) != want:
                    wrong.append((plan.name, [op.option for op in plan.ops]))
            assert enforcer.report().number == number
    return wrong


def averages() -> Any:
    """An average that is made in two steps is the average."""
    workload = step_of([("all_reduce", 4.0 * 64, 0)], RANKS)
    outcomes = []
    for plan in variant_plans(workload, CLUSTER, most=6):

        def step(number: int) -> list[float]:
            x = torch.full((64,), float(2 ** dist.get_rank()))
            dist.all_reduce(x, dist.ReduceOp.AVG)
            return x.tolist()

        got, enforcer = enforced(workload, plan, step, 4, cluster=CLUSTER)
        outcomes.append(got == [[15 / 4] * 64] * 4 and enforcer.report().fell_back == "")
    return outcomes


def seen() -> Any:
    """What a capture sees of a group of ours: collectives, messages and barriers, each once."""

    def step() -> None:
        every_kind(0)
        rank, x = dist.get_rank(), torch.ones(5)
        if rank < 2:
            (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
        dist.all_to_all_single(torch.zeros(4), torch.ones(4), [1] * 4, [1] * 4)
        dist.barrier()

    with stretto.torch.capture(iterations=2, skip=1) as recorder:
        for _ in range(3):
            step()
            recorder.step()
    return [[op.kind, op.nbytes, op.root] for op in recorder.workload.comm_ops]


def brought_along() -> Any:
    """Programs that no name stands for: synthesised, over dimensions, of pieces; else the library has one."""
    workload = kinds_step()
    wrong: list[str] = []
    seen: list[int] = []
    with Enforcer(workload, every=1, cluster=CLUSTER) as enforcer:
        for number, (way, texts) in enumerate(BROUGHT.items(), 1):
            ops: list[OpPlan] = []
            for op in workload.comm_ops:
                rewrite = list(rewrites(op, workload.groups_of(op), CLUSTER))[-1 if way == "pieces" else 0]
                name = "dimensions:16" if way == "dimensions" else "synthesised"
                seqs = range(10 * len(ops), 10 * len(ops) + len(rewrite.stages))
                ops.append(op_plan(op, rewrite, seqs=seqs, channels=[CHANNELS], algorithm=name))
            programs = [
                ProgramPlan(
                    algorithm=ops[0].motifs[0].algorithm,
                    kind=kind,
                    channels=CHANNELS,
                    groups=((0, 1, 2, 3),),
                    text=text,
                )
                for kind, text in texts.items()
            ]
            plan = plan_of(workload, CLUSTER, ops, name=way, programs=programs)
            want = every_kind(number)
            enforcer.prepare(plan, workload, number)
            enforcer.commit(number, plan.hash)
            for _ in range(3):
                if every_kind(number) != want:
                    wrong.append(way)
            seen.append(enforcer.report().number)
        fell_back = enforcer.report().fell_back
    return {"wrong": wrong, "seen": seen, "fell_back": fell_back}


def padded() -> Any:
    """Programs that need chunks of one size, for sizes that are no multiple of it (here: as if all did)."""
    workload = kinds_step()
    wrong = []
    with (
        mock.patch.object(binding, "_rigid", lambda program: True),
        Enforcer(workload, every=1, cluster=CLUSTER) as enforcer,
    ):
        for number, plan in enumerate(variant_plans(workload, CLUSTER, most=4), 1):
            want = every_kind(number)
            enforcer.prepare(plan, workload, number)
            enforcer.commit(number, plan.hash)
            for _ in range(3):
                if every_kind(number) != want:
                    wrong.append((plan.name, [op.option for op in plan.ops]))
            assert enforcer.report().number == number
    return wrong


def made_texts() -> dict[str, dict[str, str]]:
    """Programs as plans bring them along, made before the ranks are forked."""
    dims = [Dim(kind="ring", size=2, gb_per_s=rate, step_us=1.0) for rate in (1.0, 2.0)]
    synthesized = {
        kind: dumps(synthesize(COLLECTIVES[kind](RANKS), CLUSTER, 1e6, budget_s=0.5, makers=("greedy", "forest")).plain)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    }
    return {
        "synthesised": synthesized,
        "dimensions": {
            kind: dumps(dims_program(balanced(dims, kind, 1e6, chunks=4), units=12))
            for kind in ("all_reduce", "all_gather", "reduce_scatter")
        },
        "pieces": synthesized,
    }


CHANNELS = ("rdma", "shm")
BROUGHT = made_texts()
SCENARIOS: dict[str, Callable[[], Any]] = {
    "variants": variants, "brought_along": brought_along, "padded": padded,
    "above_gloo": above_gloo, "averages": averages, "seen": seen,
}  # fmt: skip


def main() -> None:
    folder, ranks = arguments()

    def rank_main(rank: int) -> None:
        logging.basicConfig(filename=folder / f"log-{rank}", level=logging.INFO)
        join(folder, rank, ranks)
        assert isinstance(dist.group.WORLD, stretto.torch.StrettoGroup)
        outcomes = {name: scenario() for name, scenario in chosen(SCENARIOS).items()}
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        dist.barrier()
        dist.destroy_process_group()

    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
