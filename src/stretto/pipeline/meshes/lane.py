# SPDX-License-Identifier: Apache-2.0
"""One direction between two stages: tensors of each micro-batch go from the layouts of one mesh to those of another.

The sending stage says with its first message what it sends; then every rank of both meshes plans one program for all
tensors of a micro-batch, which runs again for each of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.tensor import DTensor

from ...errors import InvalidInput, PeerLost
from ...files import typed
from ...resharding.tensors.carrier import ReshardGroup, agreement, default_world
from ...resharding.tensors.describe import PlacedTensor, around, dtype_of, local_of, placed, placed_tensor
from ...resharding.tensors.transfer import Move, Transfer

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05
MAX_TENSORS = 64


class SentTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that a stage sends, and whether a gradient comes back for it."""

    placed: PlacedTensor
    differentiable: bool


Wanted = Callable[[Sequence[SentTensor]], list[Sequence[Any]]]
"""The placements in which the receiving mesh takes the tensors that the other one sends."""


class SendWork:
    """A transfer that this rank sends; `wait` returns once its memory may be used again."""

    def __init__(self, finishes: list[Callable[[Any], None]]) -> None:
        self._finishes = finishes

    def wait(self) -> None:
        """Wait for the end; a second call does nothing."""
        finishes, self._finishes = self._finishes, []
        for finish in finishes:
            finish(lambda: None)


class ReceiveWork:
    """A transfer that this rank receives; after `wait` its tensors are there."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._finishes: list[Callable[[Any], None]] | None = None
        self.tensors: list[DTensor] = []

    def begin(self, finishes: list[Callable[[Any], None]], tensors: list[DTensor]) -> None:
        """The transfer was started."""
        self._finishes, self.tensors = finishes, tensors

    def wait(self) -> None:
        """Wait until this rank has its part of every tensor."""
        if self._finishes is None:
            self._lane.begin_receives(until=self)
        finishes, self._finishes = self._finishes or [], []
        for finish in finishes:
            finish(lambda: None)


class Lane:
    """All transfers of one direction between two stages. All ranks of both meshes construct it together.

    Transfers are matched by their order alone, so both stages must agree on it.
    """

    def __init__(self, name: str, src_mesh: Any, dst_mesh: Any, wanted: Wanted) -> None:
        self.name, self.src_mesh, self.dst_mesh, self._wanted = name, src_mesh, dst_mesh, wanted
        self.rank = agreement().rank
        self.src_ranks = [int(rank) for rank in src_mesh.mesh.flatten().tolist()]
        dst_ranks = [int(rank) for rank in dst_mesh.mesh.flatten().tolist()]
        ranks = sorted({*self.src_ranks, *dst_ranks})
        # Each direction has a group of its own: the works of a group start in one order on all its ranks, and the two
        # directions of an edge do not.
        self.group = ReshardGroup(ranks)
        prefix = f"stretto/pipeline/{name}/{','.join(map(str, ranks))}"
        number = default_world().number(prefix)
        self._store: Any = c10d.PrefixStore(f"{prefix}/{number}", dist.distributed_c10d._get_default_store())
        self.sent: list[SentTensor] = []
        """What the sending stage sends; empty before its first message."""
        self.transfer: Transfer | None = None
        self._goals: list[PlacedTensor] = []
        self._waiting: list[ReceiveWork] = []

    def send(self, tensors: Sequence[torch.Tensor], differentiable: Sequence[bool]) -> SendWork:
        """Begin to send one micro-batch; all ranks of the sending mesh call this.

        Args:
            tensors: DTensors on the sending mesh, of the same shapes and layouts each time.
            differentiable: for each tensor, whether a gradient comes back.

        Returns:
            The work.

        Raises:
            InvalidInput: a tensor has another shape or layout than the first time, or is none of the mesh.
        """
        said = [
            SentTensor(placed=self._placed(at, tensor), differentiable=grad)
            for at, (tensor, grad) in enumerate(zip(tensors, differentiable, strict=True))
        ]
        if self.transfer is None:
            self._store.set(str(self.rank), msgspec.json.encode(said))
            self._plan()
        for at, (first, now) in enumerate(zip(self.sent, said, strict=False)):
            if first != now:
                raise InvalidInput(f"{self.name}: tensor {at} is {now.placed}, in the first micro-batch {first.placed}")
        if len(self.sent) != len(said):
            raise InvalidInput(f"{self.name}: {len(said)} tensors, in the first micro-batch {len(self.sent)}")
        return SendWork(self._start([local_of(tensor) for tensor in tensors], [None] * len(said)))

    def receive(self) -> ReceiveWork:
        """Begin to receive one micro-batch; all ranks of the receiving mesh call this, in the order of the sends."""
        work = ReceiveWork(self)
        self._waiting.append(work)
        if self.transfer is not None:
            self.begin_receives()
        return work

    def begin_receives(self, until: ReceiveWork | None = None) -> None:
        """Start all receives that were asked for before it was known what is sent; waits for the sender to say so."""
        if self.transfer is None:
            self._plan()
        while self._waiting:
            work = self._waiting.pop(0)
            locals_ = [self._room(goal) for goal in self._goals]
            tensors = [
                around(local, self.dst_mesh, self._placements[at], goal.shape)
                for at, (local, goal) in enumerate(zip(locals_, self._goals, strict=True))
            ]
            targets = [local if local.numel() else None for local in locals_]
            work.begin(self._start([None] * len(targets), targets), tensors)
            if work is until:
                break

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of one micro-batch."""
        return sum(math.prod(one.placed.shape) * dtype_of(one.placed.dtype).itemsize for one in self.sent)

    @property
    def predicted_us(self) -> float:
        """Simulated microseconds of one micro-batch, alone on the cluster; 0 before the first message."""
        return sum(each.mover.predicted_us() for each in self.transfer.rounds) if self.transfer else 0.0

    @property
    def bound_us(self) -> float:
        """Microseconds that no program for one micro-batch beats; 0 before the first message."""
        return sum(plan.bound_us for plan in self.transfer.plans) if self.transfer else 0.0

    def close(self) -> None:
        """End the group."""
        self.group.close()

    def _placed(self, at: int, tensor: torch.Tensor) -> PlacedTensor:
        what = f"{self.name}: tensor {at}"
        if not isinstance(tensor, DTensor):
            raise InvalidInput(
                f"{what}: is a {type(tensor).__name__}; stages of several devices must return DTensors "
                "(parallelize_module: use_local_output=False)"
            )
        if tensor.device_mesh != self.src_mesh:
            raise InvalidInput(f"{what}: is on {tensor.device_mesh}, its stage on {self.src_mesh}")
        return placed_tensor(what, tensor, self.rank)

    def _plan(self) -> None:
        """Learn what is sent, and plan; ranks of the sending mesh also compare with one another."""
        said = [self._read(rank) for rank in self.src_ranks]
        for rank, other in zip(self.src_ranks, said, strict=True):
            if other != said[0]:
                raise InvalidInput(
                    f"{self.name}: rank {rank} sends {_text(other)}, rank {self.src_ranks[0]} sends {_text(said[0])}"
                )
        self.sent = said[0]
        self._placements = self._wanted(self.sent)
        self._goals = [
            placed(f"{self.name}: tensor {at}", one.placed.shape, dtype_of(one.placed.dtype), self.dst_mesh, placements)
            for at, (one, placements) in enumerate(zip(self.sent, self._placements, strict=True))
        ]
        moves = [
            Move(name=f"{self.name} {at}", src=one.placed, dst=goal)
            for at, (one, goal) in enumerate(zip(self.sent, self._goals, strict=True))
        ]
        self.transfer = Transfer(self.group, moves)

    def _read(self, rank: int) -> list[SentTensor]:
        """What a rank of the sending mesh sends, as soon as it has said so."""
        limit_s = self._store.timeout.total_seconds()
        deadline, pause_s = time.monotonic() + limit_s, FIRST_PAUSE_S
        while not self._store.check([str(rank)]):
            if agreement().gone(rank):
                raise PeerLost(f"{self.name}: rank {rank} is gone")
            if time.monotonic() > deadline:
                raise PeerLost(f"{self.name}: rank {rank} did not send anything within {limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        found = msgspec.json.decode(self._store.get(str(rank)), type=typed(list[SentTensor]))
        if len(found) > MAX_TENSORS:
            raise InvalidInput(f"{self.name}: {len(found)} tensors between two stages; at most {MAX_TENSORS}")
        return found

    def _room(self, goal: PlacedTensor) -> torch.Tensor:
        size = [0] if goal.empty else [end - begin for begin, end in goal.tile(self.rank)][: len(goal.shape)]
        local = torch.empty(size, dtype=dtype_of(goal.dtype), device=goal.device)
        return local.view(goal.shape) if goal.empty else local

    def _start(self, sources: Sequence[Any], targets: Sequence[Any]) -> list[Callable[[Any], None]]:
        assert self.transfer is not None
        return [self.transfer.start(at, sources, targets) for at in range(len(self.transfer.rounds))]


def _text(sent: Sequence[SentTensor]) -> str:
    return "; ".join(str(one.placed) for one in sent) or "nothing"
