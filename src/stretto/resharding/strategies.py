"""Baselines: the ways to do one unit task of section 3.1 of the cross-mesh paper, tasks in a given order.

Tasks come one after the other: a device has one stream, and does what it is given in order (send/recv, all-gathers);
broadcasts follow a schedule of hosts, and a host does one at a time. With `concurrent` everything is issued at once and
shares the ports. All-gathers begin when every device has its slice, as the library calls do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .assign import Assignment
from .bundles import Bundle
from .hosts import Hosts
from .moves import Moves

PAPER_CHUNKS = 100
"""Into how many parts the paper cuts what it broadcasts."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all strategies are given."""

    hosts: Hosts
    assignment: Assignment
    concurrent: bool = False
    load: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """What each device d, and each host h (as -1 - h), has been given to send."""


def send_recv_chunks(bundle: Bundle, hosts: Hosts) -> int:
    """One message for the whole slice."""
    return 1


def local_allgather_chunks(bundle: Bundle, hosts: Hosts) -> int:
    """As many as every host's receivers can share evenly."""
    sizes = [sum(hosts.group[d] == g for d in bundle.missing) for g in hosts.groups(bundle.missing)]
    return math.lcm(*sizes) if sizes else 1


def global_allgather_chunks(bundle: Bundle, hosts: Hosts) -> int:
    """One slice for each receiver."""
    return max(1, len(bundle.missing))


def broadcast_chunks(bundle: Bundle, hosts: Hosts) -> int:
    """As the paper does."""
    return PAPER_CHUNKS


def send_recv(moves: Moves, bundle: Bundle, number: int, chunk: int, setting: Setting) -> None:
    """To every receiver the whole slice, from the holder with the least to do."""
    for device in bundle.missing:
        sender = _sender(bundle, setting, device)
        first = len(moves.src)
        moves.add(sender, device, chunk)
        _in_turn(moves, first, (sender, device), setting)


def local_allgather(moves: Moves, bundle: Bundle, number: int, chunk: int, setting: Setting) -> None:
    """To every host one copy, in slices to its receivers, which then gather them among themselves."""
    hosts = setting.hosts
    for group in hosts.groups(bundle.missing):
        members = [d for d in bundle.missing if hosts.group[d] == group]
        sender = _sender(bundle, setting, members[0])
        first = len(moves.src)
        _scatter_gather(moves, sender, members, chunk, bundle.chunks, barrier=not setting.concurrent)
        _in_turn(moves, first, (sender, *members), setting)


def global_allgather(moves: Moves, bundle: Bundle, number: int, chunk: int, setting: Setting) -> None:
    """One copy in slices over all receivers, which then gather them in a ring through all their hosts (Alpa's way)."""
    if not bundle.missing:
        return
    members = sorted(bundle.missing, key=lambda d: (setting.hosts.group[d], d))
    sender = _sender(bundle, setting, members[0], setting.assignment.sender[number])
    first = len(moves.src)
    _scatter_gather(moves, sender, members, chunk, bundle.chunks, barrier=not setting.concurrent)
    _in_turn(moves, first, (sender, *members), setting)


def broadcast(moves: Moves, bundle: Bundle, number: int, chunk: int, setting: Setting) -> None:
    """From device to device, host after host, each passing on what it has while more comes in (the paper's way)."""
    hosts = setting.hosts
    near = {hosts.group[d] for d in bundle.holders[0]}
    first = len(moves.src)
    far = sorted((d for d in bundle.missing if hosts.group[d] not in near), key=lambda d: (hosts.group[d], d))
    chains: list[list[int]] = [[_first(bundle, hosts, setting.assignment.sender[number]), *far]] if far else []
    for group in sorted(near):
        home = [d for d in bundle.missing if hosts.group[d] == group]
        if home:
            chains.append([_first(bundle, hosts, group), *home])
    for piece in range(chunk, chunk + bundle.chunks):
        for chain in chains:
            for src, dst in pairwise(chain):
                moves.add(src, dst, piece)
    _in_turn(moves, first, hosts.groups([d for chain in chains for d in chain]), setting)


def _scatter_gather(
    moves: Moves, sender: int, members: Sequence[int], chunk: int, chunks: int, *, barrier: bool
) -> None:
    count = len(members)
    mine: dict[int, list[int]] = defaultdict(list)
    for at in range(chunks):
        mine[at * count // chunks].append(chunk + at)
    scattered = [moves.add(sender, members[j], piece) for j in range(count) for piece in mine[j]]
    for step in range(count - 1):
        for j in range(count):
            for piece in mine[(j - step) % count]:
                moves.add(members[j], members[(j + 1) % count], piece, after=scattered if barrier and not step else ())


def _sender(bundle: Bundle, setting: Setting, receiver: int, chosen: int | None = None) -> int:
    """A holder on the receiver's own host; else on the `chosen` one, or the one with the least to send so far.

    Of a host's holders it is the device with the least to send, so that streams of one host run side by side.
    """
    hosts, load = setting.hosts, setting.load
    groups = hosts.groups(bundle.holders[0])
    host = hosts.group[receiver]
    if host not in groups:
        host = min(groups, key=lambda g: (load[-1 - g], g)) if chosen is None else chosen
        load[-1 - host] += bundle.nbytes
    device = min((d for d in bundle.holders[0] if hosts.group[d] == host), key=lambda d: (load[d], d))
    load[device] += bundle.nbytes
    return device


def _first(bundle: Bundle, hosts: Hosts, group: int) -> int:
    return next(d for d in bundle.holders[0] if hosts.group[d] == group)


def _in_turn(moves: Moves, first: int, whose: Sequence[int], setting: Setting) -> None:
    if not setting.concurrent:
        moves.in_turn(first, whose)


STRATEGIES: dict[str, tuple[Callable[[Moves, Bundle, int, int, Setting], None], Callable[[Bundle, Hosts], int]]] = {
    "send_recv": (send_recv, send_recv_chunks),
    "local_allgather": (local_allgather, local_allgather_chunks),
    "global_allgather": (global_allgather, global_allgather_chunks),
    "broadcast": (broadcast, broadcast_chunks),
}
