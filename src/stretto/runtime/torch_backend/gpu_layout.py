# SPDX-License-Identifier: Apache-2.0
"""Which memory a program reads and writes for a collective on GPU tensors, and which calls have none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .buffers import CollectiveCall, copier, gathered, joined, memory_of, pieces_fit

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "barrier")
REDUCTIONS = ("sum", "avg", "min", "max", "prod")
REDUCED = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
        torch.int64, torch.bool,
    }
)  # fmt: skip
LOGICAL = {"sum": "max", "max": "max", "prod": "min", "min": "min"}
"""How truth values are reduced as bytes of 0 and 1; PyTorch does the same for NCCL."""


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuBuffers:
    """Flat input and output of a program; `finish` puts the result where the caller wants it."""

    source: torch.Tensor
    target: torch.Tensor
    reduce: str
    finish: Callable[[], object] | None = None

    @property
    def nbytes(self) -> int:
        """The size of the larger one: the collective's."""
        return max(t.numel() * t.element_size() for t in (self.source, self.target))


def gpu_refusal(call: CollectiveCall, size: int) -> str:
    """Why no program on GPU memory runs a call of a group of so many ranks; empty when one does.

    It may only depend on what c10d wants equal on all ranks, or ranks would part.
    """
    if size == 1:
        return "a group of one rank"
    if call.op not in KINDS:
        return f"no {call.op} on GPU memory"
    if call.op == "barrier":
        return ""
    if call.splits is not None:
        # Splits that are equal on this rank are refused, too, since those of another rank may differ.
        return "an all-to-all with splits"
    tensor = call.tensor
    if tensor.layout != torch.strided:
        return f"{tensor.layout} tensors"
    if tensor.numel() == 0:
        return "an empty tensor"
    if len({one.device for one in (*call.inputs, *call.outputs)}) > 1:
        return "tensors on several devices"
    if call.reduce:
        if call.reduce not in REDUCTIONS:
            return f"no reduction {call.reduce}"
        if tensor.dtype not in REDUCED:
            return f"no reduction of {tensor.dtype}"
        if call.reduce == "avg" and not tensor.is_floating_point():
            return f"no avg of {tensor.dtype}"
    return ""


def gpu_buffers(call: CollectiveCall, size: int, nothing: torch.Tensor) -> GpuBuffers | None:
    """The memory of a call; None where its tensors do not fit together. A barrier reduces `nothing`.

    Args:
        call: The call.
        size: The number of ranks.
        nothing: A tensor of no elements.

    Returns:
        The memory, or None.
    """
    if call.op == "barrier":
        return GpuBuffers(source=nothing, target=nothing, reduce="sum")
    if call.op in ("all_reduce", "broadcast", "reduce"):
        return _in_place(call)
    return _apart(call, size)


def _in_place(call: CollectiveCall) -> GpuBuffers | None:
    if len(call.inputs) != 1:
        return None
    (tensor,) = call.inputs
    flat = memory_of(tensor)
    back = None if flat.data_ptr() == tensor.data_ptr() else copier(flat, [tensor])
    return _typed(flat, flat, call.reduce, back)


def _apart(call: CollectiveCall, size: int) -> GpuBuffers | None:
    """All-gather, reduce-scatter and all-to-all: whole on one side or both, a shard on the other."""
    if call.inputs[0].dtype != call.outputs[0].dtype:
        return None
    if call.op == "all_gather":
        if len(call.inputs) != 1 or not pieces_fit(call.outputs, call.inputs[0], size):
            return None
    elif call.op == "reduce_scatter":
        if len(call.outputs) != 1 or not pieces_fit(call.inputs, call.outputs[0], size):
            return None
    elif call.inputs[0].numel() != call.outputs[0].numel() or call.inputs[0].numel() % size:
        return None
    source = joined(call.inputs)
    target, back = gathered(call.outputs)
    if call.op != "all_gather" and _overlap(source, target):
        source = source.clone()
    return _typed(source, target, call.reduce, back)


def _typed(source: torch.Tensor, target: torch.Tensor, reduce: str, finish: Callable[[], object] | None) -> GpuBuffers:
    """What is only moved is bytes, of whatever dtype; truth values are bytes of 0 and 1."""
    if not reduce:
        return GpuBuffers(source=_as_bytes(source), target=_as_bytes(target), reduce="", finish=finish)
    if source.dtype == torch.bool:
        return GpuBuffers(source=_as_bytes(source), target=_as_bytes(target), reduce=LOGICAL[reduce], finish=finish)
    return GpuBuffers(source=source, target=target, reduce=reduce, finish=finish)


def _as_bytes(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(torch.uint8)


def _overlap(one: torch.Tensor, two: torch.Tensor) -> bool:
    begins = one.data_ptr() < two.data_ptr() + two.numel() * two.element_size()
    return begins and two.data_ptr() < one.data_ptr() + one.numel() * one.element_size()
