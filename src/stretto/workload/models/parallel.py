# SPDX-License-Identifier: Apache-2.0
"""Data parallelism of a chain of blocks: who updates, gathers and reduces which parameters when.

======= ========================================= =========================== ==================================
mode    each rank keeps                           before a block is used      after its gradients are there
======= ========================================= =========================== ==================================
ddp     everything                                update                      all-reduce, in the last micro-batch
zero1   its shard of the optimizer's state        update, all-gather          reduce-scatter, in the last one
zero2   its shard of state and gradients          update, all-gather          reduce-scatter, in each one
zero3   its shard of everything (FSDP)            update; all-gather in each  reduce-scatter, in each one
                                                  forward and backward pass
======= ========================================= =========================== ==================================

A block is updated just before the forward pass first needs it, from the gradients of the iteration before: nothing
waits for all gradients, so there is no barrier between iterations (and no clipping by a global norm, which would be
one). Updates with an all-gather come one unit early, so that the gathering hides; gathered parameters of two units fit
in memory at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import unknown
from ..dag import Dep
from ..roofline import Accelerator
from .common import Groups, OpCollector, last, numbered

MODES = ("ddp", "zero1", "zero2", "zero3")


def check_mode(mode: str) -> str:
    """The mode, one of `MODES`; ``fsdp`` is another name of ``zero3``."""
    mode = "zero3" if mode == "fsdp" else mode
    if mode not in MODES:
        raise unknown("mode", mode, (*MODES, "fsdp"))
    return mode


class Replicas:
    """Emits the ops that keep the parameters of a chain of blocks equal on `members` ranks.

    `units` are blocks (in the order of the forward pass) whose parameters are sent together: buckets, or FSDP units.
    For each block a model calls `enter_forward` (or `enter_backward`), adds its compute-op with the returned
    dependencies, and then calls `leave_forward` (or `leave_backward`) with the compute-op's name. Blocks in `resident`
    stay gathered from the forward pass to the end of the backward pass.
    """

    def __init__(
        self,
        steps: OpCollector,
        device: Accelerator,
        *,
        what: str,
        params: Sequence[float],
        units: Sequence[Sequence[int]],
        mode: str = "ddp",
        members: int,
        groups: Groups = (),
        ranks: tuple[int, ...] = (),
        param_bytes: float,
        grad_bytes: float,
        optimizer_bytes: float,
        dtype: str = "fp32",
        micro_batches: int = 1,
        resident: Sequence[int] = (),
    ) -> None:
        self.steps, self.device, self.mode, self.members = steps, device, mode, members
        self.groups, self.ranks, self.dtype = groups, ranks, dtype
        self.param_bytes, self.grad_bytes, self.optimizer_bytes = param_bytes, grad_bytes, optimizer_bytes
        self.micro_batches = micro_batches
        self.units = units
        self.unit_params = [sum(params[block] for block in unit) for unit in units]
        self.unit_of = {block: at for at, unit in enumerate(units) for block in unit}
        self.names = {
            verb: numbered(f"{verb}-{what}", len(units)) for verb in ("opt", "ag", "ag-fwd", "ag-bwd", "ar", "rs")
        }
        self.kept = {self.unit_of[block] for block in resident} | {len(units) - 1}
        self._updated: set[int] = set()
        self._ready: dict[int, str] = {}
        """The all-gather of each unit whose parameters are gathered or being gathered."""
        self._recent: list[str] = []

    def enter_forward(self, block: int, micro: int = 0) -> list[str]:
        """Add the ops that prepare a block's parameters for the forward pass; return the names of ops to wait for."""
        unit = self.unit_of[block]
        if block == self.units[unit][0]:
            self._bring(unit, micro, "ag-fwd", first=unit == 0)
            if self.mode != "ddp" and unit + 1 < len(self.units):
                self._bring(unit + 1, micro, "ag-fwd", first=False)
        if unit in self._ready:
            return [self._ready[unit]]
        return [self.names["ag" if self.mode in ("zero1", "zero2") else "opt"][unit]]

    def leave_forward(self, block: int, op: str) -> None:
        """Tell that the block's forward compute-op has been added under the name `op`."""
        unit = self.unit_of[block]
        if block == self.units[unit][-1]:
            self._recent.append(op)
            if unit not in self.kept:
                self._ready.pop(unit, None)

    def enter_backward(self, block: int, micro: int = 0) -> list[str]:
        """Add the ops that prepare a block's parameters for the backward pass; return the names of ops to wait for."""
        unit = self.unit_of[block]
        if self.mode != "zero3":
            return []
        if block == self.units[unit][-1]:
            self._bring(unit, micro, "ag-bwd", first=unit == len(self.units) - 1)
            if unit > 0:
                self._bring(unit - 1, micro, "ag-bwd", first=False)
        return [self._ready[unit]]

    def leave_backward(self, block: int, op: str, micro: int = 0) -> None:
        """Tell that the block's backward compute-op has been added; send the gradients if the block's unit is complete.

        Args:
            block: index of the block in the order of the forward pass.
            op: name of the backward compute-op.
            micro: index of the micro-batch.
        """
        unit = self.unit_of[block]
        if block != self.units[unit][0]:
            return
        self._recent.append(op)
        self._ready.pop(unit, None)
        if self.mode in ("ddp", "zero1") and micro != self.micro_batches - 1:
            return
        kind, verb = ("all_reduce", "ar") if self.mode == "ddp" else ("reduce_scatter", "rs")
        name = self._name(verb, unit, micro if self.mode in ("zero2", "zero3") else None)
        nbytes = self.unit_params[unit] * self.grad_bytes
        encoding = f"fp{8 * self.grad_bytes:g}"
        self.steps.comm(name, kind, nbytes, [op], phase="backward", groups=self.groups, encoding=encoding)

    def _name(self, verb: str, unit: int, micro: int | None) -> str:
        name = self.names[verb][unit]
        return name if micro is None or self.micro_batches == 1 else f"{name}.m{micro}"

    def _bring(self, unit: int, micro: int, verb: str, *, first: bool) -> None:
        self._update(unit)
        if self.mode != "zero3" or unit in self._ready:
            return
        gathered = self.names["opt"][unit]
        # Memory holds two gathered units: an all-gather waits until the unit used before the current one is finished.
        # At the start of a pass a third unit may be held.
        held = self._recent[-2:-1] if first else self._recent[-1:]
        room = [Dep(op=op, why="submit") for op in held]
        self._ready[unit] = self._gather(self._name(verb, unit, micro), unit, [gathered, *room], verb)

    def _update(self, unit: int) -> None:
        if unit in self._updated:
            return
        self._updated.add(unit)
        verb = "ar" if self.mode == "ddp" else "rs"
        micros = range(self.micro_batches) if self.mode in ("zero2", "zero3") else [None]
        grads = [last(self._name(verb, unit, micro)) for micro in micros]
        mine = self.unit_params[unit] / (1 if self.mode == "ddp" else self.members)
        duration_us = self.device.compute_us(0.0, mine * self.optimizer_bytes, self.dtype)
        name = self.steps.compute(self.names["opt"][unit], duration_us, grads, phase="optimizer", ranks=self.ranks)
        if self.mode in ("zero1", "zero2"):
            self._gather(self.names["ag"][unit], unit, [name], "ag-fwd")

    def _gather(self, name: str, unit: int, after: Sequence[str | Dep], verb: str) -> str:
        return self.steps.comm(
            name,
            "all_gather",
            self.unit_params[unit] * self.param_bytes,
            after,
            phase="backward" if verb == "ag-bwd" else "forward",
            groups=self.groups,
            encoding=f"fp{8 * self.param_bytes:g}",
        )
