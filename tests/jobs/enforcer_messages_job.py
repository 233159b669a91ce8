# SPDX-License-Identifier: Apache-2.0
"""Random pipelines whose sums follow random plans: neighboring stages send each other messages in both directions.

All ranks draw the same pipelines and plans, so that each works out by itself what it has to get.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capture_scenarios import fork
from enforcer_plans import arguments, cluster_of, enforced, join, numbers, op_plan, plan_of

import stretto.torch
from stretto import Cluster, Plan, Workload
from stretto.errors import PlanMismatch
from stretto.planner.algebra.rewrites import rewrites
from stretto.planner.plan import TurnPlan
from stretto.runtime.enforcer.rank_plan import share_of

RANKS, SEEDS, ITERATIONS, TRIES = 3, 8, 4, 200
CLUSTER = cluster_of()
HOSTS = ["a", "b", "b"]
CHANNELS = (("rdma",), ("eth",), ("shm", "rdma"))
GROUPS = ((0, 1, 2), (0, 2), (1, 2))
FORWARD, BACKWARD = 1000, 2000
"""What tells the numbers of both directions apart."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Some micro-batches through all stages and back, and sums of all ranks on the way."""

    batches: int
    early: bool
    """Whether the backward pass of a micro-batch begins as soon as it can."""
    count: int
    sums: tuple[tuple[int, int, int], ...]
    """(how many actions come before it, number of elements, number of its group)"""

    def actions(self, stage: int) -> Iterator[tuple[str, int]]:
        """What a stage does, in order."""
        warm = min(RANKS - stage, self.batches) if self.early else self.batches
        yield from (("F", batch) for batch in range(warm))
        for batch in range(self.batches):
            yield "B", batch
            if warm + batch < self.batches:
                yield "F", warm + batch


def drawn(draw: random.Random) -> Pipeline:
    """One of many."""
    batches = draw.randint(1, 4)
    points = sorted(draw.randint(0, 2 * batches) for _ in range(draw.randint(1, 4)))
    return Pipeline(
        batches=batches, early=draw.random() < 0.5, count=draw.choice([16, 1000, 30000]),
        sums=tuple((point, draw.choice([8, 500, 20000]), draw.randrange(len(GROUPS))) for point in points),
    )  # fmt: skip


def run(pipe: Pipeline, groups: Sequence[Any], number: int) -> list[str]:
    """One iteration; what was not as it must be."""
    stage, wrong = dist.get_rank(), []
    works: list[Any] = []
    sums = [
        (numbers(count, stage, number), at, group)
        for at, (_, count, group) in enumerate(pipe.sums)
        if stage in GROUPS[group]
    ]

    def begin_sums(done: int) -> None:
        works.extend(
            dist.all_reduce(tensor, group=groups[group], async_op=True)
            for tensor, at, group in sums
            if pipe.sums[at][0] == done
        )

    begin_sums(0)
    for done, (action, batch) in enumerate(pipe.actions(stage), start=1):
        step, salt = (1, FORWARD) if action == "F" else (-1, BACKWARD)
        if 0 <= stage - step < RANKS:
            taken = torch.zeros(pipe.count, dtype=torch.int32)
            dist.recv(taken, stage - step)
            if not torch.equal(taken, numbers(pipe.count, stage - step, number + salt + batch)):
                wrong.append(f"{action}{batch} of iteration {number}")
        if 0 <= stage + step < RANKS:
            works.append(dist.isend(numbers(pipe.count, stage, number + salt + batch), stage + step))
        begin_sums(done)
    for work in works:
        work.wait()
    for tensor, at, group in sums:
        want = sum(numbers(len(tensor), rank, number) for rank in GROUPS[group])
        if not torch.equal(tensor, torch.as_tensor(want)):
            wrong.append(f"sum {at} of iteration {number}")
    return wrong


def random_plan(workload: Workload, cluster: Cluster, draw: random.Random) -> Plan | None:
    """Any order of all motifs that the application can feed; None where none was found."""
    ways = [(op, next(rewrites(op, workload.groups_of(op), cluster))) for op in workload.comm_ops]
    for number in range(TRIES):
        order = list(range(len(ways)))
        # Fewer and fewer are moved, as an order that is all new can seldom be fed.
        for _ in range(1 + len(order) * (TRIES - number) // TRIES):
            order.insert(draw.randrange(len(order)), order.pop(draw.randrange(len(order))))
        plan = plan_of(
            workload,
            cluster,
            [
                op_plan(
                    op,
                    way,
                    seqs=[order.index(at)],
                    channels=[draw.choice(CHANNELS)],
                    ahead=draw.choice([0] * 8 + [1, -1]) if number < TRIES // 2 else 0,
                )
                for at, (op, way) in enumerate(ways)
            ],
        )
        plan = replace(plan, link_turns=random_turns(plan, draw))
        try:
            share_of(plan, workload, 0, HOSTS)
        except PlanMismatch:
            continue
        return plan
    return None


def random_turns(plan: Plan, draw: random.Random) -> tuple[TurnPlan, ...]:
    """Some sums wait for others that come before them in the plan's order, on the ranks of their hosts."""
    sums = sorted((op for op in plan.ops if op.kind != "send"), key=lambda op: op.motifs[0].seq)
    return tuple(
        TurnPlan(op=late.op, motif=0, behind=early.op, behind_motif=0, lag=late.motifs[0].ahead - early.motifs[0].ahead)
        for early, late in combinations(sums, 2)
        if draw.random() < 0.5
    )


def pipelines(carrier: str, seeds: Sequence[int]) -> Any:
    """Random pipelines under random plans."""
    found = []
    groups = [dist.new_group(list(ranks)) for ranks in GROUPS]
    for seed in seeds:
        draw = random.Random(seed)
        step = partial(run, drawn(draw), groups)
        with stretto.torch.capture(iterations=2, skip=1) as recorder:
            for number in range(3):
                step(number)
                recorder.step()
        plan = random_plan(recorder.workload, CLUSTER, draw)
        told: dict[str, Any] = {"plan": plan is not None}
        if plan is not None:
            wrong, enforcer = enforced(recorder.workload, plan, step, ITERATIONS, carrier=carrier)
            report = enforcer.report()
            told |= {"wrong": wrong, "number": report.number, "fell_back": report.fell_back}
            told |= {"turns given up": enforcer._board._given_up}
        found.append(told)
    return found


def main() -> None:
    folder, ranks = arguments()

    def rank_main(rank: int) -> None:
        join(Path(folder), rank, ranks, timeout=timedelta(seconds=100))
        outcomes = {
            "executor": pipelines("executor", range(SEEDS)), "gloo": pipelines("gloo", range(SEEDS, 2 * SEEDS)),
        }  # fmt: skip
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        dist.destroy_process_group()

    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
