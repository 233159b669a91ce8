# SPDX-License-Identifier: Apache-2.0
"""The usual collectives, each as its pre- and postcondition.

All take `ranks` as a count or as the devices that take part; shards, roots and pairs are numbered by rank 0..n-1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput
from .conditions import MAX_ENTRIES, Collective, as_ranks, from_buffers
from .implicit import ImplicitCollective

Ranks = int | Sequence[int]


def _whole(count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64)


def _none() -> NDArray[np.int64]:
    return np.zeros(0, np.int64)


def AllGather(ranks: Ranks, *, chunks: int = 1, in_place: bool = False) -> Collective:
    """Every rank ends with every rank's shard; shard r is chunks ``r*chunks .. (r+1)*chunks-1``.

    Args:
        ranks: How many ranks take part, or the device of each.
        chunks: How many chunks a shard is cut into, >= 1.
        in_place: Whether rank r's input is the r-th shard of its output buffer.

    Returns:
        The collective; its bytes are those of the output buffer.

    >>> AllGather(4)
    <Collective all_gather over 4 ranks, 4 chunks, out of place>
    """
    devices = as_ranks(ranks)
    return ImplicitCollective.of(
        "all_gather", devices, chunks=chunks, num_chunks=len(devices) * chunks, entries=len(devices) ** 2 * chunks,
        in_place=in_place,
        write=partial(_all_gather, devices, chunks, in_place),
    )  # fmt: skip


def _all_gather(devices: tuple[int, ...], chunks: int, in_place: bool) -> Collective:
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
    """Rank r ends with the sum of shard r of all ranks.

    Args:
        ranks: How many ranks take part, or the device of each.
        chunks: How many chunks a shard is cut into, >= 1.
        in_place: Whether rank r's output is the r-th shard of its input buffer.

    Returns:
        The collective; its bytes are those of the input buffer.
    """
    devices = as_ranks(ranks)
    return ImplicitCollective.of(
        "reduce_scatter", devices, chunks=chunks, num_chunks=len(devices) * chunks,
        entries=len(devices) ** 2 * chunks, in_place=in_place,
        write=partial(_reduce_scatter, devices, chunks, in_place),
    )  # fmt: skip


def _reduce_scatter(devices: tuple[int, ...], chunks: int, in_place: bool) -> Collective:
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
    """Every rank ends with the sum of all ranks' tensors.

    Args:
        ranks: How many ranks take part, or the device of each.
        chunks: How many chunks the tensor is cut into, >= 1; one per rank when not given.
        in_place: Whether input and output are the same buffer.

    Returns:
        The collective; its bytes are those of the tensor.
    """
    devices = as_ranks(ranks)
    pieces = len(devices) if chunks is None else chunks
    return ImplicitCollective.of(
        "all_reduce", devices, chunks=pieces, num_chunks=pieces, entries=len(devices) * pieces, in_place=in_place,
        write=partial(_all_reduce, devices, pieces, in_place),
    )  # fmt: skip


def _all_reduce(devices: tuple[int, ...], pieces: int, in_place: bool) -> Collective:
    tensor = _whole(pieces if pieces <= MAX_ENTRIES else 0)  # too many are refused below
    return from_buffers(
        "all_reduce",
        devices,
        chunks=pieces,
        num_chunks=pieces,
        share=1 / max(pieces, 1),
        inputs=lambda r: tensor,
        outputs=lambda r: tensor,
        in_place=in_place,
    )


def AllToAll(ranks: Ranks, *, chunks: int = 1, in_place: bool = False) -> Collective:
    """Rank q ends with shard q of every rank; chunk ``(r*n + q)*chunks + j`` goes from r to q.

    Args:
        ranks: How many ranks take part, or the device of each.
        chunks: How many chunks a shard (what one rank sends to one other) is cut into, >= 1.
        in_place: Whether input and output are the same buffer.

    Returns:
        The collective; its bytes are those of one rank's input buffer.
    """
    devices = as_ranks(ranks)
    count = len(devices) ** 2 * chunks
    return ImplicitCollective.of(
        "all_to_all", devices, chunks=chunks, num_chunks=count, entries=count, in_place=in_place,
        write=partial(_all_to_all, devices, chunks, in_place),
    )  # fmt: skip


def _all_to_all(devices: tuple[int, ...], chunks: int, in_place: bool) -> Collective:
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
    """Rank q ends with what every rank r has for it: an all-to-all whose shards differ in size.

    In place, the shard from a rank takes the room of the shard that went to that rank, so the counts must be symmetric.

    Args:
        ranks: How many ranks take part, or the device of each.
        counts: ``counts[r][q]`` is how much rank r sends to rank q, in any unit; >= 0, and 0 sends nothing.
        chunks: How many chunks each shard is cut into, >= 1.
        in_place: Whether input and output are the same buffer; needs symmetric counts.

    Returns:
        The collective; its bytes are those of the largest input or output buffer of a rank.

    Raises:
        InvalidInput: The counts are no n x n matrix of numbers >= 0, are all zero, or not symmetric in place.
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
    """Every rank ends with the root's tensor.

    Args:
        ranks: How many ranks take part, or the device of each.
        root: The rank that has the tensor.
        chunks: How many chunks the tensor is cut into, >= 1.
        in_place: Whether the root's input and output are the same buffer.

    Returns:
        The collective; its bytes are those of the tensor.
    """
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
    """The root ends with the sum of all ranks' tensors.

    Args:
        ranks: How many ranks take part, or the device of each.
        root: The rank that ends with the sum.
        chunks: How many chunks the tensor is cut into, >= 1.
        in_place: Whether the root's input and output are the same buffer.

    Returns:
        The collective; its bytes are those of the tensor.
    """
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
    """The root ends with every rank's shard, in the order of ranks.

    Args:
        ranks: How many ranks take part, or the device of each.
        root: The rank that ends with the shards.
        chunks: How many chunks a shard is cut into, >= 1.
        in_place: Whether the root's input is its own shard of its output buffer.

    Returns:
        The collective; its bytes are those of the root's output buffer.
    """
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
    """Rank r ends with the root's shard r.

    Args:
        ranks: How many ranks take part, or the device of each.
        root: The rank that has the shards.
        chunks: How many chunks a shard is cut into, >= 1.
        in_place: Whether the root's output is its own shard of its input buffer.

    Returns:
        The collective; its bytes are those of the root's input buffer.
    """
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


def Permute(ranks: Ranks, pairs: Sequence[tuple[int, int]], *, chunks: int = 1, in_place: bool = False) -> Collective:
    """Send and receive: for each pair (src, dst), rank dst ends with the tensor of rank src. ``[(0, 1)]`` is one send.

    Args:
        ranks: How many ranks take part, or the device of each.
        pairs: (src, dst) ranks, at least one; no rank sends twice or receives twice.
        chunks: How many chunks a tensor is cut into, >= 1.
        in_place: Whether input and output are the same buffer.

    Returns:
        The collective; its bytes are those of one tensor.

    Raises:
        InvalidInput: A rank is out of range, sends twice or receives twice.
    """
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
