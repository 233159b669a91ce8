# SPDX-License-Identifier: Apache-2.0
"""A call on its way under a plan: what a carrier is given, and the memory that the motifs of a submitted op work on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ...process_state import STATE
from ..torch_backend.buffers import Buffers, CollectiveCall, lay_out
from ..torch_backend.recording import current
from ..torch_backend.work import GroupWork, Tensors
from .compiled_op import CompiledOp, LoadedMotif
from .memory import Pool, StagedBuffers, stage
from .sequencer import ActiveMotif, QueuedMotif, QueuedOp

POOL = STATE.part(Pool)
ONE_TENSOR = ("all_reduce", "broadcast", "reduce")
"""Ops that overwrite the one tensor that every rank gives."""
Plain = Callable[[], GroupWork]
"""Runs a call as the application asked for it, without the plan."""


def never() -> GroupWork:
    """In the place of a call that runs, or has run, in plain order already."""
    raise AssertionError("it runs in plain order already")


class SubmissionOwner(Protocol):
    """What a submitted op tells the enforcer."""

    def stalled(self, instance: QueuedOp) -> None:
        """A wait has taken long."""

    def explain(self, instance: QueuedOp, error: Exception) -> Exception:
        """What lies behind an error."""

    def waited(self, instance: QueuedOp, begin_us: float, end_us: float) -> None:
        """The application stood in ``wait()``."""

    def spent(self, instance: QueuedOp, motif: int, start_us: float, end_us: float) -> None:
        """A motif ran from one moment to another."""


class PlannedCall:
    """A call together with its place in the order of the active plan, as `Carrier.submit` gets it."""

    __slots__ = ("_buffers", "_laid_out", "_rank", "_size", "blocking", "call", "plain", "queued", "tensors")

    def __init__(
        self, call: CollectiveCall, queued: QueuedOp, tensors: Tensors, plain: Plain, rank: int, size: int,
        blocking: bool,
    ) -> None:  # fmt: skip
        self.call, self.queued, self.tensors, self.plain = call, queued, tensors, plain
        self._rank, self._size = rank, size
        self.blocking = blocking
        """Whether the application waits at once, for this call alone."""
        self._laid_out = False
        self._buffers: Buffers | None = None

    @property
    def buffers(self) -> Buffers | None:
        """The call's memory, flat and in one piece for each side; None where its tensors do not fit together.

        Laid out when it is first asked for: that may copy.
        """
        if not self._laid_out:
            self._laid_out = True
            self._buffers = lay_out(self.call, self.call.op, self._rank, self._size)
        return self._buffers


class SubmittedOp(ABC):
    """What the application gave for a queued op; the sequencer has it start the op's motifs, each in its turn."""

    __slots__ = ("_ended", "_owner", "_plain", "_queued", "inline", "instead")

    def __init__(self, owner: SubmissionOwner, queued: QueuedOp, plain: Plain) -> None:
        self._owner, self._queued, self._plain = owner, queued, plain
        self.inline = False
        """Whether the thread that submits waits at once."""
        self.instead: GroupWork | None = None
        """What runs in plain order after all."""
        self._ended: dict[int, Callable[[float | None], None]] | None = None
        """Of motifs that are recorded."""

    @abstractmethod
    def start(self, entry: QueuedMotif) -> ActiveMotif | None:
        """Begin a motif; None where there is nothing to wait for."""

    @abstractmethod
    def watch(self, entry: QueuedMotif) -> None:
        """From now on somebody waits for the end of a motif that runs already."""

    @abstractmethod
    def moved(self, entry: QueuedMotif) -> None:
        """A motif's data has arrived: bring it where it belongs."""

    @abstractmethod
    def over(self) -> None:
        """All motifs have ended."""

    def let_go(self) -> None:
        """Works are remembered for long: the application's tensors must not be, nor a plan that has ended."""
        self._plain = never

    def run_plainly(self) -> None:
        """Nothing of it has started, and nothing will: run it as the application asked, unless it has been."""
        if self._plain is not never:
            self.instead = self._plain()
        self.let_go()
        self._queued.settle(None)

    def _record(self, entry: QueuedMotif, nbytes: int) -> None:
        """A motif begins, which may be recorded."""
        recording = current()
        if recording is None:
            return
        name = f"{self._queued.planned.op.name}#{entry.part.motif} {entry.part.algorithm}"
        if self._ended is None:
            self._ended = {}
        self._ended[entry.part.motif] = recording.start(name, "+".join(entry.part.channels), nbytes)

    def _ran(self, entry: QueuedMotif) -> None:
        motif = entry.part.motif
        self._owner.spent(self._queued, motif, entry.start_us, entry.end_us)
        if self._ended is not None and motif in self._ended:
            self._ended.pop(motif)(entry.end_us - entry.start_us)


class SubmittedPlace(SubmittedOp):
    """An op that runs in plain order and only keeps its place in the plan's: its motifs have nothing to do."""

    __slots__ = ()

    def __init__(self, owner: SubmissionOwner, queued: QueuedOp) -> None:
        super().__init__(owner, queued, never)

    def start(self, entry: QueuedMotif) -> None:
        """Over at once."""

    def watch(self, entry: QueuedMotif) -> None:
        """It has ended already."""

    def moved(self, entry: QueuedMotif) -> None:
        """Nothing has."""

    def over(self) -> None:
        """There is nothing to do."""


class MotifRunner(Protocol):
    """What moves the motifs of a staged op."""

    averages: bool
    """Whether a reduction can be an average."""

    def start(
        self, loaded: LoadedMotif, staged: StagedBuffers, dtype: str, op: str, entry: QueuedMotif, *, blocking: bool
    ) -> ActiveMotif:
        """Begin to move a motif; with `blocking` the caller waits at once."""

    def watch(self, entry: QueuedMotif) -> None:
        """Report the end of a motif that was started without."""


class SubmittedStaged(SubmittedOp):
    """An op whose motifs work on its own memory where that lies in one piece, and else on copies of their pieces."""

    __slots__ = ("_buffers", "_compiled", "_divides", "_dtype", "_op", "_pool", "_regions", "_room", "_runner",
                 "_staged")  # fmt: skip

    def __init__(
        self, owner: SubmissionOwner, runner: MotifRunner, call: PlannedCall, compiled: CompiledOp, *,
        pool: Pool = POOL,
    ) -> None:  # fmt: skip
        super().__init__(owner, call.queued, call.plain)
        buffers = call.buffers
        assert buffers is not None
        self._runner, self._pool = runner, pool
        self._buffers: Buffers | None = buffers
        self._compiled: CompiledOp | None = compiled
        self._staged: dict[int, StagedBuffers] = {}
        larger = buffers.target if buffers.target is not None else buffers.source
        assert larger is not None
        self._dtype = larger.dtype
        self._room: torch.Tensor | None = pool.take(self._dtype, compiled.tasks.room) if compiled.tasks.room else None
        self._regions: Sequence[torch.Tensor | None] = (buffers.source, buffers.target, self._room)
        self._op = call.call.reduce or "sum"
        self._divides = self._op == "avg" and not (compiled.tasks.averages and runner.averages)
        if self._divides:
            self._op = "sum"

    def start(self, entry: QueuedMotif) -> ActiveMotif | None:
        """Begin a motif; None where it has nothing to do."""
        motif = entry.part.motif
        loaded = self._compiled.loaded[motif] if self._compiled is not None else None
        if loaded is None or self._buffers is None:
            return None
        staged = self._staged[motif] = stage(loaded.layout, self._regions, self._dtype, self._pool)
        self._record(entry, loaded.layout.task.count * self._dtype.itemsize)
        return self._runner.start(loaded, staged, self._buffers.dtype, self._op, entry, blocking=self.inline)

    def watch(self, entry: QueuedMotif) -> None:
        """From now on somebody waits for the end of a motif that runs already."""
        self._runner.watch(entry)

    def moved(self, entry: QueuedMotif) -> None:
        """A motif's data has arrived: bring it where it belongs."""
        staged = self._staged.pop(entry.part.motif)
        if staged.scratch:
            staged.back(self._regions, self._pool)
        self._ran(entry)

    def over(self) -> None:
        """All motifs have ended."""
        buffers = self._buffers
        if buffers is None:
            return
        if self._divides and buffers.target is not None:
            buffers.target.div_(len(self._queued.planned.whole.ranks))
        if self._room is not None:
            self._pool.give(self._room)
        if buffers.finish is not None:
            buffers.finish()
        self.let_go()

    def let_go(self) -> None:
        """The application's tensors, and the plan's programs."""
        super().let_go()
        self._buffers, self._compiled, self._room, self._regions = None, None, None, ()
