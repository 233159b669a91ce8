# SPDX-License-Identifier: Apache-2.0
"""Swing: exchange halves with partners that swing to both sides of a ring, 1, -1, 3, -5, 11, ... away.

The messages and bytes of halving-doubling, but on a ring or torus the large messages go to neighbors, and the partner
in round s is about 2^(s+1)/3 hops away where halving-doubling's is 2^s. With `ports` several exchanges run at once,
each with its share of the data: on a torus of D dimensions they begin in each dimension and in both directions, so that
all 2D links of a rank work (De Sensi et al., Swing: Short-cutting Rings for Higher Bandwidth Allreduce, NSDI 2024).

Cost with a link per pair: ``L alpha + beta S (n-1)/n`` for all-gather and reduce-scatter, twice that for all-reduce,
with L = log2 n. Powers of two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
    placement,
    unless,
)

if TYPE_CHECKING:
    from ..cluster import Cluster

KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def swing(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 1,
    in_place: bool = False,
    dims: Sequence[int] | None = None,
    ports: int = 1,
    order: Sequence[int] | None = None,
) -> Program:
    """Build Swing on a ring, or on a torus with rank ``c0 + dims[0] (c1 + dims[1] (c2 + ...))`` at (c0, c1, c2, ...).

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        ranks: A rank count, a power of two, or the device of each rank.
        chunks: How many pieces flow through each exchange, >= 1.
        in_place: Whether inputs and outputs share memory.
        dims: The sides of the torus, the innermost first, each a power of two; one ring when not given.
        ports: How many exchanges run at once, 1..2 len(dims).
        order: The rank at each position of the ring or torus; 0..n-1 when not given.

    Returns:
        The program.

    Raises:
        InvalidInput: The ranks or a side are no power of two, or `ports` is out of range.

    >>> swing("all_reduce", 8).num_transfers
    48
    >>> swing("all_gather", 16, dims=(4, 4), ports=4).name
    'swing(dims=4.4,ports=4)'
    """
    choose("collective for swing", kind, KINDS)
    devices = devices_of(ranks, chunks, lambda count: max(ports, 1) * each_to_each(count))
    n = len(devices)
    sides = (n,) if dims is None else tuple(int(side) for side in dims)
    _check(kind, n, sides, ports)
    pieces = chunks * ports
    steps = Steps()
    for port in range(ports):
        partners = _partners(n, sides, first=port // 2, mirrored=port % 2 == 1)
        _add_port(steps, kind, partners, np.arange(port * chunks, (port + 1) * chunks), pieces)
    name = label("swing", chunks=unless(1, chunks), dims=dims, ports=unless(1, ports), order=order)
    per_rank = n * pieces if kind == "all_reduce" else pieces
    return steps.program(name, COLLECTIVES[kind](devices, chunks=per_rank, in_place=in_place), placement(n, order))


def _check(kind: str, count: int, sides: tuple[int, ...], ports: int) -> None:
    reason = _refusal(kind, count)
    if reason is not None:
        raise InvalidInput(f"ranks: {reason}")
    if math.prod(sides) != count or not all(is_power_of_two(side) for side in sides):
        raise InvalidInput(f"dims: must be powers of two with the product {count}, not {', '.join(map(str, sides))}")
    if not 1 <= ports <= 2 * len(sides):
        raise InvalidInput(f"ports: must be 1..{2 * len(sides)} (two for each dimension), not {ports}")


def _partners(count: int, sides: tuple[int, ...], *, first: int, mirrored: bool) -> Ints:
    """The partner of each position in each round, (rounds, count): the dimensions take turns, beginning with `first`.

    The coordinate c goes to c + d for even c and c - d for odd c, with d = 1, -1, 3, -5, ...: the sums of (-2)^i.
    """
    position = np.arange(count)
    strides = np.cumprod([1, *sides[:-1]])
    turn = [(first + k) % len(sides) for k in range(len(sides))]
    rounds: list[Ints] = []
    for s in range(max(sides).bit_length() - 1):
        distance = (1 - (-2) ** (s + 1)) // 3
        for dim in turn:
            side, stride = sides[dim], int(strides[dim])
            if 2 << s <= side:
                at = position // stride % side
                sign = np.where((at % 2 == 0) != mirrored, 1, -1)
                rounds.append(position + ((at + sign * distance) % side - at) * stride)
    return np.array(rounds, np.int64).reshape(-1, count)


def _add_port(steps: Steps, kind: str, partners: Ints, piece: Ints, pieces: int) -> None:
    """Add one exchange: shards halve round by round (reduce-scatter), and double in the reverse order (all-gather)."""
    rounds, n = partners.shape
    held = np.arange(n)[:, None]  # the shards that a position still has before round s, one row per position
    sent: list[Ints] = []
    for partner in partners[::-1]:
        sent.append(held)
        held = np.concatenate([held, held[partner]], axis=1)
    position, lane = np.arange(n), int(piece[0]) // len(piece)
    gathers = 0
    if kind != "all_gather":
        gathers = rounds * len(piece)
        for s, partner in enumerate(partners):
            shards = sent[rounds - 1 - s][partner]
            for k, p in enumerate(piece):
                steps.add(
                    src=position,
                    dst=partner,
                    step=s * len(piece) + k,
                    chunk=shards * pieces + p,
                    reduce=True,
                    lane=lane,
                )
    if kind != "reduce_scatter":
        for s, partner in enumerate(partners[::-1]):
            for k, p in enumerate(piece):
                steps.add(
                    src=position, dst=partner, step=gathers + s * len(piece) + k, chunk=sent[s] * pieces + p, lane=lane
                )


def _from_cluster(cluster: Cluster, devices: tuple[int, ...], chosen: Mapping[str, Any]) -> dict[str, Any]:
    sides = tuple(dim.size for dim in cluster.dimensions)
    whole = devices == tuple(range(math.prod(sides)))
    rings = all(dim.kind == "ring" and is_power_of_two(dim.size) for dim in cluster.dimensions)
    if not sides or not whole or not rings or "dims" in chosen or "order" in chosen:
        return {}
    return {"dims": sides, **({} if "ports" in chosen else {"ports": 2 * len(sides)})}


def _refusal(kind: str, count: int) -> str | None:
    return None if is_power_of_two(count) else f"swing is defined for powers of two, not {count}"


ALGORITHM = Algorithm(
    name="swing",
    collectives=KINDS,
    build=swing,
    refusal=_refusal,
    from_cluster=_from_cluster,
    where="powers of two",
    summary="exchange halves with ranks 1, -1, 3, -5, ... away; halving-doubling with short ways on rings and tori",
)
