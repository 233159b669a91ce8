"""Trials as tasks of a Ray cluster, one at a time on each node, so that they do not disturb one another.

Nodes need this package in the same version, the job's command at the same path, and the same hardware: times of unlike
machines cannot be compared.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from ..errors import Infeasible
from ..synthesis.ray_backend import connected
from .files import read_strategy, strategy_text
from .representation import Strategy
from .search import TryAll
from .trials import Trials, command


@contextlib.contextmanager
def ray_trials(
    words: Sequence[str], *, warmup: int, timed: int, timeout_s: float, folder: str | None = None,
    address: str | None = None, jobs: int = 1,
) -> Iterator[tuple[TryAll, int]]:
    """What tries several strategies at once, and how many; a local Ray takes `jobs` at a time."""
    with connected(jobs=jobs, address=address):
        ray: Any = import_module("ray")
        processors = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
        # A task that asks for all processors of a node has it for itself; a local Ray was given one for each job.
        each = 1.0 if len(processors) == 1 else min(count for count in processors if count > 0)
        places = int(sum(count // each for count in processors))
        task = ray.remote(num_cpus=each, max_retries=0, scheduling_strategy="SPREAD")(_one)

        def run_all(strategies: Sequence[Strategy]) -> list[float | Infeasible]:
            sent = [
                task.remote(list(words), strategy_text(strategy, as_json=True), warmup, timed, timeout_s, folder)
                for strategy in strategies
            ]
            return [_got(partial(ray.get, reference)) for reference in sent]

        yield run_all, min(places, jobs) if len(processors) == 1 else places


def _got(wait: Callable[[], float | str]) -> float | Infeasible:
    try:
        found = wait()
    except Exception as error:  # also what the task itself raised, such as that its node lacks this package
        cause = getattr(error, "cause", None) or error
        return Infeasible(f"its Ray task failed: {type(cause).__name__}: {' '.join(str(cause).split())[:200]}")
    return Infeasible(found) if isinstance(found, str) else found


def _one(
    words: list[str], text: str, warmup: int, timed: int, timeout_s: float, folder: str | None
) -> float | str:
    """Runs on the cluster: the time, or why there is none."""
    trials = Trials(launch=command(words), warmup=warmup, timed=timed, timeout_s=timeout_s, folder=folder)
    try:
        return trials.run(read_strategy(text, as_json=True))
    except Infeasible as error:
        return str(error)
