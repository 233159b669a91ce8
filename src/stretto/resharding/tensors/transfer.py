# SPDX-License-Identifier: Apache-2.0
"""Moves tensors from their layouts to others, planned once and run many times: packed, moved in rounds, unpacked."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from ...errors import InvalidInput
from ...runtime.torch_backend.engine import REDUCED
from .. import Layout, ReshardPlan, Tensor, UnitTask, decompose, plan_tensors
from ..plan import OURS
from ..tasks import Box
from .carrier import ReshardGroup
from .describe import PlacedTensor, dtype_of
from .movers import Check, GpuMover, Mover, mover_of
from .packing import Part, RoundBuffers, Tensors, finish_stream, pack, unpack
from .pending import SourceGuard
from .pulls import MEETING_BYTES, PullMover, chosen_holders, pull_mover
from .rounds import Rounds, Stream, busiest_bytes, deal, streams_of

OPS = {"product": "prod"}
"""The executor's names of reductions, where they differ from `REDUCTIONS`."""
DEPTH = 2
"""Rounds under way at a time: one is packed or unpacked while another one moves."""
GPU_BYTES = 1 << 30
"""The most bytes of a round on GPU memory, whose programs count bytes in 31 bits."""
VECTOR_BYTES = 16
LEAST_BYTES = 1 << 20
"""The least bytes of a rank's round where more rounds are wanted than the memory needs."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """One tensor with its source and its target layout, each on one mesh or on several equal meshes."""

    name: str
    src: PlacedTensor
    dst: PlacedTensor
    src_meshes: tuple[tuple[int, ...], ...] = ()
    dst_meshes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Round:
    """One run of a program: which boxes of this rank's tensors it takes and brings."""

    mover: Mover
    inputs: list[Part]
    outputs: list[Part]
    in_bytes: int
    out_bytes: int
    holders: list[int]
    """Where servers pull: the rank of the group that has packed each of the outputs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Program:
    """What carries all tasks of one kind: its streams, the mover, and where this rank has each stream."""

    tasks: list[UnitTask]
    streams: list[Stream]
    mover: Mover
    starts: tuple[dict[int, int], dict[int, int]]
    """The offset of each stream in this rank's packed input and output."""
    sizes: tuple[int, int]
    holders: dict[int, int]
    """Where servers pull: the rank of the group from which this one gets each stream."""


class Transfer:
    """The transfer of all tensors together: one plan for all tasks of a kind, run in as many rounds as it takes.

    All ranks of the group construct it with the same moves. `staging_bytes` limits the memory for packed tensors on
    every rank; with `keep` that memory stays allocated. With `gpu`, programs run on the memory of that GPU. There are
    about `least_rounds` rounds at least, unless they would be smaller than `LEAST_BYTES`.
    """

    def __init__(
        self, carrier: ReshardGroup, moves: Sequence[Move], *, staging_bytes: int | None = None, keep: bool = False,
        gpu: torch.device | None = None, strategy: str = OURS, least_rounds: int = 1, pull: bool = False,
    ) -> None:  # fmt: skip
        self.carrier, self.moves, self.gpu, self._strategy = carrier, tuple(moves), gpu, strategy
        device = carrier.device
        some = [(at, move) for at, move in enumerate(moves) if not move.dst.empty]
        self._number = [at for at, _ in some]
        self._tensors = [
            Tensor(
                name=move.name,
                shape=move.dst.plan_shape,
                dtype_bytes=dtype_of(move.dst.dtype).itemsize,
                src=move.src.layout(move.src_meshes, device),
                dst=move.dst.layout(move.dst_meshes, device),
            )
            for at, move in some
        ]
        self._begin = [[_begins(side, t.shape, carrier.me) for side in (t.src, t.dst)] for t in self._tensors]
        self._tasks = decompose(self._tensors) if self._tensors else ()
        # Rounds of pulls and of pending sums would use the same buffers by other rules.
        self._pull = pull and not any(task.reduction for task in self._tasks)
        me = carrier.me
        self._here = [
            task for task in self._tasks
            if not task.reduction and me in task.holders[0] and me in task.receivers and not task.missing
        ]  # fmt: skip
        self._programs = [
            self._program(tasks, op, dtype_of(dtype) if op else torch.uint8, staging_bytes, least_rounds)
            for (op, dtype, _), tasks in _alike(self._tasks, self.moves, self._number).items()
        ]
        self.rounds = self.rounds_for(None)
        largest = [max((program.sizes[side] for program in self._programs), default=0) for side in (0, 1)]
        self._buffers = RoundBuffers(carrier, (largest[0], largest[1]), self.depth, keep=keep, gpu=gpu)
        if gpu is not None and self._programs:
            # All ranks make as much, since each finds the memory of the others by its own.
            movers = [program.mover for program in self._programs]
            inputs = any(isinstance(m, PullMover) or (isinstance(m, GpuMover) and m.reads_inputs) for m in movers)
            outputs = any(isinstance(m, GpuMover) for m in movers)
            beside = (1 + len(carrier.ranks)) * MEETING_BYTES * any(isinstance(m, PullMover) for m in movers)
            sides = [side for side, used in enumerate((inputs, outputs)) if used]
            self._buffers.share([m.plan for m in movers], sides, beside)

    @property
    def plans(self) -> list[ReshardPlan]:
        """The plan of each round."""
        return [each.mover.plan for each in self.rounds]

    @property
    def route(self) -> str:
        """How bytes move; the same on all ranks."""
        return next((each.mover.route for each in self.rounds), "executor")

    @property
    def depth(self) -> int:
        """The number of rounds that are under way at a time."""
        return min(DEPTH, max(1, len(self.rounds)))

    @property
    def staging_bytes(self) -> int:
        """The most bytes that this rank packs and unpacks at a time."""
        return self.depth * max((each.in_bytes + each.out_bytes for each in self.rounds), default=0)

    def rounds_for(self, names: Collection[str] | None) -> list[Round]:
        """The rounds that move the tensors of these names, by the programs that there are; None for all tensors.

        Rounds of a part of the tensors have the size of the others: there are fewer of them.
        """
        found = []
        for program in self._programs:
            these = program.tasks
            if names is not None:
                these = [t for t in these if self.moves[self._number[t.tensor]].name in names]
            found += self._rounds(program, deal(these, program.streams))
        return found

    def run(
        self, sources: Tensors, targets: Tensors, check: Check = lambda: None, *, rounds: Sequence[Round] | None = None,
        guard: SourceGuard | None = None, blocks: int | None = None,
    ) -> None:  # fmt: skip
        """Move `sources` into `targets`; all ranks of the group call this.

        Args:
            sources: this rank's local part of each tensor; None where it has none.
            targets: this rank's local part of each target; None where it has none.
            check: called from time to time while bytes move; may raise to stop waiting.
            rounds: the rounds to run; None for all.
            guard: is told which rounds have read the sources, where these may change meanwhile.
            blocks: where servers pull, the most thread blocks of a rank's copies; None for all.

        Raises:
            PeerLost: a rank has died while bytes moved.
        """
        under_way: deque[Callable[[Check], None]] = deque()
        self.copy_here(sources, targets, guard)
        self._buffers.begin()
        for at, each in enumerate(self.rounds if rounds is None else rounds):
            if len(under_way) == self.depth:
                under_way.popleft()(check)
            under_way.append(self._start(each, at, sources, targets, guard, blocks))
        for finish in under_way:
            finish(check)
        self.settle(check)
        if self.gpu is None:
            finish_stream(targets)

    def settle(self, check: Check = lambda: None) -> None:
        """Wait on the host until the GPU is done with all rounds; without a GPU there is nothing to wait for."""
        self._buffers.settle(check)

    def checksums(self, side: int, tensors: Tensors) -> dict[str, int]:
        """A checksum of each box that is sent, as this rank holds it (side 0) or has received it (side 1).

        Args:
            side: 0 for sources, of which one holder of each box says it; 1 for targets.
            tensors: this rank's local part of each tensor; None where it has none.

        Returns:
            Checksums by tensor and box; boxes of pending reductions, which nobody holds before they are sent, are left
            out.
        """
        me = self.carrier.me
        found: dict[str, int] = {}
        for task in self._tasks:
            if task.reduction or me not in (task.receivers if side else task.holders[0][:1]):
                continue
            part = self._part(task, side, 0)
            inside = part.of(tensors).detach().to(part.dtype).contiguous().cpu().view(-1).view(torch.uint8)
            found[f"{part.tensor} {task.box}"] = zlib.crc32(inside.numpy().tobytes())
        return found

    def copy_here(self, sources: Tensors, targets: Tensors, guard: SourceGuard | None = None) -> None:
        """Copy the parts that are already on this rank and that no other rank wants.

        Args:
            sources: this rank's local part of each tensor; None where it has none.
            targets: this rank's local part of each target; None where it has none.
            guard: has early copies of the parts, where the sources have changed since.
        """
        with guard.reading_here() if guard is not None else nullcontext() as early:
            boxes = early if early is not None else self.held_here(sources)
            for part, box in zip((self._part(task, 1, 0) for task in self._here), boxes, strict=True):
                part.of(targets).copy_(box)

    def held_here(self, sources: Tensors) -> list[torch.Tensor]:
        """The parts that are already on this rank and that no other rank wants, as they are in the sources."""
        return [self._part(task, 0, 0).of(sources) for task in self._here]

    def start(self, number: int, sources: Tensors, targets: Tensors) -> Callable[[Check], None]:
        """Begin one round; all ranks of the group call this.

        Args:
            number: number of the round.
            sources: this rank's local part of each tensor; None where it has none.
            targets: this rank's local part of each target; None where it has none.

        Returns:
            A function that waits for the end of the round and unpacks; it calls its argument from time to time.
        """
        if number == 0:
            self._buffers.begin()
        return self._start(self.rounds[number], number, sources, targets, None, None)

    def record_streams(self, sources: Tensors, targets: Tensors) -> None:
        """Tell PyTorch's allocator which streams use tensors that the caller may let go of before they have."""
        if self.gpu is not None:
            packing, moving, unpacking = self.carrier.lanes(self.gpu)
            for tensors, streams in ((sources, (packing, moving)), (targets, (unpacking,))):
                for tensor in tensors:
                    if tensor is not None and tensor.is_cuda:
                        for stream in streams:
                            tensor.record_stream(stream)

    def finish_packing(self) -> None:
        """Wait on the host until all rounds that were started have read the sources."""
        self._buffers.finish_packing()

    def _start_pull(
        self, each: Round, mover: PullMover, number: int, sources: Tensors, targets: Tensors,
        guard: SourceGuard | None, blocks: int | None,
    ) -> Callable[[Check], None]:  # fmt: skip
        """Queue a round that servers pull: all ranks meet when it is packed, and the round before has been pulled."""
        memory, slot, since = self._buffers, number % self.depth, (number - 1) % self.depth
        mine = memory.take(0, slot, each.in_bytes, None)
        reading = guard.reading(number) if guard is not None else nullcontext()
        with reading as early, memory.packing(slot, since):
            if early is not None:
                memory.borrow(early)
                mine.copy_(early)
            else:
                mover.pack(number, each.inputs, sources, mine, blocks)
        with memory.moving(slot, since):
            mover.meet(memory.beside())
        with memory.unpacking(slot):
            mover.pull(number, each.outputs, each.holders, targets, mine, blocks)
        if guard is not None:
            return lambda check: memory.reach(slot, check)
        return lambda check: memory.catch_up()

    def _start(
        self, each: Round, number: int, sources: Tensors, targets: Tensors, guard: SourceGuard | None,
        blocks: int | None,
    ) -> Callable[[Check], None]:  # fmt: skip
        """Begin a round in one of the buffers; without a guard the memory of a tensor itself may be sent from."""
        if isinstance(each.mover, PullMover):
            return self._start_pull(each, each.mover, number, sources, targets, guard, blocks)
        device = next((t.device for t in (*sources, *targets) if t is not None), None)
        memory, slot = self._buffers, number % self.depth
        reading = guard.reading(number) if guard is not None else nullcontext()
        with reading as packed, memory.packing(slot):
            if guard is None:
                packed = _whole(each.inputs, sources, each.in_bytes)
            elif packed is not None:
                memory.borrow(packed)
            if packed is None:
                packed = pack(each.inputs, sources, memory.take(0, slot, each.in_bytes, device))
            elif memory.shares_inputs:
                packed = memory.take(0, slot, each.in_bytes, device).copy_(packed)
            if guard is not None and self.gpu is None:
                # Through pinned memory everything is on the caller's stream, and a trainer may be on another.
                finish_stream(sources)
        goal = None if self.gpu is not None else _whole(each.outputs, targets, each.out_bytes)
        unpacked = goal if goal is not None else memory.take(1, slot, each.out_bytes, device)
        with memory.moving(slot):
            wait = each.mover.start(packed, unpacked)

        def finish(check: Check) -> None:
            with memory.unpacking(slot):
                wait(check)
                if goal is None:
                    unpack(each.outputs, targets, unpacked)

        if not each.mover.queued:
            return finish
        finish(lambda: None)
        if guard is not None:
            # The host stays as close to the GPU as buffers allow, so that a writer finds most rounds not yet read.
            return lambda check: memory.reach(slot, check)
        return lambda check: memory.catch_up()

    def pack_round(self, each: Round, sources: Tensors, device: torch.device | None) -> torch.Tensor:
        """The packed input of a round, in memory of its own.

        Args:
            each: the round.
            sources: this rank's local part of each tensor; None where it has none.
            device: where the sources are; None where there are none.

        Returns:
            The bytes.
        """
        # A program on GPU memory takes an empty input, too, only from there.
        where = device if device is not None else self.gpu
        return pack(each.inputs, sources, torch.empty(each.in_bytes, dtype=torch.uint8, device=where))

    def _program(
        self, tasks: list[UnitTask], op: str, dtype: torch.dtype, staging_bytes: int | None, least_rounds: int
    ) -> _Program:
        carrier, on_gpu = self.carrier, self.gpu is not None
        limit = min(staging_bytes or GPU_BYTES, GPU_BYTES) if on_gpu else staging_bytes
        if least_rounds > 1:
            finer = max(LEAST_BYTES, DEPTH * busiest_bytes(tasks) // least_rounds)
            limit = min(limit or finer, finer)
        streams = streams_of(tasks, limit, unit=VECTOR_BYTES if on_gpu else 1, depth=DEPTH)
        # All ranks take part in every plan as helpers, so that all of them count its runs alike.
        plan = plan_tensors(
            self._tensors, carrier.gpu_cluster() if on_gpu else carrier.cluster,
            strategy=self._strategy, helpers=tuple(carrier.device.values()),
            tasks=[stream.task() for stream in streams],
        )  # fmt: skip
        kind = self.moves[0].dst.device
        if self._pull and plan.program is not None:
            return self._pulled(tasks, streams, pull_mover(carrier, plan))
        mover = mover_of(carrier, plan, dtype, OPS.get(op, op), device=kind, gpu=self.gpu)
        starts: tuple[dict[int, int], dict[int, int]] = ({}, {})
        sizes = [0, 0]
        for bundle in plan.bundles:
            for number in bundle.tasks:
                for side, mine in enumerate(
                    (any(carrier.me in a for a in bundle.holders), carrier.me in bundle.receivers)
                ):
                    if mine:
                        starts[side][number] = sizes[side]
                        sizes[side] += streams[number].nbytes
        return _Program(
            tasks=tasks, streams=streams, mover=mover, starts=starts, sizes=(sizes[0], sizes[1]), holders={}
        )

    def _pulled(self, tasks: list[UnitTask], streams: list[Stream], mover: PullMover) -> _Program:
        """Every holder packs what is pulled from it, stream behind stream; a server knows where each of them does."""
        me = self.carrier.me
        rank = {device: at for at, device in enumerate(self.carrier.device.values())}
        ends: dict[int, int] = {}
        starts: tuple[dict[int, int], dict[int, int]] = ({}, {})
        holders = {}
        for number, (stream, chosen) in enumerate(zip(streams, chosen_holders(streams), strict=True)):
            begins = {holder: ends.get(holder, 0) for holder in sorted(set(chosen.values()))}
            for holder, begin in begins.items():
                ends[holder] = begin + stream.nbytes
            if me in begins:
                starts[0][number] = begins[me]
            if me in chosen:
                starts[1][number], holders[number] = begins[chosen[me]], rank[chosen[me]]
        sizes = ends.get(me, 0), 0
        return _Program(tasks=tasks, streams=streams, mover=mover, starts=starts, sizes=sizes, holders=holders)

    def _rounds(self, program: _Program, dealt: Rounds) -> list[Round]:
        found = []
        for pieces in dealt:
            parts: list[list[Part]] = [[], []]
            holders = []
            for piece in pieces:
                for side in (0, 1):
                    if piece.stream in program.starts[side]:
                        at = program.starts[side][piece.stream] + piece.offset
                        parts[side].append(self._part(piece.task, side, at))
                        if side and program.holders:
                            holders.append(program.holders[piece.stream])
            inside, outside = program.sizes
            found.append(
                Round(
                    mover=program.mover, inputs=parts[0], outputs=parts[1], in_bytes=inside, out_bytes=outside,
                    holders=holders,
                )
            )  # fmt: skip
        return found

    def _part(self, task: UnitTask, side: int, offset: int) -> Part:
        begin = self._begin[task.tensor][side]
        number = self._number[task.tensor]
        return Part(
            tensor=number, where=_inside(task.box, begin), offset=offset, nbytes=task.nbytes,
            dtype=dtype_of(self.moves[number].dst.dtype),
        )  # fmt: skip


def _whole(parts: Sequence[Part], tensors: Tensors, nbytes: int) -> torch.Tensor | None:
    """The memory of a local tensor itself, if a packed buffer would be an exact copy of it; else None."""
    if len(parts) != 1:
        return None
    mine = parts[0].of(tensors)
    if not mine.is_contiguous() or mine.dtype != parts[0].dtype or mine.numel() * mine.itemsize != nbytes:
        return None
    return mine.detach().view(-1).view(torch.uint8)


def _alike(
    tasks: Sequence[UnitTask], moves: Sequence[Move], number: Sequence[int]
) -> dict[tuple[str, str, int], list[UnitTask]]:
    """Tasks grouped by the program that can carry them: all copies in one, and each kind of pending reduction in its
    own.
    """
    found: dict[tuple[str, str, int], list[UnitTask]] = {}
    for task in tasks:
        if not task.missing:
            continue
        move = moves[number[task.tensor]]
        if task.reduction:
            _check_reduction(move, task.reduction)
        key = (task.reduction, move.dst.dtype, len(task.holders)) if task.reduction else ("", "", 0)
        found.setdefault(key, []).append(task)
    return found


def _check_reduction(move: Move, reduction: str) -> None:
    dtype = dtype_of(move.dst.dtype)
    if move.src.dtype != move.dst.dtype:
        raise InvalidInput(f"{move.name}: a pending {reduction} of {move.src.dtype} cannot become {move.dst.dtype}")
    if dtype not in REDUCED or (reduction == "avg" and not dtype.is_floating_point):
        raise InvalidInput(f"{move.name}: no {reduction} of {move.dst.dtype}")


def _begins(side: Layout, shape: Sequence[int], device: int) -> tuple[int, ...] | None:
    if device not in side.mesh.devices:
        return None
    return tuple(side.tiles(shape)[side.mesh.devices.index(device), :, 0].tolist())


def _inside(box: Box, begin: tuple[int, ...] | None) -> tuple[slice, ...]:
    assert begin is not None
    return tuple(slice(low - at, high - at) for (low, high), at in zip(box, begin, strict=True))
