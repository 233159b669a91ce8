# SPDX-License-Identifier: Apache-2.0
"""Trials as actors of a Ray cluster, one on each node, so that they do not disturb one another.

Each actor keeps a job of its own running. Nodes need this package in the same version, the job's command at the same
path, and equal hardware, since times of different machines cannot be compared. All rounds of a comparison run on one
actor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ..children.ray_cluster import connected
from ..errors import Infeasible
from .requests import Arm
from .trials import Times, Trials, command


class RayTrials:
    """Measures several strategies at once, `places` at a time."""

    def __init__(self, actors: Sequence[Any], get: Callable[[Any], Any]) -> None:
        self._actors, self._get = list(actors), get
        self.places = len(self._actors)

    def run_all(self, arms: Sequence[Arm]) -> list[float | Infeasible]:
        """Measure each contestant in one run, spread over the actors; the runs of one actor follow one another."""
        sent = [self._actors[at % self.places].run.remote(arm) for at, arm in enumerate(arms)]
        return [self._got(partial(self._get, reference)) for reference in sent]

    def rounds(self, arms: Sequence[Arm], rounds: int) -> list[Times | Infeasible]:
        """Measure several contestants in turn on one node, because only there their times can be compared closely."""
        found: list[Times | str] | Infeasible = self._got(
            partial(self._get, self._actors[0].rounds.remote(list(arms), rounds))
        )
        if isinstance(found, Infeasible):
            return [found for _ in arms]
        return [Infeasible(one) if isinstance(one, str) else one for one in found]

    @staticmethod
    def _got(wait: Callable[[], Any]) -> Any:
        try:
            found = wait()
        except Exception as error:  # includes errors of the actor itself, such as a node that lacks this package
            cause = getattr(error, "cause", None) or error
            return Infeasible(f"its Ray actor failed: {type(cause).__name__}: {' '.join(str(cause).split())[:200]}")
        return Infeasible(found) if isinstance(found, str) else found


@contextlib.contextmanager
def ray_trials(
    words: Sequence[str], *, warmup: int, timed: int, timeout_s: float, folder: str | None = None,
    address: str | None = None, jobs: int = 1,
) -> Iterator[RayTrials]:  # fmt: skip
    """A bench of actors on the nodes of a Ray cluster, or of `jobs` actors on a local Ray; used as a context manager.

    Args:
        words: the job's command and arguments.
        warmup: iterations before timing.
        timed: timed iterations.
        timeout_s: seconds for the start of a job and for each run.
        folder: folder for requests and replies on each node; None takes a temporary one.
        address: address of the Ray cluster; None takes ``$RAY_ADDRESS``, else a local Ray.
        jobs: number of actors on a local Ray, >= 1.

    Returns:
        An iterator over the one bench, for the context manager.
    """
    with connected(jobs=jobs, address=address) as ray:
        processors = [node["Resources"].get("CPU", 0.0) for node in ray.nodes() if node["Alive"]]
        # An actor that asks for all processors of a node has the node to itself; a local Ray has one per job.
        each = 1.0 if len(processors) == 1 else min(count for count in processors if count > 0)
        places = min(int(sum(count // each for count in processors)), jobs if len(processors) == 1 else 1 << 16)
        make = ray.remote(num_cpus=each, max_restarts=0, scheduling_strategy="SPREAD")(_Actor)
        actors = [make.remote(list(words), warmup, timed, timeout_s, folder) for _ in range(places)]
        try:
            yield RayTrials(actors, ray.get)
        finally:
            for actor in actors:
                with contextlib.suppress(Exception):
                    ray.get(actor.close.remote(), timeout=timeout_s)


class _Actor:
    """An actor on a node of the cluster: it returns times, or the reason why there are none."""

    def __init__(self, words: list[str], warmup: int, timed: int, timeout_s: float, folder: str | None) -> None:
        self._trials = Trials(command(words), warmup=warmup, timed=timed, timeout_s=timeout_s, folder=folder)

    def run(self, arm: Arm) -> float | str:
        try:
            return self._trials.run(arm)
        except Infeasible as error:
            return str(error)

    def rounds(self, arms: list[Arm], rounds: int) -> list[Times | str]:
        return [str(one) if isinstance(one, Infeasible) else one for one in self._trials.rounds(arms, rounds)]

    def close(self) -> None:
        self._trials.close()
