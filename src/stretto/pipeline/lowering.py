# SPDX-License-Identifier: Apache-2.0
"""Adds sends and receives to a schedule of compute actions, in three styles, one for each kind of transport.

`blocking`   a transfer happens just before its consumer, and both ranks wait for its end (as Alpa does).
`mirrored`   a transfer is issued as soon as its data exist; all transfers between two ranks are in the same order on
both
             sides, so that a transport with one queue per pair (NCCL) cannot deadlock.
`ahead`      a send is issued as soon as its data exist, a receive some compute actions before its data are needed; for
             transports that match messages separately in each direction (gloo, UCX, MPI).

The first two are projections of one global order of events onto the ranks, which is why they cannot deadlock.
"""

from __future__ import annotations

from ..errors import InvalidInput, VerificationError, unknown
from .actions import BACKWARD, COMPUTE, FORWARD, REDUCE_GRAD, WEIGHT, Action, receive_of, send_of, source
from .schedule import Schedule

STYLES = ("blocking", "mirrored", "ahead")
AHEAD = 2
"""Default number of compute actions between posting a receive and needing its data."""


def with_comms(schedule: Schedule, style: str = "ahead", *, ahead: int = AHEAD) -> Schedule:
    """Add sends and receives to a schedule, and the reduction of each stage's gradients at its end.

    Communication that the schedule has already is dropped and written anew.

    >>> from stretto.pipeline import one_f_one_b
    >>> print(with_comms(one_f_one_b(2, 2), "mirrored").to_csv(), end="")
    0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD
    1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD

    Args:
        schedule: the schedule; only its compute actions are used.
        style: one of `STYLES`, chosen for the transport (see the module's docstring).
        ahead: for the style ``ahead``: compute actions between posting a receive and needing its data, >= 0.

    Returns:
        The schedule with communication, under the same name.

    Raises:
        InvalidInput: the style is unknown or `ahead` negative.
        VerificationError: the compute actions wait for each other in a circle.
    """
    if style not in STYLES:
        raise unknown("style of communication", style, STYLES)
    if ahead < 0:
        raise InvalidInput(f"ahead: must be >= 0, not {ahead}")
    plain = schedule.compute_only()
    rows = _ahead(plain, ahead) if style == "ahead" else _projected(plain, at_consumer=style == "blocking")
    stages: list[list[int]] = [[] for _ in rows]
    for stage, rank in enumerate(plain.stage_rank):
        stages[rank].append(stage)
    ended = [(*row, *(Action(stage, REDUCE_GRAD) for stage in mine)) for row, mine in zip(rows, stages, strict=True)]
    return Schedule(name=schedule.name, ranks=tuple(ended))


def transfers(schedule: Schedule) -> list[tuple[Action, Action]]:
    """Every compute action that needs the output of another rank, with the receive that delivers it."""
    home, last = schedule.stage_rank, schedule.num_stages - 1
    found = []
    for row in schedule.ranks:
        for action in row:
            other = source(action, last) if action.kind in COMPUTE else -1
            if other >= 0 and home[other] != home[action.stage]:
                found.append((action, receive_of(action)))
    return found


def producer_of(send: Action, splits: bool) -> Action:
    """The compute action whose output is sent; `splits` says whether the backward is split into ``I`` and ``W``."""
    if send.kind == "SEND_F":
        return Action(send.stage, FORWARD, send.microbatch)
    return Action(send.stage, "I" if splits else BACKWARD, send.microbatch)


def ticks(schedule: Schedule) -> dict[Action, tuple[int, int]]:
    """Begin and end of each compute action if each takes one tick (an unsplit backward two) and transfers take none."""
    last = schedule.num_stages - 1
    kinds = {(a.stage, a.microbatch): a.kind for row in schedule.ranks for a in row if a.kind in ("I", BACKWARD)}
    times: dict[Action, tuple[int, int]] = {}
    at, clock = [0] * len(schedule.ranks), [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.ranks):
            while at[rank] < len(row):
                action = row[at[rank]]
                needs = _needs(action, last, kinds)
                if any(need not in times for need in needs):
                    break
                begin = max([clock[rank], *(times[need][1] for need in needs)])
                clock[rank] = begin + (2 if action.kind == BACKWARD else 1)
                times[action] = (begin, clock[rank])
                at[rank] += 1
                moved = True
    stuck = [(rank, row[at[rank]]) for rank, row in enumerate(schedule.ranks) if at[rank] < len(row)]
    if stuck:
        waiting = "; ".join(f"rank {rank} at {action}" for rank, action in stuck[:4])
        raise VerificationError(f"{schedule.name}: deadlock: {waiting}: they wait for what none of them will do")
    return times


def _needs(action: Action, last: int, backward: dict[tuple[int, int], str]) -> list[Action]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind == FORWARD:
        return [Action(stage - 1, FORWARD, microbatch)] if stage else []
    if action.kind == WEIGHT:
        return [Action(stage, "I", microbatch)]
    needs = [Action(stage, FORWARD, microbatch)]
    if stage < last:
        needs.append(Action(stage + 1, backward.get((stage + 1, microbatch), BACKWARD), microbatch))
    return needs


def _projected(schedule: Schedule, *, at_consumer: bool) -> list[list[Action]]:
    times = ticks(schedule)
    events: list[tuple[int, int, int, list[tuple[int, Action]]]] = []
    for action, (begin, _) in times.items():
        events.append((begin, 1, len(events), [(schedule.stage_rank[action.stage], action)]))
    for consumer, receive in transfers(schedule):
        send = send_of(receive)
        moment = times[consumer][0] if at_consumer else times[_producer(times, send)][1]
        ends = [(schedule.stage_rank[send.stage], send), (schedule.stage_rank[receive.stage], receive)]
        events.append((moment, 0, len(events), ends))
    rows: list[list[Action]] = [[] for _ in schedule.ranks]
    for *_, doing in sorted(events):
        for rank, action in doing:
            rows[rank].append(action)
    return rows


def _producer(times: dict[Action, tuple[int, int]], send: Action) -> Action:
    whole = producer_of(send, splits=False)
    return whole if whole in times else producer_of(send, splits=True)


def _ahead(schedule: Schedule, ahead: int) -> list[list[Action]]:
    times = ticks(schedule)
    sends: dict[Action, Action] = {}
    channels: dict[tuple[int, int], list[tuple[tuple[int, int], Action, Action]]] = {}
    place = {action: at for row in schedule.ranks for at, action in enumerate(row)}
    for consumer, receive in transfers(schedule):
        send = send_of(receive)
        producer = _producer(times, send)
        sends[producer] = send
        channel = (schedule.stage_rank[send.stage], schedule.stage_rank[receive.stage])
        channels.setdefault(channel, []).append(((place[producer], 0), consumer, receive))
    posts: dict[tuple[int, int], list[Action]] = {}
    for (_, rank), messages in channels.items():
        # Receives match sends in order: a receive may not be posted after the receive of a later send.
        latest = len(schedule.ranks[rank])
        for _, consumer, receive in sorted(messages, reverse=True):
            latest = min(latest, max(0, place[consumer] - ahead))
            posts.setdefault((rank, latest), []).append(receive)
    rows: list[list[Action]] = []
    for rank, row in enumerate(schedule.ranks):
        done: list[Action] = []
        for at, action in enumerate(row):
            done += reversed(posts.get((rank, at), []))
            done.append(action)
            if action in sends:
                done.append(sends[action])
        rows.append(done)
    return rows
