# SPDX-License-Identifier: Apache-2.0
"""Parallax: sparse gradients go to parameter servers, dense ones are all-reduced."""

from __future__ import annotations

from dataclasses import replace

from ..model import ModelSpec
from ..representation import NodeConfig
from ..resources import Resources
from .all_reduce import all_reduce
from .common import BUCKET_MB, PART_MB
from .parameter_server import partitioned_ps


def parallax(
    model: ModelSpec, there: Resources, bucket_mb: float = BUCKET_MB, part_mb: float = PART_MB
) -> tuple[NodeConfig, ...]:
    """Sparse gradients to partitioned parameter servers, dense ones all-reduced in buckets.

    Args:
        model: the model.
        there: the devices.
        bucket_mb: size of a bucket in MB, 0..1e9.
        part_mb: size in MB from which a sparse variable is cut, 0..1e9.

    Returns:
        One node per variable.

    Raises:
        InvalidInput: an option is out of range.
    """
    sparse = replace(model, variables=tuple(v for v in model.variables if v.sparse)) if _any_sparse(model) else None
    served = {node.variable: node for node in partitioned_ps(sparse, there, part_mb=part_mb)} if sparse else {}
    return tuple(served.get(node.variable, node) for node in all_reduce(model, there, bucket_mb=bucket_mb))


def _any_sparse(model: ModelSpec) -> bool:
    return any(v.sparse for v in model.variables)
