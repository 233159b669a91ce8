# SPDX-License-Identifier: Apache-2.0
"""Hierarchical algorithms as `SymmetricProgram`s: the messages of rank 0 stand for those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ..errors import unknown
from ..programs.ir import take_rows
from ..programs.symmetry import KINDS, SymmetricProgram
from .base import label, unless
from .hierarchical import phases, scheme_of_each, sums


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
