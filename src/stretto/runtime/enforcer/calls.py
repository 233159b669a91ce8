# SPDX-License-Identifier: Apache-2.0
"""A motif as a call of a library that has algorithms of its own: gloo's and NCCL's communicators take the same ones."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from ...planner.algebra.motif import ROOTED, SHARDED, Motif
from ...planner.algebra.spans import measure
from ..torch_backend.buffers import REDUCTIONS
from .memory import StagedBuffers, View

OPERATIONS: dict[str, Any] = {name: op for op, name in REDUCTIONS.items()}


def run(
    group: Any, leaf: Motif, me: int, staged: StagedBuffers, op: str, *, nothing: torch.Tensor, in_place: bool
) -> None:
    """One motif, waited for as the library waits: gloo blocks the thread, NCCL the current stream.

    `nothing` is a tensor of no elements on the right device. With `in_place` the library scatters a sum into the
    memory that it reads, and leaves the rest of that as it is.

    Args:
        group: The communicator of gloo or NCCL.
        leaf: The motif.
        me: This rank's position in it.
        staged: Where it reads and writes.
        op: The reduction.
        nothing: A tensor of no elements on the right device.
        in_place: Whether a sum may be scattered into the memory that is read.
    """
    like = next((view[0] for view in (staged.source, staged.target) if view is not None), nothing)
    source, target = _tensor(staged.source, like), _tensor(staged.target, like)
    if leaf.kind in ("AR", "BC", "RE"):
        # The library works in one buffer; a plan may bring a program whose result lies elsewhere than what it reads.
        if target.numel() and source.numel() and target.data_ptr() != source.data_ptr():
            target.copy_(source)
        _whole(group, leaf, target if target.numel() else source, op)
    elif leaf.kind == "RS":
        _reduce_scatter(group, leaf, me, source, target, op, in_place=in_place)
    elif leaf.kind == "AG" and len({measure(shard) for shard in leaf.shards}) == 1:
        _wait(group._allgather_base(target, source, _here(c10d.AllgatherOptions())))
    else:
        # Gathers and scatters of any shape are exchanges: the libraries' own want equal pieces.
        exchange = staged.layout.binding.exchange
        gives, takes = pieces(leaf, me) if exchange is None else exchange.splits
        given = source.repeat(len(leaf.ranks)) if leaf.kind == "AG" else source
        _wait(group.alltoall_base(target, given, takes, gives, _here(c10d.AllToAllOptions())))


def _whole(group: Any, leaf: Motif, buffer: torch.Tensor, op: str) -> None:
    options: Any
    if leaf.kind == "BC":
        options = _here(c10d.BroadcastOptions())
        options.rootRank = leaf.ranks.index(leaf.root)
        _wait(group.broadcast([buffer], options))
        return
    options = _here(c10d.AllreduceOptions() if leaf.kind == "AR" else c10d.ReduceOptions())
    options.reduceOp = OPERATIONS[op]
    if leaf.kind == "RE":
        options.rootRank = leaf.ranks.index(leaf.root)
    _wait((group.allreduce if leaf.kind == "AR" else group.reduce)([buffer], options))


def _reduce_scatter(
    group: Any, leaf: Motif, me: int, source: torch.Tensor, target: torch.Tensor, op: str, *, in_place: bool
) -> None:
    """Equal shards by the library's own; others as an all-reduce, of which each rank keeps its part."""
    sizes = [measure(shard) for shard in leaf.shards]
    if len(set(sizes)) == 1:
        options: Any = _here(c10d.ReduceScatterOptions())
        options.reduceOp = OPERATIONS[op]
        received = target if in_place else torch.empty_like(target)
        _wait(group._reduce_scatter_base(received, source if in_place else source.clone(), options))
        if not in_place:
            target.copy_(received)
        return
    given = source.clone()
    reducing: Any = _here(c10d.AllreduceOptions())
    reducing.reduceOp = OPERATIONS[op]
    _wait(group.allreduce([given], reducing))
    begin = sum(sizes[:me])
    target.copy_(given[begin : begin + sizes[me]])


def _wait(work: Any) -> None:
    """NCCL gives nothing to wait for where the caller's stream runs the call."""
    if work is not None:
        work.wait()


def _here(options: Any) -> Any:
    """On the stream of the caller, not on one of the library's."""
    options.asyncOp = False
    return options


def pieces(leaf: Motif, me: int) -> tuple[list[int], list[int]]:
    """How many elements go to, and come from, each rank."""
    n = len(leaf.ranks)
    if leaf.kind in SHARDED:
        sizes = [measure(shard) for shard in leaf.shards]
        if leaf.kind == "AG":
            return [sizes[me]] * n, sizes
        root = leaf.ranks.index(leaf.root) if leaf.kind in ROOTED else 0
        at_root = sizes if me == root else [0] * n
        mine = [sizes[me] if at == root else 0 for at in range(n)]
        return (mine, at_root) if leaf.kind == "GA" else (at_root, mine)
    first, last = leaf.window
    held, bound = [len(one) for one in leaf.held], [len(one) for one in leaf.bound]
    sends = [held[me] * bound[q] * leaf.size if (q - me - first) % n < last - first else 0 for q in range(n)]
    hears = [held[p] * bound[me] * leaf.size if (me - p - first) % n < last - first else 0 for p in range(n)]
    return sends, hears


def _tensor(view: View | None, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty(0) if view is None else view[0][view[1] : view[2]]
