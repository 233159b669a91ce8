# SPDX-License-Identifier: Apache-2.0
"""NCCL's tree: a double binary tree between hosts, a chain inside each host, one pair of trees per NIC.

NCCL (``src/graph/trees.cc``, ``connect.cc``): every channel has a chain of the GPUs of a host, which begins at the GPU
next to its NIC. The hosts form a binary tree in which odd hosts are leaves, and a second one that is its mirror image
(an even number of hosts) or is shifted by one (odd); half of the channels take each. The first GPU of a chain talks to
the parent host. The children of a host talk to its first GPU (``tree``), to its first two, one each (``balanced``), or
both to its second (``split``). NCCL tries ``balanced`` first and takes ``tree`` where that has more bandwidth; where
hosts are joined by rails, ``tree`` stays on them. On one host only the chain remains. NCCL has this algorithm for
all-reduces alone; its all-gathers and reduce-scatters are rings.

Cost with k pieces per tree, hosts of m ranks, H hosts, R NICs, and alpha, beta of the slowest link, which a host with
two children uses twice each way: about ``(2 (m - 1 + log2 H) + k - 1) (alpha + beta S/(R k))``. Any n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collectives import AllReduce
from ..errors import InvalidInput
from ..programs.ir import Program
from .base import Algorithm, Ints, Ranks, Steps, choose, devices_of, label, placement, unless
from .orders import host_lines, rails
from .trees import add_tree, depths

if TYPE_CHECKING:
    from ..cluster import Cluster

KINDS = ("all_reduce",)
PATTERNS = {"tree": (0, 0), "balanced": (1, 0), "split": (1, 1)}
"""The positions in a host's chain that its first and its second child talk to."""


def nccl_tree(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 8,
    in_place: bool = False,
    hosts: Sequence[int] | None = None,
    order: Sequence[int] | Sequence[Sequence[int]] | None = None,
    pattern: str = "tree",
) -> Program:
    """Build two trees for each NIC, which share the data equally.

    Args:
        kind: "all_reduce".
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces flow through each tree, >= 1.
        in_place: Whether input and output share memory.
        hosts: How many ranks each host has, in the order of `order`; one host when not given.
        order: The ranks host by host, each host's along its chain, or a list of such lists, one per NIC.
        pattern: "tree", "balanced" or "split".

    Returns:
        The program.

    Raises:
        InvalidInput: `hosts` do not make n ranks, an order does not name every rank once, or the pattern is unknown.

    >>> nccl_tree("all_reduce", 8, hosts=(4, 4), chunks=1).num_transfers
    28
    """
    choose("collective for nccl_tree", kind, KINDS)
    choose("pattern", pattern, tuple(PATTERNS))
    several = order is not None and len(order) > 0 and isinstance(order[0], Sequence)
    given: Sequence[Any] = order if several and order is not None else [order]
    devices = devices_of(ranks, chunks, lambda n: 4 * n * len(given))
    n = len(devices)
    sizes = _sizes(n, hosts)
    orders = [placement(n, one) for one in given]
    steps = Steps()
    for at, parent in enumerate(_trees(sizes, orders, pattern)):
        add_tree(steps, kind, parent, depths(parent) - 1, chunks=chunks, first_chunk=at * chunks, lane=at)
    collective = AllReduce(devices, chunks=2 * len(orders) * chunks, in_place=in_place)
    name = label(
        "nccl_tree",
        chunks=unless(8, chunks),
        hosts=unless((n,), sizes),
        nics=unless(1, len(orders)),
        pattern=unless("tree", pattern),
        order=None if order is None else orders[0],
    )
    return steps.program(name, collective)


def host_tree(count: int) -> tuple[Ints, Ints]:
    """NCCL's binary tree over hosts: the parent of each, and whether it is its parent's first (0) or second child.

    >>> [part.tolist() for part in host_tree(6)]
    [[-1, 2, 4, 2, 0, 4], [-1, 0, 0, 1, 1, 1]]
    """
    host = np.arange(count)
    low = host & -host
    above = (host ^ low) | low << 1
    parent = np.where(above < count, above, host ^ low)
    parent[:1] = -1
    return parent, np.where(parent < 0, -1, (host > parent).astype(np.int64))


def _second(count: int) -> tuple[Ints, Ints]:
    """The second tree: the mirror image for an even number of hosts, else shifted by one host."""
    parent, child = host_tree(count)
    host = np.arange(count)
    place, back = (count - 1 - host, count - 1 - parent) if count % 2 == 0 else ((host - 1) % count, parent + 1)
    renamed = np.where(parent < 0, -1, back % max(count, 1))
    return renamed[place], child[place]


def _trees(sizes: Sequence[int], orders: Sequence[Ints], pattern: str) -> list[Ints]:
    """The parent of each rank in every tree: both trees of the first NIC, then those of the next."""
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    found = []
    for order in orders:
        for above, child in (host_tree(len(sizes)), _second(len(sizes))):
            parent = np.full(len(order), -1)
            for host, size in enumerate(sizes):
                chain = order[first[host] : first[host] + size]
                parent[chain[1:]] = chain[:-1]
                if above[host] >= 0:
                    at = min(PATTERNS[pattern][child[host]], sizes[above[host]] - 1)
                    parent[chain[0]] = order[first[above[host]] + at]
            found.append(parent)
    return found


def _sizes(n: int, hosts: Sequence[int] | None) -> tuple[int, ...]:
    sizes = (n,) if hosts is None else tuple(hosts)
    if not sizes or min(sizes) < 1 or sum(sizes) != n:
        raise InvalidInput(f"hosts: {','.join(map(str, sizes)) or 'none'} do not make {n} ranks")
    return sizes


def _from_cluster(cluster: Cluster, devices: tuple[int, ...], chosen: Mapping[str, Any]) -> dict[str, Any]:
    if "order" in chosen or "hosts" in chosen:
        return {}
    sizes, orders = host_lines(cluster, devices, rails(cluster, devices))
    return {"hosts": sizes, "order": orders}


ALGORITHM = Algorithm(
    name="nccl_tree",
    collectives=KINDS,
    build=nccl_tree,
    from_cluster=_from_cluster,
    where="any number of ranks",
    summary="NCCL's trees: a double binary tree between hosts for each NIC, a chain inside each host",
)
