# SPDX-License-Identifier: Apache-2.0
"""Calls for which NCCL gives no work, as they block: an enforcer that hands one on must not have it run twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stretto.runtime.torch_backend import backend, cuda_clock, queued_work
from stretto.runtime.torch_backend.current import CURRENT

DEVICE = torch.device("cuda", 0)


class Stream:
    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


class Event:
    on: object = None

    def record(self, stream: object) -> None:
        self.on = stream

    def query(self) -> bool:
        return True


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    cuda = SimpleNamespace(current_stream=lambda device: made, Event=lambda **_: Event())
    monkeypatch.setattr(cuda_clock, "cuda", cuda)
    monkeypatch.setattr(queued_work, "cuda", cuda)
    return made


@pytest.mark.parametrize("own", [None, True, False])
def test_a_blocking_call_that_is_handed_on_runs_once(
    own: bool | None, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []

    def run_plainly(*args: Any, **more: Any) -> None:
        ran.append(more.get("own"))

    group: Any = SimpleNamespace(
        _home=SimpleNamespace(check=lambda: None), engine=SimpleNamespace(count=lambda: None), alone=True,
        _run_plainly=run_plainly, _watched=lambda call, run, blocking: run(), _gathered=lambda work: work,
    )  # fmt: skip
    enforcer: Any = SimpleNamespace(take=lambda group, call, tensors, opts, plain: plain(own=own))
    monkeypatch.setattr(CURRENT, "enforcer", enforcer)
    call: Any = SimpleNamespace(device=DEVICE)
    options: Any = SimpleNamespace(asyncOp=False)
    work = backend.StrettoGroup._run(group, call, "allreduce", (), [], options)
    assert ran == [own]
    assert work.wait() and work.is_completed() and work.is_success()
    # Whichever stream waits stands behind the one of the call.
    assert len(stream.waited) == 1
    waited: Any = stream.waited[0]
    assert waited.on is stream
