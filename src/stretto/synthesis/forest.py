"""Throughput-optimal synthesis: spanning trees packed to the last byte per second, in polynomial time."""

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
"""More trees than needed can be lower."""
FEWER = (2, 4, 8, 16)
"""Where the exact k is more than twice as large, the best k up to these is tried, too."""
WORTH_IT = 0.002
"""Twice as many pieces must save this share of the time."""
TRY_ALL = 40_000
"""Up to so many transfers every pace is tried; beyond, only the better half each time."""

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

    With `multicast` (None: if the cluster has any) those that spread are copied in switches that multicast.

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

    All trees carry equal shares (so every chunk has the same size, as MSCCL needs). `seed` changes nothing: there is
    no chance involved. `max_k` trades throughput for fewer trees, `max_height` bounds them. Where switches multicast
    (`multicast`, None: if any does) trees that use it are tried beside those that do not.
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
    # Ever finer, until that costs more (alphas) than it brings (pipelining).
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
    """The smallest k, multiples of it whose trees are lower, as long as they are quick to pack, and where that k is
    large, smaller ones that come near: with fewer trees there are more pieces to each."""
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
    """What a forest may reach, judged by some numbers of pieces: if finer was better, filling the trees is what is
    left beyond their throughput, and it shrinks as pieces do."""
    finest, best = max(took), min(took.values())
    if took[finest] > best:
        return best
    full = sum(nbytes / float(f.throughput * len(f.roots)) / 1e3 for f in forests)
    finer = min(32, max(1, max_transfers // (_edges(forests) * finest)))
    return full + (best - full) / finer


def _edges(forests: tuple[Forest, ...]) -> int:
    """Transfers per piece."""
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
