"""The makers of candidates: the collectives that each serves, its share of the time, and how it is called."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..algorithms import algorithms
from ..algorithms.registry import algorithm, entry
from ..cluster import Cluster
from ..collectives import COLLECTIVES, ROOTED, Collective
from ..errors import Infeasible, InvalidInput, StrettoError, unknown
from ..files import convert
from ..programs import Program
from .explorer import sketch_variants
from .problem import MakerTask, Progress, SynthesisProblem

Offer = Callable[[Program], float]
"""Takes a program, proves and simulates it, and returns its time in microseconds."""

LIBRARY = "library"
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
"""The type of a maker's option that counts something."""
MAX_LIBRARY_MOVES = 1 << 21
"""The most chunks that one library program may move: beyond it, more pieces cost more than they can win."""
WORTHWHILE = 0.999
PATIENCE = 2


@dataclass(frozen=True, kw_only=True)
class Maker:
    """A maker: a module of this package that makes programs, and what the portfolio has to know about it.

    The module defines ``synthesize(collective, cluster, *, nbytes, budget_s, seed, progress, ...) -> Program``. To add
    a maker, write the module and list it in `makers`; it is imported when it is first asked.

    The portfolio calls `tasks` once per search, in the caller's process, and then each task once: there or, with
    several jobs or many ranks, in a worker process or on a Ray node; tasks know nothing of each other. A task calls
    the module's ``synthesize``, which gets nbytes (> 0), budget_s (the seconds that it should take at most), seed (the
    same seed must give the same program), progress (to be called with a line of text and a fraction 0..1), by name
    the fields of the problem that `reads` lists, and those of its `options` that the user gave. It may assume that
    the collective is of a kind in `collectives`, over at most `max_ranks` ranks, and all on devices of the cluster;
    with ``reduces=False`` that the collective only copies. It may cut chunks finer than the collective asks, but
    must serve the same buffers (`matching.same_task`).

    It returns its best program, or raises `Infeasible` (nothing can be made for this problem) or `SearchTimeout` with
    a reason, which the certificate lists. A maker that overruns budget_s by much is killed where it runs in a worker.
    Nothing that a maker returns is trusted: the portfolio verifies the program and simulates it.
    """

    name: str
    module: str
    collectives: tuple[str, ...]
    weight: float = 1.0
    max_ranks: int = 1 << 17
    reduces: bool = True
    """Whether the maker can combine chunks itself; if not, reductions are derived from its copying collectives."""
    reads: tuple[str, ...] = ("alpha",)
    """The fields of the problem that the maker takes beside collective, cluster, size and seed."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options that users can set for this maker alone: their names, and their types for msgspec."""
    variants: Callable[[SynthesisProblem], Iterable[tuple[str, dict[str, Any]]]] = lambda problem: [("", {})]
    """Maps a problem to the labels and options of the calls that are worth making; one call by default."""

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options that were given for this maker, as it takes them.

        Args:
            given: Values by name; texts, as a command line gives them, become numbers, truth values and lists.

        Returns:
            The values by name.

        Raises:
            InvalidInput: An option that this maker does not have, with those it has; or a value of a wrong kind.
        """
        found: dict[str, Any] = {}
        for name, value in given.items():
            if not self.options:
                raise InvalidInput(f"option {name!r} of {self.name}: this maker has no options")
            if name not in self.options:
                raise unknown(f"option of {self.name}", name, self.options)
            kind = self.options[name]
            plain = value
            if str(kind).startswith("list"):
                plain = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
            found[name] = convert(plain, kind, where=f"option {name} of {self.name}", strict=not _is_text(plain))
        return found

    def tasks(self, problem: SynthesisProblem) -> list[MakerTask]:
        """The calls for a problem; raises `Infeasible` with the reason when there are none."""
        kind = problem.collective.kind
        if kind not in self.collectives:
            raise Infeasible(f"does not do {kind}")
        if problem.ranks > self.max_ranks:
            raise Infeasible(f"is for up to {self.max_ranks} ranks, not {problem.ranks}")
        listed = list(self.variants(problem))
        return [
            MakerTask(
                maker=self.name,
                label=f"{self.name}:{label}" if label else self.name,
                weight=self.weight / len(listed),
                options=options,
            )
            for label, options in listed
        ]

    def run(
        self, task: MakerTask, problem: SynthesisProblem, budget_s: float, offer: Offer, progress: Progress
    ) -> None:
        """Make the program of one task and offer it; called by the portfolio, once per task.

        Args:
            task: The task, from `tasks`.
            problem: The problem that the task was made for.
            budget_s: The seconds that the task should take at most.
            offer: Takes each program that is made; it raises where the program is wrong, and the exception must pass.
            progress: Takes a line of text and the fraction done, 0..1.

        Raises:
            StrettoError: No program can be made; the message is the reason that the certificate lists.
        """
        synthesize = import_module(f".{self.module}", __package__).synthesize
        options = {name: getattr(problem, name) for name in self.reads}

        def make(collective: Collective, cluster: Cluster, share: float) -> Program:
            made: Program = synthesize(
                collective,
                cluster,
                nbytes=problem.nbytes,
                budget_s=share * budget_s,
                seed=problem.seed,
                progress=progress,
                **(options | dict(task.options)),
            )
            return made

        if self.reduces or not problem.collective.combining:
            offer(make(problem.collective, problem.cluster, 1.0))
        else:
            offer(_combined(make, problem))


def _combined(make: Callable[[Collective, Cluster, float], Program], problem: SynthesisProblem) -> Program:
    """Derive a reduction from copying collectives: an all-gather or broadcast run backwards, or both for all-reduce."""
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
    except Infeasible:  # The links differ in the two directions, so the reverse needs a search of its own.
        other = make(like(collective, kind="all_gather", chunks=pieces), reversed_cluster(cluster), 0.45)
        scatter = inverse(other, cluster, **physics)
    return all_reduce_from(scatter, gather, cluster, **physics)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and any(isinstance(one, str) for one in value))


class Library(Maker):
    """The maker of the algorithms of the library, each with as many chunks as the size is worth."""

    def tasks(self, problem: SynthesisProblem) -> list[MakerTask]:
        """One task per algorithm that serves the collective."""
        kind = problem.collective.kind
        found = algorithms(kind) if kind in COLLECTIVES else []
        if not found:
            raise Infeasible(f"has no algorithm for {kind}")
        return [
            MakerTask(
                maker=self.name,
                label=f"{self.name}:{one.name}",
                weight=self.weight / len(found),
                options={"algorithm": one.name},
            )
            for one in found
        ]

    def run(
        self, task: MakerTask, problem: SynthesisProblem, budget_s: float, offer: Offer, progress: Progress
    ) -> None:
        """Offer one algorithm's program, doubling the number of chunks for as long as that helps.

        Args:
            task: The task; its options name the algorithm.
            problem: The problem that the task was made for.
            budget_s: The seconds that the task should take at most.
            offer: Takes each program and returns its time.
            progress: Takes the name of each program.
        """
        name: str = task.options["algorithm"]
        began, best, worse = time.monotonic(), float("inf"), 0
        collective = problem.collective
        options: dict[str, Any] = {"root": collective.root} if collective.kind in ROOTED else {}
        chunks = entry(name).chunks
        while worse < PATIENCE:
            program = algorithm(
                name,
                collective.kind,
                collective.ranks,
                cluster=problem.cluster,
                chunks=chunks,
                in_place=collective.in_place,
                **options,
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
    gathering = ("all_gather", "reduce_scatter", "all_reduce")
    trees = (*gathering, "broadcast", "reduce")
    everything = tuple(COLLECTIVES)
    listed = [
        Library(name=LIBRARY, module="", collectives=everything, weight=1.0),
        Maker(name="compose", module="compose", collectives=everything, weight=2.0, options={"pieces": list[Count]}),
        Maker(
            name="greedy",
            module="greedy",
            collectives=everything,
            weight=2.0,
            options={"pieces": list[Count], "symmetric": bool},
        ),
        Maker(
            name="flow",
            module="flow",
            collectives=("all_to_all", "all_to_all_v"),
            weight=2.0,
            max_ranks=512,
            reads=("alpha", "contention"),
            options={"pieces": Count},
        ),
        Maker(
            name="forest",
            module="forest",
            collectives=trees,
            weight=2.0,
            max_ranks=512,
            options={"max_k": Count, "max_height": Count, "max_transfers": Count, "multicast": bool},
        ),
        Maker(
            name="exact",
            module="exact",
            collectives=everything,
            weight=2.0,
            max_ranks=12,
            options={"solver": Literal["auto", "highs", "cp-sat"], "channels": list[str]},
        ),
        Maker(
            name="three_stage",
            module="three_stage",
            collectives=(*gathering, "all_to_all"),
            weight=4.0,
            max_ranks=64,
            reduces=False,
            reads=("alpha", "sketch"),
            variants=sketch_variants,
            options={
                "solver": Literal["highs", "cpsat"],
                "solutions": Count,
                "detour": Annotated[float, Meta(ge=0, le=99)],
            },
        ),
    ]
    return {maker.name: maker for maker in listed}


MakerOptions = Mapping[str, Mapping[str, Any]]
"""Options for single makers: the maker's name, then the option's."""


def check_options(given: MakerOptions, wanted: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """The options of each maker, checked against that maker.

    Args:
        given: Values by maker and name.
        wanted: The makers that are asked, None for all.

    Returns:
        The values as the makers take them.

    Raises:
        InvalidInput: A maker that does not exist or is not asked, an option that it does not have, a wrong value.
    """
    known = makers()
    asked = set(known) if wanted is None else {name.partition(":")[0] for name in wanted}
    for name in given:
        if name not in known:
            raise unknown("maker", name, known)
        if name not in asked:
            raise InvalidInput(f"options of {name}: it is not among the makers that are asked: {', '.join(asked)}")
    return {name: known[name].checked(options) for name, options in given.items() if options}


def plan_tasks(
    problem: SynthesisProblem, wanted: Sequence[str] | None, options: MakerOptions | None = None
) -> tuple[list[MakerTask], dict[str, str]]:
    """The tasks for a problem, and why some makers have none.

    Args:
        problem: What is to be made.
        wanted: Makers (``forest``) or single tasks of one (``library:ring``); None for all.
        options: Options of single makers, as `check_options` returns them.

    Returns:
        The tasks, and by maker why it has none.

    Raises:
        InvalidInput: A name that does not exist; options or a sketch for makers that cannot take part.
    """
    known = makers()
    asked = list(known) if wanted is None else list(wanted)
    for name in asked:
        if name.partition(":")[0] not in known:
            raise unknown("maker", name, known)
    own = options or {}
    tasks: list[MakerTask] = []
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
        tasks += [
            replace(task, options={**task.options, **own.get(name, {})})
            for task in found
            if name in mine or task.label in mine
        ]
    for name in own:
        if name in refused:
            raise InvalidInput(f"options of {name}: it {refused[name]}")
    _check_sketch(problem, {task.maker for task in tasks}, refused)
    return tasks, refused


def _check_sketch(problem: SynthesisProblem, at_work: set[str], refused: Mapping[str, str]) -> None:
    """Refuse a sketch that none of the makers at work follows."""
    followers = [name for name, maker in makers().items() if "sketch" in maker.reads]
    if problem.sketch is None or at_work & set(followers):
        return
    reasons = [f"{name} {refused[name]}" for name in followers if name in refused]
    why = ", ".join(reasons) or f"of the makers only {', '.join(followers)} follows one, and is not asked"
    raise InvalidInput(f"sketch: {why}")
