# SPDX-License-Identifier: Apache-2.0
"""Other buckets for a recorded step of DDP: judged gradient by gradient on drawn steps."""

from __future__ import annotations

import random

import pytest

from stretto.cluster import Cluster
from stretto.errors import InvalidInput
from stretto.planner.buckets import best_of, buckets_of, compare_buckets, rebucket
from stretto.workload import Dep, Op, Workload

RANKS = 2


def drawn(seed: int) -> Workload:
    """Forward, then buckets between pieces of a backward pass, some behind other communication, then the waits."""
    draw = random.Random(seed)
    ops = [Op(name="forward.0", phase="forward", duration_us=50.0, after=(Dep(op="optimizer.0", lag=1),))]
    count = draw.randint(1, 5)
    for at in range(count):
        times = tuple(draw.uniform(1, 100) for _ in range(RANKS)) if draw.random() < 0.3 else ()
        ops.append(Op(name=f"backward.{at}", phase="backward", duration_us=draw.uniform(1, 100), durations_us=times))
        if draw.random() < 0.3:
            ops.append(Op(name=f"other.{at}", kind="all_to_all", nbytes=64.0, after=(Dep(op=f"backward.{at}"),)))
        ops.append(
            Op(
                name=f"backward.all_reduce.bucket.{at}", kind="all_reduce", nbytes=float(draw.randint(1, 9) << 10),
                after=(Dep(op=f"backward.{at}", why="submit"),),
            )
        )  # fmt: skip
    waits = tuple(Dep(op=f"backward.all_reduce.bucket.{at}", why="wait") for at in range(count))
    ops.append(Op(name="optimizer.0", phase="optimizer", duration_us=5.0, after=waits))
    return Workload(name="drawn", num_ranks=RANKS, ops=tuple(ops))


def full_at(step: Workload) -> list[tuple[float, float]]:
    """Bytes, and the compute time on the slowest rank, at which each bucket is submitted."""
    us, ends, filled, found = 0.0, {}, 0.0, []
    for op in step.ops:
        if not op.is_comm:
            us += max(op.durations_us, default=op.duration_us) if op.phase == "backward" else 0.0
            ends[op.name] = us
    for op in buckets_of(step):
        filled += op.nbytes
        found.append((filled, ends[op.after[0].op]))
    return found


def there_at(filled: float, before: list[tuple[float, float]]) -> float:
    """When so many bytes are there, if those of each recorded bucket come evenly: byte by byte, in small pieces."""
    bytes_before, us_before = 0.0, 0.0
    for nbytes, us in before:
        if filled <= nbytes + 1e-6:
            return us_before + (us - us_before) * (filled - bytes_before) / (nbytes - bytes_before)
        bytes_before, us_before = nbytes, us
    raise AssertionError("more bytes than there are")


@pytest.mark.parametrize("seed", range(60))
def test_every_bucket_is_submitted_where_its_last_gradient_is_there(seed: int) -> None:
    step = drawn(seed)
    most = random.Random(1000 + seed).choice((100.0, 1024.0, 3000.0, 8192.0, 1e9))
    changed = rebucket(step, most)
    before, after = full_at(step), full_at(changed)
    assert [op.nbytes for op in buckets_of(changed)][:-1] == pytest.approx([most] * (len(after) - 1))
    assert after[-1] == pytest.approx(before[-1])
    for filled, us in after:
        assert us == pytest.approx(there_at(filled, before), abs=1e-6)
    for rank in range(RANKS):
        sums = [sum((op.durations_us or (op.duration_us,) * RANKS)[rank] for op in w.ops) for w in (step, changed)]
        assert sums[0] == pytest.approx(sums[1])
    others = [[op for op in w.ops if op.kind == "all_to_all"] for w in (step, changed)]
    assert others[0] == others[1]
    waited = {dep.op for dep in changed.ops[-1].after}
    assert waited == {op.name for op in buckets_of(changed)}


def test_sizes_are_planned_and_the_best_is_named() -> None:
    """Compute before one large bucket hides nothing; small ones begin beside it."""
    ops = (
        Op(name="backward.0", phase="backward", duration_us=3000.0, after=(Dep(op="optimizer.0", lag=1),)),
        Op(
            name="backward.all_reduce.bucket.0", kind="all_reduce", nbytes=float(32 << 20),
            after=(Dep(op="backward.0", why="submit"),),
        ),
        Op(name="optimizer.0", after=(Dep(op="backward.all_reduce.bucket.0", why="wait"),)),
    )  # fmt: skip
    step = Workload(name="one", num_ranks=4, ops=ops)
    found = compare_buckets(step, Cluster.preset("ring", nodes=4), [4 << 20, 1 << 30], steps=20)
    assert [one.buckets for one in found] == [1, 8, 1]
    assert found[1].plain_us < found[0].plain_us and found[2].plain_us == pytest.approx(found[0].plain_us)
    assert best_of(found) == found[1] and found[1].cap_mb == 4.0


def test_what_has_no_buckets_or_other_ones_is_refused() -> None:
    step = drawn(0)
    with pytest.raises(InvalidInput, match="must be > 0"):
        rebucket(step, 0.0)
    bare = Workload(name="bare", num_ranks=2, ops=(Op(name="a", duration_us=1.0),))
    with pytest.raises(InvalidInput, match="has no buckets"):
        rebucket(bare, 1.0)
