# SPDX-License-Identifier: Apache-2.0
"""Moves tensors from their layouts to others, planned once and run many times: packed, moved in rounds, unpacked."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...errors import InvalidInput
from ...runtime.torch_backend.engine import REDUCED
from .. import Layout, ReshardPlan, Tensor, UnitTask, decompose, plan_tensors
from ..tasks import Box
from .carrier import Check, Mover, ReshardGroup
from .describe import PlacedTensor, dtype_of
from .rounds import rounds_of

OPS = {"product": "prod"}
"""The executor's names of reductions, where they differ from `REDUCTIONS`."""
Tensors = Sequence[torch.Tensor | None]
"""This rank's local part of each tensor; None where the rank has none."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """One tensor with its source and its target layout, each on one mesh or on several equal meshes."""

    name: str
    src: PlacedTensor
    dst: PlacedTensor
    src_meshes: tuple[tuple[int, ...], ...] = ()
    dst_meshes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A box of a local tensor, and its place in a packed buffer."""

    tensor: int
    where: tuple[slice, ...]
    offset: int
    nbytes: int
    dtype: torch.dtype

    def of(self, tensors: Tensors) -> torch.Tensor:
        local = tensors[self.tensor]
        assert local is not None
        return (local if local.ndim else local.view(1))[self.where]

    def packed(self, buffer: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Round:
    mover: Mover
    inputs: list[_Part]
    outputs: list[_Part]
    in_bytes: int
    out_bytes: int


class Transfer:
    """The transfer of all tensors together, with one plan for each round.

    All ranks of the group construct it with the same moves. `staging_bytes` limits the memory for packed tensors on
    every rank; with `keep` that memory stays allocated.
    """

    def __init__(
        self, carrier: ReshardGroup, moves: Sequence[Move], *, staging_bytes: int | None = None, keep: bool = False
    ) -> None:
        self.carrier, self.moves = carrier, tuple(moves)
        self._keep = keep
        self._kept: dict[tuple[str, str], torch.Tensor] = {}
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
        tasks = self._tasks = decompose(self._tensors) if self._tensors else ()
        me = carrier.me
        self._here = [
            (self._part(task, 0, 0), self._part(task, 1, 0))
            for task in tasks
            if not task.reduction and me in task.holders[0] and me in task.receivers and not task.missing
        ]
        self.rounds: list[_Round] = []
        known: dict[Any, Mover] = {}
        for (op, dtype, _), group in _alike(tasks, self.moves, self._number).items():
            for these in rounds_of(group, staging_bytes) if staging_bytes else [tuple(group)]:
                self.rounds.append(self._round(these, op, dtype_of(dtype) if op else torch.uint8, known))

    @property
    def plans(self) -> list[ReshardPlan]:
        """The plan of each round."""
        return [each.mover.plan for each in self.rounds]

    @property
    def staging_bytes(self) -> int:
        """The most bytes that this rank packs and unpacks at a time."""
        return max((each.in_bytes + each.out_bytes for each in self.rounds), default=0)

    def run(self, sources: Tensors, targets: Tensors, check: Check = lambda: None) -> None:
        """Move `sources` into `targets`; all ranks of the group call this.

        Args:
            sources: this rank's local part of each tensor; None where it has none.
            targets: this rank's local part of each target; None where it has none.
            check: called from time to time while bytes move; may raise to stop waiting.

        Raises:
            PeerLost: a rank has died while bytes moved.
        """
        for at in range(len(self.rounds)):
            self.start(at, sources, targets)(check)
        self.copy_here(sources, targets)

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

    def copy_here(self, sources: Tensors, targets: Tensors) -> None:
        """Copy the parts that are already on this rank and that no other rank wants."""
        for src, dst in self._here:
            dst.of(targets).copy_(src.of(sources))

    def start(self, number: int, sources: Tensors, targets: Tensors) -> Callable[[Check], None]:
        """Begin one round; all ranks of the group call this.

        Args:
            number: number of the round.
            sources: this rank's local part of each tensor; None where it has none.
            targets: this rank's local part of each target; None where it has none.

        Returns:
            A function that waits for the end of the round and unpacks; it calls its argument from time to time.
        """
        each = self.rounds[number]
        device = next((t.device for t in (*sources, *targets) if t is not None), torch.device("cpu"))
        whole = self._whole(each.inputs, sources, each.in_bytes)
        packed = whole if whole is not None else self._buffer("in", each.in_bytes, device)
        if whole is None:
            for part in each.inputs:
                mine = part.of(sources)
                part.packed(packed, mine.shape).copy_(mine)
        goal = self._whole(each.outputs, targets, each.out_bytes)
        unpacked = goal if goal is not None else self._buffer("out", each.out_bytes, device)
        wait = each.mover.start(packed, unpacked)

        def finish(check: Check) -> None:
            wait(check)
            if goal is None:
                for part in each.outputs:
                    mine = part.of(targets)
                    mine.copy_(part.packed(unpacked, mine.shape))

        return finish

    def _whole(self, parts: list[_Part], tensors: Tensors, nbytes: int) -> torch.Tensor | None:
        """The memory of a local tensor itself, if a packed buffer would be an exact copy of it; else None."""
        if len(parts) != 1:
            return None
        mine = parts[0].of(tensors)
        if not mine.is_contiguous() or mine.dtype != parts[0].dtype or mine.numel() * mine.itemsize != nbytes:
            return None
        return mine.detach().view(-1).view(torch.uint8)

    def _buffer(self, name: str, nbytes: int, device: torch.device) -> torch.Tensor:
        key = (name, str(device))
        buffer = self._kept.get(key)
        if buffer is None or len(buffer) < nbytes:
            size = max((each.in_bytes if name == "in" else each.out_bytes) for each in self.rounds)
            buffer = torch.empty(size if self._keep else nbytes, dtype=torch.uint8, device=device)
        if self._keep:
            self._kept[key] = buffer
        return buffer[:nbytes]

    def _round(self, tasks: tuple[UnitTask, ...], op: str, dtype: torch.dtype, known: dict[Any, Mover]) -> _Round:
        shape = (op, dtype, *((t.nbytes, t.holders, t.receivers, t.align) for t in tasks))
        if shape not in known:
            # All ranks take part in every plan as helpers, so that all of them count its runs alike.
            plan = plan_tensors(
                self._tensors, self.carrier.cluster, helpers=tuple(self.carrier.device.values()), tasks=tasks
            )
            kind = self.moves[0].dst.device
            known[shape] = Mover.of(self.carrier, plan, dtype, OPS.get(op, op), kind)
        mover = known[shape]
        plan = replace(mover.plan, tasks=tasks)
        me = self.carrier.me
        inputs, in_bytes = self._parts(plan, tasks, me, 0)
        outputs, out_bytes = self._parts(plan, tasks, me, 1)
        return _Round(
            mover=replace(mover, plan=plan), inputs=inputs, outputs=outputs, in_bytes=in_bytes, out_bytes=out_bytes
        )

    def _parts(self, plan: ReshardPlan, tasks: Sequence[UnitTask], me: int, side: int) -> tuple[list[_Part], int]:
        found: list[_Part] = []
        offset = 0
        for bundle in plan.bundles:
            if me in bundle.receivers if side else any(me in alike for alike in bundle.holders):
                for number in bundle.tasks:
                    found.append(self._part(tasks[number], side, offset))
                    offset += tasks[number].nbytes
        return found, offset

    def _part(self, task: UnitTask, side: int, offset: int) -> _Part:
        begin = self._begin[task.tensor][side]
        number = self._number[task.tensor]
        return _Part(
            tensor=number, where=_inside(task.box, begin), offset=offset, nbytes=task.nbytes,
            dtype=dtype_of(self.moves[number].dst.dtype),
        )  # fmt: skip


def _alike(
    tasks: Sequence[UnitTask], moves: Sequence[Move], number: Sequence[int]
) -> dict[tuple[str, str, int], list[UnitTask]]:
    """Tasks grouped by the program that can carry them: all copies in one, and each kind of pending reduction in its
    own.

    Tasks with larger elements come first, so that every task is aligned in a packed buffer.
    """
    found: dict[tuple[str, str, int], list[UnitTask]] = {}
    for task in sorted(tasks, key=lambda task: -task.align):
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
