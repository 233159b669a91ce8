# SPDX-License-Identifier: Apache-2.0
"""A task in another process, which can be ended.

A worker is ``python -m stretto.synthesis.worker``, which reads a task from its
standard input and writes its messages to its standard output, so that nothing of the caller's program is run again (as
forking or spawning a copy of it would). Tasks on Ray do the same (ray_backend.py).
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from ..children import Child
from ..programs import Program, SymmetricProgram
from .attempts import Attempt, attempt
from .maker import Maker
from .problem import SynthesisProblem

GRACE_S = 2.0
"""The time after the end of the budget at which a task is killed that has not ended by itself."""

Message = str | Attempt | None
"""A line of progress, or the last message of a task: its result, or None where it ended without one."""
Tell = Callable[[Message], None]


class ActiveTask(Protocol):
    """A task that a backend has started; `run_tasks` calls its methods, from one thread."""

    def end(self) -> None:
        """Kill the task and the processes that it has started; harmless where the task has ended already."""

    def reason(self) -> str:
        """The reason why the task ended without a result; called after its last message was None."""


Start = Callable[[bytes, Tell], ActiveTask]
"""Starts a task without waiting for it. The first argument is the request for `work`, as bytes; the second takes the
task's messages, from any thread: lines of progress, then once its result or None."""


class ProcessTask:
    """A task in a process of this machine (an `ActiveTask`)."""

    def __init__(self, request: bytes, tell: Tell) -> None:
        self.process = Child([sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        threading.Thread(target=self._listen, args=(request, tell), daemon=True).start()

    def end(self) -> None:
        """Kill the process and those that it has started."""
        self.process.kill_all()

    def reason(self) -> str:
        """The code that the process ended with."""
        try:
            self.process.wait(timeout=GRACE_S)
        except subprocess.TimeoutExpired:
            self.end()
        return f"its process ended with code {self.process.returncode}"

    def _listen(self, request: bytes, tell: Tell) -> None:
        """Pass on lines of progress, and then the result; None when the process ends without a result."""
        assert self.process.stdin is not None and self.process.stdout is not None
        message: Message = ""
        try:
            self.process.stdin.write(request)
            self.process.stdin.close()
            while not isinstance(message, Attempt):
                message = pickle.load(self.process.stdout)
                tell(message)
        except (OSError, EOFError, pickle.UnpicklingError):
            tell(None)
        self.process.stdout.close()
        self.process.wait()


def work(request: bytes, tell: Callable[[str], None]) -> Attempt:
    """Run the task of a request; this is what a worker executes, in a process or on a Ray node."""
    payload, maker, task, budget_s = pickle.loads(request)
    problem: SynthesisProblem = pickle.loads(payload)
    try:
        asked: Maker = pickle.loads(maker)
    except (ImportError, AttributeError) as error:
        return Attempt.without(task, f"the maker is in no module that a worker can import: {error}", crashed=True)
    result = attempt(asked, task, problem, budget_s, lambda message, fraction: tell(message))
    result.made = [replace(made, program=_plain(made.program)) for made in result.made]
    return result


def _plain(program: Program | SymmetricProgram) -> Program | SymmetricProgram:
    """A copy of the program without cached properties, which are large and need not be sent."""
    if isinstance(program, SymmetricProgram):
        return replace(program)
    return program.replace(collective=replace(program.collective))


def _main() -> None:
    # Solvers print to descriptor 1, so that it is redirected; only messages may be written to the pipe.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def tell(message: Message) -> None:
        pickle.dump(message, pipe)
        pipe.flush()

    tell(work(sys.stdin.buffer.read(), tell))


if __name__ == "__main__":
    # Import the module by its name: pickled classes must be those that the caller knows, not those of __main__.
    from stretto.synthesis.worker import _main as main

    main()
