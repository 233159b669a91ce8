# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a new process group meet: each puts a card into the group's store and reads everybody's."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import msgspec

from ...errors import PeerLost, PlanMismatch
from ...files import typed
from ..executor.join import host_key
from .job_store import job_start

MAX_BYTES = 1 << 24
SHORTEST_S, LONGEST_S = 0.001, 0.05
"""Between two looks into the store."""


class Store(Protocol):
    """The part of `torch.distributed.Store` that is used here."""

    @property
    def timeout(self) -> timedelta:
        """How long to wait for a value."""

    def set(self, key: str, value: str) -> None:
        """Set a key of the store."""

    def get(self, key: str) -> bytes:
        """Wait for a key of the store."""

    def check(self, keys: list[str]) -> bool:
        """Whether values are there."""

    def add(self, key: str, value: int) -> int:
        """Add to a counter and return it."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others about itself."""

    rank: int
    host: str
    pid: int
    space: str
    """Where `pid` means something."""
    executor: str
    """Why this rank has no executor; empty when it has one."""
    rules: str
    """What decides which program runs, as text that must be the same everywhere."""
    token: str
    """A secret; rank 0's is the job's."""
    taken: str
    """Communicators that the new group cannot have, as far as this rank knows: a bit for each, in hexadecimal."""
    generation: int
    """How often a group was made here."""


def card(rank: int, *, executor: str, rules: str, taken: int = 0, generation: int = 0) -> Card:
    """The card of this process: what it tells the other ranks of itself.

    Args:
        rank: This rank.
        executor: Why it has no executor; empty where it has one.
        rules: The rules of selection that it was started with.
        taken: The communicator numbers that it uses already, one bit each.
        generation: How many jobs this process was in before.

    Returns:
        The card.
    """
    return Card(
        rank=rank, host=host_key(), pid=os.getpid(), space=_space(), executor=executor, rules=rules,
        token=secrets.token_hex(16), taken=f"{taken:x}", generation=generation,
    )  # fmt: skip


class Meeting:
    """An all-gather of bytes among the ranks of a group, by its store.

    Who waits also looks whether the others still can come: a rank that fails says so with `conclude`, and one that
    has died on this host is noticed. So all ranks end a meeting together, whatever happens to one of them.
    """

    def __init__(
        self, store: Store, rank: int, size: int, lost: Callable[[], str] = lambda: "", start: str | None = None
    ) -> None:
        """`lost` says what is known of a rank that will not come, if anything is; `start` names this start."""
        self.store, self.rank, self.size, self.known = store, rank, size, lost
        self.cards: list[Card] = []
        # A group that is made again finds its old keys in the store, and so does a job that is started again.
        self.start = start if start is not None else job_start()
        self._where = f"stretto/{self.start}/{store.add(f'stretto/times/{self.start}/{rank}', 1)}"
        self._rounds = 0

    def exchange(self, mine: bytes) -> list[bytes]:
        """Everybody's bytes, by rank. Raises `PeerLost` when one will not come."""
        self._rounds += 1
        return self._gather(str(self._rounds), mine, self.check)

    def check(self) -> None:
        """Raises `PeerLost` where a rank has said that it failed, or has died."""
        if self.store.check([f"{self._where}/failed"]):
            raise PeerLost(self.store.get(f"{self._where}/failed").decode(errors="replace"))
        self._find_gone()

    def conclude(self, why: str) -> str:
        """All ranks say what went wrong, or nothing; returns what did first, the same on all ranks."""
        if why and self.store.add(f"{self._where}/failures", 1) == 1:
            self.store.set(f"{self._where}/failed", f"rank {self.rank}: {why}")
        if any(self._gather("end", why.encode(), self._find_gone)):
            return self.store.get(f"{self._where}/failed").decode(errors="replace")
        return ""

    def _gather(self, round_: str, mine: bytes, check: Callable[[], None]) -> list[bytes]:
        where = f"{self._where}/{round_}"
        self.store.set(f"{where}/{self.rank}", base64.b64encode(mine).decode())
        deadline = time.monotonic() + self.store.timeout.total_seconds()
        return [self._take(f"{where}/{rank}", rank, deadline, check) for rank in range(self.size)]

    def _take(self, key: str, rank: int, deadline: float, check: Callable[[], None]) -> bytes:
        pause_s = SHORTEST_S
        while not self.store.check([key]):
            check()
            if time.monotonic() > deadline:
                raise PeerLost(f"rank {rank}: it did not come within {self.store.timeout.total_seconds():g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_S)
        text = self.store.get(key)
        if len(text) > MAX_BYTES:
            raise PlanMismatch(f"rank {rank}: what it put into the store is too long")
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error:
            raise PlanMismatch(f"rank {rank}: what it put into the store cannot be read: another Stretto?") from None

    def _find_gone(self) -> None:
        lost = self.known()
        if lost:
            raise PeerLost(f"{lost}, while the group was made")
        gone = find_gone(self.cards, 0)
        if not gone:
            return
        if self.store.check([f"{self._where}/failed"]):
            # Ranks that have left because of this look gone, too.
            raise PeerLost(self.store.get(f"{self._where}/failed").decode(errors="replace"))
        names = f"rank {gone[0]} is" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))} are"
        whose = "its process has" if len(gone) == 1 else "their processes have"
        raise PeerLost(f"{names} gone: {whose} ended while the group was made")


def meet(meeting: Meeting, mine: Card) -> list[Card]:
    """Everybody's card, by rank. Raises `PlanMismatch` where two ranks would not choose the same programs."""
    cards = [_read(text, rank) for rank, text in enumerate(meeting.exchange(msgspec.json.encode(mine)))]
    meeting.cards = cards
    for other in cards:
        if other.rules != cards[0].rules:
            raise PlanMismatch(
                f"rank {other.rank} would choose programs by {other.rules!r}, rank 0 by {cards[0].rules!r}: "
                "give all ranks the same Stretto, STRETTO_CLUSTER and STRETTO_TABLE"
            )
    return cards


def agree(cards: list[Card]) -> tuple[int, int]:
    """The least communicator that no rank has taken, and the generation of its new use; the same on all ranks."""
    taken = 0
    for each in cards:
        try:
            taken |= int(each.taken, 16)
        except ValueError:
            raise PlanMismatch(f"rank {each.rank}: its card in the store cannot be read: another Stretto?") from None
    return (~taken & (taken + 1)).bit_length() - 1, max(each.generation for each in cards) + 1


def _read(text: bytes, rank: int) -> Card:
    try:
        return msgspec.json.decode(text, type=typed(Card))
    except msgspec.MsgspecError as error:
        raise PlanMismatch(f"rank {rank}: its card in the store cannot be read ({error}): another Stretto?") from None


def _space() -> str:
    with contextlib.suppress(OSError):
        return f"{host_key()} {os.readlink('/proc/self/ns/pid')}"
    return ""


def find_gone(cards: list[Card], patience_s: float) -> list[int]:
    """The ranks on this host whose processes have ended; asks again for a while when none has."""
    here = _space()
    deadline = time.monotonic() + patience_s
    while True:
        found = [card.rank for card in cards if card.space == here and not _alive(card.pid)]
        if found or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    # A zombie has ended; only its parent has not looked yet. The name before it may hold anything, also brackets.
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")
