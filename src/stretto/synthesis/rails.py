# SPDX-License-Identifier: Apache-2.0
"""All-reduce on equal hosts with rails: most pieces take two hops between hosts, some take one.

Every rank adds up its host's share of a piece. Then either one host of the rail adds up all of them and sends the sum
back, which takes two hops and few bytes, or everybody sends to everybody, which takes one hop and more bytes. After the
first hop of the first pieces rails would idle until their sums are there: pieces that take one hop fill that gap, and
the last pieces that take two hops start sooner. Results that were added up here, that came back, and of one hop are
spread over connections of their own, so that none waits for another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..collectives import AllReduce, Collective
from ..errors import Infeasible
from ..programs import Program
from ..simulator import simulate
from .exchange import hop_us

MAX_TRANSFERS = 150_000
FIRST_PIECES = 32
SHARES = tuple(Fraction(k, 24) for k in range(6))
"""The shares of the pieces that take one hop, as they are tried first."""
FINER = Fraction(1, 48)
"""How far from the best share others are tried with finer pieces."""
WORTH_IT = 0.998

Ints = NDArray[np.int64]
Progress = Callable[[str, float], None]


def synthesize(
    collective: Collective,
    cluster: Cluster,
    *,
    nbytes: float,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    alpha: str = "pipelined",
    max_transfers: int = MAX_TRANSFERS,
) -> Program:
    """The fastest all-reduce of which some pieces take one hop between hosts and the others two.

    Args:
        collective: An all-reduce with the standard layout.
        cluster: The cluster; at least three hosts with equally many ranks, at least two.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search; one program is always finished.
        seed: Ignored: there is no chance involved.
        progress: Called with a line of text and the fraction done, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.
        max_transfers: The most transfers of a program with more than the fewest pieces.

    Returns:
        The verified program.

    Raises:
        Infeasible: The collective is no standard all-reduce, or the ranks form no hosts and rails.

    >>> hosts = Cluster.load("dgx_h100:3")
    >>> synthesize(AllReduce(24), hosts, nbytes=1e6, max_transfers=20_000).collective.kind
    'all_reduce'
    """
    del seed
    began = time.monotonic()
    tell = progress or (lambda message, fraction: None)
    grid = rail_grid(collective, cluster, nbytes)
    best: tuple[float, Fraction, Program] | None = None
    pieces, shares = FIRST_PIECES, list(SHARES)
    while best is None or pieces * transfers_each(grid) <= max_transfers:
        before = np.inf if best is None else best[0]
        for share in shares:
            if best is not None and time.monotonic() > began + 0.9 * budget_s:
                break
            program = rail_program(collective, grid, pieces, round(share * pieces))
            took = simulate(program, cluster, nbytes=nbytes, alpha=alpha).total_us
            tell(f"{program.name}: {took:.6g} us", min(0.9, (time.monotonic() - began) / budget_s))
            if best is None or took < best[0]:
                best = took, share, program
        assert best is not None
        if best[0] > WORTH_IT * before or time.monotonic() > began + 0.5 * budget_s:
            break
        pieces, shares = 2 * pieces, [best[1], best[1] + FINER, max(best[1] - FINER, Fraction(0))]
    best[2].verify()
    return best[2]


def rail_grid(collective: Collective, cluster: Cluster, nbytes: float = 1e6) -> Ints:
    """The ranks as a table, one row for each host and one column for each rail.

    Args:
        collective: The collective.
        cluster: The cluster.
        nbytes: The size in bytes, by which routes are chosen.

    Returns:
        The table.

    Raises:
        Infeasible: The collective is no standard all-reduce, or the ranks form no hosts and rails.
    """
    if collective.kind != "all_reduce":
        raise Infeasible(f"rails: serves all_reduce, not {collective.kind}")
    if collective != AllReduce(collective.ranks, chunks=collective.chunks, in_place=collective.in_place):
        raise Infeasible("rails: this all_reduce has a layout of its own; only the standard one is served")
    host = cluster.node_host[list(collective.ranks)]
    hosts, count = np.unique(host, return_counts=True)
    if len(hosts) < 3 or hosts.min() < 0 or count.min() != count.max() or count[0] < 2:
        raise Infeasible("rails: needs three or more hosts with the same number of ranks, at least two")
    grid = np.stack([np.flatnonzero(host == h) for h in hosts])
    near = np.isfinite(hop_us(cluster, collective.ranks, nbytes))
    inside, across = near[grid[:, :, None], grid[:, None, :]], near[grid.T[:, :, None], grid.T[:, None, :]]
    if inside.sum() < grid.size * (grid.shape[1] - 1) or across.sum() < grid.size * (grid.shape[0] - 1):
        raise Infeasible("rails: ranks of a host or of a rail do not reach each other by single messages")
    return grid


def transfers_each(grid: Ints) -> int:
    """About how many transfers a piece of each rail takes together."""
    hosts, local = grid.shape
    return int(2 * local * (hosts * (local - 1) + hosts - 1))


def rail_program(collective: Collective, grid: Ints, pieces: int, one_hop: int) -> Program:
    """All pieces of all rails, of which the last ones take one hop between hosts.

    Args:
        collective: The all-reduce.
        grid: The ranks, one row for each host and one column for each rail.
        pieces: The pieces of each rail.
        one_hop: How many of them take one hop.

    Returns:
        The program.
    """
    hosts, local = grid.shape
    two = pieces - one_hop
    piece, rail, turn, host = (i.ravel() for i in np.indices((pieces, local, local - 1, hosts)))
    keeper, other = grid[host, rail], grid[host, (rail + turn + 1) % local]
    # Where a rank has its result from: added up here, come back, or of one hop.
    lane = np.where(piece >= two, 3, np.where((piece + rail) % hosts == host, 1, 2))
    none = np.zeros_like(lane)
    columns = [
        (other, keeper, piece, rail, piece, none + 1, none),
        (keeper, other, piece, rail, piece + 3 * pieces, none, lane),
    ]
    piece, rail, turn = (i.ravel() for i in np.indices((two, local, hosts - 1)))
    root = (piece + rail) % hosts
    center, outer, none = grid[root, rail], grid[(root + turn + 1) % hosts, rail], np.zeros_like(piece)
    columns += [(outer, center, piece, rail, piece + pieces, none + 1, none)]
    columns += [(center, outer, piece, rail, piece + 2 * pieces, none, none + 1)]
    piece, rail, turn, host = (i.ravel() for i in np.indices((one_hop, local, hosts - 1, hosts)))
    none, piece = np.zeros_like(piece), piece + two
    columns += [(grid[(host + turn + 1) % hosts, rail], grid[host, rail], piece, rail, piece + pieces, none + 1, none)]
    src, dst, piece, rail, step, adds, lanes = (np.concatenate(parts) for parts in zip(*columns, strict=True))
    return Program.from_steps(
        f"rails(pieces={pieces},one_hop={one_hop})",
        AllReduce(collective.ranks, chunks=local * pieces, in_place=collective.in_place),
        src=src,
        dst=dst,
        chunk=piece * local + rail,
        step=step,
        reduce=adds.astype(np.bool_),
        lane=lanes,
    )
