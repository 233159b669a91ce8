# SPDX-License-Identifier: Apache-2.0
"""What `stretto run` does otherwise for jobs on NCCL: how iterations are timed, and what its collectives cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from ..cluster import Cluster, Link, Node
from ..runtime.torch_backend.own_backend import on_ours

SMALL, FIRST, LARGE = 1 << 10, 1 << 20, 1 << 24
"""Bytes of the sums that are timed; the largest only where the one before is fast."""
FAST_US = 5000.0
TIMES = 5
CHANNEL = "nccl"


class GpuPace:
    """Keeps the host at most one iteration ahead of the GPU, so that the time between two ends is an iteration's.

    The GPU never runs empty for it: the host waits for the end of the iteration before the one that it has just issued.
    """

    def __init__(self, on: bool) -> None:
        self._on = on
        self._before: Any = None

    def iteration(self) -> None:
        """An iteration ends here, for the host."""
        if not self._on:
            return
        import torch

        cuda: Any = torch.cuda
        event = cuda.Event()
        event.record()
        if self._before is not None:
            self._before.synchronize()
        self._before = event


def nccl_small_us() -> float:
    """What a sum of a few bytes takes on NCCL, the same on all ranks."""
    return _all_reduce_us(SMALL, None)


def nccl_cluster(hosts: Sequence[str]) -> Cluster:
    """A cluster of the job's ranks, by the times of NCCL's sums: inside of hosts and over all; a collective call.

    Args:
        hosts: The host of each rank.

    Returns:
        Devices on one switch per host, whose rates and latencies make a ring take as long as was measured.
    """
    import torch.distributed as dist

    names = list(dict.fromkeys(hosts))
    ranks = [[rank for rank, host in enumerate(hosts) if host == name] for name in names]
    inside: list[tuple[float, float]] = []
    if len(names) > 1:
        mine: Any = None
        for members in ranks:
            # All ranks make all groups.
            group = dist.new_group(members)
            mine = group if dist.get_rank() in members else mine
        sizes = [len(members) for members in ranks]
        inside = [fitted(max(sizes), *_agreed(_times(mine) if max(sizes) > 1 and min(sizes) > 1 else (0.0, 0.0, 0)))]
    between = fitted(len(hosts), *_agreed(_times(None)))
    return cluster_of(ranks, inside[0] if inside and inside[0][1] > 0 else between, between)


def fitted(ranks: int, small_us: float, large_us: float, large_bytes: float) -> tuple[float, float]:
    """The latency (us) and rate (GB/s) of a link with which a ring's sum of two sizes takes what was measured.

    A ring of n ranks takes 2 (n - 1) steps of one n-th of the bytes.

    >>> fitted(2, 20.0, 1020.0, 1e6)
    (10.0, 1.0)
    """
    steps = 2 * (ranks - 1)
    if steps < 1 or large_us <= small_us or not large_bytes:
        return 0.0, 0.0
    rate = steps * large_bytes / ranks / (large_us - small_us) / 1e3
    return small_us / steps, rate


def cluster_of(ranks: Sequence[Sequence[int]], inside: tuple[float, float], between: tuple[float, float]) -> Cluster:
    """Hosts with these ranks, and links of these latencies and rates.

    Args:
        ranks: Of each host.
        inside: Latency and rate of a device's link in its host.
        between: The same of a host's uplink; of one host not used.

    Returns:
        The cluster; device r is rank r.
    """
    host_of = {rank: host for host, members in enumerate(ranks) for rank in members}
    nodes = [Node(name=f"h{host_of[rank]}.gpu{rank}", host=host_of[rank]) for rank in sorted(host_of)]
    links = []

    def both(a: int, b: int, latency_us: float, gb_per_s: float) -> None:
        links.append(Link(src=a, dst=b, alpha_us=latency_us, gb_per_s=gb_per_s, channel=CHANNEL))
        links.append(Link(src=b, dst=a, alpha_us=0.0, gb_per_s=gb_per_s, channel=CHANNEL))

    core = -1
    if len(ranks) > 1:
        nodes.append(Node(name="core", kind="switch", host=-1))
        core = len(nodes) - 1
    for host, members in enumerate(ranks):
        nodes.append(Node(name=f"h{host}.switch", kind="switch", host=host))
        switch = len(nodes) - 1
        for rank in members:
            both(rank, switch, _digits(inside[0]), _digits(inside[1]))
        if core >= 0:
            both(switch, core, _digits(max(between[0] - inside[0], 0.0)), _digits(between[1]))
    return Cluster.build("nccl", nodes=nodes, links=links, notes=("from the times of NCCL's sums in this job",))


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _times(group: Any) -> tuple[float, float, float]:
    """The time of a small and of a large sum, and the bytes of the latter."""
    small_us = _all_reduce_us(SMALL, group)
    large, large_us = FIRST, _all_reduce_us(FIRST, group)
    # All ranks must call the same, so the first of the group decides.
    if _shared(large_us, group) < FAST_US:
        large, large_us = LARGE, _all_reduce_us(LARGE, group)
    return small_us, large_us, float(large)


def _agreed(times: tuple[float, float, float]) -> tuple[float, float, float]:
    """Rank 0's, on all ranks."""
    import torch
    import torch.distributed as dist

    values = torch.tensor(times, dtype=torch.float64, device="cuda")
    dist.broadcast(values, 0)
    small_us, large_us, nbytes = values.tolist()
    return small_us, large_us, nbytes


def _shared(value: float, group: Any) -> float:
    import torch
    import torch.distributed as dist

    found = torch.tensor(value, dtype=torch.float64, device="cuda")
    dist.broadcast(found, dist.get_global_rank(group, 0) if group is not None else 0, group=group)
    return float(found)


def _all_reduce_us(nbytes: int, group: Any) -> float:
    """The median time of a sum, from an idle GPU until it has ended."""
    import torch
    import torch.distributed as dist

    value = torch.zeros(nbytes // 4, device="cuda")
    took = []
    with on_ours(False):
        for turn in range(TIMES + 2):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            dist.all_reduce(value, group=group)
            torch.cuda.synchronize()
            if turn > 1:
                # Connections are made in the first.
                took.append((time.perf_counter() - begin) * 1e6)
    return median(took)
