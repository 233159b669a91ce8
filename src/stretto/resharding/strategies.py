# SPDX-License-Identifier: Apache-2.0
"""The baselines of section 3.1 of the cross-mesh paper: ways to do one unit task, with tasks in a given order.

Tasks run one after the other: a device has one stream and does its tasks in order (send/recv, all-gathers); broadcasts
follow a schedule of hosts, and a host does one at a time. With `concurrent` all tasks are issued at once and share the
ports. All-gathers begin when every device has its slice, as library calls do. Sums that are pending are added up first,
from device to device, and then moved from the last of them; the paper has none.

An entry of `STRATEGIES` is a pair of functions. The second, ``chunks(bundle, hosts) -> int``, is called first and once
per unit task; it says into how many chunks the task is cut. The first, ``work(moves, bundle, number, chunk,
arguments)``, is then called once per task in the order of the assignment; it adds to `moves` transfers that bring the
chunks ``chunk .. chunk + bundle.chunks - 1`` from holders to all devices in ``bundle.missing``. The program is
verified, so a strategy that forgets a device is refused. Both functions run in the process that plans and must be
deterministic.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from .assign import Assignment
from .bundles import Bundle
from .hosts import Hosts
from .moves import Moves

PAPER_CHUNKS = 100
"""The number of chunks into which the paper cuts a broadcast."""


@dataclass(frozen=True, kw_only=True)
class ReshardArguments:
    """The arguments that all strategies share."""

    hosts: Hosts
    assignment: Assignment
    concurrent: bool = False
    load: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Bytes that each device d, and each host h (under the key -1 - h), has been given to send so far."""


def send_recv_chunks(bundle: Bundle, hosts: Hosts) -> int:
    """One chunk: the whole slice is one message."""
    return 1


def local_allgather_chunks(bundle: Bundle, hosts: Hosts) -> int:
    """As many chunks as the receivers of every host can share evenly."""
    sizes = [sum(hosts.group[d] == g for d in bundle.missing) for g in hosts.groups(bundle.missing)]
    return math.lcm(*sizes) if sizes else 1


def global_allgather_chunks(bundle: Bundle, hosts: Hosts) -> int:
    """One chunk for each receiver."""
    return max(1, len(bundle.missing))


def broadcast_chunks(bundle: Bundle, hosts: Hosts) -> int:
    """As many chunks as the paper uses, `PAPER_CHUNKS`."""
    return PAPER_CHUNKS


def send_recv(moves: Moves, bundle: Bundle, number: int, chunk: int, arguments: ReshardArguments) -> None:
    """Send the whole slice to every receiver, each time from the least loaded holder.

    Args:
        moves: receives the transfers.
        bundle: the task.
        number: number of the task.
        chunk: number of its first chunk.
        arguments: hosts, assignment and loads, which are updated.
    """
    for device in bundle.missing:
        sender = _sender(bundle, arguments, device)
        first = len(moves.src)
        moves.add(sender, device, chunk)
        _in_turn(moves, first, (sender, device), arguments)


def local_allgather(moves: Moves, bundle: Bundle, number: int, chunk: int, arguments: ReshardArguments) -> None:
    """Send one copy to every host, in slices to its receivers, which then gather the slices among themselves.

    Args:
        moves: receives the transfers.
        bundle: the task.
        number: number of the task.
        chunk: number of its first chunk.
        arguments: hosts, assignment and loads, which are updated.
    """
    hosts = arguments.hosts
    for group in hosts.groups(bundle.missing):
        members = [d for d in bundle.missing if hosts.group[d] == group]
        sender = _sender(bundle, arguments, members[0])
        first = len(moves.src)
        _scatter_gather(moves, sender, members, chunk, bundle.chunks, barrier=not arguments.concurrent)
        _in_turn(moves, first, (sender, *members), arguments)


def global_allgather(moves: Moves, bundle: Bundle, number: int, chunk: int, arguments: ReshardArguments) -> None:
    """Send one copy in slices over all receivers, which then gather them in a ring through all their hosts (as Alpa
    does).

    Args:
        moves: receives the transfers.
        bundle: the task.
        number: number of the task.
        chunk: number of its first chunk.
        arguments: hosts, assignment and loads, which are updated.
    """
    if not bundle.missing:
        return
    members = sorted(bundle.missing, key=lambda d: (arguments.hosts.group[d], d))
    sender = _sender(bundle, arguments, members[0], arguments.assignment.sender[number])
    first = len(moves.src)
    _scatter_gather(moves, sender, members, chunk, bundle.chunks, barrier=not arguments.concurrent)
    _in_turn(moves, first, (sender, *members), arguments)


def broadcast(moves: Moves, bundle: Bundle, number: int, chunk: int, arguments: ReshardArguments) -> None:
    """Send chunks from device to device, host after host; a device passes chunks on while more arrive (as the paper
    does).

    Args:
        moves: receives the transfers.
        bundle: the task.
        number: number of the task.
        chunk: number of its first chunk.
        arguments: hosts, assignment and loads.
    """
    hosts = arguments.hosts
    near = {hosts.group[d] for d in bundle.holders[0]}
    first = len(moves.src)
    far = sorted((d for d in bundle.missing if hosts.group[d] not in near), key=lambda d: (hosts.group[d], d))
    chains: list[list[int]] = [[_first(bundle, hosts, arguments.assignment.sender[number]), *far]] if far else []
    for group in sorted(near):
        home = [d for d in bundle.missing if hosts.group[d] == group]
        if home:
            chains.append([_first(bundle, hosts, group), *home])
    for piece in range(chunk, chunk + bundle.chunks):
        for chain in chains:
            for src, dst in pairwise(chain):
                moves.add(src, dst, piece)
    _in_turn(moves, first, hosts.groups([d for chain in chains for d in chain]), arguments)


def summed(bundle: Bundle) -> Bundle:
    """The bundle after its pending sum is done: on the last of the devices along which `add_up` goes."""
    if not bundle.reduction:
        return bundle
    last = bundle.holders[-1][0]
    missing = tuple(d for d in bundle.receivers if d != last)
    return replace(bundle, holders=((last,),), missing=missing, reduction="")


def add_up(moves: Moves, bundle: Bundle, chunk: int) -> None:
    """Add the summands of a bundle up, from one holder of each to the next; nothing where no sum is pending.

    Args:
        moves: receives the transfers.
        bundle: the task.
        chunk: number of its first chunk.
    """
    devices = [alike[0] for alike in bundle.holders] if bundle.reduction else []
    for piece in range(chunk, chunk + bundle.chunks):
        for src, dst in pairwise(devices):
            moves.add(src, dst, piece, reduce=True)


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


def _sender(bundle: Bundle, arguments: ReshardArguments, receiver: int, chosen: int | None = None) -> int:
    """A holder on the receiver's own host; else on the `chosen` host, or on the host with the fewest bytes to send so
    far.

    Among the holders of a host the device with the fewest bytes to send is taken, so that streams of one host run in
    parallel.
    """
    hosts, load = arguments.hosts, arguments.load
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


def _in_turn(moves: Moves, first: int, whose: Sequence[int], arguments: ReshardArguments) -> None:
    if not arguments.concurrent:
        moves.in_turn(first, whose)


TaskFunction = Callable[[Moves, Bundle, int, int, ReshardArguments], None]
STRATEGIES: dict[str, tuple[TaskFunction, Callable[[Bundle, Hosts], int]]] = {
    "send_recv": (send_recv, send_recv_chunks),
    "local_allgather": (local_allgather, local_allgather_chunks),
    "global_allgather": (global_allgather, global_allgather_chunks),
    "broadcast": (broadcast, broadcast_chunks),
}
