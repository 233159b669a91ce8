"""The makers of candidates: who can make what, about how long it takes, and how to ask."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ..algorithms import algorithms
from ..algorithms.registry import algorithm, entry
from ..cluster import Cluster
from ..collectives import COLLECTIVES, ROOTED, Collective
from ..errors import Infeasible, StrettoError, unknown
from ..programs import Program

Progress = Callable[[str, float], None]
Offer = Callable[[Program], float]
"""Takes a program, proves and simulates it, and says its time."""

LIBRARY = "library"
MAX_LIBRARY_MOVES = 1 << 21
"""Chunks that one library program may move: beyond it, more pieces cost more than they can win."""
WORTHWHILE = 0.999
PATIENCE = 2


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be made, and under which physics it is judged."""

    collective: Collective
    cluster: Cluster
    nbytes: float
    alpha: str = "pipelined"
    contention: str | None = None
    seed: int = 0
    sketch: Any = None
    lower: str = ""
    """The format whose runtimes the program must fit, if any."""

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return self.collective.num_ranks

    @property
    def hosts(self) -> tuple[int, ...]:
        """The host of each rank."""
        return tuple(self.cluster.hosts_of(self.collective.ranks).tolist())


@dataclass(frozen=True, kw_only=True)
class Task:
    """One call of one maker."""

    maker: str
    label: str
    weight: float
    """Its share of the time that is left, relative to the other tasks."""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Maker:
    """A module of this package with ``synthesise(collective, cluster, *, nbytes, budget_s, seed, progress, ...)``."""

    name: str
    module: str
    collectives: tuple[str, ...]
    weight: float = 1.0
    max_ranks: int = 1 << 17
    reduces: bool = True
    """Whether it can combine chunks itself; if not, reductions are derived from what it makes."""
    variants: Callable[[Problem], Iterable[tuple[str, dict[str, Any]]]] = lambda problem: [("", {})]
    """Labels and options of the calls worth making."""

    def tasks(self, problem: Problem) -> list[Task]:
        """The calls for a problem; raises `Infeasible` with the reason when there are none."""
        kind = problem.collective.kind
        if kind not in self.collectives:
            raise Infeasible(f"does not do {kind}")
        if problem.ranks > self.max_ranks:
            raise Infeasible(f"is for up to {self.max_ranks} ranks, not {problem.ranks}")
        listed = list(self.variants(problem))
        return [
            Task(
                maker=self.name,
                label=f"{self.name}:{label}" if label else self.name,
                weight=self.weight / len(listed),
                options=options,
            )
            for label, options in listed
        ]

    def run(self, task: Task, problem: Problem, budget_s: float, offer: Offer, progress: Progress) -> None:
        """Make the program and offer it; options that the maker does not know are left out."""
        synthesise = import_module(f".{self.module}", __package__).synthesise
        known = inspect.signature(synthesise).parameters
        physics = {"alpha": problem.alpha, "contention": problem.contention, "sketch": problem.sketch}
        options = {key: value for key, value in physics.items() if key in known and value is not None}

        def make(collective: Collective, cluster: Cluster, share: float) -> Program:
            made: Program = synthesise(
                collective, cluster, nbytes=problem.nbytes, budget_s=share * budget_s, seed=problem.seed,
                progress=progress, **(options | dict(task.options)),
            )
            return made

        if self.reduces or not problem.collective.combining:
            offer(make(problem.collective, problem.cluster, 1.0))
        else:
            offer(_combined(make, problem))


def _combined(make: Callable[[Collective, Cluster, float], Program], problem: Problem) -> Program:
    """A reduction from what its maker can do: an all-gather or broadcast, run backwards; an all-reduce from both."""
    from .combine import INVERSE, all_reduce_from, inverse, like, reversed_cluster

    collective, cluster = problem.collective, problem.cluster
    physics: dict[str, Any] = {"nbytes": problem.nbytes, "alpha": problem.alpha}
    if collective.kind != "all_reduce":
        there = like(collective, kind=INVERSE[collective.kind])
        return inverse(make(there, reversed_cluster(cluster), 0.9), cluster, **physics)
    pieces = collective.chunks // problem.ranks if collective.chunks % problem.ranks == 0 else 1
    gather = make(like(collective, kind="all_gather", chunks=pieces), cluster, 0.45)
    try:
        scatter = inverse(gather, cluster, **physics)
    except Infeasible:  # links do not lead back the way they lead there
        other = make(like(collective, kind="all_gather", chunks=pieces), reversed_cluster(cluster), 0.45)
        scatter = inverse(other, cluster, **physics)
    return all_reduce_from(scatter, gather, cluster, **physics)


class Library(Maker):
    """The algorithms everybody knows, each with as many chunks as the size is worth."""

    def tasks(self, problem: Problem) -> list[Task]:
        """One task per algorithm that serves the collective."""
        kind = problem.collective.kind
        found = algorithms(kind) if kind in COLLECTIVES else []
        if not found:
            raise Infeasible(f"has no algorithm for {kind}")
        return [
            Task(maker=self.name, label=f"{self.name}:{one.name}", weight=self.weight / len(found),
                 options={"algorithm": one.name})
            for one in found
        ]

    def run(self, task: Task, problem: Problem, budget_s: float, offer: Offer, progress: Progress) -> None:
        """Double the number of chunks for as long as that helps."""
        name: str = task.options["algorithm"]
        began, best, worse = time.monotonic(), float("inf"), 0
        collective = problem.collective
        options: dict[str, Any] = {"root": collective.root} if collective.kind in ROOTED else {}
        chunks = entry(name).chunks
        while worse < PATIENCE:
            program = algorithm(
                name, collective.kind, collective.ranks, cluster=problem.cluster, chunks=chunks,
                in_place=collective.in_place, **options,
            )
            progress(program.name, 0.0)
            took = offer(program)
            worse = 0 if took < best * WORTHWHILE else worse + 1
            best = min(best, took)
            chunks *= 2
            if 2 * len(program.chunk) > MAX_LIBRARY_MOVES or 4 * (time.monotonic() - began) > budget_s:
                return


def makers() -> dict[str, Maker]:
    """All makers by name, cheap ones first."""
    from .explorer import sketch_variants

    gathering = ("all_gather", "reduce_scatter", "all_reduce")
    trees = (*gathering, "broadcast", "reduce")
    everything = tuple(COLLECTIVES)
    listed = [
        Library(name=LIBRARY, module="", collectives=everything, weight=1.0),
        Maker(name="compose", module="compose", collectives=everything, weight=2.0),
        Maker(name="greedy", module="greedy", collectives=everything, weight=2.0),
        Maker(name="flow", module="flow", collectives=("all_to_all", "all_to_all_v"), weight=2.0, max_ranks=512),
        Maker(name="forest", module="forest", collectives=trees, weight=2.0, max_ranks=512),
        Maker(name="exact", module="exact", collectives=everything, weight=2.0, max_ranks=12),
        Maker(
            name="three_stage", module="three_stage", collectives=(*gathering, "all_to_all"), weight=4.0,
            max_ranks=64, reduces=False, variants=sketch_variants,
        ),
    ]
    return {maker.name: maker for maker in listed}


def plan_tasks(problem: Problem, wanted: Sequence[str] | None) -> tuple[list[Task], dict[str, str]]:
    """The tasks for a problem, and why some makers have none.

    `wanted` names makers (``forest``) or single tasks of one (``library:ring``).
    """
    known = makers()
    asked = list(known) if wanted is None else list(wanted)
    for name in asked:
        if name.partition(":")[0] not in known:
            raise unknown("maker", name, known)
    tasks: list[Task] = []
    refused: dict[str, str] = {}
    for name, maker in known.items():
        mine = [a for a in asked if a.partition(":")[0] == name]
        if not mine:
            continue
        try:
            found = maker.tasks(problem)
        except StrettoError as error:
            refused[name] = str(error)
            continue
        for one in mine:
            if ":" in one and one not in [task.label for task in found]:
                raise unknown(f"task of {name}", one, [task.label for task in found])
        tasks += [task for task in found if name in mine or task.label in mine]
    return tasks, refused
