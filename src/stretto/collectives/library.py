"""The collectives everybody knows, each as its pre- and postcondition."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput
from .conditions import Collective, as_ranks, from_buffers

Ranks = int | Sequence[int]


def _whole(count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64)


def _none() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


def AllGather(ranks: Ranks, *, chunks: int = 1, in_place: bool = False) -> Collective:
    """Every rank ends with every rank's shard; shard r is chunks ``r*chunks .. (r+1)*chunks-1``.

    >>> AllGather(4)
    <Collective all_gather over 4 ranks, 4 chunks, out of place>
    """
    devices = as_ranks(ranks)
    total = len(devices) * chunks
    return from_buffers(
        "all_gather",
        devices,
        chunks=chunks,
        num_chunks=total,
        share=1 / max(total, 1),
        inputs=lambda r: r * chunks + _whole(chunks),
        outputs=lambda r: _whole(total),
        place=lambda r: r * chunks,
        in_place=in_place,
    )


def ReduceScatter(ranks: Ranks, *, chunks: int = 1, in_place: bool = False) -> Collective:
    """Rank r ends with the sum of everybody's shard r."""
    devices = as_ranks(ranks)
    total = len(devices) * chunks
    return from_buffers(
        "reduce_scatter",
        devices,
        chunks=chunks,
        num_chunks=total,
        share=1 / max(total, 1),
        inputs=lambda r: _whole(total),
        outputs=lambda r: r * chunks + _whole(chunks),
        place=lambda r: -r * chunks,
        in_place=in_place,
    )


def AllReduce(ranks: Ranks, *, chunks: int | None = None, in_place: bool = False) -> Collective:
    """Every rank ends with the sum of all; `chunks` pieces (default: one per rank)."""
    devices = as_ranks(ranks)
    pieces = len(devices) if chunks is None else chunks
    return from_buffers(
        "all_reduce",
        devices,
        chunks=pieces,
        num_chunks=pieces,
        share=1 / max(pieces, 1),
        inputs=lambda r: _whole(pieces),
        outputs=lambda r: _whole(pieces),
        in_place=in_place,
    )


def AllToAll(ranks: Ranks, *, chunks: int = 1, in_place: bool = False) -> Collective:
    """Rank q ends with shard q of every rank; chunk ``(r*n + q)*chunks + j`` goes from r to q."""
    devices = as_ranks(ranks)
    n = len(devices)
    sources = np.arange(n, dtype=np.int64)[:, None] * n
    return from_buffers(
        "all_to_all",
        devices,
        chunks=chunks,
        num_chunks=n * n * chunks,
        share=1 / max(n * chunks, 1),
        inputs=lambda r: r * n * chunks + _whole(n * chunks),
        outputs=lambda r: ((sources + r) * chunks + _whole(chunks)).ravel(),
        in_place=in_place,
    )


def AllToAllV(
    ranks: Ranks, counts: Sequence[Sequence[float]], *, chunks: int = 1, in_place: bool = False
) -> Collective:
    """As all-to-all, but rank r sends ``counts[r][q]`` (any unit) to rank q; a zero sends nothing.

    In place, what comes from a rank takes the room of what went to it, so the counts must be symmetric.
    """
    devices = as_ranks(ranks)
    n = len(devices)
    try:
        matrix = np.asarray(counts, np.float64)
    except (TypeError, ValueError):
        matrix = np.zeros(0)
    if matrix.shape != (n, n) or not np.all(np.isfinite(matrix)) or np.any(matrix < 0) or not matrix.any():
        raise InvalidInput(f"counts: must be {n} rows of {n} numbers >= 0, not all zero")
    if in_place and not np.array_equal(matrix, matrix.T):
        raise InvalidInput("in_place: counts must be symmetric, so that what comes in fits where the other left")
    number = np.full((n, n), -1, np.int64)
    pairs = np.argwhere(matrix > 0)
    number[tuple(pairs.T)] = np.arange(len(pairs))
    largest = max(matrix.sum(axis=0).max(), matrix.sum(axis=1).max())

    def chunk_ids(pair: NDArray[np.int64]) -> NDArray[np.int64]:
        return (pair[pair >= 0][:, None] * chunks + _whole(chunks)).ravel()

    return from_buffers(
        "all_to_all_v",
        devices,
        chunks=chunks,
        num_chunks=len(pairs) * chunks,
        share=np.repeat(matrix[tuple(pairs.T)], chunks) / (largest * chunks),
        inputs=lambda r: chunk_ids(number[r]),
        outputs=lambda r: chunk_ids(number[:, r]),
        in_place=in_place,
    )


def Broadcast(ranks: Ranks, *, root: int = 0, chunks: int = 1, in_place: bool = False) -> Collective:
    """Every rank ends with the root's tensor."""
    devices = as_ranks(ranks)
    _check_root(root, len(devices))
    return from_buffers(
        "broadcast",
        devices,
        chunks=chunks,
        num_chunks=chunks,
        share=1 / max(chunks, 1),
        inputs=lambda r: _whole(chunks) if r == root else _none(),
        outputs=lambda r: _whole(chunks),
        in_place=in_place,
        root=root,
    )


def Reduce(ranks: Ranks, *, root: int = 0, chunks: int = 1, in_place: bool = False) -> Collective:
    """The root ends with the sum of all."""
    devices = as_ranks(ranks)
    _check_root(root, len(devices))
    return from_buffers(
        "reduce",
        devices,
        chunks=chunks,
        num_chunks=chunks,
        share=1 / max(chunks, 1),
        inputs=lambda r: _whole(chunks),
        outputs=lambda r: _whole(chunks) if r == root else _none(),
        in_place=in_place,
        root=root,
    )


def Gather(ranks: Ranks, *, root: int = 0, chunks: int = 1, in_place: bool = False) -> Collective:
    """The root ends with every rank's shard."""
    devices = as_ranks(ranks)
    _check_root(root, len(devices))
    total = len(devices) * chunks
    return from_buffers(
        "gather",
        devices,
        chunks=chunks,
        num_chunks=total,
        share=1 / max(total, 1),
        inputs=lambda r: r * chunks + _whole(chunks),
        outputs=lambda r: _whole(total) if r == root else _none(),
        place=lambda r: r * chunks if r == root else 0,
        in_place=in_place,
        root=root,
    )


def Scatter(ranks: Ranks, *, root: int = 0, chunks: int = 1, in_place: bool = False) -> Collective:
    """Rank r ends with the root's shard r."""
    devices = as_ranks(ranks)
    _check_root(root, len(devices))
    total = len(devices) * chunks
    return from_buffers(
        "scatter",
        devices,
        chunks=chunks,
        num_chunks=total,
        share=1 / max(total, 1),
        inputs=lambda r: _whole(total) if r == root else _none(),
        outputs=lambda r: r * chunks + _whole(chunks),
        place=lambda r: -r * chunks if r == root else 0,
        in_place=in_place,
        root=root,
    )


def Permute(
    ranks: Ranks, pairs: Sequence[tuple[int, int]], *, chunks: int = 1, in_place: bool = False
) -> Collective:
    """Send and receive: for each (src, dst), dst ends with src's tensor. ``[(0, 1)]`` is one send."""
    devices = as_ranks(ranks)
    n = len(devices)
    sources = [a for a, _ in pairs]
    targets = [b for _, b in pairs]
    if not pairs or len(set(sources)) < len(pairs) or len(set(targets)) < len(pairs):
        raise InvalidInput("pairs: at least one (src, dst); no rank sends twice or receives twice")
    if not all(0 <= r < n for r in (*sources, *targets)):
        raise InvalidInput(f"pairs: ranks must be 0..{n - 1}")
    sent_by = {a: i for i, a in enumerate(sources)}
    sent_to = {b: i for i, b in enumerate(targets)}
    return from_buffers(
        "permute",
        devices,
        chunks=chunks,
        num_chunks=len(pairs) * chunks,
        share=1 / max(chunks, 1),
        inputs=lambda r: sent_by[r] * chunks + _whole(chunks) if r in sent_by else _none(),
        outputs=lambda r: sent_to[r] * chunks + _whole(chunks) if r in sent_to else _none(),
        in_place=in_place,
    )


def _check_root(root: int, count: int) -> None:
    if not 0 <= root < count:
        raise InvalidInput(f"root: must be a rank 0..{count - 1}, not {root}")


COLLECTIVES: dict[str, Callable[..., Collective]] = {
    "all_gather": AllGather,
    "reduce_scatter": ReduceScatter,
    "all_reduce": AllReduce,
    "all_to_all": AllToAll,
    "all_to_all_v": AllToAllV,
    "broadcast": Broadcast,
    "reduce": Reduce,
    "gather": Gather,
    "scatter": Scatter,
    "permute": Permute,
}
"""Every collective of the library by its kind."""
ROOTED = ("broadcast", "reduce", "gather", "scatter")
