"""Tasks in processes of their own: several at once, each ended when its time is over.

A worker is ``python -m stretto.synthesis.worker``: it reads a task from its standard input and writes what comes of
it to its standard output, so that nothing of the caller's program is run again (as starting from a copy of it would).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..programs import Program
from .makers import Problem, Task
from .portfolio import LEAST_S, Attempt, Board, attempt

GRACE_S = 2.0
"""How long after the end of the budget a task is ended that has not come to an end by itself."""


Inbox = queue.Queue[tuple[int, str | Attempt | None]]
"""Lines of progress and at last what came of it (None: nothing), with the number of the worker."""


@dataclass(kw_only=True)
class _Worker:
    task: Task
    process: subprocess.Popen[bytes]


def run_workers(problem: Problem, tasks: Sequence[Task], board: Board, *, jobs: int) -> None:
    """Run the tasks, `jobs` at a time."""
    waiting = list(tasks)
    running: dict[int, _Worker] = {}
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
                running[started] = _start(started, task, payload, budget_s, inbox)
                board.report(task.label)
                started += 1
            if running:
                _collect(running, inbox, board)
    finally:
        for worker in running.values():
            worker.process.kill()
            worker.process.wait()


def _collect(running: dict[int, _Worker], inbox: Inbox, board: Board) -> None:
    """Wait for one message; end what is late, and everything once the bound is reached."""
    with contextlib.suppress(queue.Empty):
        number, message = inbox.get(timeout=0.1)
        worker = running.get(number)
        if worker is not None:
            if isinstance(message, str):
                board.report(f"{worker.task.label}: {message}")
            else:
                worker.process.wait()
                del running[number]
                code = worker.process.returncode
                board.add(message or Attempt.without(worker.task, f"its process ended with code {code}"))
    reached = board.at_bound()
    for number, worker in list(running.items()):
        late = board.left_s < -GRACE_S
        if late or reached:
            worker.process.kill()
            worker.process.wait()
            del running[number]
            why = reached or f"the budget of {board.budget_s:g} s was spent"
            board.add(Attempt.without(worker.task, f"ended: {why}"))


def _start(number: int, task: Task, payload: bytes, budget_s: float, inbox: Inbox) -> _Worker:
    process = subprocess.Popen(
        [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None and process.stdout is not None
    request = pickle.dumps((payload, task, budget_s))
    threading.Thread(target=_listen, args=(number, process, request, inbox), daemon=True).start()
    return _Worker(task=task, process=process)


def _listen(number: int, process: subprocess.Popen[bytes], request: bytes, inbox: Inbox) -> None:
    """Pass on lines of progress, and at last the attempt; None when the process ends without one."""
    assert process.stdin is not None and process.stdout is not None
    result: Attempt | None = None
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
        process.stdin.write(request)
        process.stdin.close()
        while result is None:
            message = pickle.load(process.stdout)
            if isinstance(message, Attempt):
                result = message
            else:
                inbox.put((number, str(message)))
    process.stdout.close()
    inbox.put((number, result))


def _main() -> None:
    # Solvers print to descriptor 1; only we may write to the pipe.
    pipe = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    payload, task, budget_s = pickle.load(sys.stdin.buffer)
    problem: Problem = pickle.loads(payload)

    def progress(message: str, fraction: float) -> None:
        pickle.dump(message, pipe)
        pipe.flush()

    result = attempt(task, problem, budget_s, progress)
    result.made = [replace(made, program=_plain(made.program)) for made in result.made]
    pickle.dump(result, pipe)
    pipe.flush()


def _plain(program: Program) -> Program:
    """A copy without what was computed on the way."""
    return program.replace(collective=replace(program.collective))


if __name__ == "__main__":
    # The module's classes must be those that the caller knows, not those of __main__.
    from stretto.synthesis.worker import _main as main

    main()
