# SPDX-License-Identifier: Apache-2.0
"""Groups that share a NIC: the search goes on with the times that their motifs took on the links, and a walk over
options is judged link by link, against every choice of options of a small step.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

import stretto as st
from stretto.planner.algebra.options import problem as make_problem
from stretto.planner.api import PlanResult, to_plan, to_schedule, turns_in
from stretto.planner.candidates import LinkLevelJudge, PlanCandidate
from stretto.planner.correction import corrected, in_turns_note, searched_again
from stretto.planner.costs.costs import simulated_costs
from stretto.planner.in_turns import TurnWalk, turns_note
from stretto.planner.on_links import LinkWalk
from stretto.planner.schedule.link_turns import turns_of
from stretto.planner.schedule.retime import retime
from stretto.planner.schedule.schedule import Scheduler
from stretto.workload import Dep, Op, Workload

HOSTS = 2
PAIRS = ((0, 4), (1, 5), (2, 6))
KEPT = 5
"""Options of each sum: few enough for every choice to be re-timed."""


def cluster() -> st.Cluster:
    """Two hosts of four devices behind one NIC each."""
    nodes = [st.Node(name=f"d{at}", host=at // 4) for at in range(8)]
    nodes += [st.Node(name=f"nic{h}", kind="nic", host=h) for h in range(HOSTS)]
    ends = [(device, 8 + device // 4, 50.0) for device in range(8)] + [(8, 9, 10.0)]
    links = [
        st.Link(src=a, dst=b, alpha_us=1.0, gb_per_s=rate, channel="net")
        for one, other, rate in ends
        for a, b in ((one, other), (other, one))
    ]
    return st.Cluster.build("pair", nodes=nodes, links=links)


def step() -> Workload:
    """Three strided groups sum at once; the sum that is needed first would go first if they took turns."""
    sums = [
        Op(name=f"g{at}", kind="all_reduce", nbytes=1.2e7, groups=(pair,), after=(Dep(op="backward"),))
        for at, pair in enumerate(PAIRS)
    ]
    ops = (
        Op(name="first", duration_us=2500.0, after=(Dep(op="g2", lag=1),)),
        Op(name="second", duration_us=100.0, after=(Dep(op="g0", lag=1), Dep(op="g1", lag=1))),
        Op(name="backward", duration_us=500.0),
        *sums,
    )
    return Workload(name="strided", num_ranks=8, ops=ops)


@pytest.fixture(scope="module")
def found() -> PlanResult:
    return st.plan(step(), cluster(), steps=60)


def test_what_the_search_says_is_what_the_links_do(found: PlanResult) -> None:
    judge = LinkLevelJudge(problem=found.problem, cluster=cluster(), costs=simulated_costs(cluster()))
    first = judge.retimed(PlanCandidate(name="first", schedule=found.search.schedule))
    assert first.us > 1.3 * first.schedule.period_us
    assert "as if they took turns the search predicted 4.313 ms, link by link it was 6.713 ms" in in_turns_note(first)
    again = searched_again(first, judge, name="again", steps=30, seed=0)
    assert again.us == pytest.approx(again.schedule.period_us, rel=0.03)
    assert again.us <= first.us
    # Such a plan is carried out over the options of the problem as it was.
    assert judge.retimed(again).us == pytest.approx(again.us)
    assert found.plan.retimed_us <= min(*found.link_level_us.values(), again.us) * (1 + 1e-9)


def test_corrected_durations_give_the_re_timed_period(found: PlanResult) -> None:
    problem, costs = found.problem, simulated_costs(cluster())
    for schedule in (found.schedules["fifo"], found.search.schedule):
        again = Scheduler(problem).replay(schedule.choice, schedule.order, schedule.shift, serial=schedule.serial)
        timed = retime(again, problem, cluster(), costs)
        assert timed.spans_us and all(us > 0 for us in timed.spans_us.values())
        candidate = PlanCandidate(name="x", schedule=again, retimed=timed)
        model = Scheduler(corrected(problem, candidate))
        replayed = model.replay(again.choice, again.order, again.shift, serial=again.serial)
        assert replayed.period_us == pytest.approx(timed.period_us, rel=0.02)


def test_a_plan_whose_motifs_meet_nobody_is_left_alone(found: PlanResult) -> None:
    judge = LinkLevelJudge(problem=found.problem, cluster=cluster(), costs=simulated_costs(cluster()))
    candidate = judge.retimed(PlanCandidate(name="x", schedule=found.search.schedule))
    assert candidate.retimed is not None
    alone = replace(candidate, retimed=replace(candidate.retimed, meeting=0))
    assert searched_again(alone, judge, name="x", steps=1, seed=0) is alone


@pytest.fixture(scope="module")
def judge() -> LinkLevelJudge:
    made = make_problem(step(), cluster(), simulated_costs(cluster()))
    few = {name: tuple(sorted(some, key=lambda option: option.total_us)[:KEPT]) for name, some in made.options.items()}
    return LinkLevelJudge(problem=replace(made, options=few), cluster=cluster(), costs=simulated_costs(cluster()))


def begin(judge: LinkLevelJudge, *, serial: bool = False) -> tuple[Scheduler, PlanCandidate]:
    scheduler = Scheduler(judge.problem)
    plan = scheduler.schedule(tuple(KEPT - 1 for _ in judge.problem.options), serial=serial)
    return scheduler, judge.retimed(PlanCandidate(name="begin", schedule=plan))


def test_it_finds_the_best_of_all_choices(judge: LinkLevelJudge) -> None:
    scheduler, first = begin(judge)
    choices = product(range(KEPT), repeat=len(judge.problem.options))
    every = [judge.retimed(PlanCandidate(name="x", schedule=scheduler.schedule(choice))).us for choice in choices]
    walk = LinkWalk(judge, scheduler, seed=3)
    found = walk.best(first, name="walk", most=200, until=float("inf"), bound_us=0.0)
    assert found.name == "walk"
    assert found.us < first.us
    assert found.us <= min(every) * (1 + 1e-9)
    assert judge.retimed(replace(found, retimed=None)).us == pytest.approx(found.us)


def test_the_seed_decides_alone(judge: LinkLevelJudge) -> None:
    scheduler, first = begin(judge)
    walks = [LinkWalk(judge, scheduler, seed=7) for _ in range(2)]
    one, other = (walk.best(first, name="x", most=9, until=float("inf"), bound_us=0.0) for walk in walks)
    assert one.schedule.choice == other.schedule.choice
    assert [walk.retimed for walk in walks] == [9, 9]


def test_where_there_is_nothing_to_walk_over(judge: LinkLevelJudge) -> None:
    scheduler, first = begin(judge)
    at_bound = LinkWalk(judge, scheduler, seed=0)
    assert at_bound.best(first, name="x", most=9, until=float("inf"), bound_us=first.us) is first
    late = LinkWalk(judge, scheduler, seed=0)
    assert late.best(first, name="x", most=9, until=0.0, bound_us=0.0) is first
    _, serial = begin(judge, serial=True)
    assert LinkWalk(judge, scheduler, seed=0).best(serial, name="x", most=9, until=float("inf"), bound_us=0.0) is serial
    assert at_bound.retimed == late.retimed == 0


@pytest.fixture(scope="module")
def whole() -> LinkLevelJudge:
    """The step with whole sums alone, which cannot make way for each other."""
    problem = make_problem(step(), cluster(), simulated_costs(cluster()))
    options = {name: some[:1] for name, some in problem.options.items()}
    return LinkLevelJudge(
        problem=replace(problem, options=options), cluster=cluster(), costs=simulated_costs(cluster())
    )


def test_turns_on_links_make_true_what_the_search_says(whole: LinkLevelJudge) -> None:
    """With all turns of its order a plan takes what the model says, but for what it takes to hear of them."""
    first = whole.retimed(PlanCandidate(name="first", schedule=Scheduler(whole.problem).schedule([0, 0, 0])))
    turns = turns_of(first.schedule, whole.problem, cluster())
    assert {(turn.op, turn.behind_op, turn.lag) for turn in turns} == {(5, 4, 1), (3, 5, 0), (4, 3, 0)}, "one by one"
    kept = whole.retimed(replace(first, turns=turns))
    assert first.us > 1.3 * first.schedule.period_us
    assert kept.us == pytest.approx(first.schedule.period_us, rel=0.05)


def test_the_walk_over_turns_finds_those_that_gain(whole: LinkLevelJudge) -> None:
    first = whole.retimed(PlanCandidate(name="first", schedule=Scheduler(whole.problem).schedule([0, 0, 0])))
    bound_us = Scheduler(whole.problem).bound().us
    rest = {"most": 20, "until": float("inf"), "bound_us": bound_us}
    best = TurnWalk(whole, seed=0).best(first, [], **rest)  # type: ignore[arg-type]
    assert best.turns and best.us < 0.75 * first.us
    assert "wait for their turns on links" in turns_note(best)
    made = to_plan("made", best.schedule, whole.problem, cluster(), turns=best.turns)
    again = to_schedule(made, whole.problem)
    retimed = retime(again, whole.problem, cluster(), turns=turns_in(made, step()))
    assert retimed.period_us == pytest.approx(best.us)
    assert TurnWalk(whole, seed=0).best(first, [], **{**rest, "most": 0}) is first  # type: ignore[arg-type]


def test_groups_on_other_hosts_take_no_turns() -> None:
    """A group that has a rank where the other has none would wait for what nobody there can tell it."""
    apart = Workload(
        name="apart", num_ranks=8,
        ops=(Op(name="c", duration_us=1.0),
             *(Op(name=f"g{at}", kind="all_reduce", nbytes=1e6, groups=(ranks,), after=(Dep(op="c"),))
               for at, ranks in enumerate(((0, 1), (2, 6))))),
    )  # fmt: skip
    problem = make_problem(apart, cluster(), simulated_costs(cluster()))
    schedule = Scheduler(problem).schedule([0, 0])
    assert {turn.op for turn in turns_of(schedule, problem, cluster())} <= {1}
