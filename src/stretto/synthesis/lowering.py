# SPDX-License-Identifier: Apache-2.0
"""The search for the fastest instruction streams of programs: over instances and FIFO depth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from ..collectives import Collective
from ..errors import Infeasible, StrettoError, unknown
from ..programs import Lowered, Program, SymmetricProgram
from ..programs.formats.msccl_rules import MAX_STEPS
from ..simulator import simulate
from .certificate import Candidate, Lowering, ProvedProgram
from .plan_search import search_plans
from .problem import SynthesisProblem
from .step_search import search_steps

FORMATS = ("msccl", "mscclpp")
"""The file formats that programs can be lowered for."""
MAX_INSTANCES = 16
MAX_MOVES = 1 << 17
"""The most chunk moves of all instances together: larger files help no runtime."""
WORTHWHILE = 0.999
LOWERED_WELL = 1.05
"""The factor by which instruction streams may be slower than their program for the search to end with it."""
HOPELESS = 2.0
"""The factor by which a program may be slower than the fastest and is still lowered."""
BEATEN = 1.25
"""The factor by which it may be slower than the fastest streams so far: several instances cut its messages finer."""


def check_format(form: str, collective: Collective) -> None:
    """Raise `InvalidInput` for an unknown format (empty: none is wanted), or one that has no such collective."""
    if form and form not in FORMATS:
        raise unknown("format to lower for", form, FORMATS)
    if form == "mscclpp":
        from ..programs.formats.mscclpp_json import NAMES

        if collective.kind not in NAMES:
            raise unknown("collective for MSCCL++", collective.kind, NAMES)


def search_lowering(
    programs: Sequence[ProvedProgram],
    problem: SynthesisProblem,
    *,
    budget_s: float,
    report: Callable[[str], None] = lambda message: None,
) -> tuple[ProvedProgram, Lowering]:
    """Lower programs in several ways, simulate the streams as threadblocks would run them, and return the fastest.

    Where the runtime runs fused steps, programs are timed as these (`step_search`). Where it takes plans of wide steps,
    the fastest of these is returned (`plan_search`), and there are streams only where no plan fits. Otherwise the
    programs of every maker are lowered, from coarse to fine, until one does not fit, those of the makers with the
    fastest programs first; then the number of instances of whatever is fastest is doubled for as long as that helps.
    Programs far slower than the fastest streams so far are skipped. Streams that no
    runtime of the wanted format accepts (too many channels, threadblocks or steps) are left out.

    Args:
        programs: The programs, fastest first, at least one.
        problem: The problem that they were made for; its `lower` names the format.
        budget_s: The seconds that the search may take; at least one lowering is found first.
        report: Called with a line of text for each lowering.

    Returns:
        The program whose streams are fastest, and the streams.

    Raises:
        Infeasible: No program fits the limits of the runtimes.
    """
    if problem.takes_steps:
        return search_steps(programs, problem, budget_s=budget_s, report=report)
    search = _Search(problem=problem, report=report, deadline=time.monotonic() + budget_s)
    if problem.takes_plans:
        made, plan, search.tried = search_plans(programs, problem, budget_s=budget_s, report=report)
        if made is not None and plan is not None:
            return made, plan
    for group in _by_maker(programs, HOPELESS if problem.runtime is None else inf):
        for made in group:
            if not search.beaten(made) and (search.over() or not search.lower(made, 1)):
                break
    while search.growing and not search.over():
        took, at = min((growing[0], at) for at, growing in enumerate(search.growing))
        _, made, instances = search.growing.pop(at)
        if not search.beaten(made):
            search.lower(made, 2 * instances, better_than=took * WORTHWHILE)
    if search.best is None:
        first = search.tried[0]
        raise Infeasible(
            f"no program fits the limits of the runtimes; tried {len(search.tried)} lowerings, "
            f"such as {first.name}: {first.reason}"
        )
    made, found = search.best
    if not search.over():
        search.lower(made, found.instances, depth=1)
    made, found = search.best
    return made, replace(found, tried=tuple(search.tried))


@dataclass(kw_only=True)
class _Search:
    problem: SynthesisProblem
    report: Callable[[str], None]
    deadline: float
    best: tuple[ProvedProgram, Lowering] | None = None
    tried: list[Candidate] = field(default_factory=list)
    growing: list[tuple[float, ProvedProgram, int]] = field(default_factory=list)
    """Lowerings that more instances may make faster, as (time, program, instances)."""

    def over(self) -> bool:
        """Whether the time is spent; the search never ends before it has found a lowering."""
        return self.best is not None and time.monotonic() > self.deadline

    def beaten(self, made: ProvedProgram) -> bool:
        """Whether a program is so much slower than the fastest streams that its own can hardly be faster."""
        priced = self.problem.runtime is not None
        return self.best is not None and not priced and made.time_us > BEATEN * self.best[1].time_us

    def lower(self, made: ProvedProgram, instances: int, *, depth: int = 2, better_than: float = float("inf")) -> bool:
        """Lower one program in one way and keep the best; False where it does not fit.

        FIFO depth 2 lets more instructions be fused.
        """
        name = f"{made.program.name} instances={instances} fifo_depth={depth}"
        self.report(f"lowering {name}")
        problem = self.problem
        try:
            why = too_long(made.program)
            if why or not isinstance(made.program, Program):
                raise Infeasible(why)
            lowered = made.program.lower(instances=instances, fifo_depth=depth)
            _check_fits(lowered, problem)
            took = simulate(
                lowered,
                problem.cluster,
                nbytes=problem.nbytes,
                alpha=problem.alpha,
                contention=problem.contention,
                runtime=problem.runtime,
            ).total_us
        except StrettoError as error:
            self.tried.append(Candidate(maker=made.maker, name=name, reason=str(error)))
            return False
        self.tried.append(Candidate(maker=made.maker, name=name, time_us=took))
        if self.best is None or took < self.best[1].time_us:
            found = Lowering(lowered=lowered, time_us=took, instances=instances, fifo_depth=depth)
            self.best = made, found
        fits = 2 * instances <= MAX_INSTANCES and 2 * instances * len(made.program.chunk) <= MAX_MOVES
        if took < better_than and fits and depth == 2:
            self.growing.append((took, made, instances))
        return True


def lowers_well(made: ProvedProgram, problem: SynthesisProblem) -> bool:
    """Whether a program fits the limits of the runtimes, and its streams take hardly longer than it does."""
    search = _Search(problem=problem, report=lambda message: None, deadline=time.monotonic())
    search.lower(made, 1)
    return search.best is not None and search.best[1].time_us <= LOWERED_WELL * made.time_us


def _by_maker(programs: Sequence[ProvedProgram], hopeless: float) -> list[list[ProvedProgram]]:
    """The programs of every maker that are not hopelessly slow, coarse ones first; makers of fast programs first."""
    groups: dict[str, list[ProvedProgram]] = {}
    for made in sorted(programs, key=lambda made: len(made.program.chunk)):
        if made.time_us <= hopeless * programs[0].time_us:
            groups.setdefault(made.maker, []).append(made)
    if hopeless == inf:  # instructions have a price, so few of them come first
        return sorted(groups.values(), key=lambda group: len(group[-1].program.chunk))
    return sorted(groups.values(), key=lambda group: min(made.time_us for made in group))


def fits_files(program: Program, problem: SynthesisProblem) -> bool:
    """Whether a program, as one instance of instruction streams, is within the limits of the wanted format."""
    if too_long(program):
        return False
    try:
        _check_fits(program.lower(fifo_depth=2), problem)
    except StrettoError:
        return False
    return True


def _check_fits(lowered: Lowered, problem: SynthesisProblem) -> None:
    """Refuse streams that no runtime of the wanted format would take, on the hosts where they are to run."""
    from ..programs.formats import msccl_xml, mscclpp_json

    if problem.lower == "mscclpp":
        mscclpp_json.dumps(lowered, hosts=problem.hosts)
    else:
        msccl_xml.dumps(lowered)


def too_long(program: Program | SymmetricProgram) -> str:
    """The reason why no runtime could take a program however it is lowered; empty where none is seen at once."""
    if isinstance(program, SymmetricProgram):
        return "instruction streams are made of programs that are written out for all ranks"
    c = program.collective
    connection = (program.src.astype(np.int64) * c.num_ranks + program.dst) * program.num_lanes + program.lane
    steps = int(np.unique(connection, return_counts=True)[1].max(initial=0))
    if steps > MAX_STEPS:
        return f"{steps} messages on one connection are more than the {MAX_STEPS} steps of the runtimes"
    if c.chunk_share.max() > c.chunk_share.min() * (1 + 1e-9):
        return "chunk_share: MSCCL files need chunks of equal size; these differ"
    return ""
