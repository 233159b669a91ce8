# SPDX-License-Identifier: Apache-2.0
"""Boxes of tensors in packed buffers, the buffers of the rounds of a transfer, and on a GPU the streams they run on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...runtime.torch_backend.cuda_clock import cuda
from .. import ReshardPlan
from .carrier import ReshardGroup

Tensors = Sequence[torch.Tensor | None]
"""This rank's local part of each tensor; None where the rank has none."""
POLL_S, CHECK_S = 0.0002, 0.5


@dataclass(frozen=True, kw_only=True)
class Part:
    """A box of a local tensor, and its place in a packed buffer."""

    tensor: int
    where: tuple[slice, ...]
    offset: int
    nbytes: int
    dtype: torch.dtype

    def of(self, tensors: Tensors) -> torch.Tensor:
        """The box of this rank's tensor."""
        local = tensors[self.tensor]
        assert local is not None
        return (local if local.ndim else local.view(1))[self.where]

    def packed(self, buffer: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The box's place in a packed buffer."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(shape)


def pack(parts: Sequence[Part], tensors: Tensors, buffer: torch.Tensor) -> torch.Tensor:
    """Copy boxes of tensors into a buffer, all with one call.

    Args:
        parts: the boxes.
        tensors: this rank's tensors.
        buffer: the packed buffer, in bytes.

    Returns:
        The buffer.
    """
    boxes = [part.of(tensors).detach() for part in parts]
    if boxes:
        torch._foreach_copy_([p.packed(buffer, box.shape) for p, box in zip(parts, boxes, strict=True)], boxes)
    return buffer


def unpack(parts: Sequence[Part], tensors: Tensors, buffer: torch.Tensor) -> None:
    """Copy what is in a buffer into boxes of tensors.

    Args:
        parts: the boxes.
        tensors: this rank's tensors.
        buffer: the packed buffer, in bytes.
    """
    boxes = [part.of(tensors) for part in parts]
    if boxes:
        torch._foreach_copy_(boxes, [p.packed(buffer, box.shape) for p, box in zip(parts, boxes, strict=True)])


def finish_stream(tensors: Tensors) -> None:
    """Wait on the host for the current stream of the GPU, if tensors are on one."""
    if any(tensor is not None and tensor.is_cuda for tensor in tensors):
        cuda.current_stream().synchronize()


def stream_ends(tensors: Tensors) -> list[Any]:
    """Where the current stream of the GPU is now: an event, or none where no tensor is on a GPU."""
    if not any(tensor is not None and tensor.is_cuda for tensor in tensors):
        return []
    end = cuda.Event()
    end.record()
    return [end]


def follow_streams(ends: Sequence[Any], tensors: Tensors) -> None:
    """Let the current stream wait for others, and PyTorch's allocator know that it uses tensors of theirs."""
    for end in ends:
        cuda.current_stream().wait_event(end)
        for tensor in tensors:
            if tensor is not None and tensor.is_cuda:
                tensor.record_stream(cuda.current_stream())


class RoundBuffers:
    """The packed input and output of the rounds that are under way, by turns.

    On a GPU rounds are packed, moved and unpacked on three streams, so that one is packed while another one moves; a
    buffer is written again only after what has read it.
    """

    def __init__(
        self, carrier: ReshardGroup, sizes: tuple[int, int], depth: int, *, keep: bool, gpu: torch.device | None
    ) -> None:
        self._carrier, self._sizes, self._depth, self._keep, self._gpu = carrier, sizes, depth, keep, gpu
        self._kept: dict[tuple[int, int, str], torch.Tensor] = {}
        self._shared: list[tuple[int, int] | None] = [None, None]
        """Where in the group's symmetric memory inputs and outputs begin, and how large each is."""
        self._beside = 0, 0
        self._ends: dict[tuple[int, int], Any] = {}

    @property
    def shares_inputs(self) -> bool:
        """Whether other ranks read the packed input."""
        return self._shared[0] is not None

    def share(self, plans: Sequence[ReshardPlan], sides: Sequence[int], beside: int = 0) -> None:
        """Take inputs (side 0) or outputs (side 1) from memory that all ranks of the group use; collective.

        Args:
            plans: the plans of all rounds.
            sides: which of the two.
            beside: bytes behind them that all ranks use for something else; see `beside`.
        """
        assert self._gpu is not None
        at = 0
        for side in sides:
            most = max(_largest(plan, side) for plan in plans)
            self._shared[side] = at, -(-most // 256) * 256
            at += self._depth * -(-most // 256) * 256
        self._beside = at, beside
        self._carrier.symmetric(at + beside, self._gpu)

    def beside(self) -> torch.Tensor:
        """Symmetric memory that belongs to no round."""
        assert self._gpu is not None
        begin, nbytes = self._beside
        return self._carrier.symmetric(begin + nbytes, self._gpu)[begin:]

    def take(self, side: int, slot: int, nbytes: int, device: torch.device | None) -> torch.Tensor:
        """The buffer of one round.

        Args:
            side: 0 for its input, 1 for its output.
            slot: which of the buffers that are used by turns.
            nbytes: the bytes of this round.
            device: where this rank's tensors are; None if it has none.

        Returns:
            The memory, as bytes.
        """
        shared = self._shared[side]
        if shared is not None and self._gpu is not None:
            begin = shared[0] + slot * shared[1]
            whole = self._carrier.symmetric(self._total(), self._gpu)
            return whole[begin : begin + nbytes]
        where = device or self._gpu or torch.device("cpu")
        if not self._keep:
            found = torch.empty(nbytes, dtype=torch.uint8, device=where)
            if self._gpu is not None:
                # Programs read it on another stream than it was made on, and nobody holds it until they have.
                found.record_stream(self._lanes[1])
            return found
        key = (side, slot, str(where))
        if key not in self._kept:
            self._kept[key] = torch.empty(self._sizes[side], dtype=torch.uint8, device=where)
        return self._kept[key][:nbytes]

    def begin(self) -> None:
        """What the caller's stream has done comes before the rounds that follow."""
        if self._gpu is None:
            return
        for lane in self._lanes:
            lane.wait_stream(cuda.current_stream(self._gpu))
        # Another transfer of the group may have used the same memory, in other places.
        self._lanes[1].wait_stream(self._lanes[2])
        self._lanes[0].wait_stream(self._lanes[1])

    @property
    def _lanes(self) -> list[Any]:
        assert self._gpu is not None
        return self._carrier.lanes(self._gpu)

    @contextmanager
    def _on(self, lane: int, slot: int, after: tuple[tuple[int, int], ...]) -> Iterator[None]:
        if self._gpu is None:
            yield
            return
        stream = self._lanes[lane]
        for other in after:
            if other in self._ends:
                stream.wait_event(self._ends[other])
        with cuda.stream(stream):
            yield
            end = cuda.Event()
            end.record(stream)
        self._ends[lane, slot] = end

    def packing(self, slot: int, since: int | None = None) -> Any:
        """The stream that packs: after what has moved from the same buffer before, or from that of slot `since`."""
        return self._on(0, slot, ((1, slot if since is None else since),))

    def moving(self, slot: int, since: int | None = None) -> Any:
        """The stream that moves: after packing, and after what has unpacked the same buffer, or that of slot `since`,
        before.
        """
        return self._on(1, slot, ((0, slot), (2, slot if since is None else since)))

    def unpacking(self, slot: int) -> Any:
        """The stream that unpacks."""
        return self._on(2, slot, ((1, slot),))

    def finish_packing(self) -> None:
        """Wait on the host for all that was packed so far."""
        if self._gpu is not None:
            self._lanes[0].synchronize()

    def borrow(self, packed: torch.Tensor) -> None:
        """Rounds read memory that was made on another stream, and that nobody holds until they have."""
        if packed.is_cuda and self._gpu is not None:
            for lane in self._lanes[:2]:
                packed.record_stream(lane)

    def reach(self, slot: int, check: Callable[[], None]) -> None:
        """Wait on the host until the last round of a buffer is unpacked."""
        self._await(self._ends[2, slot], check)

    def catch_up(self) -> None:
        """Let the caller's stream wait for all rounds that were started; raise what has ended them."""
        if self._gpu is not None:
            self._carrier.group.gpu.check()
            cuda.current_stream(self._gpu).wait_stream(self._lanes[2])

    def settle(self, check: Callable[[], None]) -> None:
        """Wait on the host for all rounds."""
        if self._gpu is None:
            return
        # The caller's stream has copied what stays on this rank.
        self._lanes[2].wait_stream(cuda.current_stream(self._gpu))
        end = cuda.Event()
        end.record(self._lanes[2])
        self._await(end, check)

    def _await(self, end: Any, check: Callable[[], None]) -> None:
        looked = time.monotonic()
        while not end.query():
            self._carrier.group.gpu.check()
            if time.monotonic() - looked > CHECK_S:
                looked = time.monotonic()
                check()
            time.sleep(POLL_S)
        self._carrier.group.gpu.check()

    def _total(self) -> int:
        return sum(self._beside)


def _largest(plan: ReshardPlan, side: int) -> int:
    """The largest input or output of any rank."""
    load: dict[int, int] = {}
    for bundle in plan.bundles:
        for device in bundle.receivers if side else [d for alike in bundle.holders for d in alike]:
            load[device] = load.get(device, 0) + bundle.nbytes
    return max(load.values(), default=0)
