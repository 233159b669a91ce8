# SPDX-License-Identifier: Apache-2.0
"""Throughput-optimal synthesis: spanning trees that use the full rate of the network, packed in polynomial time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from ..cluster import Cluster
from ..collectives import AllGather, AllReduce, Broadcast, Collective, Reduce, ReduceScatter
from ..errors import Infeasible, InvalidInput
from ..programs import Program
from ..simulator import simulate
from .forest_program import PACES, Pace, program
from .forest_trees import Forest, pack_trees

MAX_TRANSFERS = 2_000_000
MULTIPLES = (1, 2, 4, 8)
"""The multiples of the smallest k that are tried: with more trees than needed, each can be lower."""
FEWER = (2, 4, 8, 16)
"""The limits for smaller k that are tried where the exact k is more than twice as large."""
WORTH_IT = 0.002
"""The share of the time that twice as many pieces must save to be worth it."""
TRY_ALL = 40_000
"""The most transfers up to which every pace is tried; beyond, only the better half each time."""

Progress = Callable[[str, float], None]


def forests_of(
    collective: Collective,
    cluster: Cluster,
    *,
    max_k: int | None = None,
    max_height: int | None = None,
    multiple: int = 1,
    multicast: bool | None = None,
) -> tuple[Forest, ...]:
    """The trees of a collective: one forest, or for all-reduce one that reduces and one that spreads.

    Args:
        collective: An all-gather, reduce-scatter, all-reduce, broadcast or reduce.
        cluster: The cluster.
        max_k: The most trees per root, >= 1; as many as make a program of moderate size when not given.
        max_height: The most edges between a root and a rank, >= 1; no limit when not given.
        multiple: A factor for the smallest k that reaches the optimum, >= 1.
        multicast: Whether switches that multicast copy in the trees that spread; if the cluster has any by default.

    Returns:
        One forest, or two.

    Raises:
        Infeasible: The collective is not served, or the trees were not found.
        InvalidInput: An argument is out of range, or no switch multicasts.

    >>> from stretto import AllGather
    >>> forests_of(AllGather(8), Cluster.preset("dgx_a100"))
    (<Forest on dgx_a100:1: 1 trees from each of 8 roots, 342.9 GB/s (optimal), height 1 (mean 1.0)>,)
    """
    if collective.kind not in _KINDS:
        raise Infeasible(f"forest: trees serve {', '.join(_KINDS)}, not {collective.kind}")
    if collective != _finer(collective, collective.chunks):
        raise Infeasible(f"forest: this {collective.kind} has a layout of its own; only the standard one is served")
    if max(collective.ranks) >= cluster.num_devices:
        has = f"{cluster.name} has {cluster.num_devices} devices"
        raise InvalidInput(f"ranks: device {max(collective.ranks)} does not exist; {has}")
    for name, value in (("max_k", max_k), ("max_height", max_height)):
        if value is not None and value < 1:
            raise InvalidInput(f"{name}: must be >= 1, not {value}")
    copies = _multicast(cluster, multicast)
    roots = _roots(collective)
    edges = len(roots) * max(1, collective.num_ranks - 1)
    most = max(1, MAX_TRANSFERS // 4 // edges) if max_k is None else max_k
    return tuple(
        pack_trees(
            cluster,
            collective.ranks,
            roots,
            reverse=reverse,
            max_k=most,
            max_height=max_height,
            multiple=multiple,
            multicast=copies,
        )
        for reverse in _KINDS[collective.kind]
    )


def synthesize(
    collective: Collective,
    cluster: Cluster,
    *,
    nbytes: float,
    budget_s: float = 30.0,
    seed: int = 0,
    progress: Progress | None = None,
    alpha: str = "pipelined",
    max_k: int | None = None,
    max_height: int | None = None,
    max_transfers: int = MAX_TRANSFERS,
    multicast: bool | None = None,
) -> Program:
    """A program that sends along optimally packed trees, cut into as many pieces as simulation finds best.

    All trees carry equal shares (so every chunk has the same size, as MSCCL needs).

    Args:
        collective: An all-gather, reduce-scatter, all-reduce, broadcast or reduce.
        cluster: The cluster.
        nbytes: The size in bytes, > 0.
        budget_s: The seconds to search; one program is always finished.
        seed: Ignored: there is no chance involved.
        progress: Called with a line of text and the fraction done, 0..1.
        alpha: "pipelined" or "blocking", as in `simulate`.
        max_k: The most trees per root, >= 1: fewer trees may lose throughput.
        max_height: The most edges between a root and a rank, >= 1.
        max_transfers: The most transfers of a program with more than one piece per tree.
        multicast: Whether trees that use multicast are tried beside those that do not; if any switch does by default.

    Returns:
        The verified program.

    Raises:
        Infeasible: The collective is not served, or the trees were not found.
        InvalidInput: An argument is out of range, or no switch multicasts.
    """
    del seed
    began = time.monotonic()

    def tell(message: str, fraction: float) -> None:
        if progress is not None:
            progress(message, fraction)

    if collective.num_ranks == 1:
        raise Infeasible("forest: one rank has nothing to send")

    def timed(forests: tuple[Forest, ...], pieces: int, pace: Pace) -> tuple[float, Program]:
        made = _build(collective, forests, pieces, pace)
        return simulate(made, cluster, nbytes=nbytes, alpha=alpha).total_us, made

    tell("packing trees", 0.0)
    copies = _multicast(cluster, multicast) and not all(_KINDS.get(collective.kind, ()))
    candidates: list[tuple[Forest, ...]] = []
    for part, with_copies in enumerate((True, False)[not copies :]):
        until = began + budget_s * (part + 1) / (10 if copies else 5)
        candidates += _candidates(collective, cluster, max_k, max_height, until, with_copies)
    chosen = candidates[0]
    if len(candidates) > 1:
        tell(f"comparing {len(candidates)} forests", 0.2)
        trials = []
        for forests in candidates:
            most = max(1, TRY_ALL // _edges(forests), min(2, max_transfers // _edges(forests)))
            tried = {n: min(timed(forests, n, pace)[0] for pace in PACES[::4]) for n in {1, max(1, most // 4), most}}
            trials.append(_promise(forests, tried, nbytes, max_transfers))
        chosen = candidates[trials.index(min(trials))]
    tell(" and ".join(map(repr, chosen)), 0.3)
    edges = _edges(chosen)
    best: tuple[float, Program] | None = None
    pieces, idle, paces = 1, 0, PACES
    # Cut ever finer, until the additional alphas cost more than pipelining saves.
    while idle < 2 and (best is None or pieces * edges <= max_transfers):
        level: list[tuple[float, Program]] = []
        for pace in paces:
            level.append(timed(chosen, pieces, pace))
            if time.monotonic() - began > budget_s * 0.8:
                break
        order = sorted(range(len(level)), key=lambda at: level[at][0])
        took, made = level[order[0]]
        tell(f"{pieces} pieces per tree: {took:.6g} us", 0.3 + 0.7 * min(1.0, pieces * edges / max_transfers))
        idle = 0 if best is None or took < best[0] * (1 - WORTH_IT) else idle + 1
        if best is None or took < best[0]:
            best = took, made
        if (time.monotonic() - began) * 2 > budget_s:
            break
        if pieces * edges > TRY_ALL:
            paces = tuple(paces[at] for at in order[: max(1, len(order) // 2)])
        pieces *= 2
    assert best is not None
    best[1].verify()
    return best[1]


def _candidates(
    collective: Collective, cluster: Cluster, max_k: int | None, max_height: int | None, until: float, multicast: bool
) -> list[tuple[Forest, ...]]:
    """The forests to compare: with the smallest k, and with multiples of it whose trees are lower and quick to pack.

    Where that k is large, also forests with fewer trees that come near to the optimum: each tree then gets more pieces.
    """
    found: list[tuple[Forest, ...]] = []
    refused: Infeasible | None = None
    for multiple in MULTIPLES:
        began = time.monotonic()
        try:
            now = forests_of(
                collective, cluster, max_k=max_k, max_height=max_height, multiple=multiple, multicast=multicast
            )
        except Infeasible as error:
            refused = error
        else:
            if not found or _height(now) < _height(found[-1]):
                found.append(now)
            if 2 * _edges(now) > MAX_TRANSFERS // 16:
                break
        done = time.monotonic()
        if max_k is not None or done + 3 * (done - began) > until:
            break
    if not found:
        assert refused is not None
        raise refused
    for fewer in FEWER:
        if max_k is None and max(f.k for f in found[0]) > 2 * fewer:
            found.append(forests_of(collective, cluster, max_k=fewer, max_height=max_height, multicast=multicast))
    return found


def _multicast(cluster: Cluster, asked: bool | None) -> bool:
    if asked and not cluster.multicasts:
        raise InvalidInput(f"multicast: no switch of {cluster.name} multicasts; see Cluster.with_multicast")
    return cluster.multicasts if asked is None else asked


def _promise(forests: tuple[Forest, ...], took: dict[int, float], nbytes: float, max_transfers: int) -> float:
    """The time that a forest may reach, estimated from the times with some numbers of pieces.

    If the finest cut was the best, the time beyond that of the throughput is the time to fill the trees, which shrinks
    as pieces do.
    """
    finest, best = max(took), min(took.values())
    if took[finest] > best:
        return best
    full = sum(nbytes / float(f.throughput * len(f.roots)) / 1e3 for f in forests)
    finer = min(32, max(1, max_transfers // (_edges(forests) * finest)))
    return full + (best - full) / finer


def _edges(forests: tuple[Forest, ...]) -> int:
    """The number of transfers of a program with one piece per tree."""
    step = math.lcm(*(f.k for f in forests))
    return step * sum(int(f.amount @ np.diff(f.ptr)) // f.k for f in forests)


def _height(forests: tuple[Forest, ...]) -> float:
    return sum(f.mean_height + f.height for f in forests)


def _build(collective: Collective, forests: tuple[Forest, ...], pieces: int, pace: Pace) -> Program:
    k = "+".join(str(k) for k in sorted({f.k for f in forests}))
    how = ",multicast" if any(np.any(f.cast >= 0) for f in forests) else ""
    chunks = pieces * math.lcm(*(f.k for f in forests))
    total = chunks * collective.num_ranks if collective.kind == "all_reduce" else chunks
    return program(f"forest(k={k},pieces={pieces}{how})", _finer(collective, total), forests, chunks, pace)


_KINDS: dict[str, tuple[bool, ...]] = {
    "all_gather": (False,),
    "reduce_scatter": (True,),
    "all_reduce": (True, False),
    "broadcast": (False,),
    "reduce": (True,),
}
"""The collectives that trees serve; for each forest, whether it goes against the direction of the links."""


def _roots(collective: Collective) -> Sequence[int]:
    return collective.ranks if collective.root < 0 else (collective.ranks[collective.root],)


def _finer(collective: Collective, chunks: int) -> Collective:
    """The same collective cut into more chunks."""
    ranks, in_place = collective.ranks, collective.in_place
    match collective.kind:
        case "all_gather":
            return AllGather(ranks, chunks=chunks, in_place=in_place)
        case "reduce_scatter":
            return ReduceScatter(ranks, chunks=chunks, in_place=in_place)
        case "all_reduce":
            return AllReduce(ranks, chunks=chunks, in_place=in_place)
        case "broadcast":
            return Broadcast(ranks, root=collective.root, chunks=chunks, in_place=in_place)
        case _:
            return Reduce(ranks, root=collective.root, chunks=chunks, in_place=in_place)
