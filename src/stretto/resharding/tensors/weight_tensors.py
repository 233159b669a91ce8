# SPDX-License-Identifier: Apache-2.0
"""The tensors of a model on the ranks of a job, filled with numbers that tell where they belong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ...errors import InvalidInput
from ...weights.models import ModelShapes
from ...weights.parallel import ParallelDegrees
from .. import Layout, Tensor
from .describe import AnyTensor, TensorPart
from .plain import Locals


def placed_model(
    model: ModelShapes, trainer: ParallelDegrees | str, server: ParallelDegrees | str, ranks: int
) -> list[Tensor]:
    """The tensors of a model on the first ranks and on the next ones.

    Args:
        model: the tensors.
        trainer: the trainers' degrees.
        server: the servers' degrees.
        ranks: the number of ranks of the job.

    Returns:
        One tensor for each of the model's.

    Raises:
        InvalidInput: degrees that do not fit, or ranks that there are not.
    """
    sides: list[ParallelDegrees] = []
    free = 0
    for what, given in (("trainer", trainer), ("server", server)):
        side = ParallelDegrees.parse(given) if isinstance(given, str) else given
        devices = side.devices or tuple(range(free, free + side.size))
        free = max(free, max(devices) + 1)
        if max(devices) >= ranks:
            raise InvalidInput(f"{what}: {side} needs ranks up to {max(devices)}; the job has {ranks}")
        sides.append(ParallelDegrees(**{**vars(side), "devices": devices}))
    layouts = [[side.layout(t, side.stage_of(t, model)) for side in sides] for t in model.tensors]
    return [
        Tensor(name=t.name, shape=t.shape, dtype_bytes=2, src=src, dst=dst)
        for t, (src, dst) in zip(model.tensors, layouts, strict=True)
    ]


def part_of(local: torch.Tensor, layout: Layout, shape: Sequence[int]) -> TensorPart:
    """A rank's part of a tensor in a layout.

    The axes of a mesh are put into an order in which a dimension that several of them cut is cut by them in turn.

    Args:
        local: the part's memory.
        layout: the layout, with ranks as devices.
        shape: sizes of the whole tensor.

    Returns:
        The part.
    """
    cut = {axis: dim for dim, axes in enumerate(layout.spec.axes) for axis in axes}
    order = [axis for axes in layout.spec.axes for axis in axes]
    order += [axis for axis in range(len(layout.mesh.shape)) if axis not in cut]
    grid = torch.tensor(layout.mesh.devices).view(layout.mesh.shape).permute(order)
    placements = [f"S({cut[axis]})" if axis in cut else "R" for axis in order]
    return TensorPart.of(
        local, ranks=grid.flatten().tolist(), mesh_shape=tuple(grid.shape), placements=placements, shape=shape
    )


def parts(tensors: Sequence[Tensor], locals_: Sequence[torch.Tensor | None], side: int) -> dict[str, AnyTensor]:
    """What a rank gives to a `WeightSync`.

    Args:
        tensors: the tensors.
        locals_: this rank's part of each; None where it has none.
        side: 0 for sources, 1 for targets.

    Returns:
        The parts by name.
    """
    return {
        t.name: part_of(local, (t.src, t.dst)[side], t.shape)
        for t, local in zip(tensors, locals_, strict=True)
        if local is not None
    }


def tile(tensor: Tensor, side: Layout, rank: int) -> list[tuple[int, int]] | None:
    """Which box of a tensor a rank has; None if none.

    Args:
        tensor: the tensor.
        side: its layout.
        rank: the rank.

    Returns:
        Begin and end in each dimension.
    """
    if rank not in side.mesh.devices:
        return None
    return [(int(a), int(b)) for a, b in side.tiles(tensor.shape)[side.mesh.devices.index(rank)]]


def filled(tensor: Tensor, side: Layout, rank: int, device: str) -> torch.Tensor | None:
    """A rank's part, of numbers that tell where in the whole tensor they belong.

    Args:
        tensor: the tensor.
        side: its layout.
        rank: the rank.
        device: where the part is made.

    Returns:
        The part; None where the rank has none.
    """
    where = tile(tensor, side, rank)
    if where is None:
        return None
    value = torch.zeros((1,) * len(where), dtype=torch.int64, device=device)
    for dim, (begin, end) in enumerate(where):
        steps = torch.arange(begin, end, device=device) * (2 * dim + 1) * 7919
        value = value * 31 + steps.view([-1 if d == dim else 1 for d in range(len(where))])
    # For bf16 only bit patterns of ordinary numbers are drawn.
    return (value % (0x7F00)).to(torch.int16).view(torch.bfloat16).contiguous()


def empty(tensor: Tensor, side: Layout, rank: int, device: str) -> torch.Tensor | None:
    """A rank's part, of zeros.

    Args:
        tensor: the tensor.
        side: its layout.
        rank: the rank.
        device: where the part is made.

    Returns:
        The part; None where the rank has none.
    """
    where = tile(tensor, side, rank)
    return None if where is None else torch.zeros([b - a for a, b in where], dtype=torch.bfloat16, device=device)


def exact(tensors: Sequence[Tensor], held: Locals, rank: int, device: str) -> bool:
    """Whether all ranks have what they should; all of them call this.

    Args:
        tensors: the tensors.
        held: what this rank has of each.
        rank: this rank.
        device: where the parts are.

    Returns:
        The same on all ranks.
    """
    fine = True
    for tensor, mine in zip(tensors, held, strict=True):
        want = filled(tensor, tensor.dst, rank, device)
        if mine is not None and want is not None:
            fine = fine and torch.equal(mine.view(torch.int16), want.view(torch.int16))
        del want
    if device == "cuda":
        torch.cuda.empty_cache()
    word = torch.tensor([float(fine)])
    dist.all_reduce(word, dist.ReduceOp.MIN)
    return bool(word)
