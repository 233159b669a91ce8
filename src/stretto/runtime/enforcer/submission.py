# SPDX-License-Identifier: Apache-2.0
"""What carriers make of a queued op: it starts the op's motifs, and holds the memory that they work on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ...process_state import STATE
from ..torch_backend.buffers import Buffers
from ..torch_backend.recording import current
from ..torch_backend.work import GroupWork
from .compiled_op import CompiledMotif, CompiledOp
from .memory import Pool, StagedBuffers, stage
from .sequencer import ActiveMotif, Plain, QueuedMotif, QueuedOp, never

POOL = STATE.part(Pool)
ONE_TENSOR = ("all_reduce", "broadcast", "reduce")
"""Ops that overwrite the one tensor that every rank gives."""


class SubmissionOwner(Protocol):
    """What a submission tells the enforcer."""

    def stalled(self, queued: QueuedOp) -> None:
        """A wait has taken long."""

    def explain(self, queued: QueuedOp, error: Exception) -> Exception:
        """What lies behind an error."""

    def waited(self, queued: QueuedOp, begin_us: float, end_us: float) -> None:
        """The application stood in ``wait()``.

        Args:
            queued: The op.
            begin_us: When it entered ``wait()``.
            end_us: When it came back.
        """

    def spent(self, queued: QueuedOp, motif: int, start_us: float, end_us: float) -> None:
        """A motif ran from one moment to another.

        Args:
            queued: The op.
            motif: The number of the motif in it.
            start_us: When the motif began to move.
            end_us: When it had ended.
        """


class BaseSubmission(ABC):
    """What the submissions of all carriers share."""

    __slots__ = ("_ended", "_owner", "_plain", "_queued", "inline", "instead")

    def __init__(self, owner: SubmissionOwner, queued: QueuedOp, plain: Plain) -> None:
        self._owner, self._queued, self._plain = owner, queued, plain
        self.inline = False
        """Whether the thread that submits waits at once."""
        self.instead: GroupWork | None = None
        """What runs in plain order after all."""
        self._ended: dict[int, Callable[[float | None], None]] | None = None
        """For each motif that is recorded, what to call at its end."""

    @abstractmethod
    def start(self, motif: QueuedMotif) -> ActiveMotif | None:
        """Begin a motif; None where there is nothing to wait for."""

    @abstractmethod
    def watch(self, motif: QueuedMotif) -> None:
        """From now on somebody waits for the end of a motif that runs already."""

    @abstractmethod
    def moved(self, motif: QueuedMotif) -> None:
        """A motif's data has arrived: bring it where it belongs."""

    @abstractmethod
    def over(self) -> None:
        """Finish the op, all of whose motifs have ended."""

    def let_go(self) -> None:
        """Let go of the application's tensors and of the plan, because applications keep works for long."""
        self._plain = never

    def run_plainly(self) -> None:
        """Run the call as the application asked, unless it has been: none of its motifs has started, and none will."""
        if self._plain is not never:
            self.instead = self._plain()
        self.let_go()
        self._queued.settle(None)

    def _record(self, motif: QueuedMotif, nbytes: int) -> None:
        """A motif begins, which may be recorded."""
        recording = current()
        if recording is None:
            return
        name = f"{self._queued.rank_op.op.name}#{motif.rank_motif.number} {motif.rank_motif.algorithm}"
        if self._ended is None:
            self._ended = {}
        self._ended[motif.rank_motif.number] = recording.start(name, "+".join(motif.rank_motif.channels), nbytes)

    def _ran(self, motif: QueuedMotif) -> None:
        number = motif.rank_motif.number
        self._owner.spent(self._queued, number, motif.start_us, motif.end_us)
        if self._ended is not None and number in self._ended:
            self._ended.pop(number)(motif.end_us - motif.start_us)


class PlaceSubmission(BaseSubmission):
    """An op that runs in plain order and only keeps its place in the plan's: its motifs have nothing to do."""

    __slots__ = ()

    def __init__(self, owner: SubmissionOwner, queued: QueuedOp) -> None:
        super().__init__(owner, queued, never)

    def start(self, motif: QueuedMotif) -> None:
        """Do nothing: a motif without data ends at once."""

    def watch(self, motif: QueuedMotif) -> None:
        """Do nothing: the motif has ended already."""

    def moved(self, motif: QueuedMotif) -> None:
        """Do nothing: there is no data to copy."""

    def over(self) -> None:
        """Do nothing: an op without data holds no memory."""


class MotifRunner(Protocol):
    """What moves the motifs of a staged op."""

    averages: bool
    """Whether a reduction can be an average."""

    def start(
        self, loaded: CompiledMotif, staged: StagedBuffers, dtype: str, op: str, motif: QueuedMotif, *, blocking: bool
    ) -> ActiveMotif:
        """Begin to move a motif; with `blocking` the caller waits at once.

        Args:
            loaded: The motif as the carrier has loaded it.
            staged: Where it reads and writes.
            dtype: The element type.
            op: The reduction.
            motif: The motif in the order of the plan; its end is reported with it.
            blocking: Whether the caller waits at once.

        Returns:
            The motif on the wire.
        """

    def watch(self, motif: QueuedMotif) -> None:
        """Report the end of a motif that was started without."""


class StagedSubmission(BaseSubmission):
    """An op whose motifs work on its own memory where that lies in one piece, and else on copies of their pieces."""

    __slots__ = ("_buffers", "_compiled", "_divides", "_dtype", "_op", "_pool", "_regions", "_room", "_runner",
                 "_staged")  # fmt: skip

    def __init__(
        self, owner: SubmissionOwner, runner: MotifRunner, queued: QueuedOp, compiled: CompiledOp, *,
        pool: Pool = POOL,
    ) -> None:  # fmt: skip
        super().__init__(owner, queued, queued.plain)
        call, buffers = queued.call, queued.buffers
        assert call is not None
        assert buffers is not None
        self._runner, self._pool = runner, pool
        self._buffers: Buffers | None = buffers
        self._compiled: CompiledOp | None = compiled
        self._staged: dict[int, StagedBuffers] = {}
        larger = buffers.target if buffers.target is not None else buffers.source
        assert larger is not None
        self._dtype = larger.dtype
        self._room: torch.Tensor | None = pool.take(self._dtype, compiled.room) if compiled.room else None
        self._regions: Sequence[torch.Tensor | None] = (buffers.source, buffers.target, self._room)
        self._op = call.reduce or "sum"
        self._divides = self._op == "avg" and not (compiled.averages and runner.averages)
        if self._divides:
            self._op = "sum"

    def start(self, motif: QueuedMotif) -> ActiveMotif | None:
        """Begin a motif; None where it has nothing to do."""
        number = motif.rank_motif.number
        loaded = self._compiled.motifs[number] if self._compiled is not None else None
        if loaded is None or self._buffers is None:
            return None
        staged = self._staged[number] = stage(loaded.layout, self._regions, self._dtype, self._pool)
        self._record(motif, loaded.layout.binding.count * self._dtype.itemsize)
        return self._runner.start(loaded, staged, self._buffers.dtype, self._op, motif, blocking=self.inline)

    def watch(self, motif: QueuedMotif) -> None:
        """From now on somebody waits for the end of a motif that runs already."""
        self._runner.watch(motif)

    def moved(self, motif: QueuedMotif) -> None:
        """A motif's data has arrived: bring it where it belongs."""
        staged = self._staged.pop(motif.rank_motif.number)
        if staged.scratch:
            staged.back(self._regions, self._pool)
        self._ran(motif)

    def over(self) -> None:
        """Finish the op, all of whose motifs have ended."""
        buffers = self._buffers
        if buffers is None:
            return
        if self._divides and buffers.target is not None:
            buffers.target.div_(len(self._queued.rank_op.whole.ranks))
        if self._room is not None:
            self._pool.give(self._room)
        if buffers.finish is not None:
            buffers.finish()
        self.let_go()

    def let_go(self) -> None:
        """The application's tensors, and the plan's programs."""
        super().let_go()
        self._buffers, self._compiled, self._room, self._regions = None, None, None, ()
