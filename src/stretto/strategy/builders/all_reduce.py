# SPDX-License-Identifier: Apache-2.0
"""All-reduce, as DDP and Horovod do it, and with large variables cut before they are reduced."""

from __future__ import annotations

import random

from ...units import MB, check_seed
from ..model import ModelSpec
from ..representation import NodeConfig, Sync
from ..resources import Resources
from .common import BUCKET_MB, FIRST_BUCKET_MB, PART_MB, check_number, cut_along, dense, longest_axis, merge_groups

MAX_RANDOM_PARTS = 8


def all_reduce(
    model: ModelSpec, there: Resources, chunk: int = 0, bucket_mb: float = BUCKET_MB,
    first_mb: float = FIRST_BUCKET_MB,
) -> tuple[NodeConfig, ...]:  # fmt: skip
    """All-reduce of merged gradients: DDP's buckets, or `chunk` neighbors each; sparse ones are gathered.

    Args:
        model: the model.
        there: the devices.
        chunk: number of neighboring variables in a message, 0..2^20; 0 makes buckets by size.
        bucket_mb: size of a bucket in MB, 0..1e9.
        first_mb: size of the first bucket in MB, 0..1e9.

    Returns:
        One node per variable.

    Raises:
        InvalidInput: an option is out of range.
    """
    groups = merge_groups(dense(model), chunk=chunk, bucket_mb=bucket_mb, first_mb=first_mb)
    return tuple(
        NodeConfig(variable=v.name, sync=Sync(kind="sparse_all_gather") if v.sparse else Sync(group=groups[v.name]))
        for v in model.variables
    )


def partitioned_all_reduce(
    model: ModelSpec, there: Resources, parts: int = 0, part_mb: float = PART_MB, bucket_mb: float = BUCKET_MB
) -> tuple[NodeConfig, ...]:
    """Large variables cut (by default into as many parts as hosts), each part all-reduced by itself; others merged.

    Args:
        model: the model.
        there: the devices.
        parts: number of parts of a large variable, 0..4096; 0 takes the number of hosts, at least 2.
        part_mb: size in MB from which a variable is cut, 0..1e9.
        bucket_mb: size of a bucket of the others in MB, 0..1e9.

    Returns:
        One node per variable.

    Raises:
        InvalidInput: an option is out of range.
    """
    check_number("parts", parts, 0, 4096)
    check_number("part_mb", part_mb, 0, 1e9)
    count = parts or max(2, len(there.by_host))
    large = {v.name for v in dense(model) if v.shape and v.nbytes >= part_mb * MB}
    groups = merge_groups([v for v in dense(model) if v.name not in large], bucket_mb=bucket_mb)
    nodes = []
    for v in model.variables:
        if v.sparse:
            nodes.append(NodeConfig(variable=v.name, sync=Sync(kind="sparse_all_gather")))
        elif v.name in large:
            nodes.append(NodeConfig(variable=v.name, partition=cut_along(v, longest_axis(v), count)))
        else:
            nodes.append(NodeConfig(variable=v.name, sync=Sync(group=groups[v.name])))
    return tuple(nodes)


def random_axis(model: ModelSpec, there: Resources, part_mb: float = PART_MB, seed: int = 0) -> tuple[NodeConfig, ...]:
    """Large variables cut along an axis drawn at random into a random number of parts, all-reduced; others merged.

    Args:
        model: the model.
        there: the devices.
        part_mb: size in MB from which a variable is cut, 0..1e9.
        seed: seed of the random numbers, >= 0.

    Returns:
        One node per variable.

    Raises:
        InvalidInput: an option is out of range.
    """
    check_number("part_mb", part_mb, 0, 1e9)
    rng = random.Random(check_seed(seed))
    nodes = []
    for node in all_reduce(model, there):
        v = model.variable(node.variable)
        axes = [axis for axis, size in enumerate(v.shape) if size > 1]
        if v.sparse or not axes or v.nbytes < part_mb * MB:
            nodes.append(node)
            continue
        axis = rng.choice(axes)
        nodes.append(NodeConfig(variable=v.name, partition=cut_along(v, axis, rng.randint(2, MAX_RANDOM_PARTS))))
    return tuple(nodes)
