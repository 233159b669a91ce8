# SPDX-License-Identifier: Apache-2.0
"""Hierarchical composition: one algorithm inside the hosts and one between them make one for the cluster.

Every rank is on a rail: the ranks with its local number on the other hosts. An all-gather runs on all rails at once,
and data that comes in over a rail is spread inside the host while the next data comes in. Data of an all-to-all is
first handed to the right rail inside the host, and then sent along it. Reduce-scatter is an all-gather backwards;
all-reduce is both. Messages inside a host and between hosts use different links, so they overlap; the simulator
chooses the two algorithms and the number of pieces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ..algorithms import algorithm
from ..algorithms.base import Steps, is_power_of_two
from ..cluster import Cluster
from ..collectives import AllGather, AllToAll, Collective
from ..errors import Infeasible, InvalidInput
from ..programs import Program
from ..simulator import simulate
from ..units import check_seed
from . import greedy
from .combine import all_reduce_from, inverse, like, reversed_cluster

MAX_MOVES = 1 << 18
"""The most transfers up to which finer pieces are tried."""
PIECES = (1, 2, 4, 8, 16)
ABOUT = 1.01
INSIDE_S = 1.0
"""The seconds that synthesis inside one host may take."""
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")

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
    pieces: Sequence[int] | None = None,
) -> Program:
    """The best composition for ranks that lie in equal numbers on several hosts.

    Args:
        collective: An all-gather, reduce-scatter, all-reduce or all-to-all.
        cluster: The cluster; at least two hosts with at least two ranks each.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search; the first composition is always finished.
        seed: The seed of the synthesis inside a host.
        progress: Called with a line of text and the fraction done, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.
        pieces: The numbers of pieces to cut chunks into; 1, 2, 4, 8 and 16 while the program stays small by default.

    Returns:
        The verified program.

    Raises:
        Infeasible: The collective is not served, or the ranks do not form a grid of hosts.
        InvalidInput: A device does not exist, or a number of pieces is < 1.

    >>> from stretto import GB
    >>> synthesize(AllGather(16), Cluster.load("dgx_a100:2"), nbytes=GB, pieces=[1]).name
    'compose(inside=ring,between=direct)'
    """
    check_seed(seed)
    deadline = time.monotonic() + budget_s
    if collective.kind not in KINDS:
        raise Infeasible(f"compose: {collective.kind} is none of {', '.join(KINDS)}")
    if max(collective.ranks) >= cluster.num_devices:
        raise InvalidInput(f"ranks: device {max(collective.ranks)} does not exist in {cluster.name}")
    grid = host_grid(collective, cluster)
    search = CompositionSearch(
        cluster=cluster, nbytes=nbytes, alpha=alpha, seed=seed, pieces=pieces, deadline=deadline,
        tell=progress or (lambda message, fraction: None),
    )  # fmt: skip
    if collective.kind in ("all_gather", "all_to_all"):
        return search.best(collective, grid)
    if collective.kind == "reduce_scatter":
        forth = replace(search, cluster=reversed_cluster(cluster)).best(like(collective, kind="all_gather"), grid)
        return _named(inverse(forth, cluster, nbytes=nbytes, alpha=alpha), forth.name)
    gather = like(collective, kind="all_gather", chunks=max(1, collective.num_chunks // collective.num_ranks))
    tried = search.trials(gather, grid)
    found: list[tuple[float, Program]] = []
    # Try the plainest all-gather, and the fastest, which may overlap better with the reduce-scatter.
    for trial in dict.fromkeys([plainest(tried), min(tried, key=lambda trial: trial.us)]):
        spread = trial.program(gather, grid)
        if found and spread.num_transfers > MAX_MOVES // 4:
            break
        summed = inverse(spread, cluster, nbytes=nbytes, alpha=alpha)
        both = _named(all_reduce_from(summed, spread, cluster, nbytes=nbytes, alpha=alpha), spread.name)
        found.append((simulate(both, cluster, nbytes=nbytes, contention="fifo", alpha=alpha).total_us, both))
    fastest = min(us for us, _ in found)
    return next(program for us, program in found if us <= fastest * ABOUT)


def _named(program: Program, name: str) -> Program:
    named = program.replace(name=name)
    named.verify()
    return named


def host_grid(collective: Collective, cluster: Cluster) -> Ints:
    """The ranks as a table: one row per host, one column per rail."""
    host = cluster.node_host[list(collective.ranks)]
    values, at, count = np.unique(host, return_inverse=True, return_counts=True)
    if np.any(values < 0) or len(values) < 2:
        raise Infeasible("compose: needs ranks on at least two hosts")
    if len(set(count.tolist())) > 1 or count[0] < 2:
        few, many = int(count.min()), int(count.max())
        raise Infeasible(f"compose: needs the same number of ranks, at least 2, on each host, not {few} to {many}")
    return np.argsort(at, kind="stable").reshape(len(values), -1)


@dataclass(frozen=True, kw_only=True, eq=False)
class LevelAlgorithm:
    """An algorithm inside one host, or between hosts: its ranks are local numbers, or hosts."""

    name: str
    program: Program


@dataclass(frozen=True, kw_only=True, eq=False)
class CompositionTrial:
    """One composition that was tried, with its time and its number of connections."""

    us: float
    connections: int
    chunks: int
    inside: LevelAlgorithm
    between: LevelAlgorithm

    def program(self, collective: Collective, grid: Ints) -> Program:
        """The program of this composition."""
        return composed(like(collective, chunks=self.chunks), grid, self.inside, self.between)


def plainest(trials: Sequence[CompositionTrial]) -> CompositionTrial:
    """Of the trials that are about as fast as the fastest, the one with the fewest connections.

    Connections share ports in an order that only the plan knows. A runtime runs them side by side, and comes the
    nearer to the plan the fewer connections there are.
    """
    fastest = min(trial.us for trial in trials)
    return min((t for t in trials if t.us <= fastest * ABOUT), key=lambda trial: (trial.connections, trial.us))


@dataclass(frozen=True, kw_only=True, eq=False)
class CompositionSearch:
    """The search for the best composition: the cluster, the size and the options by which trials are compared."""

    cluster: Cluster
    nbytes: float
    alpha: str
    seed: int
    pieces: Sequence[int] | None
    deadline: float
    tell: Progress

    def best(self, collective: Collective, grid: Ints) -> Program:
        """The program of the plainest composition among those that are about as fast as the fastest."""
        return plainest(self.trials(collective, grid)).program(collective, grid)

    def trials(self, collective: Collective, grid: Ints) -> list[CompositionTrial]:
        """Try all pairs of algorithms in the coarsest cut, and in finer cuts the two best inside a host and the
        plainest."""
        cuts = list(_cuts(collective, self.pieces))
        chosen = [*product(*self.parts(collective, grid))]
        tried: list[CompositionTrial] = []
        for at, count in enumerate(cuts):
            finer = like(collective, chunks=collective.chunks * count)
            now: list[CompositionTrial] = []
            for inside, between in chosen:
                if tried and time.monotonic() > self.deadline:
                    break
                program = composed(finer, grid, inside, between)
                run = simulate(program, self.cluster, nbytes=self.nbytes, contention="fifo", alpha=self.alpha)
                self.tell(f"{program.name}: {run.total_us:.6g} us", (at + 1) / len(cuts))
                pairs = np.unique(program.src.astype(np.int64) * program.collective.num_ranks + program.dst)
                trial = CompositionTrial(
                    us=run.total_us, connections=len(pairs), chunks=finer.chunks, inside=inside, between=between
                )
                now.append(trial)
                tried.append(trial)
            ways = [plainest([t for t in now if t.inside is part]) for part in dict.fromkeys(t.inside for t in now)]
            ways.sort(key=lambda trial: trial.us)
            chosen = [(t.inside, t.between) for t in dict.fromkeys([*ways[:2], *map(plainest, [now] if now else [])])]
        return tried

    def parts(self, collective: Collective, grid: Ints) -> tuple[list[LevelAlgorithm], list[LevelAlgorithm]]:
        """The algorithms to try inside a host, and between hosts."""
        hosts = len(grid)
        devices = [collective.ranks[rank] for rank in grid[0].tolist()]
        inside = inside_algorithms(
            collective.kind, devices, self.cluster, nbytes=self.nbytes / hosts, seed=self.seed, alpha=self.alpha
        )
        names = ["direct"]
        if collective.kind == "all_gather":
            names += ["ring", *(["recursive_doubling"] if is_power_of_two(hosts) else [])]
        between = [LevelAlgorithm(name=name, program=algorithm(name, collective.kind, hosts)) for name in names]
        return inside, between


def inside_algorithms(
    kind: str, devices: Sequence[int], cluster: Cluster, *, nbytes: float, seed: int, alpha: str
) -> list[LevelAlgorithm]:
    """The algorithms to try inside one host.

    Args:
        kind: "all_gather" or "all_to_all".
        devices: The devices of the host.
        cluster: The cluster.
        nbytes: The bytes that the host's devices exchange at a time.
        seed: The seed of the synthesis.
        alpha: "pipelined" or "blocking", as in `simulate`.

    Returns:
        The algorithms, the plainest first.
    """
    found = [LevelAlgorithm(name="direct", program=algorithm("direct", kind, devices))]
    with suppress(Infeasible):  # where the devices of a host meet only outside of it
        make = AllToAll if kind == "all_to_all" else AllGather
        made = greedy.synthesize(
            make(devices), cluster, nbytes=nbytes, budget_s=INSIDE_S, seed=seed, alpha=alpha, pieces=[1]
        )
        found.append(LevelAlgorithm(name="greedy", program=made))
    if kind == "all_gather":
        found.append(LevelAlgorithm(name="ring", program=algorithm("ring", kind, devices, cluster=cluster)))
        if is_power_of_two(len(devices)):
            program = algorithm("recursive_doubling", kind, len(devices))
            found.append(LevelAlgorithm(name="recursive_doubling", program=program))
    return found


def _cuts(collective: Collective, pieces: Sequence[int] | None) -> Iterator[int]:
    moves = collective.num_chunks * (2 if collective.kind == "all_to_all" else collective.num_ranks)
    for count in PIECES if pieces is None else pieces:
        if count < 1:
            raise InvalidInput(f"pieces: must be >= 1, not {count}")
        if count == 1 or pieces is not None or moves * count <= MAX_MOVES:
            yield count


def composed(collective: Collective, grid: Ints, inside: LevelAlgorithm, between: LevelAlgorithm) -> Program:
    """Make one program from an algorithm inside the hosts and one between them.

    Args:
        collective: The all-gather or all-to-all, cut as the result shall be.
        grid: The ranks as a table, one row per host and one column per rail.
        inside: The algorithm over the local numbers of a host.
        between: The algorithm over the hosts.

    Returns:
        The verified program.
    """
    steps = Steps()
    build = _to_rails if collective.kind == "all_to_all" else _from_rails
    build(steps, collective, grid, inside.program, between.program)
    cut = f",chunks={collective.chunks}" if collective.chunks > 1 else ""
    program = steps.program(f"compose(inside={inside.name},between={between.name}{cut})", collective)
    program.verify()
    return program


def _from_rails(steps: Steps, collective: Collective, grid: Ints, inside: Program, between: Program) -> None:
    """Add an all-gather: data goes along all rails at once, and is spread inside each host in order of arrival."""
    hosts, _ = grid.shape
    piece = np.arange(collective.chunks)[:, None]
    count, each = between.num_transfers + 1, inside.num_transfers + 1
    # came[a, b] is one more than the transfer that brings host a's shards to host b; 0 for a host's own shards.
    came = np.zeros((hosts, hosts), np.int64)
    for t in range(between.num_transfers):
        src, dst, shards = int(between.src[t]), int(between.dst[t]), between.chunks_of(t)
        came[shards, dst] = t + 1
        chunk = grid[shards].T * collective.chunks + piece[..., None]
        steps.add(src=grid[src], dst=grid[dst], step=(piece * count + t) * each, chunk=chunk)
    whose, where = (index.ravel() for index in np.indices((hosts, hosts)))
    for t in range(inside.num_transfers):
        src, dst, shards = int(inside.src[t]), int(inside.dst[t]), inside.chunks_of(t)
        chunk = grid[whose][:, shards] * collective.chunks + piece[..., None]
        step = (piece * count + came[whose, where]) * each + t + 1
        steps.add(src=grid[where, src], dst=grid[where, dst], step=step, chunk=chunk)


def _to_rails(steps: Steps, collective: Collective, grid: Ints, inside: Program, between: Program) -> None:
    """Add an all-to-all: data goes inside the host to the rail of its destination, host by host, then along it."""
    hosts, local = grid.shape
    ranks, chunks = collective.num_ranks, collective.chunks
    piece = np.arange(chunks)[:, None, None]
    host, each = np.arange(hosts), inside.num_transfers + between.num_transfers + 1
    for turn in range(hosts):
        to = (host + turn + 1) % hosts  # data for other hosts comes first, data for the own host last
        stage = piece * hosts + turn
        for t in range(inside.num_transfers):
            a, b = np.divmod(inside.chunks_of(t), local)
            pair = grid[:, a] * ranks + grid[to][:, b]
            steps.add(
                src=grid[:, int(inside.src[t])], dst=grid[:, int(inside.dst[t])], step=stage[..., 0] * each + t,
                chunk=pair * chunks + piece,
            )  # fmt: skip
        if turn == hosts - 1:
            continue
        for t in range(between.num_transfers):
            sends = between.chunks_of(t)
            whose, aim = np.divmod(sends, hosts)
            if int((aim - whose)[0]) % hosts != turn + 1:
                continue
            pair = grid[whose[0]][None, :] * ranks + grid[aim[0]][:, None]
            steps.add(
                src=grid[int(between.src[t])], dst=grid[int(between.dst[t])],
                step=stage[..., 0] * each + inside.num_transfers + t, chunk=pair * chunks + piece,
            )  # fmt: skip
