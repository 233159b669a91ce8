# SPDX-License-Identifier: Apache-2.0
"""Turns of motifs of different groups on the links of a host: its ranks tell each other what has ended.

A motif that stands first in its lines may still wait for its turn on a link that it shares with a motif of ranks that
it does not know (`TurnPlan`). Each rank sends a datagram to the ranks of its host that wait for it. A turn is for speed
alone, so nothing depends on these: a rank waits only for ranks from which it has heard under this plan, and when one
wait has taken too long, the plan goes on without turns here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..torch_backend.job_store import start_store
from .rank_plan import LinkTurnOf
from .sequencer import QueuedMotif, Sequencer

log = logging.getLogger("stretto.enforcer")
ENDED = struct.Struct("<IIIIq")
"""A rank, a plan, a comm-op, a motif of it, and the last iteration in which that has ended."""
LOOK_S = 0.25
"""Between two looks for addresses of other ranks, and for waits that take too long."""
PATIENCE_S, PATIENCE_ITERATIONS = 2.0, 3.0
"""A wait for a turn that takes longer than both ends all turns of the plan on this rank."""


class TurnBoard:
    """What this rank knows of the motifs of other ranks of its host, and tells them.

    Args:
        rank: This rank.
        sequencer: Its lines, which ask `came` and are told when something may start.
        generation: The number of the enforcer in this process, the same on all ranks.
    """

    def __init__(self, rank: int, sequencer: Sequencer, generation: int) -> None:
        self._rank, self._sequencer, self._generation = rank, sequencer, generation
        self._plan = 0
        self._first = 0
        self._patience_s = PATIENCE_S
        self._ended: dict[tuple[int, int, int], int] = {}
        """By rank, comm-op and motif of the active plan: the last iteration in which it has ended there."""
        self._heard: set[int] = set()
        self._waiting: dict[int, float] = {}
        """Since when motifs wait for their turn, by their numbers in line."""
        self._given_up = False
        self._peers: set[int] = set()
        self._addresses: dict[int, bytes] = {}
        self._socket: socket.socket | None = None
        self._closed = False

    def begin(self, plan: int, first: int, iteration_us: float, peers: Sequence[int]) -> None:
        """A plan with turns becomes active; called between two iterations, with the lock of the sequencer.

        Args:
            plan: Its number.
            first: Its first iteration.
            iteration_us: What an iteration takes by the plan.
            peers: The ranks of this host that this rank has to tell of its motifs.
        """
        self._plan, self._first = plan, first
        self._patience_s = max(PATIENCE_S, PATIENCE_ITERATIONS * iteration_us / 1e6)
        self._ended, self._heard, self._waiting, self._given_up = {}, set(), {}, False
        self._peers = set(peers)
        if self._socket is None:
            self._open()

    def came(self, motif: QueuedMotif) -> bool:
        """Whether a motif has its turn. Called with the lock of the sequencer."""
        queued = motif.op
        if queued.plan != self._plan or self._given_up:
            return True
        for turn in motif.rank_motif.link_turns:
            if not self._is_over(turn, queued.iteration - turn.lag):
                self._waiting.setdefault(motif.number, time.monotonic())
                return False
        self._waiting.pop(motif.number, None)
        return True

    def _is_over(self, turn: LinkTurnOf, iteration: int) -> bool:
        if iteration < self._first:
            return True
        for peer in turn.peers:
            if peer in self._heard and self._ended.get((peer, turn.op, turn.motif), -1) < iteration:
                return False
        return True

    def tell(self, motif: QueuedMotif) -> None:
        """A motif has ended here: tell the ranks of this host that wait for it."""
        if self._socket is None:
            return
        queued = motif.op
        number, iteration = motif.rank_motif.number, queued.iteration
        said = ENDED.pack(self._rank, queued.plan, queued.rank_op.number, number, iteration)
        for peer in motif.rank_motif.tells:
            address = self._addresses.get(peer)
            if address is not None:
                # A rank that has gone, or that does not read, is not waited for.
                with contextlib.suppress(OSError):
                    self._socket.sendto(said, socket.MSG_DONTWAIT, address)

    def forget(self) -> None:
        """Motifs have gone out of line: who still waits is noted again."""
        self._waiting = {}

    def close(self) -> None:
        """End the thread; nobody waits for a turn any more."""
        self._closed = True

    def _open(self) -> None:
        """Listen, and say where. A system without such sockets has no turns."""
        address = f"\0stretto-turns-{os.getpid()}-{os.urandom(8).hex()}".encode()
        try:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.bind(address)
        except OSError as error:
            log.warning("rank %d takes no turns on links: %s", self._rank, error)
            self._socket = None
            return
        self._socket.settimeout(LOOK_S)
        store = start_store(f"stretto/turns/{self._generation}", apart=True)
        store.set(str(self._rank), address[1:].decode())
        threading.Thread(target=self._listen, args=(store,), name="stretto-turns", daemon=True).start()

    def _listen(self, store: Any) -> None:
        """Read what other ranks say; in between look for their addresses, and for waits that take too long."""
        assert self._socket is not None
        while not self._closed:
            if not self._peers <= self._addresses.keys():
                # The store may be gone with its rank.
                with contextlib.suppress(Exception):
                    self._find(store)
            try:
                said = self._socket.recv(ENDED.size)
            except TimeoutError:
                said = b""
            with self._sequencer.lock:
                stirs = self._read(said) if len(said) == ENDED.size else self._is_late()
            if stirs:
                self._sequencer.stir()
        self._socket.close()

    def _find(self, store: Any) -> None:
        for peer in sorted(self._peers - self._addresses.keys()):
            if store.check([str(peer)]):
                self._addresses[peer] = b"\0" + store.get(str(peer))

    def _read(self, said: bytes) -> bool:
        """Note what a rank says; whether a motif here waits for a turn."""
        rank, plan, op, motif, iteration = ENDED.unpack(said)
        if plan != self._plan:
            return False
        self._heard.add(rank)
        key = (rank, op, motif)
        self._ended[key] = max(iteration, self._ended.get(key, -1))
        return bool(self._waiting)

    def _is_late(self) -> bool:
        """Give the plan's turns up where one has taken too long: the other rank does something else."""
        if self._given_up or not self._waiting:
            return False
        if time.monotonic() - min(self._waiting.values()) < self._patience_s:
            return False
        log.warning("rank %d takes no more turns on links under plan %d: one did not come", self._rank, self._plan)
        self._given_up, self._waiting = True, {}
        return True
