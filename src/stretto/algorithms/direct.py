# SPDX-License-Identifier: Apache-2.0
"""Direct (all-pairs, star): every byte goes straight from where it is to where it is wanted.

One latency (two for the two-step all-reduce), so it wins for small messages and wherever every pair of
ranks has a link of its own; on a shared port the n-1 messages queue. Rank r sends to r+1, r+2, ... in
that order, so that no receiver is everybody's first.

Cost with a link per pair: all-gather, reduce-scatter, all-to-all, gather, scatter ``alpha + beta S/n``;
permute, broadcast, reduce ``alpha + beta S``; all-reduce with ``steps=2`` ``2 (alpha + beta S/n)``
(scatter the sums, gather them), with ``steps=1`` ``alpha + beta S`` (everybody sends everything). On one
port per rank the same with n-1 messages in a row. Any n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ..collectives import COLLECTIVES, ROOTED, AllToAllV, Collective, Permute
from ..errors import InvalidInput
from ..programs.ir import Program
from .base import Algorithm, Ints, Ranks, Steps, choose, devices_of, each_to_each, label, placement, unless

KINDS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "all_to_all_v",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "permute",
)
MAX_ALL_REDUCE = 512


def direct(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 1,
    root: int = 0,
    in_place: bool = False,
    steps: int = 2,
    pairs: Sequence[tuple[int, int]] | None = None,
    counts: Sequence[Sequence[float]] | None = None,
) -> Program:
    """Send every byte straight from where it is to where it is wanted.

    Args:
        kind: Any collective of the library.
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces each shard (or tensor) is cut into, >= 1.
        root: The root's rank, for rooted collectives.
        in_place: Whether input and output share memory.
        steps: For all-reduce only: 2 sums shards and gathers the sums, 1 sends everything to everybody.
        pairs: For permute only: the (src, dst) ranks; each rank sends to the next when not given.
        counts: For all-to-all-v only: ``counts[r][q]`` is how much r sends to q; all equal when not given.

    Returns:
        The program.

    Raises:
        InvalidInput: An option is out of range, or an all-reduce has more than `MAX_ALL_REDUCE` ranks.

    >>> direct("all_to_all", 4).num_transfers
    12
    """
    choose("collective for direct", kind, KINDS)
    choose("steps", steps, (1, 2))
    devices = devices_of(ranks, chunks, each_to_each)
    n = len(devices)
    refused = _refusal(kind, n)
    if refused:
        raise InvalidInput(f"ranks: {refused}")
    built = Steps()
    name = label("direct", chunks=unless(1, chunks), steps=unless(2, steps))
    if kind in ("permute", "all_to_all_v"):
        if kind == "permute":
            return built.program(name, _permute(built, devices, chunks, pairs, in_place))
        return built.program(name, _all_to_all_v(built, devices, chunks, counts, in_place))
    piece = np.arange(chunks)[:, None, None]
    if kind in ROOTED:
        other = np.arange(1, n)
        ends = (other, 0) if kind in ("reduce", "gather") else (0, other)
        shard = other[:, None] if kind in ("gather", "scatter") else 0
        chunk = shard * chunks + piece
        built.add(src=ends[0], dst=ends[1], step=piece[..., 0], chunk=chunk, reduce=kind == "reduce")
        collective = COLLECTIVES[kind](devices, root=root, chunks=chunks, in_place=in_place)
        return built.program(name, collective, placement(n, None, root))
    _everyone(built, kind, n, chunks, steps)
    pieces = chunks * n if kind == "all_reduce" and steps == 2 else chunks
    return built.program(name, COLLECTIVES[kind](devices, chunks=pieces, in_place=in_place))


def _everyone(built: Steps, kind: str, n: int, chunks: int, steps: int) -> None:
    src = np.arange(n)
    dst = (src + np.arange(1, n)[:, None]) % n
    piece = np.arange(chunks)[:, None, None]

    def add(shard: Ints | int, start: int = 0, reduce: bool = False) -> None:
        chunk = np.asarray(shard * chunks + piece)[..., None]
        built.add(src=src, dst=dst, step=start + 2 * piece, chunk=chunk, reduce=reduce)

    phases: dict[str, Callable[[], None]] = {
        "all_gather": lambda: add(src),
        "reduce_scatter": lambda: add(dst, reduce=True),
        "all_to_all": lambda: add(src * n + dst),
        "all_reduce": lambda: add(0, reduce=True),
    }
    if kind == "all_reduce" and steps == 2:
        phases["reduce_scatter"]()
        add(src, start=3)  # The sum of a piece is sent after the next piece, which hides the time of the reduction.
    else:
        phases[kind]()


def _permute(
    built: Steps, devices: tuple[int, ...], chunks: int, pairs: Sequence[tuple[int, int]] | None, in_place: bool
) -> Collective:
    n = len(devices)
    moves = [(r, (r + 1) % n) for r in range(n)] if pairs is None else list(pairs)
    collective = Permute(devices, moves, chunks=chunks, in_place=in_place)
    ends = np.asarray(moves, np.int64)
    away = np.flatnonzero(ends[:, 0] != ends[:, 1])
    piece = np.arange(chunks)[:, None]
    chunk = (away * chunks + piece)[..., None]
    built.add(src=ends[away, 0], dst=ends[away, 1], step=piece, chunk=chunk)
    return collective


def _all_to_all_v(
    built: Steps, devices: tuple[int, ...], chunks: int, counts: Sequence[Sequence[float]] | None, in_place: bool
) -> Collective:
    n = len(devices)
    matrix = np.ones((n, n)) if counts is None else np.asarray(counts, np.float64)
    collective = AllToAllV(devices, matrix.tolist(), chunks=chunks, in_place=in_place)
    src, dst = np.nonzero(matrix > 0)
    pair = np.arange(len(src))
    away = np.flatnonzero(src != dst)
    away = away[np.argsort((dst - src)[away] % n, kind="stable")]
    piece = np.arange(chunks)[:, None]
    built.add(src=src[away], dst=dst[away], step=piece, chunk=(pair[away] * chunks + piece)[..., None])
    return collective


def _refusal(kind: str, count: int) -> str | None:
    # Every sum is read by n-1 messages that each wait for n-1 others: n^3 dependencies.
    if kind == "all_reduce" and count > MAX_ALL_REDUCE:
        return f"direct all_reduce takes at most {MAX_ALL_REDUCE} ranks, not {count}"
    return None


ALGORITHM = Algorithm(
    name="direct",
    collectives=KINDS,
    build=direct,
    refusal=_refusal,
    where=f"any number of ranks (all_reduce: at most {MAX_ALL_REDUCE})",
    summary="straight from source to destination, all pairs at once; one latency",
)
