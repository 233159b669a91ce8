# SPDX-License-Identifier: Apache-2.0
"""The choice among programs for a runtime that runs them as fused steps: our own executor on GPU memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..errors import Infeasible, StrettoError
from ..programs import Program
from ..simulator.priced_fused import usual_call
from .certificate import Candidate, Lowering, ProvedProgram
from .problem import MAX_WIDE, SynthesisProblem


def search_steps(
    programs: Sequence[ProvedProgram],
    problem: SynthesisProblem,
    *,
    budget_s: float,
    report: Callable[[str], None] = lambda message: None,
) -> tuple[ProvedProgram, Lowering]:
    """Time programs as the runtime carries them out by default, small programs first, and return the fastest.

    Args:
        programs: The programs, at least one.
        problem: The problem that they were made for, one whose runtime takes steps (`SynthesisProblem.takes_steps`).
        budget_s: The seconds after which no further program is timed; at least one is.
        report: Called with a line of text for each program.

    Returns:
        The program and how it is carried out.

    Raises:
        Infeasible: The runtime can carry out none of them.
    """
    assert problem.runtime is not None and problem.takes_steps
    deadline = time.monotonic() + budget_s
    best: tuple[ProvedProgram, Lowering] | None = None
    tried: list[Candidate] = []
    left_out = 0
    for made in sorted(programs, key=lambda made: len(made.program.chunk)):
        if best is not None and time.monotonic() > deadline:
            left_out += 1
            continue
        report(f"steps of {made.program.name}")
        try:
            if not isinstance(made.program, Program) or len(made.program.chunk) > MAX_WIDE:
                raise Infeasible(f"{made.program.name}: has more than {MAX_WIDE} transfers")
            call = usual_call(made.program, problem.cluster, nbytes=problem.nbytes, runtime=problem.runtime)
            took = call.graph.total_us()
            if best is None or took < best[1].time_us:
                lowered = made.program.lower(fifo_depth=2)
                best = made, Lowering(lowered=lowered, time_us=took, instances=1, fifo_depth=2, steps=call.form)
        except StrettoError as error:
            tried.append(Candidate(maker=made.maker, name=made.program.name, reason=str(error)))
            continue
        tried.append(Candidate(maker=made.maker, name=f"{made.program.name} {call.form}", time_us=took))
    if best is None:
        raise Infeasible(f"{problem.runtime.name} can run none of {len(tried)} programs, such as {tried[0].reason}")
    made, found = best
    cut = f"the budget ended before {left_out} programs were timed as steps" if left_out else ""
    return made, Lowering(
        lowered=found.lowered, time_us=found.time_us, instances=1, fifo_depth=2, steps=found.steps, tried=tuple(tried),
        cut=cut,
    )  # fmt: skip
