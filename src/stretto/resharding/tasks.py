# SPDX-License-Identifier: Apache-2.0
"""Unit tasks: the intersections of source and destination tiles, with the devices that hold and that
want each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..errors import InvalidInput
from .spec import Boxes, Layout, check_shape

MAX_PAIRS = 1 << 24
MAX_TASKS = 1 << 18
MAX_DTYPE_BYTES = 64

Box = tuple[tuple[int, int], ...]
"""Begin and end of a region in each tensor dimension."""


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor to be resharded, with its layouts before and after."""

    shape: tuple[int, ...]
    dtype_bytes: int
    src: Layout
    dst: Layout
    name: str = "tensor"

    def __post_init__(self) -> None:
        check_shape(f"{self.name}: shape", self.shape)
        if not 1 <= self.dtype_bytes <= MAX_DTYPE_BYTES:
            raise InvalidInput(f"{self.name}: dtype_bytes must be 1..{MAX_DTYPE_BYTES}, not {self.dtype_bytes}")
        whose = "" if self.name == "tensor" else f"{self.name}: "
        for key, side in (("src", self.src), ("dst", self.dst)):
            if side.spec.ndim != len(self.shape):
                has = f"is for {side.spec.ndim} dimensions, the tensor has {len(self.shape)}"
                raise InvalidInput(f"{whose}{key}: {side.spec}: {has}")
        if self.dst.spec.partial:
            raise InvalidInput(f"{whose}dst: {self.dst.spec}: nothing can be brought into a pending sum")

    @property
    def nbytes(self) -> int:
        """The bytes of one whole copy of the tensor."""
        total = self.dtype_bytes
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, kw_only=True)
class UnitTask:
    """A region of a tensor that the same devices hold and the same devices want.

    Each device of ``holders[p]`` has summand p of the region; there is one set unless a reduction is pending.
    """

    tensor: int
    box: Box
    nbytes: int
    holders: tuple[tuple[int, ...], ...]
    receivers: tuple[int, ...]
    align: int
    reduction: str = ""
    """The kind of the pending reduction; empty if there is none."""

    @cached_property
    def missing(self) -> tuple[int, ...]:
        """The devices that want the region and do not have it yet."""
        if self.reduction:
            return self.receivers
        has = set(self.holders[0])
        return tuple(d for d in self.receivers if d not in has)


def decompose(tensors: Sequence[Tensor]) -> tuple[UnitTask, ...]:
    """All unit tasks, destination tile by destination tile (the order in which Alpa asks for them).

    >>> from .placing import place
    >>> from ..cluster import Cluster
    >>> src, dst = place("(2,4) RS01R", "(2,4) S01RR", Cluster.preset("p3_8xlarge", nodes=4))
    >>> len(decompose([Tensor(shape=(1024, 1024, 512), dtype_bytes=4, src=src, dst=dst)]))
    64
    """
    tasks: list[UnitTask] = []
    for number, tensor in enumerate(tensors):
        tasks += _tasks(number, tensor)
        if len(tasks) > MAX_TASKS:
            raise InvalidInput(f"{tensor.name}: over {MAX_TASKS} unit tasks")
    return tuple(tasks)


def _tasks(number: int, tensor: Tensor) -> list[UnitTask]:
    src, dst = tensor.src, tensor.dst
    have, having = _distinct(src.tiles(tensor.shape))
    want, wanting = _distinct(dst.tiles(tensor.shape))
    if len(have) * len(want) > MAX_PAIRS:
        raise InvalidInput(f"{tensor.name}: {len(have)} x {len(want)} tiles are too many; at most {MAX_PAIRS} pairs")
    parts = src.parts()
    devices = np.array(src.mesh.devices)
    holders = []
    for rows in having:
        alike = [tuple(sorted(devices[rows[parts[rows] == p]].tolist())) for p in np.unique(parts[rows]).tolist()]
        holders.append(tuple(alike))
    targets = np.array(dst.mesh.devices)
    receivers = [tuple(sorted(targets[rows].tolist())) for rows in wanting]
    reduction = src.spec.reduction if src.spec.partial and int(parts.max()) > 0 else ""
    found = []
    for w, box in enumerate(want):
        low = np.maximum(have[:, :, 0], box[:, 0])
        high = np.minimum(have[:, :, 1], box[:, 1])
        sizes = np.prod(np.maximum(high - low, 0), axis=1)
        for h in np.flatnonzero(sizes).tolist():
            found.append(
                UnitTask(
                    tensor=number,
                    box=tuple(zip(low[h].tolist(), high[h].tolist(), strict=True)),
                    nbytes=int(sizes[h]) * tensor.dtype_bytes,
                    holders=holders[h],
                    receivers=receivers[w],
                    align=tensor.dtype_bytes,
                    reduction=reduction,
                )
            )
    return found


def _distinct(boxes: Boxes) -> tuple[Boxes, list[np.ndarray]]:
    """The distinct tiles that are not empty, in the order of their first device, and the rows that have each."""
    rows: dict[bytes, list[int]] = {}
    for row in np.flatnonzero(np.all(boxes[:, :, 1] > boxes[:, :, 0], axis=1)).tolist():
        rows.setdefault(boxes[row].tobytes(), []).append(row)
    groups = [np.array(group) for group in rows.values()]
    return boxes[[int(group[0]) for group in groups]], groups
