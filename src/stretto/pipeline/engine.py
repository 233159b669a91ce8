# SPDX-License-Identifier: Apache-2.0
"""Simulates a schedule with communication: compute streams, network ports, and three kinds of transport.

`async`      a send or receive only starts a transfer; a compute action waits for its inputs. A transfer begins once
both
             its send and its receive are issued, and occupies the sender's output port and the receiver's input port.
`pair`       as `async`, but all transfers between two ranks run one after the other, in the order that each rank
issues.
`blocking`   a send or receive holds its rank until the transfer is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from ..errors import VerificationError, unknown
from .actions import COMPUTE, FORWARD, RECEIVES, SENDS, WEIGHT, Action, receive_of, receiver_of, send_of, source
from .schedule import Schedule

TRANSPORTS = ("async", "pair", "blocking")
Duration = Callable[[Action], float]


class ActionSpan(NamedTuple):
    """One action with its times; a transfer has one span, that of its send, on the sender's rank."""

    rank: int
    action: Action
    start_us: float
    end_us: float


class _Engine:
    def __init__(self, schedule: Schedule, duration: Duration, transport: str) -> None:
        self.schedule, self.duration, self.transport = schedule, duration, transport
        self.rows, self.home = schedule.ranks, schedule.stage_rank
        ranks = len(self.rows)
        self.at = [0] * ranks
        self.busy = [False] * ranks
        self.done: set[Action] = set()
        self.spans: list[ActionSpan] = []
        self.events: list[tuple[float, int, int, Action]] = []
        self.issued: set[Action] = set()
        self.ready: deque[Action] = deque()
        self.out_busy = [False] * ranks
        self.in_busy = [False] * ranks
        self.pairs: dict[tuple[int, int], deque[Action]] = {}
        self.now = 0.0

    def run(self) -> list[ActionSpan]:
        for rank in range(len(self.rows)):
            self.advance(rank)
        self.start_transfers()
        while self.events:
            self.now, _, rank, action = heappop(self.events)
            self.done.add(action)
            if action.kind in SENDS:
                self.end_transfer(rank, action)
                self.advance(self.home[receiver_of(action).stage])
            else:
                self.busy[rank] = False
                self.at[rank] += 1
            self.advance(rank)
            if self.ready:
                self.start_transfers()
        stuck = [(rank, row[self.at[rank]]) for rank, row in enumerate(self.rows) if self.at[rank] < len(row)]
        if stuck:
            waiting = "; ".join(f"rank {rank} at {action}" for rank, action in stuck[:4])
            raise VerificationError(f"{self.schedule.name}: deadlock over a {self.transport} transport: {waiting}")
        return self.spans

    def begin(self, rank: int, action: Action) -> None:
        end = self.now + self.duration(action)
        self.spans.append(ActionSpan(rank, action, self.now, end))
        heappush(self.events, (end, len(self.spans), rank, action))

    def advance(self, rank: int) -> None:
        row = self.rows[rank]
        while not self.busy[rank] and self.at[rank] < len(row):
            action = row[self.at[rank]]
            if action.kind in SENDS or action.kind in RECEIVES:
                self.issue(rank, action)
                sent = action if action.kind in SENDS else send_of(action)
                if self.transport == "blocking" and sent not in self.done:
                    return
            elif not self.may_start(action):
                return
            else:
                self.busy[rank] = True
                self.begin(rank, action)
                return
            self.at[rank] += 1

    def may_start(self, action: Action) -> bool:
        if action.kind not in COMPUTE:
            return True
        stage, microbatch = action.stage, action.microbatch
        if action.kind == WEIGHT:
            return Action(stage, "I", microbatch) in self.done
        if action.kind != FORWARD and Action(stage, FORWARD, microbatch) not in self.done:
            return False
        other = source(action, len(self.home) - 1)
        if other < 0:
            return True
        if self.home[other] != self.home[stage]:
            return send_of(receive_of(action)) in self.done
        kinds = (FORWARD,) if action.kind == FORWARD else ("I", "B")
        return any(Action(other, kind, microbatch) in self.done for kind in kinds)

    def issue(self, rank: int, action: Action) -> None:
        if action in self.issued:
            return
        self.issued.add(action)
        send = action if action.kind in SENDS else send_of(action)
        if self.transport == "pair":
            other = self.home[receiver_of(send).stage] if action.kind in SENDS else self.home[send.stage]
            self.pairs.setdefault((rank, other), deque()).append(send)
        if send in self.issued and receiver_of(send) in self.issued:
            self.ready.append(send)

    def start_transfers(self) -> None:
        kept: deque[Action] = deque()
        waiting_out, waiting_in = set[int](), set[int]()
        for send in self.ready:
            out, into = self.home[send.stage], self.home[receiver_of(send).stage]
            # Ports serve transfers in the order of arrival: a waiting transfer keeps later ones from its two ports.
            free = not (self.out_busy[out] or self.in_busy[into] or out in waiting_out or into in waiting_in)
            if free and (self.transport != "pair" or self.heads(out, into, send)):
                self.out_busy[out] = self.in_busy[into] = True
                self.begin(out, send)
            else:
                kept.append(send)
                if self.transport != "pair":
                    waiting_out.add(out)
                    waiting_in.add(into)
        self.ready = kept

    def heads(self, out: int, into: int, send: Action) -> bool:
        return self.pairs[out, into][0] == send and self.pairs[into, out][0] == send

    def end_transfer(self, rank: int, send: Action) -> None:
        into = self.home[receiver_of(send).stage]
        self.out_busy[rank] = self.in_busy[into] = False
        if self.transport == "pair":
            self.pairs[rank, into].popleft()
            self.pairs[into, rank].popleft()


def execute(schedule: Schedule, duration: Duration, transport: str = "async") -> list[ActionSpan]:
    """Simulate a schedule that has its communication written out.

    Args:
        schedule: a schedule with sends and receives (see `with_comms`).
        duration: called once per action that takes time; returns its microseconds, of a send those of the transfer.
        transport: one of `TRANSPORTS`.

    Returns:
        One span per compute action and per transfer, in the order of their start times.

    Raises:
        InvalidInput: the transport is unknown.
        VerificationError: the schedule deadlocks over this transport.
    """
    if transport not in TRANSPORTS:
        raise unknown("transport", transport, TRANSPORTS)
    return _Engine(schedule, duration, transport).run()
