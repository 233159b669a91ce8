# SPDX-License-Identifier: Apache-2.0
"""Where the elements of a tensor are: device meshes, sharding specs, and the tile of each device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput, unknown

REDUCTIONS = ("sum", "avg", "product", "min", "max")
ROUNDINGS = ("chunk", "balanced")
MAX_DEVICES = 1 << 16
MAX_DIMS = 16

Boxes = NDArray[np.int64]
"""Begin and end of each device's tile in each tensor dimension, as an array of shape (devices, dims, 2)."""


def placement_text(placement: object) -> str:
    """The text of a DTensor placement, with the reduction of a pending one, which PyTorch 2.8 leaves out.

    Subclasses of ``Partial`` reduce in ways of their own: their text is their name, which no spec takes.

    >>> placement_text("S(1)")
    'S(1)'
    """
    reduction = getattr(placement, "reduce_op", None)
    if reduction is None:
        return str(placement)
    name = type(placement).__name__
    return f"P({reduction})" if name == "Partial" else name


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Devices in a grid: ``devices`` in row-major order of `shape`.

    >>> Mesh(shape=(2, 2), devices=(0, 1, 4, 5)).size
    4
    """

    shape: tuple[int, ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        check_shape("mesh", self.shape)
        if self.size != len(self.devices):
            raise InvalidInput(f"mesh {_tuple(self.shape)}: needs {self.size} devices, not {len(self.devices)}")
        if min(self.devices) < 0 or len(set(self.devices)) != self.size:
            raise InvalidInput(f"mesh {_tuple(self.shape)}: devices must be distinct and >= 0")

    @property
    def size(self) -> int:
        """The number of devices in the mesh."""
        return int(np.prod(self.shape))

    def __str__(self) -> str:
        return f"{_tuple(self.shape)}@{','.join(_runs(self.devices))}"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """How a tensor is divided over a mesh: for each tensor dimension the mesh axes that cut it, outermost first.

    Mesh axes that are not named hold copies; the axes of `partial` hold summands of a pending reduction (`reduction`).
    Specs are written as in the literature: ``S0RR`` (dimension 0 over axis 0), ``RS01R`` (dimension 1 over axes 0 and
    1), ``S0RP1`` (and a sum over axis 1 is pending).

    >>> Spec.parse("RS01R").axes, str(Spec.parse("S0RP1"))
    (((), (0, 1), ()), 'S0RP1')
    """

    axes: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...] = ()
    reduction: str = "sum"

    def __post_init__(self) -> None:
        used = [axis for axes in (*self.axes, self.partial) for axis in axes]
        if len(set(used)) != len(used):
            raise InvalidInput(f"spec {self}: names a mesh axis twice")
        if self.reduction not in REDUCTIONS:
            raise unknown("reduction", self.reduction, REDUCTIONS)

    @classmethod
    def parse(cls, text: str) -> Spec:
        """Read a spec from text such as ``S0RR``."""
        word = text.strip().upper().replace("^", "")
        match = re.fullmatch(r"((?:S[0-9]{1,8}|R){0,16})((?:P[0-9]{1,8})?)", word)
        if match is None or not word:
            raise InvalidInput(
                f"spec {text[:80]!r}: expected one of S<mesh axes> or R for each tensor dimension, and P<mesh axes> at "
                "the end where a sum is pending, such as S0RR, RS01R or S0RP1"
            )
        dims = re.findall(r"S[0-9]+|R", match[1])
        return cls(
            axes=tuple(tuple(int(axis) for axis in dim[1:]) for dim in dims),
            partial=tuple(int(axis) for axis in match[2][1:]),
        )

    @classmethod
    def from_placements(cls, placements: Sequence[object], ndim: int) -> Spec:
        """The spec of DTensor placements, one per mesh axis, as objects or as text in the same form.

        >>> str(Spec.from_placements(["Shard(0)", "Replicate()"], 3)), str(Spec.from_placements(["S(1)", "S(1)"], 2))
        ('S0RR', 'RS01')
        """
        axes: list[list[int]] = [[] for _ in range(ndim)]
        partial: list[int] = []
        reductions: set[str] = set()
        for axis, placement in enumerate(placements):
            word = placement_text(placement).replace(" ", "")
            shard = re.fullmatch(r"(?:Shard|S)\((?:dim=)?(-?[0-9]{1,3})\)", word)
            pending = re.fullmatch(r"(?:Partial|P)(?:\((?:reduce_op=)?'?(\w*)'?\))?", word)
            if shard:
                dim = int(shard[1])
                if not -ndim <= dim < ndim:
                    raise InvalidInput(f"placements[{axis}]: {word} of a tensor with {ndim} dimensions")
                axes[dim].append(axis)
            elif pending:
                partial.append(axis)
                reductions.add(pending[1] or "sum")
            elif word not in ("Replicate()", "Replicate", "R"):
                choices = ("Shard(dim)", "Replicate()", "Partial(op)")
                raise InvalidInput(f"placements[{axis}]: {unknown('placement', word[:80], choices)}")
        if len(reductions) > 1:
            raise InvalidInput(f"placements: two pending reductions at once: {', '.join(sorted(reductions))}")
        return cls(
            axes=tuple(tuple(dim) for dim in axes),
            partial=tuple(partial),
            reduction=reductions.pop() if reductions else "sum",
        )

    @property
    def ndim(self) -> int:
        """The number of dimensions of the tensor."""
        return len(self.axes)

    def __str__(self) -> str:
        dims = "".join(f"S{''.join(map(str, axes))}" if axes else "R" for axes in self.axes)
        return dims + (f"P{''.join(map(str, self.partial))}" if self.partial else "")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A spec on a mesh. `rounding` says how sizes that do not divide are cut.

    ``chunk``: as `torch.chunk` and DTensor do: all tiles have the rounded-up size, the last ones less or nothing
    (systems that pad tiles to equal sizes hold the same elements; padding is never moved). ``balanced``: sizes differ
    by at most 1.

    >>> layout = Layout(mesh=Mesh(shape=(2, 1), devices=(0, 1)), spec=Spec.parse("S0R"))
    >>> layout.tiles((5, 2)).tolist()
    [[[0, 3], [0, 2]], [[3, 5], [0, 2]]]
    """

    mesh: Mesh
    spec: Spec
    rounding: str = "chunk"

    def __post_init__(self) -> None:
        if self.rounding not in ROUNDINGS:
            raise unknown("rounding", self.rounding, ROUNDINGS)
        for axis in (axis for axes in (*self.spec.axes, self.spec.partial) for axis in axes):
            if axis >= len(self.mesh.shape):
                has = f"{_tuple(self.mesh.shape)} has axes 0..{len(self.mesh.shape) - 1}"
                raise InvalidInput(f"spec {self.spec}: mesh axis {axis} does not exist; mesh {has}")

    def tiles(self, shape: Sequence[int]) -> Boxes:
        """The tile of each device, in the mesh's order; a tile that begins where it ends is empty."""
        check_shape("shape", shape)
        if len(shape) != self.spec.ndim:
            raise InvalidInput(f"spec {self.spec}: is for {self.spec.ndim} dimensions, the tensor has {len(shape)}")
        where = np.indices(self.mesh.shape).reshape(len(self.mesh.shape), -1)
        boxes = np.zeros((self.mesh.size, len(shape), 2), np.int64)
        boxes[:, :, 1] = np.asarray(shape, np.int64)
        for dim, axes in enumerate(self.spec.axes):
            begin, end = boxes[:, dim, 0].copy(), boxes[:, dim, 1].copy()
            for axis in axes:
                size, at, ways = end - begin, where[axis], self.mesh.shape[axis]
                if self.rounding == "chunk":
                    low, high = (np.minimum(-(-size // ways) * k, size) for k in (at, at + 1))
                else:
                    low, high = (k * (size // ways) + np.minimum(k, size % ways) for k in (at, at + 1))
                begin, end = begin + low, begin + high
            boxes[:, dim, 0], boxes[:, dim, 1] = begin, end
        return boxes

    def parts(self) -> NDArray[np.int64]:
        """The number of the summand that each device holds; all 0 if no reduction is pending."""
        where = np.indices(self.mesh.shape).reshape(len(self.mesh.shape), -1)
        number = np.zeros(self.mesh.size, np.int64)
        for axis in self.spec.partial:
            number = number * self.mesh.shape[axis] + where[axis]
        return number

    def __str__(self) -> str:
        return f"{self.mesh} {self.spec}"


def check_shape(what: str, shape: Sequence[int]) -> None:
    """Raise `InvalidInput` unless the sizes are 1..16 numbers >= 1 whose product is not too large."""
    if not 1 <= len(shape) <= MAX_DIMS or any(int(size) < 1 for size in shape):
        raise InvalidInput(f"{what} {_tuple(shape[: MAX_DIMS + 1])}: must be 1..{MAX_DIMS} sizes >= 1")
    total = 1
    for size in shape:
        total *= int(size)
    most = MAX_DEVICES if what == "mesh" else 1 << 48
    if total > most:
        raise InvalidInput(f"{what} {_tuple(shape)}: {total} is too many; at most {most}")


def _tuple(shape: Sequence[int]) -> str:
    return f"({','.join(str(size) for size in shape)})"


def _runs(numbers: Sequence[int]) -> list[str]:
    """Numbers as text, with ``0-3`` for 0, 1, 2, 3."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(a) if a == b else f"{a}-{b}" for a, b in runs]
