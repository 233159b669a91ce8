# SPDX-License-Identifier: Apache-2.0
"""A controller and agents in one process: what is given out, refused, given up, recorded and planned again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from toy_job import Ready, ToyPlane, planner, toy_cluster, toy_plan, toy_workload

from stretto.cluster import Cluster
from stretto.control.agent import Agent
from stretto.control.controller import Controller
from stretto.control.messages import JobStatus, PlanId, RankState, Reply, decode, encode, encode_plan
from stretto.control.worker import PlanReply, PlanRequest
from stretto.errors import InvalidInput, PeerLost, PlanMismatch
from stretto.planner.plan import Plan
from stretto.runtime.enforcer.report import EnforcerReport, MotifReport
from stretto.workload import Workload

RANKS = 2


class Job:
    """Agents that are turned by hand; `train` lets all ranks do an iteration."""

    def __init__(self, controller: Controller, *, epoch: int = 1) -> None:
        self.controller = controller
        self.offers: list[list[int]] = []
        self.planes = [ToyPlane(lambda values: values) for _ in range(RANKS)]
        self.agents = [
            Agent(plane, self.exchange, job="j", epoch=epoch, rank=rank, size=RANKS)
            for rank, plane in enumerate(self.planes)
        ]

    def exchange(self, state: RankState, timeout_s: float) -> Reply:
        return decode(encode(self.controller.exchange(decode(encode(state), RankState))), Reply)

    def captured(self, workload: Workload, cluster: Cluster) -> None:
        for agent in self.agents:
            agent.captured(workload, cluster)

    def turn(self) -> None:
        for agent in self.agents:
            agent.turn()
        # Both planes offer the same whenever both have committed the same: then, and only then, let them see it.
        if len({agent.side.committed for agent in self.agents}) == 1:
            for plane in self.planes:
                plane.iteration()

    @property
    def status(self) -> JobStatus:
        found = self.controller.job_status("j")
        assert found is not None
        return found

    def until(self, condition: Callable[[JobStatus], bool], what: str) -> JobStatus:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            self.turn()
            if condition(self.status):
                return self.status
            time.sleep(0.02)
        raise AssertionError(f"never {what}: {self.status}")


@pytest.fixture
def make() -> Iterator[Callable[..., Controller]]:
    made: list[Controller] = []

    def start(planning: Callable[[PlanRequest], Ready], memory: Path | None = None) -> Controller:
        made.append(Controller(start=planning, memory=memory))
        return made[-1]

    yield start
    for controller in made:
        controller.close()


Make = Callable[..., Controller]
STEP, CLUSTER = toy_workload(RANKS), toy_cluster(RANKS)


def is_active(status: JobStatus) -> bool:
    return status.phase == "active" and "is active" in status.about


def test_a_plan_goes_through_and_the_status_tells_it(make: Make) -> None:
    job = Job(make(planner("a")))
    job.captured(STEP, CLUSTER)
    status = job.until(is_active, "active")
    assert (status.plan.number, status.plan_name) == (1, "a.0")
    assert status.gain == 2.0
    assert [rank.active for rank in status.ranks] == [status.plan] * RANKS


def test_numbers_go_on_after_a_death_with_and_without_the_file(make: Make, tmp_path: Path) -> None:
    first = make(planner("a"), tmp_path / "state.json")
    job = Job(first)
    job.captured(STEP, CLUSTER)
    job.until(is_active, "active")
    job.controller = make(planner("b"), tmp_path / "state.json")
    assert job.until(lambda status: status.plan.number == 2, "plan 2").plan_name == "b.0"
    job.controller = make(planner("c"))
    assert job.until(lambda status: status.plan.number == 3, "plan 3").plan_name == "c.0"


def test_a_controller_that_comes_back_to_the_same_plan_lets_it_run(make: Make) -> None:
    job = Job(make(planner("a")))
    job.captured(STEP, CLUSTER)
    job.until(is_active, "active")
    job.controller = make(planner("a"))
    assert job.until(is_active, "active").plan.number == 1


def test_a_plan_that_promises_nothing_is_not_given_out(make: Make) -> None:
    def start(ask: PlanRequest) -> Ready:
        return Ready(PlanReply(body=b"", hash="", iteration_us=98.0, plain_us=100.0))

    job = Job(make(start))
    job.captured(STEP, CLUSTER)
    status = job.until(lambda status: "no plan promises" in status.about, "considered")
    assert status.plan.number == 0


def test_a_job_that_ends_while_it_is_planned_for_is_told_so(make: Make) -> None:
    job = Job(make(lambda ask: Ready(None)))
    job.captured(STEP, CLUSTER)
    job.until(lambda status: status.about == "planning", "asked")
    for agent in job.agents:
        agent.turn(leaving=True)
    assert job.status.about == "the job ended before a plan was made"


def test_an_error_of_the_planner_is_told(make: Make) -> None:
    job = Job(make(lambda ask: Ready(PlanReply(error="no channels carry it"))))
    job.captured(STEP, CLUSTER)
    job.until(lambda status: status.about == "no plan: no channels carry it", "told")


def test_a_refused_plan_is_planned_again_three_times_at_most(make: Make) -> None:
    asked: list[int] = []

    def start(ask: PlanRequest) -> Ready:
        asked.append(ask.seed)
        return planner("a")(ask)

    job = Job(make(start))

    def refuse(plan: Plan, workload: Workload, number: int) -> None:
        raise PlanMismatch("this rank has no such channel")

    job.planes[1].prepare = refuse  # type: ignore[method-assign]
    job.captured(STEP, CLUSTER)
    status = job.until(lambda status: len(asked) == 3 and "planning" not in status.about, "refused three times")
    job.until(lambda status: status.about.startswith("refused by rank 1: this rank has no such channel"), "told")
    assert status.plan == PlanId()
    assert asked == [0, 1, 2]


def test_a_step_that_leaves_its_plan_is_recorded_again(make: Make) -> None:
    job = Job(make(planner("a")))
    job.captured(STEP, CLUSTER)
    job.until(is_active, "active")
    for plane in job.planes:
        plane._active = PlanId()
        plane.fell_back = "gradients has another size"
    job.until(lambda status: all(agent.profile_wanted for agent in job.agents), "asked to record")
    job.captured(toy_workload(RANKS, nbytes=64.0), CLUSTER)
    assert not any(agent.profile_wanted for agent in job.agents)
    assert job.until(is_active, "active again").plan.number == 2


def test_a_cut_link_leads_to_a_new_plan_with_refined_costs(make: Make) -> None:
    asked: list[PlanRequest] = []

    def start(ask: PlanRequest) -> Ready:
        asked.append(ask)
        plan = toy_plan(f"p{len(asked)}", STEP, CLUSTER)
        return Ready(
            PlanReply(body=encode_plan(plan), hash=plan.hash, iteration_us=100.0, plain_us=200.0, current_us=150.0)
        )

    job = Job(make(start))
    job.captured(STEP, CLUSTER)
    job.until(is_active, "active")
    iteration = 0

    def slow(plane: ToyPlane) -> Callable[[], EnforcerReport]:
        def report() -> EnforcerReport:
            nonlocal iteration
            iteration += 20
            motif = MotifReport(op="gradients", motif=0, duration_us=40.0, wait_us=0.0)
            return EnforcerReport(
                number=plane._active.number, hash=plane._active.hash, iteration=iteration, iteration_us=100.0,
                plain_us=200.0, motifs=(motif,),
            )  # fmt: skip

        return report

    for plane in job.planes:
        plane.report = slow(plane)  # type: ignore[method-assign]
    status = job.until(lambda status: status.plan.number == 2, "planned again")
    assert status.replans == 1
    assert asked[1].factors == {"net": 4.0}
    assert asked[1].current is not None


def test_a_plan_that_was_slower_is_not_chosen_again_until_costs_are_others(make: Make) -> None:
    asked: list[PlanRequest] = []

    def start(ask: PlanRequest) -> Ready:
        asked.append(ask)
        # Whatever is asked, the same plan is the best; what it promises differs, what it does not.
        plan = toy_plan("plain" if ask.plain else "p", STEP, CLUSTER, duration_us=10.0 + len(asked))
        return Ready(
            PlanReply(body=encode_plan(plan), hash=plan.hash, iteration_us=100.0, plain_us=200.0, current_us=200.0)
        )

    job = Job(make(start))
    job.captured(STEP, CLUSTER)
    job.until(is_active, "active")
    at = {"iteration": 0, "iteration_us": 300.0, "duration_us": 11.0}

    def measured(plane: ToyPlane) -> Callable[[], EnforcerReport]:
        def report() -> EnforcerReport:
            at["iteration"] += 20
            motif = MotifReport(op="gradients", motif=0, duration_us=at["duration_us"], wait_us=0.0)
            return EnforcerReport(
                number=plane._active.number, hash=plane._active.hash, iteration=int(at["iteration"]),
                iteration_us=at["iteration_us"], plain_us=200.0, motifs=(motif,),
            )  # fmt: skip

        return report

    for plane in job.planes:
        plane.report = measured(plane)  # type: ignore[method-assign]
    status = job.until(lambda status: status.plan.number == 2, "plain order")
    assert status.plan_name == "plain"
    job.until(lambda status: "own order" in status.about, "told")
    # Motifs take somewhat longer than promised: a question, but not other links.
    supervised = job.controller._jobs["j"]
    assert supervised._watch is not None and supervised._watch.only_drift
    at["duration_us"] = 12.0 * 1.2
    for _ in range(50):
        job.turn()
    assert len(asked) == 2 and job.status.plan.number == 2
    # The link has really changed.
    at["duration_us"] = 12.0 * 4
    assert job.until(lambda status: status.plan.number == 3, "another plan").plan_name == "p"
    assert len(asked) == 3


def test_another_start_of_the_job_begins_from_nothing_and_the_old_one_is_not_heard(make: Make) -> None:
    controller = make(planner("a"))
    old = Job(controller, epoch=1)
    old.captured(STEP, CLUSTER)
    old.until(is_active, "active")
    new = Job(controller, epoch=2)
    new.captured(STEP, CLUSTER)
    new.turn()
    assert new.status.epoch == 2
    old.turn()
    assert new.status.epoch == 2
    assert new.until(is_active, "active").plan.number == 2
    assert controller.captured() is not None


def test_what_was_captured_must_be_what_it_says(make: Make) -> None:
    controller = make(planner("a"))
    state = RankState(job="j", epoch=1, rank=0, size=1, beat=1, digest="feed")
    assert controller.exchange(state).send_captured
    from stretto.control.messages import encode_captured

    body = encode_captured(STEP, CLUSTER)
    import msgspec

    controller.exchange(msgspec.structs.replace(state, beat=2, captured=body))
    status = controller.job_status("j")
    assert status is not None
    assert "has digest" in status.about and controller.captured() is None
    garbage = msgspec.structs.replace(body, workload="{")
    controller.exchange(msgspec.structs.replace(state, beat=3, captured=garbage))
    status = controller.job_status("j")
    assert status is not None
    assert "cannot be read" in status.about


def test_a_state_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    for text in ("nonsense", "{}", '{"stretto": "controller", "version": 1, "last": -1}'):
        (tmp_path / "s").write_text(text)
        with pytest.raises(InvalidInput):
            Controller(memory=tmp_path / "s")


def test_an_agent_without_a_controller_keeps_trying_and_ends_in_time() -> None:
    calls = []

    def nobody(state: RankState, timeout_s: float) -> Reply:
        calls.append(state)
        raise PeerLost("nobody")

    agent = Agent(ToyPlane(lambda values: values), nobody, job="j", epoch=1, rank=0, size=1, every_s=0.001)
    agent.start()
    deadline = time.monotonic() + 200
    while len(calls) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    agent.stop()
    assert len(calls) >= 5
    assert calls[-1].leaving
