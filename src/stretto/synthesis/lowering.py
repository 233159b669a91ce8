# SPDX-License-Identifier: Apache-2.0
"""The search for the fastest instruction streams of programs: over instances and FIFO depth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any

import numpy as np

from ..algorithms import algorithm
from ..cluster import Cluster
from ..errors import Infeasible, StrettoError
from ..programs import Lowered, Program, SymmetricProgram
from ..programs.formats import mscclpp_wide
from ..programs.formats.msccl_rules import MAX_STEPS
from ..programs.formats.mscclpp_json import MAX_THREADBLOCKS
from ..programs.formats.mscclpp_wide import PlanForm
from ..programs.wide import WideProgram
from ..simulator import Runtime, simulate
from ..simulator.priced_wide import wide_time_us
from .certificate import Candidate, Lowering, ProvedProgram
from .loop_trees import loop_trees
from .problem import SynthesisProblem

DIRECT = "library:direct"
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


MAX_WIDE = 4096
"""The most chunk moves of a program that is tried as wide steps."""
MAX_PACKETS = 4.5e6
"""The most bytes of all ranks together for which packets, which take twice the room, are tried."""
TREES_FROM = 8e6
"""From so many bytes on, trees in loops are tried where links differ."""
FEWEST_STEPS = 0.8
"""Below `TREES_FROM`, where steps are what a call costs, other programs replace the direct one from so much less time
on: prices were fitted to direct ones."""
PROMISING = 1.25
"""The factor by which a program's first forms may be slower than the best and the others are still tried."""
LL_THREADS = (1024, 512)
"""The threads of threadblocks that read packets, of those that are tried."""
LOOP_TURNS = (8, 32)
"""How often the loop of a plan goes round, of those that are tried."""
TREE_TURNS = (16, 32)
"""The same where every tree is a stream."""
LEAST_LOOP = 1 << 14
"""The fewest bytes that are moved in one turn."""


def search_lowering(
    programs: Sequence[ProvedProgram],
    problem: SynthesisProblem,
    *,
    budget_s: float,
    report: Callable[[str], None] = lambda message: None,
) -> tuple[ProvedProgram, Lowering]:
    """Lower programs in several ways, simulate the streams as threadblocks would run them, and return the fastest.

    First the programs of every maker are lowered, from coarse to fine, until one does not fit; then the number of
    instances of whatever is fastest is doubled for as long as that helps. Streams that no runtime of the wanted format
    accepts (too many channels, threadblocks or steps) are left out.

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
    search = _Search(problem=problem, report=report, deadline=time.monotonic() + budget_s)
    search.widen(programs)
    for group in _by_maker(programs, HOPELESS if problem.runtime is None else inf):
        for made in group:
            if search.over() or not search.lower(made, 1):
                break
    while search.growing and not search.over():
        took, at = min((growing[0], at) for at, growing in enumerate(search.growing))
        _, made, instances = search.growing.pop(at)
        search.lower(made, 2 * instances, better_than=took * WORTHWHILE)
    if search.best is None:
        first = search.tried[0]
        raise Infeasible(
            f"no program fits the limits of the runtimes; tried {len(search.tried)} lowerings, "
            f"such as {first.name}: {first.reason}"
        )
    made, found = search.best
    if not search.over() and found.form is None:
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

    def widen(self, programs: Sequence[ProvedProgram]) -> None:
        """Try wide steps in several forms, where the runtime has prices for them and all ranks are on one host."""
        problem, prices = self.problem, self.problem.runtime
        if problem.lower != "mscclpp" or prices is None or not prices.knows_wide or len(set(problem.hosts)) > 1:
            return
        direct = _direct(problem)
        if problem.nbytes > TREES_FROM and all(d.time_us > LOWERED_WELL * programs[0].time_us for d in direct):
            # Links differ, and what is direct goes round. Trees may take half of the time at most.
            half = time.monotonic() + (self.deadline - time.monotonic()) / 2
            most = prices.blocks_on(problem.cluster) or MAX_THREADBLOCKS
            for program in loop_trees(problem.collective, problem.cluster, most=most):
                if self.best is not None and time.monotonic() > half:
                    break
                self._widen(_timed("loop_trees", program, problem), prices, loop_forms(program, problem.nbytes, most))
        for made in [*direct, *programs]:
            if self.over():
                break
            if isinstance(made.program, Program) and len(made.program.chunk) <= MAX_WIDE:
                self._widen(made, prices)

    def _widen(self, made: ProvedProgram, prices: Runtime, forms: Sequence[PlanForm] | None = None) -> None:
        program = made.program
        assert isinstance(program, Program)
        problem = self.problem
        made_of: dict[PlanForm, WideProgram] = {}
        before: dict[PlanForm, float] = {}
        enough: set[PlanForm] = set()
        if forms is None:
            forms = forms_for(program, problem.nbytes, prices, problem.cluster)
            if self.best is not None and not self._promises(program, forms):
                return
        for form in forms:
            key = replace(form, slices=1, loop_bytes=0, halves=0)
            if self.over():
                break
            if key in enough and not form.loop_bytes:
                continue  # More slices did not help before, and so will not help now.
            name = f"{program.name} {form}"
            self.report(f"wide steps of {name}")
            try:
                divided = replace(key, threads=1024, loop_bytes=16 * form.halves, halves=form.halves)
                if divided not in made_of:
                    made_of[divided] = mscclpp_wide.widen_in(program, form)
                took = wide_time_us(made_of[divided], problem.cluster, nbytes=problem.nbytes, form=form, runtime=prices)
                if not form.loop_bytes:
                    enough |= {key} if took > WORTHWHILE * before.get(key, inf) else set()
                    before[key] = took
                if self.best is not None and took >= self.best[1].time_us * self._margin(made):
                    self.tried.append(Candidate(maker=made.maker, name=name, time_us=took))
                    continue
                mscclpp_wide.dumps(
                    program, form=form, max_threadblocks=prices.blocks_on(problem.cluster) or MAX_THREADBLOCKS
                )
                lowered = program.lower(fifo_depth=2)
            except StrettoError as error:
                self.tried.append(Candidate(maker=made.maker, name=name, reason=str(error)))
                continue
            self.tried.append(Candidate(maker=made.maker, name=name, time_us=took))
            self.best = made, Lowering(lowered=lowered, time_us=took, instances=1, fifo_depth=2, form=form)

    def _promises(self, program: Program, forms: Sequence[PlanForm]) -> bool:
        """Whether a program is nearly as fast as the best in its own form, or with most threadblocks of each kind."""
        assert self.best is not None and self.problem.runtime is not None
        first = {(form.protocol, form.apart): form for form in forms if not form.loop_bytes}
        asked = [*first.values(), *([self.best[1].form] if self.best[1].form in forms else [])]
        for form in asked:
            try:
                took = wide_time_us(
                    program, self.problem.cluster, nbytes=self.problem.nbytes, form=form, runtime=self.problem.runtime
                )
            except StrettoError:
                continue
            if took < PROMISING * self.best[1].time_us:
                return True
        return False

    def _margin(self, made: ProvedProgram) -> float:
        """The share of the best time below which wide steps of a program are taken instead."""
        held = self.best is not None and self.best[0].maker == DIRECT and made.maker != DIRECT
        return FEWEST_STEPS if held and self.problem.nbytes <= TREES_FROM else 1.0


def _direct(problem: SynthesisProblem) -> list[ProvedProgram]:
    """The direct algorithm, which has the fewest steps: on the links it may be far from the fastest."""
    c = problem.collective
    try:
        options: dict[str, Any] = {"root": c.root} if c.root >= 0 else {}
        program = algorithm("direct", c.kind, c.ranks, in_place=c.in_place, **options)
    except StrettoError:
        return []
    return [_timed(DIRECT, program, problem)]


def _timed(maker: str, program: Program, problem: SynthesisProblem) -> ProvedProgram:
    took = simulate(
        program, problem.cluster, nbytes=problem.nbytes, alpha=problem.alpha, contention=problem.contention
    ).total_us
    return ProvedProgram(maker=maker, program=program, time_us=took, seconds=0.0)


def loop_forms(program: Program, nbytes: float, most: int) -> list[PlanForm]:
    """The forms in which trees are tried: a stream for each chunk, in loops, sums and copies apart, and at once.

    Args:
        program: The program.
        nbytes: The bytes that the collective moves.
        most: The most threadblocks.

    Returns:
        Up to five forms.
    """
    at_once = PlanForm(streams=min(most, program.collective.num_chunks))
    share = float(program.collective.chunk_share[0]) * nbytes
    loops = [loop for loop in (int(share / turns) // 16 * 16 for turns in TREE_TURNS) if loop >= LEAST_LOOP]
    halves = (1, 0) if program.reduce.any() and not program.reduce.all() else (0,)
    return [*(replace(at_once, loop_bytes=loop, halves=half) for half in halves for loop in loops), at_once]


def forms_for(program: Program, nbytes: float, prices: Runtime, cluster: Cluster) -> list[PlanForm]:
    """The forms of a plan that are tried: protocols, streams, slices, threads and loops, from few threadblocks to many.

    Args:
        program: The program.
        nbytes: The bytes that the collective moves.
        prices: The runtime.
        cluster: Where it runs.

    Returns:
        The forms.
    """
    most = prices.blocks_on(cluster) or MAX_THREADBLOCKS
    ranks, chunks = program.collective.num_ranks, program.collective.num_chunks
    share = float(program.collective.chunk_share[0]) * nbytes
    loops = [loop for loop in (int(share / turns) // 16 * 16 for turns in LOOP_TURNS) if loop >= LEAST_LOOP]
    bases = [
        PlanForm(streams=streams)
        for streams in sorted({1, min(ranks, most), min(4 * ranks, most), most})
        if streams <= chunks or chunks == 1
    ]
    if "LL" in prices.protocols and nbytes * ranks <= MAX_PACKETS:
        whole = [replace(base, protocol="LL") for base in bases]
        # A rank sends to, and takes from, each of its peers.
        sides = sorted({min(ranks - 1, most), min(2 * (ranks - 1), most)})
        whole += [PlanForm(protocol="LL", streams=streams, apart=1) for streams in sides]
        # Where packets are tried they are often the fastest, so they come first: the time of a search may end.
        bases = [replace(base, threads=threads) for base in whole for threads in LL_THREADS] + bases
    found = []
    for base in bases:
        slices = 1
        while slices * base.streams <= most:
            found.append(replace(base, slices=slices))
            if base.protocol == "Simple" and slices == 1:
                found += [replace(base, loop_bytes=loop) for loop in loops]
            slices *= 2
    return found


def lowers_well(made: ProvedProgram, problem: SynthesisProblem) -> bool:
    """Whether a program fits the limits of the runtimes, and its streams take hardly longer than it does."""
    search = _Search(problem=problem, report=lambda message: None, deadline=time.monotonic())
    search.lower(made, 1)
    return search.best is not None and search.best[1].time_us <= LOWERED_WELL * made.time_us


def _by_maker(programs: Sequence[ProvedProgram], hopeless: float) -> list[list[ProvedProgram]]:
    """The programs of every maker that are not hopelessly slow, coarse ones first; makers of small programs first."""
    groups: dict[str, list[ProvedProgram]] = {}
    for made in sorted(programs, key=lambda made: len(made.program.chunk)):
        if made.time_us <= hopeless * programs[0].time_us:
            groups.setdefault(made.maker, []).append(made)
    return sorted(groups.values(), key=lambda group: len(group[-1].program.chunk))


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
