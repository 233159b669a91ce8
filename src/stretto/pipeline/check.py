# SPDX-License-Identifier: Apache-2.0
"""Checks of a schedule before it is run: it must be complete, in order, and free of deadlock.

PyTorch matches all messages between two ranks by their order alone: there, a wrong order is not an error but gives
wrong gradients. So the order of sends and receives is proved here, not tried.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidInput, VerificationError, unknown
from .actions import BACKWARD, FORWARD, INPUT, RECEIVES, SENDS, WEIGHT, Action, receive_of, receiver_of, send_of
from .engine import TRANSPORTS, execute
from .lowering import ticks, transfers
from .schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class ScheduleProof:
    """The properties that `check` has proved."""

    transports: tuple[str, ...]
    """Transports over which the schedule cannot deadlock; empty if the schedule has no communication actions."""
    in_flight: tuple[int, ...]
    """The largest number of micro-batches whose activations each stage holds at once."""


def check(schedule: Schedule, *, transport: str | None = None) -> ScheduleProof:
    """Prove a schedule; raises `VerificationError` with the rank and the action that are wrong.

    A schedule with communication actions must be free of deadlock over `transport`, or over at least one of
    `TRANSPORTS` if no transport is named.

    >>> from stretto.pipeline import eager_1f1b, with_comms
    >>> check(with_comms(eager_1f1b(2, 4), "mirrored"))
    ScheduleProof(transports=('async', 'pair', 'blocking'), in_flight=(3, 1))
    """
    if transport is not None and transport not in TRANSPORTS:
        raise unknown("transport", transport, TRANSPORTS)
    _complete(schedule)
    _ordered(schedule)
    if not schedule.has_comms:
        if transport is not None:
            raise InvalidInput(f"{schedule.name}: no communication is written out; use with_comms first")
        ticks(schedule.compute_only())
        return ScheduleProof(transports=(), in_flight=in_flight(schedule))
    _matched(schedule)
    alive, errors = [], []
    for name in TRANSPORTS if transport is None else (transport,):
        try:
            execute(schedule, lambda action: 1.0, name)
            alive.append(name)
        except VerificationError as error:
            errors.append(error)
    if not alive:
        raise errors[0]
    return ScheduleProof(transports=tuple(alive), in_flight=in_flight(schedule))


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """The largest number of micro-batches at each stage between their forward and the end of their backward."""
    live, most = [0] * schedule.num_stages, [0] * schedule.num_stages
    for row in schedule.ranks:
        for action in row:
            if action.kind == FORWARD:
                live[action.stage] += 1
                most[action.stage] = max(most[action.stage], live[action.stage])
            elif action.kind in (BACKWARD, WEIGHT):
                live[action.stage] -= 1
    return tuple(most)


def _complete(schedule: Schedule) -> None:
    if not schedule.num_microbatches:
        raise VerificationError(f"{schedule.name}: computes nothing: no action names a micro-batch")
    seen: set[Action] = set()
    for rank, row in enumerate(schedule.ranks):
        for at, action in enumerate(row):
            if action in seen:
                raise VerificationError(f"{schedule.name}: rank {rank}, action {at}: {action} is there twice")
            seen.add(action)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            kinds = {kind for kind in "FIWB" if Action(stage, kind, microbatch) in seen}
            if kinds not in ({FORWARD, BACKWARD}, {FORWARD, INPUT, WEIGHT}):
                has = "".join(sorted(kinds)) or "nothing"
                raise VerificationError(
                    f"{schedule.name}: stage {stage}, micro-batch {microbatch}: has {has}; needs F and B, or F, I and W"
                )


def _ordered(schedule: Schedule) -> None:
    last = schedule.num_stages - 1
    for rank, row in enumerate(schedule.ranks):
        seen: set[Action] = set()
        newest = -1
        for at, action in enumerate(row):
            before = {FORWARD: "", WEIGHT: INPUT}.get(action.kind, FORWARD) if action.kind in "FIWB" else ""
            if before and Action(action.stage, before, action.microbatch) not in seen:
                raise VerificationError(
                    f"{schedule.name}: rank {rank}, action {at}: {action} comes before its {before}"
                )
            if action.kind == FORWARD and action.stage == last:
                # PyTorch stores the losses of the last stage in the order in which they are computed.
                if action.microbatch < newest:
                    raise VerificationError(
                        f"{schedule.name}: rank {rank}, action {at}: {action} after micro-batch {newest}; "
                        "the last stage's forwards must ascend"
                    )
                newest = action.microbatch
            seen.add(action)


def _matched(schedule: Schedule) -> None:
    home = schedule.stage_rank
    wanted = {receive for _, receive in transfers(schedule)}
    sent: dict[tuple[int, int], list[Action]] = {}
    taken: dict[tuple[int, int], list[Action]] = {}
    for rank, row in enumerate(schedule.ranks):
        done: set[Action] = set()
        for at, action in enumerate(row):
            where = f"{schedule.name}: rank {rank}, action {at}: {action}"
            if action.kind in SENDS:
                receive = receiver_of(action)
                if receive not in wanted:
                    raise VerificationError(f"{where} goes to nobody")
                kinds = (FORWARD,) if action.kind == "SEND_F" else (INPUT, BACKWARD)
                if not any(Action(action.stage, kind, action.microbatch) in done for kind in kinds):
                    raise VerificationError(f"{where} comes before what it sends")
                sent.setdefault((rank, home[receive.stage]), []).append(action)
            elif action.kind in RECEIVES:
                if action not in wanted:
                    raise VerificationError(f"{where} is of no use to this rank")
                taken.setdefault((home[send_of(action).stage], rank), []).append(send_of(action))
            elif action.kind in (FORWARD, INPUT, BACKWARD):
                receive = receive_of(action)
                if receive in wanted and receive not in done:
                    raise VerificationError(f"{where} comes before {receive}")
            done.add(action)
    for channel in sorted(sent.keys() | taken.keys()):
        here, there = sent.get(channel, []), taken.get(channel, [])
        wrong = next((at for at, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), None)
        if wrong is None and len(here) != len(there):
            wrong = min(len(here), len(there))
        if wrong is not None:
            sends = str(here[wrong]) if wrong < len(here) else "nothing"
            takes = str(there[wrong]) if wrong < len(there) else "nothing"
            raise VerificationError(
                f"{schedule.name}: message {wrong} from rank {channel[0]} to {channel[1]} is {sends}, "
                f"where the receiver expects {takes}: gradients would be wrong without any error"
            )
