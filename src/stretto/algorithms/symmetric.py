"""Hierarchical algorithms as `SymmetricProgram`s: what rank 0 sends stands for all, however many there
are."""

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
    """`hierarchical` in symmetric form: the same messages in the same order, stored once per orbit.

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
    # Each piece does the same `every` steps later.
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
    # Exchanges by XOR are translations of a torus of twos.
    torus = [
        part for size, scheme in zip(sizes, schemes, strict=True)
        for part in ([2] * (size.bit_length() - 1) if scheme == "halving_doubling" else [size])
    ]  # fmt: skip
    return SymmetricProgram.from_steps(
        label("hierarchical", chunks=unless(1, chunks), dims="x".join(map(str, sizes)), inside=unless("ring", inside)),
        kind, tuple(torus), pieces=chunks, dst=np.array(dst)[transfer], home=home, piece=piece,
        step=steps[order], reduce=np.array(reduce)[transfer], chunk_ptr=new_ptr,
    )  # fmt: skip
