# SPDX-License-Identifier: Apache-2.0
"""A stage on a device mesh as PyTorch's pipeline runtime calls it: computes, and resharded tensors go in and out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import _backward
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import InvalidInput
from ...resharding.tensors.describe import around, local_of, placed
from .lane import Lane, ReceiveWork, SendWork, SentTensor


class RuntimeStage:
    """This rank's part of one stage; has what ``_PipelineScheduleRuntime`` asks a stage for.

    `incoming` are the lanes of activations from, and of gradients to, the stage before; `outgoing` those of activations
    to, and of gradients from, the next one.
    """

    def __init__(self, module: torch.nn.Module, index: int, count: int, *, splits: bool, plain: bool) -> None:
        self.submod, self.stage_index, self.num_stages = module, index, count
        self.group_rank, self.group_size = index, count
        self.is_first, self.is_last = index == 0, index == count - 1
        self.has_backward = True
        self.stage_index_to_group_rank = {at: at for at in range(count)}
        self.output_chunks: list[Any] = []
        self.incoming: tuple[Lane, Lane] | None = None
        self.outgoing: tuple[Lane, Lane] | None = None
        self._splits, self._plain = splits, plain
        self._receives: dict[tuple[str, int], ReceiveWork] = {}
        self._kept: dict[int, tuple[tuple[Any, ...], list[Any]]] = {}
        self._grads: dict[int, Sequence[Any]] = {}
        self._late: dict[int, Callable[[], object]] = {}

    def get_fwd_recv_ops(self, microbatch: int) -> list[ReceiveWork]:
        """Begin to receive the inputs of a micro-batch."""
        if self.incoming is None:
            return []
        self._receives["F", microbatch] = work = self.incoming[0].receive()
        return [work]

    def get_bwd_recv_ops(self, microbatch: int) -> list[ReceiveWork]:
        """Begin to receive the gradients of the outputs of a micro-batch."""
        if self.outgoing is None:
            return []
        self._receives["B", microbatch] = work = self.outgoing[1].receive()
        return [work]

    def get_fwd_send_ops(self, microbatch: int) -> list[SendWork]:
        """Begin to send the outputs of a micro-batch."""
        if self.outgoing is None:
            return []
        outputs = [self._wrapped(output, self.outgoing[0]) for output in self._kept[microbatch][0]]
        return [self.outgoing[0].send([o.detach() for o in outputs], [o.requires_grad for o in outputs])]

    def get_bwd_send_ops(self, microbatch: int) -> list[SendWork]:
        """Begin to send the gradients of the inputs of a micro-batch."""
        if self.incoming is None:
            return []
        activations, gradients = self.incoming
        found = []
        for one, (grad, value) in zip(activations.sent, self._grads.pop(microbatch), strict=True):
            if one.differentiable:
                found.append(self._wrapped(torch.zeros_like(value) if grad is None else grad, gradients).detach())
        return [gradients.send(found, [False] * len(found))]

    def forward_one_chunk(self, microbatch: int, args: Any, kwargs: Any = None, **_: Any) -> Any:
        """Compute a micro-batch forward.

        Args:
            microbatch: its number.
            args: inputs of the first stage; others take what has arrived.
            kwargs: further arguments of the module.
            **_: what some versions of PyTorch also say.

        Returns:
            The module's outputs.

        Raises:
            InvalidInput: An output is no tensor.
        """
        if self.incoming is not None:
            args = self._received(microbatch)
        outputs = self.submod(*args, **(kwargs or {}))
        many = tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)
        for at, output in enumerate(many):
            if not isinstance(output, torch.Tensor):
                raise InvalidInput(f"stage {self.stage_index}: output {at} is a {type(output).__name__}, not a tensor")
        if self._splits:
            # PyTorch detaches outputs in place once their inputs' gradients are there, which views do not allow.
            many = tuple(output.clone() if output._is_view() else output for output in many)
        self._kept[microbatch] = many, list(args)
        return many if isinstance(outputs, (tuple, list)) else many[0]

    def backward_one_chunk(
        self, microbatch: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Compute a micro-batch backward.

        Args:
            microbatch: its number.
            loss: the loss, on the last stage.
            full_backward: whether to compute gradients of inputs and weights, or of the inputs alone.
            last_backward: whether no micro-batch follows.
        """
        outputs, inputs = self._kept.pop(microbatch)
        grads = None
        if self.outgoing is not None:
            grads = self._output_grads(microbatch, outputs)
        given = loss if self.is_last else outputs
        if full_backward:
            found = _backward.stage_backward(given, grads, inputs)
        elif self.is_first:
            # Nothing wants the gradients of the first stage's inputs, so the other half does everything.
            self._late[microbatch] = lambda: _backward.stage_backward(given, grads, inputs)
            return
        else:
            many: Any = (given,) if isinstance(given, torch.Tensor) else given
            # Older versions of PyTorch find no gradient at all where one of the inputs wants none.
            wanting = [value for value in inputs if value.requires_grad]
            got, groups = _backward.stage_backward_input(many, grads, wanting, self.submod.parameters())
            each = iter(got)
            found = tuple(next(each) if value.requires_grad else None for value in inputs)
            self._late[microbatch] = lambda: _backward.stage_backward_weight(self.submod.parameters(), groups)
            for value in inputs:
                value.grad = None
        self._grads[microbatch] = tuple(zip(found, inputs, strict=True))

    def backward_weight_one_chunk(self, microbatch: int, last_backward: bool = False) -> None:
        """Compute the gradients of the weights for a micro-batch."""
        self._late.pop(microbatch)()

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Divide gradients by the number of micro-batches, and add those of data-parallel ranks up."""
        self.scale_grads(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """As `perform_reduce_grad`; the name that versions without this action call."""
        for parameter in self.submod.parameters():
            grad = parameter.grad
            if grad is None:
                continue
            if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
                # The gradients of all micro-batches were added up on each rank; only their sum goes over the network.
                grad = parameter.grad = grad.redistribute(placements=parameter.placements)
            if grad_scale_factor != 1:
                grad.div_(grad_scale_factor)

    def clear_runtime_states(self) -> None:
        """Forget what an iteration has left behind."""
        for kept in (self._receives, self._kept, self._grads, self._late):
            kept.clear()
        self.output_chunks.clear()

    def _received(self, microbatch: int) -> tuple[Any, ...]:
        assert self.incoming is not None
        found = []
        tensors = self._receives.pop(("F", microbatch)).tensors
        for tensor, one in zip(tensors, self.incoming[0].sent, strict=True):
            mine = local_of(tensor) if self._plain else tensor
            found.append(mine.requires_grad_(one.differentiable))
        return tuple(found)

    def _output_grads(self, microbatch: int, outputs: Sequence[Any]) -> list[Any]:
        """The gradients that have arrived, with None for outputs that have none."""
        tensors = iter(self._receives.pop(("B", microbatch)).tensors)
        found: list[Any] = []
        for output in outputs:
            grad = next(tensors) if output.requires_grad else None
            found.append(grad if grad is None or isinstance(output, DTensor) else local_of(grad))
        return found

    def _wrapped(self, tensor: torch.Tensor, lane: Lane) -> torch.Tensor:
        """A plain tensor of a stage of one device as a DTensor."""
        if isinstance(tensor, DTensor) or not self._plain:
            return tensor
        whole = around(tensor.detach(), lane.src_mesh, [Replicate()] * lane.src_mesh.ndim, tuple(tensor.shape))
        return whole.requires_grad_(tensor.requires_grad)


def gradient_placements(sent: Sequence[SentTensor]) -> list[list[Any]]:
    """The placements in which gradients of outputs are wanted: as the outputs are; whole where a sum was pending."""
    return [[_wanted(text) for text in one.placed.placements] for one in sent if one.differentiable]


def _wanted(text: str) -> Any:
    if text.startswith("P") and text != "P(sum)":
        raise InvalidInput(f"outputs: a pending {text} has no gradient here; choose Shard, Replicate or Partial('sum')")
    return Shard(int(text[2:-1])) if text.startswith("S(") else Replicate()


def placed_here(what: str, tensor: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> DTensor:
    """This rank's part of a tensor that all ranks of a mesh have whole, as a DTensor; nothing is sent.

    Args:
        what: name of the tensor, for errors.
        tensor: the whole tensor.
        mesh: the mesh.
        placements: one placement per mesh axis.

    Returns:
        The DTensor.

    Raises:
        InvalidInput: mesh and placements do not fit the shape.
    """
    import torch.distributed as dist

    found = placed(what, tensor.shape, tensor.dtype, mesh, placements)
    box = tuple(slice(begin, end) for begin, end in found.tile(dist.get_rank()))[: tensor.ndim]
    return around(tensor.detach()[box].contiguous(), mesh, placements, tuple(tensor.shape))
