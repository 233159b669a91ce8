# SPDX-License-Identifier: Apache-2.0
"""A meeting of ranks that is not to be: the rank named is the one that is lost, not one that has left because of it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
import pytest

from stretto.errors import PeerLost
from stretto.runtime.torch_backend.meeting import Card, Meeting, card


@dataclass
class DictStore:
    """A store inside one process."""

    values: dict[str, bytes] = field(default_factory=dict)
    timeout: timedelta = timedelta(seconds=60)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, value: int) -> int:
        total = int(self.values.get(key, b"0")) + value
        self.values[key] = str(total).encode()
        return total


def cards(*, gone: set[int]) -> list[Card]:
    """Three ranks of this host, some of whose processes have ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine = card(0, executor="", rules="")
    return [
        msgspec.structs.replace(mine, rank=rank, pid=ended.pid if rank in gone else os.getpid()) for rank in range(3)
    ]


def test_what_a_rank_has_said_before_it_left_counts_more_than_that_it_is_gone() -> None:
    store = DictStore()
    first, second = (Meeting(store, rank, 3) for rank in (0, 1))
    first.cards = second.cards = cards(gone={2})
    with pytest.raises(PeerLost, match=r"^rank 2 is gone"):
        second.exchange(b"")
    with pytest.raises(PeerLost, match="rank 2 is gone"):
        second.conclude("rank 2 is gone: its process has ended")
    first.cards = cards(gone={1, 2})
    for meet in (lambda: first.exchange(b""), lambda: first.conclude("")):
        with pytest.raises(PeerLost, match=r"^rank 1: rank 2 is gone"):
            meet()


def test_all_ranks_that_are_gone_are_named_where_none_has_said_why() -> None:
    meeting = Meeting(DictStore(), 0, 3)
    meeting.cards = cards(gone={1, 2})
    with pytest.raises(PeerLost, match=r"^ranks 1, 2 are gone"):
        meeting.exchange(b"")


def test_what_the_executor_knows_of_a_rank_ends_a_meeting() -> None:
    meeting = Meeting(DictStore(), 0, 3, lambda: "rank 2 is gone; rank 1 has left because of that")
    with pytest.raises(PeerLost, match=r"^rank 2 is gone; rank 1 has left because of that, while the group was made"):
        meeting.exchange(b"")
