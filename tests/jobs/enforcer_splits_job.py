# SPDX-License-Identifier: Apache-2.0
"""Ranks that exchange unequal, changing pieces under plans: cut, reordered, over two channels, above gloo.

All ranks draw the same matrices, so that each works out by itself what it has to get. STRETTO_TEST_ITERATIONS
says how many iterations there are under each plan.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from capture_scenarios import chosen, fork
from enforcer_plans import (
    arguments,
    cluster_of,
    enforced,
    join,
    op_plan,
    plan_of,
    simple_plan,
    step_of,
    variant_plans,
    whole,
)

import stretto.torch
from stretto.errors import StrettoError
from stretto.planner.algebra.rewrites import rewrites
from stretto.planner.plan import OpPlan
from stretto.runtime.enforcer.enforcer import Enforcer
from stretto.runtime.torch_backend.current import CURRENT
from stretto.workload import Workload

RANKS = 4
ITERATIONS = int(os.environ.get("STRETTO_TEST_ITERATIONS", "4"))
CLUSTER = cluster_of()
ROWS = 5
RECORDED = RANKS * ROWS * 12
"""Bytes of the exchanges as recorded; those that come may be a thousand times as many, or none."""


def step_with_splits(*, at_most: bool = True) -> Workload:
    """An exchange, a sum, an exchange back, a broadcast and a gather whose size follows the data."""
    kinds = [
        ("all_to_all", float(RECORDED), 0), ("all_reduce", 4.0 * 501, 0), ("all_to_all", float(RECORDED), 0),
        ("broadcast", 4.0 * 33, 1), ("all_gather", 4.0 * 16, 0),
    ]  # fmt: skip
    made = step_of(kinds, RANKS)
    ops = [
        replace(op, at_most=True) if op.kind == "all_gather" or (at_most and op.kind == "all_to_all") else op
        for op in made.ops
    ]
    return replace(made, ops=tuple(ops))


def matrix_of(draw: random.Random) -> list[list[int]]:
    """Rows from each rank to each: sometimes a rank has none at all, sometimes far more than was recorded."""
    most = draw.choice([1, 4, 40, 3000])
    found = [[draw.choice([0, draw.randint(0, most)]) for _ in range(RANKS)] for _ in range(RANKS)]
    found[draw.randrange(RANKS)] = [0] * RANKS if draw.random() < 0.3 else [most] * RANKS
    return found


def piece(rows: int, source: int, target: int, salt: int) -> torch.Tensor:
    """What one rank has for another."""
    return ((torch.arange(rows * 3) * 7 + 13 * source + 5 * target + salt) % 101).to(torch.int32).reshape(rows, 3)


def exchange(matrix: list[list[int]], salt: int, *, equal: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Start one; what is got, what has to be, and what to wait for. `equal`: without splits on some ranks."""
    rank = dist.get_rank()
    gives, takes = matrix[rank], [row[rank] for row in matrix]
    got = torch.full((sum(takes), 3), -1, dtype=torch.int32)
    given = torch.cat([piece(rows, rank, q, salt) for q, rows in enumerate(gives)])
    wanted = torch.cat([piece(rows, p, rank, salt) for p, rows in enumerate(takes)])
    output, input = (None, None) if equal and rank % 2 else (takes, gives)
    return got, wanted, dist.all_to_all_single(got, given, output, input, async_op=True)


def iteration(
    draw: random.Random, salt: int, *, mixed: float = 0.0, rows: int = -1, inside: Callable[[], None] = lambda: None
) -> bool:
    """The whole step with new sizes; whether all came out right.

    Some ranks leave splits away now and then, as often as `mixed` says; all pieces then have so many `rows`.
    """
    rank = dist.get_rank()
    equal = draw.random() < mixed
    rows = draw.randint(0, 50) if rows < 0 else rows
    one, two = ([[rows] * RANKS] * RANKS if equal else matrix_of(draw) for _ in range(2))
    forth = exchange(one, salt, equal=equal)
    summed = torch.arange(501, dtype=torch.int32) + rank
    works = [forth[2], dist.all_reduce(summed, async_op=True)]
    inside()
    back = exchange(two, salt + 1, equal=equal)
    told = torch.full((33,), rank, dtype=torch.int32)
    works += [back[2], dist.broadcast(told, 1, async_op=True)]
    count = draw.choice([1, 4, 4, 900])
    gathered = torch.empty(RANKS * count, dtype=torch.int32)
    works.append(dist.all_gather_into_tensor(gathered, torch.full((count,), rank, dtype=torch.int32), async_op=True))
    for work in works if draw.random() < 0.5 else reversed(works):
        work.wait()
    right = torch.equal(forth[0], forth[1]) and torch.equal(back[0], back[1])
    right &= torch.equal(summed, RANKS * torch.arange(501, dtype=torch.int32) + 6)
    right &= bool((told == 1).all())
    return right and bool((gathered.reshape(RANKS, count) == torch.arange(RANKS)[:, None]).all())


def under_plans(carrier: str = "executor", most: int = 12) -> Any:
    """Every way in which the planner may cut an exchange with splits, with other sizes in every iteration."""
    workload, draw = step_with_splits(), random.Random(3)
    plans = variant_plans(workload, CLUSTER, most=most)
    wrong, seen = [], []
    with Enforcer(workload, every=1, cluster=CLUSTER, carrier=carrier) as enforcer:
        for number, plan in enumerate(plans, 1):
            enforcer.prepare(plan, workload, number)
            enforcer.commit(number, plan.hash)
            for at in range(ITERATIONS):
                if not iteration(draw, 10 * at, mixed=0.2 * (enforcer.report().number == number)):
                    wrong.append((plan.name, at, [op.option for op in plan.ops]))
                stretto.torch.step()
            seen.append(enforcer.report().number)
        fell_back = enforcer.report().fell_back
    return {"plans": len(plans), "wrong": wrong, "seen": seen, "fell_back": fell_back,
            "ways": sorted({op.option for plan in plans for op in plan.ops if op.kind == "all_to_all"})}  # fmt: skip


def above_gloo() -> Any:
    """The same on gloo's communicators, one for each channel."""
    return under_plans("gloo", most=6)


def reordered() -> Any:
    """The second exchange before the sum, the gather first of all, the first exchange last."""
    workload, draw = step_with_splits(), random.Random(4)
    order = (3, 2, 1, 4, 0)
    plan = simple_plan(workload, CLUSTER, [whole(("rdma",), seq=seq) for seq in order])
    got, enforcer = enforced(workload, plan, partial(iteration, draw), 12, cluster=CLUSTER)
    return {"right": got, "fell_back": enforcer.report().fell_back, "number": enforcer.report().number}


def recorded_without() -> Any:
    """Splits that come where none were recorded: cut as well, and in plain order where the plan relays.

    In a plan of straight exchanges some ranks may also leave them away.
    """
    found = {}
    ways = (("segment:parts=4", "executor"), ("segment:parts=4", "gloo"), ("hierarchical:local=2", "auto"))
    for name, carrier in ways:
        workload, draw = step_with_splits(at_most=False), random.Random(5)
        ops: list[OpPlan] = []
        for op in workload.comm_ops:
            found_ways = list(rewrites(op, workload.groups_of(op), CLUSTER))
            named = op.kind == "all_to_all"
            rewrite = next(way for way in found_ways if way.steps == (name,)) if named else found_ways[0]
            seqs = range(10 * len(ops), 10 * len(ops) + len(rewrite.stages))
            ops.append(op_plan(op, rewrite, seqs=seqs, channels=[("rdma",), ("eth",)]))
        plan = plan_of(workload, CLUSTER, ops)
        step = partial(iteration, draw, mixed=0.5 * (name != "hierarchical:local=2"), rows=ROWS)
        got, enforcer = enforced(workload, plan, step, 10, cluster=CLUSTER, carrier=carrier)
        found[f"{name} {carrier}"] = {"right": got, "fell_back": enforcer.report().fell_back}
    return found


def some_ranks_more() -> Any:
    """Inside of every third iteration two ranks have a sum and an exchange of their own, which others do not see."""
    workload, draw, rank = step_with_splits(), random.Random(6), dist.get_rank()
    pair = dist.new_group([1, 2])
    own: list[bool] = []

    def together() -> None:
        summed, got = torch.full((9,), rank), torch.zeros(3)
        dist.all_reduce(summed, group=pair)
        rows = [1, 2] if rank == 1 else [2, 1]
        dist.all_to_all_single(got, torch.full((3,), float(rank)), rows, rows, group=pair)
        own.append(bool((summed == 3).all()) and int(got.sum()) == (5 if rank == 1 else 4))

    def step(number: int) -> bool:
        more = number % 3 == 2 and rank in (1, 2)
        return iteration(draw, number, inside=together if more else lambda: None)

    plan = simple_plan(workload, CLUSTER, [whole(("rdma",), seq=seq) for seq in range(5)])
    got, enforcer = enforced(workload, plan, step, 9, cluster=CLUSTER)
    told = enforcer.report()
    return {"right": all(got) and all(own), "fell_back": told.fell_back, "number": told.number}


def sub_groups_differ() -> Any:
    """In some iterations one pair of ranks has a sum of another size, or one more call; the others do not see it."""
    rank, pairs = dist.get_rank(), ((0, 1), (2, 3))
    made = step_of([("all_reduce", 400.0, 0), ("all_reduce", 80.0, 0), ("broadcast", 40.0, 1)], RANKS)
    ops = [replace(op, groups=pairs) if op.nbytes == 80.0 else op for op in made.ops]
    workload = replace(made, ops=tuple(ops))
    plan = simple_plan(workload, CLUSTER, [whole(("rdma",), seq=2), whole(("eth",), seq=0), whole(("rdma",), seq=1)])
    pair = [dist.new_group(list(ranks)) for ranks in pairs][rank // 2]
    first = rank // 2 * 2

    def step(number: int) -> bool:
        alone = rank >= 2
        if number == 8:
            # Nothing of the step at all.
            return True
        everybody, told = torch.full((100,), rank + number), torch.full((10,), rank)
        two = torch.full((33 if alone and number % 4 == 1 else 20,), rank, dtype=torch.int32)
        works = [dist.all_reduce(everybody.to(torch.int32), async_op=True)]
        if alone and number % 4 == 2:
            more = torch.full((7,), rank)
            dist.broadcast(more, 2, group=pair)
            assert bool((more == 2).all())
        works += [
            dist.all_reduce(two, group=pair, async_op=True), dist.broadcast(told.to(torch.int32), 1, async_op=True),
        ]  # fmt: skip
        for work in works:
            work.wait()
        return bool((two == 2 * first + 1).all())

    got, enforcer = enforced(workload, plan, step, 14, cluster=CLUSTER)
    told = enforcer.report()
    return {"right": all(got), "fell_back": told.fell_back, "number": told.number}


def idle_ranks() -> Any:
    """Two ranks have nothing to do in the step: all change plans together whatever else they call, and when."""
    rank = dist.get_rank()
    made = step_of([("all_reduce", 400.0, 0)], RANKS)
    workload = replace(made, ops=tuple(replace(op, groups=((0, 1),)) if op.is_comm else op for op in made.ops))
    plans = [simple_plan(workload, CLUSTER, [whole((channel,), seq=0)]) for channel in ("rdma", "eth")]
    pair, right = dist.new_group([0, 1]), True
    with Enforcer(workload, every=2, cluster=CLUSTER) as enforcer:
        for number in range(12):
            if number in (0, 6):
                enforcer.prepare(plans[number // 6], workload, 1 + number // 6)
                enforcer.commit(1 + number // 6, plans[number // 6].hash)
            if rank < 2 and number not in (4, 9):
                summed = torch.full((100,), float(rank + number))
                dist.all_reduce(summed, group=pair)
                right &= bool((summed == 2 * number + 1).all())
            for _ in range(number % 3 + 1):
                metric = torch.ones(3)
                dist.all_reduce(metric)
                right &= bool((metric == RANKS).all())
            stretto.torch.step()
        told = enforcer.report()
    return {"right": right, "iteration": told.iteration, "number": told.number}


def recorded() -> Any:
    """What a capture says of exchanges with splits: those of fixed unequal sizes, and those that change."""
    rank = dist.get_rank()

    def step(number: int) -> None:
        rows = [rank + 1] * RANKS
        dist.all_to_all_single(torch.zeros(10, 2), torch.zeros(4 * rank + 4, 2), [1, 2, 3, 4], rows)
        equal = torch.zeros(4 * (number + 1))
        dist.all_to_all_single(torch.zeros_like(equal), equal, [number + 1] * 4, [number + 1] * 4)
        dist.all_to_all_single(torch.zeros(8), torch.zeros(8))
        lists = [torch.zeros(rank + q) for q in range(RANKS)]
        dist.all_to_all([torch.empty(rank + p) for p in range(RANKS)], lists)

    with stretto.torch.capture(iterations=3, skip=1) as recorder:
        for number in range(4):
            step(number)
            recorder.step()
    return [[op.kind, op.nbytes, op.at_most, list(op.rank_nbytes)] for op in recorder.workload.comm_ops]


def wrong_pair(carrier: str) -> Any:
    """Two ranks that count on different sizes under a plan; the two others wait for them in a sum, on another lane.

    Nobody leaves before all ranks know: those who wait elsewhere must hear the reason, not that a rank is gone.
    """
    rank, pairs = dist.get_rank(), ((0, 1), (2, 3))
    made = step_of([("all_to_all", 64.0, 0), ("all_reduce", 400.0, 0)], RANKS)
    ops = [replace(op, at_most=True, groups=pairs) if op.kind == "all_to_all" else op for op in made.ops]
    workload = replace(made, ops=tuple(ops))
    plan = simple_plan(workload, CLUSTER, [whole(("rdma",), seq=0), whole(("eth",), seq=1)])
    group = [dist.new_group(list(pair)) for pair in pairs][rank // 2]
    outgrown: list[dict[str, Any]] = []

    def step(number: int) -> None:
        gives, takes = ([40, 40], [40, 40]) if number == 4 else ([3, 3], [3, 3])
        if number == 6:
            gives, takes = [3, 5 if rank == 0 else 3], [7 if rank == 1 else 3, 3]
        got, summed = torch.zeros(sum(takes)), torch.ones(100)
        works = [dist.all_to_all_single(got, torch.ones(sum(gives)), takes, gives, group=group, async_op=True)]
        works.append(dist.all_reduce(summed, async_op=True))
        for work in works:
            work.wait()
        if number == 5:
            outgrown.extend(asdict(one) for one in CURRENT.enforcer.report().outgrown)  # type: ignore[union-attr]

    said = "nothing"
    try:
        enforced(workload, plan, step, 9, cluster=CLUSTER, carrier=carrier)
    except StrettoError as error:
        said = f"{type(error).__name__}: {error}"
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{carrier} {rank}", "")
    store.wait([f"{carrier} {other}" for other in range(RANKS)], timedelta(seconds=200))
    return {"said": said, "outgrown": outgrown}


SCENARIOS: dict[str, Callable[[], Any]] = {
    "under_plans": under_plans, "above_gloo": above_gloo, "reordered": reordered, "recorded": recorded,
    "recorded_without": recorded_without, "some_ranks_more": some_ranks_more, "sub_groups_differ": sub_groups_differ,
    "idle_ranks": idle_ranks,
}  # fmt: skip


def main() -> None:
    folder, ranks = arguments()

    def rank_main(rank: int) -> None:
        logging.basicConfig(filename=folder / f"log-{rank}", level=logging.INFO)
        join(folder, rank, ranks, timeout=timedelta(seconds=100))
        outcomes = {name: scenario() for name, scenario in chosen(SCENARIOS).items()}
        for carrier in ("executor", "gloo"):
            # The scenario before may have broken the group.
            dist.destroy_process_group()
            join(folder, rank, ranks, name=f"store {carrier}")
            outcomes[f"wrong_pair {carrier}"] = wrong_pair(carrier)
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        dist.destroy_process_group()

    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
