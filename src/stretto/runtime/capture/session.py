# SPDX-License-Identifier: Apache-2.0
"""`capture`: record a `Workload` from a PyTorch training step as it runs, without a change to the model."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from ...errors import InvalidInput, StrettoError
from ...units import format_us
from ...workload import Workload
from .merge import merge
from .tape import RankRecording, RecordedIteration, trace_of

if TYPE_CHECKING:
    from .clock import Offset
    from .hooks import Hooks

MAX_ITERATIONS = 1000
LET_GO_S = 0.05
SETTLE_S = 2.0
"""How long to wait at the end for ops that the application has not waited for."""


def capture(
    *, iterations: int = 5, skip: int = 2, name: str = "captured", samples: float = 0.0, only_ours: bool = False,
    gpu: bool = False,
) -> Recorder:  # fmt: skip
    """Record the training step that runs inside the ``with`` block, on all ranks of the job.

    ::

        with stretto.torch.capture(iterations=5, skip=2) as recorder:
            for batch in loader:
                train_step(batch)
                recorder.step()
        recorder.workload.save("step.yaml")

    The first `skip` iterations are not used: DDP arranges its buckets in them. After `iterations` more the hooks are
    gone and the loop may go on; leaving the block is a collective call, and the workload is the same on every rank.
    `samples` is what all ranks together train on in an iteration. Process groups on the CPU (gloo) are recorded; with
    `only_ours` those of the backend `stretto` alone, whose calls an enforcer sees. With `gpu` these are calls on CUDA
    tensors as well, and times are those of the GPU, by events in its streams.

    Raises `InvalidInput` on every rank when the iterations, or the ranks, do not do the same in the same order.

    Args:
        iterations: How many are recorded.
        skip: How many are left out before.
        name: The name of the workload.
        samples: What all ranks together train on in an iteration.
        only_ours: Record calls of the backend `stretto` alone.
        gpu: Record calls on CUDA tensors, too.

    Returns:
        The recorder: a context manager with `step()`, and `workload` after the block.
    """
    return Recorder(iterations=iterations, skip=skip, name=name, samples=samples, only_ours=only_ours, gpu=gpu)


class Recorder:
    """What `capture` gives: call `step` at the end of every iteration, then read `workload`."""

    def __init__(
        self, *, iterations: int, skip: int, name: str, samples: float, only_ours: bool = False, gpu: bool = False
    ) -> None:
        if not 1 <= iterations <= MAX_ITERATIONS:
            raise InvalidInput(f"iterations: must be 1..{MAX_ITERATIONS}, not {iterations}")
        if skip < 1:
            raise InvalidInput(f"skip: must be >= 1 (what the first iteration waits for is not known), not {skip}")
        self.name = name
        self.samples = samples
        self.iterations = iterations
        self.skip = skip
        self.only_ours, self.gpu = only_ours, gpu
        self.done = False
        """Whether enough iterations are recorded."""
        self._seen = 0
        self._tape: list[RecordedIteration] = []
        self._hooks: Hooks | None = None
        self._offsets: list[Offset] = []
        self._workload: Workload | None = None
        self._iteration_us = 0.0
        self._overhead_us = 0.0

    @property
    def workload(self) -> Workload:
        """What was recorded, once the block is left."""
        if self._workload is None:
            raise InvalidInput("workload: is there after the `with` block of stretto.torch.capture has ended")
        return self._workload

    @property
    def iteration_us(self) -> float:
        """The median time of the recorded iterations, on the slowest rank."""
        return self._iteration_us

    @property
    def overhead(self) -> float:
        """Which share of an iteration the recording itself took, on the rank where it took most."""
        return self._overhead_us / self._iteration_us if self._iteration_us else 0.0

    def step(self) -> None:
        """Mark the end of an iteration."""
        if self._hooks is None or self.done:
            return
        iteration = self._hooks.cut()
        self._seen += 1
        if self._seen > self.skip:
            self._tape.append(iteration)
        if len(self._tape) == self.iterations:
            self._hooks.remove()
            self.done = True
            if self._hooks.gpu is not None:
                self._hooks.gpu.resolve()

    def __enter__(self) -> Recorder:
        try:
            import torch.distributed as dist
        except ImportError:
            raise InvalidInput("capture needs PyTorch: pip install 'stretto[torch]'") from None
        if not dist.is_available() or not dist.is_initialized():
            raise InvalidInput("capture: call torch.distributed.init_process_group first")
        if dist.get_world_size() < 2:
            raise InvalidInput("capture: a job of one rank does not communicate")
        from .clock import offsets
        from .hooks import Hooks

        self._offsets = offsets()
        self._hooks = Hooks(only_ours=self.only_ours, gpu=self.gpu)
        self._hooks.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._hooks is not None
        self._hooks.remove()
        if error is None:
            self._finish(self._hooks)

    def _finish(self, hooks: Hooks) -> None:
        import torch.distributed as dist

        mine: RankRecording | str
        try:
            if hooks.refusal:
                raise InvalidInput(f"capture: {hooks.refusal}")
            if not self.done:
                wanted = f"skip + iterations = {self.skip + self.iterations}"
                raise InvalidInput(f"capture: step() was called {self._seen} times, fewer than {wanted}")
            self._settle()
            mine = trace_of(dist.get_rank(), self._tape)
        except StrettoError as error:
            # Every rank must get to the exchange below, or the others would wait for it forever.
            mine = str(error)
        gathered: list[RankRecording | str] = [""] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        wrong = next((part for part in gathered if isinstance(part, str)), None)
        if wrong is not None:
            raise InvalidInput(wrong)
        traces = [part for part in gathered if isinstance(part, RankRecording)]
        self._iteration_us = max(float(np.median(trace.end_us - trace.begin_us)) for trace in traces)
        self._overhead_us = max(trace.overhead_us for trace in traces)
        self._workload = merge(
            traces,
            [offset.offset_us for offset in self._offsets],
            name=self.name,
            samples=self.samples,
            notes=self._notes(traces),
        )

    def _settle(self) -> None:
        deadline = time.monotonic() + SETTLE_S
        calls = [call for iteration in self._tape for call in iteration.calls if call.exact]
        while any(np.isnan(call.end_us) for call in calls) and time.monotonic() < deadline:
            time.sleep(0.001)
        # The library's threads still have to let go of our callbacks, for which they need the interpreter's lock. A
        # process group that ended meanwhile would wait for them with that lock held.
        time.sleep(LET_GO_S)

    def _notes(self, traces: list[RankRecording]) -> tuple[str, ...]:
        notes = [
            f"captured from a running job: medians of {self.iterations} iterations after {self.skip}",
            f"an iteration took {format_us(self._iteration_us)} on the slowest rank, of which recording took "
            f"{format_us(self._overhead_us)} ({self.overhead:.2%})",
        ]
        error_us = max(offset.error_us for offset in self._offsets)
        if error_us:
            notes.append(f"clocks of different hosts were set to within {format_us(error_us)}")
        late = sum(not exact for exact in traces[0].exact)
        if late:
            notes.append(
                f"{late} comm-ops do not tell when they end: their durations go up to where rank 0 had waited for them"
            )
        return tuple(notes)
