# SPDX-License-Identifier: Apache-2.0
"""Where a group's calls on GPU memory happen: its communicator, stream and board, made by all ranks together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .call_board import CallBoard, make_board_file
from .cuda_clock import Clock, cuda
from .gpu_meeting import decode_cards, encode_card, gpu_card, sharers, sm_count, why_not
from .gpu_options import GpuOptions
from .gpu_watch import WATCHDOG, GpuWatchdog
from .gpu_work import GpuFlight
from .launch_queue import QUEUES, LaunchQueue
from .meeting import Card, Meeting
from .symmetric_group import SymmetricGroup

DEFAULT_BLOCKS = 24
"""Thread blocks of a call where nothing is said: fewer SMs than NCCL takes on a box of eight GPUs."""
LEAST_BYTES = 4 << 20
"""A group with less memory than this would cut everything into tiny rounds."""
SETTLE_S = 5.0
PAUSE_S = 0.001


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuSite:
    """What a group has on its GPU."""

    device: torch.device
    communicator: Any
    board: CallBoard
    stream: Any
    queue: LaunchQueue
    clock: Clock[None]
    nothing: torch.Tensor
    """What a barrier reduces."""
    watch: GpuWatchdog
    symmetric: SymmetricGroup

    def close(self, flights: Sequence[GpuFlight]) -> None:
        """Let the GPU finish, say so, and give the memory back."""
        deadline = time.monotonic() + SETTLE_S
        with contextlib.suppress(RuntimeError):
            while not all(flight.ended for flight in list(flights)) and time.monotonic() < deadline:
                time.sleep(PAUSE_S)
            if all(flight.ended for flight in list(flights)):
                self.board.leave()
            # Other ranks leave at other times, or never: a communicator that was given up does not wait for them.
            self.communicator.abort("the group was destroyed")
            self.communicator.close()
        self.symmetric.close()


def join_gpus(
    group: Any, cards: Sequence[Card], store: Any, device: torch.device, options: GpuOptions, limit_s: float
) -> GpuSite | str:
    """All ranks of a group make what their calls on GPU memory need, or none does.

    Args:
        group: The process group.
        cards: Those of its ranks, from when the group was made.
        store: A store of the group's that nothing else uses.
        device: The GPU of this rank's tensors.
        options: What the environment says.
        limit_s: After so long a wait in a kernel ends by itself, should nobody end it before.

    Returns:
        The site, or why there is none: the same on all ranks.

    Raises:
        PeerLost: A rank does not come.
    """
    from ..gpu import communicator as gpu

    rank, size = group.rank(), group.size()
    meeting = Meeting(store, rank, size)
    meeting.cards = list(cards)
    held = WATCHDOG.held_bytes()
    mine = gpu_card(rank, device, options, held, WATCHDOG.rendezvous)
    found = decode_cards(meeting.exchange(encode_card(mine)))
    together = sharers(found)
    blocks = max(1, min(options.max_blocks or DEFAULT_BLOCKS, sm_count(device) // together))
    why = why_not(found, options, LEAST_BYTES)
    if why:
        return why
    room = options.max_bytes - max(card.held_bytes for card in found)
    packet_bytes = min(gpu.PACKET_BYTES, room // 4)
    board, communicator, path, symmetric = None, None, "", None
    try:
        path = make_board_file(size) if rank == 0 else ""
        (path, *_) = (text.decode() for text in meeting.exchange(path.encode()))
        board = CallBoard(path, rank, size)
        symmetric = SymmetricGroup(Path(path).name, rank, size, store, group.wrapped)
        WATCHDOG.rendezvous += 1
        communicator = gpu.GpuCommunicator(
            symmetric.plain, device=device, max_blocks=blocks, packet_bytes=packet_bytes,
            slot_bytes=min(gpu.SLOT_BYTES, room - packet_bytes), limit_s=limit_s,
        )  # fmt: skip
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    failed = meeting.conclude(why)
    if rank == 0 and path:
        Path(path).unlink(missing_ok=True)
    if failed or board is None or communicator is None or symmetric is None:
        if communicator is not None:
            communicator.abort(failed)
            communicator.close()
        return failed
    with cuda.device(device):
        return GpuSite(
            device=device, communicator=communicator, board=board, stream=cuda.Stream(device, priority=-1),
            queue=QUEUES.of(device.index, sm_count(device) // together), clock=Clock(device),
            nothing=torch.zeros(4 * size, dtype=torch.int32, device=device), watch=WATCHDOG, symmetric=symmetric,
        )  # fmt: skip
