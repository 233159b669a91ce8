# SPDX-License-Identifier: Apache-2.0
"""Times of the job's own backend, what plans above it cost by them, and times of a GPU, without one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch.distributed as dist

from stretto import simulate
from stretto.algorithms import algorithm
from stretto.control import own_times as timing
from stretto.control.messages import decode_captured, encode_captured
from stretto.control.own_costs import OwnCosts, OwnTime, cluster_of, fitted, share_of_bytes
from stretto.control.worker import PlanRequest, answer
from stretto.errors import Infeasible
from stretto.planner.costs.channels import bindings_for
from stretto.planner.costs.costs import Motion
from stretto.runtime.capture import gpu_times
from stretto.runtime.torch_backend.own_backend import OwnBackend
from stretto.workload import Dep, Op, Workload


@pytest.mark.parametrize("size", [2, 4, 7])
def test_fitted_link_makes_a_ring_take_what_was_measured(size: int) -> None:
    small_us, large_us, nbytes = 60.0, 9000.0, float(1 << 24)
    cluster = cluster_of([list(range(size))], fitted(size, small_us, large_us, nbytes), (0.0, 0.0))
    ring = algorithm("ring", "all_reduce", size)
    assert simulate(ring, cluster, nbytes=nbytes).total_us == pytest.approx(large_us, rel=0.02)
    assert simulate(ring, cluster, nbytes=1024).total_us == pytest.approx(small_us, rel=0.05)


def test_hosts_have_an_uplink_each() -> None:
    cluster = cluster_of([[0, 1], [2, 3]], (2.0, 100.0), (12.0, 10.0))
    assert (cluster.num_devices, cluster.num_hosts) == (4, 2)
    ring = algorithm("ring", "all_reduce", 4)
    # The uplink is what a ring over all waits for: 6 steps of a quarter of the bytes.
    assert simulate(ring, cluster, nbytes=1e8).total_us == pytest.approx(6 * 25e6 / 10e3, rel=0.02)


def test_unmeasured_times_fit_nothing() -> None:
    assert fitted(1, 5.0, 9.0, 1e6) == fitted(4, 5.0, 5.0, 1e6) == (0.0, 0.0)


UPLINK, INSIDE, LATENCY = 125.0, 3000.0, 300.0
"""Bytes per microsecond, and microseconds, of a made-up network."""
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def ring_us(kind: str, scope: str, ranks: int, groups: int, nbytes: float) -> float:
    """What rings take on that network: one flow out of each host, or one of each group."""
    rate = INSIDE if scope == "intra" else UPLINK / groups
    return LATENCY * (ranks - 1) + share_of_bytes(kind, ranks) * nbytes / rate


def timed(monkeypatch: pytest.MonkeyPatch, hosts: list[str], rank: int) -> tuple[OwnTime, ...]:
    """`own_times` on a made-up network, as one rank."""
    groups: dict[int, tuple[str, int, int]] = {}

    class Group:
        """Knows nothing but its ranks."""

        def __init__(self, ranks: list[int]) -> None:
            scope, found = next((s, g) for s, g in timing.scopes_of(hosts) if tuple(ranks) in g)
            groups[id(self)] = (scope, len(ranks), len(found))

    class World:
        WORLD = Group(list(range(len(hosts))))

    def time_us(kind: str, nbytes: int, ranks: int, group: Any, times: int, library: str) -> float:
        scope, size, count = groups[id(group)]
        assert size == ranks and times >= 1 and library == "nccl"
        return ring_us(kind, scope, ranks, count if scope == "inter" else 1, nbytes)

    kept: list[Group] = []

    def new_group(ranks: list[int]) -> Group:
        kept.append(Group(ranks))
        return kept[-1]

    monkeypatch.setattr(timing, "_time_us", time_us)
    monkeypatch.setattr(timing, "_slowest", lambda value, library: value)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "group", World)
    monkeypatch.setattr(dist, "new_group", new_group)
    return timing.own_times(hosts, KINDS, 64e6, "nccl")


HOSTS = [*"aabb"]


def test_costs_are_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    times = timed(monkeypatch, HOSTS, 0)
    cluster = timing.own_cluster(HOSTS, times)
    costs = OwnCosts(cluster, times)
    for groups, scope in ((((0, 1, 2, 3),), "mixed"), (((0, 1), (2, 3)), "intra"), (((0, 1),), "intra")):
        for kind in KINDS:
            channels = ("local",) if scope == "intra" else ("local", "network")
            motion = Motion(kind=kind, groups=groups, channels=channels)
            (name,) = costs.algorithms(motion, 1e6)
            for nbytes in (1024.0, 3e5, 5e6, 200e6):
                want = ring_us(kind, scope, len(groups[0]), 1, nbytes)
                assert costs.cost(motion, nbytes, name).us == pytest.approx(want, rel=0.02)


def test_groups_of_other_sizes_cost_by_the_bytes_that_ranks_send() -> None:
    draw = random.Random(3)
    cluster = cluster_of([list(range(8))], (1.0, 10.0), (1.0, 10.0))
    for _ in range(50):
        latency, rate = draw.uniform(10, 500), draw.uniform(50, 5000)

        def us(kind: str, ranks: int, nbytes: float, latency: float = latency, rate: float = rate) -> float:
            return latency * (ranks - 1) + share_of_bytes(kind, ranks) * nbytes / rate

        sizes = (1.0, 1e6, 4e6)
        times = [
            OwnTime(kind="all_reduce", scope="intra", ranks=8, times=tuple((s, us("all_reduce", 8, s)) for s in sizes))
        ]
        costs = OwnCosts(cluster, times)
        ranks, kind = draw.randint(2, 8), draw.choice(("all_reduce", "all_gather", "reduce_scatter", "broadcast"))
        nbytes = draw.uniform(2e6, 1e8)
        motion = Motion(kind=kind, groups=(tuple(range(ranks)),), channels=cluster.channels)
        (name,) = costs.algorithms(motion, nbytes)
        assert costs.cost(motion, nbytes, name).us == pytest.approx(us(kind, ranks, nbytes), rel=0.01)


def test_nothing_is_known_of_what_was_not_timed() -> None:
    cluster = cluster_of([[0, 1], [2, 3]], (1.0, 10.0), (1.0, 1.0))
    costs = OwnCosts(cluster, [OwnTime(kind="all_reduce", scope="mixed", ranks=4, times=((1e3, 5.0), (1e6, 900.0)))])
    inside = Motion(kind="all_reduce", groups=((0, 1), (2, 3)), channels=("local",))
    assert costs.algorithms(inside, 1e6) == []
    with pytest.raises(Infeasible, match="was not timed"):
        costs.cost(inside, 1e6, "nccl")


@pytest.mark.parametrize(("each", "least"), [(2, 1.4), (4, 1.6)])
def test_sums_behind_uplinks_are_planned_in_steps(monkeypatch: pytest.MonkeyPatch, each: int, least: float) -> None:
    """A ring over all ranks sends 2 (n - 1) / n of the bytes over an uplink; in steps it is once the bytes."""
    hosts = ["a"] * each + ["b"] * each
    times = timed(monkeypatch, hosts, 0)
    cluster = timing.own_cluster(hosts, times)
    ops = [Op(name="forward", duration_us=2000.0), Op(name="backward", duration_us=4000.0, after=(Dep(op="forward"),))]
    names = [f"gradients.{at}" for at in range(3)]
    ops += [Op(name=name, kind="all_reduce", nbytes=8e6, after=(Dep(op="backward", why="submit"),)) for name in names]
    waits = (Dep(op="backward"), *(Dep(op=name, why="wait") for name in names))
    step = Workload(name="step", num_ranks=2 * each, ops=(*ops, Op(name="update", duration_us=100.0, after=waits)))
    captured = encode_captured(step, cluster, 500.0, own_times=times)
    assert decode_captured(captured)[0].digest == step.digest
    found = answer(PlanRequest(captured=captured, budget_s=1.0))
    assert not found.error
    alone = 3 * ring_us("all_reduce", "mixed", 2 * each, 1, 8e6) + 6100.0
    assert found.plain_us == pytest.approx(alone, rel=0.03)
    assert found.plain_us / found.iteration_us > least


def test_hosts_that_differ_have_only_all_ranks_timed() -> None:
    assert [scope for scope, _ in timing.scopes_of([*"aab"])] == ["mixed"]
    assert [scope for scope, _ in timing.scopes_of([*"abc"])] == ["inter"]
    assert timing.kinds_of(
        Workload(name="s", num_ranks=2, ops=(Op(name="a", kind="all_to_all", nbytes=8.0, after=()),))
    ) == ("all_to_all",)


def test_own_backend_of_gpus_is_nccl() -> None:
    own = OwnBackend()
    assert [own.serves("cpu"), own.serves("cuda")] == [True, False]
    own.stand_in("nccl")
    assert [own.serves("cpu"), own.serves("cuda")] == [True, True]


class FakeGpu:
    """A GPU on which every record takes a microsecond, and waiting for a collective nine."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def event(self, **_: object) -> Any:
        """One that remembers when it was recorded."""
        gpu = self

        class Event:
            at_ms = -1.0

            def record(self, stream: object = None) -> None:
                gpu.now_ms += 0.001
                self.at_ms = gpu.now_ms

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Any) -> float:
                return float(other.at_ms - self.at_ms)

        return Event()


def test_moments_are_written_when_the_recording_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()

    class Stream:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    class Cuda:
        Event = staticmethod(gpu.event)
        Stream = staticmethod(lambda *_, **more: Stream())
        stream = staticmethod(lambda stream: stream)
        current_stream = staticmethod(lambda device: Stream())
        synchronize = staticmethod(lambda device: None)

    class Work:
        def get_future(self) -> Work:
            return self

        def wait(self) -> None:
            gpu.now_ms += 0.009

    class Call:
        begin_us = end_us = float("nan")

    monkeypatch.setattr(gpu_times, "cuda", Cuda)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    times, call = gpu_times.GpuTimes(), Call()
    times.put(times.here(), call, "begin_us")
    times.put(times.end_of(Work()), call, "end_us")
    assert call.end_us != call.end_us
    times.resolve()
    assert call.end_us - call.begin_us == pytest.approx(10.0, abs=1e-3)


def test_no_size_is_cheaper_for_each_byte_than_the_largest() -> None:
    # A shaper lets what it has saved up through at once.
    rows = ((1e3, 100.0), (262144.0, 300.0), (16777216.0, 35000.0))
    hosts = [*"ab"]
    time = OwnTime(kind="all_reduce", scope="inter", ranks=2, times=rows)
    cluster = timing.own_cluster(hosts, [time])
    costs = OwnCosts(cluster, [time])
    motion = Motion(kind="all_reduce", groups=((0, 1),), channels=bindings_for(cluster, ((0, 1),))[0].channels)
    (algorithm,) = costs.algorithms(motion, 262144.0)
    assert costs.cost(motion, 262144.0, algorithm).us == pytest.approx(35000.0 / 64)
    assert costs.cost(motion, 16777216.0, algorithm).us == pytest.approx(35000.0)
