# SPDX-License-Identifier: Apache-2.0
"""How the bytes of one plan get from packed buffers to packed buffers: by the executor, by single messages, through
pinned memory where tensors are on GPUs, or by a program on GPU memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...errors import StrettoError
from ...programs.fused import IN
from ...programs.lower import lower
from ...runtime.executor.executor import LoadedProgram
from ...runtime.torch_backend.cuda_clock import cuda
from ...simulator import simulate
from .. import ReshardPlan
from .carrier import ReshardGroup

CHECK_S = 0.5
REDUCE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add, "avg": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum,
}  # fmt: skip
Check = Callable[[], None]


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

    @property
    def route(self) -> str:
        """How bytes move."""
        return "messages" if self.handle is None else "executor"

    queued = False
    """Whether `start` puts everything onto the current stream of the GPU, and the host need not wait."""

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


@dataclass(frozen=True, kw_only=True, eq=False)
class PinnedMover(Mover):
    """Moves the bytes of GPU buffers through pinned memory of the hosts, with the executor between them."""

    route = "pinned"

    def start(self, packed: torch.Tensor, unpacked: torch.Tensor) -> Callable[[Check], None]:
        """Copy to the host and begin to move; the returned function waits and puts the copy back onto the stream."""
        given, got = _pinned(packed), _pinned(unpacked)
        given.copy_(packed, non_blocking=True)
        if packed.is_cuda:
            cuda.current_stream(packed.device).synchronize()
        wait = super().start(given, got)

        def finish(check: Check) -> None:
            wait(check)
            # The pinned block is not given away again before this copy has ended: PyTorch's allocator sees to that.
            unpacked.copy_(got, non_blocking=True)

        return finish


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuMover(Mover):
    """Runs the plan's program on GPU memory: ranks write into each other's symmetric buffers."""

    loaded: Any
    """What `GpuEngine.load_program` made."""
    queued = True
    route = "gpu"

    @property
    def reads_inputs(self) -> bool:
        """Whether ranks read each other's packed inputs, which then must be symmetric memory, too."""
        return bool(self.loaded.fused.touched(IN))

    def start(self, packed: torch.Tensor, unpacked: torch.Tensor) -> Callable[[Check], None]:
        """Put the program onto the current stream."""
        gpu = self.carrier.group.gpu
        # The engine counts elements, where buffers count bytes.
        gpu.run_program(self.loaded, packed.view(self.dtype), unpacked.view(self.dtype))
        if self.op == "avg" and len(unpacked):
            unpacked.view(self.dtype).div_(len(self.plan.tasks[0].holders))
        return lambda check: check()


def mover_of(
    carrier: ReshardGroup, plan: ReshardPlan, dtype: torch.dtype, op: str, *, device: str, gpu: torch.device | None
) -> Mover:
    """The mover for a plan: all ranks decide alike.

    Args:
        carrier: the ranks that take part.
        plan: the plan, the same on all ranks.
        dtype: element type, for a pending reduction.
        op: kind of the pending reduction; empty if bytes are only moved.
        device: kind of device that the buffers are on, such as "cpu".
        gpu: the GPU on whose memory a program may run; None where none may.

    Returns:
        A program on GPU memory if one may run there, else the executor if there is one, else single messages.
    """
    kind = dtype if op else torch.uint8
    found: dict[str, Any] = {"carrier": carrier, "plan": plan, "dtype": kind, "op": op, "handle": None}
    if plan.program is None:
        return Mover(**found)
    if device == "cuda" and gpu is not None:
        reduce = "sum" if op in ("", "avg") else op
        return GpuMover(**found, loaded=carrier.group.gpu.load_program(plan.program, kind, reduce, plan.nbytes))
    if carrier.executor is None:
        return Mover(**found)
    found["handle"] = carrier.load(lower(plan.program))
    return PinnedMover(**found) if device == "cuda" else Mover(**found)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
