# SPDX-License-Identifier: Apache-2.0
"""`run_tasks`: shares the budget of a search among tasks in processes of this machine or on Ray, and ends late ones."""

from __future__ import annotations

import contextlib
import pickle
import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from ..children import ray_cluster
from ..errors import InvalidInput, unknown
from . import ray_backend, worker
from .attempts import LEAST_S, Attempt, Board
from .makers import LIBRARY, makers
from .problem import MakerTask, SynthesisProblem
from .worker import ActiveTask, Message, Start

BACKENDS = ("processes", "ray")
LATE = 0.25
LATE_S = 60.0
"""How long a search that had no program when its budget ended waits for a maker other than the library: this share of
the budget, and at least so many seconds."""
LAST_S = 300.0
"""How long after the end of the budget a search without any program waits for one of the library."""
Inbox = queue.Queue[tuple[int, Message]]


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
        yield worker.ProcessTask
    else:
        with ray_cluster.connected(jobs=jobs, address=address):
            yield ray_backend.RayTask


def check_backend(name: str, address: str | None) -> None:
    """Refuse a backend that does not exist or is not installed, before anything is started."""
    if name not in BACKENDS:
        raise unknown("backend", name, BACKENDS)
    if name == "ray":
        ray_cluster.check_installed(address)
    elif address is not None:
        raise InvalidInput(f"ray_address: is for the backend ray, not {name}")


def run_tasks(problem: SynthesisProblem, tasks: Sequence[MakerTask], board: Board, *, jobs: int, start: Start) -> None:
    """Run tasks in workers until all have ended, the budget is spent or the lower bound is reached.

    Where the budget is spent before there is any program, as on a machine that is busy with other work, library
    algorithms are started beside what is running. The first program of another maker then ends the search; one of the
    library does once the others had a quarter of the budget more, and a minute at least.

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
    known, started, late = makers(), 0, False
    try:
        while waiting or running:
            slots = jobs
            late = late or (not board.made and board.left_s < 0)
            if late and not board.made:
                waiting.sort(key=lambda task: task.maker != LIBRARY)
                slots += not any(task.maker == LIBRARY for task, _ in running.values())
            while waiting and len(running) < slots:
                task = waiting.pop(0)
                if board.skips(task):
                    continue
                share = jobs * board.left_s * task.weight / (task.weight + sum(t.weight for t in waiting))
                budget_s = max(min(share, board.left_s), LEAST_S)
                request = pickle.dumps((payload, pickle.dumps(known[task.maker]), task, budget_s))
                running[started] = task, start(request, partial(_deliver, inbox, started))
                board.report(task.label)
                started += 1
            if running:
                _collect(running, inbox, board, late)
    finally:
        for _, far in running.values():
            far.end()


def _deliver(inbox: Inbox, number: int, message: Message) -> None:
    inbox.put((number, message))


def _collect(running: dict[int, tuple[MakerTask, ActiveTask]], inbox: Inbox, board: Board, late: bool) -> None:
    """Wait for one message; end tasks where the budget is overrun or the lower bound is reached."""
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
    late_s = -board.left_s
    if reached or late_s > worker.GRACE_S:
        why = reached or f"the budget of {board.budget_s:g} s was spent"
        for number, (task, far) in list(running.items()):
            if not reached and (late or not board.made) and _may_go_on(task, board, late_s):
                continue
            far.end()
            del running[number]
            board.add(Attempt.without(task, f"ended: {why}"))


def _may_go_on(task: MakerTask, board: Board, late_s: float) -> bool:
    """Whether a task may go on after the budget of a search that had no program then."""
    if not board.made and task.maker == LIBRARY:
        return late_s < LAST_S
    searched = any(made.maker.partition(":")[0] != LIBRARY for made in board.made)
    return not searched and task.maker != LIBRARY and late_s < max(LATE_S, LATE * board.budget_s)
