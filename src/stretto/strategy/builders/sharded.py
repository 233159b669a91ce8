# SPDX-License-Identifier: Apache-2.0
"""ZeRO as a strategy: a gradient is reduce-scattered, each rank updates its share, the parameters are gathered."""

from __future__ import annotations

from ..model import MAX_VARIABLES, ModelSpec
from ..representation import NodeConfig, Sync
from ..resources import Resources
from .common import BUCKET_MB, dense, merge_groups


def zero1(model: ModelSpec, there: Resources) -> tuple[NodeConfig, ...]:
    """Optimizer state sharded: all gradients in one message at the end of the backward pass."""
    return _sharded(model, merge_groups(dense(model), chunk=MAX_VARIABLES))


def zero2(model: ModelSpec, there: Resources, bucket_mb: float = BUCKET_MB) -> tuple[NodeConfig, ...]:
    """Optimizer state and gradients sharded: bucket by bucket as the backward pass makes them.

    Args:
        model: the model.
        there: the devices.
        bucket_mb: size of a bucket in MB, 0..1e9.

    Returns:
        One node per variable.

    Raises:
        InvalidInput: `bucket_mb` is out of range.
    """
    return _sharded(model, merge_groups(dense(model), bucket_mb=bucket_mb))


def _sharded(model: ModelSpec, groups: dict[str, int]) -> tuple[NodeConfig, ...]:
    return tuple(
        NodeConfig(
            variable=v.name,
            sync=Sync(kind="sparse_all_gather") if v.sparse else Sync(kind="sharded", group=groups[v.name]),
        )
        for v in model.variables
    )
