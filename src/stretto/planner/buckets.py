# SPDX-License-Identifier: Apache-2.0
"""Which buckets DDP should sum gradients in: the recorded step with other ones, planned and compared.

A bucket is summed when its last gradient is there: small ones begin early, large ones pay for fewer calls. A recorded
step shows when each of its buckets was full. Between two such moments gradients are taken to come evenly, by bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil

from ..cluster import Cluster
from ..errors import InvalidInput
from ..workload import Dep, Op, Workload
from . import api
from .costs.costs import CostModel

LABEL = ".bucket."
"""In the names of comm-ops that a recording has known as DDP's."""
BACKWARD = "backward"
ALIKE = 0.01
"""Predictions within this share of the best count as equal; then the largest buckets are taken."""


@dataclass(frozen=True, kw_only=True)
class BucketPrediction:
    """A step with buckets of at most `nbytes` (0: those that were recorded)."""

    nbytes: float
    buckets: int
    plain_us: float
    """An iteration in plain order."""
    plan_us: float
    """An iteration under the best plan that was found."""

    @property
    def cap_mb(self) -> float:
        """The same as DDP's `bucket_cap_mb`, which counts in MiB."""
        return self.nbytes / (1 << 20)


def buckets_of(workload: Workload) -> tuple[Op, ...]:
    """DDP's sums in a recorded step, in the order in which they are submitted."""
    return tuple(op for op in workload.ops if op.kind == "all_reduce" and LABEL in op.name)


def rebucket(workload: Workload, most_bytes: float) -> Workload:
    """The same step with buckets of other sizes.

    Args:
        workload: A recorded step of a model under DDP.
        most_bytes: Every bucket but the last has so many bytes.

    Returns:
        The step with as many bytes of gradients and as much compute; buckets are submitted where they are full.

    Raises:
        InvalidInput: The step has no buckets, or buckets of several groups, or compute differs between ranks in kind.
    """
    old = buckets_of(workload)
    submits = _submits(workload, old)
    if most_bytes <= 0:
        raise InvalidInput(f"most_bytes: must be > 0, not {most_bytes:g}")
    chain = _chain(workload, submits)
    ends_us = dict(zip((op.name for op in chain), accumulate(_time_us(op) for op in chain), strict=True))
    filled = [0.0, *accumulate(op.nbytes for op in old)]
    full_us = [0.0, *(ends_us[name] for name in submits)]
    count = max(1, ceil(filled[-1] / most_bytes - 1e-9))
    bounds = [0.0, *(min(most_bytes * (at + 1), filled[-1]) for at in range(count))]
    moments = [_moment(filled, full_us, bound) for bound in bounds[1:]]
    made = [
        replace(
            old[0], name=f"{old[0].name.rpartition('.')[0]}.{at}", nbytes=bounds[at + 1] - bounds[at],
            duration_us=0.0, wait_us=0.0, after=(),
        )
        for at in range(count)
    ]  # fmt: skip
    over = {
        op.name: tuple(one.name for at, one in enumerate(made) if bounds[at] < end and bounds[at + 1] > begin)
        for op, begin, end in zip(old, filled, filled[1:], strict=False)
    }
    return replace(
        workload, ops=tuple(_renewed(workload, chain, dict(zip(made, moments, strict=True)), over)),
        notes=(*workload.notes, f"DDP's buckets were changed from {len(old)} to {count}: gradients come evenly"),
    )  # fmt: skip


def compare_buckets(
    workload: Workload, cluster: Cluster, sizes: Sequence[float], *, budget_s: float = 10.0, steps: int | None = None,
    seed: int = 0, costs: CostModel | None = None,
) -> list[BucketPrediction]:  # fmt: skip
    """Plan a recorded step with the buckets that it has, and with others.

    Args:
        workload: The step.
        cluster: The cluster; rank r runs on device r.
        sizes: Bytes of buckets, each > 0.
        budget_s: Seconds for all plans together.
        steps: Search steps of each plan instead: then the result depends on the seed alone.
        seed: Seed of all searches.
        costs: The cost model; None simulates.

    Returns:
        The recorded buckets first, then one prediction for each size.

    Raises:
        InvalidInput: The step has no buckets that could be changed, or a size is not positive.
    """
    found = []
    cases = [(0.0, workload), *((float(size), rebucket(workload, size)) for size in sizes)]
    for nbytes, step in cases:
        made = api.plan(step, cluster, budget_s=budget_s / len(cases), steps=steps, seed=seed, costs=costs)
        found.append(
            BucketPrediction(
                nbytes=nbytes, buckets=len(buckets_of(step)), plain_us=made.plain.period_us,
                plan_us=made.plan.iteration_us,
            )
        )  # fmt: skip
    return found


def best_of(found: Sequence[BucketPrediction]) -> BucketPrediction:
    """The fastest under its plan; of those within 1 % the recorded buckets, else the largest.

    >>> some = [BucketPrediction(nbytes=n, buckets=1, plain_us=9.0, plan_us=us) for n, us in ((0, 9), (1, 7), (2, 7))]
    >>> best_of(some).nbytes, best_of(some[:1]).nbytes
    (2, 0)
    """
    least = min(one.plan_us for one in found)
    return max(
        (one for one in found if one.plan_us <= least * (1 + ALIKE)), key=lambda one: (not one.nbytes, one.nbytes)
    )


def _submits(workload: Workload, old: Sequence[Op]) -> list[str]:
    """The compute-op after which each bucket was submitted."""
    if not old:
        raise InvalidInput("workload: has no buckets of DDP's, as a recorded step has (all_reduce.bucket)")
    if len({(op.groups, op.encoding, op.at_most) for op in old}) > 1:
        raise InvalidInput("workload: has buckets of several groups or kinds, which are not changed together")
    compute = {op.name for op in workload.ops if not op.is_comm}
    found = [next((dep.op for dep in op.after if dep.op in compute and not dep.lag), "") for op in old]
    if "" in found:
        raise InvalidInput("workload: a bucket is submitted after no compute of its iteration")
    return found


def _chain(workload: Workload, submits: Sequence[str]) -> list[Op]:
    """The compute in which gradients are made: from the begin of the backward pass to the last bucket."""
    compute = [op for op in workload.ops if not op.is_comm]
    names = [op.name for op in compute]
    last = names.index(submits[-1])
    first = next((at for at, op in enumerate(compute[: last + 1]) if op.phase == BACKWARD), names.index(submits[0]))
    chain = compute[min(first, names.index(submits[0])) : last + 1]
    if any(op.ranks for op in chain) or len({op.stream for op in chain}) > 1:
        raise InvalidInput("workload: ranks compute different things in the backward pass, so its buckets stay")
    return chain


def _time_us(op: Op) -> float:
    return max(op.durations_us, default=op.duration_us)


def _moment(filled: Sequence[float], full_us: Sequence[float], bound: float) -> float:
    """When so many bytes of gradients are there.

    >>> _moment([0.0, 10.0, 30.0], [0.0, 100.0, 200.0], 20.0)
    150.0
    """
    at = min(max(bisect_left(filled, bound), 1), len(filled) - 1)
    share = (bound - filled[at - 1]) / (filled[at] - filled[at - 1])
    return full_us[at - 1] + share * (full_us[at] - full_us[at - 1])


def _renewed(
    workload: Workload, chain: Sequence[Op], moments: dict[Op, float], over: dict[str, tuple[str, ...]]
) -> list[Op]:
    """All ops, with compute cut where a bucket is full, which follows; who waited for an old bucket waits for new ones.

    Args:
        workload: The step.
        chain: The compute-ops that may be cut.
        moments: The new buckets and when each is full, in the compute time of the chain.
        over: For each old bucket the new ones that have gradients of it.

    Returns:
        The ops.
    """
    pending, inside = list(moments.items()), {op.name for op in chain}
    renewed: list[Op] = []
    begin_us = 0.0
    for op in workload.ops:
        if op.name in over:
            continue
        op = replace(op, after=_deps(op, over))
        if op.name not in inside:
            renewed.append(op)
            continue
        end_us = begin_us + _time_us(op)
        last = op.name == chain[-1].name
        cuts = [(bucket, us) for bucket, us in pending if us <= end_us or last]
        pending = pending[len(cuts) :]
        renewed += _cut(op, begin_us, end_us, cuts)
        begin_us = end_us
    return renewed


def _cut(op: Op, begin_us: float, end_us: float, cuts: Sequence[tuple[Op, float]]) -> list[Op]:
    """A compute-op in pieces, each followed by the bucket that is full behind it; the last piece has the op's name."""
    made: list[Op] = []
    at_us, whole_us = begin_us, end_us - begin_us
    after = op.after
    for number, (bucket, us) in enumerate(cuts):
        if us >= end_us or whole_us <= 0:
            continue
        share = max(us - at_us, 0.0) / whole_us
        piece = _part(op, f"{op.name}.part{number}", share, after)
        made += [piece, replace(bucket, after=(Dep(op=piece.name, why="submit"),))]
        at_us, after = max(us, at_us), ()
    made.append(_part(op, op.name, (end_us - at_us) / whole_us if whole_us > 0 else 1.0, after))
    made += [
        replace(bucket, after=(Dep(op=op.name, why="submit"),)) for bucket, us in cuts if us >= end_us or whole_us <= 0
    ]
    return made


def _part(op: Op, name: str, share: float, after: tuple[Dep, ...]) -> Op:
    times = tuple(share * us for us in op.durations_us)
    return replace(op, name=name, after=after, duration_us=share * op.duration_us, durations_us=times)


def _deps(op: Op, over: dict[str, tuple[str, ...]]) -> tuple[Dep, ...]:
    found: dict[Dep, None] = {}
    for dep in op.after:
        found |= dict.fromkeys(replace(dep, op=name) for name in over.get(dep.op, (dep.op,)))
    return tuple(found)
