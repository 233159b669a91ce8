# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group agree, at their first call on GPU tensors, whether programs run on their memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from ...errors import PlanMismatch
from ...files import typed
from ...units import format_bytes
from ..executor.join import host_key
from .cuda_clock import cuda
from .gpu_options import GpuOptions

SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""PyTorch's own switch: whether several ranks may have symmetric memory on one GPU."""


class GpuCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells the others about its GPU."""

    rank: int
    host: str
    uuid: str
    reached: tuple[str, ...]
    """The GPUs that this rank sees and whose memory its GPU can address."""
    seen: tuple[str, ...]
    shares: bool
    options: str
    held_bytes: int
    """GPU memory that programs of other groups hold on this rank already."""
    rendezvous: int
    """How many symmetric allocations its process has made: PyTorch counts them, and its ranks must agree."""
    torch: str


def gpu_card(rank: int, device: torch.device, options: GpuOptions, held_bytes: int, rendezvous: int) -> GpuCard:
    """This process's own.

    Args:
        rank: Its rank in the group.
        device: The GPU of its tensors.
        options: What the environment says.
        held_bytes: GPU memory that its other groups hold.
        rendezvous: Symmetric allocations that its process has made.

    Returns:
        The card.
    """
    count = cuda.device_count()
    uuids = [str(cuda.get_device_properties(index).uuid) for index in range(count)]
    mine = device.index
    reached = [uuids[index] for index in range(count) if index == mine or cuda.can_device_access_peer(mine, index)]
    return GpuCard(
        rank=rank, host=host_key(), uuid=uuids[mine], reached=tuple(reached), seen=tuple(uuids),
        shares=os.environ.get(SHARING) == "1", options=options.text, held_bytes=held_bytes,
        rendezvous=rendezvous, torch=str(torch.__version__),
    )  # fmt: skip


def encode_card(card: GpuCard) -> bytes:
    """A card as bytes, for the other ranks."""
    return msgspec.json.encode(card)


def decode_cards(texts: Sequence[bytes]) -> list[GpuCard]:
    """Everybody's, by rank; raises `PlanMismatch` where one cannot be read."""
    found = []
    for rank, text in enumerate(texts):
        try:
            found.append(msgspec.json.decode(text, type=typed(GpuCard)))
        except msgspec.MsgspecError as error:
            raise PlanMismatch(f"rank {rank}: its GPU card cannot be read ({error}): another Stretto?") from None
    return found


def why_not(cards: Sequence[GpuCard], options: GpuOptions, wanted_bytes: int) -> str:
    """Why no program can run on the memory of these ranks' GPUs; empty where one can. The same on all ranks.

    Args:
        cards: Of all ranks of the group.
        options: What the environment says, on this rank.
        wanted_bytes: GPU memory that the group would hold on each rank.

    Returns:
        A reason, or an empty text.
    """
    first = cards[0]
    for card in cards:
        if card.options != first.options:
            return f"rank {card.rank} has other options (STRETTO_GPU, ...) than rank 0: {card.options}; {first.options}"
        if card.torch != first.torch:
            return f"rank {card.rank} has PyTorch {card.torch}, rank 0 {first.torch}"
        if card.host != first.host:
            return f"ranks 0 and {card.rank} are on different hosts"
        if card.rendezvous != first.rendezvous:
            return (
                f"rank {card.rank} has joined {card.rendezvous} groups or symmetric tensors, rank 0 {first.rendezvous}"
            )
        if card.held_bytes + wanted_bytes > options.max_bytes:
            held = f"rank {card.rank} holds {format_bytes(card.held_bytes) if card.held_bytes else 'nothing'} already"
            return f"{format_bytes(wanted_bytes)} more are over STRETTO_GPU_MEMORY ({held})"
    for card in cards:
        for other in cards:
            if card.rank < other.rank and card.uuid == other.uuid and not (card.shares and other.shares):
                return f"ranks {card.rank} and {other.rank} share a GPU ({SHARING}=1 allows it)"
            if other.uuid in card.seen and other.uuid not in card.reached:
                return f"the GPU of rank {card.rank} cannot address that of rank {other.rank}"
    return ""


def sharers(cards: Sequence[GpuCard]) -> int:
    """The most ranks of a group that share one GPU."""
    uuids = [card.uuid for card in cards]
    return max(uuids.count(uuid) for uuid in uuids)


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    properties: Any = cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
