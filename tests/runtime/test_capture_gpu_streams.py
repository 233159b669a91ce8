# SPDX-License-Identifier: Apache-2.0
"""Calls on streams that are not the application's own, as FSDP2 makes them: recorded on a GPU that is played here."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from stretto.runtime.capture import gpu_streams, gpu_times
from stretto.runtime.capture.hooks import Hooks
from stretto.runtime.capture.merge import merge
from stretto.runtime.capture.tape import trace_of
from stretto.runtime.torch_backend.watch import SubmittedCall

LAYERS = 3
COMPUTE_US, GATHER_US = 100.0, 400.0


class PlayedGpu:
    """Streams with clocks of their own; what is queued takes its time, and waits take the later of two."""

    def __init__(self) -> None:
        self.streams: list[PlayedStream] = []
        self.current = PlayedStream(self)

    def event(self, **_: object) -> PlayedEvent:
        return PlayedEvent(self)


class PlayedStream:
    def __init__(self, gpu: PlayedGpu) -> None:
        self.gpu, self.at_us = gpu, 0.0

    def __enter__(self) -> PlayedStream:
        self.before, self.gpu.current = self.gpu.current, self
        return self

    def __exit__(self, *_: object) -> None:
        self.gpu.current = self.before


class PlayedEvent:
    def __init__(self, gpu: PlayedGpu) -> None:
        self.gpu, self.at_us = gpu, 0.0

    def record(self, stream: PlayedStream) -> None:
        self.at_us = stream.at_us

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: PlayedEvent) -> float:
        return (other.at_us - self.at_us) / 1e3


class PlayedWork(dist.Work):
    """A blocking call: it runs in the stream that is current."""

    def __init__(self, gpu: PlayedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def wait(self, timeout: object = None) -> bool:
        self.gpu.current.at_us += GATHER_US
        return True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedGpu]:
    played = PlayedGpu()

    class Cuda:
        Event = staticmethod(played.event)
        Stream = staticmethod(lambda *_, **more: PlayedStream(played))
        stream = staticmethod(lambda stream: stream)
        current_stream = staticmethod(lambda device: played.current)
        synchronize = staticmethod(lambda device: None)

    monkeypatch.setattr(gpu_times, "cuda", Cuda)
    monkeypatch.setattr(gpu_streams, "cuda", Cuda)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    yield played


class PlayedModel:
    """The forward pass of FSDP2: gathers are issued on a stream that stands behind the layer before the last."""

    def __init__(self, gpu: PlayedGpu, hooks: Hooks, *, gives_work: bool = True) -> None:
        self.gpu, self.hooks, self.main, self.side = gpu, hooks, gpu.current, PlayedStream(gpu)
        self.gives_work = gives_work
        self.copied: PlayedEvent | None = None

    def event(self, stream: PlayedStream) -> PlayedEvent:
        event = PlayedEvent(self.gpu)
        event.record(stream)
        assert self.hooks.trails is not None
        self.hooks.trails.recorded(event, stream)
        return event

    def wait(self, stream: PlayedStream, event: PlayedEvent) -> None:
        assert self.hooks.trails is not None
        self.hooks.trails.awaited(event, stream)
        stream.at_us = max(stream.at_us, event.at_us)

    def gather(self) -> PlayedEvent:
        what = SubmittedCall(op="all_gather", ranks=(0, 1), channel="w", nbytes=64, device="cuda", blocking=True)
        with self.side:
            self.hooks.seen(what, self.run).wait()
            return self.event(self.side)

    def run(self) -> Any:
        if self.gives_work:
            return PlayedWork(self.gpu)
        self.gpu.current.at_us += GATHER_US
        return None

    def layer(self) -> None:
        gathered = self.gather()
        if self.copied is not None:
            self.wait(self.side, self.copied)
        self.wait(self.main, gathered)
        self.copied = self.event(self.main)
        self.main.at_us += COMPUTE_US

    def iteration(self) -> None:
        self.copied = None
        self.wait(self.side, self.event(self.main))
        for _ in range(LAYERS):
            self.layer()
        self.main.at_us += 50.0


@pytest.mark.parametrize("gives_work", [True, False])
def test_gathers_on_a_stream_of_their_own_are_waited_for_where_the_application_does(
    gpu: PlayedGpu, gives_work: bool
) -> None:
    hooks = Hooks(only_ours=True, gpu=True)
    hooks.active = True
    model = PlayedModel(gpu, hooks, gives_work=gives_work)
    seen = []
    for _ in range(3):
        model.iteration()
        seen.append(hooks.cut())
    assert hooks.gpu is not None and not hooks.refusal
    hooks.gpu.resolve()
    steps = [(mark.step.what, mark.step.call, mark.step.behind) for mark in seen[-1].marks]
    # The second gather begins behind the first, before the application waits for that; the third behind a copy.
    assert steps == [
        ("submit", 0, -1), ("submit", 1, 0), ("wait", 0, -1), ("submit", 2, 1), ("wait", 1, -1), ("wait", 2, -1),
    ]  # fmt: skip
    traces = [trace_of(rank, seen[1:]) for rank in range(2)]
    workload = merge(traces, [0.0, 0.0], name="step", samples=0.0, notes=())
    gathers = [op for op in workload.ops if op.kind == "all_gather"]
    assert [op.duration_us for op in gathers] == [GATHER_US] * LAYERS
    compute = [op for op in workload.ops if op not in gathers]
    assert sum(op.duration_us for op in compute) == pytest.approx(LAYERS * COMPUTE_US + 50.0)
    before = {op.name: {dep.op for dep in op.after} for op in workload.ops}
    for one, following in pairwise(gathers):
        assert one.name in before[following.name]
    # No gather waits for the layer before it: they overlap.
    first = next(op.name for op in compute if gathers[0].name in before[op.name])
    assert first not in before[gathers[1].name]


def test_a_stream_that_the_recording_has_not_seen_wait_submits_at_once(gpu: PlayedGpu) -> None:
    hooks = Hooks(only_ours=True, gpu=True)
    hooks.active = True
    model = PlayedModel(gpu, hooks)
    gpu.current.at_us = 100.0
    event = model.gather()
    model.wait(model.main, event)
    seen = hooks.cut()
    assert [mark.step.what for mark in seen.marks] == ["submit", "wait"]
    assert not hooks.refusal


def test_a_blocking_call_for_which_nccl_gives_no_work_is_waited_for(gpu: PlayedGpu) -> None:
    hooks = Hooks(only_ours=True, gpu=True)
    hooks.active = True
    model = PlayedModel(gpu, hooks, gives_work=False)
    what = SubmittedCall(op="all_to_all", ranks=(0, 1), channel="w", nbytes=64, device="cuda", blocking=True)
    for _ in range(2):
        hooks.seen(what, model.run).wait()
        model.main.at_us += COMPUTE_US
        seen = hooks.cut()
    assert hooks.gpu is not None
    hooks.gpu.resolve()
    assert [mark.step.what for mark in seen.marks] == ["submit", "wait"]
    workload = merge([trace_of(rank, [seen]) for rank in range(2)], [0.0, 0.0], name="step", samples=0.0, notes=())
    assert [(op.kind, op.duration_us) for op in workload.ops] == [("all_to_all", GATHER_US), ("compute", COMPUTE_US)]


def test_modules_are_looked_at_until_one_runs_and_again_after_each_backward_pass(gpu: PlayedGpu) -> None:
    """A hook on all modules costs every one of them; the phases of an iteration need the first alone."""
    hooks = Hooks(only_ours=True, gpu=True)
    layer = torch.nn.Linear(1, 1)
    looked_at = torch.nn.modules.module._global_forward_pre_hooks
    hooks.install()
    try:
        for _ in range(2):
            for _ in range(2):
                assert len(looked_at) == 1
                loss = layer(layer(torch.ones(1, 1)))
                assert not looked_at
                loss.backward()
            steps = [mark.step for mark in hooks.cut().marks]
            assert [step.phase for step in steps] == ["forward", "backward", "optimizer"] * 2
    finally:
        hooks.remove()
    assert not looked_at
