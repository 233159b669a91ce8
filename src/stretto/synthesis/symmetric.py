# SPDX-License-Identifier: Apache-2.0
"""Composition on a quotient: one host stands for all equal hosts, so that many thousands of ranks cost as few as some.

All-gather, reduce-scatter and all-reduce over all devices of a cluster whose hosts are images of one another: shards
go between hosts along rails and are spread inside each host, as in `compose`, but only one host's transfers are built,
proved and simulated (`SymmetricProgram`). On networks of dimensions one device stands for all. An all-to-all goes in
phases: in phase k each host sends to the k-th after it, over the rail of the device that takes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ..algorithms.hierarchical import suited_to
from ..algorithms.symmetric import symmetric_hierarchical
from ..cluster import Cluster
from ..cluster.symmetry import host_group
from ..collectives import Collective
from ..errors import Infeasible, InvalidInput
from ..programs import SymmetricProgram
from ..programs.symmetry import KINDS
from ..simulator import Timeline, simulate
from ..units import check_seed
from .combine import reversed_cluster
from .compose import LevelAlgorithm, inside_algorithms
from .orbits import Exchange, backwards, exchanges, gathering, joined, phased

MAX_ENTRIES = 1 << 20
"""The most chunks that the transfers of one group may move: up to it finer pieces are tried."""
PIECES = (1, 2, 4, 8, 16)
PROOF = 2.0
"""What proving and timing the result takes afterwards, in times of the trial that made it."""
WORTHWHILE = 0.999
"""Finer pieces are tried as long as they take at most this share of the time."""

Progress = Callable[[str, float], None]
Make = Callable[[int], SymmetricProgram]


def synthesize(
    collective: Collective,
    cluster: Cluster,
    *,
    nbytes: float,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    alpha: str = "pipelined",
    contention: str | None = None,
    pieces: Sequence[int] | None = None,
) -> SymmetricProgram:
    """The best symmetric composition for all devices of a cluster of equal hosts, or of regular dimensions.

    Args:
        collective: An all-gather, reduce-scatter, all-reduce or all-to-all over all devices in their order, not in
            place.
        cluster: The cluster.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search and to prove the result; the first composition is always finished.
        seed: The seed of the synthesis inside a host.
        progress: Called with a line of text and the fraction done, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.
        contention: "fifo" or "fair", as in `simulate`; what the cluster needs when not given.
        pieces: The numbers of pieces to cut shards into; 1, 2, 4, 8 and 16 while that pays by default.

    Returns:
        The verified program.

    Raises:
        Infeasible: The collective is not served, the cluster has no such symmetry, or ranks share links.
        InvalidInput: A number of pieces is < 1.

    >>> from stretto import AllReduce, GB
    >>> synthesize(AllReduce(128), Cluster.load("dgx_h100:16"), nbytes=GB, pieces=[1]).num_transfers
    32512
    """
    check_seed(seed)
    if pieces is not None and min(pieces, default=0) < 1:
        raise InvalidInput(f"pieces: must be >= 1, not {', '.join(map(str, pieces))}")
    require_all_devices(collective, cluster)
    search = SymmetricSearch(
        kind=collective.kind, cluster=cluster, nbytes=nbytes, alpha=alpha, contention=contention,
        pieces=PIECES if pieces is None else tuple(pieces), deadline=time.monotonic() + budget_s,
        tell=progress or (lambda message, fraction: None),
    )  # fmt: skip
    if collective.kind == "all_to_all":
        return search.best([partial(phased, host_group(cluster), cluster.num_devices // host_group(cluster))])
    return search.best([*_makes(cluster, nbytes, seed, alpha)])


def require_all_devices(collective: Collective, cluster: Cluster) -> None:
    """Refuse what has no symmetric form: other collectives, a part of the devices, in-place calls, uneven hosts."""
    if collective.kind not in KINDS:
        raise Infeasible(f"does not do {collective.kind}")
    if not host_group(cluster) and (not cluster.dimensions or collective.kind == "all_to_all"):
        dimensions = "" if collective.kind == "all_to_all" else ", or regular dimensions"
        raise Infeasible(f"needs hosts with equally many devices, numbered host by host{dimensions}")
    if collective.ranks != tuple(range(cluster.num_devices)):
        raise Infeasible("needs all devices of the cluster, in their order")
    if collective.in_place:
        raise Infeasible("is for calls that are not in place")


def _makes(cluster: Cluster, nbytes: float, seed: int, alpha: str) -> Iterator[Make]:
    """All-gathers that one group stands for: functions from the number of pieces to the program."""
    local = host_group(cluster)
    if local:
        hosts = cluster.num_devices // local
        inside = inside_algorithms(
            "all_gather", list(range(local)), cluster, nbytes=nbytes / hosts, seed=seed, alpha=alpha
        )
        for way in exchanges(hosts):
            for part in inside:
                yield partial(_gather, way, part)
    if cluster.dimensions:
        sizes, schemes = [d.size for d in cluster.dimensions], suited_to(cluster.dimensions)
        yield lambda count: symmetric_hierarchical("all_gather", sizes, chunks=count, inside=schemes)


def _gather(way: Exchange, part: LevelAlgorithm, pieces: int) -> SymmetricProgram:
    cut = f",chunks={pieces}" if pieces > 1 else ""
    return gathering(f"symmetric(inside={part.name},between={way.name}{cut})", way, part.program, pieces=pieces)


@dataclass(frozen=True, kw_only=True, eq=False)
class SymmetricSearch:
    """The search for the best symmetric composition: what is asked for, and how trials are compared."""

    kind: str
    cluster: Cluster
    nbytes: float
    alpha: str
    contention: str | None
    pieces: tuple[int, ...]
    deadline: float
    tell: Progress

    def best(self, makes: Sequence[Make]) -> SymmetricProgram:
        """The fastest program of all ways in the coarsest cut, in finer cuts those of the two fastest ways."""
        tried: list[tuple[float, SymmetricProgram]] = []
        refused: list[str] = []
        ways, last, longest_s = list(makes), self.pieces[0], 0.0
        for cut in self.pieces:
            now: list[tuple[float, SymmetricProgram, Make]] = []
            # The next trial takes about as long as the longest so far, finer cuts as much longer as they are finer.
            longest_s, last = longest_s * max(1.0, cut / last), cut
            for make in ways:
                began = time.monotonic()
                if (tried or now) and began + (1 + PROOF) * longest_s > self.deadline:
                    break
                try:
                    now.append((*self.trial(make(cut)), make))
                except (Infeasible, InvalidInput) as error:
                    refused.append(str(error))
                longest_s = max(longest_s, time.monotonic() - began)
            now.sort(key=lambda one: one[0])
            before = min((us for us, _ in tried), default=np.inf)
            tried += [(us, program) for us, program, _ in now]
            ways = [way for _, _, way in now[:2]]
            large = max((len(program.home) for _, program, _ in now), default=0) * 2 > MAX_ENTRIES
            if not now or now[0][0] > WORTHWHILE * before or large:
                break
        if not tried:
            reasons = "; ".join(dict.fromkeys(refused))
            raise Infeasible(f"symmetric: {reasons}")
        return min(tried, key=lambda one: one[0])[1]

    def trial(self, gather: SymmetricProgram) -> tuple[float, SymmetricProgram]:
        """The collective from an all-gather (an all-to-all is made as it is), and its time."""
        program = gather
        if self.kind in ("reduce_scatter", "all_reduce"):
            # Transfers of the reduce-scatter are ordered as in the mirror image of the all-gather's timeline.
            mirror = self.run(gather, reversed_cluster(self.cluster))
            program = backwards(gather, np.lexsort((-np.arange(len(gather.dst)), -mirror.end_us)))
        if self.kind == "all_reduce":
            program = joined(program, gather)
        us = self.run(program, self.cluster).total_us
        self.tell(f"{program.name}: {us:.6g} us", 0.5)
        return us, program

    def run(self, program: SymmetricProgram, cluster: Cluster) -> Timeline:
        """Simulate a program on the cluster, or on its mirror image."""
        return simulate(program, cluster, nbytes=self.nbytes, alpha=self.alpha, contention=self.contention)
