# SPDX-License-Identifier: Apache-2.0
"""`attempt`: one task of a search is run, and each of its programs proved and timed; `Board`: the search so far."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..errors import StrettoError, VerificationError
from ..programs import Program, SymmetricProgram
from ..simulator import Bound, simulate
from ..units import format_us
from .certificate import Candidate, ProvedProgram
from .lowering import too_long
from .maker import Maker
from .matching import serves
from .problem import MakerTask, Progress, SynthesisProblem

CLOSE_ENOUGH = 1e-3
"""The relative distance to the lower bound at which the search ends: no other program could be faster by more."""
LEAST_S = 0.25
"""The least time that a task gets; with less time left, no further task is started."""
KEPT_TO_LOWER = 6
"""The number of programs of one task that are kept for lowering: the fastest may not fit a runtime's limits."""
STOPPED = "the search was stopped (Ctrl-C)"
"""What the certificate of such a search says."""
MAX_REASON = 200
"""The most characters of a crash's message; one that holds the signature of a native function may have thousands."""

WORTHWHILE = 0.999
PATIENCE = 2
"""A task that makes several programs ends after so many in a row that are not faster than this share of the best."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Attempt:
    """The result of one task: all its candidates, and its best programs, fastest first."""

    candidates: list[Candidate] = field(default_factory=list)
    made: list[ProvedProgram] = field(default_factory=list)
    crashed: bool = False
    """Whether the task ended by a bug, or for want of memory or a package: another run of it may find more."""
    stopped: bool = False
    """Whether Ctrl-C ended the task."""

    @classmethod
    def without(cls, task: MakerTask, reason: str, *, crashed: bool = False) -> Attempt:
        """The result of a task that made nothing.

        Args:
            task: The task.
            reason: Why it made nothing, for the certificate.
            crashed: Whether the same task may find more another time.

        Returns:
            The result, with one candidate that holds the reason.
        """
        return cls(candidates=[Candidate(maker=task.label, reason=reason)], crashed=crashed)

    def judge(
        self, program: Program | SymmetricProgram, task: MakerTask, problem: SynthesisProblem, *, seconds: float
    ) -> float:
        """Prove a program, simulate it, and keep it where it is among the best of the task.

        Args:
            program: The program.
            task: The task that made it.
            problem: The problem that it is to solve.
            seconds: The time from the start of the task until the program was made.

        Returns:
            Its time in microseconds.

        Raises:
            VerificationError: The program does not do what the problem's collective asks.
        """
        program.verify()
        if not serves(program.collective, problem):
            raise VerificationError(f"{program.name} does {program.collective!r}, not {problem.collective!r}")
        time_us = simulate(
            program, problem.cluster, nbytes=problem.nbytes, alpha=problem.alpha, contention=problem.contention
        ).total_us
        unfit = too_long(program) if problem.lower else ""
        self.candidates.append(
            Candidate(maker=task.label, name=program.name, time_us=time_us, seconds=round(seconds, 4), reason=unfit)
        )
        if not unfit:
            proved = ProvedProgram(maker=task.label, program=program, time_us=time_us, seconds=seconds)
            keep = KEPT_TO_LOWER if problem.lower else 1
            made = sorted([*self.made, proved], key=lambda made: made.time_us)
            # Where instructions have a price, a coarse program that is slower on the links may be the fastest.
            coarse = sorted(made[keep:], key=lambda made: len(made.program.chunk))[: keep if problem.runtime else 0]
            self.made = [*made[:keep], *sorted(coarse, key=lambda made: made.time_us)]
        return time_us


@dataclass(kw_only=True)
class Board:
    """The state of a search: the candidates so far, the best programs, and the time that is left."""

    bound: Bound
    budget_s: float
    began: float
    progress: Progress | None = None
    candidates: list[Candidate] = field(default_factory=list)
    made: list[ProvedProgram] = field(default_factory=list)
    priced: bool = False
    """Whether instructions have a price, so that a program at the bound of the links may be beaten."""
    crashed: bool = False
    """Whether any task has crashed: the result is then not cached."""
    stopped: bool = False
    """Whether Ctrl-C ended the search: the result is then not cached either."""
    suffices: Callable[[ProvedProgram], bool] = lambda made: True
    """Whether the search may end with a program at the bound: where files are wanted, whether it lowers well."""
    late: list[str] = field(default_factory=list)
    """The tasks that the time did not suffice for."""
    asked: dict[int, bool] = field(default_factory=dict)
    """What `suffices` has said of each program, by its `id`; all of them are kept in `made`."""

    @property
    def left_s(self) -> float:
        """The seconds that are left of the budget; negative once it is overrun."""
        return self.began + self.budget_s - time.monotonic()

    @property
    def best(self) -> ProvedProgram | None:
        """The fastest program so far, or None."""
        return self.made[0] if self.made else None

    def add(self, attempt: Attempt) -> None:
        """Add the result of a task."""
        self.candidates += attempt.candidates
        self.crashed |= attempt.crashed
        self.stopped |= attempt.stopped
        # Sorting is stable: of equally fast programs the one that was made first, by the simpler maker, stays ahead.
        self.made = sorted(self.made + attempt.made, key=lambda made: made.time_us)

    def at_bound(self) -> str:
        """A sentence that says that the best program is at the lower bound; empty while it is not."""
        for made in () if self.priced else self.made:
            if made.time_us > self.bound.total_us * (1 + CLOSE_ENOUGH):
                break
            if id(made) not in self.asked:
                self.asked[id(made)] = self.suffices(made)
            if self.asked[id(made)]:
                return f"{made.program.name} is within {100 * CLOSE_ENOUGH:g} % of the lower bound"
        return ""

    def skips(self, task: MakerTask) -> bool:
        """Whether a task need not be started any more; the reason is then listed as its candidate's."""
        reached = self.at_bound()
        if not reached and self.stopped:
            reached = STOPPED
        elif not reached and self.made and self.left_s < LEAST_S:
            reached = f"the budget of {self.budget_s:g} s was spent"
            self.late.append(task.label)
        if reached:
            self.add(Attempt.without(task, f"not tried: {reached}"))
        return bool(reached)

    def report(self, message: str) -> None:
        """Pass a message, with the best time so far and the share of the budget spent, to `progress`."""
        if self.progress is not None:
            so_far = ""
            if self.best is not None:
                gap = self.best.time_us / self.bound.total_us - 1 if self.bound.total_us > 0 else 0.0
                so_far = f"best {format_us(self.best.time_us)}, {100 * gap:.1f} % above the bound, {self.best.maker}; "
            self.progress(so_far + message, min(1.0, 1 - self.left_s / self.budget_s))

    def reporter(self, task: MakerTask) -> Progress:
        """The progress function for a task's maker."""
        return lambda message, fraction: self.report(f"{task.label}: {message}")


def attempt(maker: Maker, task: MakerTask, problem: SynthesisProblem, budget_s: float, progress: Progress) -> Attempt:
    """Run one task; an error of its maker becomes the reason of a candidate without a time.

    Args:
        maker: The maker that the task belongs to.
        task: The task.
        problem: The problem that it was made for.
        budget_s: The seconds that the task should take at most.
        progress: Takes a line of text and the fraction done, 0..1.

    Returns:
        The candidates and the best programs of the task, those from before Ctrl-C where that ended it. This never
        raises an `Exception`, nor `KeyboardInterrupt` while the maker runs.
    """
    began = time.monotonic()
    result = Attempt()
    best_us, no_gain = float("inf"), 0
    try:
        for program in maker.programs(task, problem, budget_s, progress):
            time_us = result.judge(program, task, problem, seconds=time.monotonic() - began)
            no_gain = 0 if time_us < best_us * WORTHWHILE else no_gain + 1
            best_us = min(best_us, time_us)
            if no_gain == PATIENCE:
                break
    except KeyboardInterrupt:
        result.stopped = True
    except Exception as error:
        # A broken maker must not end the search: its error is listed among the candidates, and logged if it is a bug.
        reason = str(error) if isinstance(error, StrettoError) else f"{type(error).__name__}: {error}"
        if isinstance(error, VerificationError):
            reason = f"wrong program: {error}"
        reason = " ".join(reason.split())
        if not isinstance(error, StrettoError):
            reason, result.crashed = reason[:MAX_REASON], True
        if result.crashed and not isinstance(error, ImportError | MemoryError):
            log.warning("maker %s failed: %s (the result is not kept)", task.label, reason)
            log.debug("maker %s failed", task.label, exc_info=True)
        result.candidates.append(Candidate(maker=task.label, reason=reason, seconds=round(time.monotonic() - began, 4)))
    return result
