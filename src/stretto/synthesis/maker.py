# SPDX-License-Identifier: Apache-2.0
"""What a maker is: `Maker`, the contract with the portfolio, and `SearchMaker`, a maker around one function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict

from ..cluster import Cluster
from ..collectives import Collective
from ..errors import Infeasible
from ..programs import Program, SymmetricProgram
from .combine import INVERSE, all_reduce_from, inverse, like, reversed_cluster
from .problem import MakerTask, Progress, SynthesisProblem


class Maker(Protocol):
    """Makes programs for the portfolio, which trusts none of them: it verifies and simulates every program.

    The portfolio calls `tasks` once per search, in the caller's process, and then `programs` once for each task: there
    or, with several jobs or many ranks, in a worker process or on a Ray node. Tasks know nothing of each other. A
    maker is sent to workers by pickle, so its class and its functions stand at the top level of a module that workers
    can import. `makers.register_maker` makes a maker known.
    """

    @property
    def name(self) -> str:
        """The name that users write in ``makers=[...]``."""

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that users can set for this maker alone: their names, and their types for msgspec."""

    @property
    def follows_sketch(self) -> bool:
        """Whether the maker obeys ``problem.sketch``; a sketch that no maker would follow is refused."""

    def tasks(self, problem: SynthesisProblem) -> Sequence[MakerTask]:
        """The calls that are worth making for a problem; raises `Infeasible` with the reason when there are none."""

    def programs(
        self, task: MakerTask, problem: SynthesisProblem, budget_s: float, progress: Progress
    ) -> Iterator[Program | SymmetricProgram]:
        """Make the programs of one task, one after the other.

        A program may cut chunks finer than the collective asks, but must serve the same buffers
        (`matching.same_task`). The portfolio stops asking after two programs in a row that are not faster than the best
        before them. The same seed gives the same programs. A task that overruns its budget by much is killed where it
        runs in a worker.

        Args:
            task: The task, one of `tasks`, with the checked options that the user gave for this maker.
            problem: The problem that the task was made for.
            budget_s: The seconds that the task should take at most.
            progress: Takes a line of text and the fraction done, 0..1.

        Yields:
            The programs.

        Raises:
            StrettoError: No program can be made; the certificate lists the message as the reason.
        """


class SharedArguments(TypedDict):
    """The arguments that the functions of all makers take."""

    nbytes: float
    budget_s: float
    seed: int
    progress: Progress
    alpha: str


@dataclass(frozen=True, kw_only=True)
class MakerRequest:
    """What the function of a `SearchMaker` is asked for: one program of a collective on a cluster.

    Attributes:
        collective: What the program must achieve.
        cluster: The network that it runs on; reversed where a reduction is derived.
        problem: The problem that the program helps to solve; its collective may be another where reductions are
            derived.
        budget_s: The seconds that the search should take at most.
        progress: Takes a line of text and the fraction done, 0..1.
        options: The options of the task and those that the user gave.
    """

    collective: Collective
    cluster: Cluster
    problem: SynthesisProblem
    budget_s: float
    progress: Progress
    options: Mapping[str, Any]

    @property
    def shared(self) -> SharedArguments:
        """The arguments that all makers take, by name."""
        return SharedArguments(
            nbytes=self.problem.nbytes,
            budget_s=self.budget_s,
            seed=self.problem.seed,
            progress=self.progress,
            alpha=self.problem.alpha,
        )


def one_variant(problem: SynthesisProblem) -> list[tuple[str, dict[str, Any]]]:
    """A single call without a label of its own."""
    return [("", {})]


@dataclass(frozen=True, kw_only=True)
class SearchMaker:
    """A `Maker` around one function that searches for a program.

    The function may assume that the collective is of a kind in `collectives`, over at most `max_ranks` ranks, all on
    devices of the cluster; with ``reduces=False`` that it only copies.

    Attributes:
        name: The name that users write in ``makers=[...]``.
        make: The function that searches.
        collectives: The kinds that it serves.
        weight: The share of the time that the maker's tasks get together, relative to other makers; ours have 1 to 6.
        max_ranks: The most ranks that it serves.
        reduces: Whether the maker can combine chunks itself; if not, reductions are derived from its copying
            collectives.
        follows_sketch: Whether it obeys ``problem.sketch``.
        options: The options that users can set: their names, and their types for msgspec.
        variants: Maps a problem to the calls that are worth making: pairs of a label (empty for a single call) and the
            options of that call, which the function finds in ``request.options``.
    """

    name: str
    make: Callable[[MakerRequest], Program]
    collectives: tuple[str, ...]
    weight: float = 1.0
    max_ranks: int = 1 << 17
    reduces: bool = True
    follows_sketch: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    variants: Callable[[SynthesisProblem], Iterable[tuple[str, dict[str, Any]]]] = one_variant

    def __getstate__(self) -> dict[str, Any]:
        # A worker gets options that have been checked; msgspec's types of them cannot be pickled.
        return vars(self) | {"options": {}}

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

    def programs(
        self, task: MakerTask, problem: SynthesisProblem, budget_s: float, progress: Progress
    ) -> Iterator[Program]:
        """The program of one task; see `Maker.programs`.

        Args:
            task: The task.
            problem: The problem that the task was made for.
            budget_s: The seconds that the task should take at most.
            progress: Takes a line of text and the fraction done, 0..1.

        Yields:
            One program.

        Raises:
            StrettoError: No program can be made.
        """

        def make(collective: Collective, cluster: Cluster, share: float) -> Program:
            return self.make(
                MakerRequest(
                    collective=collective,
                    cluster=cluster,
                    problem=problem,
                    budget_s=share * budget_s,
                    progress=progress,
                    options=task.options,
                )
            )

        if self.reduces or not problem.collective.combining:
            yield make(problem.collective, problem.cluster, 1.0)
        else:
            yield _combined(make, problem)


def _combined(make: Callable[[Collective, Cluster, float], Program], problem: SynthesisProblem) -> Program:
    """Derive a reduction from copying collectives: an all-gather or broadcast run backwards, or both for all-reduce."""
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
