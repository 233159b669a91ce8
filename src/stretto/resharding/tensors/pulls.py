# SPDX-License-Identifier: Apache-2.0
"""Weights between ranks of one GPU: trainers pack into symmetric memory, servers copy straight into their tensors.

A program writes into symmetric memory of the server, from which weights are unpacked once more, and takes only the
multiprocessors of its share. A pull reads the trainers' packed memory with all of them and saves that copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...algorithms import algorithm
from ...errors import StrettoError
from ...runtime.gpu.copies import BoxCopy, GpuCopies
from .movers import Check, Mover
from .packing import Part, Tensors, pack

if TYPE_CHECKING:
    from .. import ReshardPlan
    from .carrier import ReshardGroup
    from .rounds import Stream

MEETING_BYTES = 256
"""What each rank brings where ranks only wait for one another."""
KEPT_TABLES = 4
"""Tables of copies that a round keeps on each side: those of two sets of tensors, and of sources that change."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PullMover(Mover):
    """Packs with one launch and pulls with another; a meeting of all ranks between them."""

    meeting: Any
    """What `GpuEngine.load_program` made of a program in which every rank hears of every other."""
    queued = True
    route = "pull"
    tables: dict[tuple[Any, ...], GpuCopies] = field(default_factory=dict)

    def start(self, packed: torch.Tensor, unpacked: torch.Tensor) -> Callable[[Check], None]:
        """A pull has no packed output."""
        raise StrettoError("a pull has no packed output")

    def pack(
        self, key: int, parts: Sequence[Part], tensors: Tensors, buffer: torch.Tensor, blocks: int | None
    ) -> torch.Tensor:
        """Copy boxes of tensors into a buffer on the current stream; those of another dtype are cast by PyTorch.

        Args:
            key: the round.
            parts: the boxes.
            tensors: this rank's tensors.
            buffer: the packed buffer, in bytes.
            blocks: the most thread blocks at a time; None for all.

        Returns:
            The buffer.
        """
        same = [part for part in parts if part.of(tensors).dtype == part.dtype]
        pack([part for part in parts if part.of(tensors).dtype != part.dtype], tensors, buffer)
        base = buffer.data_ptr() if len(buffer) else 0
        boxes = [(part.of(tensors), base + part.offset) for part in same]
        self._launch((0, key), boxes, False, buffer.device, blocks)
        return buffer

    def meet(self, memory: torch.Tensor) -> None:
        """Let the current stream of every rank wait for those of all others; `memory` is symmetric."""
        size = len(self.carrier.ranks)
        gpu = self.carrier.group.gpu
        gpu.run_program(self.meeting, memory[:MEETING_BYTES], memory[MEETING_BYTES : (1 + size) * MEETING_BYTES])

    def pull(
        self, key: int, parts: Sequence[Part], holders: Sequence[int], tensors: Tensors, buffer: torch.Tensor,
        blocks: int | None,
    ) -> None:  # fmt: skip
        """Copy boxes out of the packed buffers of other ranks on the current stream.

        Args:
            key: the round.
            parts: the boxes, with their places in the buffers of their holders.
            holders: who holds each, as a rank of the group.
            tensors: this rank's tensors.
            buffer: this rank's packed buffer, by which those of others are found.
            blocks: the most thread blocks at a time; None for all.
        """
        there = self.carrier.group.gpu.addresses(buffer)
        boxes = [(part.of(tensors), there[rank] + part.offset) for part, rank in zip(parts, holders, strict=True)]
        self._launch((1, key), boxes, True, buffer.device, blocks)

    def _launch(
        self, key: tuple[int, int], boxes: Sequence[tuple[torch.Tensor, int]], reverse: bool, device: torch.device,
        blocks: int | None,
    ) -> None:  # fmt: skip
        if not boxes:
            return
        where = (key, tuple((box.data_ptr(), box.shape, box.stride(), at) for box, at in boxes))
        found = self.tables.get(where)
        if found is None:
            for old in [each for each in self.tables if each[0] == key][: 1 - KEPT_TABLES]:
                del self.tables[old]
            copies = [BoxCopy.between(box.detach(), address, reverse=reverse) for box, address in boxes]
            found = self.tables[where] = GpuCopies(copies, device)
        found.launch(blocks)


def pull_mover(carrier: ReshardGroup, plan: ReshardPlan) -> PullMover:
    """The mover for a plan whose bytes servers pull, with a program for its meetings."""
    size = len(carrier.ranks)
    program = algorithm("direct", "all_gather", size)
    meeting = carrier.group.gpu.load_program(program, torch.uint8, "sum", size * MEETING_BYTES)
    return PullMover(carrier=carrier, plan=plan, handle=None, dtype=torch.uint8, op="", meeting=meeting)


def chosen_holders(streams: Sequence[Stream]) -> list[dict[int, int]]:
    """For each stream the holder from which each receiver pulls: itself, or the one that has least to give so far."""
    load: dict[int, int] = {}
    found = []
    for stream in streams:
        (alike,) = stream.holders
        chosen = {}
        for receiver in stream.receivers:
            chosen[receiver] = receiver if receiver in alike else min(alike, key=lambda d: (load.get(d, 0), d))
            load[chosen[receiver]] = load.get(chosen[receiver], 0) + stream.nbytes
        found.append(chosen)
    return found
