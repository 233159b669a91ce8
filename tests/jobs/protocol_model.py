# SPDX-License-Identifier: Apache-2.0
"""A model of a small job that runs the protocol's own code, and a search through everything that can happen in it.

The network is the set of all messages ever sent: each may arrive now, later, again, or never, in any order. So loss,
delay, duplication and reordering need no events of their own. The controller may die at any step and come back with
its number file or without; ranks may die, which ends a PyTorch job, and all be started again with another model; the
training step may change under a plan, or be another one for a while. Ranks train at their own pace, one iteration
apart at most, as collectives make them, and agree in band by exchanging what each of them has committed at the start of
an iteration.

States are tuples of numbers that stand for the values in `Table`s, so that what one part does is computed once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Generic, NamedTuple, TypeVar

from stretto.control.messages import PLAIN, Nothing, PlanId, Prepare, RankState, Reply
from stretto.control.protocol import ControllerSide, RankSide, agreed, answer, captured, obey, propose, retire

T = TypeVar("T", bound=Hashable)
DEAD = -1


@dataclass(frozen=True, kw_only=True)
class Case:
    """Which plans are proposed in turn (hash, and digest of the step they are for), and how much may go wrong."""

    ranks: int
    plans: tuple[tuple[str, str], ...]
    deaths: int = 0
    """Of the controller."""
    restarts: int = 0
    """Of the whole job, with another model."""
    changes: int = 0
    """Of the training step under a plan."""
    rests: int = 0
    """Of a plan whose step is another one for a while."""
    refusing: tuple[tuple[int, str], ...] = ()
    """(rank, hash): what a rank's data plane cannot load."""
    failing: tuple[tuple[int, str], ...] = ()
    """(rank, hash): what it voted yes on and then cannot commit."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank: its half of the protocol, and a data plane that says which plan runs in which iteration."""

    at: int
    side: RankSide
    ahead: int = 0
    """Iterations beyond the slowest rank: 0 or 1."""
    active: PlanId = PLAIN
    barred: int = 0
    asleep: int = 0
    """The plan that rests, until this rank has seen its step again."""
    offer: PlanId = PLAIN
    """What it has put into the exchange of this iteration."""
    before: PlanId = PLAIN
    """And of the one before, which slower ranks have yet to read."""
    beat: int = 0


class State(NamedTuple):
    """Everything: numbers into the tables, and sets of messages as bits."""

    ranks: tuple[int, ...]
    job: int
    disk: int = 0
    """The last number that the controller has written down."""
    up: int = 0
    down: int = 0
    proposed: int = 0
    deaths: int = 0
    restarts: int = 0
    changes: int = 0
    rests: int = 0


class Table(Generic[T]):
    """Values and their numbers."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def __getitem__(self, number: int) -> T:
        return self.values[number]

    def number(self, value: T) -> int:
        """The value's own number."""
        found = self._numbers.setdefault(value, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found


@dataclass
class Plane:
    """The data plane as the protocol sees it."""

    refuses: frozenset[str] = frozenset()
    fails: frozenset[str] = frozenset()
    loaded: list[Prepare] = field(default_factory=list)

    def prepare(self, order: Prepare) -> str:
        self.loaded.append(order)
        return "cannot be built" if order.plan.hash in self.refuses else ""

    def commit(self, plan: PlanId) -> str:
        return "broken" if plan.hash in self.fails else ""

    def discard(self, number: int) -> None:
        pass


class Model:
    """One case; `explore` visits every reachable state and checks each."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rank_table: Table[Rank] = Table()
        self.jobs: Table[ControllerSide] = Table()
        self.said: Table[RankState] = Table()
        self.replies: Table[tuple[int, Reply]] = Table()
        # What each part does depends on little of the whole.
        self.hears = cache(self._hears)
        self.told = cache(self._told)
        self.trains = cache(self._trains)
        self.changes = cache(self._changes)
        self.rests = cache(self._rests)
        self.proposes = cache(self._proposes)
        self.check_ranks = cache(self._check_ranks)
        self.said_by = cache(self._said)
        self._settled: set[State] = set()

    def explore(self) -> int:
        """How many states there are; raises `AssertionError` in one that breaks a promise."""
        start = self.first()
        seen, todo = {start}, [start]
        while todo:
            state = todo.pop()
            self.check_ranks(state.ranks)
            self.check_settles(state)
            for after in self.steps(state):
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        return len(seen)

    def first(self) -> State:
        """A job that has just begun, and a controller that has not heard of it."""
        ranks = self._fresh(0)
        return State(ranks=ranks, job=self.jobs.number(ControllerSide.start(0, self.case.ranks)), up=self._sent(ranks))

    def steps(self, state: State) -> Iterator[State]:
        """Everything that may happen next."""
        for at in range(self.case.ranks):
            ranks = self.trains(state.ranks, at)
            if ranks is not None:
                yield state._replace(ranks=ranks, up=state.up | self._sent(ranks))
        for number in _bits(state.down):
            ranks = self.told(state.ranks, number)
            yield state._replace(ranks=ranks, up=state.up | self._sent(ranks))
        if state.job == DEAD:
            for last in {state.disk, 0}:
                yield state._replace(job=self.jobs.number(ControllerSide.start(0, self.case.ranks, last)))
        else:
            for number in _bits(state.up):
                job, reply = self.hears(state.job, number)
                yield state._replace(job=job, down=state.down | (1 << reply if reply is not None else 0))
            given = self.proposes(state.job, state.proposed)
            if given is not None:
                yield state._replace(job=given, disk=self.jobs[given].last, proposed=state.proposed + 1)
            if state.deaths < self.case.deaths:
                yield state._replace(job=DEAD, deaths=state.deaths + 1)
        if state.restarts < self.case.restarts:
            ranks = self._fresh(state.restarts + 1)
            yield state._replace(ranks=ranks, restarts=state.restarts + 1, up=state.up | self._sent(ranks))
        for at in range(self.case.ranks):
            if self.rank_table[state.ranks[at]].asleep:
                yield state._replace(ranks=self._woken(state.ranks, at))
        rested = self.rests(state.ranks) if state.rests < self.case.rests else None
        if rested is not None:
            yield state._replace(ranks=rested, rests=state.rests + 1, up=state.up | self._sent(rested))
        changed = self.changes(state.ranks) if state.changes < self.case.changes else None
        if changed is not None:
            yield state._replace(ranks=changed, changes=state.changes + 1, up=state.up | self._sent(changed))

    # What can happen.

    def _hears(self, job: int, said: int) -> tuple[int, int | None]:
        """The controller takes in a message, and answers."""
        state = self.said[said]
        after, order = answer(self.jobs[job], state)
        reply = None
        if not isinstance(order, Nothing):
            reply = self.replies.number((state.rank, Reply(epoch=after.epoch, order=order)))
        return self.jobs.number(after), reply

    def _told(self, ranks: tuple[int, ...], reply: int) -> tuple[int, ...]:
        """A rank takes in an answer."""
        at, what = self.replies[reply]
        rank = self.rank_table[ranks[at]]
        refuses = frozenset(hash for who, hash in self.case.refusing if who == at)
        plane = Plane(refuses=refuses, fails=frozenset(hash for who, hash in self.case.failing if who == at))
        side = obey(rank.side, what, plane)
        for order in plane.loaded:
            assert order.digest == rank.side.digest, "a plan for another model was loaded"
        return self._put(ranks, replace(rank, side=side)) if side != rank.side else ranks

    def _trains(self, ranks: tuple[int, ...], at: int) -> tuple[int, ...] | None:
        """A rank ends its iteration and begins the next, if the others have begun this one."""
        all_ranks = [self.rank_table[number] for number in ranks]
        rank = all_ranks[at]
        if rank.ahead:
            return None
        target = agreed([other.before if other.ahead else other.offer for other in all_ranks])
        active = rank.active
        if target is not None and target.number > max(active.number, rank.barred):
            assert target.number in rank.side.held, f"rank {at} is to switch to {target}, which it does not hold"
            active = target
        side = retire(rank.side, active, Plane())
        offer = side.committed if side.committed.number > max(rank.barred, rank.asleep) else PLAIN
        asleep = rank.asleep if active == rank.active else 0
        after = replace(rank, side=side, ahead=1, active=active, asleep=asleep, before=rank.offer, offer=offer)
        ranks = self._put(ranks, after)
        if all(self.rank_table[number].ahead for number in ranks):
            ranks = tuple(
                self.rank_table.number(replace(self.rank_table[number], ahead=0, before=PLAIN)) for number in ranks
            )
        return ranks

    def _changes(self, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
        """The training step leaves its plan: all ranks see it at the same call, and record the step again."""
        all_ranks = [self.rank_table[number] for number in ranks]
        if any(rank.ahead for rank in all_ranks) or not all_ranks[0].active.number:
            return None
        for rank in all_ranks:
            side = captured(rank.side, rank.side.digest + "'", Plane())
            ranks = self._put(ranks, replace(rank, side=side, active=PLAIN, barred=rank.active.number))
        return ranks

    def _rests(self, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
        """The step is another one for a while: all ranks see it at the same call. Offers of its plan are void."""
        all_ranks = [self.rank_table[number] for number in ranks]
        if any(rank.ahead for rank in all_ranks) or not all_ranks[0].active.number:
            return None
        for rank in all_ranks:
            offer = PLAIN if rank.offer == rank.active else rank.offer
            ranks = self._put(ranks, replace(rank, active=PLAIN, offer=offer, asleep=rank.active.number))
        return ranks

    def _woken(self, ranks: tuple[int, ...], at: int) -> tuple[int, ...]:
        """A rank has seen the plan's own step again."""
        return self._put(ranks, replace(self.rank_table[ranks[at]], asleep=0))

    def _proposes(self, job: int, proposed: int) -> int | None:
        """The controller gives out the next plan."""
        if proposed == len(self.case.plans) or not self.jobs[job].may_propose:
            return None
        hash, digest = self.case.plans[proposed]
        return self.jobs.number(propose(self.jobs[job], hash, digest))

    # What must hold.

    def _check_ranks(self, ranks: tuple[int, ...]) -> None:
        all_ranks = [self.rank_table[number] for number in ranks]
        for ahead in (0, 1):
            plans = {rank.active for rank in all_ranks if rank.ahead == ahead}
            assert len(plans) <= 1, f"two plans in one iteration: {plans}"
        for rank in all_ranks:
            assert rank.active == PLAIN or rank.active.number in rank.side.held
            assert rank.side.committed.number in (0, *rank.side.held) or rank.side.committed.number <= rank.barred
        # Never a hang: with no message at all, every rank gets to its next iteration.
        advanced = set()
        for _ in range(2):
            for at in range(self.case.ranks):
                moved = self.trains(ranks, at)
                if moved is not None:
                    ranks = moved
                    advanced.add(at)
        assert len(advanced) == self.case.ranks

    def check_settles(self, state: State) -> None:
        """Without further faults all is decided, and decided alike; no way is followed twice."""
        way: list[State] = []
        now = state._replace(up=0, down=0)
        while now not in self._settled:
            way.append(now)
            assert len(way) < 200, "never settles"
            after = self._calm(now)
            if after == now:
                self._check_end(now)
                break
            now = after
        self._settled.update(way)

    def _calm(self, state: State) -> State:
        """One round in which nothing goes wrong: a controller is there, every rank polls, every rank trains."""
        ranks, job = state.ranks, state.job
        if job == DEAD:
            job = self.jobs.number(ControllerSide.start(0, self.case.ranks, state.disk))
        for at in range(self.case.ranks):
            job, reply = self.hears(job, self.said_by(ranks[at]))
            ranks = self.told(ranks, reply) if reply is not None else ranks
        for at in range(self.case.ranks):
            ranks = self._woken(ranks, at)
        for at in range(self.case.ranks):
            ranks = self.trains(ranks, at) or ranks
        given = self.proposes(job, state.proposed)
        proposed = state.proposed + (given is not None)
        if given is None and proposed == len(self.case.plans) and self._wanted(ranks):
            # A controller that lost its memory, or met a number that was taken, plans again.
            given = self.proposes(job, proposed - 1)
        return state._replace(ranks=ranks, job=job if given is None else given, proposed=proposed)

    def _wanted(self, ranks: tuple[int, ...]) -> bool:
        """Whether the last plan can and should be running, and is not."""
        rank = self.rank_table[ranks[0]]
        hash, digest = self.case.plans[-1]
        possible = digest == rank.side.digest and hash not in self._hopeless()
        return possible and rank.active.hash != hash

    def _check_end(self, state: State) -> None:
        job, ranks = self.jobs[state.job], [self.rank_table[number] for number in state.ranks]
        assert state.proposed == len(self.case.plans)
        assert job.may_propose, f"undecided for ever: {job.phase}"
        assert len({rank.active for rank in ranks}) == 1
        assert not self._wanted(state.ranks), "a plan that nobody refuses never runs"
        refused = {hash for hash, digest in self.case.plans if digest != ranks[0].side.digest}
        assert ranks[0].active.hash not in refused | self._hopeless(), "a refused plan runs"

    # Small parts.

    def _hopeless(self) -> set[str]:
        return {hash for _, hash in (*self.case.refusing, *self.case.failing)}

    def _fresh(self, epoch: int) -> tuple[int, ...]:
        side = RankSide(epoch=epoch, digest="ABC"[epoch])
        return tuple(self.rank_table.number(Rank(at=at, side=side)) for at in range(self.case.ranks))

    def _put(self, ranks: tuple[int, ...], rank: Rank) -> tuple[int, ...]:
        """A rank changed; a change that others can hear of makes its next message a newer one."""
        old = self.rank_table[ranks[rank.at]]
        if (rank.side, rank.active, rank.barred) != (old.side, old.active, old.barred):
            rank = replace(rank, beat=old.beat + 1)
        return (*ranks[: rank.at], self.rank_table.number(rank), *ranks[rank.at + 1 :])

    def _sent(self, ranks: tuple[int, ...]) -> int:
        """What these ranks say, as bits: sending is always possible, so it is done at once."""
        sent = 0
        for number in ranks:
            sent |= 1 << self.said_by(number)
        return sent

    def _said(self, number: int) -> int:
        rank = self.rank_table[number]
        return self.said.number(
            RankState(
                job="j", epoch=rank.side.epoch, rank=rank.at, size=self.case.ranks, beat=rank.beat,
                digest=rank.side.digest, ballot=rank.side.ballot, committed=rank.side.committed, active=rank.active,
                barred=rank.barred,
            )
        )  # fmt: skip


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
