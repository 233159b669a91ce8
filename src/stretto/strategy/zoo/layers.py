"""Layers: variables that are computed together, with the arithmetic and the memory traffic of one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...workload.roofline import Accelerator
from ..model import Variable

BYTES = 4
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
    flops: float
    moved: float
    rows: float = 0.0
    extra_rows: int = 0
    sparse: bool = False
    linear_rows: float = 0.0


def conv(
    name: str, inputs: int, outputs: int, size: int | tuple[int, int], side: int, *, stride: int = 1,
    norm: bool = True,
) -> VariableLayer:  # fmt: skip
    """A convolution with its normalization, or with a bias.

    Args:
        name: prefix of the variables' names.
        inputs: input channels.
        outputs: output channels.
        size: size of the kernel, or (height, width).
        side: width and height of the output.
        stride: stride of the kernel.
        norm: whether the layer has a normalization instead of a bias.

    Returns:
        The layer.
    """
    high, wide = (size, size) if isinstance(size, int) else size
    weight = (f"{name}.weight", (outputs, inputs, high, wide))
    rest = ((f"{name}.norm.weight", (outputs,)), (f"{name}.norm.bias", (outputs,)))
    return VariableLayer(
        shapes=(weight, *(rest if norm else ((f"{name}.bias", (outputs,)),))),
        flops=2.0 * inputs * outputs * high * wide * side**2,
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


def variables_of(layers: Sequence[VariableLayer], device: Accelerator, samples: int) -> tuple[Variable, ...]:
    """The variables of layers; the first of each layer carries its compute time, and the backward pass takes twice as
    long.

    Args:
        layers: the layers in the order of use.
        device: the device that computes.
        samples: samples per rank and step.

    Returns:
        The variables in the order of use.
    """
    found = []
    for layer in layers:
        params = sum(_size(shape) for _, shape in layer.shapes)
        # The dense gradient of an embedding is written for the whole table.
        dense = params if layer.rows and not layer.sparse else 0
        read = 0 if layer.rows else params
        forward_us, backward_us = (
            device.compute_us(
                passes * samples * layer.flops,
                BYTES * (passes * (samples * layer.moved + read) + (passes - 1) * dense),
                "fp32", kernels=passes,
            )
            for passes in (1, 2)
        )  # fmt: skip
        for at, (name, shape) in enumerate(layer.shapes):
            touched = min(shape[0], max(1, round(samples * layer.rows + layer.extra_rows)))
            found.append(
                Variable(
                    name=name, shape=shape, sparse=layer.sparse, rows=touched if layer.sparse else 0,
                    forward_us=forward_us if at == 0 else 0.0, backward_us=backward_us if at == 0 else 0.0,
                    factors=round(samples * layer.linear_rows) if at == 0 else 0,
                )
            )  # fmt: skip
    return tuple(found)


def _size(shape: Sequence[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
