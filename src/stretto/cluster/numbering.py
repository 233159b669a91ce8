# SPDX-License-Identifier: Apache-2.0
"""Orders of a host's GPUs: those in which it looks like another host, or has the GPUs beside its NICs first.

TACCL's profiler renumbers the GPUs of each machine by an automorphism of their links, so that a program made for one
machine, with its NIC beside the first GPU, is right for all. `CUDA_VISIBLE_DEVICES` carries such an order out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput
from .model import NIC, Cluster

Matrix = NDArray[np.float64]
PCIE = "pcie"
TOLERANCE = 0.15
"""Rates that differ by no more are those of the same machine."""
MAX_TRIES = 20_000
FAR = 1 << 20


@dataclass(frozen=True, kw_only=True, eq=False)
class HostStructure:
    """What tells the GPUs of one host apart: direct rates, and how far they are from one another and from NICs."""

    direct: Matrix
    """GB/s of the links other than PCIe from each GPU to each, one switch at most in between; 0: there is none."""
    near: NDArray[np.int64]
    """How far two GPUs are apart on PCIe: 0 for the nearest two parts of the host, 1 for the next distance, ..."""
    nics: tuple[tuple[int, int], ...]
    """The same for each GPU and its nearest NIC, and how many are as near; ``(FAR, 0)`` where there is none."""


def structure(host: Cluster) -> HostStructure:
    """What tells the GPUs of a host apart.

    >>> found = structure(Cluster.preset("ndv2", nodes=1))
    >>> found.direct.shape, len(found.nics)
    ((8, 8), 8)

    Args:
        host: A cluster of one host.

    Returns:
        Its structure.

    Raises:
        InvalidInput: The cluster has several hosts.
    """
    if host.num_hosts != 1:
        raise InvalidInput(f"{host.name}: GPUs are numbered inside one host; it has {host.num_hosts}")
    count = host.num_devices
    on_pcie = host.link_channel == (host.channels.index(PCIE) if PCIE in host.channels else -1)
    rate = np.zeros((host.num_nodes, host.num_nodes))
    np.add.at(rate, (host.link_src[~on_pcie], host.link_dst[~on_pcie]), host.link_gb_per_s[~on_pcie])
    up, down = rate[:count, count:], rate[count:, :count]
    through = np.minimum(up[:, :, None], down[None]).max(axis=1, initial=0.0)
    direct = np.maximum(rate[:count, :count], through)
    np.fill_diagonal(direct, 0.0)
    beside = np.zeros((host.num_nodes, host.num_nodes), np.bool_)
    beside[host.link_src[on_pcie], host.link_dst[on_pcie]] = True
    hops = _hops(beside | beside.T)[:count]
    cards = np.flatnonzero(host.node_kind == NIC)
    known = np.unique(hops[:, [*range(count), *cards]])
    known = known[(known > 0) & (known < FAR)]
    place = np.searchsorted(known, hops)
    place[hops >= FAR] = FAR
    least = place[:, cards].min(axis=1, initial=FAR)
    nics = [(int(low), int((place[at, cards] == low).sum()) if low < FAR else 0) for at, low in enumerate(least)]
    near = place[:, :count].copy()
    np.fill_diagonal(near, 0)
    return HostStructure(direct=direct, near=near.astype(np.int64), nics=tuple(nics))


def numbering(host: Cluster, like: Cluster | None = None, *, tolerance: float = TOLERANCE) -> tuple[int, ...] | None:
    """The order of a host's GPUs in which it looks like another one, or has those beside its NICs first.

    Without `like` the host stays what it is (the order is an automorphism of its links between GPUs); of all such
    orders the one is taken whose first GPUs are nearest to a NIC.

    >>> numbering(Cluster.preset("ndv2", nodes=1), Cluster.preset("ndv2", nodes=1))
    (0, 1, 2, 3, 4, 5, 6, 7)

    Args:
        host: A cluster of one host.
        like: Another one; None takes `host` itself, whose NICs then need not stay where they are.
        tolerance: By which share rates may differ.

    Returns:
        ``order[i]``, the present number of the GPU that should have number i; None where the hosts differ.

    Raises:
        InvalidInput: A cluster has several hosts.
    """
    mine = structure(host)
    theirs = mine if like is None else structure(like)
    count = len(mine.nics)
    if len(theirs.nics) != count:
        return None
    prefer = sorted(range(count), key=lambda gpu: (mine.nics[gpu][0], gpu))
    alike = np.ones((count, count), np.bool_)
    if like is not None:
        alike = np.array([[a == b for a in mine.nics] for b in theirs.nics])
    pairs = [(mine.direct, theirs.direct, tolerance), (mine.near.astype(float), theirs.near.astype(float), 0.0)]
    return placed(pairs, prefer=prefer, alike=alike)


def visible_devices(order: Sequence[int]) -> str:
    """The value of `CUDA_VISIBLE_DEVICES` that numbers GPUs so.

    >>> visible_devices((2, 3, 0, 1))
    '2,3,0,1'
    """
    return ",".join(map(str, order))


def placed(
    pairs: Sequence[tuple[Matrix, Matrix, float]], *, prefer: Sequence[int], alike: NDArray[np.bool_] | None = None,
    max_tries: int = MAX_TRIES,
) -> tuple[int, ...] | None:  # fmt: skip
    """The first order, by preference, under which all matrices look like others.

    Args:
        pairs: A matrix of ours, the one that it should look like, and the share by which entries may differ.
        prefer: Our numbers in the order in which they are tried at each place.
        alike: Whether each of ours (columns) may stand at each place (rows); None: everywhere.
        max_tries: Numbers that are looked at before it gives up.

    Returns:
        ``order[i]``, our number that stands at place i; None where there is no such order or none was found.
    """
    count = len(prefer)

    def fits(mine: int, order: list[int]) -> bool:
        at = len(order)
        if alike is not None and not alike[at, mine]:
            return False
        for ours, theirs, share in pairs:
            for left, right in ((ours[mine, order], theirs[at, :at]), (ours[order, mine], theirs[:at, at])):
                if np.any(np.abs(left - right) > share * right):
                    return False
        return True

    order: list[int] = []
    choices: list[Iterator[int]] = [iter(prefer)]
    for _ in range(max_tries):
        if len(order) == count:
            return tuple(order)
        if not choices:
            return None
        one = next((one for one in choices[-1] if one not in order and fits(one, order)), None)
        if one is None:
            choices.pop()
            if order:
                order.pop()
            continue
        order.append(one)
        choices.append(iter(prefer))
    return tuple(order) if len(order) == count else None


def _hops(beside: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many links apart two nodes are; `FAR` where no way leads from one to the other."""
    count = len(beside)
    hops = np.where(np.eye(count, dtype=np.bool_), 0, FAR).astype(np.int64)
    reached = np.eye(count, dtype=np.bool_)
    for step in range(1, count):
        more = (reached @ beside) & ~reached
        if not more.any():
            break
        hops[more] = step
        reached |= more
    return hops


__all__ = ["HostStructure", "numbering", "placed", "structure", "visible_devices"]
