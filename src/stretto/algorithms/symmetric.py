# SPDX-License-Identifier: Apache-2.0
"""Algorithms as `SymmetricProgram`s: the messages of rank 0 stand for those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import numpy as np

from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from ..programs.ir import take_rows
from ..programs.symmetry import KINDS, SymmetricProgram
from .base import label, unless
from .hierarchical import phases, scheme_of_each, suited_to, sums

ONE_DIMENSION = {"ring": "ring", "direct": "direct", "halving_doubling": "halving_doubling"}
"""Algorithms that are `hierarchical` with a single dimension, and its scheme inside that dimension."""


def symmetric_algorithm(name: str, kind: str, cluster: Cluster, *, chunks: int = 1) -> SymmetricProgram:
    """An algorithm over all devices of a cluster with regular dimensions, of which only rank 0's part is built.

    The messages are those of ``algorithm(name, kind, cluster.num_devices, cluster=cluster)``, and so is the time; to
    build, prove and simulate them costs as much as one rank does.

    Args:
        name: "ring" (on one dimension), "direct", "halving_doubling" or "hierarchical".
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        cluster: A cluster with dimensions.
        chunks: How many pieces each shard is cut into, >= 1; more than 1 for "hierarchical" only.

    Returns:
        The symmetric program.

    Raises:
        InvalidInput: The algorithm has no symmetric form (with so many pieces), does not serve the collective, or the
            cluster has no dimensions that it could follow.

    >>> from stretto import simulate
    >>> ring = Cluster.preset("ring", nodes=1024, gb_per_s=50.0, alpha_us=0.5)
    >>> simulate(symmetric_algorithm("ring", "all_reduce", ring), ring, nbytes=64e6).total_us
    3580.5
    """
    if name not in (*ONE_DIMENSION, "hierarchical"):
        raise unknown("symmetric algorithm", name, (*ONE_DIMENSION, "hierarchical"))
    if not cluster.dimensions:
        raise InvalidInput(f"cluster: {cluster.name} has no regular dimensions, which {name} follows here")
    if name == "hierarchical":
        sizes = [dimension.size for dimension in cluster.dimensions]
        return symmetric_hierarchical(kind, sizes, chunks=chunks, inside=suited_to(cluster.dimensions))
    if name == "ring" and len(cluster.dimensions) > 1:
        raise InvalidInput(f"cluster: {cluster.name} has several dimensions, along which a ring is not symmetric")
    if chunks != 1:
        raise InvalidInput(f"chunks: {name} has a symmetric form for 1 chunk, not {chunks}")
    return replace(symmetric_hierarchical(kind, (cluster.num_devices,), inside=ONE_DIMENSION[name]), name=name)


def symmetric_hierarchical(
    kind: str, dims: Sequence[int], *, chunks: int = 1, inside: str | Sequence[str] = "ring"
) -> SymmetricProgram:
    """Build `hierarchical` in symmetric form: the same messages in the same order, stored once per orbit.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        dims: The size of each dimension, the fastest varying first; the number of ranks is their product.
        chunks: How many pieces each shard is cut into, >= 1.
        inside: "ring", "direct" or "halving_doubling", for all dimensions or one for each.

    Returns:
        The symmetric program.

    Raises:
        InvalidInput: The kind is not served, or a scheme does not fit its dimension.

    >>> big = symmetric_hierarchical("all_reduce", (16, 16, 16), chunks=64)
    >>> len(big.dst), big.num_ranks, big.num_transfers
    (5760, 4096, 23592960)
    """
    if kind not in KINDS:
        raise unknown("symmetric collective", kind, KINDS)
    sizes = tuple(int(d) for d in dims)
    schemes = scheme_of_each(sizes, inside)
    stages, longest, every = phases(kind, sizes, schemes)
    dst, step, reduce, homes = [], [], [], []
    for stage, (dim, rounds, reducing) in enumerate(stages):
        stride = prod(sizes[:dim])
        beyond = sums(np.arange(size) * prod(sizes[:d]) for d, size in enumerate(sizes) if d > dim)
        for at, (src, to, blocks) in enumerate(rounds):
            for row in np.flatnonzero(src == 0):
                dst.append(int(to[row]) * stride)
                step.append(stage * longest + at)
                reduce.append(reducing)
                homes.append((blocks[row][:, None] * stride + beyond).ravel())
    # Each further piece repeats the messages of the one before `every` steps later.
    count = len(dst)
    widths = np.array([len(h) for h in homes], np.int64)
    steps = (np.array(step) + every * np.arange(chunks)[:, None]).ravel()
    order = np.argsort(steps, kind="stable")
    ptr = np.concatenate([[0], np.cumsum(np.tile(widths, chunks))])
    home = np.tile(np.concatenate(homes), chunks).astype(np.int32)
    piece = np.repeat(np.arange(chunks), widths.sum()).astype(np.int32)
    new_ptr, home = take_rows(ptr, home, order)
    _, piece = take_rows(ptr, piece, order)
    transfer = order % count
    # An exchange with rank XOR 2^i is a translation of a torus whose sides are all two.
    torus = [
        part for size, scheme in zip(sizes, schemes, strict=True)
        for part in ([2] * (size.bit_length() - 1) if scheme == "halving_doubling" else [size])
    ]  # fmt: skip
    return SymmetricProgram.from_steps(
        label("hierarchical", chunks=unless(1, chunks), dims="x".join(map(str, sizes)), inside=unless("ring", inside)),
        kind, tuple(torus), pieces=chunks, dst=np.array(dst)[transfer], home=home, piece=piece,
        step=steps[order], reduce=np.array(reduce)[transfer], chunk_ptr=new_ptr,
    )  # fmt: skip
