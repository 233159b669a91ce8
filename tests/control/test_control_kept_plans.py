# SPDX-License-Identifier: Apache-2.0
"""Plans that the next start of a job begins with: what is kept, used, refused and forgotten."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from toy_job import Ready, ToyPlane, planner, toy_cluster, toy_plan, toy_workload

from stretto.control.agent import Agent
from stretto.control.controller import Controller
from stretto.control.kept_plans import MAX_KEPT, KeptPlan, KeptPlans, plans_folder
from stretto.control.messages import (
    JobStatus,
    RankState,
    RecallReply,
    RecallRequest,
    Reply,
    decode,
    encode,
    encode_captured,
    encode_plan,
)
from stretto.control.metrics import prometheus_text
from stretto.control.recall import NETWORK, StepTally, fits, identity_of, key_of, recall
from stretto.control.worker import PlanReply, PlanRequest
from stretto.errors import PeerLost
from stretto.runtime.enforcer.report import EnforcerReport, MotifReport
from stretto.runtime.torch_backend.watch import WATCH, SubmittedCall
from stretto.workload.dag import Dep, Op, Workload

RANKS = 2
STEP, CLUSTER = toy_workload(RANKS), toy_cluster(RANKS)
KEY = "0123456789abcdef" * 2
IDENTITY = {"script": "train.py", "PyTorch": "2.9"}
Start = Callable[[PlanRequest], Ready]


class Job:
    """Agents that are turned by hand, as one start of a job."""

    def __init__(self, controller: Controller, epoch: int, key: str = KEY) -> None:
        self.controller = controller
        self.planes = [ToyPlane(lambda values: values) for _ in range(RANKS)]
        self.agents = [
            Agent(plane, self.exchange, job="j", epoch=epoch, rank=rank, size=RANKS)
            for rank, plane in enumerate(self.planes)
        ]
        for agent in self.agents:
            agent.captured(STEP, CLUSTER, 7.0, key)

    def exchange(self, state: RankState, timeout_s: float) -> Reply:
        return decode(encode(self.controller.exchange(decode(encode(state), RankState))), Reply)

    def until(self, condition: Callable[[JobStatus], bool]) -> JobStatus:
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline:
            for agent in self.agents:
                agent.turn()
            if len({agent.side.committed for agent in self.agents}) == 1:
                for plane in self.planes:
                    plane.iteration()
            found = self.controller.job_status("j")
            assert found is not None
            if condition(found):
                return found
            time.sleep(0.02)
        raise AssertionError(found)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[Start], Controller]]:
    made: list[Controller] = []

    def start(planning: Start) -> Controller:
        made.append(Controller(start=planning, plans=tmp_path / "plans"))
        return made[-1]

    yield start
    for controller in made:
        controller.close()


Make = Callable[[Start], Controller]


def is_active(status: JobStatus) -> bool:
    return status.phase == "active" and "is active" in status.about


def never(ask: PlanRequest) -> Ready:
    raise AssertionError("nobody has to plan")


def one() -> KeptPlan:
    plan = toy_plan("kept", STEP, CLUSTER)
    answer = PlanReply(body=encode_plan(plan), hash=plan.hash, iteration_us=100.0, plain_us=200.0)
    return KeptPlan(
        key=KEY, digest=STEP.digest, captured=encode_captured(STEP, CLUSTER, 7.0, KEY), answer=answer,
        factors={"net": 1.5}, on_own=True,
    )  # fmt: skip


def test_the_next_start_begins_with_the_plan_of_the_last_without_planning(make: Make, tmp_path: Path) -> None:
    first = Job(make(planner("a")), epoch=1).until(is_active)
    assert (first.plan_name, first.recalled) == ("a.0", False)
    again = make(never)
    reply = again.recall(RecallRequest(key=KEY))
    assert reply.captured is not None and reply.captured.motif_us == 7.0
    second = Job(again, epoch=2).until(is_active)
    assert (second.plan.hash, second.plan_name, second.recalled) == (first.plan.hash, "a.0", True)
    assert 'stretto_job_recalled{job="j"} 1' in prometheus_text(again.status())
    # In the same controller, as after torchrun's restarts, too.
    assert Job(again, epoch=3).until(is_active).recalled
    assert (tmp_path / "plans").stat().st_mode & 0o777 == 0o700


def test_another_step_cluster_or_key_is_planned_for(make: Make) -> None:
    Job(make(planner("a")), epoch=1).until(is_active)
    assert make(never).recall(RecallRequest(key="f" * 32)).captured is None
    other = Job(make(planner("b")), epoch=2, key="f" * 32).until(is_active)
    assert (other.plan_name, other.recalled) == ("b.0", False)
    without = Job(make(planner("c")), epoch=3, key="").until(is_active)
    assert (without.plan_name, without.recalled) == ("c.0", False)


def test_what_cannot_be_used_is_ignored_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept, good = KeptPlans(tmp_path / "plans"), one()
    kept.save(good)
    assert kept.load(KEY) == good
    path = next(kept.folder.iterdir())
    text = path.read_text()
    other = Workload(name="o", num_ranks=RANKS, ops=(Op(name="x", duration_us=1.0, after=(Dep(op="x", lag=1),)),))
    wrong = {
        "truncated": text[: len(text) // 2],
        "no text": "\x00",
        "another version": text.replace('"version":1', '"version":2'),
        "another key": text.replace(KEY, "f" * 32),
        "another hash": text.replace(good.answer.hash, "0" * len(good.answer.hash)),
        "another step": msgspec.json.encode(
            msgspec.structs.replace(good, captured=encode_captured(other, CLUSTER))
        ).decode(),
        "another cluster": msgspec.json.encode(
            msgspec.structs.replace(good, captured=encode_captured(STEP, toy_cluster(3)))
        ).decode(),
        "a factor that is none": text.replace("1.5", "-1.5"),
    }  # fmt: skip
    for what, content in wrong.items():
        assert content != text, what
        path.write_text(content)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = [KeptPlans(kept.folder).load(KEY)]
        assert found == [None], what
        assert len(caplog.messages) == 1 and "is ignored" in caplog.messages[0], what
        assert "\n" not in caplog.messages[0], what


def test_a_damaged_file_means_planning(make: Make, tmp_path: Path) -> None:
    KeptPlans(tmp_path / "plans").save(one())
    next((tmp_path / "plans").iterdir()).write_text("{")
    status = Job(make(planner("a")), epoch=1).until(is_active)
    assert (status.plan_name, status.recalled) == ("a.0", False)


def test_a_plan_that_turns_out_slower_is_forgotten(make: Make, tmp_path: Path) -> None:
    KeptPlans(tmp_path / "plans").save(one())

    def slow(ask: PlanRequest) -> Ready:
        plan = toy_plan("plain" if ask.plain else "p", STEP, CLUSTER, duration_us=20.0)
        answer = PlanReply(body=encode_plan(plan), hash=plan.hash, iteration_us=100.0, plain_us=200.0, current_us=200.0)
        return Ready(answer)

    job = Job(make(slow), epoch=1)
    for plane in job.planes:
        usual, motif = plane.report, MotifReport(op="gradients", motif=0, duration_us=10.0, wait_us=0.0)

        def report(usual: Callable[[], EnforcerReport] = usual, motif: MotifReport = motif) -> EnforcerReport:
            now = usual()
            slower_us = 400.0 if now.number == 1 else 200.0
            return replace(now, iteration=50 * now.iteration, iteration_us=slower_us, motifs=(motif,))

        plane.report = report  # type: ignore[method-assign]
    status = job.until(lambda status: status.plan_name == "plain" and is_active(status))
    assert status.recalled
    assert not list((tmp_path / "plans").glob("*.json"))


def test_the_folder_keeps_the_newest_and_is_where_one_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, good = KeptPlans(tmp_path / "plans"), one()
    for number in range(MAX_KEPT + 3):
        kept.save(msgspec.structs.replace(good, key=f"{number:032x}"))
    assert len(list(kept.folder.iterdir())) == MAX_KEPT
    assert plans_folder() is None and plans_folder("off") is None, "tests have switched it off"
    assert plans_folder(str(tmp_path)) == tmp_path
    monkeypatch.delenv("STRETTO_PLANS")
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path))
    assert plans_folder() == tmp_path / "plans"


class Alone:
    """A side group of one rank."""

    def sums(self, numbers: list[int]) -> list[int]:
        return [int(number) for number in numbers]


class Store(dict[str, bytes]):
    """A store of one process."""

    def set(self, key: str, value: bytes) -> None:
        self[key] = value


def submitted(nbytes: int = 4096, op: str = "all_reduce") -> SubmittedCall:
    return SubmittedCall(op=op, ranks=(0, 1), channel="c", nbytes=nbytes, device="cpu")


def test_a_rank_takes_only_the_step_that_it_calls() -> None:
    tally = StepTally()
    tally.begin()
    try:
        for sizes in ([4096], [4096, 1], [4096, 1], [4096], [4096]):
            for nbytes in sizes:
                assert WATCH.current is tally and tally.seen(submitted(nbytes), lambda: "ran") == "ran"
            tally.seen(submitted(op="send"), lambda: None)
            tally.cut()
        assert tally.calls == (submitted(),)
    finally:
        tally.end()
    assert WATCH.current is None
    calls = tally.calls
    assert fits(calls, STEP, 0) and fits(calls, STEP, 1) and not fits(calls, STEP, 2)
    for other in ((), calls * 2, (submitted(8),), (submitted(op="broadcast"),)):
        assert not fits(other, STEP, 0)

    class Link:
        said: bytes | None = None

        def call(self, method: str, message: bytes, *, timeout_s: float) -> bytes:
            if self.said is None:
                raise PeerLost("no controller")
            return self.said

    controller = Controller(start=never)
    link, aside = Link(), Alone()
    odd: Any = IDENTITY | {"PyTorch": object()}
    found, why = recall(odd, calls, link, Store(), aside, 0, None)  # type: ignore[arg-type]
    assert found is None and "object" in why, "other ranks would wait for the answer for ever"
    try:
        asked: list[tuple[bytes | None, tuple[SubmittedCall, ...], str]] = [
            (None, calls, "the controller did not answer"),
            (b"nonsense", calls, "the controller's answer cannot be read"),
            (encode(controller.recall(RecallRequest(key=KEY))), calls, "plans are not kept"),
        ]  # fmt: skip
        for said, mine, why in asked:
            link.said = said
            assert recall(IDENTITY, mine, link, Store(), aside, 0, None) == (None, why)  # type: ignore[arg-type]
        kept = one()
        link.said = encode(RecallReply(captured=kept.captured, on_own=True))
        found, why = recall(IDENTITY, calls, link, Store(), aside, 0, None)  # type: ignore[arg-type]
        assert not why and found is not None
        assert (found.workload.digest, found.cluster.digest, found.on_own) == (STEP.digest, CLUSTER.digest, True)
        for mine, given in ((calls * 2, None), (calls, toy_cluster(3))):
            found, why = recall(IDENTITY, mine, link, Store(), aside, 0, given)  # type: ignore[arg-type]
            assert found is None and "is for another step, or another cluster" in why
    finally:
        controller.close()


class Together:
    """Side groups of two ranks that are asked one after the other: adds up what both say."""

    def __init__(self) -> None:
        self.total: list[int] = []

    def sums(self, numbers: list[int]) -> list[int]:
        self.total = [a + int(b) for a, b in zip(self.total or [0] * len(numbers), numbers, strict=True)]
        return [number % 2**64 for number in self.total]


def identity(hosts: list[str], monkeypatch: pytest.MonkeyPatch, names: str = "ab", **calls: Any) -> dict[str, str]:
    aside, found = Together(), {}
    for rank in range(2):
        monkeypatch.setattr("socket.gethostname", lambda rank=rank: names[rank])
        found = identity_of((submitted(**calls),), aside, "train.py", rank, hosts)  # type: ignore[arg-type]
    return found


def test_a_restart_on_the_same_hosts_is_the_same_job_and_every_other_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in NETWORK:
        monkeypatch.delenv(name, raising=False)
    # The second part is the number of a network namespace, which every start of a lab or a container has anew.
    first = identity(["boot1:4026532001", "boot1:4026532002"], monkeypatch)
    assert key_of(identity(["boot2:4026532777", "boot2:4026532778"], monkeypatch)) == key_of(first)
    assert len(key_of(first)) == 32 and not key_of({})
    assert decode(encode(RecallRequest(key=key_of(first), identity=first)), RecallRequest).identity == first
    others = {
        "one host": identity(["a", "a"], monkeypatch), "other names": identity(["a", "b"], monkeypatch, names="ac"),
        "other calls": identity(["a", "b"], monkeypatch, nbytes=8),
    }  # fmt: skip
    monkeypatch.setenv("STRETTO_LAB_RATES", "eth=100mbit")
    others["other uplinks"] = identity(["a", "b"], monkeypatch)
    monkeypatch.setenv("STRETTO_PLUGINS", "my_algorithms")
    others["other plug-ins"] = identity(["a", "b"], monkeypatch)
    assert len({key_of(first), *map(key_of, others.values())}) == 1 + len(others)


def test_the_controller_says_why_no_kept_plan_fits(tmp_path: Path) -> None:
    kept, good = KeptPlans(tmp_path / "plans"), one()
    assert kept.why_none(KEY, IDENTITY) == "no plan is kept for train.py"
    captured = encode_captured(STEP, CLUSTER, 7.0, KEY, identity=IDENTITY)
    kept.save(msgspec.structs.replace(good, captured=captured))
    controller = Controller(start=never, plans=tmp_path / "plans")
    try:
        asked = {
            "was made with other PyTorch (2.9 then, 2.10 now)": {"script": "train.py", "PyTorch": "2.10"},
            "was made with other calls of an iteration": IDENTITY | {"calls of an iteration": "1f"},
            "no plan is kept for eval.py": {"script": "eval.py", "PyTorch": "2.9"},
        }
        for why, now in asked.items():
            reply = controller.recall(RecallRequest(key=key_of(now), identity=now))
            assert reply.captured is None and reply.why.endswith(why), reply.why
        found = controller.recall(RecallRequest(key=KEY, identity=IDENTITY))
        assert found.captured is not None and not found.why
    finally:
        controller.close()
    (tmp_path / "plans" / f"{KEY}.plan.json").write_text("{")
    assert "cannot be used" in kept.why_none(KEY, IDENTITY)
    assert kept.why_none("f" * 32, IDENTITY) == "no plan is kept for train.py"


def test_a_plan_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        KeptPlans(tmp_path / "plans").save(one())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert list((tmp_path / "plans").iterdir()) == []
    assert "the plan is not kept" in caplog.text
