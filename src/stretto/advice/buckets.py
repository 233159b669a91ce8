# SPDX-License-Identifier: Apache-2.0
"""A training step with other gradient buckets, or with several micro-batches before each synchronization.

A *bucket* is an all-reduce of gradients: one whose result the optimizer reads, or one of several that the same ops wait
for. All-reduces inside the model (tensor parallelism) are each read by an op of their own, and are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from ..units import MIB
from ..workload import Dep, Op, Workload

UPDATE = ("optimizer", "update")
"""The phases in which parameters are updated."""
CAPS = tuple(size * MIB for size in (1, 2, 5, 10, 25, 50, 100, 200, 400, 800))
"""Sizes of ``bucket_cap_mb`` that are tried; PyTorch's default is 25 MiB."""
MAX_PIECES = 16
"""A bucket is cut into so many at most."""


def gradient_buckets(workload: Workload) -> tuple[tuple[Op, ...], ...]:
    """The buckets of a step, in order, those together that could be one.

    Args:
        workload: the step.

    Returns:
        Families of all-reduces that have the same groups and the same readers.
    """
    readers = _readers(workload)
    families: dict[object, list[Op]] = {}
    for op in workload.comm_ops:
        if op.kind == "all_reduce" and not op.at_most:
            families.setdefault((op.groups, op.encoding, readers[op.name]), []).append(op)
    return tuple(
        tuple(family)
        for family in families.values()
        if len(family) > 1 or any(workload.op(name).phase in UPDATE for name, _ in readers[family[0].name])
    )


def rebucketed(workload: Workload, cap_bytes: float) -> Workload:
    """The step as DDP would submit it with another ``bucket_cap_mb``.

    Neighbours that fit together under the cap become one bucket, submitted with the last of them. A bucket over the cap
    is cut evenly; its pieces are ready one after the other during the compute that lay between the bucket before and
    this one, which assumes that gradients become ready evenly there. The first bucket of a step, before which forward
    and backward lie, has all its pieces ready at once.

    Args:
        workload: the step.
        cap_bytes: the largest bucket, > 0.

    Returns:
        The changed step; the same one if nothing changes.
    """
    made = workload
    for family in gradient_buckets(workload):
        for members in _merged(family, cap_bytes):
            if len(members) > 1:
                made = _with_merged(made, members)
        for number, op in enumerate(family):
            if op.nbytes > cap_bytes and op.name in made.index:
                made = _with_split(made, op, min(ceil(op.nbytes / cap_bytes), MAX_PIECES), first=number == 0)
    return made


def accumulated(workload: Workload, times: int) -> Workload:
    """The step with several micro-batches before gradients are synchronized and parameters updated.

    Args:
        workload: the step, of one micro-batch.
        times: how many micro-batches, >= 1.

    Returns:
        A step that does the compute of that many steps, with the buckets and the update of the last one only.
    """
    last_only = {op.name for family in gradient_buckets(workload) for op in family}
    last_only |= {op.name for op in workload.ops if op.phase in UPDATE}
    ops: list[Op] = []
    for number in range(times):
        last = number == times - 1
        for op in workload.ops:
            if last or op.name not in last_only:
                deps = [_in_copy(dep, number, times, last_only) for dep in op.after]
                after = tuple(dict.fromkeys(dep for dep in deps if dep is not None))
                ops.append(replace(op, name=_copy_name(op.name, number, times), after=after))
    return replace(workload, ops=tuple(ops), samples=workload.samples * times)


def _in_copy(dep: Dep, number: int, times: int, last_only: set[str]) -> Dep | None:
    """A dependency of one micro-batch's op; None if it is on something that this micro-batch does not do."""
    back, last = number - dep.lag, times - 1
    if dep.op not in last_only:
        lag = 0 if back >= 0 else -(back // times)
        return replace(dep, op=_copy_name(dep.op, back % times, times), lag=lag)
    if dep.lag == 0:
        return replace(dep, op=_copy_name(dep.op, last, times)) if number == last else None
    # The update before this micro-batch is that of the iteration before.
    return replace(dep, op=_copy_name(dep.op, last, times), lag=dep.lag)


def _copy_name(name: str, number: int, times: int) -> str:
    return name if number == times - 1 else f"{name}@{number}"


def _readers(workload: Workload) -> dict[str, frozenset[tuple[str, int]]]:
    found: dict[str, set[tuple[str, int]]] = {op.name: set() for op in workload.ops}
    for op in workload.ops:
        for dep in op.after:
            found[dep.op].add((op.name, dep.lag))
    return {name: frozenset(readers) for name, readers in found.items()}


def _merged(family: Sequence[Op], cap_bytes: float) -> list[list[Op]]:
    """Neighbours that fit together under the cap, taken greedily as DDP fills its buckets."""
    found: list[list[Op]] = []
    for op in family:
        if found and sum(each.nbytes for each in found[-1]) + op.nbytes <= cap_bytes:
            found[-1].append(op)
        else:
            found.append([op])
    return found


def _with_merged(workload: Workload, members: Sequence[Op]) -> Workload:
    names = {op.name for op in members}
    last = members[-1]
    after = tuple(dict.fromkeys(dep for op in members for dep in op.after if dep.op not in names))
    whole = replace(
        last, nbytes=sum(op.nbytes for op in members), after=after, duration_us=sum(op.duration_us for op in members),
        wait_us=sum(op.wait_us for op in members),
    )  # fmt: skip
    ops = []
    for op in workload.ops:
        if op.name in names:
            ops += [whole] if op.name == last.name else []
        else:
            deps = (replace(dep, op=last.name) if dep.op in names else dep for dep in op.after)
            ops.append(replace(op, after=tuple(dict.fromkeys(deps))))
    return replace(workload, ops=tuple(ops))


def _with_split(workload: Workload, bucket: Op, pieces: int, *, first: bool) -> Workload:
    bucket = workload.op(bucket.name)
    block = None if first else _block_of(workload, bucket)
    parts = [f"{bucket.name}/{at}" for at in range(pieces)]
    steps = [f"{block.name}/{at}" for at in range(pieces - 1)] + [block.name] if block is not None else []
    ops: list[Op] = []
    for op in workload.ops:
        if op.name == bucket.name:
            ops += [] if steps else [_piece(bucket, name, pieces, bucket.after) for name in parts]
        elif block is not None and op.name == block.name:
            for at, (step, name) in enumerate(zip(steps, parts, strict=True)):
                ready = tuple(Dep(op=step, why=dep.why) if dep.op == block.name else dep for dep in bucket.after)
                ops.append(_piece_of_block(block, step, pieces, first=at == 0))
                ops.append(_piece(bucket, name, pieces, ready))
        else:
            after = tuple(each for dep in op.after for each in _spread(dep, bucket.name, parts))
            ops.append(replace(op, after=after))
    return replace(workload, ops=tuple(ops))


def _spread(dep: Dep, bucket: str, parts: Sequence[str]) -> list[Dep]:
    return [replace(dep, op=name) for name in parts] if dep.op == bucket else [dep]


def _piece(bucket: Op, name: str, pieces: int, after: tuple[Dep, ...]) -> Op:
    return replace(
        bucket, name=name, nbytes=bucket.nbytes / pieces, after=after, duration_us=bucket.duration_us / pieces,
        wait_us=bucket.wait_us / pieces,
    )  # fmt: skip


def _piece_of_block(block: Op, name: str, pieces: int, *, first: bool) -> Op:
    return replace(
        block, name=name, after=block.after if first else (), duration_us=block.duration_us / pieces,
        durations_us=tuple(us / pieces for us in block.durations_us),
    )  # fmt: skip


def _block_of(workload: Workload, bucket: Op) -> Op | None:
    """The compute that a bucket waits for in its own iteration, if that is one op."""
    before = [workload.op(dep.op) for dep in bucket.after if dep.lag == 0]
    computes = [op for op in before if not op.is_comm]
    at = workload.index[bucket.name]
    # Only an op that is listed before the bucket can be cut where the bucket stands, and only for one bucket.
    if len(computes) != 1 or workload.index[computes[0].name] > at or f"{computes[0].name}/0" in workload.index:
        return None
    return computes[0]
