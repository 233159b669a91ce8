# SPDX-License-Identifier: Apache-2.0
"""Every interleaving of the protocol's own code, with every fault, over small jobs; and that the search finds bugs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import protocol_model
import pytest
from protocol_model import Case, Model

from stretto.control import protocol
from stretto.control.messages import PlanId, Reply
from stretto.control.protocol import RankSide

ONE = (("a", "A"),)
TWO = (("a", "A"), ("b", "A"))
CASES = {
    "two ranks, two plans, a controller that dies": Case(ranks=2, plans=TWO, deaths=1),
    "two ranks, one plan, a controller that dies twice": Case(ranks=2, plans=ONE, deaths=2),
    "three ranks, two plans": Case(ranks=3, plans=TWO),
    "three ranks, one plan, a controller that dies": Case(ranks=3, plans=ONE, deaths=1),
    "a rank cannot load the first plan, the controller dies": Case(ranks=2, plans=TWO, deaths=1, refusing=((0, "a"),)),
    "a rank cannot load the last plan": Case(ranks=3, plans=TWO, refusing=((2, "b"),)),
    "a rank cannot commit what it voted for, the controller dies": Case(
        ranks=2, plans=TWO, deaths=1, failing=((1, "a"),)
    ),
    "all ranks are started again with another model": Case(ranks=2, plans=(("a", "A"), ("b", "B")), restarts=1),
    "a plan for another model": Case(ranks=3, plans=(("a", "A"), ("b", "B"))),
    "a plan for the model before the restart": Case(ranks=2, plans=TWO, restarts=1),
    "the step changes under a plan, the controller dies": Case(
        ranks=2, plans=(("a", "A"), ("b", "A'")), changes=1, deaths=1
    ),
    "a plan rests and comes back, the controller dies": Case(ranks=2, plans=ONE, rests=1, deaths=1),
    "a plan rests and comes back while the next is given out": Case(ranks=2, plans=TWO, rests=1),
    "a plan of three ranks rests and comes back": Case(ranks=3, plans=ONE, rests=1),
    "the step changes under a plan of three ranks": Case(ranks=3, plans=(("a", "A"), ("b", "A'")), changes=1),
}


@pytest.mark.parametrize("name", CASES)
def test_every_interleaving_keeps_the_promises(name: str) -> None:
    assert Model(CASES[name]).explore() > 500


def test_the_least_number_alone_would_mix_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    def least(offers: Sequence[PlanId]) -> PlanId:
        return min(offers, key=lambda offer: offer.number)

    monkeypatch.setattr(protocol_model, "agreed", least)
    with pytest.raises(AssertionError, match="does not hold"):
        Model(CASES["two ranks, two plans, a controller that dies"]).explore()


def test_letting_go_of_the_running_plan_at_a_commit_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def obey(rank: RankSide, reply: Reply, plane: protocol.Plane) -> RankSide:
        rank = protocol.obey(rank, reply, plane)
        return replace(rank, held=tuple(number for number in rank.held if number >= rank.committed.number))

    monkeypatch.setattr(protocol_model, "obey", obey)
    with pytest.raises(AssertionError):
        Model(Case(ranks=2, plans=TWO)).explore()


def test_committing_before_all_have_voted_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def some_yes(job: protocol.ControllerSide, plan: PlanId) -> bool:
        ballots = [view.ballot for view in job.heard if view.ballot is not None]
        return any(ballot.yes and ballot.plan == plan for ballot in ballots)

    monkeypatch.setattr(protocol, "_all_yes", some_yes)
    with pytest.raises(AssertionError):
        Model(CASES["a rank cannot load the last plan"]).explore()


def test_a_controller_that_waits_for_its_own_plan_for_ever_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_refused", lambda job, plan: False)
    with pytest.raises(AssertionError, match="undecided for ever"):
        Model(CASES["a rank cannot load the last plan"]).explore()
