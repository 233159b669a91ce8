# SPDX-License-Identifier: Apache-2.0
"""Which rank to name when a call that the wrapped backend runs fails: gloo speaks of connections, not of ranks.

The executor's control connections know more: they end with a process, a rank that gives up because another is lost says
so on them before it leaves, and a rank that is stopped does not answer there. Without an executor ranks whose calls
failed answer a roll call in the group's store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ...errors import PeerLost
from .engine import Engine
from .gloo_errors import GlooFailure, gloo_failure
from .meeting import Card, Meeting, Store, find_gone
from .roll_call import STORE_GONE, GlooRollCall

NOTICE_S = 1.0
"""A socket closes a moment before its process is gone."""
ANSWER_S = 2.0
PAUSE_S = 0.01


@dataclass(frozen=True, kw_only=True)
class DelegatedCall:
    """A call that the wrapped backend runs."""

    op: str
    peer: int | None = None
    """The rank of the group that a message goes to or comes from."""
    number: int | None = None
    """The call's position among its group's collectives on the wrapped backend; None where it has none."""


class LostRanks:
    """Names ranks of one group."""

    def __init__(self, engine: Engine, cards: Sequence[Card], store: Store) -> None:
        self._engine, self._cards = engine, list(cards)
        self._roll_call = GlooRollCall(store, engine.rank, engine.size)

    def explain(self, error: Exception, call: DelegatedCall) -> Exception:
        """The error of a failed call as `PeerLost` that names a rank, where one can be named; else the error itself."""
        failure = gloo_failure(error)
        if failure is GlooFailure.OTHER:
            return error
        closed = failure is GlooFailure.PEER_GONE
        ranks = self._ranks()
        # Another rank may have ended because its work is done: whoever waits for a message waits for its other end.
        awaited = ranks if call.peer is None else [ranks[call.peer]]
        named = self._given_up_or_gone(awaited, NOTICE_S if closed else 0.0) or self._silent(call, awaited, closed)
        if named is None:
            return error
        rank, why = named
        found = PeerLost(f"{why} (in {call.op} of group {self._engine.name})")
        found.__cause__ = error
        executor = self._engine.job.executor
        if executor is not None:
            executor.blame(rank, str(found))
        return found

    def _ranks(self) -> list[int]:
        """The job's ranks of the group's."""
        return [self._engine.job.rank_of[device] for device in self._engine.selector.devices]

    def _given_up_or_gone(self, among: Sequence[int], patience_s: float) -> tuple[int, str] | None:
        """One of these ranks that is gone, and what is known of it; not one that has only left because of another."""
        ranks = self._ranks()
        deadline = time.monotonic() + patience_s
        while True:
            executor = self._engine.job.executor
            found = executor.find_culprit(among) if executor is not None else None
            if found is not None:
                return found
            over = time.monotonic() > deadline
            # What a rank has said on its control connection counts more than that its process has ended.
            dead = find_gone(self._cards, 0.0) if executor is None or over else []
            gone = [ranks[at] for at in dead if ranks[at] in among]
            if gone:
                return gone[0], f"{_names(gone)} gone"
            if over:
                return None
            time.sleep(PAUSE_S)

    def _silent(self, call: DelegatedCall, awaited: Sequence[int], closed: bool) -> tuple[int, str] | None:
        """A rank that does not answer, or else has not made the call, or else is the other end of a message."""
        ranks, executor = self._ranks(), self._engine.job.executor
        peer = ranks[call.peer] if call.peer is not None else None
        also = ""
        if executor is None:
            if peer is None:
                lost = self._roll_call.lost()
                return (-1, lost) if lost else None
        else:
            mine = ranks[self._engine.rank]
            # Other ranks are asked, too: a member of the group may wait for one of them, and so not have come here.
            others = [rank for rank in range(executor.world_size) if rank != mine]
            answers = executor.ask_delegated(self._engine.communicator, call.number or 0, others, ANSWER_S)
            known = self._given_up_or_gone(awaited, 0.0)
            if known is not None:
                return known
            # A rank that is gone does not answer either, but may have been done: this call does not wait for it.
            quiet = [rank for rank in others if rank not in answers and executor.find_culprit([rank]) is None]
            silent = [rank for rank in quiet if rank in awaited] or quiet
            if silent:
                return silent[0], f"timed out waiting for {_list(silent)}, which {_verb(silent, 'answer')} nothing"
            gone = executor.find_culprit(others)
            also = f"; {gone[1]}" if gone is not None else ""
            behind = [rank for rank in ranks if call.number is not None and not answers.get(rank, True)]
            if behind:
                missing = f"{_list(behind)}, which {'has' if len(behind) == 1 else 'have'} not made this call"
                return behind[0], f"timed out waiting for {missing}{also}"
        if peer is None:
            return None
        if closed:
            return peer, f"{_names([peer])} gone"
        return peer, f"timed out waiting for rank {peer}, the other end of the message{also}"


def explain_meeting(error: Exception, meeting: Meeting, store: Any) -> Exception:
    """The error of gloo's while a group is made as `PeerLost` that names a rank, where one can be named.

    Args:
        error: The error of gloo's.
        meeting: Where the ranks met.
        store: The job's store.

    Returns:
        `PeerLost`, or the error itself.
    """
    roll_call = GlooRollCall(store, meeting.rank, meeting.size)
    lost = meeting.known() or roll_call.told()
    if not lost:
        gone = find_gone(meeting.cards, NOTICE_S)
        lost = f"{_names(gone)} gone" if gone else roll_call.lost()
        if lost:
            roll_call.tell(lost)
    return PeerLost(f"{lost}, while the group was made") if lost else error


@contextmanager
def naming_the_store(known: Callable[[], str]) -> Iterator[None]:
    """Where the job's store goes away while a group is made, `PeerLost` says so instead of PyTorch's own error.

    Args:
        known: What is known of a rank of the new group that is lost: with the store goes the rank that holds it.

    Raises:
        PeerLost: The store went away inside of the block.
    """
    try:
        yield
    except dist.DistNetworkError as error:
        deadline = time.monotonic() + NOTICE_S
        while not (lost := known()) and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        raise PeerLost(f"{lost or STORE_GONE}, while the group was made") from error


def _list(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _names(ranks: Sequence[int]) -> str:
    return f"{_list(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _verb(ranks: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb
