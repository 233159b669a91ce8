# SPDX-License-Identifier: Apache-2.0
"""Devices outside a group that may forward, copy and add for it: who they are, and what a program asks of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cluster import Cluster
from ..errors import InvalidInput, unknown
from ..programs import Program, SymmetricProgram
from ..units import format_bytes

CHOICES = ("auto", "none", "host", "all")
"""Which devices may help: "none", those on the group's hosts ("host") or "all"; "auto" takes none where that works."""


@dataclass(frozen=True, kw_only=True)
class HelperDuty:
    """What a program asks of one device outside its group, in bytes."""

    device: int
    name: str
    receives: float
    adds: float
    """The part of what it receives that it adds to what it holds."""
    sends: float


def resolve(cluster: Cluster, members: Sequence[int], wanted: str | Sequence[int] | None) -> tuple[int, ...]:
    """The devices that may help a group.

    Args:
        cluster: The cluster.
        members: The devices of the group.
        wanted: One of `CHOICES`, or the devices themselves; "auto" when not given.

    Returns:
        The devices, none of them in the group.

    Raises:
        InvalidInput: A word is unknown, or a device does not exist or is in the group.

    >>> rails = Cluster.preset("dgx_h100", nodes=2)
    >>> resolve(rails, [0, 1, 8], "host")[:3], resolve(rails, range(16), "all"), resolve(rails, [0, 8], None)
    ((2, 3, 4), (), ())
    """
    if wanted is not None and not isinstance(wanted, str):
        return _given(cluster, members, [int(device) for device in wanted])
    word = wanted or "auto"
    if word not in CHOICES:
        raise unknown("helpers", word, [*CHOICES, "or devices"])
    outside = sorted(set(range(cluster.num_devices)) - set(members))
    if word == "none" or not outside:
        return ()
    if word == "all":
        return tuple(outside)
    if word == "auto" and reach_each_other(cluster, members):
        return ()
    hosts = set(cluster.hosts_of(members).tolist())
    near = tuple(device for device in outside if int(cluster.hosts_of([device])[0]) in hosts)
    # As NCCL does: where GPUs of two hosts share no rail, their NVLink peers forward.
    return near if word == "host" or reach_each_other(cluster, [*members, *near]) else ()


def _given(cluster: Cluster, members: Sequence[int], devices: Sequence[int]) -> tuple[int, ...]:
    bad = [device for device in devices if not 0 <= device < cluster.num_devices]
    if bad:
        raise InvalidInput(f"helpers: device {bad[0]} does not exist; {cluster.name} has {cluster.num_devices} devices")
    both = sorted(set(devices) & set(members))
    if both:
        raise InvalidInput(f"helpers: device {both[0]} is in the group")
    if len(set(devices)) < len(devices):
        raise InvalidInput("helpers: names a device twice")
    return tuple(devices)


def reach_each_other(cluster: Cluster, devices: Sequence[int]) -> bool:
    """Whether each of the devices reaches all others, by relaying among them, without passing another device."""
    inside = np.ones(cluster.num_nodes, np.bool_)
    if not cluster.devices_forward:
        inside[: cluster.num_devices] = False
        inside[list(devices)] = True
    used = inside[cluster.link_src] & inside[cluster.link_dst]
    src, dst = cluster.link_src[used], cluster.link_dst[used]
    return all(_reached(a, b, cluster.num_nodes, devices) for a, b in ((src, dst), (dst, src)))


def _reached(src: NDArray[np.int32], dst: NDArray[np.int32], count: int, devices: Sequence[int]) -> bool:
    reached = np.zeros(count, np.bool_)
    reached[devices[0]] = True
    before = 0
    while (now := int(np.count_nonzero(reached))) > before:
        before = now
        reached[dst[reached[src]]] = True
    return bool(reached[list(devices)].all())


def duties(program: Program | SymmetricProgram, cluster: Cluster, nbytes: float) -> tuple[HelperDuty, ...]:
    """What a program asks of each of its helpers when the collective moves `nbytes`.

    Args:
        program: The program.
        cluster: The cluster whose devices its ranks are.
        nbytes: The size of the collective.

    Returns:
        One entry for each helper, in the order of ranks.
    """
    if isinstance(program, SymmetricProgram) or not program.collective.helpers:
        return ()
    c, size = program.collective, program.transfer_bytes(nbytes)
    sends, receives, adds = (
        np.bincount(rank, weights, c.num_ranks)
        for rank, weights in ((program.src, size), (program.dst, size), (program.dst, size * program.reduce))
    )
    return tuple(
        HelperDuty(
            device=c.ranks[rank],
            name=cluster.node_names[c.ranks[rank]],
            receives=float(receives[rank]),
            adds=float(adds[rank]),
            sends=float(sends[rank]),
        )
        for rank in range(len(c.members), c.num_ranks)
    )


def in_words(duties: Sequence[HelperDuty]) -> str:
    """A sentence about all helpers; empty where there are none."""
    if not duties:
        return ""
    total = {key: sum(getattr(duty, key) for duty in duties) for key in ("receives", "adds", "sends")}
    names = ", ".join(duty.name for duty in duties[:4]) + ", ..." * (len(duties) > 4)
    adds = f", add {format_bytes(round(total['adds']))}" if total["adds"] else ""
    return (
        f"{len(duties)} device{'s' * (len(duties) > 1)} outside the group must run it too ({names}): they receive "
        f"{format_bytes(round(total['receives']))}{adds} and send {format_bytes(round(total['sends']))}"
    )


def hint(cluster: Cluster, members: Sequence[int], helpers: Sequence[int]) -> str:
    """The option that would let a group reach itself that cannot.

    Args:
        cluster: The cluster.
        members: The devices of the group.
        helpers: The devices that were allowed to help.

    Returns:
        The end of a sentence; empty where no option would help.
    """
    if helpers or reach_each_other(cluster, members):
        return ""
    if not reach_each_other(cluster, range(cluster.num_devices)):
        return ""
    return "; the group's devices reach each other only through others: with helpers 'host' or 'all' those may forward"
