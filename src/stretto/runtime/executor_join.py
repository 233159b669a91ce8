"""How the ranks of a job find each other: who shares a host, authenticated control connections, shared descriptors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from ..errors import InvalidInput, PeerLost, StrettoError
from ..files import typed

Exchange = Callable[[bytes], Sequence[bytes]]
HELLO = struct.Struct("<8sI32s")
MAGIC = b"stretto1"
SIOCGIFADDR = 0x8915
STRANGER_S = 2.0
"""How long somebody who connects may take to say who it is."""
TICK_S = 0.2


class OutOfResources(StrettoError):
    """Descriptors or shared memory ran out; the message says which, on which rank."""


class Hello(msgspec.Struct, frozen=True):
    """What every rank tells all others before any connection."""

    host: str
    path: str
    address: tuple[str, int]
    world: int


@dataclass(kw_only=True)
class Joined:
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
) -> Joined:
    """Connect every two ranks, prove to each other that both know the token, and share descriptors inside a host."""
    deadline = time.monotonic() + timeout_s
    joined = Joined(control=[-1] * world)
    with contextlib.ExitStack() as undo:
        segment_fd = segment()
        undo.callback(os.close, segment_fd)
        bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        undo.callback(os.close, bell)
        path = f"\0stretto-{secrets.token_hex(16)}"
        nearby = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        nearby.bind(path)
        nearby.listen(world)
        remote = undo.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        remote.bind((interface_address(interface), 0))
        remote.listen(world)
        hello = Hello(host=host, path=path[1:], address=remote.getsockname(), world=world)
        hellos = _hellos(exchange(msgspec.json.encode(hello)), world)
        joined.hosts = [h.host for h in hellos]
        sockets = _connect(rank, hellos, nearby, remote, token, deadline, watch, undo)
        theirs: dict[int, tuple[int, int]] = {rank: (segment_fd, bell)}
        local = [r for r in range(world) if hellos[r].host == host]
        others = [peer for peer in local if peer != rank]
        for peer in others:
            try:
                socket.send_fds(sockets[peer], [b"f"], [segment_fd, bell])
            except OSError as error:
                raise _unreachable(peer, error) from error
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
        raise _unreachable(peer, error) from error
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


def _proof(token: bytes, side: bytes, *parts: bytes) -> bytes:
    return hmac.new(token, side + b"".join(parts), hashlib.sha256).digest()


def _connect(
    rank: int,
    hellos: list[Hello],
    nearby: socket.socket,
    remote: socket.socket,
    token: bytes,
    deadline: float,
    watch: Callable[[], None],
    undo: contextlib.ExitStack,
) -> dict[int, socket.socket]:
    """One socket per peer. The higher rank connects; both sides answer the other's challenge with the token."""
    sockets: dict[int, socket.socket] = {}
    nonces: dict[int, bytes] = {}
    for peer in range(rank):
        there = hellos[peer]
        same = there.host == hellos[rank].host
        s = undo.enter_context(socket.socket(socket.AF_UNIX if same else socket.AF_INET, socket.SOCK_STREAM))
        s.settimeout(_left(deadline, peer))
        nonces[peer] = secrets.token_bytes(32)
        try:
            s.connect("\0" + there.path if same else tuple(there.address))
            s.sendall(HELLO.pack(MAGIC, rank, nonces[peer]))
        except OSError as error:
            raise _unreachable(peer, error) from error
        sockets[peer] = s
    expected = set(range(rank + 1, len(hellos)))
    challenges: dict[int, tuple[bytes, bytes]] = {}
    while expected:
        s = _accept(nearby, remote, deadline, min(expected), watch)
        who = _introduction(s, expected, hellos, rank, token, challenges)
        if who is None:
            s.close()
            continue
        undo.enter_context(s)
        expected.discard(who)
        sockets[who] = s
    for peer in range(rank):
        answer = _read(sockets[peer], 64, peer, deadline)
        challenge = answer[:32]
        if not hmac.compare_digest(answer[32:], _proof(token, b"accept", nonces[peer], challenge, bytes([peer & 255]))):
            raise PeerLost(f"rank {peer}: it does not know this job's token")
        try:
            sockets[peer].sendall(_proof(token, b"connect", challenge, nonces[peer]))
        except OSError as error:
            raise _unreachable(peer, error) from error
    for peer, (challenge, nonce) in challenges.items():
        proof = _read(sockets[peer], 32, peer, deadline)
        if not hmac.compare_digest(proof, _proof(token, b"connect", challenge, nonce)):
            raise PeerLost(f"rank {peer}: it does not know this job's token")
    for peer, s in sockets.items():
        s.settimeout(_left(deadline, peer))
        if s.family == socket.AF_INET:
            _keep_alive(s)
    return sockets


def _introduction(
    s: socket.socket,
    expected: set[int],
    hellos: list[Hello],
    rank: int,
    token: bytes,
    challenges: dict[int, tuple[bytes, bytes]],
) -> int | None:
    """Who connected, or None for a stranger."""
    s.settimeout(STRANGER_S)
    try:
        words = b""
        while len(words) < HELLO.size:
            more = s.recv(HELLO.size - len(words))
            if not more:
                return None
            words += more
        magic, who, nonce = HELLO.unpack(words)
        if magic != MAGIC or who not in expected:
            return None
        if (s.family == socket.AF_UNIX) != (hellos[who].host == hellos[rank].host):
            return None
        challenge = secrets.token_bytes(32)
        s.sendall(challenge + _proof(token, b"accept", nonce, challenge, bytes([rank & 255])))
    except OSError:
        return None
    challenges[who] = challenge, nonce
    return int(who)


def _accept(
    nearby: socket.socket, remote: socket.socket, deadline: float, missing: int, watch: Callable[[], None]
) -> socket.socket:
    # Not `select.select`, which takes no descriptor above 1023.
    listening = {s.fileno(): s for s in (nearby, remote)}
    ready = select.poll()
    for number in listening:
        ready.register(number, select.POLLIN)
    while True:
        for number, _ in ready.poll(1e3 * min(_left(deadline, missing), TICK_S)):
            return listening[number].accept()[0]
        watch()


def _read(s: socket.socket, size: int, peer: int, deadline: float) -> bytes:
    words = b""
    try:
        while len(words) < size:
            s.settimeout(_left(deadline, peer))
            more = s.recv(size - len(words))
            if not more:
                raise ConnectionResetError
            words += more
    except OSError as error:
        raise _unreachable(peer, error) from error
    return words


def _left(deadline: float, peer: int) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise PeerLost(f"rank {peer}: it did not join in time")
    return left


def _unreachable(peer: int, error: OSError) -> StrettoError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return OutOfResources(f"descriptors: none left to connect to rank {peer}: {error.strerror}")
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return PeerLost(f"rank {peer}: it ended the connection while joining (a different token, or it failed)")
    return PeerLost(f"rank {peer}: it cannot be reached while joining: {error}")


def _keep_alive(s: socket.socket) -> None:
    """A host that vanishes without a word is noticed; a stopped process still answers (its kernel does)."""
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4)):
        s.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
