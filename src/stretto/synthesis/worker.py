"""Tasks in other processes: several run at once, and each is ended when its time is over.

`run_tasks` shares the budget among tasks and collects their results; a backend decides where a task runs. The backend
in this module starts processes: a worker is ``python -m stretto.synthesis.worker``, which reads a task from its
standard input and writes its messages to its standard output, so that nothing of the caller's program is run again (as
forking or spawning a copy of it would). The other backend runs Ray tasks (ray_backend.py).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from ..errors import InvalidInput, unknown
from ..programs import Program
from .makers import MakerTask, SynthesisProblem
from .portfolio import LEAST_S, Attempt, Board, attempt

BACKENDS = ("processes", "ray")
GRACE_S = 2.0
"""The time after the end of the budget at which a task is killed that has not ended by itself."""

Message = str | Attempt | None
"""A line of progress, or the last message of a task: its result, or None where it ended without one."""
Tell = Callable[[Message], None]
Inbox = queue.Queue[tuple[int, Message]]


class ActiveTask(Protocol):
    """A task that a backend has started; `run_tasks` calls its methods, from one thread."""

    def end(self) -> None:
        """Kill the task and the processes that it has started; harmless where the task has ended already."""

    def reason(self) -> str:
        """The reason why the task ended without a result; called after its last message was None."""


Start = Callable[[bytes, Tell], ActiveTask]
"""Starts a task without waiting for it. The first argument is the request for `work`, as bytes; the second takes the
task's messages, from any thread: lines of progress, then once its result or None."""


@contextlib.contextmanager
def backend(name: str, *, jobs: int, address: str | None = None) -> Iterator[Start]:
    """Make a place to run tasks, for the time of a with statement.

    Args:
        name: One of `BACKENDS`.
        jobs: How many tasks will run at once, >= 1.
        address: The Ray cluster, ``HOST:PORT``; for the backend "ray" only.

    Yields:
        The function that starts a task.

    Raises:
        InvalidInput: The backend is unknown, not installed, or does not answer.
    """
    check_backend(name, address)
    if name == "processes":
        yield _Process
    else:
        from .ray_backend import connected

        with connected(jobs=jobs, address=address) as start:
            yield start


def check_backend(name: str, address: str | None) -> None:
    """Refuse a backend that does not exist or is not installed, before anything is started."""
    if name not in BACKENDS:
        raise unknown("backend", name, BACKENDS)
    if name == "ray":
        from .ray_backend import check_installed

        check_installed(address)
    elif address is not None:
        raise InvalidInput(f"ray_address: is for the backend ray, not {name}")


def run_tasks(problem: SynthesisProblem, tasks: Sequence[MakerTask], board: Board, *, jobs: int, start: Start) -> None:
    """Run tasks in workers until all have ended, the budget is spent or the lower bound is reached.

    Args:
        problem: The problem that the tasks were made for.
        tasks: The tasks, in the order in which they are started.
        board: The state of the search, which gets the results.
        jobs: How many tasks run at once, >= 1.
        start: The function that starts a task, from `backend`.
    """
    waiting = list(tasks)
    running: dict[int, tuple[MakerTask, ActiveTask]] = {}
    inbox: Inbox = queue.Queue()
    payload = pickle.dumps(replace(problem, cluster=replace(problem.cluster), collective=replace(problem.collective)))
    started = 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop(0)
                why = board.enough()
                if why:
                    board.add(Attempt.without(task, why))
                    continue
                share = jobs * board.left_s * task.weight / (task.weight + sum(t.weight for t in waiting))
                budget_s = max(min(share, board.left_s), LEAST_S)
                request = pickle.dumps((payload, task, budget_s))
                running[started] = task, start(request, partial(_deliver, inbox, started))
                board.report(task.label)
                started += 1
            if running:
                _collect(running, inbox, board)
    finally:
        for _, far in running.values():
            far.end()


def _deliver(inbox: Inbox, number: int, message: Message) -> None:
    inbox.put((number, message))


def _collect(running: dict[int, tuple[MakerTask, ActiveTask]], inbox: Inbox, board: Board) -> None:
    """Wait for one message; end all tasks where the budget is overrun or the lower bound is reached."""
    with contextlib.suppress(queue.Empty):
        number, message = inbox.get(timeout=0.1)
        if number in running:
            task, far = running[number]
            if isinstance(message, str):
                board.report(f"{task.label}: {message}")
            else:
                del running[number]
                board.add(message or Attempt.without(task, far.reason(), crashed=True))
    reached = board.at_bound()
    if reached or board.left_s < -GRACE_S:
        why = reached or f"the budget of {board.budget_s:g} s was spent"
        for number, (task, far) in list(running.items()):
            far.end()
            del running[number]
            board.add(Attempt.without(task, f"ended: {why}"))


class _Process:
    """A task in a process of this machine."""

    def __init__(self, request: bytes, tell: Tell) -> None:
        # The process gets a session of its own, so that a solver that it has started is killed with it.
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._listen, args=(request, tell), daemon=True).start()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def reason(self) -> str:
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
    payload, task, budget_s = pickle.loads(request)
    problem: SynthesisProblem = pickle.loads(payload)
    result = attempt(task, problem, budget_s, lambda message, fraction: tell(message))
    result.made = [replace(made, program=_plain(made.program)) for made in result.made]
    return result


def _plain(program: Program) -> Program:
    """A copy of the program without cached properties, which are large and need not be sent."""
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
