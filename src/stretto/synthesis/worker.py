"""Tasks beside this process: several at once, each ended when its time is over.

`run_tasks` shares the budget and listens; where a task runs is up to a backend. The one here starts processes: a worker
is ``python -m stretto.synthesis.worker``, which reads a task from its standard input and writes what comes of it to
its standard output, so that nothing of the caller's program is run again (as starting from a copy of it would). Ray
tasks (ray_backend.py) are the other.
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
"""How long after the end of the budget a task is ended that has not come to an end by itself."""

Message = str | Attempt | None
"""A line of progress, or at last what came of it (None: nothing)."""
Tell = Callable[[Message], None]
Inbox = queue.Queue[tuple[int, Message]]


class ActiveTask(Protocol):
    """A task that was started somewhere."""

    def end(self) -> None:
        """End it at once, with what it has started."""

    def reason(self) -> str:
        """Why it came to nothing, once it has said so."""


Start = Callable[[bytes, Tell], ActiveTask]
"""Start a task (as bytes for `work`) somewhere; its messages go to the second argument, from any thread."""


@contextlib.contextmanager
def backend(name: str, *, jobs: int, address: str | None = None) -> Iterator[Start]:
    """A place to run tasks, for as long as it is needed."""
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
    """Run the tasks, `jobs` at a time."""
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
    """Wait for one message; end what is late, and everything once the bound is reached."""
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
        # Its own session, so that a solver that it has started ends with it.
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
        """Pass on lines of progress, and at last the attempt; None when the process ends without one."""
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
    """What a worker does with a request, wherever it runs."""
    payload, task, budget_s = pickle.loads(request)
    problem: SynthesisProblem = pickle.loads(payload)
    result = attempt(task, problem, budget_s, lambda message, fraction: tell(message))
    result.made = [replace(made, program=_plain(made.program)) for made in result.made]
    return result


def _plain(program: Program) -> Program:
    """A copy without what was computed on the way."""
    return program.replace(collective=replace(program.collective))


def _main() -> None:
    # Solvers print to descriptor 1; only we may write to the pipe.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def tell(message: Message) -> None:
        pickle.dump(message, pipe)
        pipe.flush()

    tell(work(sys.stdin.buffer.read(), tell))


if __name__ == "__main__":
    # The module's classes must be those that the caller knows, not those of __main__.
    from stretto.synthesis.worker import _main as main

    main()
