# SPDX-License-Identifier: Apache-2.0
"""`HostsCommunicator`: one program over GPUs of several hosts, as kernels inside hosts and messages between them.

A call is cut into slices, and each slice goes through the stages of the program (`programs.stages`): a kernel among the
GPUs of the host, a copy to pinned memory, the network (the executor, driven by a thread), a copy back, a kernel. Slices
follow each other, so that all of these happen at the same time for different slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...errors import InvalidInput, StrettoError
from ...programs.ir import Program
from ...programs.stages import INPUT, Leg, Staged, cut
from .encode import ELEMENT_BYTES
from .hosts_device import Mark, StagingDevice
from .hosts_plan import (
    HostsPlan,
    HostsStep,
    Region,
    Run,
    SliceRange,
    device_regions,
    laid_out,
    pinned_regions,
    slices_of,
)
from .hosts_plan import plan_for as plan_of
from .hosts_proxy import NetworkProxy

SLOTS = 4
"""Slices that are under way at a time."""
SLICE_BYTES = 4 << 20
AHEAD = 48
"""Slices that may be queued before their network; a GPU's queue holds about a thousand entries."""
ARENA_BYTES = 64 << 20
"""The staging memory of a group, on the GPU and once more on the host."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HostsProgram:
    """A program as loaded for one size, type and operation."""

    plan: HostsPlan
    dtype: str
    reduce: str
    shard: int
    """The elements of a shard of the call."""
    slices: tuple[SliceRange, ...]
    places: dict[int, tuple[dict[Region, int], dict[Region, int]]]
    """By the elements of a chunk: where each region begins, on the GPU and on the host."""
    legs: dict[tuple[int, int], Any]
    """By stage and the elements of a chunk: what the GPU or the executor has loaded."""
    blocks: int
    """The most thread blocks of any kernel."""
    views: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)
    """Regions of staging memory that were used before."""

    def describe(self) -> str:
        """One line: the program, its stages and slices."""
        stages = " ".join("between" if stage.network else "inside" for stage in self.plan.staged.stages)
        return f"{self.plan.staged.name}: {stages}, {len(self.slices)} slices"


class HostsCommunicator:
    """Runs programs among ranks on several hosts; all ranks load and launch the same ones in the same order.

    Args:
        rank: This rank in the group.
        hosts: The host of each rank of the group.
        local: The `GpuCommunicator` of the ranks of this host; None where there is one rank.
        network: Loads legs between hosts.
        proxy: What carries them.
        device: This rank's GPU.
        arena_bytes: Staging memory on the GPU, and as much on the host.
    """

    def __init__(
        self, rank: int, hosts: Sequence[object], *, local: Any, network: Any, proxy: NetworkProxy,
        device: StagingDevice, arena_bytes: int = ARENA_BYTES,
    ) -> None:  # fmt: skip
        self.rank, self.hosts = rank, tuple(hosts)
        self._local, self._network, self._proxy, self._device = local, network, proxy, device
        self._arena, self._pinned = device.empty(arena_bytes), device.pinned(arena_bytes)
        self._down, self._up = device.stream(), device.stream()
        self._staged: dict[int, tuple[Staged, list[HostsPlan], Program]] = {}
        self._why = ""
        self.still_used = False
        """Whether the network had some of its memory when it was closed: then it must stay for ever."""

    @property
    def held_bytes(self) -> int:
        """The GPU memory that it holds."""
        return self._arena.nbytes + (self._local.held_bytes if self._local is not None else 0)

    def load(self, program: Program, *, dtype: torch.dtype | str, reduce: str, nbytes: int) -> HostsProgram:
        """Make a program ready for calls of one size; equal on all ranks.

        Args:
            program: A program of this group's ranks.
            dtype: The element type; "uint8" for what is only moved.
            reduce: "sum", "prod", "min", "max" or "avg".
            nbytes: The bytes of the larger of one rank's input and output.

        Returns:
            The program, for `launch`.

        Raises:
            InvalidInput: The program does not fit the size or the staging memory.
            Infeasible: It cannot be cut at the boundaries of these hosts.
        """
        if id(program) not in self._staged:
            staged = cut(program, [self.hosts.index(host) for host in self.hosts])
            plans = [plan_of(staged, rank) for rank in range(len(self.hosts))]
            self._staged[id(program)] = staged, plans, program
        _, plans, _ = self._staged[id(program)]
        name = str(dtype).removeprefix("torch.")
        size = ELEMENT_BYTES[name]
        plan = plans[self.rank]
        shards = max(count for each in plans for count in each.shards)
        shard, rest = divmod(nbytes, size * shards)
        if rest:
            raise InvalidInput(f"nbytes: {nbytes} bytes of {name} do not divide into {shards} shards")
        slices = slices_of(plans, shard, size, slice_bytes=SLICE_BYTES, room=self._arena.nbytes // SLOTS)
        places = {}
        for chunk in sorted({each.chunk for each in slices}):
            placed = [laid_out(found(plan), chunk * size) for found in (device_regions, pinned_regions)]
            if max(total for _, total in placed) > self._arena.nbytes // SLOTS:
                raise InvalidInput(f"STRETTO_GPU_MEMORY: too little staging memory for {plan.staged.name}")
            places[chunk] = placed[0][0], placed[1][0]
        how = "sum" if reduce == "avg" else reduce
        legs = {
            (step.number, chunk): self._load_leg(step, name, how, chunk * size)
            for step in plan.steps
            for chunk in places
        }
        blocks = [int(leg.encoded.blocks) for leg in legs.values() if hasattr(leg, "encoded")]
        return HostsProgram(
            plan=plan, dtype=name, reduce=reduce, shard=shard, slices=tuple(slices), places=places, legs=legs,
            blocks=max(blocks, default=1),
        )  # fmt: skip

    def _load_leg(self, step: HostsStep, dtype: str, reduce: str, chunk_bytes: int) -> Any:
        if step.network:
            return self._network.load(step.leg.program)
        program = step.leg.program
        # What is only moved goes as bytes: one kernel for all element types.
        kind, how = (dtype, reduce) if program.collective.combining else ("uint8", "sum")
        return self._local.load(program, dtype=kind, reduce=how, nbytes=step.leg.units * chunk_bytes)

    def launch(
        self, loaded: HostsProgram, source: torch.Tensor, target: torch.Tensor, stream: Any, limit_s: float
    ) -> None:
        """Queue a call on a stream; returns at once. The stream must be behind the call before.

        Args:
            loaded: What `load` made.
            source: This rank's input; flat, or anything where it has none.
            target: This rank's output.
            stream: The stream.
            limit_s: How long the network may take.

        Raises:
            StrettoError: The communicator was aborted.
        """
        if self._why:
            raise StrettoError(self._why)
        turns = [_Turn(self, loaded, at, source, target, stream, limit_s) for at in range(len(loaded.slices))]
        stops = loaded.plan.staged.network_stages
        distance = max(1, (SLOTS - 1) // max(stops, 1))
        if stops * distance >= SLOTS:
            # With that many changes between stages inside and between hosts, slices run one behind the other.
            distance = 0
        for tick in range(len(turns) + stops * distance if distance else 0):
            for part in range(stops, -1, -1):
                if 0 <= tick - part * distance < len(turns):
                    turns[tick - part * distance].queue(part)
        for turn in turns if not distance else ():
            for part in range(stops + 1):
                turn.queue(part)
        if loaded.reduce == "avg" and loaded.plan.outputs:
            self._device.run(stream, lambda: target.div_(len(self.hosts)))

    def mark(self, stream: Any) -> Mark:
        """The moment when a stream, which must be behind the call before, is done with what was launched on it."""
        return self._device.mark(stream, 1)

    def abort(self, why: str) -> None:
        """Make all waits of this rank end at once; the communicator cannot be used afterwards."""
        self._why = self._why or why
        self._proxy.abort(why)
        if self._local is not None:
            self._local.abort(why)

    def state(self) -> str:
        """Where the calls under way are."""
        return self._proxy.state()

    def lost(self) -> tuple[int, int] | None:
        """The (rank, step) that a kernel of this rank gave up waiting for, or None."""
        found: tuple[int, int] | None = self._local.lost() if self._local is not None else None
        if found is None:
            return None
        near = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[self.rank]]
        return near[found[0]], found[1]

    def close(self) -> None:
        """End the threads and give the memory back, unless the network still has it (`still_used`)."""
        self.still_used = bool(self._proxy.close())
        if self._local is not None:
            self._local.close()


class _Turn:
    """One slice of one call on its way through the stages."""

    def __init__(
        self, owner: HostsCommunicator, loaded: HostsProgram, at: int, source: torch.Tensor, target: torch.Tensor,
        stream: Any, limit_s: float,
    ) -> None:  # fmt: skip
        self._owner, self._loaded, self._stream, self._limit_s = owner, loaded, stream, limit_s
        self._device = owner._device
        self._range = loaded.slices[at]
        self._element = source.dtype if loaded.plan.inputs else target.dtype
        self._source, self._target = source, target
        self._slot = at % SLOTS
        self._sent = 0
        self._given: torch.Tensor | None = None
        plan = loaded.plan
        c = plan.staged.collective.chunks
        whole = self._range.end - self._range.begin == c * self._range.chunk
        full = whole and len(loaded.slices) == 1
        self._in_direct, self._out_direct = (whole and (full or shards == 1) for shards in plan.shards)
        self._alias = _overlap(source, target)

    def queue(self, part: int) -> None:
        """Queue what is between two networks: part 0 ends with the first, part 1 begins with what came from it."""
        steps = self._loaded.plan.steps
        stops = [at for at, step in enumerate(steps) if step.network]
        first = stops[part - 1] if part else 0
        last = stops[part] if part < len(stops) else len(steps)
        if part:
            self._receive(steps[first])
        else:
            self._take_input()
        for step in steps[first + (part > 0) : last]:
            self._kernel(step)
        if part < len(stops):
            self._send(steps[last])
        else:
            self._give_output()

    def _region(self, kind: str, stage: int, units: int, *, host: bool = False) -> torch.Tensor:
        loaded, chunk = self._loaded, self._range.chunk
        key = chunk, self._slot, host, kind, stage, self._element
        found = loaded.views.get(key)
        if found is None:
            size = ELEMENT_BYTES[loaded.dtype]
            arena = self._owner._pinned if host else self._owner._arena
            at = loaded.places[chunk][host][kind, stage] + self._slot * (arena.nbytes // SLOTS)
            loaded.views[key] = found = arena[at : at + units * chunk * size].view(self._element)
        return found

    def _user(self, tensor: torch.Tensor, shards: int) -> torch.Tensor:
        """The slice's part of the caller's memory, a row for each shard."""
        return tensor.view(shards, self._loaded.shard)[:, self._range.begin : self._range.end]

    def _take_input(self) -> None:
        plan = self._loaded.plan
        if not plan.inputs:
            return
        mine = self._user(self._source, plan.shards[0])
        if self._in_direct:
            self._given = mine.reshape(-1)
            return
        self._given = self._region("in", INPUT, plan.inputs)
        rows = self._given.view(plan.shards[0], -1)[:, : mine.shape[1]]
        self._device.copy(self._stream, rows, mine)

    def _read(self, run: Run) -> torch.Tensor:
        chunk = self._range.chunk
        if run.stage == INPUT:
            assert self._given is not None
            whole = self._given
        else:
            whole = self._written(next(s for s in self._loaded.plan.steps if s.number == run.stage))
        return whole[run.start * chunk : (run.start + run.length) * chunk]

    def _written(self, step: HostsStep) -> torch.Tensor:
        """Where a step leaves its output: in the caller's memory, if it is all of it."""
        plan = self._loaded.plan
        if plan.written == step.number and self._out_direct:
            return self._user(self._target, plan.shards[1]).reshape(-1)
        return self._region("out", step.number, step.outputs)

    def _kernel(self, step: HostsStep) -> None:
        chunk = self._range.chunk
        aliased = self._alias and any(run.stage == INPUT for run in step.reads)
        if len(step.reads) == 1 and not aliased:
            given = self._read(step.reads[0])
        else:
            given, at = self._region("pack", step.number, step.inputs), 0
            for run in step.reads:
                self._device.copy(self._stream, given[at : at + run.length * chunk], self._read(run))
                at += run.length * chunk
        made = self._written(step)
        launch = self._owner._local.launch
        leg = self._loaded.legs[step.number, chunk]
        self._device.run(self._stream, partial(launch, leg, given, made, ordered=True))

    def _send(self, step: HostsStep) -> None:
        """Copy to pinned memory, and let the thread do the rest."""
        owner, device, chunk = self._owner, self._device, self._range.chunk
        before = device.event()
        device.record(before, self._stream)
        device.wait(owner._down, before)
        pinned, at = self._region("pack", step.number, step.inputs, host=True), 0
        for run in step.reads:
            device.copy(owner._down, pinned[at : at + run.length * chunk], self._read(run))
            at += run.length * chunk
        copied = device.mark(owner._down, 0).number
        out = self._region("out", step.number, step.outputs, host=True)
        arguments = owner._network.arguments(
            self._loaded.legs[step.number, chunk], pinned.data_ptr(), out.data_ptr(), step.leg.units * chunk,
            self._loaded.dtype, "sum" if self._loaded.reduce == "avg" else self._loaded.reduce,
        )  # fmt: skip
        owner._proxy.wait_for_room(AHEAD)
        self._sent = owner._proxy.post(copied, arguments, self._limit_s)

    def _receive(self, step: HostsStep) -> None:
        """Once the thread lets go: copy what came back to the GPU."""
        owner, device = self._owner, self._device
        device.wait_released(owner._up, self._sent)
        if step.outputs:
            pinned = self._region("out", step.number, step.outputs, host=True)
            device.copy(owner._up, self._written(step), pinned)
        end = device.event()
        device.record(end, owner._up)
        device.wait(self._stream, end)

    def _give_output(self) -> None:
        plan, chunk = self._loaded.plan, self._range.chunk
        if not plan.outputs or (plan.written is not None and self._out_direct):
            return
        mine = self._user(self._target, plan.shards[1])
        if plan.written is not None:
            found = self._region("out", plan.written, plan.outputs)
        elif self._out_direct:
            found = mine.reshape(-1)
        else:
            found = self._region("result", INPUT, plan.outputs)
        at = 0
        for run in plan.results if plan.written is None else ():
            there, here = found[at : at + run.length * chunk], self._read(run)
            if there.data_ptr() != here.data_ptr():
                self._device.copy(self._stream, there, here)
            at += run.length * chunk
        if not self._out_direct:
            self._device.copy(self._stream, mine, found.view(plan.shards[1], -1)[:, : mine.shape[1]])


def _overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    begins = one.data_ptr() < two.data_ptr() + two.nbytes
    return begins and two.data_ptr() < one.data_ptr() + one.nbytes


__all__ = ["HostsCommunicator", "HostsProgram", "Leg"]
