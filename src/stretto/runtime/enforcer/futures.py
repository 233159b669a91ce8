# SPDX-License-Identifier: Apache-2.0
"""Waits that no ``wait()`` shows: DDP takes the future of a bucket and waits for it at the end of the backward pass.

A callback of ours, queued before DDP's, stands there instead. So the wait is measured, a stall is looked into, and the
thread that waits drives the executor.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Protocol

import torch

from ...process_state import STATE, ProcessPart


class Waitable(Protocol):
    """A call that a future can wait for."""

    def wait(self) -> bool:
        """Block until it has ended."""


MAX_PASSES = 16


class PendingWaits(ProcessPart):
    """Works whose futures were taken, by backward pass."""

    def __init__(self) -> None:
        self.works: dict[int, list[Waitable]] = {}
        self.lock = threading.Lock()

    def after_fork(self) -> None:
        """A thread of the parent may have held the lock."""
        self.lock = threading.Lock()


_PENDING = STATE.part(PendingWaits)


def taken(work: Waitable) -> None:
    """Somebody takes the future of a work; in a backward pass it will be waited for when that has ended."""
    task: int = torch._C._current_graph_task_id()
    if task < 0:
        return
    with _PENDING.lock:
        while len(_PENDING.works) >= MAX_PASSES:
            # A pass that has failed never comes to its end.
            del _PENDING.works[min(_PENDING.works)]
        works = _PENDING.works.setdefault(task, [])
        works.append(work)
        first = len(works) == 1
    if first:
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _end(task))


def _end(task: int) -> None:
    with _PENDING.lock:
        works = _PENDING.works.pop(task, [])
    for work in works:
        # What went wrong is in the future, where DDP finds it.
        with contextlib.suppress(Exception):
            work.wait()
