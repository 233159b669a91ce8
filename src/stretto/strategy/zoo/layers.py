# SPDX-License-Identifier: Apache-2.0
"""The variables of layers, as strategies need them, with the compute times of a device."""

from __future__ import annotations

from collections.abc import Sequence

from ...workload.catalog.layers import VariableLayer
from ...workload.roofline import Accelerator
from ..model import Variable

BYTES = 4


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
        params = layer.params
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
