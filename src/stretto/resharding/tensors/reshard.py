# SPDX-License-Identifier: Apache-2.0
"""`stretto.torch.reshard`: moves a DTensor to another mesh."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from ...errors import InvalidInput
from ...process_state import STATE, ProcessPart

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from .describe import PlacedTensor
    from .transfer import Transfer

MAX_PLANS = 64
GPU_STAGING_BYTES = 128 << 20
"""What a rank packs at a time of a tensor that moves on GPU memory."""


class PlannedTransfers(ProcessPart):
    """Group and transfer of each agreed pair of layouts; the most recently used is last."""

    def __init__(self) -> None:
        self.by_layouts: OrderedDict[str, tuple[Any, Transfer]] = OrderedDict()


_TRANSFERS = STATE.part(PlannedTransfers)


class Resharding:
    """A resharding under way; `wait` returns the tensor."""

    def __init__(self, finish: Any, result: DTensor) -> None:
        self._finish, self._result = finish, result

    def wait(self) -> DTensor:
        """Block until this rank has its part; raises the error of a resharding that failed."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return self._result


@overload
def reshard(
    tensor: DTensor | None, mesh: DeviceMesh, placements: Sequence[Any], *, async_op: Literal[False] = False,
    shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, src_mesh: DeviceMesh | None = None,
    src_placements: Sequence[Any] | None = None,
) -> DTensor: ...  # fmt: skip


@overload
def reshard(
    tensor: DTensor | None, mesh: DeviceMesh, placements: Sequence[Any], *, async_op: Literal[True],
    shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, src_mesh: DeviceMesh | None = None,
    src_placements: Sequence[Any] | None = None,
) -> Resharding: ...  # fmt: skip


def reshard(
    tensor: DTensor | None,
    mesh: DeviceMesh,
    placements: Sequence[Any],
    *,
    async_op: bool = False,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    src_mesh: DeviceMesh | None = None,
    src_placements: Sequence[Any] | None = None,
) -> DTensor | Resharding:
    """A DTensor on another mesh, in other placements; values are moved bit for bit, and pending sums are done.

    ::

        on_servers = stretto.torch.reshard(weight, servers, [Shard(1)])

    All ranks of both meshes call it, in the same order; meshes may be disjoint, overlap or be equal. Ranks first
    compare their arguments, so that a difference is an error on all of them. The result has no gradient.

    Args:
        tensor: the DTensor; a rank outside of the source mesh may pass None, with the four last arguments.
        mesh: the destination mesh.
        placements: one `Shard` or `Replicate` per axis of `mesh`.
        async_op: whether to return at once; the source must not change before ``wait()`` of the result has returned.
        shape: sizes of the whole tensor, where `tensor` is None.
        dtype: element type, where `tensor` is None.
        src_mesh: the source mesh, where `tensor` is None.
        src_placements: the source placements, where `tensor` is None.

    Returns:
        The DTensor, with an empty local tensor on ranks outside of `mesh`; with `async_op` an object whose ``wait()``
        returns it.

    Raises:
        InvalidInput: on all ranks, if an argument is wrong or differs between ranks.
        PeerLost: a rank has died or does not come.
    """
    from .carrier import agreement, gpu_state

    agreed = agreement()
    try:
        src, dst = _sides(tensor, mesh, placements, shape, dtype, src_mesh, src_placements)
    except InvalidInput as error:
        ranks = _ranks_of(tensor, mesh, src_mesh)
        if agreed.rank in ranks:
            agreed.gather(ranks, "reshard", "", str(error))
        raise
    ranks = sorted({*src.ranks, *dst.ranks})
    if agreed.rank not in ranks:
        raise InvalidInput(f"reshard: rank {agreed.rank} is in neither mesh; only ranks of the meshes call it")
    label = f"reshard of {src} to {dst}" + (f" with STRETTO_GPU {gpu_state()}" if dst.device == "cuda" else "")
    for rank, text in zip(ranks, agreed.gather(ranks, label, label), strict=True):
        if text != label:
            raise InvalidInput(f"rank {rank}: {text}, but rank {agreed.rank}: {label}")
    transfer = _transfer(src, dst, ranks)
    return _run(transfer, tensor, dst, mesh, placements, async_op)


def _sides(
    tensor: Any, mesh: Any, placements: Any, shape: Any, dtype: Any, src_mesh: Any, src_placements: Any
) -> tuple[PlacedTensor, PlacedTensor]:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from .describe import dtype_of, placed, placed_tensor

    if tensor is not None and not isinstance(tensor, DTensor):
        raise InvalidInput(f"tensor: must be a DTensor, or None with shape=, dtype=, ..., not {type(tensor).__name__}")
    given = {"shape": shape, "dtype": dtype, "src_mesh": src_mesh, "src_placements": src_placements}
    if tensor is None:
        lacking = [name for name, value in given.items() if value is None]
        if lacking:
            raise InvalidInput(f"{', '.join(lacking)}: must be given where there is no tensor")
        src = placed("src", shape, dtype, src_mesh, src_placements)
        if dist.get_rank() in src.ranks:
            raise InvalidInput(f"tensor: rank {dist.get_rank()} is in the source mesh and must give its DTensor")
    else:
        src = placed_tensor("tensor", tensor, dist.get_rank())
        said = placed(
            "src",
            tensor.shape if shape is None else shape,
            tensor.dtype if dtype is None else dtype,
            tensor.device_mesh if src_mesh is None else src_mesh,
            tensor.placements if src_placements is None else src_placements,
        )
        if said != src:
            raise InvalidInput(f"tensor: is {src}, but the arguments say {said}")
    dst = placed("mesh", src.shape, dtype_of(src.dtype), mesh, placements)
    if any(p.startswith("P") for p in dst.placements):
        raise InvalidInput("placements: nothing can be brought into a pending sum; choose Shard or Replicate")
    if src.device != dst.device:
        raise InvalidInput(f"mesh: is of {dst.device} devices, the tensor's of {src.device}")
    return src, dst


def _ranks_of(tensor: Any, mesh: Any, src_mesh: Any) -> list[int]:
    """The ranks that would take part, as far as the arguments say."""
    meshes = [mesh, src_mesh if src_mesh is not None else getattr(tensor, "device_mesh", None)]
    grids = [m.mesh.flatten().tolist() for m in meshes if m is not None and hasattr(m, "mesh")]
    return sorted({int(rank) for grid in grids for rank in grid})


def _transfer(src: PlacedTensor, dst: PlacedTensor, ranks: Sequence[int]) -> Transfer:
    from .carrier import ReshardGroup
    from .transfer import Move, Transfer

    carrier = ReshardGroup.shared(ranks)
    gpu = carrier.gpu() if dst.device == "cuda" else None
    key = f"{src} to {dst}"
    known = _TRANSFERS.by_layouts
    held = known.get(key)
    if held is None or held[0] is not carrier:
        while len(known) >= MAX_PLANS:
            known.popitem(last=False)
        known[key] = (
            carrier,
            Transfer(
                carrier,
                [Move(name="tensor", src=src, dst=dst)],
                gpu=gpu,
                staging_bytes=GPU_STAGING_BYTES if gpu else None,
            ),
        )
    known.move_to_end(key)
    return known[key][1]


def _run(
    transfer: Transfer,
    tensor: DTensor | None,
    dst: PlacedTensor,
    mesh: DeviceMesh,
    placements: Sequence[Any],
    later: bool,
) -> DTensor | Resharding:
    import torch

    from .describe import around, dtype_of, local_of

    me = transfer.carrier.rank
    here = me in dst.ranks
    size = [end - begin for begin, end in dst.tile(me)][: len(dst.shape)] if here and not dst.empty else [0]
    device = local_of(tensor).device if tensor is not None else torch.device(mesh.device_type)
    local = torch.empty(size, dtype=dtype_of(dst.dtype), device=device)
    if here and dst.empty:
        local = local.view(dst.shape)
    holds = me in transfer.moves[0].src.ranks and not dst.empty
    source = local_of(tensor) if holds and tensor is not None else None
    sources, targets = [source], [local if here and local.numel() else None]
    transfer.record_streams(sources, targets)
    transfer.copy_here(sources, targets)
    # On GPU memory a tensor may take several rounds, all of which are queued at once; else there is one.
    finishes = [transfer.start(at, sources, targets) for at in range(len(transfer.rounds))]
    result = around(local, mesh, placements, dst.shape)
    work = Resharding(lambda: [finish(lambda: None) for finish in finishes], result)
    return work if later else work.wait()
