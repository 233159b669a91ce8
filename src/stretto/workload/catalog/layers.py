# SPDX-License-Identifier: Apache-2.0
"""Layers: variables that are computed together, with the arithmetic and the memory traffic of one sample."""

from __future__ import annotations

import math
from dataclasses import dataclass

NORM_PASSES = 4
"""Reads and writes of an activation beside those of the product: normalization and non-linearity."""


@dataclass(frozen=True)
class Scale:
    """A factor on the widths of a model."""

    factor: float = 1.0

    def __call__(self, width: int) -> int:
        """The scaled width, at least 2."""
        return max(2, round(width * self.factor))


@dataclass(frozen=True, kw_only=True)
class VariableLayer:
    """Variables in the order of use, the forward cost of one sample, and (for embeddings) the
    rows touched per sample.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    """Names and shapes of the variables."""
    flops: float
    """Operations of one sample's forward pass."""
    moved: float
    """Elements that one sample's forward pass reads and writes beside the parameters."""
    rows: float = 0.0
    extra_rows: int = 0
    sparse: bool = False
    linear_rows: float = 0.0

    @property
    def params(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for _, shape in self.shapes)


def conv(
    name: str, inputs: int, outputs: int, size: int | tuple[int, int], side: int, *, stride: int = 1,
    norm: bool = True, groups: int = 1,
) -> VariableLayer:  # fmt: skip
    """A convolution with its normalization, or with a bias.

    Args:
        name: prefix of the variables' names.
        inputs: input channels.
        outputs: output channels.
        size: size of the kernel, or (height, width).
        side: width and height of the output.
        stride: stride of the kernel; the input is ``side * stride`` wide and high.
        norm: whether the layer has a normalization instead of a bias.
        groups: groups of channels, which must divide `inputs`.

    Returns:
        The layer.
    """
    high, wide = (size, size) if isinstance(size, int) else size
    weight = (f"{name}.weight", (outputs, inputs // groups, high, wide))
    rest = ((f"{name}.norm.weight", (outputs,)), (f"{name}.norm.bias", (outputs,)))
    return VariableLayer(
        shapes=(weight, *(rest if norm else ((f"{name}.bias", (outputs,)),))),
        flops=2.0 * (inputs // groups) * outputs * high * wide * side**2,
        moved=float(inputs * (side * stride) ** 2 + (1 + NORM_PASSES * norm) * outputs * side**2),
    )


def linear(
    name: str, inputs: int, outputs: int, *, tokens: int = 1, norm: bool = False, more: float = 0.0
) -> VariableLayer:
    """A fully connected layer, perhaps with a layer norm after it.

    Args:
        name: prefix of the variables' names.
        inputs: input width.
        outputs: output width.
        tokens: rows per sample.
        norm: whether a layer norm follows.
        more: further flops of one sample.

    Returns:
        The layer.
    """
    shapes = [(f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,))]
    shapes += [(f"{name}.norm.weight", (outputs,)), (f"{name}.norm.bias", (outputs,))] if norm else []
    return VariableLayer(
        shapes=tuple(shapes), flops=2.0 * inputs * outputs * tokens + more,
        moved=float(tokens * (inputs + (1 + NORM_PASSES * norm) * outputs)), linear_rows=float(tokens),
    )  # fmt: skip


def table(name: str, rows: int, width: int, *, looked_up: float, sparse: bool, extra_rows: int = 0) -> VariableLayer:
    """An embedding table.

    Args:
        name: prefix of the variable's name.
        rows: number of rows.
        width: width of a row.
        looked_up: rows that each sample looks up.
        sparse: whether the gradient is sparse.
        extra_rows: further rows that each step touches.

    Returns:
        The layer.
    """
    return VariableLayer(
        shapes=((f"{name}.weight", (rows, width)),), flops=0.0, moved=2.0 * looked_up * width, rows=looked_up,
        extra_rows=extra_rows, sparse=sparse,
    )  # fmt: skip
