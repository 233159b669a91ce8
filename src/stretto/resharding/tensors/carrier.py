# SPDX-License-Identifier: Apache-2.0
"""The ranks that move tensors together: their process group, the cluster they plan for, and the
transport of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from ...cluster import Cluster
from ...errors import InvalidInput, StrettoError
from ...process_state import STATE, ProcessPart
from ...programs.lower import lower
from ...programs.lowered import Lowered
from ...runtime.executor.executor import Executor, LoadedProgram
from ...runtime.executor.forks import check_world
from ...runtime.torch_backend.backend import StrettoGroup
from ...runtime.torch_backend.job_store import start_store
from ...simulator import simulate
from .. import ReshardPlan
from .agree import ReshardAgreement
from .world import SyncWorld

MESSAGE_BYTES = 256 << 10
"""Chunks of a plan are sent whole up to this many bytes, larger chunks in slices, one after the other."""
CHECK_S = 0.5
REDUCE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add, "avg": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
}  # fmt: skip
Check = Callable[[], None]


class ReshardGroups(ProcessPart):
    """What resharding keeps for the current default process group; a new default group starts afresh."""

    def __init__(self) -> None:
        self.group: Any = None
        self.world: SyncWorld | None = None


RESHARDING = STATE.part(ReshardGroups)


def default_world() -> SyncWorld:
    """The ranks of the default process group."""
    if not dist.is_initialized():
        raise InvalidInput("torch.distributed: call init_process_group first")
    check_world()
    group: Any = dist.group.WORLD
    if RESHARDING.group is not group or RESHARDING.world is None:
        cards = group.cards if isinstance(group, StrettoGroup) else ()
        RESHARDING.world = SyncWorld(
            start_store("stretto/world"), dist.get_rank(), size=dist.get_world_size(), cards=cards
        )
        RESHARDING.group = group
    return RESHARDING.world


def agreement() -> ReshardAgreement:
    """This rank's side of the job's agreements."""
    return default_world().agreement


class ReshardGroup:
    """A process group of its own over some ranks of the job; all of these ranks construct it together."""

    def __init__(self, ranks: Sequence[int], world: SyncWorld | None = None) -> None:
        self.world = world or default_world()
        self.ranks = tuple(ranks)
        self.rank = self.world.rank
        # PyTorch names a group by the number of groups that a rank has, which may differ between ranks: this group is
        # made without PyTorch's new_group.
        name = f"resharding {','.join(map(str, ranks))}"
        number = self.world.number(name)
        store = self.world.store
        self.group: Any = StrettoGroup(
            store=c10d.PrefixStore(f"stretto/{name}/{number}", store), rank=self.ranks.index(self.rank),
            size=len(self.ranks), timeout=store.timeout, name=name, devices=self.ranks, apart=self.world.apart,
        )  # fmt: skip
        engine = self.group.engine
        known: Cluster | None = engine.selector.cluster
        self.cluster: Cluster = known or engine.selector.network
        self.device = {rank: rank if known else at for at, rank in enumerate(self.ranks)}
        """The cluster's device of each rank; devices rise with ranks."""
        why = engine.job.why
        if not why and engine.communicator >= engine.job.max_communicators:
            why = f"more than {engine.job.max_communicators} groups"
        self.executor: Executor | None = None if why else engine.job.executor
        self.why = why
        """The reason why the executor does not move the bytes; empty if it does."""

    @classmethod
    def shared(cls, ranks: Sequence[int]) -> ReshardGroup:
        """The group of these ranks, made when it is first needed; all of these ranks call this together."""
        groups, key = default_world().groups, tuple(ranks)
        if key not in groups:
            groups[key] = cls(key)
        found = groups[key]
        assert isinstance(found, cls)
        return found

    @property
    def me(self) -> int:
        """The device number of this rank."""
        return self.device[self.rank]

    def load(self, program: Lowered) -> LoadedProgram:
        """Load a program of all ranks of this group into the executor."""
        assert self.executor is not None
        engine = self.group.engine
        ranks = [engine.job.rank_of[r] for r in engine.selector.devices]
        return self.executor.load(program, ranks=ranks, communicator=engine.communicator, message_bytes=MESSAGE_BYTES)

    def close(self) -> None:
        """End the process group; a second call does nothing."""
        if self.group is not None:
            self.group.shutdown()
            self.group = self.executor = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Mover:
    """Moves the bytes of one plan between packed buffers."""

    carrier: ReshardGroup
    plan: ReshardPlan
    handle: LoadedProgram | None
    """The program on the executor; None if messages are sent one by one."""
    dtype: torch.dtype
    op: str
    """The kind of the pending reduction; empty if bytes are only moved."""

    @classmethod
    def of(cls, carrier: ReshardGroup, plan: ReshardPlan, dtype: torch.dtype, op: str, device: str) -> Mover:
        """A mover that uses the executor if it can, else single messages; all ranks decide alike.

        Args:
            carrier: the ranks that take part.
            plan: the plan, the same on all ranks.
            dtype: element type, for a pending reduction.
            op: kind of the pending reduction; empty if bytes are only moved.
            device: kind of device that the buffers are on, such as "cpu"; only "cpu" uses the executor.

        Returns:
            The mover.
        """
        handle = None
        if carrier.executor is not None and device == "cpu" and plan.program is not None:
            handle = carrier.load(lower(plan.program))
        return cls(carrier=carrier, plan=plan, handle=handle, dtype=dtype if op else torch.uint8, op=op)

    def predicted_us(self, share: float = 1.0) -> float:
        """Predicted microseconds of the program with fairly shared links, if `share` times its bytes are moved."""
        program, cluster = self.plan.program, self.plan.cluster
        if program is None:
            return 0.0
        return simulate(program, cluster, nbytes=share * self.plan.nbytes, contention="fair").total_us

    def start(self, packed: torch.Tensor, unpacked: torch.Tensor) -> Callable[[Check], None]:
        """Begin to move bytes; the returned function waits for the end and calls its argument from time to time."""
        if self.handle is None:
            return self._start_messages(packed, unpacked)
        executor = self.carrier.executor
        if executor is None:
            raise StrettoError("the process group has ended")
        work = executor.start(
            self.handle,
            packed.data_ptr(),
            unpacked.data_ptr(),
            self.plan.nbytes // self.dtype.itemsize,
            str(self.dtype).removeprefix("torch."),
            self.op or "sum",
            timeout_s=self.carrier.group.engine.timeout_s,
            keep=(packed, unpacked),
        )

        def wait(check: Check) -> None:
            while not work.wait(CHECK_S):
                check()

        return wait

    def _start_messages(self, packed: torch.Tensor, unpacked: torch.Tensor) -> Callable[[Check], None]:
        """Send every bundle directly from one holder to each device that wants it; summands are added where the sum is
        wanted.
        """
        me, group = self.carrier.me, self.carrier.group
        peer = {device: at for at, device in enumerate(self.carrier.device.values())}
        load: dict[int, int] = {}
        works: list[dist.Work] = []
        after: list[Callable[[], None]] = []
        have = want = 0
        for bundle in self.plan.bundles:
            holds = any(me in alike for alike in bundle.holders)
            mine = packed[have : have + bundle.nbytes] if holds else packed[:0]
            goal = unpacked[want : want + bundle.nbytes] if me in bundle.receivers else unpacked[:0]
            have, want = have + len(mine), want + len(goal)
            for receiver in bundle.receivers:
                parts: list[torch.Tensor] = []
                for alike in bundle.holders:
                    sender = receiver if receiver in alike else min(alike, key=lambda d: (load.get(d, 0), d))
                    load[sender] = load.get(sender, 0) + bundle.nbytes * (sender != receiver)
                    if receiver == me and sender == me:
                        parts.append(mine)
                    elif receiver == me:
                        parts.append(torch.empty_like(goal) if len(bundle.holders) > 1 else goal)
                        works.append(group.recv([parts[-1]], peer[sender], 0))
                    elif sender == me:
                        works.append(group.send([mine], peer[receiver], 0))
                if receiver == me:
                    after.append(lambda goal=goal, parts=parts: self._combine(goal, parts))  # type: ignore[misc]

        def wait(_: Check) -> None:
            for work in works:
                work.wait()
            for each in after:
                each()

        return wait

    def _combine(self, goal: torch.Tensor, parts: list[torch.Tensor]) -> None:
        if len(parts) == 1:
            if parts[0].data_ptr() != goal.data_ptr():
                goal.copy_(parts[0])
            return
        total = parts[0].view(self.dtype).clone()
        for part in parts[1:]:
            REDUCE[self.op](total, part.view(self.dtype), out=total)
        goal.view(self.dtype).copy_(total / len(parts) if self.op == "avg" else total)
