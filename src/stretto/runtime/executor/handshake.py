# SPDX-License-Identifier: Apache-2.0
"""How two ranks that join prove to each other that both know the job's token, whoever else connects meanwhile.

Of every two ranks the higher one connects:

    higher: HELLO (its rank, a nonce)
    lower:  a challenge, and HMAC(token, nonce, challenge, its rank)
    higher: HMAC(token, challenge, nonce, its rank)
    lower:  WELCOME

All handshakes of a rank run side by side in one loop, so that nobody who is slow or silent holds up another. Whoever
connects is a stranger until its proof has been read: it takes nobody's place, and costs a descriptor and some bytes.
There are at most `SPARE` strangers more than missing ranks at a time; where there are more, one of them, picked by
chance, is turned away. A rank that was turned away connects again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import random
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Sequence

from ...errors import PeerLost, StrettoError

HELLO = struct.Struct("<8sI32s")
MAGIC = b"stretto2"
WELCOME = b"w"
NONCE_BYTES = PROOF_BYTES = 32
STRANGER_S = 2.0
"""How long somebody who has connected may take to prove who it is."""
SPARE = 64
ACCEPTED_AT_ONCE = 64
TICK_S = 0.2
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.01, 0.5
"""Before a rank connects again."""
Address = str | tuple[str, int]
"""The address of a Unix socket, or host and port."""


class OutOfResources(StrettoError):
    """Descriptors or shared memory ran out; the message says which, on which rank."""


def unreachable(peer: int, error: OSError) -> StrettoError:
    """The error of a connection to a peer that cannot be made, or has ended."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return OutOfResources(f"descriptors: none left to connect to rank {peer}: {error.strerror}")
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return PeerLost(f"rank {peer}: it ended the connection while joining (a different token, or it failed)")
    return PeerLost(f"rank {peer}: it cannot be reached while joining: {error}")


class _Link:
    """A connection whose handshake is under way; `peer` is who the other end is, or says to be."""

    def __init__(self, s: socket.socket, peer: int | None) -> None:
        self.socket, self.peer = s, peer
        self.since = time.monotonic()
        self.calls = peer is not None
        """Whether this rank has connected, and not the other one."""
        self.nonce = self.challenge = self._words = b""
        s.setblocking(False)

    def read(self, size: int) -> bytes | None:
        """The next so many bytes, or None while they have not all come."""
        with contextlib.suppress(BlockingIOError):
            more = self.socket.recv(size - len(self._words))
            if not more:
                raise ConnectionResetError
            self._words += more
        if len(self._words) < size:
            return None
        words, self._words = self._words, b""
        return words

    def say(self, words: bytes) -> None:
        """Send some bytes: so few always fit where nothing was sent before."""
        if self.socket.send(words) != len(words):
            raise ConnectionResetError


class Handshakes:
    """One rank's handshakes with all others."""

    def __init__(self, rank: int, token: bytes, *, deadline: float, watch: Callable[[], None]) -> None:
        """Nothing is connected yet.

        Args:
            rank: This rank.
            token: The job's secret.
            deadline: When to give up, on the monotonic clock.
            watch: Called now and then while a rank is missing; raises when it knows that the rank will not come.
        """
        self._rank, self._token, self._deadline, self._watch = rank, token, deadline, watch
        self._done: dict[int, socket.socket] = {}
        self._calls: dict[int, tuple[socket.AddressFamily, Address]] = {}
        """Where lower ranks listen whose handshake has not ended."""
        self._due: dict[int, float] = {}
        """When to connect to a rank to which no connection is under way."""
        self._pause_s: dict[int, float] = {}
        """How long to wait when a rank turns this one away."""
        self._callers: dict[int, socket.AddressFamily] = {}
        """From where higher ranks connect whose handshake has not ended."""
        self._strangers: dict[_Link, None] = {}
        """Connections that have not proved to know the token, the oldest first."""
        self._claimed: set[int] = set()
        """Ranks that somebody without the token has said to be."""

    def run(
        self,
        listening: Sequence[socket.socket],
        calls: dict[int, tuple[socket.AddressFamily, Address]],
        callers: dict[int, socket.AddressFamily],
    ) -> dict[int, socket.socket]:
        """Connect to lower ranks and be connected to by higher ones.

        Args:
            listening: Where higher ranks connect.
            calls: Of every lower rank the address that it listens at.
            callers: Of every higher rank the kind of socket that it connects by.

        Returns:
            A connected socket, which does not block, for each of these ranks.

        Raises:
            PeerLost: A rank does not come in time, cannot be reached, or has another token.
            OutOfResources: There are no descriptors left.
        """
        self._calls, self._callers = dict(calls), dict(callers)
        self._due, self._pause_s = dict.fromkeys(calls, 0.0), dict.fromkeys(calls, SHORTEST_PAUSE_S)
        with selectors.DefaultSelector() as self._ready, contextlib.ExitStack() as undo:
            undo.callback(self._drop_all)
            for each in listening:
                each.setblocking(False)
                self._ready.register(each, selectors.EVENT_READ, each)
            watched = time.monotonic()
            while self._calls or self._callers:
                self._dial()
                for key, _ in self._ready.select(self._left_s()):
                    if isinstance(key.data, _Link):
                        self._advance(key.data)
                    else:
                        self._accept(key.data)
                self._expire()
                if time.monotonic() - watched > TICK_S:
                    self._watch()
                    watched = time.monotonic()
            done, self._done = self._done, {}
        return done

    def _drop_all(self) -> None:
        for link in [key.data for key in self._ready.get_map().values()]:
            if isinstance(link, _Link):
                self._drop(link)
        for each in self._done.values():
            each.close()

    def _left_s(self) -> float:
        """How long to wait for something to happen. Raises `PeerLost` when the time is up."""
        now = time.monotonic()
        if now > self._deadline:
            missing = min((*self._calls, *self._callers))
            why = " (somebody without this job's token said to be it)" if missing in self._claimed else ""
            raise PeerLost(f"rank {missing}: it did not join in time{why}")
        soonest = min(self._due.values(), default=self._deadline)
        return max(0.0, min(soonest - now, self._deadline - now, TICK_S))

    def _dial(self) -> None:
        """Connect to the ranks whose time it is."""
        now = time.monotonic()
        for peer in [peer for peer, at in self._due.items() if at <= now]:
            del self._due[peer]
            family, address = self._calls[peer]
            try:
                link = _Link(socket.socket(family, socket.SOCK_STREAM), peer)
            except OSError as error:
                raise unreachable(peer, error) from error
            found = link.socket.connect_ex(address)
            self._ready.register(link.socket, selectors.EVENT_WRITE, link)
            if found == errno.EAGAIN:  # nobody has accepted those who came to this Unix socket before
                self._turned_away(link)
            elif found not in (0, errno.EINPROGRESS):
                raise unreachable(peer, OSError(found, os.strerror(found)))

    def _turned_away(self, link: _Link) -> None:
        """Connect again after a while: it was taken for one stranger too many."""
        self._drop(link)
        assert link.peer is not None
        pause_s = self._pause_s[link.peer]
        self._due[link.peer] = time.monotonic() + pause_s
        self._pause_s[link.peer] = min(2 * pause_s, LONGEST_PAUSE_S)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                s = listening.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                    self._drop(random.choice(list(self._strangers)))
                    continue
                if error.errno == errno.ECONNABORTED:
                    continue
                raise
            if len(self._strangers) >= SPARE + len(self._callers):
                self._drop(random.choice(list(self._strangers)))
            link = _Link(s, None)
            self._strangers[link] = None
            self._ready.register(s, selectors.EVENT_READ, link)

    def _expire(self) -> None:
        """Turn strangers away that have had their time."""
        for link in list(self._strangers):
            if time.monotonic() - link.since < STRANGER_S:
                return
            self._drop(link)

    def _drop(self, link: _Link) -> None:
        self._strangers.pop(link, None)
        with contextlib.suppress(KeyError):
            self._ready.unregister(link.socket)
        link.socket.close()

    def _advance(self, link: _Link) -> None:
        if link.socket.fileno() < 0:  # dropped since it was found ready
            return
        if not link.calls:
            try:
                welcome = self._hear_out(link)
            except OSError:
                welcome = False
            if welcome is False:
                self._drop(link)
            return
        try:
            self._introduce(link)
        except OSError as error:
            assert link.peer is not None
            if not isinstance(error, ConnectionResetError | BrokenPipeError):
                raise unreachable(link.peer, error) from error
            self._turned_away(link)

    def _introduce(self, link: _Link) -> None:
        """The next step of a handshake with a lower rank. Raises `OSError` where the connection has ended."""
        peer = link.peer
        assert peer is not None
        if not link.nonce:
            found = link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if found:
                raise OSError(found, os.strerror(found))
            link.nonce = secrets.token_bytes(NONCE_BYTES)
            link.say(HELLO.pack(MAGIC, self._rank, link.nonce))
            self._ready.modify(link.socket, selectors.EVENT_READ, link)
        elif not link.challenge:
            answer = link.read(NONCE_BYTES + PROOF_BYTES)
            if answer is None:
                return
            link.challenge = answer[:NONCE_BYTES]
            if not hmac.compare_digest(answer[NONCE_BYTES:], self._proof(b"accept", link.nonce, link.challenge, peer)):
                raise PeerLost(f"rank {peer}: it does not know this job's token")
            link.say(self._proof(b"connect", link.challenge, link.nonce, self._rank))
        elif link.read(len(WELCOME)):
            del self._calls[peer]
            self._take(link, peer)

    def _hear_out(self, link: _Link) -> bool | None:
        """The next step of a handshake with who has connected: whether it is over, and well; None if it goes on."""
        if link.peer is None:
            words = link.read(HELLO.size)
            if words is None:
                return None
            magic, peer, link.nonce = HELLO.unpack(words)
            if magic != MAGIC or self._callers.get(peer) != link.socket.family:
                return False
            link.peer, link.challenge = peer, secrets.token_bytes(NONCE_BYTES)
            link.say(link.challenge + self._proof(b"accept", link.nonce, link.challenge, self._rank))
            return None
        words = link.read(PROOF_BYTES)
        if words is None:
            return None
        if not hmac.compare_digest(words, self._proof(b"connect", link.challenge, link.nonce, link.peer)):
            self._claimed.add(link.peer)
            return False
        if link.peer not in self._callers:
            return False
        link.say(WELCOME)
        del self._callers[link.peer], self._strangers[link]
        self._take(link, link.peer)
        return True

    def _take(self, link: _Link, peer: int) -> None:
        self._ready.unregister(link.socket)
        self._done[peer] = link.socket

    def _proof(self, side: bytes, first: bytes, second: bytes, rank: int) -> bytes:
        """What only who knows the token can say about two random numbers and the rank that says it."""
        words = side + first + second + struct.pack("<I", rank)
        return hmac.new(self._token, words, hashlib.sha256).digest()
