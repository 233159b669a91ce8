# SPDX-License-Identifier: Apache-2.0
"""Makers of schedules, by name. All but `interleaved` have one stage per rank and differ only in two numbers per stage.

A stage begins with `warmup` forwards, then alternates one backward and one forward. With a `delay` the backward is
split: the weight gradient of a micro-batch follows the input gradient of the `delay`-th micro-batch after it.

A maker is called as ``maker(stages, microbatches)`` and returns a `Schedule` of compute actions only; `with_comms` adds
the communication. A new maker is one function and one entry of `MAKERS`; `check` proves its schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import InvalidInput, unknown
from .actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action
from .schedule import Schedule, check_counts, per_stage

FULL = -1
"""The value of `delay` for a backward that is not split."""


def paced(
    stages: int,
    microbatches: int,
    *,
    warmup: int | Sequence[int],
    delay: int | Sequence[int] = FULL,
    name: str = "paced",
) -> Schedule:
    """The schedule with the given warm-ups and delays.

    >>> print(paced(2, 4, warmup=[3, 1], delay=1).to_csv(), end="")
    0F0,0F1,0F2,0I0,0F3,0I1,0W0,0I2,0W1,0I3,0W2,0W3
    1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1F3,1I3,1W2,1W3

    Args:
        stages: number of stages, one per rank, 1..4096.
        microbatches: micro-batches of an iteration, 1..65536.
        warmup: forwards before the first backward, >= 1; one number for all stages or one per stage.
        delay: micro-batches by which the weight gradient follows the input gradient, >= 0, or `FULL` for an unsplit
            backward; one number for all stages or one per stage.
        name: name of the schedule.

    Returns:
        The compute actions of every rank; they may deadlock if a stage has a smaller warm-up than the next.

    Raises:
        InvalidInput: a number is out of range, or there is not one number per stage.
    """
    check_counts(stages, microbatches)
    warmups = per_stage("warmup", warmup, stages, 1, 1 << 16)
    delays = per_stage("delay", delay, stages, FULL, 1 << 16)
    rows = [
        _row(stage, microbatches, min(warm, microbatches), late)
        for stage, (warm, late) in enumerate(zip(warmups, delays, strict=True))
    ]
    return Schedule(name=name, ranks=tuple(rows))


def _row(stage: int, microbatches: int, warmup: int, delay: int) -> tuple[Action, ...]:
    row = [Action(stage, FORWARD, at) for at in range(warmup)]
    for at in range(microbatches):
        row.append(Action(stage, BACKWARD if delay == FULL else INPUT, at))
        if 0 <= delay <= at:
            row.append(Action(stage, WEIGHT, at - delay))
        if warmup + at < microbatches:
            row.append(Action(stage, FORWARD, warmup + at))
    if delay > 0:
        row += [Action(stage, WEIGHT, at) for at in range(max(0, microbatches - delay), microbatches)]
    return tuple(row)


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al., 2019)."""
    return paced(stages, microbatches, warmup=microbatches, name="gpipe")


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """The smallest warm-up that fills the pipeline: stage i of n (from 1) begins with n - i + 1 forwards."""
    warmup = [stages - at for at in range(stages)]
    return paced(stages, microbatches, warmup=warmup, name="1f1b")


def eager_1f1b(stages: int, microbatches: int, *, delay: int | Sequence[int] = FULL) -> Schedule:
    """Forwards run ahead, so that compute hides the transfers: stage i of n (from 1) begins with 2 (n - i) + 1
    forwards.

    >>> [sum(action.kind == "F" for action in row[:5]) for row in eager_1f1b(3, 8).ranks]
    [5, 4, 3]

    Args:
        stages: number of stages, one per rank.
        microbatches: micro-batches of an iteration.
        delay: as for `paced`; `FULL` keeps backwards unsplit.

    Returns:
        The compute actions of every rank.

    Raises:
        InvalidInput: a number is out of range.
    """
    return paced(stages, microbatches, warmup=eager_warmup(stages), delay=delay, name="eager_1f1b")


def eager_warmup(stages: int) -> list[int]:
    """The number of forwards with which each stage of eager-1F1B begins."""
    return [2 * (stages - at) - 1 for at in range(stages)]


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """Zero bubble, hand-made 1: later stages delay weight gradients; none holds more than the first stage of 1F1B."""
    warmup = [stages - at for at in range(stages)]
    return paced(stages, microbatches, warmup=warmup, delay=list(range(stages)), name="zb_h1")


def zb_h2(stages: int, microbatches: int) -> Schedule:
    """Zero bubble, hand-made 2: twice the memory, and no stage waits between the first and the last micro-batch."""
    delay = [2 * at for at in range(stages)]
    return paced(stages, microbatches, warmup=eager_warmup(stages), delay=delay, name="zb_h2")


def interleaved(stages: int, microbatches: int, *, per_rank: int = 2) -> Schedule:
    """Several stages per rank, round robin; each round has as many micro-batches as there are ranks (Megatron-LM).

    Args:
        stages: number of stages of the model, a multiple of `per_rank`.
        microbatches: micro-batches of an iteration, a multiple of the number of ranks.
        per_rank: stages on each rank, 1..stages.

    Returns:
        The compute actions of ``stages / per_rank`` ranks.

    Raises:
        InvalidInput: a number is out of range or does not divide.
    """
    check_counts(stages, microbatches)
    if not 1 <= per_rank <= stages or stages % per_rank:
        raise InvalidInput(f"per_rank: {stages} stages cannot be dealt out {per_rank} to each rank")
    ranks = stages // per_rank
    if microbatches % ranks:
        raise InvalidInput(f"microbatches: must be a multiple of the {ranks} ranks, not {microbatches}")
    rows = []
    for rank in range(ranks):
        total = microbatches * per_rank
        warmup = min(total, (per_rank - 1) * ranks + 2 * (ranks - 1 - rank))

        def step(at: int, kind: str, rank: int = rank) -> Action:
            chunk = (at // ranks) % per_rank
            if kind == BACKWARD:
                chunk = per_rank - 1 - chunk
            return Action(chunk * ranks + rank, kind, at // (ranks * per_rank) * ranks + at % ranks)

        row = [step(at, FORWARD) for at in range(warmup)]
        for at in range(total):
            if warmup + at < total:
                row.append(step(warmup + at, FORWARD))
            row.append(step(at, BACKWARD))
        rows.append(tuple(row))
    return Schedule(name="interleaved", ranks=tuple(rows))


MAKERS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "eager_1f1b": eager_1f1b,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
}


def make(name: str, stages: int, microbatches: int) -> Schedule:
    """A schedule by the name of its maker.

    >>> make("1f1b", 2, 3).ranks[0]
    (0F0, 0F1, 0B0, 0F2, 0B1, 0B2)

    Args:
        name: one of `MAKERS`.
        stages: number of stages, 1..4096.
        microbatches: micro-batches of an iteration, 1..65536.

    Returns:
        The compute actions of every rank.

    Raises:
        InvalidInput: the name is unknown or a count out of range.
    """
    if name not in MAKERS:
        raise unknown("schedule", name, MAKERS)
    return MAKERS[name](stages, microbatches)
