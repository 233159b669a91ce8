# SPDX-License-Identifier: Apache-2.0
"""Other buckets and more micro-batches, against a second way to time a data-parallel step."""

from __future__ import annotations

import random

import pytest

from stretto.advice.buckets import accumulated, gradient_buckets, rebucketed
from stretto.advice.what_if import as_submitted_us
from stretto.cluster import Cluster
from stretto.planner.algebra.options import problem
from stretto.planner.costs.costs import simulated_costs
from stretto.units import MB
from stretto.workload import Dep, Op, Workload

CLUSTER = Cluster.load("hosts: 2, gpus: 2 x a100, network: 100gbit")
FORWARD_US, UPDATE_US = 400.0, 100.0


def ddp(blocks_us: list[float], sizes: list[float], forward_us: float = FORWARD_US) -> Workload:
    """A data-parallel step: forward, blocks of the backward pass with a bucket after each, and the update."""
    ops = [Op(name="forward", phase="forward", duration_us=forward_us, after=(Dep(op="update", lag=1),))]
    for at, (us, size) in enumerate(zip(blocks_us, sizes, strict=True)):
        ops.append(Op(name=f"backward.{at}", phase="backward", duration_us=us))
        ops.append(Op(name=f"bucket.{at}", kind="all_reduce", nbytes=size, after=(Dep(op=f"backward.{at}"),)))
    waits = tuple(Dep(op=f"bucket.{at}", why="wait") for at in range(len(sizes)))
    ops.append(Op(name="update", phase="optimizer", duration_us=UPDATE_US, after=waits))
    return Workload(name="ddp", num_ranks=4, ops=tuple(ops))


def all_reduce_us(nbytes: float) -> float:
    """What one all-reduce over all ranks takes as a library does it."""
    lone = ddp([1.0], [nbytes])
    return problem(lone, CLUSTER, simulated_costs(CLUSTER), until=0.0).options["bucket.0"][0].total_us


def timed(blocks_us: list[float], pieces: list[list[float]], joined: list[list[int]]) -> float:
    """The step by hand: bucket after bucket on one network, each when its gradients and the network are ready.

    `pieces` are the sizes that the bucket of each block is cut into, `joined` the blocks whose buckets are one.
    """
    now, ready = FORWARD_US, list[tuple[float, float]]()
    for at, us in enumerate(blocks_us):
        for number, size in enumerate(pieces[at]):
            # Gradients of the first bucket are ready at the end of its block, of others evenly along it.
            share = 1.0 if at == 0 else (number + 1) / len(pieces[at])
            ready.append((now + us * share, size))
        now += us
    if any(len(members) > 1 for members in joined):
        ready = [(ready[members[-1]][0], sum(ready[at][1] for at in members)) for members in joined]
    free = 0.0
    for at_us, size in ready:
        free = max(free, at_us) + all_reduce_us(size)
    return max(now, free) + UPDATE_US


@pytest.mark.parametrize("seed", range(25))
def test_random_steps_take_as_long_as_by_hand(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 5)
    blocks = [float(rng.randint(50, 3000)) for _ in range(count)]
    sizes = [float(rng.randint(1, 40) * MB) for _ in range(count)]
    step, costs = ddp(blocks, sizes), simulated_costs(CLUSTER)
    cap = rng.choice([3.0, 8.0, 20.0, 45.0, 90.0, 200.0]) * MB
    joined: list[list[int]] = []
    for at, size in enumerate(sizes):
        if joined and sum(sizes[each] for each in joined[-1]) + size <= cap:
            joined[-1].append(at)
        else:
            joined.append([at])
    cut = [-(-size // cap) if size > cap else 1 for size in sizes]
    pieces = [[size / n] * int(n) for size, n in zip(sizes, (min(n, 16) for n in cut), strict=True)]
    if any(n > 1 for n in cut) and any(len(members) > 1 for members in joined):
        # By hand either of the two is timed, not both.
        cap, joined, pieces = 1e18, [list(range(count))], [[size] for size in sizes]
    other = rebucketed(step, cap)
    assert sum(op.nbytes for op in other.comm_ops) == pytest.approx(sum(sizes))
    assert other.compute_us == pytest.approx(step.compute_us)
    assert as_submitted_us(other, CLUSTER, costs).period_us == pytest.approx(timed(blocks, pieces, joined), rel=1e-9)
    as_it_is = timed(blocks, [[size] for size in sizes], [[at] for at in range(count)])
    assert as_submitted_us(step, CLUSTER, costs).period_us == pytest.approx(as_it_is, rel=1e-9)


def test_a_cap_that_fits_changes_nothing() -> None:
    step = ddp([100.0, 200.0], [8 * MB, 9 * MB])
    assert rebucketed(step, 10 * MB) == step
    assert len(rebucketed(step, 17 * MB).comm_ops) == 1


@pytest.mark.parametrize("times", [1, 2, 3])
def test_micro_batches_synchronize_once(times: int) -> None:
    step = ddp([500.0, 700.0], [20 * MB, 30 * MB])
    more = accumulated(step, times)
    assert sum(op.nbytes for op in more.comm_ops) == 50 * MB
    costs = simulated_costs(CLUSTER)
    by_hand = timed([500.0, 700.0], [[20 * MB], [30 * MB]], [[0], [1]]) + (times - 1) * (FORWARD_US + 1200.0)
    assert as_submitted_us(more, CLUSTER, costs).period_us == pytest.approx(by_hand, rel=1e-9)


def test_all_reduces_inside_the_model_are_no_buckets() -> None:
    ops = (
        Op(name="a", phase="forward", duration_us=10.0, after=(Dep(op="update", lag=1),)),
        Op(name="tensor", kind="all_reduce", nbytes=1e6, after=(Dep(op="a"),)),
        Op(name="b", phase="backward", duration_us=10.0, after=(Dep(op="tensor"),)),
        Op(name="gradients", kind="all_reduce", nbytes=1e6, after=(Dep(op="b"),)),
        Op(name="update", phase="update", duration_us=1.0, after=(Dep(op="gradients"),)),
    )
    ((bucket,),) = gradient_buckets(Workload(name="tp", num_ranks=4, ops=ops))
    assert bucket.name == "gradients"
