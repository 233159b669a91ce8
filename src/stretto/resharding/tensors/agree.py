# SPDX-License-Identifier: Apache-2.0
"""Agreements of ranks through the job's store: ranks first compare what they are about to do, so that a difference is
an
error and not a hang.

Only the ranks that take part are needed, and nothing has to be set up before: they have no process group yet.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch.distributed as dist

from ...errors import InvalidInput, PeerLost, StrettoError
from ...files import typed
from ...runtime.executor.forks import Home
from ...runtime.torch_backend.meeting import MAX_BYTES, SHORTEST_S, Card, card, find_gone

FAILED = {error.__name__: error for error in (InvalidInput, PeerLost)}
COMMIT = "commit"
PATIENCE_S, LONGEST_S = 0.05, 1.0
"""Seconds to wait for the other ranks before checking on them: the first pause, and the longest."""
BEAT_S, SILENT_S = 0.5, 4.0
"""A rank that waits for others says so this often; one that says nothing for so long does not wait."""
T = TypeVar("T")
Arguments = ParamSpec("Arguments")


class _Said(msgspec.Struct, frozen=True, kw_only=True):
    text: str
    error: str


class _At(msgspec.Struct, frozen=True, kw_only=True):
    """The place at which a rank waits, or has waited last, and the identity of its process."""

    ranks: tuple[int, ...]
    number: int
    label: str
    card: Card


def _from_store(method: Callable[Arguments, T]) -> Callable[Arguments, T]:
    """A store that cannot be asked any more is a lost rank: the one that served it."""

    @functools.wraps(method)
    def asked(*args: Arguments.args, **more: Arguments.kwargs) -> T:
        try:
            return method(*args, **more)
        except dist.DistError as error:
            raise PeerLost(f"the rank that serves the store is gone: {str(error).splitlines()[0][:120]}") from None

    return asked


class ReshardAgreement:
    """One rank's side of the agreements. `cards` identify the processes of the job's ranks, to notice
    which have died; `outer` knows the processes where these are some agreements of its own ranks.
    """

    def __init__(
        self, store: Any, rank: int, cards: Sequence[Card] = (), *, outer: ReshardAgreement | None = None
    ) -> None:
        self._store, self.rank, self._cards, self._outer = store, rank, list(cards), outer
        self._home = Home(f"rank {rank}")
        self._times: dict[str, int] = {}
        self._left: dict[str, deque[list[str]]] = {}
        """The keys that this rank has to delete from the store, of the last two gatherings of each set of ranks."""
        self._beat_s = -BEAT_S
        self._card = card(rank, executor="", rules="")
        self._said(_At(ranks=(), number=0, label="", card=self._card))

    @_from_store
    def gather(self, ranks: Sequence[int], label: str, text: str, error: str = "") -> list[str]:
        """The texts of all ranks, in the order of `ranks`.

        All ranks of `ranks` call this, each in the same order as the others.

        Args:
            ranks: the ranks that take part, in the same order on all of them.
            label: name of the operation, for errors.
            text: this rank's text.
            error: this rank's reason not to go on; empty if there is none.

        Returns:
            One text per rank.

        Raises:
            InvalidInput: on all ranks, if one has an `error`; or if a rank waits for this one at another place.
            PeerLost: a rank has died, or does not come within the store's timeout.
        """
        self._home.check()
        where = _name(ranks)
        number = self._times[where] = self._times.get(where, 0) + 1
        place = f"{where}/{number}"
        mine = msgspec.json.encode(_Said(text=text, error=error))
        if len(mine) > MAX_BYTES:
            raise InvalidInput(f"{label}: its description has {len(mine)} bytes; at most {MAX_BYTES}")
        at = _At(ranks=tuple(ranks), number=number, label=label, card=self._card)
        left = self._left.setdefault(where, deque())
        # All ranks have come to the last gathering, so all have read the one before: its keys can be deleted.
        for key in left.popleft() if len(left) > 1 else ():
            self._store.delete_key(key)
        self._store.set(f"{place}/{self.rank}", mine)
        voice = hashlib.sha256(mine).hexdigest()
        alike = self._store.add(f"{place}/{voice}", 1)
        # The last rank to come knows whether all texts are equal and says so. The others then need no further answer of
        # the store, which could be delayed behind the data that the first ranks begin to send.
        if self._store.add(f"{place}/count", 1) == len(ranks):
            self._store.set(f"{place}/{'alike' if alike == len(ranks) else 'differ'}", b"1")
        first = ("count", "alike", "differ") if self.rank == ranks[0] else ()
        left.append([f"{place}/{name}" for name in (self.rank, *([voice] if alike == 1 else ()), *first)])
        found = [_Said(text=text, error=error)] * len(ranks)
        if not self._all_alike(place, at):
            found = [_read(self._store.get(f"{place}/{peer}"), _Said, peer) for peer in ranks]
        for peer, said in zip(ranks, found, strict=True):
            if said.error:
                raise InvalidInput(said.error if peer == self.rank else f"rank {peer}: {said.error}")
        return [said.text for said in found]

    @_from_store
    def vote(self, key: str, ranks: Sequence[int], error: StrettoError | None = None) -> StrettoError | None:
        """Commit if every rank votes without an error; all ranks get the same answer, whichever rank dies at whatever
        time.

        One value in the store decides. It is written once: by the last rank to vote, or by the first that gives up.

        Args:
            key: name of the vote, the same on all ranks and used once.
            ranks: the ranks that vote.
            error: this rank's reason to vote against; None votes for.

        Returns:
            None for a commit, else the reason against it.
        """
        decision = f"vote/{key}"
        if error is not None:
            return self._decide(decision, f"{type(error).__name__} {error}")
        self._store.set(f"{decision}/{self.rank}", b"1")
        if self._store.add(f"{decision}/count", 1) == len(ranks):
            return self._decide(decision, COMMIT)
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        patience_s = PATIENCE_S
        beats: dict[int, tuple[int, float]] = {}
        while not self._arrives(decision, patience_s):
            missing = [r for r in ranks if not self._store.check([f"{decision}/{r}"])]
            # Whoever waits for another's bytes has not voted either: one that says nothing comes first.
            self._heard(missing, beats)
            missing.sort(key=lambda r: beats[r][1])
            gone = [r for r in missing if self.gone(r) and not self._store.check([f"{decision}/{r}"])]
            late = time.monotonic() > deadline
            if gone or late:
                why = "is gone" if gone else f"did not vote within {self._store.timeout.total_seconds():g} s"
                whose = gone or missing or [self.rank]
                return self._decide(decision, f"PeerLost rank {whose[0]} {why}")
            patience_s = min(2 * patience_s, LONGEST_S)
        return _read_decision(self._store.get(decision))

    @_from_store
    def decided(self, key: str) -> StrettoError | None:
        """The reason why a vote that is still under way will fail, if it is known already."""
        decision = f"vote/{key}"
        return _read_decision(self._store.get(decision)) if self._store.check([decision]) else None

    def forget(self, key: str, ranks: Sequence[int]) -> None:
        """Remove a vote from the store; call it once no rank can ask for the vote any more."""
        self._store.delete_key(f"vote/{key}/{self.rank}")
        if self.rank == ranks[0]:
            for name in (f"vote/{key}", f"vote/{key}/count"):
                self._store.delete_key(name)

    @_from_store
    def beat(self) -> None:
        """Say that this rank is there, waiting for others; called again and again by whoever waits."""
        if self._outer is not None:
            return self._outer.beat()
        now = time.monotonic()
        if now - self._beat_s >= BEAT_S:
            self._beat_s = now
            self._store.add(f"beat/{self.rank}", 1)

    @_from_store
    def silent(self, ranks: Sequence[int]) -> set[int]:
        """The ranks that do not wait for others, of some that all should: asks for some seconds."""
        began = time.monotonic()
        beats: dict[int, tuple[int, float]] = {}
        first: dict[int, int] = {}
        while time.monotonic() - began < SILENT_S:
            self._heard([r for r in ranks if r != self.rank], beats)
            first = first or {r: count for r, (count, _) in beats.items()}
            if all(count > first[r] for r, (count, _) in beats.items()):
                break
            time.sleep(BEAT_S / 4)
        return {r for r, (count, _) in beats.items() if count == first[r]}

    def _heard(self, ranks: Sequence[int], beats: dict[int, tuple[int, float]]) -> None:
        """Note when ranks were last heard of; and be heard of."""
        if self._outer is not None:
            return self._outer._heard(ranks, beats)
        self.beat()
        for r in ranks:
            count = int(self._store.add(f"beat/{r}", 0))
            if r not in beats or beats[r][0] != count:
                beats[r] = count, time.monotonic()

    def _decide(self, decision: str, what: str) -> StrettoError | None:
        return _read_decision(self._store.compare_set(decision, "", what))

    def _all_alike(self, place: str, mine: _At) -> bool:
        """Wait until all ranks have come; return whether their texts are equal. Raises if a rank is
        known not to come.
        """
        deadline = time.monotonic() + self._store.timeout.total_seconds()
        patience_s = PATIENCE_S
        while not self._arrives(f"{place}/alike", patience_s):
            if self._store.check([f"{place}/differ"]):
                return False
            self._said(mine)
            self.beat()
            for peer in mine.ranks:
                if not self._store.check([f"{place}/{peer}"]):
                    self._why_not(peer, place, mine, deadline)
            patience_s = min(2 * patience_s, LONGEST_S)
        return True

    def _arrives(self, key: str, timeout_s: float) -> bool:
        """Whether a key is in the store within some seconds."""
        deadline = time.monotonic() + timeout_s
        pause_s = SHORTEST_S
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, timeout_s / 20)
        return True

    def _why_not(self, peer: int, place: str, mine: _At, deadline: float) -> None:
        """Raise if it is known that a peer will not come."""
        failed = f"{place}/failed"
        why = self._store.get(failed).decode(errors="replace") if self._store.check([failed]) else ""
        why = why or self._contradiction(peer, mine)
        gone = self.gone(peer)
        if self._store.check([f"{place}/{peer}"]):
            return
        if why:
            self._store.set(failed, why)
            raise InvalidInput(why)
        if gone:
            raise PeerLost(f"{mine.label}: rank {peer} is gone")
        if time.monotonic() > deadline:
            waited = f"within {self._store.timeout.total_seconds():g} s"
            raise PeerLost(f"{mine.label}: rank {peer} did not come {waited}; all of {_runs(mine.ranks)} must call")

    def _contradiction(self, peer: int, mine: _At) -> str:
        """An error text if a peer waits for this rank at a place where this rank has not been, so that both would wait
        forever.
        """
        other = self._at(peer)
        if other is None or self.rank not in other.ranks:
            return ""
        where = _name(other.ranks)
        if other.number <= self._times.get(where, 0):
            return ""
        why = f"rank {self.rank} is at {mine.label}, rank {peer} at {other.label}: they wait for each other"
        self._store.set(f"{where}/{other.number}/failed", why)
        return why

    def gone(self, peer: int) -> bool:
        """Whether a rank's process is known to have ended."""
        if self._outer is not None:
            return self._outer.gone(peer)
        if any(peer == card.rank for card in self._cards):
            return bool(find_gone([card for card in self._cards if card.rank == peer], 0))
        at = self._at(peer)
        return at is not None and bool(find_gone([at.card], 0))

    def _at(self, peer: int) -> _At | None:
        key = f"at/{peer}"
        return _read(self._store.get(key), _At, peer) if self._store.check([key]) else None

    def _said(self, at: _At) -> None:
        self._store.set(f"at/{self.rank}", msgspec.json.encode(at))


def _name(ranks: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]


def _runs(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:16]))
    return f"ranks {listed}{', ...' if len(ranks) > 16 else ''}"


def _read_decision(raw: bytes) -> StrettoError | None:
    kind, _, why = raw.decode(errors="replace").partition(" ")
    return None if kind == COMMIT else FAILED.get(kind, StrettoError)(why)


def _read(raw: bytes, kind: type[T], peer: int) -> T:
    if len(raw) > 2 * MAX_BYTES:
        raise PeerLost(f"rank {peer}: what it put into the store is too long")
    try:
        return msgspec.json.decode(raw, type=typed(kind))
    except msgspec.MsgspecError as error:
        raise PeerLost(f"rank {peer}: what it put into the store cannot be read ({error}): another Stretto?") from None
