# SPDX-License-Identifier: Apache-2.0
"""A hang has a name: what the controller makes of the ranks' pulses."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

from stretto.control.controller import Controller
from stretto.control.flight_record import groups_of
from stretto.control.hang_messages import GroupPulse, Pulse, PulseCall
from stretto.control.hangs import BEHIND, DIFFERS, GONE, HERE, SILENT, STILL_S, STOPPED, STUCK, SURE_S, HangWatch
from stretto.control.messages import HushRequest
from stretto.control.starved import StarvedClock, waited_s
from stretto.errors import InvalidInput

HOST = "one"
NAMED_S = STILL_S + SURE_S + 1.5
"""Pulses come every half second; within ten seconds in all."""
assert NAMED_S < 10


class World:
    """Ranks that call, and a clock that is turned by hand."""

    def __init__(self, size: int) -> None:
        self.size, self.time, self.beat = size, 100.0, 0
        self.processes = dict.fromkeys(range(size), HERE)
        self.calls: dict[int, list[PulseCall]] = {rank: [] for rank in range(size)}
        self.still = dict.fromkeys(range(size), 0.0)
        self.errors = dict.fromkeys(range(size), "")
        self.ended: set[int] = set()
        self.starved = dict.fromkeys(range(size), 0.0)
        self.mute: set[int] = set()
        self.watch = HangWatch(
            "job", host=HOST, now=lambda: self.time, process=self.processes.__getitem__, waited=self.waited
        )
        self.said: list[str] = []

    def call(self, rank: int, op: str = "allreduce", nbytes: int = 4000, line: int = 7, **more: Any) -> None:
        number = len(self.calls[rank]) + 1
        call = PulseCall(number=number, op=op, nbytes=nbytes, place=f"train.py:{line}", **more)
        self.calls[rank].append(call)
        self.still[rank] = 0.0

    def all_call(self, **more: Any) -> None:
        for rank in range(self.size):
            self.call(rank, **more)

    def waited(self, rank: int | str) -> dict[str, float]:
        return {"main": self.starved[int(rank)], "other": 0.0}

    def pass_time(self, seconds: float, *, waits: bool = True, starved: tuple[int, ...] = ()) -> None:
        for _ in range(round(seconds / 0.5)):
            self.time += 0.5
            self.beat += 1
            for rank in range(self.size):
                self.starved[rank] += 0.5 * (rank in starved)
                self.still[rank] += 0.5 * (rank not in starved)
                if self.processes[rank] == HERE and rank not in self.mute:
                    self.said += self.watch.heard(self.pulse(rank, waits)).say
            self.watch.look()

    def pulse(self, rank: int, waits: bool) -> Pulse:
        calls = self.calls[rank]
        group = GroupPulse(name="0", ranks=tuple(range(self.size)), calls=len(calls), recent=tuple(calls[-8:]))
        return Pulse(
            job="job", epoch=1, rank=rank, size=self.size, beat=self.beat, pid=rank, host=HOST, place="train.py:9",
            still_s=self.still[rank], starved_s=self.starved[rank], waits=waits, groups=(group,),
            leaving=rank in self.ended, error=self.errors[rank],
        )  # fmt: skip

    @property
    def kinds(self) -> list[str]:
        return [found.kind for found in self.watch.findings]


def test_job_that_calls_alike_has_no_hang() -> None:
    world = World(3)
    for _ in range(20):
        world.all_call()
        world.pass_time(1.0)
    # A long piece of the application's own, outside of every call.
    world.pass_time(60, waits=False)
    world.ended = {0, 1, 2}
    world.pass_time(20)
    assert world.kinds == []
    assert world.said == []


@pytest.mark.parametrize("late", [(1,), (0, 2), (1, 2, 3)])
def test_rank_that_does_not_come_is_named_with_its_place(late: tuple[int, ...]) -> None:
    world = World(4)
    world.all_call()
    for rank in set(range(4)) - set(late):
        world.call(rank, line=12)
    world.pass_time(NAMED_S)
    assert world.kinds == [BEHIND]
    found = world.watch.findings[0]
    assert found.ranks == late
    assert "all_reduce of 4000 bytes at train.py:12" in found.text
    assert "made 1 calls, the last all_reduce of 4000 bytes at train.py:7, and is at train.py:9" in found.text
    assert world.said == [f"hang: {found.text}"]


def test_a_rank_that_begins_to_wait_later_than_others_does_not_hide_the_hang() -> None:
    world = World(4)
    world.all_call()
    world.call(0, line=12)
    world.call(1, line=12)
    world.pass_time(2.0)
    world.call(2, line=12)
    world.pass_time(NAMED_S)
    assert [(found.kind, found.ranks) for found in world.watch.findings] == [(BEHIND, (3,))]
    assert "ranks 0-2 wait in call 2" in world.watch.findings[0].text


def test_a_rank_that_was_never_heard_of_is_named() -> None:
    world = World(3)
    world.mute = {2}
    world.call(0)
    world.call(1)
    world.pass_time(NAMED_S)
    assert [(found.kind, found.ranks) for found in world.watch.findings] == [(BEHIND, (2,))]
    assert world.watch.findings[0].text.endswith("; nothing was ever heard of rank 2")


def test_ranks_that_went_on_are_told_once() -> None:
    world = World(2)
    world.call(0)
    world.pass_time(30)
    world.call(1)
    world.call(0)
    world.call(1)
    world.pass_time(10, waits=False)
    assert world.kinds == [BEHIND]
    assert 20 < world.watch.findings[0].went_on_s < 30
    assert [line.split(":")[0] for line in world.said] == ["hang", "hang"]
    assert "rank 0 went on" in world.said[1]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"op": "broadcast", "root": 0}, "broadcast of 4000 bytes from root 0"),
        ({"nbytes": 8}, "all_reduce of 8 bytes"),
    ],
)
def test_ranks_that_call_different_things_are_named(second: dict[str, Any], words: str) -> None:
    world = World(3)
    world.all_call()
    world.call(0, line=20)
    world.call(2, line=20)
    world.call(1, **second, line=30)
    world.pass_time(STILL_S + 1)
    assert world.kinds == [DIFFERS]
    text = world.watch.findings[0].text
    assert "call 2 of group 0 is ranks 0, 2: all_reduce of 4000 bytes at train.py:20" in text
    assert f"rank 1: {words} at train.py:30" in text


def test_ranks_that_differ_and_end_at_once_are_named() -> None:
    world = World(2)
    world.all_call()
    world.call(0, nbytes=4)
    world.call(1, nbytes=8)
    world.errors[0], world.ended = "RuntimeError: sizes", {0}
    world.pass_time(1.5)
    assert world.kinds == [DIFFERS]


@pytest.mark.parametrize(("how", "kind"), [(STOPPED, STOPPED), (GONE, GONE)])
def test_lost_rank_is_named_with_how_far_each_got(how: str, kind: str) -> None:
    world = World(4)
    world.all_call()
    world.pass_time(2)
    for rank in (0, 1, 3):
        world.call(rank, line=12)
    world.processes[2] = how
    world.pass_time(4)
    assert world.kinds == [kind]
    found = world.watch.findings[0]
    assert found.ranks == (2,)
    assert found.text.startswith(f"rank 2 is {kind}")
    assert "rank 2 made 1 calls" in found.text
    assert "ranks 0, 1, 3 made 2 calls, the last all_reduce of 4000 bytes at train.py:12" in found.text
    # Those that are ended because of it are not named as well.
    for rank in (0, 1, 3):
        world.processes[rank] = GONE
    world.pass_time(5)
    assert world.kinds == [kind] if how == GONE else [STOPPED, GONE]


def test_stopped_rank_that_goes_on_is_told() -> None:
    world = World(2)
    world.all_call()
    world.pass_time(1)
    world.call(0)
    world.processes[1] = STOPPED
    world.pass_time(6)
    world.processes[1] = HERE
    world.call(1)
    world.pass_time(2)
    assert world.kinds == [STOPPED]
    assert world.watch.findings[0].went_on_s > 0


def test_rank_of_another_machine_is_silent_only_where_others_wait() -> None:
    world = World(2)
    world.watch = HangWatch("job", host="elsewhere", now=lambda: world.time, process=lambda pid: GONE)
    world.all_call()
    world.pass_time(1)
    world.processes[1] = STOPPED
    world.still[0] = -20.0
    world.pass_time(10)
    assert world.kinds == []
    world.still[0] = 10.0
    world.pass_time(2)
    assert world.kinds == [SILENT]


def test_call_of_all_that_does_not_end_is_named() -> None:
    world = World(2)
    world.all_call()
    world.pass_time(NAMED_S)
    assert world.kinds == [STUCK]


def test_slow_rank_whose_pulse_is_late_is_not_named() -> None:
    """Rank 1 has come, and its pulse that says so is under way."""
    world = World(2)
    world.all_call()
    world.pass_time(1)
    world.mute = {1}
    world.call(0)
    world.pass_time(STILL_S + 0.5)
    world.call(1)
    world.call(0)
    world.mute = set()
    world.pass_time(1)
    assert world.kinds == []


def test_rank_that_is_not_let_run_is_not_named_until_it_could() -> None:
    world = World(3)
    world.all_call()
    world.call(0)
    world.call(2)
    world.pass_time(60, starved=(1,))
    assert world.kinds == []
    world.mute = {1}
    world.pass_time(60, starved=(1,))
    assert world.kinds == [], "nor where its pulse is not let run"
    world.mute = set()
    world.pass_time(NAMED_S)
    assert world.kinds == [BEHIND]
    assert world.watch.findings[0].ranks == (1,)


def test_ranks_that_wait_and_are_not_let_run_are_no_hang() -> None:
    world = World(2)
    world.all_call()
    world.pass_time(60, starved=(0, 1))
    assert world.kinds == []


def test_rank_that_holds_pythons_lock_is_named_in_time() -> None:
    world = World(2)
    world.all_call()
    world.pass_time(1)
    world.call(0)
    world.mute = {1}
    world.pass_time(9)
    assert world.kinds == [BEHIND]


def test_clock_of_starving_counts_the_thread_that_waited_longest() -> None:
    at, waits = {"now": 0.0}, {"a": 5.0}
    clock = StarvedClock(1, now=lambda: at["now"], waited=lambda pid: dict(waits))
    at["now"], waits["a"], waits["b"] = 10.0, 6.0, 3.0
    assert clock.read() == 3.0
    at["now"], waits["a"] = 11.0, 60.0
    assert (clock.read(), clock.age_s) == (4.0, 11.0), "not more than has passed"
    waits.clear()
    at["now"] = 20.0
    assert clock.read() == 4.0
    assert waited_s("self") == {} or all(seconds >= 0 for seconds in waited_s("self").values())
    assert waited_s(1 << 30) == {}


def test_started_again_it_counts_anew() -> None:
    world = World(2)
    world.call(0)
    world.watch.heard(world.pulse(0, True))
    later = Pulse(job="job", epoch=2, rank=1, size=2, beat=1, pid=1, host=HOST, still_s=30.0)
    world.watch.heard(later)
    world.time += 20
    world.watch.look()
    # Rank 0 of the start before is not waited for.
    assert BEHIND not in world.kinds


@pytest.mark.parametrize("seed", range(20))
def test_drawn_jobs_are_judged_as_they_were_drawn(seed: int) -> None:
    """Whoever made fewer calls than a rank that waits is named, and nobody else."""
    draw = np.random.default_rng(seed)
    world = World(int(draw.integers(2, 7)))
    for _ in range(int(draw.integers(1, 30))):
        world.all_call(nbytes=int(draw.integers(1, 5)) * 8)
    behind = [rank for rank in range(world.size) if draw.random() < 0.4]
    ahead = [rank for rank in range(world.size) if rank not in behind]
    for rank in ahead:
        world.call(rank)
    world.pass_time(NAMED_S, waits=False)
    if behind and ahead:
        assert world.kinds == [BEHIND]
        assert world.watch.findings[0].ranks == tuple(behind)
    else:
        assert world.kinds == []


def test_every_pair_of_different_calls_is_found() -> None:
    kinds = [("allreduce", -1), ("allgather", -1), ("barrier", -1), ("broadcast", 0), ("broadcast", 1)]
    for (op, root), (other, other_root) in combinations(kinds, 2):
        world = World(2)
        world.call(0, op=op, root=root)
        world.call(1, op=other, root=other_root)
        world.pass_time(STILL_S + 1)
        assert world.kinds == [DIFFERS], (op, other)


def test_ranks_that_go_because_of_a_signal_are_no_hang() -> None:
    world = World(2)
    world.all_call()
    world.call(0)
    world.pass_time(NAMED_S)
    assert world.kinds == [BEHIND]
    # Seen before the signal is heard of, which caused it.
    world.processes[1] = GONE
    world.watch.look()
    assert world.kinds == [BEHIND, GONE]
    world.watch.hush()
    world.pass_time(NAMED_S)
    world.processes[0] = GONE
    world.pass_time(NAMED_S)
    assert world.kinds == [BEHIND], "what was named before stays"
    assert not [line for line in world.said if "gone" in line]


def test_a_rank_that_was_lost_well_before_a_signal_stays_named() -> None:
    world = World(2)
    world.all_call()
    world.pass_time(1.0)
    world.processes[1] = GONE
    world.pass_time(3.0)
    world.watch.hush()
    assert world.kinds == [GONE] and [line for line in world.said if "gone" in line]


def test_controller_keeps_hangs_of_jobs_that_record_nothing() -> None:
    controller = Controller()
    try:
        controller.pulse(Pulse(job="job", epoch=1, rank=0, size=2, beat=1, pid=1, still_s=30.0))
        assert controller.status().hangs == ()
        with pytest.raises(InvalidInput, match="rank"):
            controller.pulse(Pulse(job="job", epoch=1, rank=2, size=2, beat=1, pid=1))
        with pytest.raises(InvalidInput, match="protocol"):
            controller.pulse(Pulse(protocol=9, job="job", epoch=1, rank=0, size=2, beat=1, pid=1))
        with pytest.raises(InvalidInput, match="protocol"):
            controller.hush(HushRequest(protocol=9, job="job"))
        controller.hush(HushRequest(job="unknown"))
    finally:
        controller.close()


def test_pytorchs_own_record_is_read() -> None:
    entry = {
        "frames": [
            {"filename": "/x/site-packages/torch/distributed/distributed_c10d.py", "line": 3},
            {"filename": "/home/me/train.py", "line": 40},
        ],
        "process_group": ("0", "default_pg"), "collective_seq_id": 3, "profiling_name": "nccl:all_reduce",
        "input_sizes": [[10, 2]], "input_dtypes": ["Float"], "state": "started", "retired": False, "is_p2p": False,
    }  # fmt: skip
    record = {"pg_config": {"0": {"ranks": "[0, 1]"}}, "entries": [entry, entry | {"is_p2p": True}]}
    (group,) = groups_of(record)
    assert (group.calls, group.ranks) == (3, (0, 1))
    (call,) = group.recent
    assert (call.op, call.nbytes, call.place, call.open) == ("all_reduce", 80, "/home/me/train.py:40", True)
