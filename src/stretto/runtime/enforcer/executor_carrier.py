# SPDX-License-Identifier: Apache-2.0
"""Motifs on our executor: every lane of a plan is a communicator, a motif's channels are networks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import TypeVar

import torch

from ...errors import InvalidInput, PlanMismatch, StrettoError
from ...programs import Lowered, Program
from ...programs.lower import lower
from ..executor.executor import DTYPES, Executor, LoadedProgram
from ..torch_backend.buffers import CollectiveCall
from ..torch_backend.engine import Engine, channels_of
from ..torch_backend.recording import current
from ..torch_backend.work import GroupWork
from .binding import MotifBinding
from .carrier import SLOTS, CarrierSite, HostCarrier, PendingMaximum
from .compiled_op import CompiledMotif, CompiledOp
from .end_reports import EndReports
from .memory import RowLayout, StagedBuffers
from .rank_plan import RankMotif
from .sequencer import ActiveMotif, QueuedMotif, QueuedOp, never
from .submission import ONE_TENSOR, BaseSubmission, SubmissionOwner

LANES = 20
MAX_KEPT = 1024
RESERVED = SLOTS * LANES + 1
"""One communicator for each lane of each loaded plan, and one on which ranks agree."""
NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}

K = TypeVar("K")
V = TypeVar("V")


class ExecutorMotif:
    """A program as the executor has it."""

    __slots__ = ("handle", "layout")

    def __init__(self, handle: LoadedProgram, layout: RowLayout) -> None:
        self.handle, self.layout = handle, layout


class ExecutorCarrier(HostCarrier):
    """Our executor. It reserves communicators for plans; groups that are made later stay below them."""

    programs = averages = True

    def __init__(self, site: CarrierSite) -> None:
        super().__init__(site)
        job = site.engine.job
        if job.executor is None:
            raise InvalidInput(f"carrier: there is no executor ({job.why}); use gloo")
        first = job.max_communicators - RESERVED
        if job.next > first:
            raise InvalidInput(f"enforcer: {job.next} groups leave no communicators for plans; make it earlier")
        job.max_communicators = first
        self._job, self._first = job, first
        self._executor, self._timeout_s = job.executor, site.engine.timeout_s
        self._networks = list(channels_of(os.environ))
        # Works of a plan are numbered from a place of its own: what used a communicator before does not matter.
        self._base = site.generation << 16
        # Both are kept by the ids of programs, which no other object gets while the programs are kept here.
        self._handles: dict[tuple[int, int, int], tuple[Program, LoadedProgram]] = {}
        self._lowered: dict[int, tuple[Program, Lowered]] = {}
        self._ends = EndReports(job.executor, site.sequencer.ended)
        self._fence: LoadedProgram | None = None

    @property
    def alive(self) -> bool:
        """Whether the job still has the executor."""
        return self._job.executor is not None

    def refusal(self, call: CollectiveCall, engine: Engine) -> str:
        """What the executor does not run without a plan it does not run under one."""
        return engine.refusal(call)

    def submit(self, queued: QueuedOp, compiled: CompiledOp) -> GroupWork:
        """Take the short way where nothing has to be laid out, which most calls can: one motif, in place, no gaps."""
        call, only = queued.call, compiled.only
        assert call is not None
        if only is not None and call.op in ONE_TENSOR and (call.reduce != "avg" or compiled.averages):
            tensor = call.inputs[0]
            if tensor.is_contiguous():
                assert isinstance(only, ExecutorMotif)
                whole = WholeSubmission(self._owner, self, queued, only, tensor, call.reduce)
                return self._put_in_line(queued, whole, inline=queued.blocking)
        return super().submit(queued, compiled)

    def load(self, number: int, rank_motif: RankMotif, binding: MotifBinding) -> ExecutorMotif:
        """See `Carrier.load`; a program that many motifs run is loaded once for each lane."""
        assert binding.program is not None
        if rank_motif.lane >= LANES:
            raise PlanMismatch(f"the plan needs more than {LANES} communicators")
        key = (number, id(binding.program), rank_motif.lane)
        found = self._handles.get(key)
        if found is None:
            networks = [channel for channel in rank_motif.channels if channel in self._networks]
            handle = self._executor.load(
                self._lower(binding.program), ranks=rank_motif.leaf.ranks, channels=networks or None,
                communicator=self._first + 1 + number % SLOTS * LANES + rank_motif.lane,
                first_number=(self._base + number) << 32, by_call=binding.exchange is not None,
            )  # fmt: skip
            found = binding.program, handle
            _keep(self._handles, key, found)
        return ExecutorMotif(found[1], RowLayout.of(binding))

    def _lower(self, program: Program) -> Lowered:
        """Plans share programs, so each is lowered once."""
        found = self._lowered.get(id(program))
        if found is None:
            found = program, lower(program)
            _keep(self._lowered, id(program), found)
        return found[1]

    def start(
        self, loaded: CompiledMotif, staged: StagedBuffers, dtype: str, op: str, motif: QueuedMotif, *, blocking: bool
    ) -> ActiveMotif:
        """See `HostCarrier.start`; the end is reported by a thread that sleeps in C++."""
        assert isinstance(loaded, ExecutorMotif)
        if loaded.layout.binding.exchange is not None:
            return self._start_exchange(loaded, staged, motif, blocking)
        size = DTYPES[dtype]
        ends = [0 if view is None else view[0].data_ptr() + view[1] * size for view in (staged.source, staged.target)]
        return self._start(loaded, ends[0], ends[1], dtype, op, motif, blocking, staged)

    def start_on(
        self, loaded: ExecutorMotif, tensor: torch.Tensor, dtype: str, op: str, motif: QueuedMotif, *, blocking: bool
    ) -> ActiveMotif:
        """See `HostCarrier.start`; for a motif that works in place on a tensor without gaps."""
        assert loaded.layout.place is not None
        _, read, _, written, _ = loaded.layout.place
        begin, size = tensor.data_ptr(), DTYPES[dtype]
        return self._start(loaded, begin + read * size, begin + written * size, dtype, op, motif, blocking, tensor)

    def _start(
        self, loaded: ExecutorMotif, read: int, written: int, dtype: str, op: str, motif: QueuedMotif, blocking: bool,
        keep: object,
    ) -> ActiveMotif:  # fmt: skip
        count = loaded.layout.binding.count
        if not motif.watched:
            return self._executor.start(
                loaded.handle, read, written, count, dtype, op, timeout_s=self._timeout_s, blocking=blocking, keep=keep
            )
        return self._ends.begin(
            motif,
            lambda: self._executor.start(
                loaded.handle, read, written, count, dtype, op, timeout_s=self._timeout_s, keep=keep, notify=True
            ),
        )

    def _start_exchange(
        self, loaded: ExecutorMotif, staged: StagedBuffers, motif: QueuedMotif, blocking: bool
    ) -> ActiveMotif:
        """An all-to-all with splits: its pieces are wherever they are in the op's input and output."""
        gives, takes = _extents(loaded, staged)
        if not motif.watched:
            return self._executor.start_pieces(
                loaded.handle, gives, takes, timeout_s=self._timeout_s, blocking=blocking, keep=staged
            )
        return self._ends.begin(
            motif,
            lambda: self._executor.start_pieces(
                loaded.handle, gives, takes, timeout_s=self._timeout_s, keep=staged, notify=True
            ),
        )

    def watch(self, motif: QueuedMotif) -> None:
        """A second thread waits for those that were started without a report."""
        self._ends.add_late(motif)

    def agree(self, values: Sequence[int]) -> PendingMaximum:
        """A maximum over all ranks, found on a communicator that is used for nothing else; see `Carrier.agree`."""
        from ...algorithms import algorithm

        if self._fence is None:
            world = self._executor.world_size
            program = algorithm("direct", "all_reduce", world, in_place=True)
            self._fence = self._executor.load(program, communicator=self._first, first_number=self._base << 32)
        return _Agreement(self._executor, self._fence, values, self._timeout_s)

    def unload(self, number: int) -> None:
        """Forget a plan's programs."""
        # Another thread may load another plan just now.
        for key in list(self._handles):
            if key[0] == number:
                self._handles.pop(key, None)

    def close(self) -> None:
        """The executor belongs to the job, which gets its communicators back."""
        self._ends.close()
        self._job.max_communicators = self._first + RESERVED


def _extents(loaded: ExecutorMotif, staged: StagedBuffers) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(address, bytes) of what goes to, and comes from, each rank in the motif's window."""
    binding = loaded.layout.binding
    assert binding.exchange is not None
    assert staged.source is not None
    assert staged.target is not None
    count, (first, last) = len(binding.leaf.ranks), binding.leaf.window
    me = loaded.handle.me
    given, taken = staged.source[0].data_ptr(), staged.target[0].data_ptr()
    gives = [
        (given + lo, hi - lo)
        for at, (lo, hi) in enumerate(binding.exchange.gives)
        if (at - me - first) % count < last - first
    ]
    takes = [
        (taken + lo, hi - lo)
        for at, (lo, hi) in enumerate(binding.exchange.takes)
        if (me - at - first) % count < last - first
    ]
    return gives, takes


def _keep(known: dict[K, V], key: K, value: V) -> None:
    """Sizes that follow the data have no end: the oldest go. What is in use is held by who uses it."""
    while len(known) >= MAX_KEPT:
        known.pop(next(iter(known)), None)
    known[key] = value


class _Agreement:
    def __init__(self, executor: Executor, handle: LoadedProgram, values: Sequence[int], timeout_s: float) -> None:
        import numpy as np

        self._values = np.array(values, np.int64)
        at = self._values.ctypes.data
        self._work = executor.start(handle, at, at, len(values), "int64", "max", timeout_s=timeout_s, keep=self._values)

    def over(self, timeout_s: float) -> bool:
        with contextlib.suppress(StrettoError):
            self._work.wait(timeout_s)
        return self._work.done

    def wait(self) -> list[int]:
        self._work.wait()
        return [int(value) for value in self._values]


class WholeSubmission(BaseSubmission):
    """An op of one motif that works in place on a tensor without gaps, as most do: nothing is laid out, or copied."""

    __slots__ = ("_carrier", "_loaded", "_name", "_op", "_tensor")

    def __init__(
        self, owner: SubmissionOwner, carrier: ExecutorCarrier, queued: QueuedOp, loaded: ExecutorMotif,
        tensor: torch.Tensor, reduce: str,
    ) -> None:  # fmt: skip
        super().__init__(owner, queued, queued.plain)
        self._carrier, self._loaded = carrier, loaded
        # The application may give its own tensor object other memory while the op is held back.
        self._tensor: torch.Tensor | None = tensor.detach()
        # What is only moved, never added to, may have any type.
        self._op, self._name = (reduce, NAMES[tensor.dtype]) if reduce else ("sum", "uint8")

    def start(self, motif: QueuedMotif) -> ActiveMotif | None:
        """Begin the motif."""
        tensor = self._tensor
        assert tensor is not None
        if current() is not None:
            self._record(motif, self._loaded.layout.binding.count * DTYPES[self._name])
        return self._carrier.start_on(self._loaded, tensor, self._name, self._op, motif, blocking=self.inline)

    def watch(self, motif: QueuedMotif) -> None:
        """From now on somebody waits for the end of the motif."""
        self._carrier.watch(motif)

    def moved(self, motif: QueuedMotif) -> None:
        """Copy the result to where the application expects it."""
        self._ran(motif)

    def over(self) -> None:
        """The motif has ended."""
        self.let_go()

    def let_go(self) -> None:
        """The application's tensor."""
        self._tensor, self._plain = None, never
