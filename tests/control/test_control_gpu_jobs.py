# SPDX-License-Identifier: Apache-2.0
"""What `stretto run` does otherwise on NCCL, as far as it can be tried without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from stretto import simulate
from stretto.algorithms import algorithm
from stretto.control.gpu_jobs import cluster_of, fitted
from stretto.runtime.capture import gpu_times
from stretto.runtime.torch_backend.own_backend import OwnBackend


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
