# SPDX-License-Identifier: Apache-2.0
"""A call under a plan on CUDA tensors: its motifs are queued on streams, and whose stream needs the result waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch

from ..torch_backend.cuda_clock import Clock, Event, event_of
from ..torch_backend.work import NO_TIMEOUT, Future, Tensors
from .compiled_op import CompiledMotif, CompiledOp
from .futures import taken
from .memory import Pool, stage
from .planned_work import PlannedWork
from .sequencer import ActiveMotif, QueuedMotif, QueuedOp, Sequencer
from .submission import MotifRunner, StagedSubmission, SubmissionOwner


class StreamPool(Pool):
    """Staging memory of the current stream, which PyTorch gives to nobody else before the stream is done with it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def take(self, dtype: torch.dtype, size: int) -> torch.Tensor:
        """A tensor of `size` elements that are not set."""
        return torch.empty(size, dtype=dtype, device=self._device)

    def give(self, tensor: torch.Tensor) -> None:
        """Do nothing: PyTorch's allocator gets the tensor's memory when nothing refers to it."""


class OpMemory(Protocol):
    """The memory of an op."""

    @property
    def kept(self) -> bool:
        """Whether it must not be given back yet."""


class StreamCarrier(MotifRunner, Protocol):
    """A carrier whose motifs are queued on streams of a GPU."""

    device: torch.device
    clock: Clock[QueuedOp]

    def turn(
        self, loaded: CompiledMotif, motif: QueuedMotif, after: Sequence[Event]
    ) -> contextlib.AbstractContextManager[tuple[Event, Event]]:
        """What runs inside goes to the motif's stream, behind these events; gives those of its begin and end.

        Args:
            loaded: The motif as the carrier has loaded it.
            motif: The motif in the order of the plan.
            after: Events that it has to wait for.

        Returns:
            A context manager that gives the events of the motif's begin and end.
        """

    def side(self) -> torch.cuda.Stream:
        """A stream for what comes behind the motifs of an op."""

    def hold(self, held: OpMemory) -> None:
        """Keep the memory of an op as long as it is needed."""

    def check(self) -> None:
        """Raise what has ended the plan."""


class StreamSubmission(StagedSubmission):
    """The memory of a submitted op on a GPU."""

    def __init__(self, owner: SubmissionOwner, carrier: StreamCarrier, queued: QueuedOp, compiled: CompiledOp) -> None:
        self._streams = StreamPool(carrier.device)
        super().__init__(owner, carrier, queued, compiled, pool=self._streams)
        self._nccl = carrier
        self.stream = torch.cuda.current_stream(carrier.device)
        self.begun = event_of()
        self.begun.record(self.stream)
        self.ends: dict[int, Event] = {}
        """The event at the end of each motif; the application waits for those that are left."""
        call = queued.call
        assert call is not None
        self._kept: list[torch.Tensor] = [*call.inputs, *call.outputs]
        self._kept += [tensor for tensor in self._regions if tensor is not None]

    def start(self, motif: QueuedMotif) -> ActiveMotif | None:
        """Queue a motif, with the copies before and behind it: nothing is left to wait for."""
        number = motif.rank_motif.number
        loaded = self._compiled.motifs[number] if self._compiled is not None else None
        if loaded is None or self._buffers is None:
            return None
        after = [self.begun, *(self.ends[before] for before in motif.rank_motif.after if before in self.ends)]
        with self._nccl.turn(loaded, motif, after) as (begin, end):
            staged = stage(loaded.layout, self._regions, self._dtype, self._streams)
            self._nccl.start(loaded, staged, self._buffers.dtype, self._op, motif, blocking=False)
            staged.back(self._regions, self._streams)
        self.ends[number] = end

        def ran(begin_us: float, end_us: float) -> None:
            motif.start_us, motif.end_us = begin_us, end_us
            self._owner.spent(self._queued, number, begin_us, end_us)

        self._nccl.clock.note(begin, end, ran, self._queued)
        return None

    def over(self) -> None:
        """All motifs are queued; what is left to do with the result is queued behind them."""
        assert self._buffers is not None
        if self._divides or self._buffers.finish is not None:
            stream = self._nccl.side()
            with torch.cuda.stream(stream):
                for event in (self.begun, *self.ends.values()):
                    stream.wait_event(event)
                super().over()
                last = event_of()
                last.record(stream)
            self.ends = {0: last}
        self.let_go()
        self._nccl.hold(self)

    def join(self) -> torch.cuda.Stream:
        """Make the current stream wait for the result. The memory is safe from then on."""
        stream = torch.cuda.current_stream(self._nccl.device)
        for event in self.ends.values():
            stream.wait_event(event)
        if stream != self.stream:
            for tensor in self._kept:
                tensor.record_stream(stream)
        self._kept = []
        return stream

    @property
    def kept(self) -> bool:
        """Whether its memory must not be given back yet: no stream waits, and the GPU is not done."""
        return bool(self._kept) and not self.arrived

    @property
    def arrived(self) -> bool:
        """Whether the GPU is done with it."""
        return all(event.query() for event in self.ends.values())

    def run_plainly(self) -> None:
        """Run the call as the application asked: none of its motifs has started, and none will."""
        torch.cuda.current_stream(self._nccl.device).wait_event(self.begun)
        super().run_plainly()


class StreamWork(PlannedWork):
    """A call that a plan carries out on a GPU: ``wait`` blocks the current stream, and the host only if it is held."""

    def __init__(
        self,
        owner: SubmissionOwner,
        sequencer: Sequencer,
        queued: QueuedOp,
        submission: StreamSubmission,
        tensors: Tensors,
        carrier: StreamCarrier,
    ) -> None:
        super().__init__(owner, sequencer, queued, submission, tensors)
        self._queued, self._submission, self._nccl = queued, submission, carrier

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Make the current stream wait; every stream that uses the result needs one of its own."""
        self._nccl.check()
        limit_s = timeout.total_seconds() if timeout > NO_TIMEOUT else float("inf")
        if not self._wait(self._queued, limit_s):
            raise TimeoutError(f"the operation was held back for {timeout.total_seconds():g} s")
        queued, instead = self._queued, self._submission.instead
        if instead is not None:
            return bool(instead.wait())
        if queued.error is not None:
            raise self._owner.explain(queued, queued.error)
        if self._submission.arrived:
            self._submission.join()
            return True
        device = self._nccl.device
        stream = torch.cuda.current_stream(device)
        before, behind = event_of(timing=True), event_of(timing=True)
        before.record(stream)
        self._submission.join()
        behind.record(stream)
        self._nccl.clock.note(before, behind, lambda begin, end: self._owner.waited(queued, begin, end), queued)
        return True

    def is_completed(self) -> bool:
        """Whether the GPU has done it, well or not."""
        if not self._queued.done:
            return False
        instead = self._submission.instead
        if instead is not None:
            return bool(instead.is_completed())
        return self._queued.error is not None or self._submission.arrived

    def exception(self) -> Exception | None:
        """What went wrong, once it has ended."""
        return self._queued.error if self._queued.done else None

    @property
    def forgettable(self) -> bool:
        """Whether its tensors need not be kept for its sake."""
        return self._queued.done and not self._submission.kept

    def strip(self) -> None:
        """Let go of everything but whether it went well."""
        self._tensors = []
        self._future = None

    def _make_future(self) -> Future:
        device, tensors, submission = self._nccl.device, self._tensors, self._submission
        taken(self)
        done: Future = torch.futures.Future(devices=[device])

        def value(_: Future) -> Tensors:
            # An exception set on a future is invisible to C++; one raised in a callback is not.
            if self._queued.error is not None:
                raise self._queued.error
            return tensors

        child: Future = done.then(value)

        def over() -> None:
            # A future remembers where the current stream stands, and whoever waits for it makes his stream wait.
            with torch.cuda.stream(self._nccl.side()):
                with contextlib.suppress(Exception):
                    if self._submission.instead is not None:
                        self._submission.instead.wait()
                    elif self._queued.error is None:
                        submission.join()
                done.set_result(tensors)

        self._when_queued(over)
        return child

    def _when_queued(self, then: Callable[[], object]) -> None:
        with self._sequencer.lock:
            if not self._queued.done:
                self._queued.callbacks.append(then)
                return
        then()
