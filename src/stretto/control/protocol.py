# SPDX-License-Identifier: Apache-2.0
"""The two-phase commit as two pure state machines: no time, no input or output; docs/protocol.md tells the story.

A rank holds its `RankSide`, the controller a `ControllerSide` for each running job. `answer` is what a controller does
with a rank's message, `obey` what a rank does with the reply. The real processes and the exhaustive model of the
tests run this same code.

The decision is a function of the votes: a plan on which every rank has voted yes is committed, one that somebody
refused is aborted. As ranks keep their votes and repeat them in every message, a controller that has forgotten
everything comes to the same decision. Which iteration switches is not decided here but between the ranks themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from ..errors import InvalidInput
from .messages import (
    PLAIN,
    Abort,
    Ballot,
    Commit,
    Nothing,
    Order,
    PlanId,
    Prepare,
    Profile,
    RankState,
    Reply,
)

Phase = Literal["gathering", "idle", "preparing", "refused", "committed", "active"]
OTHER_MODEL = "it was made for another training step"
ABORTED = "another rank refused it"
CAPTURED_AGAIN = "the training step was recorded again"


class Plane(Protocol):
    """What a rank's half of the protocol does to the data plane."""

    def prepare(self, order: Prepare) -> str:
        """Load a plan; returns why not, empty when it is ready."""

    def commit(self, plan: PlanId) -> str:
        """Let the plan be switched to; returns why not, which can only be a fault."""

    def discard(self, number: int) -> None:
        """Unload a plan that will not run any more."""


@dataclass(frozen=True, kw_only=True)
class RankSide:
    """A rank's half: what it was asked for, how it voted, what it may switch to."""

    epoch: int
    digest: str = ""
    ballot: Ballot | None = None
    committed: PlanId = PLAIN
    held: tuple[int, ...] = ()
    """The numbers of the plans that the data plane holds."""

    @property
    def voted(self) -> int:
        """The highest number that it voted on."""
        return self.ballot.plan.number if self.ballot is not None else 0


def captured(rank: RankSide, digest: str, plane: Plane) -> RankSide:
    """The training step was recorded: a yes for a plan of the old one is withdrawn, unless it is committed.

    Args:
        rank: The rank as it was.
        digest: The recorded step's digest.
        plane: What holds the rank's plans.

    Returns:
        The rank as it is now.
    """
    if digest == rank.digest:
        return rank
    return replace(_without_ballot(rank, CAPTURED_AGAIN, plane), digest=digest)


def obey(rank: RankSide, reply: Reply, plane: Plane) -> RankSide:
    """Carry out a reply, if it still applies; a rank that has heard it before does nothing.

    Args:
        rank: The rank as it was.
        reply: What the controller answered.
        plane: What holds the rank's plans, and prepares and commits them.

    Returns:
        The rank as it is now.
    """
    if reply.epoch != rank.epoch:
        return rank
    match reply.order:
        case Prepare() as order:
            return _prepare(rank, order, plane)
        case Commit(plan=plan) if _open(rank, plan):
            why = plane.commit(plan)
            # The others may have committed by now. They keep what they run, as this rank will never offer the plan.
            return _without_ballot(rank, why, plane) if why else replace(rank, committed=plan)
        case Abort(plan=plan) if _open(rank, plan):
            return _without_ballot(rank, ABORTED, plane, told=True)
        case _:
            return rank


def retire(rank: RankSide, active: PlanId, plane: Plane) -> RankSide:
    """Let go of plans older than the active one.

    Nothing newer may go: a plan that was offered to the other ranks can become active an iteration later.

    Args:
        rank: The rank as it was.
        active: The plan that runs.
        plane: What holds the rank's plans.

    Returns:
        The rank as it is now.
    """
    old = [number for number in rank.held if number < active.number]
    for number in old:
        plane.discard(number)
    return replace(rank, held=tuple(number for number in rank.held if number not in old)) if old else rank


def _prepare(rank: RankSide, order: Prepare, plane: Plane) -> RankSide:
    if order.plan.number <= max(rank.voted, rank.committed.number):
        return rank
    rank = _without_ballot(rank, "", plane)
    # A digest of its own in the order, so that a plan for another model is not even loaded.
    why = plane.prepare(order) if order.digest == rank.digest else OTHER_MODEL
    held = rank.held if why else (*rank.held, order.plan.number)
    return replace(rank, ballot=Ballot(plan=order.plan, yes=not why, why=why), held=held)


def _open(rank: RankSide, plan: PlanId) -> bool:
    """Whether this rank has voted yes on the plan and has not been told how it ended."""
    ballot = rank.ballot
    return ballot is not None and ballot.yes and ballot.plan == plan and rank.committed.number < plan.number


def _without_ballot(rank: RankSide, why: str, plane: Plane, *, told: bool = False) -> RankSide:
    ballot = rank.ballot
    if ballot is None or not _open(rank, ballot.plan):
        return rank
    number = ballot.plan.number
    plane.discard(number)
    held = tuple(other for other in rank.held if other != number)
    return replace(rank, ballot=Ballot(plan=ballot.plan, yes=False, why=why, told=told), held=held)


@dataclass(frozen=True, kw_only=True)
class RankView:
    """What a controller remembers of a rank."""

    beat: int
    digest: str
    ballot: Ballot | None
    committed: PlanId
    active: PlanId
    barred: int


@dataclass(frozen=True, kw_only=True)
class ControllerSide:
    """A controller's half, for one start of one job. Only `last` should outlive it, and even that may be lost."""

    epoch: int
    ranks: tuple[RankView | None, ...]
    proposal: PlanId | None = None
    digest: str = ""
    """The digest of the step that the proposal was made for."""
    last: int = 0
    """No plan has a number above this one."""
    profile: str = ""
    """The digest of a step that is to be recorded again."""

    @staticmethod
    def start(epoch: int, size: int, last: int = 0) -> ControllerSide:
        """A job of which nothing has been heard.

        Args:
            epoch: Which start of the job it is.
            size: The number of ranks.
            last: The highest number that a plan has had.

        Returns:
            The job.
        """
        return ControllerSide(epoch=epoch, ranks=(None,) * size, last=last)

    @property
    def heard(self) -> tuple[RankView, ...]:
        """The ranks that have been heard."""
        return tuple(view for view in self.ranks if view is not None)

    @property
    def complete(self) -> bool:
        """Whether all ranks have been heard, and have recorded the same step."""
        return all(view is not None for view in self.ranks) and len({view.digest for view in self.heard}) == 1

    @property
    def phase(self) -> Phase:
        """How far the proposal is."""
        if any(view is None for view in self.ranks):
            return "gathering"
        if self.proposal is None:
            return "idle"
        if _all_yes(self, self.proposal):
            return "active" if all(view.active == self.proposal for view in self.heard) else "committed"
        return "refused" if _refused(self, self.proposal) else "preparing"

    @property
    def may_propose(self) -> bool:
        """Whether a new plan may be given out: all ranks are known, and what came before it is decided.

        A committed plan that is not active yet counts as decided once a rank says that it gave it up.
        """
        if not self.complete or not self.heard[0].digest:
            return False
        given_up = self.proposal is not None and any(view.barred >= self.proposal.number for view in self.heard)
        return self.phase in ("idle", "refused", "active") or (self.phase == "committed" and given_up)


def propose(job: ControllerSide, hash: str, digest: str) -> ControllerSide:
    """Give out a plan under the next number. `last` of the result must be on disk before anybody hears of it.

    Args:
        job: The job as it was.
        hash: The plan's content hash.
        digest: The step that the plan is for.

    Returns:
        The job as it is now.

    Raises:
        InvalidInput: Another proposal is still open.
    """
    if not job.may_propose:
        raise InvalidInput(f"propose: the job is {job.phase}, so no new plan may be given out")
    number = job.last + 1
    return replace(job, proposal=PlanId(number, hash), digest=digest, last=number, profile="")


def ask_profile(job: ControllerSide) -> ControllerSide:
    """Have the step recorded again: this one fits no more."""
    return replace(job, profile=job.heard[0].digest if job.complete else "")


def answer(job: ControllerSide, state: RankState) -> tuple[ControllerSide, Order]:
    """Take in a rank's state and say what it should do.

    Old news, and messages of a job's earlier start, change nothing.
    """
    if state.epoch > job.epoch:
        job = ControllerSide.start(state.epoch, state.size, job.last)
    if state.epoch < job.epoch or state.size != len(job.ranks) or state.rank >= state.size:
        return job, Nothing()
    known = job.ranks[state.rank]
    if known is not None and state.beat < known.beat:
        return job, Nothing()
    view = RankView(
        beat=state.beat, digest=state.digest, ballot=state.ballot, committed=state.committed, active=state.active,
        barred=state.barred,
    )  # fmt: skip
    ranks = (*job.ranks[: state.rank], view, *job.ranks[state.rank + 1 :])
    voted = state.ballot.plan.number if state.ballot is not None else 0
    job = replace(job, ranks=ranks, last=max(job.last, voted, state.committed.number, state.active.number))
    job = _adopt(job)
    return job, _order(job, view)


def _adopt(job: ControllerSide) -> ControllerSide:
    """A controller that was started again finishes what the one before it had all votes for."""
    if job.proposal is not None or any(view is None for view in job.ranks):
        return job
    first = job.heard[0].ballot
    if first is None or not _all_yes(job, first.plan):
        return job
    return replace(job, proposal=first.plan, digest=job.heard[0].digest)


def _order(job: ControllerSide, view: RankView) -> Order:
    plan = job.proposal
    if job.profile and view.digest == job.profile:
        return Profile(digest=job.profile)
    if plan is None:
        return Nothing()
    if _all_yes(job, plan):
        return Commit(plan=plan) if view.committed.number < plan.number else Nothing()
    ballot = view.ballot
    if _refused(job, plan):
        open_here = ballot is not None and ballot.yes and ballot.plan == plan and view.committed != plan
        return Abort(plan=plan) if open_here else Nothing()
    if ballot is None or ballot.plan.number < plan.number:
        return Prepare(plan=plan, digest=job.digest)
    return Nothing()


def _all_yes(job: ControllerSide, plan: PlanId) -> bool:
    return all(
        view is not None and view.ballot is not None and view.ballot.yes and view.ballot.plan == plan
        for view in job.ranks
    )


def _refused(job: ControllerSide, plan: PlanId) -> bool:
    """Somebody said no, or has gone on to another plan of that number or above (of a controller that is gone)."""
    ballots = [view.ballot for view in job.heard if view.ballot is not None]
    yes = Ballot(plan=plan, yes=True)
    return any(ballot.plan.number >= plan.number and ballot != yes for ballot in ballots)


def agreed(offers: Sequence[PlanId]) -> PlanId | None:
    """What all ranks switch to, given what each offers: the plan that all of them hold as committed, or nothing.

    The least number alone would not do: where a plan was refused by some and a later one reached only others, the
    least is not a plan that all of them hold. Number and hash must be the same everywhere.

    >>> agreed([PlanId(2, "b"), PlanId(1, "a")]) is None
    True
    """
    return offers[0] if all(offer == offers[0] for offer in offers) else None
