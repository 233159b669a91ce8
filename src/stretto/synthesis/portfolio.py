# SPDX-License-Identifier: Apache-2.0
"""`synthesize`: asks all makers for programs of a collective, and returns the best program."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..cluster import Cluster
from ..collectives import Collective
from ..errors import Infeasible, InvalidInput, unknown
from ..programs import Program
from ..simulator import Runtime, lower_bound, simulate
from ..simulator.network import ALPHA, CONTENTION
from ..simulator.runtimes import runtime_of
from ..units import check_bytes, check_seed
from . import backends
from . import makers as registry
from .attempts import LEAST_S, STOPPED, Board, attempt
from .cache import Cache
from .certificate import Candidate, Certificate, Lowering, ProvedProgram, Synthesis, versions
from .helpers import duties, hint, resolve
from .lowering import check_format, lowers_well, search_lowering
from .makers import LIBRARY, PHASES, SMALL, SYMMETRIC, MakerOptions, check_options, plan_tasks
from .matching import same_task
from .plan_search import needs_trees, restored_plan
from .problem import MakerTask, Progress, SynthesisProblem
from .sketch import Sketch

log = logging.getLogger(__name__)

MAX_JOBS = 256
BUSY = 0.5
"""With less than this share of a processor a search ran on a busy machine."""
FROM_BASE = 0.1
"""The share of the budget that is spent where the search begins with the program of an earlier search."""
REPAIR = "repair"
LOWERING = 0.3
"""The share of the budget that is kept for turning programs into instruction streams."""
TREES = 0.6
"""The share that is kept where plans need trees in loops: such trees are searched for while plans are made."""
STOPPED_S = 1.0
"""The seconds for turning programs into instruction streams once a search was stopped; one lowering is always made."""


class SearchStopped(KeyboardInterrupt):
    """Ctrl-C ended a search that had programs already: `found` is what the call would have returned, made of those.

    Where there was no program, or at a second Ctrl-C, the search ends with a plain `KeyboardInterrupt`.
    """

    def __init__(self, found: Any) -> None:
        super().__init__(STOPPED)
        self.found = found


def synthesize(
    collective: Collective,
    cluster: Cluster,
    nbytes: float,
    *,
    budget_s: float = 30.0,
    sketch: Sketch | None = None,
    alpha: str = "pipelined",
    contention: str | None = None,
    seed: int = 0,
    jobs: int = 1,
    backend: str = "processes",
    ray_address: str | None = None,
    helpers: str | Sequence[int] | None = None,
    base: Synthesis | Program | None = None,
    cache: bool = True,
    makers: Sequence[str] | None = None,
    maker_options: MakerOptions | None = None,
    lower: bool | str = False,
    runtime: Runtime | str | Path | None = None,
    progress: Progress | None = None,
) -> Synthesis:
    """Find the fastest program for a collective of `nbytes` on a cluster in `budget_s` seconds.

    Every maker that applies is asked (library algorithms, trees, flows, greedy, sketches, exact search); each of their
    programs is proved right and simulated. A maker that fails is listed among the candidates with its reason. With
    `jobs` > 1, or for more than 256 ranks, makers run in processes that are ended when the time is over.

    Args:
        collective: The collective.
        cluster: The cluster.
        nbytes: The larger of one rank's send and receive buffer in bytes, > 0.
        budget_s: The seconds that the search may take, > 0.
        sketch: A sketch for the makers that follow one; refused where none of the makers asked does.
        alpha: "pipelined" or "blocking", as in `simulate`.
        contention: "fifo" or "fair", as in `simulate`; what the cluster needs when not given.
        seed: The seed of all makers.
        jobs: How many makers run at once, 1..256.
        backend: Where they run: "processes" of this machine, or "ray".
        ray_address: The Ray cluster, ``HOST:PORT``; ``$RAY_ADDRESS``, else a local one, when not given.
        helpers: The devices outside the group that may forward, copy and add: "none", "host" (those on the group's
            hosts), "all", or the devices. "auto", when not given, is nobody, or where the group's devices do not reach
            each other and those on their hosts join them, these. The program then names the helpers that it needs.
        base: The result, or only the program, of the cluster as it was before links failed or became slower: its trees
            are packed anew and its maker is asked again, and nobody else unless `makers` says so. The search then ends
            after a tenth of `budget_s`; its helpers may help again; it is not cached.
        cache: Whether results are kept on disk and read from there (see `stretto.synthesis.cache`).
        makers: The makers or single tasks to ask, such as ``["forest", "library:ring"]``; all when not given.
        maker_options: Options for single makers, such as ``{"forest": {"max_k": 4}}``.
        lower: "msccl" or "mscclpp" (True for the first): find the program whose instruction streams run fastest within
            the limits of the runtimes that read this format.
        runtime: A price list, its name or its file: streams are judged by it, from few large pieces to many small ones,
            and the fastest are kept. Implies `lower` ("mscclpp" for a runtime of that name, else "msccl").
        progress: Called with a line of text and the share of the budget that is spent, 0..1.

    Returns:
        The program with its certificate, and all candidates.

    Raises:
        Infeasible: No maker found a program; the message holds their reasons.
        InvalidInput: An argument is not valid, or no maker that is asked would take an option or the sketch.
        SearchStopped: Ctrl-C ended the search; the exception holds the best program so far, proved as any other.

    >>> from stretto import MB, AllGather
    >>> ring = Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=1.0)
    >>> found = synthesize(AllGather(4), ring, 4 * MB, makers=["library:ring"], cache=False)
    >>> found.program.name, found.certificate.time_us, found.certificate.bound_us
    ('ring(chunks=2)', 301.0, 151.0)
    """
    problem = _checked(collective, cluster, nbytes, sketch, alpha, contention, seed, budget_s, jobs)
    backends.check_backend(backend, ray_address)
    prices = None if runtime is None else runtime_of(runtime)
    if prices is not None and not lower:
        lower = "mscclpp" if prices.name.startswith("mscclpp") else "msccl"
    problem = replace(problem, helpers=_allowed_helpers(problem, helpers, lower))
    if base is not None:
        problem, makers = _begun(problem, base, makers, helpers is None)
        budget_s, cache = budget_s * FROM_BASE, False
    form = "msccl" if lower is True else lower or ""
    check_format(form, collective)
    problem = replace(problem, lower=form, runtime=prices)
    if prices is not None and problem.takes_steps and len(set(problem.hosts)) > 1:
        raise InvalidInput(f"runtime: {prices.name} has prices for ranks on one host; these are on several")
    own = check_options(maker_options or {}, makers)
    options = {
        "budget_s": float(budget_s),
        "makers": sorted(registry.makers() if makers is None else makers),
        "maker_options": own,
    }
    store = Cache.of(problem, options) if cache else None
    found = store.load(problem) if store else None
    if found is None:
        tasks = plan_tasks(problem, makers, own)
        began_s, used_s = time.monotonic(), _processor_s()
        found, board = _search(problem, budget_s, jobs, tasks, progress, backend, ray_address)
        if board.stopped:
            raise SearchStopped(_with_hosts(found, problem))
        share = (_processor_s() - used_s) / max(time.monotonic() - began_s, 1e-9)
        # On an idle machine the makers that the time did not suffice for may find a better program.
        if board.late and share < BUSY and backend == "processes":
            log.info("not cached: the search had %.2f of a processor", share)
        elif store and not board.crashed:
            store.save(found)
    elif lower:
        found = replace(found, lowering=_lowered_again(found, problem, LOWERING * budget_s))
    return _with_hosts(found, problem)


def _processor_s() -> float:
    """Processor seconds that this process and those of its children that have ended have used."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _with_hosts(found: Synthesis, problem: SynthesisProblem) -> Synthesis:
    """The result with the host of each rank, which files of programs name."""
    return replace(found, hosts=tuple(problem.cluster.hosts_of(found.program.collective.ranks).tolist()))


def _lowered_again(found: Synthesis, problem: SynthesisProblem, budget_s: float) -> Lowering:
    """The lowering of a result from the cache, which keeps the program and the form of its plan."""
    if found.certificate.form:
        return restored_plan(found.plain, found.certificate, problem)
    made = ProvedProgram(maker=found.certificate.maker, program=found.program, time_us=found.time_us, seconds=0.0)
    return search_lowering([made], problem, budget_s=budget_s)[1]


def _begun(
    problem: SynthesisProblem, base: Synthesis | Program, makers: Sequence[str] | None, keep_helpers: bool
) -> tuple[SynthesisProblem, Sequence[str]]:
    """The problem with the program to begin with, and the makers to ask."""
    program = base.program if isinstance(base, Synthesis) else base
    if not isinstance(program, Program):
        raise InvalidInput(
            "base: must be a Program, or a result that has one; a symmetric program becomes one by expand()"
        )
    c = program.collective
    if keep_helpers and c.helpers and not problem.lower:
        problem = replace(problem, helpers=resolve(problem.cluster, c.members, c.ranks[len(c.members) :]))
    if not same_task(c.without_helpers(), problem.collective):
        raise InvalidInput(f"base: does {c!r}, not {problem.collective!r}")
    maker = base.certificate.maker if isinstance(base, Synthesis) else ""
    asked = [REPAIR, *({maker if maker.startswith(LIBRARY) else maker.partition(":")[0]} - {"", REPAIR})]
    return replace(problem, base=program), asked if makers is None else makers


def _allowed_helpers(
    problem: SynthesisProblem, wanted: str | Sequence[int] | None, lower: bool | str
) -> tuple[int, ...]:
    """The devices that may help; files for runtimes whose ranks all have buffers cannot name any."""
    if problem.collective.helpers:
        raise InvalidInput("collective: has helpers of its own; name them by the option helpers")
    found = resolve(problem.cluster, problem.collective.ranks, wanted)
    if found and lower and wanted not in (None, "auto"):
        raise InvalidInput("helpers: runtimes of MSCCL and MSCCL++ have no ranks without buffers; leave out lower")
    return () if lower else found


def _search(
    problem: SynthesisProblem,
    budget_s: float,
    jobs: int,
    planned: tuple[list[MakerTask], dict[str, str]],
    progress: Progress | None,
    backend: str,
    ray_address: str | None,
) -> tuple[Synthesis, Board]:
    """Run all tasks, or those before Ctrl-C; return the best result, and how the search went."""
    tasks, refused = planned
    # `repair` is first: after a failure the budget is short, and other makers might use all of it.
    tasks = sorted(tasks, key=lambda task: task.maker != REPAIR)
    # Short tasks run in this process. Long ones run in workers: several at once, and killed where they overrun.
    small = problem.ranks <= SMALL
    alone = jobs == 1 and backend == "processes"
    # Makers that take seconds at any size and nearly always reach the bound run here, too: no worker is killed then.
    quick = (SYMMETRIC, PHASES)
    here = [task for task in tasks if task.maker in quick or (small and (alone or task.maker == LIBRARY))]
    there = [task for task in tasks if task not in here]
    # The backend is started before the clock of the budget: starting a Ray cluster is not part of the search.
    kept = TREES if needs_trees(problem) else LOWERING
    with backends.backend(backend, jobs=jobs, address=ray_address) if there else nullcontext() as start:
        began = time.monotonic()
        board = Board(
            bound=lower_bound(problem.collective, problem.cluster, problem.nbytes),
            budget_s=budget_s * (1 - kept if problem.lower else 1),
            began=began,
            progress=progress,
            priced=problem.runtime is not None,
            candidates=[Candidate(maker=name, reason=reason) for name, reason in refused.items()],
        )
        if problem.lower and not problem.takes_steps:
            board.suffices = partial(lowers_well, problem=problem)
        try:
            _in_turn(problem, here, board, later=sum(task.weight for task in there))
            if start is not None and not board.stopped:
                backends.run_tasks(problem, there, board, jobs=jobs, start=start)
        except KeyboardInterrupt:
            board.stopped = True
    if board.best is None:
        raise KeyboardInterrupt() if board.stopped else Infeasible(_why_nothing(problem, board.candidates))
    best, lowering = board.best, None
    if problem.lower:
        best, lowering = _lowered(problem, board, kept * budget_s)
    # A program that came from a worker is verified and simulated once more in this process.
    timeline = simulate(
        best.program, problem.cluster, nbytes=problem.nbytes, alpha=problem.alpha, contention=problem.contention
    )
    certificate = Certificate(
        program=best.program.name,
        maker=best.maker,
        time_us=timeline.total_us,
        bound_us=board.bound.total_us,
        bound_reason=board.bound.reason,
        bound_method=board.bound.method,
        seconds=round(best.seconds, 4),
        search_s=round(time.monotonic() - board.began, 4),
        collective=problem.collective.kind,
        collective_digest=problem.collective.digest,
        cluster=problem.cluster.name,
        cluster_digest=problem.cluster.digest,
        nbytes=float(problem.nbytes),
        alpha=problem.alpha,
        contention=dict(timeline.facts)["contention"],
        seed=problem.seed,
        budget_s=float(budget_s),
        lowered_us=None if lowering is None else lowering.time_us,
        runtime="" if problem.runtime is None else problem.runtime.name,
        cut=STOPPED if board.stopped else _cut(board, lowering) if problem.takes_plans or problem.takes_steps else "",
        form=str(lowering.form) if lowering is not None and lowering.form is not None else "",
        steps="" if lowering is None else lowering.steps,
        unfit_for_old=lowering.unfit_for_old if lowering is not None and problem.lower == "msccl" else "",
        versions=versions(),
        helpers=duties(best.program, problem.cluster, problem.nbytes),
    )
    found = Synthesis(
        program=best.program, certificate=certificate, candidates=_ordered(board.candidates), lowering=lowering
    )
    return found, board


def _lowered(problem: SynthesisProblem, board: Board, kept_s: float) -> tuple[ProvedProgram, Lowering]:
    """The program whose instruction streams are fastest, in little time where Ctrl-C ends or has ended the search."""
    if not board.stopped:
        try:
            left_s = max(board.left_s, kept_s)
            return search_lowering(board.made, problem, budget_s=left_s, report=board.report)
        except KeyboardInterrupt:
            board.stopped = True
    return search_lowering(board.made, problem, budget_s=STOPPED_S, report=board.report)


def _cut(board: Board, lowering: Lowering | None) -> str:
    """Why a search for plans might find another one with more time; empty where every candidate was tried."""
    by_clock = sorted({made.maker for made in board.made if not made.maker.startswith(LIBRARY)})
    reasons = [
        f"the budget ended before {', '.join(board.late)}" if board.late else "",
        f"{', '.join(by_clock)} searched by the clock" if by_clock else "",
        "" if lowering is None else lowering.cut,
    ]
    return "; ".join(filter(None, reasons))


def _in_turn(problem: SynthesisProblem, tasks: Sequence[MakerTask], board: Board, *, later: float) -> None:
    """Run tasks one after the other in this process; each gets its share of the time that is left."""
    for at, task in enumerate(tasks):
        if board.skips(task):
            continue
        share = board.left_s * task.weight / (later + sum(rest.weight for rest in tasks[at:]))
        board.report(task.label)
        board.add(attempt(registry.makers()[task.maker], task, problem, max(share, LEAST_S), board.reporter(task)))


def _ordered(candidates: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Sort candidates: the fastest first, then those without a time in the order in which they were added."""
    timed = sorted((c for c in candidates if c.time_us is not None), key=lambda c: c.time_us or 0.0)
    return (*timed, *(c for c in candidates if c.time_us is None))


def _why_nothing(problem: SynthesisProblem, candidates: Sequence[Candidate]) -> str:
    pair = problem.cluster.unreachable() if not problem.cluster.devices_forward else None
    names = problem.cluster.node_names
    why = f"; no route from {names[pair[0]]} to {names[pair[1]]}" if pair else ""
    why += hint(problem.cluster, problem.collective.ranks, problem.helpers)
    reasons = "; ".join(dict.fromkeys(f"{c.maker}: {c.reason}" for c in candidates))
    return f"{problem.collective.kind} on {problem.cluster.name}: no maker succeeded{why} ({reasons})"


def _checked(
    collective: Collective,
    cluster: Cluster,
    nbytes: float,
    sketch: Sketch | None,
    alpha: str,
    contention: str | None,
    seed: int,
    budget_s: float,
    jobs: int,
) -> SynthesisProblem:
    if alpha not in ALPHA:
        raise unknown("alpha mode", alpha, ALPHA)
    if contention is not None and contention not in CONTENTION:
        raise unknown("contention mode", contention, CONTENTION)
    nbytes = check_bytes(nbytes)
    if not (np.isfinite(budget_s) and budget_s > 0):
        raise InvalidInput(f"budget_s: must be finite and > 0, not {budget_s}")
    check_seed(seed)
    if not 1 <= jobs <= MAX_JOBS:
        raise InvalidInput(f"jobs: must be 1..{MAX_JOBS}, not {jobs}")
    if max(collective.ranks) >= cluster.num_devices:
        has = f"{cluster.name} has {cluster.num_devices} devices"
        raise InvalidInput(f"ranks: device {max(collective.ranks)} does not exist; {has}")
    return SynthesisProblem(
        collective=collective,
        cluster=cluster,
        nbytes=nbytes,
        alpha=alpha,
        contention=contention,
        seed=seed,
        sketch=sketch,
    )
