# SPDX-License-Identifier: Apache-2.0
"""Calls as they come in, and the memory that a program needs for them: flat, contiguous, in its own layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidInput
from ...programs.lowered import NOP, READS_SRC, SCRATCH, WRITES_DST, Lowered
from ...programs.streams import InstructionStreams
from ..executor.executor import LoadedProgram
from ..executor.load import contents
from .recording import Choice
from .selection import ProgramPick
from .work import Tensors

CPU = torch.device("cpu")
IN_PLACE = ("all_reduce", "broadcast", "reduce", "all_gather")
"""An all-gather's own shard has to get into the output anyway; FSDP's is there already."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """How the first dimension of an all-to-all's tensors is shared out; equally where a side says nothing."""

    output: tuple[int, ...] = ()
    input: tuple[int, ...] = ()
    listed: bool = False
    """Whether each side is a list of tensors, one for each rank."""


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective as it was asked for; a list of tensors is one tensor in pieces."""

    op: str
    inputs: Tensors
    outputs: Tensors
    nbytes: int
    device: torch.device
    reduce: str = ""
    root: int = 0
    splits: Splits | None = None
    """The sizes of the pieces of an all-to-all, where they may differ; None where all are equal."""

    @classmethod
    def of(
        cls, op: str, inputs: Tensors, *, outputs: Tensors | None = None, reduce: Any = None, root: int = 0,
        splits: Splits | None = None,
    ) -> CollectiveCall:  # fmt: skip
        """Without `outputs` the inputs are overwritten.

        Args:
            op: The collective.
            inputs: Its input tensors.
            outputs: Its output tensors.
            reduce: PyTorch's reduction.
            root: The root's position in the group.
            splits: Sizes that differ between ranks.

        Returns:
            The call.
        """
        targets = inputs if outputs is None else outputs
        first = next(iter([*inputs, *targets]), None)
        return cls(
            op=op, inputs=inputs, outputs=targets, nbytes=max(_nbytes(inputs), _nbytes(targets)),
            device=CPU if first is None else first.device, reduce=reduce_name(reduce), root=root, splits=splits,
        )  # fmt: skip

    @property
    def tensor(self) -> torch.Tensor:
        """A tensor that every rank has, of the same size on all."""
        return self.outputs[0] if self.op in ("scatter", "reduce_scatter") else self.inputs[0]

    @classmethod
    def barrier(cls, device: torch.device) -> CollectiveCall:
        """A call that moves nothing."""
        return cls(op="barrier", inputs=[], outputs=[], nbytes=0, device=device)

    def with_splits(self) -> CollectiveCall:
        """An all-to-all of equal pieces as one whose pieces may differ: other ranks may have given splits."""
        return self if self.splits is not None else replace(self, splits=Splits())

    def joined(self, calls: list[CollectiveCall]) -> CollectiveCall:
        """Several calls as one, for `_coalescing_manager`."""
        return replace(self, nbytes=sum(call.nbytes for call in calls))

    def choice(self, group: str, *, backend: str, why: str, nbytes: int, pick: ProgramPick | None = None) -> Choice:
        """What was decided about it, for the ledger.

        Args:
            group: The name of the group.
            backend: Who runs the call.
            why: The reason.
            nbytes: The size.
            pick: The program, where one of ours runs it.

        Returns:
            The entry.
        """
        first = next(iter([*self.inputs, *self.outputs]), None)
        return Choice(
            op=self.op,
            group=group,
            nbytes=nbytes,
            dtype="" if first is None else str(first.dtype).removeprefix("torch."),
            reduce=self.reduce,
            backend=backend,
            program="" if pick is None else pick.program.name,
            why=why,
            rejected=() if pick is None else pick.rejected,
        )


REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
    dist.ReduceOp.PREMUL_SUM: "premul_sum",
}


def reduce_name(op: Any) -> str:
    """The reduction in words; empty for none."""
    return "" if op is None else REDUCTIONS.get(getattr(op, "op", op), str(op))


def _nbytes(tensors: Tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """What a program reads and writes. `count` elements of type `dtype` are in the larger one."""

    source: torch.Tensor | None
    target: torch.Tensor | None
    count: int
    dtype: str
    nbytes: int
    in_place: bool
    finish: Callable[[], object] | None = None
    """Puts the result where the caller wants it."""
    gives: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    """The bytes that go to (`gives`) and come from (`takes`) each rank of an all-to-all with splits."""

    def addresses(self, handle: LoadedProgram) -> tuple[int, int]:
        """The addresses of input and output."""
        output = 0 if self.target is None else self.target.data_ptr()
        if self.in_place:
            shift = handle.place_elements(self.count)
            size = self.nbytes // self.count if self.count else 1
            return output + shift * size, output
        return 0 if self.source is None else self.source.data_ptr(), output

    def pieces(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The (address, bytes) of what goes to, and comes from, each rank in an all-to-all with splits."""
        found = []
        for tensor, sizes in ((self.source, self.gives), (self.target, self.takes)):
            assert tensor is not None
            ends = accumulate(sizes, initial=tensor.data_ptr())
            found.append(list(zip(ends, sizes, strict=False)))
        return found[0], found[1]

    def padded(self, chunks: int) -> Buffers:
        """For a program that needs equal chunks: the same at the begin of something longer."""
        assert self.in_place and self.target is not None
        target, count = self.target, -(-self.count // chunks) * chunks
        longer = target.new_zeros(count)
        longer[: self.count] = target

        def finish() -> None:
            target.copy_(longer[: target.numel()])
            if self.finish is not None:
                self.finish()

        return replace(self, target=longer, count=count, nbytes=count * longer.element_size(), finish=finish)


def lay_out(call: CollectiveCall, kind: str, rank: int, size: int) -> Buffers | None:
    """The buffers of a call; None where its tensors do not fit together.

    Args:
        call: The call.
        kind: The collective that it is run as.
        rank: This rank's position in the group.
        size: The number of ranks.

    Returns:
        The buffers, or None.
    """
    if call.op == "barrier":
        # A barrier moves no data: inside a host it is over as soon as all ranks have announced it.
        return Buffers(source=None, target=None, count=0, dtype="int32", nbytes=4, in_place=True)
    if call.splits is not None:
        return _split(call, call.splits, rank, size)
    makers = {"all_gather": _all_gather, "gather": _gather, "scatter": _scatter}
    if kind in makers:
        return makers[kind](call, rank, size)
    if kind in IN_PLACE:
        return _in_place(call)
    return _out_of_place(call, size)


def _in_place(call: CollectiveCall) -> Buffers | None:
    if len(call.inputs) != 1:
        return None
    (tensor,) = call.inputs
    flat = memory_of(tensor)
    back = None if flat.data_ptr() == tensor.data_ptr() else copier(flat, [tensor])
    if not call.reduce:
        flat = _bytes(flat)
    return _buffers(flat, flat, in_place=True, finish=back)


def _all_gather(call: CollectiveCall, rank: int, size: int) -> Buffers | None:
    if len(call.inputs) != 1:
        return None
    (mine,) = call.inputs
    if not pieces_fit(call.outputs, mine, size):
        return None
    flat, back = gathered(call.outputs)
    slot = flat.view(size, -1)[rank]
    if slot.data_ptr() != mine.data_ptr() or not mine.is_contiguous():
        slot.copy_(mine.detach().reshape(-1))
    flat = _bytes(flat)
    return _buffers(flat, flat, in_place=True, finish=back)


def _gather(call: CollectiveCall, rank: int, size: int) -> Buffers | None:
    (mine,) = call.inputs
    if rank == call.root and not pieces_fit(call.outputs, mine, size):
        return None
    source = _bytes(joined([mine]))
    if rank != call.root:
        return replace(_buffers(source, None), count=source.numel() * size, nbytes=source.numel() * size)
    flat, back = gathered(call.outputs)
    return _buffers(source, _bytes(flat), finish=back)


def _scatter(call: CollectiveCall, rank: int, size: int) -> Buffers | None:
    (mine,) = call.outputs
    if rank == call.root and not pieces_fit(call.inputs, mine, size):
        return None
    flat, back = gathered(call.outputs)
    target = _bytes(flat)
    if rank != call.root:
        return replace(_buffers(None, target, finish=back), count=target.numel() * size, nbytes=target.numel() * size)
    return _buffers(_bytes(joined(call.inputs)), target, finish=back)


def _out_of_place(call: CollectiveCall, size: int) -> Buffers | None:
    """Reduce-scatter and all-to-all."""
    given, taken = (sum(tensor.numel() for tensor in side) for side in (call.inputs, call.outputs))
    if given != (taken * size if call.op == "reduce_scatter" else taken) or given % size:
        return None
    if call.inputs[0].dtype != call.outputs[0].dtype:
        return None
    if len(call.inputs) > 1 and not pieces_fit(call.inputs, call.outputs[0], size):
        return None
    if call.op == "all_to_all":
        source, flat = memory_of(call.inputs[0]), memory_of(call.outputs[0])
        back = None if flat.data_ptr() == call.outputs[0].data_ptr() else copier(flat, call.outputs)
    else:
        source = joined(call.inputs)
        flat, back = gathered(call.outputs)
    source = _apart(source, flat)
    if not call.reduce:
        source, flat = _bytes(source), _bytes(flat)
    return _buffers(source, flat, finish=back)


def _split(call: CollectiveCall, splits: Splits, rank: int, size: int) -> Buffers | None:
    """An all-to-all whose pieces may differ; only this rank's own sizes are known."""
    sides = (call.inputs, splits.input), (call.outputs, splits.output)
    gives, takes = (
        _tensor_bytes(tensors, size) if splits.listed else _piece_bytes(tensors, split, size)
        for tensors, split in sides
    )
    if gives is None or takes is None or gives[rank] != takes[rank]:
        return None
    if len({tensor.dtype for tensor in (*call.inputs, *call.outputs)}) > 1:
        return None
    if not splits.listed:
        source, flat = memory_of(call.inputs[0]), memory_of(call.outputs[0])
        back = None if flat.data_ptr() == call.outputs[0].data_ptr() else copier(flat, call.outputs)
    else:
        source = joined(call.inputs)
        flat, back = gathered(call.outputs)
    source, flat = _bytes(_apart(source, flat)), _bytes(flat)
    return replace(_buffers(source, flat, finish=back), gives=gives, takes=takes)


def _piece_bytes(tensors: Tensors, split: Sequence[int], size: int) -> tuple[int, ...] | None:
    """The bytes of each piece of one tensor; None where the pieces do not fit it."""
    (tensor,) = tensors
    if not tensor.dim():
        return None
    rows = tensor.shape[0]
    row = _nbytes(tensors) // rows if rows else 0
    if split:
        if any(one < 0 for one in split):
            raise InvalidInput(f"split sizes: must be >= 0, not {list(split)}")
        return tuple(one * row for one in split) if len(split) == size and sum(split) == rows else None
    return (rows // size * row,) * size if rows % size == 0 else None


def _tensor_bytes(tensors: Tensors, size: int) -> tuple[int, ...] | None:
    """The bytes of each tensor of a list; None where there is not one for each rank."""
    return tuple(_nbytes([tensor]) for tensor in tensors) if len(tensors) == size else None


def _apart(source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The source, or a copy of it where it shares memory with the target."""
    begin, end = source.data_ptr(), source.data_ptr() + _nbytes([source])
    overlaps = begin < target.data_ptr() + _nbytes([target]) and target.data_ptr() < end
    return source.clone() if overlaps else source


def _buffers(
    source: torch.Tensor | None, target: torch.Tensor | None, *, in_place: bool = False,
    finish: Callable[[], object] | None = None,
) -> Buffers:  # fmt: skip
    larger = max((t for t in (source, target) if t is not None), key=lambda t: t.numel())
    return Buffers(
        source=source,
        target=target,
        count=larger.numel(),
        dtype=str(larger.dtype).removeprefix("torch."),
        nbytes=larger.numel() * larger.element_size(),
        in_place=in_place,
        finish=finish,
    )


def _bytes(flat: torch.Tensor) -> torch.Tensor:
    """Only moved, never added to: the type does not matter."""
    return flat.view(torch.uint8)


def pieces_fit(pieces: Tensors, like: torch.Tensor, size: int) -> bool:
    """Whether these are `size` pieces, or one tensor, for shards like this one.

    Args:
        pieces: The tensors.
        like: One shard.
        size: The number of ranks.

    Returns:
        True where they fit.
    """
    if any(piece.dtype != like.dtype for piece in pieces):
        return False
    if len(pieces) == 1:
        return pieces[0].numel() == like.numel() * size
    return len(pieces) == size and all(piece.numel() == like.numel() for piece in pieces)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the order of memory where they fill it, whatever the strides: as gloo takes them; else a copy."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.detach().as_strided((tensor.numel(),), (1,))
    return tensor.detach().contiguous().view(-1)


def joined(pieces: Tensors) -> torch.Tensor:
    """The elements of all pieces, one behind the other: a copy unless there is one contiguous piece."""
    if len(pieces) == 1:
        return pieces[0].detach().contiguous().view(-1)
    return torch.cat([piece.detach().reshape(-1) for piece in pieces])


def gathered(pieces: Tensors) -> tuple[torch.Tensor, Callable[[], object] | None]:
    """Flat memory for all pieces, and how to get from there to them."""
    if len(pieces) == 1 and pieces[0].is_contiguous():
        return pieces[0].detach().view(-1), None
    flat = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    return flat, copier(flat, pieces)


def copier(flat: torch.Tensor, pieces: Tensors) -> Callable[[], object]:
    """Copies flat memory out to pieces, when it is called."""

    def back() -> None:
        at = 0
        for piece in pieces:
            piece.detach().copy_(flat[at : at + piece.numel()].view(piece.shape))
            at += piece.numel()

    return back


def is_rigid(lowered: Lowered) -> bool:
    """Whether some chunk is kept where another one belongs, so that all must be of one size."""
    c = lowered.collective
    streams = InstructionStreams.of(lowered)
    inside = contents(lowered, streams)
    natural = [[c.inputs(rank), c.outputs(rank)] for rank in range(c.num_ranks)]
    for k in range(lowered.num_instructions):
        op = int(lowered.op[k])
        if op == NOP:
            continue
        for used, buffer, offset in (
            (READS_SRC[op], int(lowered.src_buf[k]), int(lowered.src_off[k])),
            (WRITES_DST[op], int(lowered.dst_buf[k]), int(lowered.dst_off[k])),
        ):
            if not used or buffer == SCRATCH:
                continue
            places = natural[int(streams.rank[k])][buffer]
            for i, chunk in enumerate(inside.chunks[k]):
                if offset + i < len(places) and int(places[offset + i]) != chunk:
                    return True
    return False
