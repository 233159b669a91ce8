# SPDX-License-Identifier: Apache-2.0
"""NCCL's usual ring: one ring per NIC, a line through the GPUs of each host, host after host.

NCCL (``src/graph/search.cc``, ``connect.cc``) searches a path NIC, GPU, ..., GPU, NIC inside a host for each channel,
and joins the paths of all hosts, host 0 to host 1 and so on. Here each ring enters the hosts at another GPU, so that
every NIC carries one ring each way; inside one host there is one ring along the fastest links. NCCL also runs several
channels on the same links and has protocols of lower latency and rate (LL, LL128); both are left out, which is to its
advantage here: it pays the latency of the link alone, at the full rate.

Cost, S bytes over n ranks, R rings: all-gather, reduce-scatter ``(n-1) (alpha + beta S/(n R))`` on the slowest link,
all-reduce twice that. Defined for any n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..programs.ir import Program
from .base import Algorithm, Ranks
from .orders import MAX_SEARCHED, fast_orders, has_direct_links, host_lines, rail_orders, rails
from .ring import KINDS, ring

if TYPE_CHECKING:
    from ..cluster import Cluster


def nccl_ring(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 1,
    in_place: bool = False,
    order: Sequence[int] | Sequence[Sequence[int]] | None = None,
) -> Program:
    """Build NCCL's ring, or its rings where there are several NICs.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces of a shard each ring carries, >= 1.
        in_place: Whether input and output share memory.
        order: The ranks along the ring, or a list of such lists, one per NIC; 0..n-1 when not given.

    Returns:
        The program.

    Raises:
        InvalidInput: An order does not name every rank once.

    >>> nccl_ring("all_reduce", 4).num_transfers
    24
    """
    made = ring(kind, ranks, chunks=chunks, in_place=in_place, order=order)
    return made.replace(name=f"nccl_{made.name}"[:63])


def _from_cluster(cluster: Cluster, devices: tuple[int, ...], chosen: Mapping[str, Any]) -> dict[str, Any]:
    if "order" in chosen:
        return {}
    rings = rails(cluster, devices)
    orders = fast_orders(cluster, devices, rings=rings)
    if orders is None and len(devices) > MAX_SEARCHED:
        direct = has_direct_links(cluster, devices)
        orders = host_lines(cluster, devices, rings)[1] if direct else rail_orders(cluster, devices, rings)
    if orders is None:
        return {}
    return {"order": orders[0] if len(orders) == 1 else orders}


ALGORITHM = Algorithm(
    name="nccl_ring",
    collectives=KINDS,
    build=nccl_ring,
    from_cluster=_from_cluster,
    where="any number of ranks",
    summary="NCCL's usual rings: one per NIC, through the GPUs of a host and on to the next host",
)
