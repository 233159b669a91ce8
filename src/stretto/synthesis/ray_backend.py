# SPDX-License-Identifier: Apache-2.0
"""Tasks on a Ray cluster (`children.ray_cluster`).

A task is a Ray generator of the messages that a worker process would write to its pipe. Each task runs in a Ray worker
that does nothing else before or after, so that the libraries of one maker (HiGHS, for example) never meet those of
another. The nodes of a cluster need this package, in the same version.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import Any

from ..children.ray_cluster import ray_module
from .attempts import Attempt
from .worker import Message, Tell, work


class RayTask:
    """A task on the Ray cluster (an `ActiveTask`)."""

    def __init__(self, request: bytes, tell: Tell) -> None:
        ray = ray_module()
        # Each Ray worker serves one call, and a call is not retried: a task that was ended stays ended.
        remote = ray.remote(num_cpus=1, max_calls=1, max_retries=0)(_messages)
        self.stream = remote.remote(request)
        self.failure = "its Ray task ended without a result"
        threading.Thread(target=self._listen, args=(tell,), daemon=True).start()

    def end(self) -> None:
        """Cancel the task with force."""
        ray = ray_module()
        with contextlib.suppress(ray.exceptions.RayError):
            ray.cancel(self.stream, force=True)

    def reason(self) -> str:
        """Why the task gave no result."""
        return self.failure

    def _listen(self, tell: Tell) -> None:
        ray = ray_module()
        last: Message = None
        try:
            for item in self.stream:
                last = ray.get(item)
                tell(last)
        except Exception as error:  # This includes errors of the task itself, such as a node without this package.
            cause = getattr(error, "cause", None) or error
            self.failure = f"its Ray task failed: {type(cause).__name__}: {' '.join(str(cause).split())[:200]}"
        if last is None or isinstance(last, str):
            tell(None)


def _messages(request: bytes) -> Iterator[str | Attempt]:
    """The generator that runs on the cluster: it yields lines of progress, and then the result."""
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            said.put(work(request, said.put))
        except BaseException as error:
            said.put(error)

    threading.Thread(target=run, daemon=True).start()
    while isinstance(message := said.get(), str):
        yield message
    if isinstance(message, BaseException):
        raise message
    yield message
