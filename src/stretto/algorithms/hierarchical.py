# SPDX-License-Identifier: Apache-2.0
"""Hierarchical, multi-rail reduce-scatter, all-gather and all-reduce over any number of dimensions.

Ranks form a grid (dimension 0 varies fastest: rank = c0 + d0 (c1 + d1 (c2 + ...))). The reduce-scatter
goes through the dimensions one by one; after each, a rank keeps only its share, so the slow outer
dimensions carry little, and every rank of a host uses its own rail. The all-gather goes back the same
way. Inside a dimension it is a ring, direct or halving-doubling. With several chunks one dimension works
while the next does, too.

Cost, one chunk, ring inside: reduce-scatter or all-gather ``sum over i of (d_i - 1) (alpha_i + beta_i S /
(d_0 ... d_i))``; all-reduce twice that. On 2 hosts of 8: ``2 (7 (alpha_0 + beta_0 S/8) + alpha_1 + beta_1
S/16)``. Direct inside pays ``alpha_i`` once (with a link per pair), halving-doubling ``log2(d_i)`` times.
Any n that is the product of the dimensions; halving-doubling only in dimensions that are powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collectives import COLLECTIVES
from ..errors import InvalidInput
from ..programs.ir import Program
from .base import (
    Algorithm,
    Ints,
    Ranks,
    Steps,
    choose,
    devices_of,
    each_to_each,
    is_power_of_two,
    label,
    near_square,
    placement,
    unless,
)
from .halving_doubling import bit_reversed, halvings
from .orders import composite_refusal, fast_orders, has_direct_links, host_grid

if TYPE_CHECKING:
    from ..cluster import Cluster, Dimension

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
INSIDE = ("ring", "direct", "halving_doubling")

Round = tuple[Ints, Ints, Ints]
"""One step in one dimension: for each message the source's coordinate, the destination's coordinate, and (along the
second axis) the coordinates whose blocks it carries."""


def hierarchical(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 1,
    in_place: bool = False,
    dims: Sequence[int] | None = None,
    inside: str | Sequence[str] = "ring",
    order: Sequence[int] | None = None,
) -> Program:
    """Build a program that exchanges dimension by dimension.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces each shard is cut into, >= 1.
        in_place: Whether input and output share memory.
        dims: The size of each dimension, the fastest varying first; their product is n. Near-square when not given.
        inside: "ring", "direct" or "halving_doubling", for all dimensions or one for each.
        order: The ranks in the order of grid positions; 0..n-1 when not given.

    Returns:
        The program.

    Raises:
        InvalidInput: `dims` do not make n ranks, or halving_doubling is asked for in a dimension of another size.

    >>> hierarchical("all_reduce", 16, dims=(8, 2)).num_transfers
    256
    """
    choose("collective for hierarchical", kind, KINDS)
    devices = devices_of(ranks, chunks, each_to_each)
    n = len(devices)
    sizes = _sizes(n, dims)
    schemes = scheme_of_each(sizes, inside)
    weights, piece = _numbering(kind, n, sizes, schemes, chunks)
    stages, longest, every = phases(kind, sizes, schemes)
    steps = Steps()
    for stage, (dim, rounds, reduce) in enumerate(stages):
        _add_stage(steps, sizes, weights, piece, dim, rounds, stage * longest, every, reduce=reduce)
    pieces = chunks * n if kind == "all_reduce" else chunks
    collective = COLLECTIVES[kind](devices, chunks=pieces, in_place=in_place)
    name = label(
        "hierarchical",
        chunks=unless(1, chunks),
        dims="x".join(map(str, sizes)),
        inside=unless("ring", inside),
        order=order,
    )
    return steps.program(name, collective, placement(n, order))


def phases(
    kind: str, sizes: Sequence[int], schemes: Sequence[str]
) -> tuple[list[tuple[int, list[Round], bool]], int, int]:
    """The stages of a hierarchical program, one dimension each.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        sizes: The size of each dimension.
        schemes: The algorithm inside each dimension, from `scheme_of_each`.

    Returns:
        The stages as (dimension, rounds, whether they reduce), the number of steps reserved for a stage, and the
        number of steps by which one piece follows another.
    """
    found = []
    if kind != "all_gather":
        found += [(d, _reduce_scatter_rounds(schemes[d], sizes[d]), True) for d in range(len(sizes))]
    if kind != "reduce_scatter":
        found += [(d, _all_gather_rounds(schemes[d], sizes[d]), False) for d in reversed(range(len(sizes)))]
    longest = max((len(rounds) for _, rounds, _ in found), default=0)
    # In an all-reduce a dimension serves a piece twice, the second time an odd number of stages later.
    return found, longest, longest * (2 if kind == "all_reduce" else 1)


def _add_stage(
    steps: Steps,
    sizes: Sequence[int],
    weights: Sequence[Ints],
    piece: Ints,
    dim: int,
    rounds: list[Round],
    first: int,
    every: int,
    *,
    reduce: bool,
) -> None:
    """Add one dimension's exchange in all lines of ranks along it at once; each piece follows `every` steps later."""
    strides = [math.prod(sizes[:d]) for d in range(len(sizes))]
    others = [d for d in range(len(sizes)) if d != dim]
    line = sums(np.arange(sizes[d]) * strides[d] for d in others)
    # A rank handles the blocks whose coordinates equal its own in the dimensions before `dim` (already reduced, or
    # not gathered yet); in the dimensions after `dim` their coordinates take all values.
    fixed = sums(weights[d] * (d < dim) for d in others)
    free = sums(weights[dim + 1 :])
    later = every * np.arange(len(piece))[:, None, None]
    for at, (src, dst, blocks) in enumerate(rounds):
        mine = (weights[dim][blocks][:, :, None] + free).reshape(len(src), 1, -1)
        chunk = piece[:, None, None, None] + fixed[:, None] + mine
        steps.add(
            src=src[:, None] * strides[dim] + line,
            dst=dst[:, None] * strides[dim] + line,
            step=first + at + later,
            chunk=chunk,
            reduce=reduce,
        )


def _reduce_scatter_rounds(scheme: str, size: int) -> list[Round]:
    at = np.arange(size)
    if scheme == "ring":
        return [(at, (at + 1) % size, ((at - s - 1) % size)[:, None]) for s in range(size - 1)]
    if scheme == "direct":
        to = (at + np.arange(1, size)[:, None]) % size
        return [(np.tile(at, size - 1), to.ravel(), to.reshape(-1, 1))] if size > 1 else []
    return [(at, partner, sent) for partner, sent in halvings(size, range(size.bit_length() - 1))]


def _all_gather_rounds(scheme: str, size: int) -> list[Round]:
    if scheme == "ring":
        at = np.arange(size)
        return [(at, (at + 1) % size, ((at - s) % size)[:, None]) for s in range(size - 1)]
    return [(dst, src, blocks) for src, dst, blocks in reversed(_reduce_scatter_rounds(scheme, size))]


def _numbering(kind: str, n: int, sizes: Sequence[int], schemes: Sequence[str], chunks: int) -> tuple[list[Ints], Ints]:
    """For each dimension and for the pieces: what each coordinate, and each piece, adds to the number of a chunk."""
    if kind != "all_reduce":
        strides = [math.prod(sizes[:d]) for d in range(len(sizes))]
        return [np.arange(z) * s * chunks for z, s in zip(sizes, strides, strict=True)], np.arange(chunks)
    # The blocks of an all-reduce may be numbered freely; they are numbered so that each message is contiguous.
    names = [
        bit_reversed(size) if scheme == "halving_doubling" else np.arange(size)
        for size, scheme in zip(sizes, schemes, strict=True)
    ]
    return [name * math.prod(sizes[d + 1 :]) for d, name in enumerate(names)], np.arange(chunks) * n


def sums(terms: Iterable[Ints]) -> Ints:
    """Every sum of one number from each term, the first term varying fastest."""
    total = np.zeros(1, np.int64)
    for term in terms:
        total = (term[:, None] + total).ravel()
    return total


def _sizes(n: int, dims: Sequence[int] | None) -> tuple[int, ...]:
    if dims is None:
        refused = composite_refusal("hierarchical", n)
        if refused:
            raise InvalidInput(f"ranks: {refused}")
        return n // near_square(n), near_square(n)
    sizes = tuple(int(d) for d in dims)
    if not sizes or min(sizes) < 1 or math.prod(sizes) != n:
        raise InvalidInput(f"dims: {'x'.join(map(str, sizes)) or 'none'} does not make {n} ranks")
    return sizes


def scheme_of_each(sizes: Sequence[int], inside: str | Sequence[str]) -> list[str]:
    """The name of the algorithm inside each dimension, checked against the sizes."""
    schemes = [inside] * len(sizes) if isinstance(inside, str) else list(inside)
    if len(schemes) != len(sizes):
        raise InvalidInput(f"inside: needs one name, or one per dimension ({len(sizes)}), not {len(schemes)}")
    for at, (scheme, size) in enumerate(zip(schemes, sizes, strict=True)):
        choose("inside", scheme, INSIDE)
        if scheme == "halving_doubling" and not is_power_of_two(size):
            raise InvalidInput(f"inside[{at}]: halving_doubling needs a power of two, not {size} ranks")
    return schemes


def suited_to(dimensions: Sequence[Dimension]) -> tuple[str, ...]:
    """The name of the algorithm that suits each dimension's wiring (ring, direct or halving_doubling)."""
    best = {"ring": "ring", "fully_connected": "direct", "switch": "halving_doubling"}
    schemes = (best[d.kind] for d in dimensions)
    return tuple(
        "ring" if scheme == "halving_doubling" and not is_power_of_two(d.size) else scheme
        for scheme, d in zip(schemes, dimensions, strict=True)
    )


def _from_cluster(cluster: Cluster, devices: tuple[int, ...], chosen: Mapping[str, Any]) -> dict[str, Any]:
    if "dims" in chosen or "order" in chosen:
        return {}
    if cluster.dimensions and devices == tuple(range(cluster.num_devices)):
        inside: dict[str, Any] = {} if "inside" in chosen else {"inside": suited_to(cluster.dimensions)}
        return {"dims": tuple(d.size for d in cluster.dimensions)} | inside
    grid = host_grid(cluster, devices)
    if grid is None:
        return {}
    local, order = grid
    dims = (local, len(devices) // local)
    fast = fast_orders(cluster, devices)
    if fast is not None and _host_aligned(cluster, devices, fast[0], local):
        order = fast[0]
    suggested: dict[str, Any] = {"dims": dims}
    if order is not None:
        suggested["order"] = order
    # Through a switch all partners are equally near; direct links inside a host want a ring along them.
    if "inside" not in chosen and not has_direct_links(cluster, devices) and all(map(is_power_of_two, dims)):
        suggested["inside"] = "halving_doubling"
    return suggested


def _host_aligned(cluster: Cluster, devices: tuple[int, ...], order: Sequence[int], local: int) -> bool:
    hosts = cluster.node_host[np.asarray(devices)[np.asarray(order)]].reshape(-1, local)
    return bool(np.all(hosts == hosts[:, :1]))


ALGORITHM = Algorithm(
    name="hierarchical",
    collectives=KINDS,
    build=hierarchical,
    from_cluster=_from_cluster,
    refusal=lambda kind, count: composite_refusal("hierarchical", count),
    where="ranks = product of dims (default: two factors > 1)",
    summary="dimension by dimension, inner first: slow outer dimensions carry only a share, on every rail",
)
