# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a job find each other: who shares a host, authenticated control connections, shared descriptors."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from ...errors import InvalidInput, PeerLost
from ...files import typed
from .handshake import Address, Handshakes, OutOfResources, unreachable

Exchange = Callable[[bytes], Sequence[bytes]]
SIOCGIFADDR = 0x8915
BACKLOG = 128
"""How many may have connected and not been accepted yet, other than the ranks of the job."""


class Hello(msgspec.Struct, frozen=True):
    """What every rank tells all others before any connection."""

    host: str
    path: str
    address: tuple[str, int]
    world: int


@dataclass(kw_only=True)
class JoinedDescriptors:
    """Descriptors, all owned by the caller."""

    local: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    bells: list[int] = field(default_factory=list)
    control: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            answer = fcntl.ioctl(s.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            known = ", ".join(each for _, each in socket.if_nameindex())
            text = f"interface: {name!r} has no IPv4 address ({error.strerror}); there are: {known}"
            raise InvalidInput(text) from error
    return socket.inet_ntoa(answer[20:24])


def host_key() -> str:
    """Equal for processes that may share memory: one kernel, one network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        kernel = boot.read().strip()
    return f"{kernel}:{os.stat('/proc/self/ns/net').st_ino}"


def join(
    rank: int,
    world: int,
    exchange: Exchange,
    *,
    token: bytes,
    interface: str,
    host: str,
    segment: Callable[[], int],
    timeout_s: float,
    watch: Callable[[], None],
) -> JoinedDescriptors:
    """Connect every two ranks, prove to each other that both know the token, and share descriptors inside a host.

    Args:
        rank: This rank.
        world: The number of ranks.
        exchange: Gives every rank's bytes to all of them.
        token: The secret of the job.
        interface: The network interface that other hosts reach.
        host: What tells this host from others.
        segment: Makes the descriptor of this rank's shared memory.
        timeout_s: How long to wait for all ranks.
        watch: Called while waiting; raises where a rank is known to be gone.

    Returns:
        The descriptors of connections, memory and wake-ups.

    Raises:
        PeerLost: A rank did not come in time, or left.
    """
    deadline = time.monotonic() + timeout_s
    joined = JoinedDescriptors(control=[-1] * world)
    with contextlib.ExitStack() as undo:
        segment_fd = segment()
        undo.callback(os.close, segment_fd)
        bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        undo.callback(os.close, bell)
        path = f"\0stretto-{secrets.token_hex(16)}"
        nearby = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        nearby.bind(path)
        nearby.listen(world + BACKLOG)
        remote = undo.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        remote.bind((interface_address(interface), 0))
        remote.listen(world + BACKLOG)
        hello = Hello(host=host, path=path[1:], address=remote.getsockname(), world=world)
        hellos = _hellos(exchange(msgspec.json.encode(hello)), world)
        joined.hosts = [h.host for h in hellos]
        sockets = _connect(rank, hellos, (nearby, remote), token, deadline, watch, undo)
        theirs: dict[int, tuple[int, int]] = {rank: (segment_fd, bell)}
        local = [r for r in range(world) if hellos[r].host == host]
        others = [peer for peer in local if peer != rank]
        for peer in others:
            try:
                socket.send_fds(sockets[peer], [b"f"], [segment_fd, bell])
            except OSError as error:
                raise unreachable(peer, error) from error
        for peer in others:
            theirs[peer] = _descriptors(sockets[peer], peer, undo)
        undo.pop_all()
        nearby.close()
        remote.close()
    joined.local = local
    joined.segments = [theirs[r][0] for r in local]
    joined.bells = [theirs[r][1] for r in local]
    for peer, each in sockets.items():
        each.setblocking(False)
        joined.control[peer] = each.detach()
    return joined


def _descriptors(s: socket.socket, peer: int, undo: contextlib.ExitStack) -> tuple[int, int]:
    """A peer's segment and bell."""
    try:
        message, fds, _, _ = socket.recv_fds(s, 1, 2)
    except OSError as error:
        raise unreachable(peer, error) from error
    for fd in fds:
        undo.callback(os.close, fd)
    if not message:
        raise PeerLost(f"rank {peer}: it left while joining")
    if len(fds) != 2:
        raise OutOfResources(f"descriptors: no room for those of rank {peer} (is the limit on open files reached?)")
    return fds[0], fds[1]


def _hellos(answers: Sequence[bytes], world: int) -> list[Hello]:
    if len(answers) != world:
        raise InvalidInput(f"exchange: must return {world} answers, one per rank, not {len(answers)}")
    hellos = []
    for rank, answer in enumerate(answers):
        try:
            hellos.append(msgspec.json.decode(answer, type=typed(Hello)))
        except msgspec.MsgspecError as error:
            raise InvalidInput(f"exchange: what rank {rank} said is not an executor's hello: {error}") from error
        if hellos[-1].world != world:
            raise InvalidInput(f"world_size: rank {rank} has {hellos[-1].world}, not {world}")
    return hellos


def _connect(
    rank: int,
    hellos: list[Hello],
    listening: Sequence[socket.socket],
    token: bytes,
    deadline: float,
    watch: Callable[[], None],
    undo: contextlib.ExitStack,
) -> dict[int, socket.socket]:
    """One socket per peer, both of whose ends have proved that they know the token."""

    def family(peer: int) -> socket.AddressFamily:
        return socket.AF_UNIX if hellos[peer].host == hellos[rank].host else socket.AF_INET

    calls: dict[int, tuple[socket.AddressFamily, Address]] = {
        peer: (family(peer), f"\0{hello.path}" if family(peer) == socket.AF_UNIX else hello.address)
        for peer, hello in enumerate(hellos[:rank])
    }
    callers = {peer: family(peer) for peer in range(rank + 1, len(hellos))}
    handshakes = Handshakes(rank, token, deadline=deadline, watch=watch)
    sockets = handshakes.run(listening, calls, callers)
    for peer, s in sockets.items():
        undo.enter_context(s)
        s.settimeout(_left(deadline, peer))
        if s.family == socket.AF_INET:
            _keep_alive(s)
    return sockets


def _left(deadline: float, peer: int) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise PeerLost(f"rank {peer}: it did not join in time")
    return left


def _keep_alive(s: socket.socket) -> None:
    """A host that vanishes without a word is noticed; a stopped process still answers (its kernel does)."""
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4)):
        s.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
