# SPDX-License-Identifier: Apache-2.0
"""What an asynchronous call returns: `Work` objects that never hang and always say what went wrong.

`torch._C` can make a `Work` from a future, but its ``wait`` ignores errors and takes no timeout. These are Python
subclasses instead: ``wait`` blocks in C++, with the interpreter's lock let go. A future is only made for who asks.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ...process_state import STATE, ProcessPart
from ..executor.forks import refusal
from .gloo_errors import GlooFailure, gloo_failure

NO_TIMEOUT = timedelta(0)
Tensors = list[torch.Tensor]
Future = torch.futures.Future[Any]

SHELLS = 4096
_OUR_REFERENCES = 2
"""To a work when nobody else has one: a local variable and getrefcount's argument."""


class KeptWorks(ProcessPart):
    """Works that live on for a while, those that ended and that Python has forgotten without their tensors.

    C++ may hold a `Work` whose Python half has died, and would then wait for it forever (DDP's join does, for the rest
    of an iteration).
    """

    def __init__(self) -> None:
        self._recent: deque[GroupWork] = deque()
        self._shells: deque[GroupWork] = deque(maxlen=SHELLS)

    def keep(self, work: GroupWork) -> None:
        """Keep a new work, and look whether the oldest ones are still needed."""
        recent = self._recent
        # Two out for one in: nothing piles up behind a work that somebody holds for long.
        for _ in range(min(2, len(recent))):
            old = recent.popleft()
            if sys.getrefcount(old) <= _OUR_REFERENCES and old.forgettable:
                old.strip()
                self._shells.append(old)
            elif len(recent) < SHELLS:
                recent.append(old)
        recent.append(work)


_keep = STATE.part(KeptWorks).keep


class StartedProgram(Protocol):
    """What the executor returns for a program that it has started."""

    @property
    def done(self) -> bool:
        """Whether the call has ended, with or without an error."""

    @property
    def elapsed_us(self) -> float:
        """Microseconds from the call to its end."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the call has ended; False when the time is up. Raises what went wrong."""


Ended = Callable[[float | None], object]
"""Called once with the microseconds that a call took, where they are known."""


class GroupWork(dist.Work):
    """One call on its way. Subclasses say how to wait; this does what comes after, exactly once."""

    def __init__(self, tensors: Tensors, ended: Ended | None = None) -> None:
        super().__init__()
        self._tensors = tensors
        self._ended = ended
        # This runs in the same thread once more where an op has ended before its future is asked for.
        self._lock = threading.RLock()
        self._over = False
        self._forks = STATE.forks
        self._error: Exception | None = None
        self._future: Future | None = None
        _keep(self)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Block until the op has ended; raises what went wrong. After a `TimeoutError` it can be waited for again."""
        if not self._over:
            self._check_process()
            try:
                finished = self._block(timeout)
            except Exception as error:
                self._settle(self._explain(error))
            else:
                if not finished:
                    raise TimeoutError(f"the operation did not end within {timeout.total_seconds():g} s")
                self._settle(None)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the op has ended, well or not."""
        return self._over or self._poll()

    @property
    def forgettable(self) -> bool:
        """Whether the call no longer needs its tensors to be kept."""
        return self.is_completed()

    def is_success(self) -> bool:
        """Whether the call has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What went wrong, once it has ended."""
        if not self._over and self._poll():
            with contextlib.suppress(Exception):
                self.wait()
        return self._error

    def result(self) -> Tensors:
        """The tensors that the op has written."""
        return self._tensors

    def synchronize(self) -> None:
        """Make the result safe to use: on the CPU, wait."""
        self.wait()

    def get_future(self) -> Future:
        """A future with the list of tensors as its value; it fails when the op does, also for those who wait in C++."""
        self._check_process()
        with self._lock:
            if self._future is None:
                self._future = self._make_future()
        return self._future

    def strip(self) -> None:
        """Let go of everything but whether it went well."""
        if not self._over:
            with contextlib.suppress(Exception):
                self.wait()
        self._tensors = []
        self._future = None

    def _check_process(self) -> None:
        """Raises in a forked child: what the rank itself has begun only the rank can wait for."""
        if self._forks != STATE.forks:
            raise refusal("the rank that began this operation")

    @abstractmethod
    def _block(self, timeout: timedelta) -> bool:
        """Wait so long at most, without the interpreter's lock; whether the data has arrived."""

    @abstractmethod
    def _poll(self) -> bool:
        """Whether the data has arrived, without waiting."""

    def _finish(self) -> None:
        """What is left to do when the data has arrived."""

    def _explain(self, error: Exception) -> Exception:
        return error

    def _make_future(self) -> Future:
        done: Future = torch.futures.Future()
        tensors = self._tensors

        def value(_: Future) -> Tensors:
            # An exception set on a future is invisible to C++; one raised in a callback is not.
            if self._error is not None:
                raise self._error
            return tensors

        child: Future = done.then(value)
        self._when_over(lambda: done.set_result(None))
        return child

    def _when_over(self, then: Callable[[], object]) -> None:
        """Call `then` from some thread once the op has ended."""
        # One thread for each, since a call may end only after another that was submitted later.
        threading.Thread(target=_watch, args=(self, then), name="stretto-waiter", daemon=True).start()

    def _settle(self, error: Exception | None) -> None:
        with self._lock:
            if self._over:
                return
            self._error = error
            if error is None:
                try:
                    self._finish()
                except Exception as wrong:
                    self._error = wrong
            self._over = True
            ended, self._ended = self._ended, None
            elapsed_us = self._elapsed_us()
            self._release()
        if ended is not None:
            ended(elapsed_us)

    def _elapsed_us(self) -> float | None:
        """How long the call took in microseconds, where that is known."""
        return None

    def _release(self) -> None:
        """Let go of what only a running op needs."""


class ExecutedWork(GroupWork):
    """A program that the executor runs."""

    def __init__(
        self,
        started: StartedProgram,
        tensors: Tensors,
        finish: Callable[[], object] | None = None,
        ended: Ended | None = None,
    ) -> None:
        super().__init__(tensors, ended)
        self._started: StartedProgram | None = started
        self._last = finish

    def _block(self, timeout: timedelta) -> bool:
        started = self._started
        return started is None or started.wait(timeout.total_seconds() if timeout > NO_TIMEOUT else None)

    def _poll(self) -> bool:
        started = self._started
        return started is None or started.done

    def _when_over(self, then: Callable[[], object]) -> None:
        if self._over:
            then()
        elif completes_futures():
            super()._when_over(then)
        else:
            WAITER.add(self, then)

    def _elapsed_us(self) -> float | None:
        return self._started.elapsed_us if self._started is not None else None

    def _finish(self) -> None:
        if self._last is not None:
            self._last()

    def _release(self) -> None:
        self._started = None
        self._last = None


class DelegatedWork(GroupWork):
    """An op of the wrapped backend; `message` where it is one between two ranks."""

    def __init__(
        self,
        inner: dist.Work,
        tensors: Tensors,
        explain: Callable[[Exception], Exception],
        ended: Ended | None = None,
        *,
        message: bool = False,
    ) -> None:
        super().__init__(tensors, ended)
        self._inner: dist.Work | None = inner
        self._why = explain
        self._message = message
        self._source = -1
        self._waiting = threading.Lock()
        self._waited = False
        self._wrong: Exception | None = None

    def source_rank(self) -> int:
        """Who sent what arrived from any source."""
        inner = self._inner
        return int(inner._source_rank()) if inner is not None else self._source

    _source_rank = source_rank

    def _block(self, timeout: timedelta) -> bool:
        # gloo's sends and receives count down what was waited for: whoever waits a second time waits forever. So one
        # waits, and what came of it is known before the next may look.
        if not self._waiting.acquire(timeout=timeout.total_seconds() if timeout > NO_TIMEOUT else -1):
            return False
        try:
            inner = self._inner
            if inner is not None and not self._waited:
                try:
                    inner.wait(timeout) if timeout > NO_TIMEOUT else inner.wait()
                except RuntimeError as error:
                    if timeout > NO_TIMEOUT and not self._message and not inner.is_completed():
                        return False
                    self._wrong = error
                    if timeout > NO_TIMEOUT and gloo_failure(error) is GlooFailure.TIMED_OUT:
                        self._wrong = TimeoutError(
                            f"no message within {timeout.total_seconds():g} s, and gloo has given it up"
                        )
                self._waited = True
        finally:
            self._waiting.release()
        if self._wrong is not None:
            raise self._wrong
        return True

    def _poll(self) -> bool:
        inner = self._inner
        return inner is None or inner.is_completed()

    def _explain(self, error: Exception) -> Exception:
        return self._why(error)

    def _finish(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._source = int(self._inner._source_rank()) if self._inner is not None else -1

    def _release(self) -> None:
        self._inner = None
        # The function refers to the group, which would live as long as this work.
        self._why = _as_it_is


class JoinedWork(GroupWork):
    """Several calls as one."""

    def __init__(self, works: Sequence[dist.Work], tensors: Tensors | None = None) -> None:
        super().__init__(_results(works) if tensors is None else tensors)
        self._works = list(works)

    def _block(self, timeout: timedelta) -> bool:
        deadline = time.monotonic() + timeout.total_seconds()
        for work in self._works:
            if timeout <= NO_TIMEOUT:
                work.wait()
            else:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 1e-3)))
        return True

    def _poll(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def _release(self) -> None:
        self._works = []


def completes_futures() -> bool:
    """Whether this thread is one of ours: what a callback on it waits for must be completed by another one."""
    return threading.current_thread().name.startswith("stretto-")


def _as_it_is(error: Exception) -> Exception:
    return error


def _results(works: Sequence[dist.Work]) -> Tensors:
    return [tensor for work in works for tensor in work.result()]


def _watch(work: GroupWork, then: Callable[[], object]) -> None:
    # An error stays in the work, where the future's callback finds it.
    with contextlib.suppress(Exception):
        work.wait()
    with contextlib.suppress(Exception):
        then()


class Waiter(ProcessPart):
    """One thread for all futures of the executor's works: blocks in C++, asleep while there are none."""

    TICK = timedelta(milliseconds=2)
    """How late a work may be noticed that overtakes the oldest one."""

    def __init__(self) -> None:
        self._inherited: list[object] = []
        self._begin()

    def _begin(self) -> None:
        self._new: SimpleQueue[tuple[GroupWork, Callable[[], object]]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def after_fork(self) -> None:
        """The thread is the parent's, and what it waits for, too."""
        self._inherited.append(self._new)
        self._begin()

    def add(self, work: GroupWork, then: Callable[[], object]) -> None:
        """Call `then` once the work has ended."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="stretto-futures", daemon=True)
                self._thread.start()
        self._new.put((work, then))

    def _run(self) -> None:
        waiting: list[tuple[GroupWork, Callable[[], object]]] = []
        while True:
            while not waiting or not self._new.empty():
                waiting.append(self._new.get())
            with contextlib.suppress(Exception):
                waiting[0][0].wait(self.TICK)
            still = []
            for work, then in waiting:
                if work.is_completed():
                    _watch(work, then)
                else:
                    still.append((work, then))
            waiting = still


WAITER = STATE.part(Waiter)
