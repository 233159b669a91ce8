# SPDX-License-Identifier: Apache-2.0
"""The search for the fastest MSCCL++ plan of wide steps: programs and forms in an order of promise, by count.

No clock decides: the direct algorithm is tried in every form, then each other program whose first forms promise
something. The same problem therefore has the same plan on a busy and on an idle machine, unless the budget ends first;
`Lowering.cut` then says how much was left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import inf
from typing import Any

from ..algorithms import algorithm
from ..cluster import Cluster
from ..collectives import AllGather, ReduceScatter
from ..errors import StrettoError
from ..programs import Program
from ..programs.formats import mscclpp_wide
from ..programs.formats.mscclpp_json import MAX_THREADBLOCKS
from ..programs.formats.mscclpp_wide import PlanForm
from ..programs.wide import WideProgram, runs_of
from ..simulator import Runtime, lower_bound, simulate
from ..simulator.priced_wide import wide_time_us
from ..simulator.switch_links import switch_links
from .certificate import Candidate, Certificate, Lowering, ProvedProgram
from .loop_trees import WAYS, balanced_trees, equal_trees, loop_trees, packed_trees
from .problem import MAX_WIDE, SynthesisProblem

DIRECT = "library:direct"
ALL_ALIKE = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
"""The collectives in which every rank does the same, and which the direct algorithm knows."""
HALVES = (ReduceScatter, AllGather)
SWITCHED = ("all_reduce", "all_gather", "broadcast")
"""The collectives of which a switch that adds up and copies can do a part."""
LARGE = 1e9
"""The bytes at which latencies no longer count, so that the direct algorithm shows whether it fills the links."""
FILLS_LINKS = 1.05
"""The factor by which the direct algorithm may be slower than the bound of the links and still fills them."""
MAX_PACKETS = 4.5e6
"""The most bytes of all ranks together for which packets, which take twice the room, are tried."""
TREES_FROM = 8e6
"""From so many bytes on, trees in loops are tried where links differ."""
FIRST_TREES = 1
"""The programs of trees that are tried whatever time is left: the direct algorithm alone would be far slower there."""
FIRST_OTHERS = 2
"""Other programs than the direct one of which the first forms are tried whatever time is left."""
FEWEST_STEPS = 0.8
"""Below `TREES_FROM`, where steps are what a call costs, other programs replace the direct one from so much less time
on: prices were fitted to direct ones."""
WORTHWHILE = 0.999
PROMISING = 1.25
"""The factor by which a program's first forms may be slower than the best and the others are still tried."""
NEARLY = 1.1
"""The factor, as above, for a program that must beat the direct one by a margin: beside the time to be reached."""
LL_THREADS = (1024, 512)
"""The threads of threadblocks that read packets, of those that are tried."""
LOOP_TURNS = (8, 32)
"""How often the loop of a plan goes round, of those that are tried."""
TREE_TURNS = (16, 32)
"""How often the loop of a plan goes round, of those that are tried where every tree is a stream."""
PULLED_TURNS = (32, 64)
"""How often where every step has one peer: trees are compared with the first."""
COMPARED = 0.6
"""The part of the time in which trees are compared; the two fastest of them are tried in all their forms."""
LEAST_LOOP = 1 << 14
"""The fewest bytes that are moved in one turn."""


def search_plans(
    programs: Sequence[ProvedProgram],
    problem: SynthesisProblem,
    *,
    budget_s: float,
    report: Callable[[str], None] = lambda message: None,
) -> tuple[ProvedProgram | None, Lowering | None, list[Candidate]]:
    """Try programs as wide steps in every form that promises something, and return the fastest plan.

    Args:
        programs: The programs, fastest on the links first; the direct algorithm and trees in loops are added.
        problem: The problem that they were made for, one whose runtime takes plans (`SynthesisProblem.takes_plans`).
        budget_s: The seconds after which no further program is begun; the direct algorithm is always tried.
        report: Called with a line of text for each form.

    Returns:
        The program and its plan, None where none fits; and what was tried.
    """
    assert problem.runtime is not None and problem.takes_plans
    deadline = time.monotonic() + budget_s
    search = _PlanSearch(problem=problem, prices=problem.runtime, report=report, deadline=deadline)
    direct = _direct(problem)
    # The direct algorithm with more chunks has the same wide steps: chunks that lie and travel alike are one piece.
    others = [
        made
        for made in programs
        if made.maker != DIRECT and isinstance(made.program, Program) and len(made.program.chunk) <= MAX_WIDE
    ]
    for made in direct:
        search.widen(made)
    left_out = 0
    if needs_trees(problem):
        for at, (made, forms) in enumerate(search.trees()):
            if time.monotonic() > deadline and at >= FIRST_TREES:
                left_out += 1
                break
            search.widen(made, forms)
    for at, made in enumerate(others):
        if search.late and at >= FIRST_OTHERS:
            left_out += len(others) - at
            break
        search.widen(made)
    if search.best is None:
        return None, None, search.tried
    made, took, form = search.best
    assert isinstance(made.program, Program)
    left = f"{left_out} programs were tried as plans" if left_out else "all forms of plans were tried"
    cut = f"the budget ended before {left}" if left_out or search.hurried else ""
    return made, replace(_plan(made.program, took, form), tried=tuple(search.tried), cut=cut), search.tried


def _plan(program: Program, time_us: float, form: PlanForm) -> Lowering:
    """A plan of wide steps as a lowering."""
    lowered = program.lower(fifo_depth=2)
    return Lowering(lowered=lowered, time_us=time_us, instances=1, fifo_depth=2, form=form)


def restored_plan(program: Program, certificate: Certificate, problem: SynthesisProblem) -> Lowering:
    """The plan of a program in the form that its certificate names, with its time anew.

    Args:
        program: The program.
        certificate: Its certificate, which names a form.
        problem: The problem that it was made for.

    Returns:
        The plan.
    """
    form = PlanForm.parse(certificate.form)
    assert problem.runtime is not None
    took = wide_time_us(program, problem.cluster, nbytes=problem.nbytes, form=form, runtime=problem.runtime)
    return replace(_plan(program, took, form), cut=certificate.cut)


def needs_trees(problem: SynthesisProblem) -> bool:
    """Whether a problem is for plans, and the direct algorithm leaves links idle, so that trees in loops are tried."""
    return problem.takes_plans and problem.nbytes > TREES_FROM and not direct_fills_links(problem)


def direct_fills_links(problem: SynthesisProblem) -> bool:
    """Whether the direct algorithm moves large data as fast as links allow, so that no other search is needed.

    That is so wherever all ranks reach each other alike: behind one switch, or in the memory of one GPU. An all-reduce
    is judged by its halves, since its bound is not reached where all ranks share one link.
    """
    wanted = [problem.collective]
    if problem.collective.kind == "all_reduce":
        wanted = [half(problem.collective.ranks, in_place=problem.collective.in_place) for half in HALVES]
    if problem.collective.kind not in ALL_ALIKE:
        return False
    found = [(one, _direct(replace(problem, collective=one, nbytes=LARGE))) for one in wanted]
    return all(
        bool(made) and made[0].time_us <= FILLS_LINKS * lower_bound(one, problem.cluster, LARGE).total_us
        for one, made in found
    )


@dataclass(kw_only=True)
class _PlanSearch:
    problem: SynthesisProblem
    prices: Runtime
    report: Callable[[str], None]
    deadline: float
    hurried: bool = False
    """Whether forms were left out for want of time."""
    best: tuple[ProvedProgram, float, PlanForm] | None = None
    tried: list[Candidate] = field(default_factory=list)

    @property
    def most_blocks(self) -> int:
        """The most threadblocks of a rank."""
        return self.prices.blocks_on(self.problem.cluster) or MAX_THREADBLOCKS

    @property
    def late(self) -> bool:
        """Whether the time is spent; never before there is a plan."""
        return self.best is not None and time.monotonic() > self.deadline

    def trees(self) -> Iterator[tuple[ProvedProgram, list[PlanForm]]]:
        """Trees in loops and their forms: first the two fastest of those that the time allows to compare."""
        problem, most = self.problem, self.most_blocks
        wanted, cluster = problem.collective, problem.cluster
        until = time.monotonic() + COMPARED * max(self.deadline - time.monotonic(), 0.0)
        balanced, others = balanced_trees(wanted, cluster, most=most), loop_trees(wanted, cluster, most=most)
        compared: list[tuple[float, int, Program]] = []
        if wanted.kind in WAYS:
            others = equal_trees(wanted, cluster, most=most)
            packed = packed_trees(wanted, cluster, most=most)
            for program in _in_turn(balanced, packed):
                form = loop_forms(program, problem.nbytes, most)[0]
                self.report(f"wide steps of {program.name}")
                compared.append((self._time_us(program, form, {}), len(compared), program))
                if time.monotonic() > until:
                    break
        for program in chain((program for _, _, program in sorted(compared)[:2]), others):
            yield _timed("loop_trees", program, problem), loop_forms(program, problem.nbytes, most)

    def widen(self, made: ProvedProgram, forms: Iterable[PlanForm] | None = None) -> None:
        """Try one program in some forms, by default in all that suit it if the first ones promise something.

        Where the time is over, a program is tried in its first forms only.
        """
        program, problem = made.program, self.problem
        assert isinstance(program, Program)
        steps: dict[PlanForm, WideProgram] = {}
        before: dict[PlanForm, float] = {}
        enough: set[PlanForm] = set()
        given = forms is not None
        if forms is None:
            forms = forms_for(program, problem.nbytes, self.prices, problem.cluster)
            if made.maker != DIRECT and 4 * problem.ranks < program.collective.num_chunks < self.most_blocks:
                forms.insert(0, PlanForm(streams=program.collective.num_chunks))
            if self.best is not None and not self.late and not self._promises(made, forms, steps):
                return
            if made.maker != DIRECT:
                forms = self._in_time(forms)
        for at, form in enumerate(forms):
            if given and at and self.late:
                self.hurried = True
                break
            key = replace(form, slices=1, loop_bytes=0, halves=0)
            if key in enough and not form.loop_bytes:
                continue  # More slices did not help before, and so will not help now.
            name = f"{program.name} {form}"
            self.report(f"wide steps of {name}")
            try:
                took = self._time_us(program, form, steps)
                if not form.loop_bytes:
                    enough |= {key} if took > WORTHWHILE * before.get(key, inf) else set()
                    before[key] = took
                if self.best is None or took < self.best[1] * self._margin(made):
                    mscclpp_wide.dumps(program, form=form, max_threadblocks=self.most_blocks)
                    self.best = made, took, form
            except StrettoError as error:
                self.tried.append(Candidate(maker=made.maker, name=name, reason=str(error)))
                continue
            self.tried.append(Candidate(maker=made.maker, name=name, time_us=took))

    def _in_time(self, forms: Sequence[PlanForm]) -> Iterator[PlanForm]:
        """The forms, but once the time is over only the first ones of those that are left."""
        for at, form in enumerate(forms):
            if self.late:
                self.hurried = True
                yield from (one for one in first_forms(forms) if one in forms[at:])
                return
            yield form

    def _time_us(self, program: Program, form: PlanForm, steps: dict[PlanForm, WideProgram]) -> float:
        """The time of a program in a form; `steps` keeps its wide steps, which several forms share."""
        key = replace(form, slices=1, threads=1024, loop_bytes=16 * form.halves)
        if key not in steps:
            steps[key] = mscclpp_wide.widen_in(program, form)
        nbytes, cluster = self.problem.nbytes, self.problem.cluster
        return wide_time_us(steps[key], cluster, nbytes=nbytes, form=form, runtime=self.prices)

    def _promises(self, made: ProvedProgram, forms: Sequence[PlanForm], steps: dict[PlanForm, WideProgram]) -> bool:
        """Whether a program nearly replaces the best in its own form, or with most threadblocks of each kind."""
        assert self.best is not None and isinstance(made.program, Program)
        _, best_us, own = self.best
        margin = self._margin(made)
        near_us = best_us * (PROMISING if margin == 1.0 else NEARLY * margin)
        for form in [*first_forms(forms), *([own] if own in forms else [])]:
            try:
                if self._time_us(made.program, form, steps) < near_us:
                    return True
            except StrettoError:
                continue
        return False

    def _margin(self, made: ProvedProgram) -> float:
        """The share of the best time below which wide steps of a program are taken instead."""
        held = self.best is not None and self.best[0].maker == DIRECT and made.maker != DIRECT
        return FEWEST_STEPS if held and self.problem.nbytes <= TREES_FROM else 1.0


def _in_turn(some: Iterator[Program], fewer: Iterator[Program]) -> Iterator[Program]:
    """The first of both, the second of both, and so on."""
    for program in some:
        yield program
        yield from islice(fewer, 1)


def first_forms(forms: Sequence[PlanForm]) -> tuple[PlanForm, ...]:
    """The form with most threadblocks and without loops, of each kind of form."""
    return tuple({(form.protocol, form.apart): form for form in forms if not form.loop_bytes}.values())


def _direct(problem: SynthesisProblem) -> list[ProvedProgram]:
    """The direct algorithm, which has the fewest steps: on the links it may be far from the fastest.

    There is none where some ranks have no route to others.
    """
    c = problem.collective
    try:
        options: dict[str, Any] = {"root": c.root} if c.root >= 0 else {}
        return [_timed(DIRECT, algorithm("direct", c.kind, c.ranks, in_place=c.in_place, **options), problem)]
    except StrettoError:
        return []


def _timed(maker: str, program: Program, problem: SynthesisProblem) -> ProvedProgram:
    took = simulate(
        program, problem.cluster, nbytes=problem.nbytes, alpha=problem.alpha, contention=problem.contention
    ).total_us
    return ProvedProgram(maker=maker, program=program, time_us=took, seconds=0.0)


def loop_forms(program: Program, nbytes: float, most: int) -> list[PlanForm]:
    """The forms in which trees are tried: a stream for each piece, in loops, sums and copies apart, and at once.

    Args:
        program: The program.
        nbytes: The bytes that the collective moves.
        most: The most threadblocks.

    Returns:
        Up to five forms.
    """
    runs = runs_of(program)
    longest = 0 if program.collective.kind == "all_to_all" else _longest(runs, most)
    at_once = PlanForm(streams=min(most, program.collective.num_chunks), longest=longest)
    together = max(runs) if program.collective.kind == "all_to_all" else max(1, longest)
    share = float(program.collective.chunk_share[0]) * nbytes * together
    turns = PULLED_TURNS if longest else TREE_TURNS
    loops = [loop for loop in (int(share / many) // 16 * 16 for many in turns) if loop >= LEAST_LOOP]
    halves = (1, 0) if program.reduce.any() and not program.reduce.all() else (0,)
    if longest:
        return [replace(at_once, loop_bytes=loop, halves=halves[0], pull=1) for loop in loops]
    return [*(replace(at_once, loop_bytes=loop, halves=half) for half in halves for loop in loops), at_once]


def _longest(runs: Sequence[int], most: int) -> int:
    """The fewest chunks of a piece with which runs become no more pieces than there are streams; 0: no limit helps."""
    for longest in range(1, max(runs, default=1)):
        if sum(-(-run // longest) for run in runs) <= most:
            return longest
    return 0


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
    if program.collective.kind in SWITCHED and switch_links(cluster, program.collective.ranks) is not None:
        bases += [replace(base, multicast=1) for base in bases if base.protocol == "Simple"]
    found = []
    for base in bases:
        slices = 1
        while slices * base.streams <= most:
            found.append(replace(base, slices=slices))
            if base.protocol == "Simple" and slices == 1:
                found += [replace(base, loop_bytes=loop) for loop in loops]
            slices *= 2
    return found
