# SPDX-License-Identifier: Apache-2.0
"""Chain broadcast and reduce, pipelined: each rank passes piece after piece to the next.

A chain is bandwidth-optimal for many pieces and needs only a single line of fast links, but n-1 latencies pass before
the last rank receives anything.

Cost with k chunks: ``(n - 2 + k) (alpha + beta S/k)``. Any n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collectives import COLLECTIVES
from ..programs.ir import Program
from .base import Algorithm, Ranks, Steps, choose, devices_of, label, placement, unless
from .orders import fast_orders
from .trees import add_tree

if TYPE_CHECKING:
    from ..cluster import Cluster

KINDS = ("broadcast", "reduce")


def chain(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 8,
    root: int = 0,
    in_place: bool = False,
    order: Sequence[int] | None = None,
) -> Program:
    """Build a chain from rank to rank along `order`, beginning (or, for a reduce, ending) at the root.

    Args:
        kind: "broadcast" or "reduce".
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces flow through the chain, >= 1.
        root: The root's rank.
        in_place: Whether the root's input and output share memory.
        order: The ranks along the chain, rotated so that the root comes first; 0..n-1 when not given.

    Returns:
        The program.

    >>> chain("broadcast", 4, chunks=2).num_transfers
    6
    """
    choose("collective for chain", kind, KINDS)
    devices = devices_of(ranks, chunks, lambda n: n)
    n = len(devices)
    steps = Steps()
    before = np.arange(-1, n - 1)
    add_tree(steps, kind, before, before, chunks=chunks)
    name = label("chain", chunks=unless(1, chunks), order=order)
    collective = COLLECTIVES[kind](devices, root=root, chunks=chunks, in_place=in_place)
    return steps.program(name, collective, placement(n, order, root))


def _from_cluster(cluster: Cluster, devices: tuple[int, ...], chosen: Mapping[str, Any]) -> dict[str, Any]:
    orders = None if "order" in chosen else fast_orders(cluster, devices)
    return {} if orders is None else {"order": orders[0]}


ALGORITHM = Algorithm(
    name="chain",
    collectives=KINDS,
    build=chain,
    from_cluster=_from_cluster,
    where="any number of ranks",
    summary="piece after piece from rank to rank; the least bytes per link, n-1 latencies",
)
