# SPDX-License-Identifier: Apache-2.0
"""What the ranks of the NCCL carrier's tests run: every scenario on one group, outcomes reported as JSON."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from enforcer_plans import arguments, cluster_of, join, numbers, simple_plan, step_of, variant_plans, whole
from gpu_models import Trained, losses_of
from gpu_watch import watched

import stretto.torch
from stretto.errors import StrettoError
from stretto.runtime.enforcer.enforcer import Enforcer
from stretto.workload import Dep, Op, Workload

RANKS = int(os.environ["WORLD_SIZE"])
CLUSTER = cluster_of(RANKS // 2)
COUNT = 500
TWO = step_of([("all_to_all", 4.0 * COUNT, 0), ("all_reduce", 4.0 * COUNT, 0)], RANKS)
BESIDE = simple_plan(TWO, CLUSTER, [whole(["rdma"], seq=0), whole(["eth"], seq=0)])
REVERSED = simple_plan(TWO, CLUSTER, [whole(["rdma"], seq=1), whole(["rdma"], seq=0)])
LONG_CYCLES = 1_000_000_000
cuda: Any = torch.cuda
"""Half of it has no types."""


def device() -> torch.device:
    """Where all tensors are."""
    return torch.device("cuda", torch.cuda.current_device())


def values(count: int, rank: int, salt: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Small whole numbers, whose sums every type holds exactly."""
    return (numbers(count, rank, salt) % 23).to(dtype).to(device())


def kinds_step(itemsize: int) -> Workload:
    """What `every_kind` does."""
    sizes = [
        ("all_reduce", 1003, 0), ("all_gather", 250 * RANKS, 0), ("reduce_scatter", 252 * RANKS, 0),
        ("all_to_all", 253 * RANKS, 0), ("broadcast", 997, 1), ("reduce", 1003, 1), ("gather", 9 * RANKS, RANKS - 1),
        ("scatter", 11 * RANKS, 1),
    ]  # fmt: skip
    return step_of([(kind, float(itemsize * count), root) for kind, count, root in sizes], RANKS)


def every_kind(salt: int, dtype: torch.dtype = torch.int32) -> list[list[float]]:
    """All collectives in flight at once; what this rank gets."""
    rank, works = dist.get_rank(), []
    x = values(1003, rank, salt, dtype)
    works.append(dist.all_reduce(x, async_op=True))
    gathered = torch.zeros(RANKS * 250, dtype=dtype, device=device())
    works.append(dist.all_gather_into_tensor(gathered, values(250, rank, salt, dtype), async_op=True))
    shard = torch.zeros(252, dtype=dtype, device=device())
    works.append(dist.reduce_scatter_tensor(shard, values(252 * RANKS, rank, salt, dtype), async_op=True))
    exchanged = torch.zeros(253 * RANKS, dtype=dtype, device=device())
    works.append(dist.all_to_all_single(exchanged, values(253 * RANKS, rank, salt, dtype), async_op=True))
    told = values(997, rank, salt, dtype)
    works.append(dist.broadcast(told, 1, async_op=True))
    reduced = values(1003, rank, salt, dtype)
    works.append(dist.reduce(reduced, 1, async_op=True))
    last = rank == RANKS - 1
    parts = [torch.zeros(9, dtype=dtype, device=device()) for _ in range(RANKS)] if last else None
    works.append(dist.gather(values(9, rank, salt, dtype), parts, RANKS - 1, async_op=True))
    mine = torch.zeros(11, dtype=dtype, device=device())
    given = [values(11, r, salt, dtype) for r in range(RANKS)] if rank == 1 else None
    works.append(dist.scatter(mine, given, 1, async_op=True))
    for work in works:
        assert work is not None
        work.wait()
    out = [x, gathered, shard, exchanged, told, mine, *([reduced] if rank == 1 else []), *(parts or [])]
    return [tensor.tolist() for tensor in out]


def variants() -> Any:
    """Every kind of op in every way that the rules know, one plan after the other in one run."""
    workload = kinds_step(4)
    plans = variant_plans(workload, CLUSTER, most=10)
    wrong, seen = [], []
    with Enforcer(workload, every=1, carrier="nccl") as enforcer:
        for number, plan in enumerate(plans, 1):
            want = every_kind(number)
            enforcer.prepare(plan, workload, number)
            enforcer.commit(number, plan.hash)
            for _ in range(3):
                got = every_kind(number)
                if got != want:
                    at = [k for k, (a, b) in enumerate(zip(got, want, strict=True)) if a != b]
                    wrong.append((plan.name, at, [op.option for op in plan.ops]))
            seen.append(enforcer.report().number)
        fell_back = enforcer.report().fell_back
    return {"plans": len(plans), "wrong": wrong, "seen": seen, "fell_back": fell_back}


def types() -> Any:
    """What NCCL adds up it adds up in pieces too; what it only moves may be of any type."""
    found = {}
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int64):
        workload = kinds_step(dtype.itemsize)
        plan = variant_plans(workload, CLUSTER, most=4)[-1]
        want = every_kind(1, dtype)
        with entered(workload, plan, lambda dtype=dtype: every_kind(0, dtype)) as enforcer:  # type: ignore[misc]
            found[str(dtype)] = every_kind(1, dtype) == want and not enforcer.report().fell_back
    flags = step_of([("all_gather", 10.0 * RANKS, 0), ("all_reduce", 10.0, 0)], RANKS)

    def step() -> list[bool]:
        mine = values(10, dist.get_rank(), 0) % 2 == 0
        everybody, some = torch.zeros(10 * RANKS, dtype=torch.bool, device=device()), mine.clone()
        dist.all_gather_into_tensor(everybody, mine)
        dist.all_reduce(some, dist.ReduceOp.MAX)
        answer: list[bool] = everybody.tolist() + some.tolist()
        return answer

    want_flags = step()
    with entered(flags, variant_plans(flags, CLUSTER, most=2)[-1], step) as enforcer:
        found["torch.bool"] = step() == want_flags and not enforcer.report().fell_back
    return found


@contextmanager
def entered(workload: Workload, plan: Any, step: Callable[[], object]) -> Any:
    """Inside a plan that is active already."""
    with stretto.torch.enforce(plan, workload, every=1, carrier="nccl") as enforcer:
        for _ in range(2):
            step()
            stretto.torch.step()
        assert enforcer.report().number == 1
        yield enforcer


def exchanged(rows: list[list[int]], salt: int) -> bool:
    """An all-to-all with splits; whether each piece is what its sender had for this rank."""
    rank = dist.get_rank()
    gives, takes = rows[rank], [row[rank] for row in rows]

    def piece(source: int, target: int) -> torch.Tensor:
        return values(3 * rows[source][target], source, salt + target).reshape(-1, 3)

    got = torch.full((sum(takes), 3), -1, dtype=torch.int32, device=device())
    dist.all_to_all_single(got, torch.cat([piece(rank, q) for q in range(RANKS)]), takes, gives)
    return torch.equal(got, torch.cat([piece(p, rank) for p in range(RANKS)]))


def uneven() -> Any:
    """All-to-alls with splits that change in every iteration, far beyond what was recorded, under every plan."""
    made = step_of([("all_to_all", 4.0 * 64, 0), ("all_reduce", 4.0 * COUNT, 0), ("all_to_all", 4.0 * 64, 0)], RANKS)
    ops = tuple(replace(op, at_most=True) if op.kind == "all_to_all" else op for op in made.ops)
    workload, draw = replace(made, ops=ops), random.Random(11)
    plans = variant_plans(workload, CLUSTER, most=6)
    wrong, seen = [], []
    with Enforcer(workload, every=1, carrier="nccl") as enforcer:
        for number, plan in enumerate(plans, 1):
            enforcer.prepare(plan, workload, number)
            enforcer.commit(number, plan.hash)
            for at in range(4):
                most = draw.choice([1, 40, 3000])
                forth, back = ([[draw.randint(0, most) for _ in range(RANKS)] for _ in range(RANKS)] for _ in "ab")
                right = exchanged(forth, at)
                x = values(COUNT, dist.get_rank(), at)
                dist.all_reduce(x)
                everybody = torch.stack([values(COUNT, rank, at) for rank in range(RANKS)])
                right &= torch.equal(x, everybody.sum(0, dtype=torch.int32))
                if not (exchanged(back, at + 1) and right):
                    wrong.append((plan.name, at, [op.option for op in plan.ops]))
                stretto.torch.step()
            seen.append(enforcer.report().number)
        fell_back = enforcer.report().fell_back
    return {"plans": len(plans), "wrong": wrong, "seen": seen, "fell_back": fell_back}


def averages() -> Any:
    """Averages in one step are NCCL's own, in several they are divided sums."""
    workload = step_of([("all_reduce", 4.0 * 64, 0), ("reduce_scatter", 4.0 * 64 * RANKS, 0)], RANKS)
    outcomes = []
    mean = (2**RANKS - 1) / RANKS

    def step() -> bool:
        x = torch.full((64,), float(2 ** dist.get_rank()), device=device())
        shard = torch.empty(64, device=device())
        dist.all_reduce(x, dist.ReduceOp.AVG)
        dist.reduce_scatter_tensor(
            shard, torch.full((64 * RANKS,), float(2 ** dist.get_rank()), device=device()), dist.ReduceOp.AVG
        )
        return x.tolist() == [mean] * 64 == shard.tolist()

    for plan in variant_plans(workload, CLUSTER, most=4):
        with entered(workload, plan, step) as enforcer:
            outcomes.append(step() and not enforcer.report().fell_back)
    return outcomes


def two(number: int, count: int = COUNT) -> list[int]:
    """An exchange and a sum, both in flight."""
    rank = dist.get_rank()
    x, g = values(COUNT, rank, number), values(count, rank, number)
    y = torch.zeros_like(x)
    works = [dist.all_to_all_single(y, x, async_op=True), dist.all_reduce(g, async_op=True)]
    for work in works:
        assert work is not None
        work.wait()
    at = torch.arange(max(count, COUNT), device=device())
    return [int((y * at[:COUNT]).sum()), int((g * at[:count]).sum())]


def switching() -> Any:
    """Ranks hear of a plan at different times, and change to it at the same; without agreement none does."""
    rank, seen, right = dist.get_rank(), [], []
    want = [two(number) for number in range(18)]
    with Enforcer(TWO, every=3) as enforcer:
        kind = type(enforcer._carrier).__name__
        for plan_number, plan in ((1, BESIDE), (2, REVERSED)):
            enforcer.prepare(plan, TWO, plan_number)
        for number in range(18):
            if number == 2 + 4 * (rank % 2):
                enforcer.commit(1, BESIDE.hash)
            if number == 10 + 3 * (rank % 2):
                enforcer.commit(2, REVERSED.hash)
            right.append(two(number) == want[number])
            seen.append(enforcer.report().number)
            stretto.torch.step()
    return {"seen": seen, "right": all(right), "carrier": kind}


def surprise() -> Any:
    """A changed shape in iteration 5: results stay right, and all are back in plain order."""

    def step(number: int) -> list[int]:
        return two(number, COUNT + (number == 5))

    want = [step(number) for number in range(8)]
    got = []
    with stretto.torch.enforce(REVERSED, TWO, every=1, carrier="nccl") as enforcer:
        for number in range(8):
            got.append(step(number))
            stretto.torch.step()
        report = enforcer.report()
    return {"same": got == want, "why": report.fell_back}


def prefetch() -> Any:
    """The next iteration's exchange goes before this one's sum, which is held back until then."""
    size = 4.0 * COUNT
    step = Workload(
        name="prefetch",
        num_ranks=RANKS,
        ops=(
            Op(name="exchange", kind="all_to_all", nbytes=size, after=(Dep(op="end", lag=1, why="submit"),)),
            Op(
                name="begin",
                duration_us=50.0,
                after=(Dep(op="sum", lag=1, why="wait"), Dep(op="exchange", why="wait")),
            ),
            Op(name="sum", kind="all_reduce", nbytes=size, after=(Dep(op="begin", why="submit"),)),
            Op(name="end", duration_us=20.0, after=(Dep(op="begin"),)),
        ),
    )
    plan = simple_plan(step, CLUSTER, [whole(["rdma"], seq=0, ahead=1), whole(["rdma"], seq=1)])
    rank = dist.get_rank()
    held: list[Any] = []
    at = torch.arange(COUNT, device=device())

    def iteration(number: int) -> tuple[int, int]:
        x, g = values(COUNT, rank, number), values(COUNT, rank, number)
        y = torch.zeros_like(x)
        work = dist.all_to_all_single(y, x, async_op=True)
        total = 0
        if held:
            held[0].wait()
            total = int((held[1] * at).sum())
        assert work is not None
        work.wait()
        held[:] = [dist.all_reduce(g, async_op=True), g]
        return int((y * at).sum()), total

    want = [iteration(number) for number in range(6)]
    held[0].wait()
    held.clear()
    with stretto.torch.enforce(plan, step, every=1, carrier="nccl") as enforcer:
        got = []
        for number in range(6):
            got.append(iteration(number))
            waiting = not held[0]._queued.done if number > 2 else False
            stretto.torch.step()
        report = enforcer.report()
    held[0].wait()
    return {"same": got == want, "active": report.number, "why": report.fell_back, "held": waiting}


def no_sync() -> Any:
    """`wait` makes the stream wait, not the host; and a future does the same."""
    found: dict[str, Any] = {}

    def step() -> None:
        two(0)

    with entered(TWO, BESIDE, step) as enforcer:
        rank = dist.get_rank()
        # A kernel's first launch loads it, for which CUDA may wait for the GPU: only the second time counts.
        for cycles in (1, LONG_CYCLES):
            x, g = values(COUNT, rank, 9), values(COUNT, rank, 9)
            y, doubled = torch.zeros_like(x), torch.zeros_like(g)
            torch.cuda.synchronize()
            cuda._sleep(cycles)
            works: list[Any] = [dist.all_to_all_single(y, x, async_op=True), dist.all_reduce(g, async_op=True)]
            twice = works[1].get_future().then(lambda done: done.value()[0] * 2)
            works[0].wait()
            works[1].wait(timedelta(seconds=60))
            torch.add(g, g, out=doubled)
            behind = cuda.Event()
            behind.record()
            found["busy"] = [not behind.query(), not works[0].is_completed(), not works[1].is_success()]
            found["future"] = bool((twice.wait() == doubled).all())
            torch.cuda.synchronize()
            found["over"] = works[0].is_completed() and works[1].is_success() and works[1].exception() is None
            found["right"] = [int((y * torch.arange(COUNT, device=device())).sum()), int(doubled.sum())]
            stretto.torch.step()
        for number in range(12):
            two(number)
            stretto.torch.step()
        told = enforcer.report()
    found["durations"] = [motif.duration_us for motif in told.motifs]
    found["starts"] = [motif.start_us for motif in told.motifs]
    found["waits"] = told.waits_us
    found["plain"] = plain_right(9)
    return found


def plain_right(salt: int) -> list[int]:
    """What `no_sync` must find."""
    rank = dist.get_rank()
    x, g = values(COUNT, rank, salt), values(COUNT, rank, salt)
    y = torch.zeros_like(x)
    dist.all_to_all_single(y, x)
    dist.all_reduce(g)
    return [int((y * torch.arange(COUNT, device=device())).sum()), int((2 * g).sum())]


def memory() -> Any:
    """Tensors that nobody keeps, waited for on another stream, or not at all, with much else allocated meanwhile."""
    workload = step_of([("all_reduce", 4.0 * 50_001, 0), ("all_gather", 4.0 * 30_000 * RANKS, 0)], RANKS)
    plan = variant_plans(workload, CLUSTER, most=3)[-1]
    side = cuda.Stream()
    rank, total = dist.get_rank(), sum(range(1, RANKS + 1))

    def step(salt: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((50_001,), float(rank + 1), device=device())
        first = dist.all_reduce(x, async_op=True)
        gathered = torch.empty(30_000 * RANKS, device=device())
        second = dist.all_gather_into_tensor(
            gathered, torch.full((30_000,), float(rank + salt), device=device()), async_op=True
        )
        assert first is not None and second is not None
        with torch.cuda.stream(side if salt % 2 else torch.cuda.current_stream()):
            first.wait()
            second.wait()
            want = torch.arange(RANKS, device=device()) + salt
            found = (x == total).all(), (gathered.view(RANKS, -1)[:, 7] == want).all()
        del x, gathered
        for size in (50_001, 30_000, 30_000 * RANKS):
            torch.full((size,), -1.0, device=device())
        return found

    with entered(workload, plan, step):
        answers = []
        for salt in range(40):
            answers.append(step(salt))
            stretto.torch.step()
        torch.cuda.synchronize()
    return all(bool(a) and bool(b) for a, b in answers)


def training() -> Any:
    """DDP and FSDP2 under a plan lose what they lose with plain NCCL."""
    found: dict[str, Any] = {}
    nccl = dist.new_group(backend="nccl")
    for how in ("ddp", "fsdp"):
        want = losses_of(Trained(how, nccl, device()), 10)
        ours = Trained(how, None, device())
        first = losses_of(ours, 3)
        workload, losses = watched(ours.step)
        first.append(losses)
        plan = variant_plans(workload, CLUSTER, most=5)[-1]
        with stretto.torch.enforce(plan, workload, every=1) as enforcer:
            for _ in range(6):
                first.append(ours.step())
                stretto.torch.step()
            told = enforcer.report()
        found[how] = {
            "want": want, "got": first, "active": told.number, "why": told.fell_back,
            "kinds": sorted({op.kind for op in workload.comm_ops}), "motifs": len(told.motifs),
            "ops": len(workload.comm_ops), "timed": all(motif.duration_us > 0 for motif in told.motifs),
        }  # fmt: skip
    dist.destroy_process_group(nccl)
    return found


def alone() -> str:
    """One rank alone does something else in iteration 5; what the other is told."""
    try:
        with stretto.torch.enforce(BESIDE, TWO, every=1, carrier="nccl"):
            for number in range(8):
                two(number, COUNT + (number == 5 and dist.get_rank() == 0))
                stretto.torch.step()
    except StrettoError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def hook() -> Any:
    """A DDP model on plain NCCL whose gradients take the plan's way."""
    nccl = dist.new_group(backend="nccl")
    want = losses_of(Trained("ddp", nccl, device()), 8)
    ours = Trained("ddp", None, device())
    losses_of(ours, 3)
    workload, _ = watched(ours.step)
    plan = variant_plans(workload, CLUSTER, most=3)[-1]
    hooked = Trained("ddp", nccl, device())
    with stretto.torch.DdpHook(plan=plan, workload=workload, carrier="nccl", every=1) as state:
        hooked.model.register_comm_hook(state, stretto.torch.ddp_hook)
        got = losses_of(hooked, 8)
        assert state.enforcer is not None
        told = state.enforcer.report()
    return {"want": want, "got": got, "number": told.number, "iteration": told.iteration, "why": told.fell_back}


SCENARIOS: tuple[Callable[[], Any], ...] = (
    variants, uneven, types, averages, switching, surprise, prefetch, no_sync, memory, training, hook,
)  # fmt: skip


def main() -> None:
    """One rank."""
    folder, ranks = arguments()
    rank = int(os.environ["RANK"])
    logging.basicConfig(filename=folder / f"log-{rank}", level=logging.INFO)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    join(folder, rank, ranks)
    if sys.argv[3:] == ["alone"]:
        (folder / f"{rank}.json").write_text(json.dumps(alone()))
        # Its communicators are broken, and the other rank waits for ever.
        os._exit(0)
    outcomes = {}
    for scenario in SCENARIOS:
        outcomes[scenario.__name__] = scenario()
        print(rank, scenario.__name__, flush=True)
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
