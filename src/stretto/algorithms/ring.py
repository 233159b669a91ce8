# SPDX-License-Identifier: Apache-2.0
"""Ring all-gather, reduce-scatter and all-reduce.

Every rank sends to its successor only; after n-1 hops each shard has been everywhere. Bandwidth-optimal,
with one neighbour per direction, so it wins for large messages and on any network that has a ring; its
n-1 latencies make it slow for small ones.

Cost, S bytes over n ranks (nbytes as `Collective` defines it), k chunks per shard: one direction:
all-gather, reduce-scatter ``(n-1) (k alpha + beta S/n)``; all-reduce twice that. Two directions: each
shard travels both ways and stops halfway, ``floor(n/2)`` hops and ``beta S (n-1)/(2n)`` per link; where n
is even, the two halves of a shard reach the farthest rank from different sides. R rings on different
links carry 1/R each. Defined for any n.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collectives import COLLECTIVES
from ..errors import InvalidInput
from ..programs.ir import Program
from .base import Algorithm, Ints, Ranks, Steps, choose, devices_of, label, placement, unless
from .orders import fast_orders

if TYPE_CHECKING:
    from ..cluster import Cluster

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
MAX_SEARCHED_RINGS = 256


def ring(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 1,
    in_place: bool = False,
    directions: int = 1,
    rings: int = 1,
    strides: Sequence[int] | None = None,
    order: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Program:
    """Build a program over one or several rings.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces of a shard each ring carries, >= 1 (twice as many in two directions where n is even).
        in_place: Whether input and output share memory.
        directions: 1, or 2 for shards that travel both ways round and stop halfway.
        rings: How many rings share the data, >= 1.
        strides: The step of each ring through `order`, coprime to n; the smallest such numbers when not given.
        order: The ranks along the ring, or a list of such lists, one per ring; 0..n-1 when not given.

    Returns:
        The program.

    Raises:
        InvalidInput: A stride shares a factor with n, or rings, strides and order contradict each other.

    >>> ring("all_reduce", 4).num_transfers
    24
    """
    choose("collective for ring", kind, KINDS)
    choose("directions", directions, (1, 2))
    several = max(rings, len(strides or ()), len(order) if order is not None and _nested(order) else 1)
    devices = devices_of(ranks, chunks, lambda n: 2 * n * n * several)
    n = len(devices)
    orders = _orders(n, rings, strides, order, directions)
    halves = 2 if directions == 2 and n % 2 == 0 else 1
    per_shard = len(orders) * chunks * halves
    steps = Steps()
    hops = n - 1 if directions == 1 else n // 2
    scatter, gather = kind != "all_gather", kind != "reduce_scatter"
    if scatter:
        _phase(steps, orders, hops, chunks, halves, directions, 0, reduce=True)
    if gather:
        _phase(steps, orders, hops, chunks, halves, directions, scatter * hops, reduce=False)
    pieces = n * per_shard if kind == "all_reduce" else per_shard
    collective = COLLECTIVES[kind](devices, chunks=pieces, in_place=in_place)
    name = label(
        "ring",
        chunks=unless(1, chunks),
        directions=unless(1, directions),
        rings=unless(1, len(orders)),
        strides=strides,
        order=None if order is None else orders[0],
    )
    return steps.program(name, collective)


def _phase(
    steps: Steps,
    orders: Ints,
    hops: int,
    chunks: int,
    halves: int,
    directions: int,
    start: int,
    *,
    reduce: bool,
) -> None:
    rings, n = orders.shape
    position = np.arange(n)
    which = np.arange(rings)[:, None]
    turn = np.arange(directions)[:, None, None]
    piece = np.arange(chunks)[:, None, None, None]
    sign = 1 - 2 * turn
    src = orders[which, position]
    dst = orders[which, (position + sign) % n]
    first = (which * chunks + piece) * halves

    def add(hop: Ints, part: Ints | int) -> None:
        hop = hop[:, None, None, None, None]
        distance = sign * (hops - hop) if reduce else -sign * hop
        owner = orders[which, (position + distance) % n]
        chunk = (owner * (rings * chunks * halves) + first)[..., None] + part
        steps.add(
            src=src,
            dst=dst,
            chunk=chunk,
            step=(start + hop) * chunks + piece,
            reduce=reduce,
            lane=which * directions + turn,
        )

    whole = np.arange(halves)
    if halves == 1:
        add(np.arange(hops), whole)
        return
    # The farthest rank gets (or, in a reduction, gives) one half of a shard on either side: the last hop of a gather
    # and the first hop of a reduction carry halves.
    half = turn[..., None]
    if reduce:
        add(np.arange(1), half)
        add(np.arange(1, hops), whole)
    else:
        add(np.arange(hops - 1), whole)
        add(np.arange(hops - 1, hops), half)


def _orders(
    n: int,
    rings: int,
    strides: Sequence[int] | None,
    order: Sequence[int] | Sequence[Sequence[int]] | None,
    directions: int,
) -> Ints:
    if rings < 1:
        raise InvalidInput(f"rings: must be >= 1, not {rings}")
    if order is not None and _nested(order):
        several = [placement(n, one) for one in order]  # type: ignore[arg-type]
        if strides is not None or rings not in (1, len(several)):
            raise InvalidInput(f"order: gives {len(several)} rings, so leave out rings and strides")
        return np.stack(several)
    single = placement(n, order)  # type: ignore[arg-type]
    if strides is None:
        # The ring of stride n-s is the ring of stride s backwards; with two directions it is in use already.
        last = n // 2 if directions == 2 else n - 1
        usable = [s for s in range(1, max(last, 1) + 1) if math.gcd(s, n) == 1] or [1]
        strides = [usable[i % len(usable)] for i in range(rings)]
    elif rings not in (1, len(strides)):
        raise InvalidInput(f"strides: gives {len(strides)} rings, so leave out rings")
    for at, stride in enumerate(strides):
        if math.gcd(stride, n) != 1:
            raise InvalidInput(f"strides[{at}]: {stride} and {n} ranks share a factor: not one ring")
    place = np.asarray(strides, np.int64)[:, None] * np.arange(n) % n
    return np.asarray(single[place])


def _nested(order: Sequence[int] | Sequence[Sequence[int]] | None) -> bool:
    return order is not None and len(order) > 0 and isinstance(order[0], Sequence)


def _from_cluster(cluster: Cluster, devices: tuple[int, ...], chosen: Mapping[str, Any]) -> dict[str, Any]:
    if "order" in chosen or "strides" in chosen:
        return {}
    rings = int(chosen.get("rings", 1))
    if rings > MAX_SEARCHED_RINGS:
        raise InvalidInput(f"rings: at most {MAX_SEARCHED_RINGS} are laid out on a cluster, not {rings}")
    orders = fast_orders(cluster, devices, rings=rings)
    if orders is None:
        return {}
    return {"order": orders[0] if len(orders) == 1 else orders}


ALGORITHM = Algorithm(
    name="ring",
    collectives=KINDS,
    build=ring,
    from_cluster=_from_cluster,
    where="any number of ranks",
    summary="each rank sends to its neighbour; the least bytes per link, n-1 latencies",
)
