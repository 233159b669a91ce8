# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a group on several hosts make what their calls on GPU memory need: all of them, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ...programs import Program
from ..executor.executor import failure_error
from ..executor.forks import keep_forever
from ..gpu.hosts import ARENA_BYTES, HostsCommunicator
from ..gpu.hosts_device import CudaDevice, gpudirect
from ..gpu.hosts_proxy import NetworkProxy, ProgressBoard, board_bytes
from .call_board import CallBoard, make_board_file
from .cuda_clock import Clock, cuda
from .engine import Engine
from .executor_legs import ExecutorLegs
from .gloo_options import gloo_options
from .gpu_meeting import GpuCard, decode_cards, encode_card, gpu_card, sharers, sm_count, why_not
from .gpu_options import GpuOptions
from .gpu_rendezvous import DEFAULT_BLOCKS, LEAST_BYTES, GpuSite
from .gpu_watch import WATCHDOG
from .gpu_work import GpuFlight
from .launch_queue import QUEUES
from .meeting import Card, Meeting
from .selection import ProgramPick
from .symmetric_group import SymmetricGroup


class QuietClock(Clock[None]):
    """Calls CUDA only while somebody records: a call may stand still, with the interpreter's lock."""

    def read(self) -> None:
        """Tell of everything that has happened."""
        if self._notes:
            super().read()


class NoSymmetricMemory:
    """The symmetric memory of a rank that is alone on its host and so has none."""

    def close(self) -> None:
        """Do nothing: there is no memory to give back."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HostsSite(GpuSite):
    """What a group on several hosts has on its GPU."""

    store: Any
    """Where the ranks of all hosts say that they have given up; a connection of its own."""
    proxy: NetworkProxy
    leave: Callable[[], None]
    """Gives the executor's communicator back."""
    note: str
    """What was found and is not used."""
    picks: dict[tuple[str, int, int], ProgramPick] = field(default_factory=dict)
    programs: dict[tuple[str, int], Program] = field(default_factory=dict)

    def close(self, flights: Sequence[GpuFlight]) -> None:
        """Let the GPU and the network finish, say so, and give the memory back."""
        super().close(flights)
        if self.communicator.still_used:
            keep_forever(self.communicator)
        self.leave()


@dataclass(kw_only=True, eq=False)
class _Joining:
    """What a rank has made so far."""

    board: CallBoard | None = None
    local: Any = None
    symmetric: Any = field(default_factory=NoSymmetricMemory)
    communicator: HostsCommunicator | None = None
    proxy: NetworkProxy | None = None

    def undo(self, why: str) -> None:
        """All ranks have agreed that it comes to nothing."""
        for made in (self.communicator, self.local):
            if made is not None:
                made.abort(why)
                made.close()
        self.symmetric.close()


def join_hosts(
    group: Any, engine: Engine, cards: Sequence[Card], store: Any, device: torch.device, options: GpuOptions, *,
    limit_s: float, failed: Callable[[Exception], None], look: Callable[[], None],
) -> HostsSite | str:  # fmt: skip
    """All ranks of a group make what their calls on GPU memory need, or none does.

    Args:
        group: The process group.
        engine: Its part that runs programs on the executor, which carries what goes between hosts.
        cards: Those of its ranks, from when the group was made.
        store: A store of the group's that nothing else uses.
        device: The GPU of this rank's tensors.
        options: What the environment says.
        limit_s: After so long a wait in a kernel ends by itself, should nobody end it before.
        failed: Told where the network fails.
        look: Asked now and then while something is on the network; raises where a rank is lost.

    Returns:
        The site, or why there is none: the same on all ranks.

    Raises:
        PeerLost: A rank does not come.
    """
    rank, size, job = group.rank(), group.size(), engine.job
    if job.executor is None:
        return f"ranks on several hosts, and {job.why}"
    meeting = Meeting(store, rank, size)
    meeting.cards = list(cards)
    mine = gpu_card(rank, device, options, WATCHDOG.held_bytes(), WATCHDOG.rendezvous)
    found = decode_cards(meeting.exchange(encode_card(mine)))
    devices = engine.selector.devices
    said = [
        [int(word, 16) for word in text.split()]
        for text in meeting.exchange(f"{job.taken(devices):x} {job.generation:x}".encode())
    ]
    taken = 0
    for each, _ in said:
        taken |= each
    number, generation = (~taken & (taken + 1)).bit_length() - 1, max(each for _, each in said) + 1
    why = why_not_between(found, options) or (f"more than {number} groups" if number >= job.max_communicators else "")
    if why:
        return why
    job.reserve(number, generation, devices)
    made = _Joining()
    path = ""
    near = [card.rank for card in found if card.host == mine.host]
    try:
        path = _make_files(len(near)) if rank == near[0] else ""
        path = meeting.exchange(path.encode())[near[0]].decode()
        here: Any = c10d.PrefixStore(f"host {near[0]}", store)
        made.board = CallBoard(path, near.index(rank), len(near), near)
        room = options.max_bytes - max(card.held_bytes for card in found)
        arena_bytes = min(ARENA_BYTES, room // 4)
        if len(near) > 1:
            _join_local(made, here, path, near.index(rank), len(near), device, found, options, room, limit_s)
        staging = CudaDevice(device)
        progress = ProgressBoard(_progress(path), near.index(rank), len(near))
        network = ExecutorLegs(job.executor, [job.rank_of[each] for each in devices], number)
        made.proxy = NetworkProxy(partial(network.carrier, progress), staging, failure_error, failed, look)
        made.communicator = HostsCommunicator(
            rank, [card.host for card in found], local=made.local, network=network, proxy=made.proxy, device=staging,
            arena_bytes=arena_bytes,
        )  # fmt: skip
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
    wrong = meeting.conclude(why)
    if rank == near[0] and path:
        for file in (path, _progress(path)):
            Path(file).unlink(missing_ok=True)
    if wrong or made.board is None or made.communicator is None or made.proxy is None:
        made.undo(wrong)
        job.give_back(number)
        return wrong
    with cuda.device(device):
        return HostsSite(
            device=device, communicator=made.communicator, board=made.board, stream=cuda.Stream(device, priority=-1),
            queue=QUEUES.of(device.index, sm_count(device) // sharers(found)), clock=QuietClock(device),
            nothing=torch.zeros(4 * size, dtype=torch.int32, device=device), watch=WATCHDOG, symmetric=made.symmetric,
            store=_own_store(store), proxy=made.proxy, leave=lambda: job.give_back(number), note=gpudirect(),
        )  # fmt: skip


def why_not_between(cards: Sequence[GpuCard], options: GpuOptions) -> str:
    """Why no program can run on these ranks' GPUs: inside each host by itself, and in what all of them must share."""
    first = cards[0]
    for card in cards:
        if (card.options, card.torch) != (first.options, first.torch):
            theirs, ours = (f"{one.options}, PyTorch {one.torch}" for one in (card, first))
            return f"rank {card.rank} has {theirs}, rank 0 {ours}"
    for host in dict.fromkeys(card.host for card in cards):
        why = why_not([card for card in cards if card.host == host], options, LEAST_BYTES)
        if why:
            return why
    return ""


def _join_local(
    made: _Joining, store: Any, path: str, rank: int, size: int, device: torch.device, cards: Sequence[GpuCard],
    options: GpuOptions, room: int, limit_s: float,
) -> None:  # fmt: skip
    """The ranks of one host map each other's memory."""
    from ..gpu import communicator as gpu

    kind: Any = dist.ProcessGroupGloo
    gloo = kind(c10d.PrefixStore("gloo", store), rank, size, gloo_options(timedelta(seconds=limit_s)))
    wrapped = [(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)]
    made.symmetric = SymmetricGroup(Path(path).name, rank, size, store, wrapped)
    WATCHDOG.rendezvous += 1
    packet_bytes = min(gpu.PACKET_BYTES, room // 8)
    # Ranks of other "hosts" may share the GPU, where these are emulated: all ranks of the group count.
    blocks = max(1, min(options.max_blocks or DEFAULT_BLOCKS, sm_count(device) // sharers(cards)))
    made.local = gpu.GpuCommunicator(
        made.symmetric.plain, device=device, max_blocks=blocks, packet_bytes=packet_bytes,
        slot_bytes=min(gpu.SLOT_BYTES, room // 2), limit_s=limit_s,
    )  # fmt: skip


def _make_files(size: int) -> str:
    """The boards of a host's ranks: of their calls, and beside it of their progress on the network."""
    path = make_board_file(size)
    Path(_progress(path)).write_bytes(bytes(board_bytes(size)))
    return path


def _progress(path: str) -> str:
    return f"{path}.progress"


def _own_store(store: Any) -> Any:
    """A connection to the store that no other thread waits on, where there can be one."""
    own: Any = store
    with contextlib.suppress(Exception):
        own = store.clone()
    return c10d.PrefixStore("hosts", own)
