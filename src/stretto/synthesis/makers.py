# SPDX-License-Identifier: Apache-2.0
"""The makers that the portfolio knows, the library's among them, and their tasks for a problem."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isqrt
from typing import Annotated, Any, Literal

from msgspec import Meta

from ..algorithms import algorithms
from ..algorithms.orders import fast_orders
from ..algorithms.registry import algorithm, entry
from ..collectives import COLLECTIVES, ROOTED
from ..errors import Infeasible, InvalidInput, StrettoError, unknown
from ..files import convert
from ..programs import Program, SymmetricProgram
from ..programs.formats.msccl_rules import MAX_STEPS
from ..registry import Registry
from . import (
    compose,
    exact,
    exchange,
    flow,
    forest,
    greedy,
    phases,
    rails,
    repair,
    steiner,
    symmetric,
    three_stage,
    timetable,
    tree_pairs,
)
from .explorer import sketch_variants
from .forest_trees import MAX_PAIRS
from .lowering import fits_files
from .maker import Maker, MakerRequest, SearchMaker, one_variant
from .near_ring import near_order
from .plan_search import direct_fills_links
from .problem import MAX_WIDE, MakerTask, Progress, SynthesisProblem

LIBRARY = "library"
SYMMETRIC = "symmetric"
SKETCHED = "three_stage"
PAIRED = "tree_pairs"
FEW_PAIRED = 64
"""The most ranks up to which pairs of trees are tried before compositions; beyond, their search takes long."""
PHASES = "phases"
TIMED = "timetable"
LATER = 3.0
"""The weight of timetables that do not reduce and spread: others are asked before, and are often at the bound."""
FEW_SKETCHED = 64
"""The most ranks for which sketches that nobody gave are tried."""
SMALL = 256
"""The most ranks for which tasks run in the caller's process, and for which the library is asked first: its programs
are then made in no time. Beyond it the makers of better programs come first."""
MAX_WHOLE_MOVES = 1 << 23
"""The most chunks that all ranks together move in an all-gather, reduce-scatter or all-reduce that is written out for
all ranks; beyond it only symmetric programs are made where the cluster allows it."""
MAX_EXPANDED = 1 << 20
"""The most transfers of a symmetric program that is written out for all ranks, to be lowered."""
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
"""The type of a maker's option that counts something."""
MAX_LIBRARY_MOVES = 1 << 21
"""The most chunks that one library program may move: beyond it, more pieces cost more than they can win."""
MAX_LOWERED_TRANSFERS = 20_000
"""The most transfers of tree pairs for a file format: runtimes limit the instructions of a rank."""
FILE_STEPS = (16, 32, 64, 128, MAX_STEPS)
"""The most messages from one rank to another in pairs of trees for files."""
ONE_SHOT = {"algorithm": "direct", "steps": 1}
"""The all-reduce in which everybody sends everything to everybody: one latency instead of two."""

PROMISING = ("hierarchical", "direct", "two_step", "halving_doubling", "recursive_doubling", "pairwise")
"""The algorithms of the library that are asked first on many ranks; `bruck` sends all-to-alls log(n)/2 times over."""

_MAKERS = Registry[Maker]("maker")


def register_maker(maker: Maker, *, replace: bool = False) -> None:
    """Make a maker known to every search of this process from now on, as the last one that is asked.

    Its name must be free, or `replace` true: then the maker that has it gives way (`InvalidInput` otherwise).
    """
    _MAKERS.register(maker.name, maker, replace=replace)


def makers() -> dict[str, Maker]:
    """All makers by name: ours, cheap ones first, then those that others have registered."""
    return dict(_MAKERS)


@dataclass(frozen=True, kw_only=True)
class Library:
    """The maker of the algorithms of the library, each with as many chunks as the size is worth."""

    name: str = LIBRARY
    options: Mapping[str, Any] = field(default_factory=dict)
    follows_sketch: bool = False

    def tasks(self, problem: SynthesisProblem) -> list[MakerTask]:
        """One task per algorithm that serves the collective; also `direct` in one step, and two rings of `ring`."""
        kind = problem.collective.kind
        found = algorithms(kind) if kind in COLLECTIVES else []
        if not found:
            raise Infeasible(f"has no algorithm for {kind}")
        calls: list[tuple[str, Mapping[str, Any]]] = [(one.name, {"algorithm": one.name}) for one in found]
        if kind == "all_reduce":
            calls.append(("direct,steps=1", ONE_SHOT))
        if kind in _GATHERING and 3 <= problem.ranks <= SMALL:
            calls.append(("ring,opposed", {"algorithm": "ring", **_opposed(problem)}))
        return [
            MakerTask(maker=self.name, label=f"{self.name}:{label}", weight=1 / len(calls), options=options)
            for label, options in calls
        ]

    def programs(
        self, task: MakerTask, problem: SynthesisProblem, budget_s: float, progress: Progress
    ) -> Iterator[Program]:
        """One algorithm's programs, each with twice as many chunks as the one before.

        Args:
            task: The task; its options name the algorithm.
            problem: The problem that the task was made for.
            budget_s: The seconds that the task should take at most.
            progress: Takes the name of each program.

        Yields:
            The programs, until they become too large or a quarter of the budget is spent; where plans are made of them,
            the clock is not asked.
        """
        name: str = task.options["algorithm"]
        began = time.monotonic()
        collective = problem.collective
        options = {key: value for key, value in task.options.items() if key not in ("algorithm", "chunks")}
        if collective.kind in ROOTED:
            options["root"] = collective.root
        chunks = task.options.get("chunks", entry(name).chunks)
        while True:
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
            yield program
            chunks *= 2
            if problem.takes_plans or problem.takes_steps:
                if 2 * len(program.chunk) > MAX_WIDE:
                    return
            elif 2 * len(program.chunk) > MAX_LIBRARY_MOVES or 4 * (time.monotonic() - began) > budget_s:
                return


@dataclass(frozen=True, kw_only=True)
class SymmetricMaker:
    """The maker of symmetric programs, in which one group of ranks stands for all."""

    name: str = SYMMETRIC
    options: Mapping[str, Any] = field(default_factory=lambda: {"pieces": list[Count]})
    follows_sketch: bool = False

    def __getstate__(self) -> dict[str, Any]:
        # A worker gets options that have been checked; msgspec's types of them cannot be pickled.
        return vars(self) | {"options": {}}

    def tasks(self, problem: SynthesisProblem) -> list[MakerTask]:
        """One task."""
        symmetric.require_all_devices(problem.collective, problem.cluster)
        return [MakerTask(maker=self.name, label=self.name, weight=2.0)]

    def programs(
        self, task: MakerTask, problem: SynthesisProblem, budget_s: float, progress: Progress
    ) -> Iterator[Program | SymmetricProgram]:
        """The best symmetric program, written out for all ranks where it is to be lowered.

        Args:
            task: The task.
            problem: The problem that the task was made for.
            budget_s: The seconds that the task should take at most.
            progress: Takes the name and the time of each program that is tried.

        Yields:
            One program.

        Raises:
            StrettoError: The cluster has no symmetry, or the program is too large to be lowered.
        """
        made = symmetric.synthesize(
            problem.collective, problem.cluster, nbytes=problem.nbytes, budget_s=budget_s, seed=problem.seed,
            progress=progress, alpha=problem.alpha, contention=problem.contention, **task.options,
        )  # fmt: skip
        if problem.lower and made.num_transfers > MAX_EXPANDED:
            raise Infeasible(f"{made.num_transfers} transfers are too many to lower; at most {MAX_EXPANDED}")
        yield made.expand() if problem.lower else made


def _opposed(problem: SynthesisProblem) -> dict[str, Any]:
    """Two rings of opposite direction, which carry half of the data each: no link is asked for all that a port takes.

    Where switches are joined by links that are slower than ports, one ring is as slow as these. With one chunk each,
    both would wait for the same latencies.
    """
    ranks = problem.collective.ranks
    orders = fast_orders(problem.cluster, ranks)
    near = near_order(problem.cluster, ranks, problem.nbytes / len(ranks)) if orders is None else orders[0]
    if near is None:
        return {"strides": (1, len(ranks) - 1), "chunks": 2}
    return {"order": (near, near[::-1]), "chunks": 2}


def _compose(request: MakerRequest) -> Program:
    return compose.synthesize(request.collective, request.cluster, **request.shared, **request.options)


def _greedy(request: MakerRequest) -> Program:
    return greedy.synthesize(request.collective, request.cluster, **request.shared, **request.options)


def _flow(request: MakerRequest) -> Program:
    contention = request.problem.contention
    return flow.synthesize(
        request.collective, request.cluster, contention=contention, **request.shared, **request.options
    )


def _phases(request: MakerRequest) -> Program:
    return phases.synthesize(request.collective, request.cluster, **request.shared, **request.options)


def _forest(request: MakerRequest) -> Program:
    options = dict(request.options)
    made = forest.synthesize(request.collective, request.cluster, **request.shared, **options)
    if not request.problem.lower or "max_transfers" in options:
        return made
    # The best number of pieces may be too large for a file: half as many until one takes them.
    while not fits_files(made, request.problem):
        options["max_transfers"] = len(made.chunk) // 2
        fewer = forest.synthesize(request.collective, request.cluster, **request.shared, **options)
        if len(fewer.chunk) >= len(made.chunk):
            break
        made = fewer
    return made


def _exchange(request: MakerRequest) -> Program:
    return exchange.synthesize(request.collective, request.cluster, **request.shared, **request.options)


def _rails(request: MakerRequest) -> Program:
    options = dict(request.options)
    if request.problem.lower:
        options.setdefault("max_transfers", MAX_LOWERED_TRANSFERS)
    return rails.synthesize(request.collective, request.cluster, **request.shared, **options)


def _timetable(request: MakerRequest) -> Program:
    return timetable.synthesize(request.collective, request.cluster, **request.shared, **request.options)


def _tree_pairs(request: MakerRequest) -> Program:
    options = dict(request.options)
    if request.problem.lower:
        options.setdefault("max_transfers", MAX_LOWERED_TRANSFERS)
    return tree_pairs.synthesize(request.collective, request.cluster, **request.shared, **options)


def _as_long_as_files(problem: SynthesisProblem) -> list[tuple[str, dict[str, Any]]]:
    """Where streams are wanted, one call for each of some lengths: those of the fastest program need not be the best.

    Two messages at most are under way on a connection of a runtime, so that small ones leave links idle.
    """
    if not problem.lower:
        return one_variant(problem)
    return [(f"steps={steps}", {"max_steps": steps}) for steps in FILE_STEPS]


def _steiner(request: MakerRequest) -> Program:
    helpers = request.problem.helpers
    return steiner.synthesize(request.collective, request.cluster, helpers=helpers, **request.shared, **request.options)


def _repair(request: MakerRequest) -> Program:
    helpers, base = request.problem.helpers, request.problem.base
    assert base is not None, "there is a task only where there is a base"
    given: dict[str, Any] = {**request.shared, **request.options}
    return repair.synthesize(request.collective, request.cluster, base=base, helpers=helpers, **given)


def _with_base(problem: SynthesisProblem) -> list[tuple[str, dict[str, Any]]]:
    if problem.base is None:
        raise Infeasible("is for searches from a program of the cluster as it was (option base)")
    return one_variant(problem)


def _with_helpers(problem: SynthesisProblem) -> list[tuple[str, dict[str, Any]]]:
    if not problem.helpers:
        raise Infeasible("is for groups that devices outside them may help (option helpers)")
    return one_variant(problem)


def _on_trees(problem: SynthesisProblem) -> list[tuple[str, dict[str, Any]]]:
    phases.require_tree(problem.collective, problem.cluster)
    return one_variant(problem)


def _on_direct_links(problem: SynthesisProblem) -> list[tuple[str, dict[str, Any]]]:
    if problem.lower:
        raise Infeasible("makes programs of more steps than file formats hold")
    timetable.require_direct_links(problem.collective, problem.cluster)
    return one_variant(problem)


def _on_rails(problem: SynthesisProblem) -> list[tuple[str, dict[str, Any]]]:
    rails.rail_grid(problem.collective, problem.cluster)
    return one_variant(problem)


def _few_roots(problem: SynthesisProblem) -> list[tuple[str, dict[str, Any]]]:
    """Where every rank is a root, half as many ranks are served as where one is."""
    most = isqrt(MAX_PAIRS)
    if problem.collective.kind in _GATHERING and problem.ranks > most:
        raise Infeasible(f"is for up to {most} ranks in {problem.collective.kind}, not {problem.ranks}")
    return one_variant(problem)


def _exact(request: MakerRequest) -> Program:
    return exact.synthesize(request.collective, request.cluster, **request.shared, **request.options)


def _three_stage(request: MakerRequest) -> Program:
    options = {"sketch": request.problem.sketch, **request.options}
    return three_stage.synthesize(request.collective, request.cluster, **request.shared, **options)


_GATHERING = ("all_gather", "reduce_scatter", "all_reduce")
_EVERYTHING = tuple(COLLECTIVES)

register_maker(Library())
register_maker(SymmetricMaker())
register_maker(SearchMaker(name="exchange", make=_exchange, collectives=("all_reduce",), weight=2.0, max_ranks=64))
# Makers are asked in this order; where time is short, those behind the first ones are not.
register_maker(
    SearchMaker(
        name="steiner",
        make=_steiner,
        collectives=_EVERYTHING,
        weight=6.0,
        max_ranks=256,
        variants=_with_helpers,
        options={"max_transfers": Count},
    )
)
register_maker(
    SearchMaker(
        name=TIMED,
        make=_timetable,
        collectives=_GATHERING,
        weight=24.0,
        max_ranks=FEW_PAIRED,
        variants=_on_direct_links,
    )
)
register_maker(
    SearchMaker(
        name="rails",
        make=_rails,
        collectives=("all_reduce",),
        weight=4.0,
        max_ranks=128,
        variants=_on_rails,
        options={"max_transfers": Count},
    )
)
register_maker(
    SearchMaker(
        name=PAIRED,
        make=_tree_pairs,
        collectives=("all_reduce",),
        weight=12.0,
        max_ranks=128,
        variants=_as_long_as_files,
        options={"max_transfers": Count, "max_steps": Count},
    )
)
register_maker(
    SearchMaker(name="compose", make=_compose, collectives=_EVERYTHING, weight=2.0, options={"pieces": list[Count]})
)
register_maker(
    SearchMaker(
        name="greedy",
        make=_greedy,
        collectives=_EVERYTHING,
        weight=2.0,
        options={"pieces": list[Count], "symmetric": bool},
    )
)
register_maker(
    SearchMaker(name=PHASES, make=_phases, collectives=("all_to_all",), weight=4.0, max_ranks=1024, variants=_on_trees)
)
register_maker(
    SearchMaker(
        name="flow",
        make=_flow,
        collectives=("all_to_all", "all_to_all_v"),
        weight=2.0,
        max_ranks=512,
        options={"pieces": Count},
    )
)
register_maker(
    SearchMaker(
        name="forest",
        make=_forest,
        collectives=(*_GATHERING, "broadcast", "reduce"),
        weight=2.0,
        max_ranks=512,
        variants=_few_roots,
        options={"max_k": Count, "max_height": Count, "max_transfers": Count, "multicast": bool},
    )
)
register_maker(
    SearchMaker(
        name="repair",
        make=_repair,
        collectives=_EVERYTHING,
        weight=6.0,
        max_ranks=256,
        variants=_with_base,
        options={"max_transfers": Count},
    )
)
register_maker(
    SearchMaker(
        name="exact",
        make=_exact,
        collectives=_EVERYTHING,
        weight=2.0,
        max_ranks=12,
        options={"solver": Literal["auto", "highs", "cp-sat"], "channels": list[str]},
    )
)
register_maker(
    SearchMaker(
        name=SKETCHED,
        make=_three_stage,
        collectives=(*_GATHERING, "all_to_all"),
        weight=4.0,
        max_ranks=256,
        reduces=False,
        follows_sketch=True,
        variants=sketch_variants,
        options={
            "solver": Literal["highs", "cpsat"],
            "solutions": Count,
            "detour": Annotated[float, Meta(ge=0, le=99)],
        },
    )
)

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
        InvalidInput: No maker is asked; options for one that does not exist or is not asked, an option that it does not
            have, a wrong value.
    """
    known = makers()
    if wanted is not None and not wanted:
        raise InvalidInput(f"makers: none is named; choose from: {', '.join(known)}")
    if not isinstance(given, Mapping) or not all(isinstance(options, Mapping) for options in given.values()):
        raise InvalidInput(f"maker_options: must be like {{'forest': {{'max_k': 2}}}}, not {str(given)[:80]}")
    if isinstance(wanted, str) or not all(isinstance(name, str) for name in wanted or ()):
        raise InvalidInput(f"makers: must be like ['forest', 'greedy'], not {str(wanted)[:80]}")
    asked = set(known) if wanted is None else {name.partition(":")[0] for name in wanted}
    for name in given:
        if name not in known:
            raise unknown("maker", name, known)
        if name not in asked:
            raise InvalidInput(f"options of {name}: it is not among the makers that are asked: {', '.join(asked)}")
    return {name: _checked(known[name], options) for name, options in given.items() if options}


def _checked(maker: Maker, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values for one maker, as it takes them; texts of a command line become numbers, truth values and lists."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if not maker.options:
            raise InvalidInput(f"option {name!r} of {maker.name}: this maker has no options")
        if name not in maker.options:
            raise unknown(f"option of {maker.name}", name, maker.options)
        kind = maker.options[name]
        plain = value
        if str(kind).startswith("list"):
            plain = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value
        found[name] = convert(plain, kind, where=f"option {name} of {maker.name}", strict=not _is_text(plain))
    return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and any(isinstance(one, str) for one in value))


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
        if name == SYMMETRIC and wanted is None and problem.ranks <= SMALL:
            # `compose` makes the same programs, written out for all ranks.
            refused[name] = f"is for more than {SMALL} ranks unless it is asked for, not {problem.ranks}"
            continue
        if name == SKETCHED and wanted is None and problem.sketch is None and problem.ranks > FEW_SKETCHED:
            # Programs of this maker cost minutes there, and `compose` mostly finds better ones in seconds.
            asked_for = "unless it is asked for or given a sketch"
            refused[name] = f"is for up to {FEW_SKETCHED} ranks {asked_for}, not {problem.ranks}"
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
    if problem.collective.kind != "all_reduce":
        tasks = [replace(task, weight=LATER) if task.maker == TIMED else task for task in tasks]
        tasks.sort(key=lambda task: task.maker == TIMED)
    if problem.ranks > FEW_PAIRED:
        tasks.sort(key=lambda task: task.maker == PAIRED)
    if problem.ranks > SMALL:
        tasks.sort(key=lambda task: (task.maker == LIBRARY, task.maker != PHASES, _turn(task)))
        tasks, refused = _without_whole_programs(problem, tasks, refused) if wanted is None else (tasks, refused)
    if problem.takes_plans and wanted is None and not own and problem.sketch is None and direct_fills_links(problem):
        why = "not asked: the direct algorithm fills these links, so plans are made of the library's algorithms"
        refused |= {task.maker: why for task in tasks if task.maker != LIBRARY}
        tasks = [task for task in tasks if task.maker == LIBRARY]
    for name, values in own.items():
        if name in refused:
            raise InvalidInput(f"options of {name}: it {refused[name]}")
        for channel in values.get("channels", ()):
            if channel not in problem.cluster.channels:
                raise unknown(f"channel in options of {name}", channel, problem.cluster.channels)
    _check_sketch(problem, {task.maker for task in tasks}, refused)
    return tasks, refused


def _turn(task: MakerTask) -> int:
    """The turn of a library algorithm on many ranks: first those that send everything once, over few latencies."""
    name = task.options.get("algorithm", "") if task.maker == LIBRARY else ""
    return PROMISING.index(name) if name in PROMISING else len(PROMISING)


def _without_whole_programs(
    problem: SynthesisProblem, tasks: list[MakerTask], refused: dict[str, str]
) -> tuple[list[MakerTask], dict[str, str]]:
    """Leave out programs that would be written out for too many ranks, where symmetric programs can be made."""
    moves = problem.ranks * (problem.ranks - 1)
    alike = [task for task in tasks if task.maker == SYMMETRIC]
    if not alike or moves <= MAX_WHOLE_MOVES:
        return tasks, refused
    why = f"moves {moves} chunks, written out for all ranks; more than {MAX_WHOLE_MOVES} are left to {SYMMETRIC}"
    return alike, refused | {task.maker: why for task in tasks if task.maker != SYMMETRIC}


def _check_sketch(problem: SynthesisProblem, at_work: set[str], refused: Mapping[str, str]) -> None:
    """Refuse a sketch that none of the makers at work follows."""
    followers = [name for name, maker in makers().items() if maker.follows_sketch]
    if problem.sketch is None or at_work & set(followers):
        return
    reasons = [f"{name} {refused[name]}" for name in followers if name in refused]
    why = ", ".join(reasons) or f"of the makers only {', '.join(followers)} follows one, and is not asked"
    raise InvalidInput(f"sketch: {why}")
