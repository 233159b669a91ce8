"""The short way, which most calls take: one motif, in place, on a tensor without gaps."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..executor.executor import DTYPES
from ..torch_backend.buffers import CollectiveCall
from ..torch_backend.recording import current
from ..torch_backend.work import GroupWork
from .carrier import ExecutorCarrier, ExecutorMotif
from .planned_work import SubmissionOwner, SubmittedOp, never
from .prepared import PreparedPlan
from .sequencer import ActiveMotif, QueuedMotif, QueuedOp

NAMES: dict[torch.dtype, str] = {getattr(torch, name): name for name in DTYPES}
ONE_TENSOR = ("all_reduce", "broadcast", "reduce")


class SubmittedWhole(SubmittedOp):
    """An op of one motif that works in place on a tensor without gaps, as most do: nothing is laid out, or copied."""

    __slots__ = ("_carries", "_loaded", "_name", "_tensor")

    def __init__(
        self,
        owner: SubmissionOwner,
        carrier: ExecutorCarrier,
        instance: QueuedOp,
        tensor: torch.Tensor,
        loaded: ExecutorMotif,
        call: CollectiveCall,
        plain: Callable[[], GroupWork],
    ) -> None:
        self._owner, self._carrier, self._carries, self._instance = owner, carrier, carrier, instance
        self._plain, self._loaded = plain, loaded
        # Not the application's own object, which may be given other memory while the op is held back.
        self._tensor: torch.Tensor | None = tensor.detach()
        self._ended = None
        self.inline = False
        self.instead = None
        if call.reduce:
            self._op, self._name = call.reduce, NAMES[tensor.dtype]
        else:
            # Only moved, never added to: the type does not matter.
            self._op, self._name = "sum", "uint8"

    def start(self, entry: QueuedMotif) -> ActiveMotif | None:
        """Begin the motif."""
        tensor = self._tensor
        assert tensor is not None
        if current() is not None:
            self._record(entry, self._loaded.layout.task.count * DTYPES[self._name])
        return self._carries.start_on(self._loaded, tensor, self._name, self._op, entry, blocking=self.inline)

    def moved(self, entry: QueuedMotif) -> None:
        """It is where it belongs."""
        self._ran(entry, entry.part.motif)

    def over(self) -> None:
        """The motif has ended."""
        self._let_go()

    def _let_go(self) -> None:
        self._tensor, self._plain = None, never


def whole_of(
    owner: SubmissionOwner, carrier: ExecutorCarrier, active: PreparedPlan, instance: QueuedOp, call: CollectiveCall,
    plain: Callable[[], GroupWork],
) -> SubmittedWhole | None:  # fmt: skip
    """For a call that needs no memory but its tensor's own, and nothing done before or after; else None."""
    if call.op not in ONE_TENSOR or len(call.inputs) != 1:
        return None
    (tensor,) = call.inputs
    bound = active.bound(instance.planned.number, tensor.numel() if call.reduce else call.nbytes)
    divides = call.reduce == "avg" and not bound.tasks.averages
    if bound.only is None or divides or not tensor.is_contiguous():
        return None
    return SubmittedWhole(owner, carrier, instance, tensor, bound.only, call, plain)
