# SPDX-License-Identifier: Apache-2.0
"""The job's store has room for several threads: who waits in it keeps no other off a connection of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from stretto.runtime.torch_backend.job_store import job_store, start_store


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_an_agent_uses_the_store_while_the_application_waits_in_it(one_rank: None) -> None:
    """As where a rank's script waits for a key that another sets only when its plan has been prepared."""
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
