# SPDX-License-Identifier: Apache-2.0
"""What becomes of plans on one rank: offered, taken up, discarded, given up; and what is kept of their programs."""

from __future__ import annotations

from typing import Any

import pytest
from enforcer_plans import cluster_of, simple_plan, step_of, whole

from stretto import Plan
from stretto.algorithms import algorithm
from stretto.errors import PlanMismatch
from stretto.programs import Program
from stretto.runtime.enforcer.binding import MotifBinding, Programs
from stretto.runtime.enforcer.carrier import SLOTS
from stretto.runtime.enforcer.memory import RowLayout
from stretto.runtime.enforcer.plans import Plans
from stretto.runtime.enforcer.prepared import ExpectedOps
from stretto.runtime.enforcer.rank_plan import RankMotif

CLUSTER = cluster_of(1)
STEP = step_of([("all_to_all", 2000.0, 0), ("all_reduce", 2000.0, 0)], 2)


class _Loaded:
    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout


class _Carrier:
    """Stands for what moves data."""

    programs = averages = True
    one_launch_order = False

    def __init__(self) -> None:
        self.unloaded: list[int] = []

    def load(self, number: int, rank_motif: RankMotif, binding: MotifBinding) -> _Loaded:
        return _Loaded(RowLayout.of(binding))

    def unload(self, number: int) -> None:
        self.unloaded.append(number)


def _plan(first: int) -> Plan:
    return simple_plan(STEP, CLUSTER, [whole(["rdma"], seq=first), whole(["eth"], seq=1 - first)])


def _plans() -> tuple[Plans, _Carrier]:
    carrier: Any = _Carrier()
    made = Plans(carrier, rank=0, hosts=["a", "b"], cluster=CLUSTER, expected=ExpectedOps(STEP, 0))
    for number in (1, 2):
        made.prepare(_plan(number % 2), STEP, number)
    return made, carrier


def _commit(plans: Plans, number: int) -> None:
    plans.commit(number, _plan(number % 2).hash)


def _agree(plans: Plans) -> bool:
    """The other ranks offer the same."""
    return plans.elect(plans.offer())


def _number(plans: Plans) -> int:
    return plans.active.number if plans.active is not None else 0


def test_what_all_have_offered_becomes_active_and_what_is_older_is_let_go() -> None:
    plans, carrier = _plans()
    _commit(plans, 2)
    assert _agree(plans) and _number(plans) == 2
    assert carrier.unloaded == [1]
    assert not _agree(plans), "it is active already"


def test_a_plan_that_another_rank_does_not_offer_stays_where_it_is() -> None:
    plans, _ = _plans()
    _commit(plans, 1)
    mine = plans.offer()
    assert not plans.elect([max(own, other) for own, other in zip(mine, [0, 0, 0, 0], strict=True)])
    assert _number(plans) == 0


def test_different_plans_of_one_number_are_given_up_with_a_word_instead_of_waiting_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plans, carrier = _plans()
    _commit(plans, 1)
    mine = plans.offer()
    other = int(_plan(0).hash[:15], 16)
    assert not plans.elect([max(pair) for pair in zip(mine, [1, -1, other, -other], strict=True)])
    assert _number(plans) == 0 and plans.committed is None and carrier.unloaded == [1]
    assert "is another plan on another rank" in plans.fell_back and plans.fell_back in caplog.text
    with pytest.raises(PlanMismatch, match="make a plan on one rank"):
        plans.prepare(_plan(1), STEP, 1)
    _commit(plans, 2)
    assert _agree(plans) and _number(plans) == 2, "a newer one goes on"


def test_a_plan_that_is_discarded_while_it_is_offered_is_taken_up_if_all_others_do() -> None:
    plans, carrier = _plans()
    _commit(plans, 1)
    mine = plans.offer()
    plans.discard(1)
    assert not carrier.unloaded, "all its programs are still needed"
    with pytest.raises(PlanMismatch, match="needs the communicators of plan 1"):
        plans.prepare(_plan(0), STEP, 1 + SLOTS)
    assert plans.elect(mine) and _number(plans) == 1
    assert plans.committed is plans.active
    assert not carrier.unloaded


def test_a_plan_that_is_discarded_while_it_is_offered_goes_once_the_others_have_not_taken_it_up() -> None:
    plans, carrier = _plans()
    _commit(plans, 1)
    mine = plans.offer()
    plans.discard(1)
    assert not plans.elect([mine[0], 0, mine[2], 0])
    assert carrier.unloaded == [1] and _number(plans) == 0
    assert plans.offer() == [0, 0, 0, 0], "it is not offered again"
    with pytest.raises(PlanMismatch, match="is not prepared here"):
        _commit(plans, 1)


def test_a_plan_that_rested_is_discarded_after_its_offer_was_counted() -> None:
    plans, carrier = _plans()
    _commit(plans, 1)
    assert _agree(plans)
    plans.leave("something else", mine=True)
    assert plans.resting is not None
    plans.commit(1, _plan(1).hash)
    mine = plans.offer()
    plans.discard(1)
    assert plans.resting is not None, "the others may take it up"
    assert not plans.elect([mine[0], 0, mine[2], 0])
    assert plans.resting is None and carrier.unloaded == [1]


def test_an_offer_of_a_plan_that_was_left_is_void() -> None:
    plans, _ = _plans()
    _commit(plans, 1)
    assert _agree(plans)
    mine = plans.offer()
    plans.leave("something else", mine=True)
    assert not plans.elect(mine) and _number(plans) == 0


def test_a_plan_that_another_rank_left_is_given_up() -> None:
    plans, carrier = _plans()
    _commit(plans, 1)
    assert _agree(plans)
    plans.leave("rank 1 gave up", mine=False)
    assert plans.resting is None and carrier.unloaded == [1]
    with pytest.raises(PlanMismatch, match="was given up: rank 1 gave up"):
        _commit(plans, 1)


def test_of_programs_for_ever_new_sizes_only_the_latest_are_kept() -> None:
    programs = Programs(most=4)
    made: list[int] = []

    def program(size: int) -> Program:
        def make() -> Program:
            made.append(size)
            return algorithm("ring", "all_reduce", 2)

        return programs.find((size,), None, make)

    first = program(0)
    for size in range(1, 20):
        program(size)
        assert program(0) is first, "what is used stays"
    assert len(programs) == 4 and made == list(range(20))
    program(1)
    assert made[-1] == 1


def test_a_program_that_a_plan_brought_along_is_not_taken_for_another_of_the_same_id() -> None:
    programs = Programs()
    ring, direct = algorithm("ring", "all_reduce", 2), algorithm("direct", "all_reduce", 2)
    assert programs.find(("x",), ring, lambda: ring) is ring
    assert programs.find(("x",), direct, lambda: direct) is direct
    assert programs.find(("x",), ring, lambda: direct) is ring
