# SPDX-License-Identifier: Apache-2.0
"""Ranks join whatever strangers do on their sockets meanwhile: everybody gets its own place, and only it."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from stretto.errors import PeerLost
from stretto.runtime.executor import handshake as executor_handshake
from stretto.runtime.executor.join import Hello, JoinedDescriptors, join

TOKEN = b"a token for tests only"
RANKS = 4
LIMIT_S = 400.0
MOST_HELD = 200


def greeting(rank: int) -> bytes:
    """What a rank says first, which nobody needs a token for."""
    return executor_handshake.HELLO.pack(executor_handshake.MAGIC, rank, bytes(32))


class Strangers:
    """They know where every rank listens, come before the ranks do, and stay."""

    def __init__(self, attack: Callable[[Strangers, Callable[[], socket.socket]], None], near: bool) -> None:
        self._attack, self._near = attack, near
        self._held: list[socket.socket] = []
        self._lock = threading.Lock()
        self.over = threading.Event()

    def hold(self, s: socket.socket) -> None:
        """Keep a connection open; strangers share this process's descriptors with the ranks, so the oldest goes."""
        with self._lock:
            self._held.append(s)
            if len(self._held) > MOST_HELD:
                self._held.pop(0).close()

    def come(self, hello: Hello) -> None:
        """Attack who listens there."""

        def connect() -> socket.socket:
            s = socket.socket(socket.AF_UNIX if self._near else socket.AF_INET)
            s.settimeout(2)
            s.connect("\0" + hello.path if self._near else tuple(hello.address))
            return s

        with contextlib.suppress(OSError):
            self._attack(self, connect)

    def keep_coming(self, hello: Hello) -> None:
        """Attack again and again until all is over."""
        while not self.over.wait(0.001):
            self.come(hello)

    def leave(self) -> None:
        """Close everything."""
        self.over.set()
        for s in self._held:
            s.close()


def impersonate(strangers: Strangers, connect: Callable[[], socket.socket]) -> None:
    """Say to be each of the ranks, and prove nothing."""
    for rank in range(RANKS):
        s = connect()
        strangers.hold(s)
        s.sendall(greeting(rank))


def say_nothing(strangers: Strangers, connect: Callable[[], socket.socket]) -> None:
    """Connect, and wait."""
    for _ in range(20):
        strangers.hold(connect())


def trickle(strangers: Strangers, connect: Callable[[], socket.socket]) -> None:
    """A greeting, byte by byte."""

    def drip() -> None:
        with contextlib.suppress(OSError), connect() as s:
            for byte in greeting(RANKS - 1) + bytes(32):
                s.sendall(bytes([byte]))
                if strangers.over.wait(0.2):
                    return

    threading.Thread(target=drip, daemon=True).start()


def lie(_: Strangers, connect: Callable[[], socket.socket]) -> None:
    """A good greeting, and a proof that is none."""
    with connect() as s:
        s.sendall(greeting(RANKS - 1))
        s.recv(64)
        s.sendall(bytes(32))
        s.recv(1)


def babble(_: Strangers, connect: Callable[[], socket.socket]) -> None:
    """Anything."""
    with connect() as s:
        s.sendall(random.Random(7).randbytes(5000))


def hang_up(_: Strangers, connect: Callable[[], socket.socket]) -> None:
    """Connect and leave at once, without a word or in the middle of one."""
    for words in (b"", b"str", greeting(1)):
        with connect() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            s.sendall(words)


def joined(
    strangers: Strangers | None, *, near: bool, timeout_s: float = LIMIT_S, tokens: Sequence[bytes] = (TOKEN,) * RANKS
) -> list[JoinedDescriptors | PeerLost]:
    """What the ranks, each in a thread of its own, get when they join."""
    answers = [b""] * RANKS
    all_said, all_attacked = threading.Barrier(RANKS), threading.Barrier(RANKS)

    def segment() -> int:
        return os.memfd_create("test", os.MFD_CLOEXEC)

    def rank_main(rank: int) -> JoinedDescriptors | PeerLost:
        def exchange(mine: bytes) -> list[bytes]:
            answers[rank] = mine
            all_said.wait(LIMIT_S)
            if strangers is not None:
                hello = msgspec.json.decode(mine, type=Hello)
                strangers.come(hello)
                threading.Thread(target=strangers.keep_coming, args=(hello,), daemon=True).start()
            all_attacked.wait(LIMIT_S)
            return answers

        try:
            return join(
                rank, RANKS, exchange, token=tokens[rank], interface="lo", host="here" if near else f"host {rank}",
                segment=segment, timeout_s=timeout_s, watch=lambda: None,
            )  # fmt: skip
        except PeerLost as error:
            return error

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(rank_main, range(RANKS)))
    return found


@contextlib.contextmanager
def attacked(attack: Callable[..., None], near: bool) -> Iterator[Strangers]:
    strangers = Strangers(attack, near)
    try:
        yield strangers
    finally:
        strangers.leave()


def close(ranks: Sequence[JoinedDescriptors | PeerLost]) -> None:
    for each in ranks:
        assert isinstance(each, JoinedDescriptors)
        for fd in {*each.control, *each.segments, *each.bells} - {-1}:
            os.close(fd)


@pytest.mark.parametrize("near", [True, False], ids=["one_host", "hosts"])
@pytest.mark.parametrize("attack", [impersonate, say_nothing, trickle, lie, babble, hang_up])
def test_every_rank_gets_its_place_whatever_strangers_do(attack: Callable[..., None], near: bool) -> None:
    with attacked(attack, near) as strangers:
        ranks = joined(strangers, near=near)
        assert all(isinstance(each, JoinedDescriptors) for each in ranks), ranks
        for rank, each in enumerate(ranks):
            assert isinstance(each, JoinedDescriptors)
            for peer, fd in enumerate(each.control):
                if peer != rank:
                    os.write(fd, f"{rank} to {peer};".encode())
        for rank, each in enumerate(ranks):
            assert isinstance(each, JoinedDescriptors)
            for peer, fd in enumerate(each.control):
                if peer != rank:
                    # The bytes were written to a socket of this machine before: they are there.
                    os.set_blocking(fd, True)
                    assert os.read(fd, 100).decode() == f"{peer} to {rank};"
        close(ranks)


def test_strangers_take_a_bounded_number_of_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 0
    accept = executor_handshake.Handshakes._accept

    def counting(self: executor_handshake.Handshakes, listening: socket.socket) -> None:
        nonlocal most
        accept(self, listening)
        most = max(most, len(self._strangers))

    monkeypatch.setattr(executor_handshake.Handshakes, "_accept", counting)
    monkeypatch.setattr(executor_handshake, "SPARE", 4)
    with attacked(say_nothing, near=True) as strangers:
        close(joined(strangers, near=True))
    assert 0 < most <= 4 + RANKS


def test_nothing_is_left_open_when_ranks_do_not_get_together() -> None:
    gc.collect()  # Tests before this one may have left objects with open files behind.
    before = len(os.listdir("/proc/self/fd"))
    begin = time.monotonic()
    ranks = joined(None, near=False, timeout_s=2, tokens=(TOKEN, TOKEN, b"quite another secret", TOKEN))
    assert time.monotonic() - begin < LIMIT_S
    assert all(isinstance(each, PeerLost) for each in ranks)
    assert any("token" in str(each) for each in ranks)
    assert len(os.listdir("/proc/self/fd")) <= before
