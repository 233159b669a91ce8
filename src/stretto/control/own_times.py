# SPDX-License-Identifier: Apache-2.0
"""What the collectives of the job's own backend, NCCL or gloo, take in this job: timed by all ranks together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from ..planner.costs.channels import Scope, scope_of
from ..runtime.torch_backend.own_backend import on_ours
from .own_costs import MAX_SIZES, Library, OwnTime, cluster_of, fitted

if TYPE_CHECKING:
    from ..cluster import Cluster
    from ..workload import Workload

SMALL, FIRST, GROWTH, LARGEST = 1 << 10, 1 << 18, 4, 1 << 26
"""Bytes that are timed: a small size, then from the first on larger and larger ones, until `LONG_US` or the end."""
LONG_US = 25_000.0
TIMES, FEW = 5, 3
"""How often a size is timed; less often where it takes long."""
PARTS = {
    "all_reduce": ("all_reduce", "reduce_scatter", "all_gather"), "reduce_scatter": ("reduce_scatter",),
    "all_gather": ("all_gather",), "all_to_all": ("all_to_all",),
}  # fmt: skip
"""The collectives that a plan may cut each kind into; what is not here follows from these."""
Ranks = tuple[int, ...]
DEVICES = {"nccl": "cuda", "gloo": "cpu"}
"""Where the tensors of a backend's calls are."""


def kinds_of(workload: Workload) -> tuple[str, ...]:
    """The collectives that are to be timed for a step.

    A plan may sum in steps, inside of hosts and between them, so a sum's parts belong to it.
    """
    found: dict[str, None] = {}
    for kind in dict.fromkeys(op.kind for op in workload.comm_ops):
        found |= dict.fromkeys(PARTS.get(kind, ("all_gather",)))
    return tuple(found)


def scopes_of(hosts: Sequence[str]) -> list[tuple[Scope, list[Ranks]]]:
    """The sets of groups that are timed at once: all ranks; those of each host; one of each host, alone and beside all.

    Hosts with different numbers of ranks have no groups across that are alike: then only all ranks are timed.

    >>> scopes_of(["a", "a", "b", "b"])[1:]
    [('intra', [(0, 1), (2, 3)]), ('inter', [(0, 2)]), ('inter', [(0, 2), (1, 3)])]
    >>> scopes_of(["a", "a"]), scopes_of(["a", "b"])
    ([('intra', [(0, 1)])], [('inter', [(0, 1)])])
    """
    ranks = by_host(hosts)
    everyone = tuple(range(len(hosts)))
    bare = cluster_of(ranks, (1.0, 1.0), (1.0, 1.0))
    found: list[tuple[Scope, list[Ranks]]] = [(scope_of(bare, [everyone]), [everyone])]
    if len(ranks) > 1 and len({len(members) for members in ranks}) == 1 and len(ranks[0]) > 1:
        across = [tuple(members[at] for members in ranks) for at in range(len(ranks[0]))]
        found += [("intra", ranks), ("inter", across[:1]), ("inter", across)]
    return found


def by_host(hosts: Sequence[str]) -> list[Ranks]:
    """The ranks of each host, in the order in which hosts come."""
    return [tuple(rank for rank, host in enumerate(hosts) if host == name) for name in dict.fromkeys(hosts)]


def own_times(hosts: Sequence[str], kinds: Iterable[str], most_bytes: float, library: Library) -> tuple[OwnTime, ...]:
    """Time the collectives of the job's own backend; all ranks call this together, and all get the same.

    Args:
        hosts: The host of each rank.
        kinds: The collectives.
        most_bytes: No size beyond this is timed, but the first.
        library: The backend.

    Returns:
        The times of every kind on every set of groups.
    """
    import torch.distributed as dist

    me, made = dist.get_rank(), []
    kinds = tuple(kinds)
    for scope, groups in scopes_of(hosts):
        mine: Any = None
        for ranks in groups:
            # All ranks make all groups.
            group = dist.new_group(list(ranks)) if len(ranks) < len(hosts) else dist.group.WORLD
            mine = group if me in ranks else mine
        for kind in kinds:
            rows = _rows(kind, mine, len(groups[0]), most_bytes, library)
            made.append(
                OwnTime(library=library, kind=kind, scope=scope, ranks=len(groups[0]), groups=len(groups), times=rows)
            )
    return tuple(made)


def own_cluster(hosts: Sequence[str], times: Sequence[OwnTime]) -> Cluster:
    """A cluster of the job's ranks, by the times of its backend's collectives.

    Args:
        hosts: The host of each rank.
        times: What was timed.

    Returns:
        Links whose rates and latencies make a ring take about as long as was measured.
    """
    lines: dict[Scope, tuple[float, float]] = {}
    for time_ in times:
        rows = time_.times
        # A sum sends twice what a gathering does.
        scale = 1.0 if time_.kind == "all_reduce" else 2.0
        line = fitted(time_.ranks, scale * rows[0][1], scale * rows[-1][1], rows[-1][0])
        if time_.scope not in lines or time_.kind == "all_reduce":
            lines[time_.scope] = line if line[1] > 0 else lines.get(time_.scope, (0.0, 0.0))
    usable = {scope: line for scope, line in lines.items() if line[1] > 0} or {"mixed": (1.0, 1.0)}
    between = usable.get("mixed") or usable.get("inter") or next(iter(usable.values()))
    return cluster_of(by_host(hosts), usable.get("intra", between), between)


def _rows(kind: str, group: Any, ranks: int, most_bytes: float, library: Library) -> tuple[tuple[float, float], ...]:
    """Bytes and microseconds of a collective, the slowest rank's; the same on all ranks, whether they took part."""
    rows: list[tuple[float, float]] = []
    size, times = SMALL, TIMES
    while len(rows) < MAX_SIZES:
        us = _slowest(_time_us(kind, size, ranks, group, times, library) if group is not None else 0.0, library)
        rows.append((float(size), max(us, 1e-3)))
        if size >= FIRST and (us > LONG_US or size * GROWTH > min(LARGEST, GROWTH * most_bytes)):
            break
        times = FEW if us * GROWTH > LONG_US / TIMES else TIMES
        size = FIRST if size < FIRST else size * GROWTH
    return tuple(rows)


def _slowest(value: float, library: Library) -> float:
    """The largest over all ranks: everybody must time the same sizes."""
    import torch
    import torch.distributed as dist

    found = torch.tensor(value, dtype=torch.float64, device=DEVICES[library])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def own_small_us(library: Library) -> float:
    """What a sum of a few bytes takes on the job's own backend, the same on all ranks."""
    import torch.distributed as dist

    return _slowest(_time_us("all_reduce", SMALL, dist.get_world_size(), None, TIMES, library), library)


def _time_us(kind: str, nbytes: int, ranks: int, group: Any, times: int, library: Library) -> float:
    """The median time of a collective, from an idle device until it has ended."""
    import torch

    call = _call(kind, nbytes, ranks, group, library)

    def settled() -> float:
        if DEVICES[library] == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    took = []
    with on_ours(False):
        for turn in range(times + 1):
            begin = settled()
            call()
            if turn:
                # Connections are made in the first.
                took.append((settled() - begin) * 1e6)
    return median(took)


def _call(kind: str, nbytes: int, ranks: int, group: Any, library: Library) -> Callable[[], object]:
    import torch
    import torch.distributed as dist

    whole = torch.zeros(max(nbytes // 4 // ranks, 1) * ranks, device=DEVICES[library])
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "all_to_all":
        return lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
    part = torch.zeros(whole.numel() // ranks, device=DEVICES[library])
    # Newer versions of PyTorch have other names, and warn of these.
    if kind == "all_gather":
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return lambda: gather(whole, part, group=group)
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return lambda: scatter(part, whole, group=group)
