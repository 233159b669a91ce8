# SPDX-License-Identifier: Apache-2.0
"""Other ways to bring a micro-batch from one mesh to another than a planned program, for `pipeline_mesh_rank.py`.

Sums that are pending in gradients are added up inside the stage first, as systems without such programs do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from stretto.pipeline.meshes.lane import Lane, SendWork
from stretto.resharding import Tensor
from stretto.resharding.tensors.describe import dtype_of
from stretto.resharding.tensors.plain import GatherBroadcast, PlainMessages

Finishes = list[Callable[[Any], None]]


def whole_sums(tensor: Any) -> Any:
    """The tensor without pending sums."""
    if isinstance(tensor, DTensor) and any(place.is_partial() for place in tensor.placements):
        return tensor.redistribute(placements=[Replicate() if p.is_partial() else p for p in tensor.placements])
    return tensor


class ComparedLane(Lane):
    """A lane that moves bytes without a plan, and waits for them at once."""

    def send(self, tensors: Sequence[torch.Tensor], differentiable: Sequence[bool]) -> SendWork:
        return super().send([whole_sums(tensor) for tensor in tensors], differentiable)

    def tensors(self) -> list[Tensor]:
        """What moves, as the planner is told it."""
        assert self.transfer is not None
        return [
            Tensor(name=m.name, shape=m.dst.plan_shape, dtype_bytes=dtype_of(m.dst.dtype).itemsize,
                   src=m.src.layout(m.src_meshes), dst=m.dst.layout(m.dst_meshes))
            for m in self.transfer.moves
        ]  # fmt: skip


class PlainLane(ComparedLane):
    """Every piece straight from a holder to everyone who lacks it."""

    def _start(self, sources: Sequence[Any], targets: Sequence[Any]) -> Finishes:
        PlainMessages(self.tensors(), sources, targets)()
        return []


class GatherLane(ComparedLane):
    """Tensor after tensor to one rank, which broadcasts it to the next stage."""

    groups: ClassVar[dict[str, Any]] = {}
    """For each lane by name the group of that rank and the receiving mesh; all ranks of the job make all of them."""

    def _start(self, sources: Sequence[Any], targets: Sequence[Any]) -> Finishes:
        GatherBroadcast(self.tensors(), sources, targets, self.groups[self.name])()
        return []


class SignalLane(ComparedLane):
    """One number instead of the tensors: the time of a pipeline whose communication costs nothing."""

    def _start(self, sources: Sequence[Any], targets: Sequence[Any]) -> Finishes:
        receivers = [int(rank) for rank in self.dst_mesh.mesh.flatten().tolist()]
        word = torch.zeros(1)
        works: list[Any] = []
        for at, receiver in enumerate(receivers):
            sender = self.src_ranks[at % len(self.src_ranks)]
            if sender == self.rank:
                works.append(dist.isend(word, receiver))
            elif receiver == self.rank:
                works.append(dist.irecv(word, sender))

        def finish(_: Any) -> None:
            for work in works:
                work.wait()

        return [finish]
