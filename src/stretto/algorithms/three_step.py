# SPDX-License-Identifier: Apache-2.0
"""Three-step all-to-all: gather inside the host, one message per pair of hosts, scatter there.

For every pair of hosts one rank on either side is the gateway (the same local number on both, so rails
stay rails, and spread over the local ranks). It collects everything its host has for the other one and
sends it in a single message. The fewest messages between hosts of all: for small messages, or networks
with a high cost per message.

Cost with L ranks on each of H <= L hosts (n = L H) and a link per pair used: ``alpha_in + beta_in (S/n)
(L + 1) + alpha_out + beta_out (S/n) L^2 + alpha_in + beta_in (S/n) L``. Any n = L H with L, H > 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..collectives import AllToAll
from ..programs.ir import Program
from .base import Algorithm, Ints, Ranks, Steps, choose, devices_of, each_to_each, label, placement, unless
from .orders import composite_refusal, local_count
from .two_step import from_cluster

KINDS = ("all_to_all",)


def three_step(
    kind: str,
    ranks: Ranks,
    *,
    chunks: int = 1,
    in_place: bool = False,
    local: int | None = None,
    order: Sequence[int] | None = None,
) -> Program:
    """Build an all-to-all that gathers inside the host, exchanges between hosts and scatters there.

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

    >>> three_step("all_to_all", 8, local=4).num_transfers
    32
    """
    choose("collective for three_step", kind, KINDS)
    devices = devices_of(ranks, chunks, each_to_each)
    n = len(devices)
    inside = local_count("three_step", n, local)
    hosts = n // inside
    steps = Steps()
    host = np.arange(hosts)
    mates = np.arange(inside)
    ranks_of = host[:, None] * inside + mates
    gateway = (host[:, None] + host) % inside
    away = host[:, None] != host

    def add(step: int, src: Ints, dst: Ints, shard: Ints) -> None:
        # Ranks of a host exchange in steps 0 and 3; with two steps per piece, a connection never serves both at once.
        table = shard.reshape(*src.shape, -1)
        one = np.arange(chunks).reshape(-1, *([1] * table.ndim))
        chunk = np.where(table < 0, -1, table * chunks + one)
        steps.add(src=src, dst=dst, step=step + 2 * one[..., 0], chunk=chunk)

    for shift in range(1, inside):
        to = (mates + shift) % inside
        # Axes: host, local rank, other host, local rank there. True where local rank `to` passes the shard on.
        passes = (away[:, None, :] & (gateway[:, None, :] == to[:, None]))[..., None]
        mine = ranks_of[:, :, None, None] * n + ranks_of
        passed = np.where(passes, mine, -1).reshape(hosts, inside, -1)
        its_own = (ranks_of * n + ranks_of[:, to])[..., None]
        add(0, ranks_of, ranks_of[:, to], np.concatenate([its_own, passed], axis=-1))
    for shift in range(1, hosts):
        other = (host + shift) % hosts
        via = gateway[host, other]
        all_of_it = ranks_of[:, :, None] * n + ranks_of[other][:, None, :]
        add(1, ranks_of[host, via], ranks_of[other, via], all_of_it)
    for shift in range(1, inside):
        to = (mates + shift) % inside
        # Axes: host, local rank (the gateway), host of origin, local rank there. True where the shard came through it.
        came = (away[:, None, :] & (gateway[:, None, :] == mates[:, None]))[..., None]
        shard = ranks_of * n + ranks_of[:, to][:, :, None, None]
        add(3, ranks_of, ranks_of[:, to], np.where(came, shard, -1))
    name = label("three_step", chunks=unless(1, chunks), local=inside, order=order)
    return steps.program(name, AllToAll(devices, chunks=chunks, in_place=in_place), placement(n, order))


ALGORITHM = Algorithm(
    name="three_step",
    collectives=KINDS,
    build=three_step,
    from_cluster=from_cluster,
    refusal=lambda kind, count: composite_refusal("three_step", count),
    where="ranks = local x hosts, both > 1",
    summary="gather inside the host, one message per pair of hosts, scatter",
)
