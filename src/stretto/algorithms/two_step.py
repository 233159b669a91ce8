# SPDX-License-Identifier: Apache-2.0
"""Two-step all-to-all: first inside the host to the right rail, then along the rail to the right host.

Rank (host h, local l) hands its host-mates everything that is for their local number, on any host; then
each rank sends one message per other host, to the rank with its own local number. Messages between hosts
are as many as other hosts instead of other hosts times local ranks, and that much larger: it wins where
latency or a per-message cost between hosts counts and the links inside are fast.

Cost with L ranks on each of H hosts (n = L H) and a link per pair used: ``alpha_in + beta_in (S/n) H +
alpha_out + beta_out (S/n) L``. Any n = L H with L, H > 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..collectives import AllToAll
from ..programs.ir import Program
from .base import Algorithm, Ranks, Steps, choose, devices_of, each_to_each, label, placement, unless
from .orders import composite_refusal, host_grid, local_count

if TYPE_CHECKING:
    from ..cluster import Cluster

KINDS = ("all_to_all",)


def two_step(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 1,
    in_place: bool = False,
    local: int | None = None,
    order: Sequence[int] | None = None,
) -> Program:
    """Build an all-to-all that first moves data inside the host to the right local rank, then between hosts.

    Args:
        kind: "all_to_all".
        ranks: A rank count, or the device of each rank.
        chunks: How many pieces each shard is cut into, >= 1.
        in_place: Whether input and output share memory.
        local: How many ranks share a host, a divisor of n; near-square when not given.
        order: The ranks host by host; 0..n-1 when not given.

    Returns:
        The program.

    Raises:
        InvalidInput: `local` does not divide n, or n has no two factors > 1.

    >>> two_step("all_to_all", 8, local=4).num_transfers
    32
    """
    choose("collective for two_step", kind, KINDS)
    devices = devices_of(ranks, chunks, each_to_each)
    n = len(devices)
    inside = local_count("two_step", n, local)
    hosts = n // inside
    steps = Steps()
    piece = np.arange(chunks)[:, None]
    rank = np.arange(n)
    mate, host = rank % inside, rank // inside
    for shift in range(1, inside):
        to = (mate + shift) % inside
        shard = (rank * n + to)[:, None] + inside * np.arange(hosts)
        steps.add(src=rank, dst=host * inside + to, step=piece, chunk=shard * chunks + piece[..., None])
    for shift in range(1, hosts):
        to = (host + shift) % hosts * inside + mate
        shard = (host[:, None] * inside + np.arange(inside)) * n + to[:, None]
        steps.add(src=rank, dst=to, step=1 + piece, chunk=shard * chunks + piece[..., None])
    name = label("two_step", chunks=unless(1, chunks), local=inside, order=order)
    return steps.program(name, AllToAll(devices, chunks=chunks, in_place=in_place), placement(n, order))


def from_cluster(cluster: Cluster, devices: tuple[int, ...], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Suggest the hosts of a cluster as options (an `Algorithm.from_cluster`).

    Args:
        cluster: The cluster.
        devices: The device of each rank.
        chosen: The options that the user gave.

    Returns:
        `local` and, where ranks do not come host by host, `order`; empty where the user chose or hosts differ in size.
    """
    grid = None if "local" in chosen or "order" in chosen else host_grid(cluster, devices)
    return {} if grid is None else {"local": grid[0]} | ({} if grid[1] is None else {"order": grid[1]})


ALGORITHM = Algorithm(
    name="two_step",
    collectives=KINDS,
    build=two_step,
    from_cluster=from_cluster,
    refusal=lambda kind, count: composite_refusal("two_step", count),
    where="ranks = local x hosts, both > 1",
    summary="inside the host to the right rail, then one message per other host",
)
