# SPDX-License-Identifier: Apache-2.0
"""Which rank is lost: ranks answer through a store, at different moments."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

from stretto.errors import PeerLost
from stretto.runtime.enforcer.gloo import GlooCarrier
from stretto.runtime.torch_backend.roll_call import STORE_GONE, GlooRollCall


class MemoryStore:
    """A store of one process."""

    timeout = timedelta(seconds=1)

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, value: int) -> int:
        raise NotImplementedError


class GoneStore(MemoryStore):
    """A store whose host is lost."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


class Job:
    """Ranks of which some are lost; the others fail at different moments."""

    def __init__(self, seed: int) -> None:
        dice = random.Random(seed)
        self.size = dice.randint(2, 7)
        self.lost = sorted(dice.sample(range(self.size), dice.randint(1, self.size - 1)))
        self.survivors = [rank for rank in range(self.size) if rank not in self.lost]
        self.pauses = {rank: dice.uniform(0, 0.2) for rank in self.survivors}
        self.store, self.said = MemoryStore(), dict[int, str]()

    def fail(self, rank: int) -> None:
        time.sleep(self.pauses[rank])
        self.said[rank] = GlooRollCall(self.store, rank, self.size, patience_s=4.0).lost()


def test_every_rank_that_fails_names_the_ranks_that_do_not_answer() -> None:
    jobs = [Job(seed) for seed in range(20)]
    threads = [threading.Thread(target=job.fail, args=(rank,)) for job in jobs for rank in job.survivors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job in jobs:
        lost = job.lost
        named = f"rank {lost[0]} does not" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} do not"
        assert len(job.said) == len(job.survivors)
        assert all(text.startswith(named) for text in job.said.values()), job.said
        # A rank that fails when the others have left is told the same.
        assert GlooRollCall(job.store, job.survivors[0], job.size).told() == job.said[job.survivors[0]]


def test_a_rank_that_is_known_to_be_gone_is_named_for_ranks_that_fail_later() -> None:
    store = MemoryStore()
    GlooRollCall(store, 0, 3).tell("rank 2 is gone")
    GlooRollCall(store, 1, 3).tell("rank 0 is gone")
    assert GlooRollCall(store, 1, 3, patience_s=0).lost() == "rank 2 is gone"


def test_a_rank_that_leaves_after_it_has_told_is_not_taken_for_a_lost_one() -> None:
    store = MemoryStore()
    carrier = GlooCarrier.__new__(GlooCarrier)
    carrier._roll_call = GlooRollCall(store, 3, 4)

    def find_gone(error: Exception) -> Exception:
        # While this rank looks around, rank 1 tells whom it misses and leaves.
        GlooRollCall(store, 1, 4).tell("rank 2 is gone")
        return PeerLost("ranks 1, 2 are gone")

    carrier._explain = find_gone
    found = carrier.explained(RuntimeError("Connection reset by peer"))
    assert isinstance(found, PeerLost)
    assert str(found) == "rank 2 is gone"
    other = ValueError("of another kind")
    assert carrier.explained(other) is other


def test_the_message_says_what_has_failed() -> None:
    rest = "does not answer: a call of gloo's has failed"
    assert GlooRollCall(MemoryStore(), 0, 2, patience_s=0).lost() == f"rank 1 {rest}"
    on_channels = GlooRollCall(MemoryStore(), 0, 2, patience_s=0, failed="a call of gloo's on the plan's channels")
    assert on_channels.lost() == "rank 1 does not answer: a call of gloo's on the plan's channels has failed"


def test_nobody_is_named_where_all_answer_and_a_store_that_is_gone_is_said() -> None:
    store = MemoryStore()
    for rank in range(2):
        store.set(f"here/{rank}", "")
    assert GlooRollCall(store, 0, 2).lost() == ""
    assert GlooRollCall(GoneStore(), 0, 2).lost() == STORE_GONE
    carrier = GlooCarrier.__new__(GlooCarrier)
    carrier._roll_call, carrier._explain = GlooRollCall(GoneStore(), 1, 3), lambda error: error
    found = carrier.explained(RuntimeError("Connection reset by peer"))
    assert isinstance(found, PeerLost) and str(found) == STORE_GONE
    GlooRollCall(GoneStore(), 0, 2).tell("rank 1 is gone")
