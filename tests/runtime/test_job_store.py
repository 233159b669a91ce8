# SPDX-License-Identifier: Apache-2.0
"""Keys in the job's store belong to one start of the job: torchrun starts ranks again on the store that they had."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from stretto.process_state import STATE
from stretto.resharding.tensors.agree import ReshardAgreement
from stretto.runtime.enforcer.background import StoreMaximum
from stretto.runtime.torch_backend.job_store import job_store, start_store
from stretto.runtime.torch_backend.meeting import Meeting


def test_no_start_finds_keys_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = c10d.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    seen = []
    for start in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
        # A process that is started again counts from one.
        monkeypatch.setattr(STATE, "number", lambda what: 1)
        mine = job_store("part")
        seen.append(mine.check(["epoch"]))
        mine.set("epoch", start)
        assert mine.get("epoch").decode() == start
    assert seen == [False, False, False]


def test_meeting_of_a_later_start_counts_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first start only one of two ranks came so far as to meet."""
    store: Any = c10d.HashStore()
    Meeting(store, 0, 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert [Meeting(store, rank, 2)._where for rank in range(2)] == ["stretto/1/1"] * 2


def test_agreements_of_a_later_start_do_not_find_what_was_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of the first start had said all; in the second it has said nothing when rank 0 asks."""
    store: Any = c10d.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    both = [StoreMaximum(start_store("stretto/agreement"), "1/1", rank, 2, [10 + rank]) for rank in range(2)]
    assert both[0].over(0.0) and both[0].wait() == [11]
    before = [ReshardAgreement(start_store("stretto/resharding"), rank) for rank in range(2)]
    assert store.num_keys() > len(before)
    kept = store.num_keys()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = StoreMaximum(start_store("stretto/agreement"), "1/1", 0, 2, [20])
    assert not again.over(0.0)
    ReshardAgreement(start_store("stretto/resharding"), 0)
    assert store.num_keys() == kept + 2, "nothing of the first start was written over"


def test_an_agent_uses_the_store_while_the_application_waits_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a rank's script waits for a key that another sets only when its plan has been prepared."""
    store: Any = c10d.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    agent = job_store("agent", apart=True)
    application, other_rank = start_store("application"), start_store("application", apart=True)
    begun = threading.Event()
    got: list[bytes] = []

    def wait() -> None:
        begun.set()
        got.append(application.get("answer"))

    waiting = threading.Thread(target=wait)
    waiting.start()
    begun.wait()
    agent.set("address", "here")
    assert agent.get("address") == b"here" and not got
    other_rank.set("answer", "yes")
    waiting.join(30)
    assert got == [b"yes"]
