# SPDX-License-Identifier: Apache-2.0
"""Small all-reduces: groups of ranks exchange their sums until there is one group, in about one diameter of latency.

Every rank of a group holds the group's sum. Groups join when each of their ranks adds one message from each other
group, or, where that is sooner, takes over the new sum from a rank that has it. A tree to a root and back takes two
radii; on a torus, say, rows and then columns take one diameter. Which groups join is a search: those that are done
first, hosts first, blocks of equal size first, or all at once; the simulator chooses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from .. import _native
from ..cluster import Cluster
from ..collectives import AllReduce, Collective
from ..errors import Infeasible
from ..programs import Program
from ..simulator import simulate

PIECES = (1, 2, 4)
RAIL_PIECES = (1, 2, 4, 8, 16, 32, 64)
NOISE = 0.3
"""How much random searches blur the times at which groups would be done."""
MAX_SEARCHES = 64
RANDOM = "random"

Floats = NDArray[np.float64]
Group = tuple[int, ...]
Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Joining:
    """How some groups become one: who adds whose sum, who then takes over the sum from whom, and when each has it."""

    ranks: Group
    adds: tuple[tuple[int, int], ...]
    copies: tuple[tuple[int, int], ...]
    done_us: Floats
    """By rank; what others have is not changed."""


def synthesize(
    collective: Collective,
    cluster: Cluster,
    *,
    nbytes: float,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    alpha: str = "pipelined",
) -> Program:
    """The fastest all-reduce in which groups exchange their sums.

    Args:
        collective: An all-reduce with the standard layout.
        cluster: The cluster.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search; the plain ways to join are always tried.
        seed: The seed of the random ways to join.
        progress: Called with a line of text and the fraction done, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.

    Returns:
        The program.

    Raises:
        Infeasible: The collective is no standard all-reduce, or groups do not reach each other by single messages.
    """
    began = time.monotonic()
    if collective.kind != "all_reduce" or collective.num_ranks < 2:
        raise Infeasible(f"exchange: serves all_reduce of two or more ranks, not {collective.kind}")
    if collective != AllReduce(collective.ranks, chunks=collective.chunks, in_place=collective.in_place):
        raise Infeasible("exchange: this all_reduce has a layout of its own; only the standard one is served")
    hop = hop_us(cluster, collective.ranks, nbytes)
    host = cluster.node_host[list(collective.ranks)]
    best: tuple[float, Program] | None = None
    for program in rail_programs(collective, hop, host):
        took = simulate(program, cluster, nbytes=nbytes, alpha=alpha).total_us
        if best is None or took < best[0]:
            best = took, program
        elif took > 2 * best[0] or time.monotonic() - began > budget_s:
            break
    for name, joins in _ways(hop, host, np.random.default_rng(seed)):
        if progress is not None:
            progress(name, min(1.0, (time.monotonic() - began) / budget_s))
        for pieces in PIECES if joins else ():
            program = _program(f"exchange({name},pieces={pieces})", collective, joins, pieces)
            took = simulate(program, cluster, nbytes=nbytes, alpha=alpha).total_us
            if best is None or took < best[0]:
                best = took, program
            elif pieces > 1:
                break
        if name == RANDOM and best is not None and time.monotonic() - began > 0.8 * budget_s:
            break
    if best is None:
        raise Infeasible(
            f"exchange: no groups of ranks of {cluster.name} reach each other both ways by single messages"
        )
    return best[1]


def hop_us(cluster: Cluster, ranks: Sequence[int], nbytes: float) -> Floats:
    """What a message from each rank to each other one takes; infinite where only programs could pass it on.

    Args:
        cluster: The cluster.
        ranks: The device of each rank.
        nbytes: The size of a message.

    Returns:
        A table of microseconds.
    """
    devices = np.array(ranks, np.int32)
    src, count = cluster.link_src, cluster.num_nodes
    if not cluster.devices_forward:
        # Messages of a device start from a second node, so that no route leads through a device.
        src = np.where(src < cluster.num_devices, count + src, src).astype(np.int32)
        count += cluster.num_devices
    length = cluster.link_alpha_us + nbytes / cluster.link_gb_per_s / 1e3
    origin = devices if cluster.devices_forward else (cluster.num_nodes + devices).astype(np.int32)
    flat = _native.path_lengths(count, src, cluster.link_dst, length, origin)
    table = np.array(flat.reshape(len(devices), count)[:, devices])
    np.fill_diagonal(table, np.inf)
    return table


def join(groups: Sequence[Group], have_us: Floats, hop: Floats) -> Joining | None:
    """Join groups into one; None where some rank cannot get the sum.

    Args:
        groups: The groups, two or more.
        have_us: When each rank has the sum of its group.
        hop: What a message from rank to rank takes.

    Returns:
        The messages and times.
    """
    ranks = tuple(sorted(rank for group in groups for rank in group))
    ready = np.full(len(have_us), np.inf)
    ready[list(ranks)] = have_us[list(ranks)]
    sender: dict[int, list[int]] = {rank: [] for rank in ranks}
    for group in groups:
        arrive = have_us[list(group), None] + hop[list(group)]
        first = arrive.min(axis=0)
        for rank in ranks:
            if rank in group:
                continue
            # Of equally good senders each rank takes another one.
            good = np.flatnonzero(arrive[:, rank] <= first[rank] * (1 + 1e-9))
            sender[rank].append(group[int(good[rank % len(good)])] if len(good) else -1)
            ready[rank] = max(ready[rank], float(first[rank]))
    over: dict[int, int] = {}
    left, order = set(ranks), []
    while left:
        rank = min(left, key=lambda r: (ready[r], r))
        if not np.isfinite(ready[rank]):
            return None
        left.remove(rank)
        order.append(rank)
        for other in left:
            if ready[rank] + hop[rank, other] < ready[other] - 1e-9:
                ready[other], over[other] = ready[rank] + hop[rank, other], rank
    return Joining(
        ranks=ranks,
        adds=tuple((src, rank) for rank in ranks if rank not in over for src in sender[rank]),
        copies=tuple((over[rank], rank) for rank in order if rank in over),
        done_us=np.where(np.isfinite(ready), ready, have_us),
    )


def _ways(hop: Floats, host: NDArray[np.int32], rng: np.random.Generator) -> Iterator[tuple[str, list[Joining]]]:
    """Named ways to join all ranks, each as its joinings in order; an empty list where a way leads nowhere."""
    n = len(hop)
    everyone = [(rank,) for rank in range(n)]
    yield "first", _soonest(everyone, hop, np.zeros(n), np.ones((n, n)))
    yield "all", _levels([everyone], hop)
    blocks = [tuple(np.flatnonzero(host == h).tolist()) for h in np.unique(host)]
    if 1 < len(blocks) < n and host.min() >= 0:
        yield "hosts", _levels([blocks], hop)
        inside = _levels([blocks], hop, last=False)
        if inside:
            between = _soonest(blocks, hop, inside[-1].done_us, np.ones((n, n)))
            yield "hosts,first", inside + between if between else []
    for size in (d for d in range(2, n // 2 + 1) if n % d == 0):
        yield f"{size}", _levels([[tuple(range(k, k + size)) for k in range(0, n, size)]], hop)
        yield f"by {size}", _levels([[tuple(range(k, n, size)) for k in range(size)]], hop)
    for _ in range(MAX_SEARCHES):
        blur = 1 + NOISE * rng.random((n, n))
        yield RANDOM, _soonest(everyone, hop, np.zeros(n), blur)


def _levels(levels: Sequence[Sequence[Group]], hop: Floats, *, last: bool = True) -> list[Joining]:
    """Ranks join into the groups of each level, and at last into one."""
    have = np.zeros(len(hop))
    now: list[Group] = [(rank,) for rank in range(len(hop))]
    found: list[Joining] = []
    everyone = [tuple(range(len(hop)))] if last else []
    for level in [*levels, *([everyone] if last else [])]:
        for group in level:
            parts = [part for part in now if set(part) <= set(group)]
            if len(parts) < 2:
                continue
            joined = join(parts, have, hop)
            if joined is None:
                return []
            found.append(joined)
            have = joined.done_us
        now = list(level)
    return found


def _soonest(groups: Sequence[Group], hop: Floats, have: Floats, blur: Floats) -> list[Joining]:
    """Two groups at a time join: those that would be done first."""
    now = list(groups)
    known: dict[tuple[Group, Group], Joining | None] = {}
    found: list[Joining] = []
    while len(now) > 1:
        for pair in combinations(now, 2):
            if pair not in known:
                known[pair] = join(pair, have, hop)
        able = {pair: made for pair in combinations(now, 2) if (made := known[pair]) is not None}
        if not able:
            return []

        def done(pair: tuple[Group, Group], able: dict[tuple[Group, Group], Joining] = able) -> tuple[float, int]:
            made = able[pair]
            late = float(made.done_us[list(made.ranks)].max())
            return late * float(blur[pair[0][0], pair[1][0]]), len(made.ranks)

        pair = min(able, key=done)
        made = able[pair]
        found.append(made)
        have = np.array(have)
        have[list(made.ranks)] = made.done_us[list(made.ranks)]
        now = [group for group in now if group not in pair] + [made.ranks]
    return found


def rail_programs(collective: Collective, hop: Floats, host: NDArray[np.int32]) -> Iterator[Program]:
    """Every rank adds up a share of its host's sum, exchanges it with its likes on other hosts, and spreads the result.

    A share passes one hop between hosts instead of two (to a root and back), which two hosts can well afford.

    Args:
        collective: The all-reduce.
        hop: What a message from rank to rank takes.
        host: The host of each rank.

    Yields:
        Programs of ever finer pieces; none where hosts differ in size or their ranks do not reach each other.
    """
    hosts, count = np.unique(host, return_counts=True)
    if len(hosts) < 2 or count.min() != count.max() or count[0] < 2 or host.min() < 0:
        return
    grid = np.stack([np.flatnonzero(host == h) for h in hosts])
    size = grid.shape[1]
    # All ranks of a host must reach each other by single messages; a rank's hop to itself is infinite.
    if np.isfinite(hop[grid[:, :, None], grid[:, None, :]]).sum() < grid.size * (size - 1):
        return
    between = [join([(rank,) for rank in column], np.zeros(len(hop)), hop) for column in grid.T.tolist()]
    if any(made is None for made in between):
        return
    for pieces in RAIL_PIECES:
        rows: list[tuple[int, int, int, int, int]] = []
        for chunk in range(0, size * pieces, size):
            # Stage after stage: a connection keeps the order of its messages, and nothing may queue behind a result.
            step = chunk // size
            # In turns, so that no two ranks of a host send to the same one at the same moment.
            inside = [(int(row[(at + turn) % size]), int(row[at]), chunk + at)
                      for turn in range(1, size) for at in range(size) for row in grid]  # fmt: skip
            rows += [(src, dst, 1, step, to) for src, dst, to in inside]
            for at, made in enumerate(between):
                assert made is not None
                rows += [(src, dst, 1, step + pieces, chunk + at) for src, dst in made.adds]
                rows += [(src, dst, 0, step + 2 * pieces, chunk + at) for src, dst in made.copies]
            rows += [(src, dst, 0, step + 3 * pieces, of) for dst, src, of in inside]
        table = np.array(rows, np.int64)
        yield Program.from_steps(
            f"exchange(rails,pieces={pieces})",
            AllReduce(collective.ranks, chunks=size * pieces, in_place=collective.in_place),
            src=table[:, 0],
            dst=table[:, 1],
            chunk=table[:, 4],
            step=table[:, 3],
            reduce=table[:, 2].astype(np.bool_),
        )


def _program(name: str, collective: Collective, joins: Sequence[Joining], pieces: int) -> Program:
    """All messages of the joinings, with each piece in a message of its own."""
    rows: list[tuple[int, int, int, int]] = []
    step = 0
    for joined in joins:
        rows += [(src, dst, 1, step) for src, dst in joined.adds]
        rows += [(src, dst, 0, step + 1 + at) for at, (src, dst) in enumerate(joined.copies)]
        step += 1 + len(joined.copies)
    table = np.repeat(np.array(rows, np.int64), pieces, axis=0)
    return Program.from_steps(
        name,
        AllReduce(collective.ranks, chunks=pieces, in_place=collective.in_place),
        src=table[:, 0],
        dst=table[:, 1],
        chunk=np.tile(np.arange(pieces), len(rows)),
        step=table[:, 3],
        reduce=table[:, 2].astype(np.bool_),
    )
