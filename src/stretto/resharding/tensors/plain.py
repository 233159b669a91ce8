# SPDX-License-Identifier: Apache-2.0
"""What weights cost without a plan: plain messages, and everything gathered on one rank and broadcast.

To compare with; both run on the wrapped backend of the default process group.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist

from .. import Layout, Tensor, UnitTask, decompose

Locals = Sequence[torch.Tensor | None]
"""This rank's local part of each tensor; None where it has none."""


class PlainMessages:
    """What one would write by hand: every piece straight from a holder to everyone who lacks it, all at once."""

    def __init__(self, tensors: Sequence[Tensor], sources: Locals, targets: Locals) -> None:
        me = dist.get_rank()
        self.sends: list[tuple[torch.Tensor, int]] = []
        self.receives: list[tuple[torch.Tensor, int]] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        load: dict[int, int] = {}
        tiles = [[_tiles(side, t.shape) for side in (t.src, t.dst)] for t in tensors]
        for task in decompose(tensors):
            src, dst = tiles[task.tensor]
            have, want = sources[task.tensor], targets[task.tensor]
            mine = _box(have, src[me], task) if have is not None and me in task.holders[0] else None
            goal = _box(want, dst[me], task) if want is not None and me in task.receivers else None
            for receiver in task.receivers:
                if receiver in task.holders[0]:
                    if receiver == me and goal is not None and mine is not None:
                        self.copies.append((goal, mine))
                    continue
                sender = min(task.holders[0], key=lambda d: (load.get(d, 0), d))
                load[sender] = load.get(sender, 0) + task.nbytes
                if sender == me and mine is not None:
                    self.sends.append((mine, receiver))
                if receiver == me and goal is not None:
                    self.receives.append((goal, sender))

    def __call__(self) -> None:
        """Move everything once; all ranks call this."""
        buffers = [torch.empty(goal.shape, dtype=goal.dtype, device=goal.device) for goal, _ in self.receives]
        ops = [dist.P2POp(dist.irecv, b, peer) for b, (_, peer) in zip(buffers, self.receives, strict=True)]
        ops += [dist.P2POp(dist.isend, mine.contiguous(), peer) for mine, peer in self.sends]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        for buffer, (goal, _) in zip(buffers, self.receives, strict=True):
            goal.copy_(buffer)
        for goal, mine in self.copies:
            goal.copy_(mine)


class GatherBroadcast:
    """What vLLM's own engine does: tensor after tensor to one rank, which broadcasts it; everybody cuts out its part.

    `group` is of that rank, the first of the first source mesh, and of all ranks that want something.
    """

    def __init__(self, tensors: Sequence[Tensor], sources: Locals, targets: Locals, group: Any) -> None:
        self.tensors, self.sources, self.targets, self.group = tensors, sources, targets, group
        self.root = tensors[0].src.mesh.devices[0]
        self.tiles = [[_tiles(side, t.shape) for side in (t.src, t.dst)] for t in tensors]

    def __call__(self) -> None:
        """Move everything once; all ranks call this."""
        me = dist.get_rank()
        for at, tensor in enumerate(self.tensors):
            mine, wanted = self.sources[at], self.targets[at]
            some = mine if mine is not None else wanted
            full = None
            if me == self.root or wanted is not None:
                dtype = some.dtype if some is not None else torch.bfloat16
                full = torch.empty(tensor.shape, dtype=dtype, device=None if some is None else some.device)
            self._gather(at, mine, full)
            if full is not None:
                dist.broadcast(full, self.root, group=self.group)
                if wanted is not None:
                    wanted.copy_(full[_where(self.tiles[at][1][me])])

    def _gather(self, at: int, mine: torch.Tensor | None, full: torch.Tensor | None) -> None:
        me, ops, late = dist.get_rank(), [], []
        seen: set[bytes] = set()
        for rank, tile in self.tiles[at][0].items():
            key = tile.tobytes()
            if key in seen or (tile[:, 0] >= tile[:, 1]).any():
                continue
            seen.add(key)
            part = full[_where(tile)] if full is not None and me == self.root else None
            if rank == self.root == me and part is not None and mine is not None:
                part.copy_(mine)
            elif rank == me and mine is not None:
                ops.append(dist.P2POp(dist.isend, mine.contiguous(), self.root))
            elif part is not None:
                late.append((part, torch.empty(part.shape, dtype=part.dtype, device=part.device)))
                ops.append(dist.P2POp(dist.irecv, late[-1][1], rank))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        for part, buffer in late:
            part.copy_(buffer)


class SymmetricPull:
    """Written by hand for GPUs of one host: trainers copy their parts into symmetric memory as large as all of them,
    and servers copy boxes of it, each straight into its own tensors.

    It has no limit of memory, no versions, and no answer to a rank that dies.
    """

    def __init__(self, tensors: Sequence[Tensor], sources: Locals, targets: Locals) -> None:
        import torch.distributed._symmetric_memory as symmetric

        me, memory = dist.get_rank(), cast("Any", symmetric)
        tiles = [[_tiles(side, t.shape) for side in (t.src, t.dst)] for t in tensors]
        places: list[dict[int, int]] = []
        ends: dict[int, int] = {}
        for tensor, (src, _) in zip(tensors, tiles, strict=True):
            places.append({})
            for rank, tile in src.items():
                count = int((tile[:, 1] - tile[:, 0]).prod()) * tensor.dtype_bytes
                places[-1][rank] = ends.get(rank, 0)
                ends[rank] = ends.get(rank, 0) + -(-count // 16) * 16
        device = torch.device("cuda", torch.cuda.current_device())
        self._buffer = memory.empty(max(ends.values()), dtype=torch.uint8, device=device)
        self._handle = memory.rendezvous(self._buffer, cast("Any", dist.group.WORLD).group_name)

        def part(at: int, rank: int) -> torch.Tensor:
            tile = tiles[at][0][rank]
            shape, dtype = [int(b - a) for a, b in tile], torch.bfloat16
            found: torch.Tensor = self._handle.get_buffer(rank, shape, dtype, places[at][rank] // dtype.itemsize)
            return found

        mine = [(part(at, me), source) for at, source in enumerate(sources) if source is not None]
        self._pushed, self._given = [goal for goal, _ in mine], [source for _, source in mine]
        self._goals: list[torch.Tensor] = []
        self._boxes: list[torch.Tensor] = []
        load: dict[int, int] = {}
        for task in decompose(tensors):
            for receiver in task.receivers:
                alike = [receiver] if receiver in task.holders[0] else task.holders[0]
                sender = min(alike, key=lambda d: (load.get(d, 0), d))
                load[sender] = load.get(sender, 0) + task.nbytes
                want = targets[task.tensor]
                if receiver == me and want is not None:
                    src, dst = tiles[task.tensor]
                    self._goals.append(_box(want, dst[me], task))
                    self._boxes.append(_box(part(task.tensor, sender), src[sender], task))

    def __call__(self) -> None:
        """Move everything once; all ranks call this."""
        for goals, boxes in ((self._pushed, self._given), (self._goals, self._boxes)):
            if goals:
                torch._foreach_copy_(goals, boxes)
            torch.cuda.synchronize()
            dist.all_reduce(torch.zeros(1))


def _tiles(side: Layout, shape: Sequence[int]) -> dict[int, Any]:
    return dict(zip(side.mesh.devices, side.tiles(shape), strict=True))


def _where(tile: Any) -> tuple[slice, ...]:
    return tuple(slice(int(begin), int(end)) for begin, end in tile)


def _box(local: torch.Tensor, tile: Any, task: UnitTask) -> torch.Tensor:
    """A task's part of this rank's tile."""
    return local[tuple(slice(a - int(t[0]), b - int(t[0])) for (a, b), t in zip(task.box, tile, strict=True))]
