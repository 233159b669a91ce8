# SPDX-License-Identifier: Apache-2.0
"""Descriptions of a tensor's mesh and placements that ranks can compare, and conversions between
DTensors and layouts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ...errors import InvalidInput
from .. import Layout, Mesh, Spec
from ..spec import placement_text


class PlacedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor on a mesh of the job's ranks."""

    shape: tuple[int, ...]
    dtype: str
    mesh_shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """The ranks of the mesh in row-major order."""
    placements: tuple[str, ...]
    device: str

    @property
    def plan_shape(self) -> tuple[int, ...]:
        """The shape for plans, in which a tensor without dimensions has shape (1,)."""
        return self.shape or (1,)

    @property
    def empty(self) -> bool:
        """Whether the tensor has no elements."""
        return math.prod(self.shape) == 0

    def layout(self, copies: Sequence[tuple[int, ...]] = (), device: dict[int, int] | None = None) -> Layout:
        """The tensor's layout; on several equal meshes if the ranks of each are given in `copies`.

        `device` maps ranks to device numbers.
        """
        meshes = copies or (self.ranks,)
        ranks = [rank for mesh in meshes for rank in mesh]
        many = len(meshes) > 1
        return Layout(
            mesh=Mesh(
                shape=(len(meshes), *self.mesh_shape) if many else self.mesh_shape,
                devices=tuple(device[r] for r in ranks) if device else tuple(ranks),
            ),
            spec=Spec.from_placements([*(["R"] * many), *self.placements], len(self.plan_shape)),
        )

    def tile(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Begin and end, in each dimension, of the tile of a rank of the mesh."""
        box = self.layout().tiles(self.plan_shape)[self.ranks.index(rank)]
        return tuple((int(begin), int(end)) for begin, end in box)

    def __str__(self) -> str:
        mesh = Mesh(shape=self.mesh_shape, devices=self.ranks)
        return f"{self.shape} {self.dtype} on {mesh} as {','.join(self.placements)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorPart:
    """This rank's part of a tensor that is cut over several ranks, where there is no DTensor of it.

    ::

        part = TensorPart.of(linear.weight, ranks=(4, 5), placements=["S(0)"])     # rows, over ranks 4 and 5
    """

    local: torch.Tensor
    where: PlacedTensor

    @classmethod
    def of(
        cls, local: torch.Tensor, *, ranks: Sequence[int], placements: Sequence[object], mesh_shape: Sequence[int] = (),
        shape: Sequence[int] | None = None,
    ) -> TensorPart:  # fmt: skip
        """The part of a rank, in the layout that all of `ranks` have.

        Args:
            local: the memory of this rank's part.
            ranks: the ranks of the mesh, in row-major order.
            placements: for each axis of the mesh a `Shard` or `Replicate`, or "S(0)", "R".
            mesh_shape: the sizes of the mesh; one axis over all ranks where none is given.
            shape: the sizes of the whole tensor; where none is given, all parts are as large as this one.

        Returns:
            The part.

        Raises:
            InvalidInput: the layout does not fit.
        """
        grid = tuple(mesh_shape) or (len(ranks),)
        if math.prod(grid) != len(ranks) or len(placements) != len(grid):
            raise InvalidInput(f"{len(ranks)} ranks and {len(placements)} placements do not make a mesh {grid}")
        cut = cuts_of(placements, local.ndim)
        whole = list(local.shape)
        for axis, dim in cut.items():
            whole[dim] *= grid[axis]
        where = PlacedTensor(
            shape=tuple(whole if shape is None else shape), dtype=str(local.dtype).removeprefix("torch."),
            mesh_shape=grid, ranks=tuple(int(r) for r in ranks),
            placements=tuple(f"S({cut[axis]})" if axis in cut else "R" for axis in range(len(grid))),
            device=local.device.type,
        )  # fmt: skip
        return cls(local=local, where=where)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the whole tensor."""
        return self.where.shape

    @property
    def dtype(self) -> torch.dtype:
        """The element type."""
        return self.local.dtype

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.where.shape)


AnyTensor = torch.Tensor | TensorPart


def cuts_of(placements: Sequence[object], ndim: int) -> dict[int, int]:
    """The dimension that each axis of a mesh cuts; axes that hold copies are left out."""
    spec = Spec.from_placements(placements, max(1, ndim))
    if spec.partial:
        raise InvalidInput(f"placements: {list(placements)}: only Shard and Replicate can be received")
    return {axis: dim for dim, axes in enumerate(spec.axes) for axis in axes}


def placed(what: str, shape: Sequence[int], dtype: torch.dtype, mesh: Any, placements: Sequence[Any]) -> PlacedTensor:
    """The description of a tensor with this mesh and these placements.

    Args:
        what: name of the tensor, for errors.
        shape: sizes of the whole tensor.
        dtype: element type.
        mesh: the DeviceMesh; its ranks must rise along every axis.
        placements: one DTensor placement per mesh axis.

    Returns:
        The description.

    Raises:
        InvalidInput: an argument has the wrong type, or mesh and placements do not fit the shape.
    """
    for name, given, kind in (("shape", shape, Sequence), ("dtype", dtype, torch.dtype), ("mesh", mesh, DeviceMesh)):
        if not isinstance(given, kind):
            raise InvalidInput(f"{what}: {name} must be a {kind.__name__}, not {type(given).__name__}")
    grid = mesh.mesh.cpu().numpy()
    if not isinstance(placements, Sequence) or len(placements) != grid.ndim:
        raise InvalidInput(f"{what}: placements must be one for each of the mesh's {grid.ndim} axes, not {placements}")
    for axis in range(grid.ndim):
        # PyTorch assigns tiles by the rank within an axis's group, which is sorted, not by the position in the mesh.
        if np.any(np.diff(grid, axis=axis) < 0):
            raise InvalidInput(
                f"{what}: mesh {grid.tolist()} is permuted: ranks must rise along every axis, and do not along {axis}"
            )
    found = PlacedTensor(
        shape=tuple(int(n) for n in shape),
        dtype=str(dtype).removeprefix("torch."),
        mesh_shape=tuple(int(n) for n in grid.shape),
        ranks=tuple(int(r) for r in grid.flatten()),
        placements=tuple(placement_text(p) for p in placements),
        device=mesh.device_type,
    )
    try:
        found.layout().tiles(found.plan_shape if not found.empty else (1,) * max(1, len(found.shape)))
    except InvalidInput as error:
        raise InvalidInput(f"{what}: {error}") from None
    return found


def placed_tensor(what: str, tensor: AnyTensor, rank: int) -> PlacedTensor:
    """The description of a DTensor, of a `TensorPart`, or of a plain tensor, which is whole on its rank.

    Args:
        what: name of the tensor, for errors.
        tensor: the tensor.
        rank: this rank.

    Returns:
        The description.

    Raises:
        InvalidInput: the object is no tensor, or its local part has another shape than its placements give.
    """
    if isinstance(tensor, TensorPart):
        found = tensor.where
    elif isinstance(tensor, DTensor):
        found = placed(what, tensor.shape, tensor.dtype, tensor.device_mesh, tensor.placements)
    elif isinstance(tensor, torch.Tensor):
        found = PlacedTensor(
            shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), mesh_shape=(1,), ranks=(rank,),
            placements=("R",), device=tensor.device.type,
        )  # fmt: skip
    else:
        raise InvalidInput(f"{what}: must be a tensor, not {type(tensor).__name__}")
    if rank in found.ranks and not found.empty:
        want = tuple(end - begin for begin, end in found.tile(rank))
        have = tuple(local_of(tensor).shape) or (1,)
        if want != have and (0 not in want or 0 not in have):
            raise InvalidInput(f"{what}: its local tensor has shape {have}, but {found} makes it {want}")
    return found


def local_of(tensor: AnyTensor) -> torch.Tensor:
    """The local part of a tensor without gradient; the result shares the tensor's memory."""
    if isinstance(tensor, TensorPart):
        return tensor.local.detach()
    with torch.no_grad():
        inside = tensor.detach()
        return inside.to_local() if isinstance(inside, DTensor) else inside


def like(tensor: AnyTensor, local: torch.Tensor) -> torch.Tensor:
    """A tensor of the same kind, mesh and placements with another local part; of a `TensorPart` that part alone."""
    if isinstance(tensor, TensorPart):
        return local
    if not isinstance(tensor, DTensor):
        return local
    return around(local, tensor.device_mesh, tensor.placements, tuple(tensor.shape), tensor.stride())


def around(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> DTensor:  # fmt: skip
    """The DTensor with a given local part.

    Args:
        local: the local part, which the result shares.
        mesh: the mesh.
        placements: one placement per mesh axis.
        shape: sizes of the whole tensor.
        stride: strides of the whole tensor; None means row-major.

    Returns:
        The DTensor, without gradient.
    """
    strides = tuple(stride) if stride is not None else torch.empty(tuple(shape), device="meta").stride()
    meta = TensorMeta(torch.Size(shape), strides, local.dtype)
    # DTensor.from_local would treat a shape without dimensions as not given, so the DTensor is constructed directly.
    made: Any = DTensor
    found: DTensor = made(local, DTensorSpec(mesh, tuple(placements), meta), requires_grad=False)
    return found


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name in `PlacedTensor.dtype`."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InvalidInput(f"dtype: {name!r} is none of PyTorch's")
    return found
