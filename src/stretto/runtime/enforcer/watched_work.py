# SPDX-License-Identifier: Apache-2.0
"""A call in plain order while ranks may be of different minds: a wait that takes long is looked into."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from ..torch_backend.work import NO_TIMEOUT, DelegatedWork, Future, GroupWork, Tensors

LOOK_S, MOST_LOOK_S = 1.0, 16.0
"""Between two looks, at first and at last: a rank may well evaluate alone for minutes."""
TICK_S = 0.25


class WatchedWork(GroupWork):
    """Another work, whose wait asks `stalled` now and then; that may raise what ends the wait."""

    def __init__(self, inner: GroupWork, tensors: Tensors, stalled: Callable[[float], None]) -> None:
        super().__init__(tensors)
        self._inner: GroupWork | None = inner
        self._stalled = stalled

    def _block(self, timeout: timedelta) -> bool:
        inner = self._inner
        if inner is None:
            return True
        begin = looked = time.monotonic()
        look_s = LOOK_S
        limit_s = timeout.total_seconds() if timeout > NO_TIMEOUT else float("inf")
        while True:
            left_s = limit_s - (time.monotonic() - begin)
            if left_s <= 0:
                return False
            try:
                return inner.wait(timedelta(seconds=min(TICK_S, left_s)))
            except TimeoutError:
                if inner.is_completed():
                    # The work has ended by itself, with a timeout of its own backend, which this raises.
                    return inner.wait()
                now = time.monotonic()
                if now - looked >= look_s:
                    looked, look_s = now, min(1.5 * look_s, MOST_LOOK_S)
                    self._stalled(now - begin)
            except Exception:
                # A rank that has found out why leaves, and says so before.
                self._stalled(time.monotonic() - begin)
                raise

    def _poll(self) -> bool:
        return self._inner is None or self._inner.is_completed()

    def _make_future(self) -> Future:
        if isinstance(self._inner, DelegatedWork):
            return self._inner.get_future()
        return super()._make_future()

    def _release(self) -> None:
        self._inner = None
