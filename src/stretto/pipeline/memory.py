# SPDX-License-Identifier: Apache-2.0
"""The memory that a schedule takes at each stage, and the recomputation that is needed to fit.

The paper's Table 1: per parameter 2 bytes for the weight in 16 bit and 12 for Adam (a copy, two moments, in 32 bit);
per micro-batch in flight ``2 B S H`` bytes for a layer's input where the rest is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Infeasible, InvalidInput
from .actions import BACKWARD, FORWARD, INPUT, RECV_F, WEIGHT
from .schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The bytes that one device of a stage holds."""

    fixed_bytes: float = 0.0
    """Bytes of weights, their gradients and the optimizer's state."""
    activation_bytes: float = 0.0
    """Bytes kept for each micro-batch from its forward to the end of its backward (of its ``W`` if that is split)."""
    working_bytes: float = 0.0
    """Bytes of recomputed activations, held once while a backward runs."""
    received_bytes: float = 0.0
    """Bytes of the receive buffer of each micro-batch, from posting its receive to its forward."""

    def __post_init__(self) -> None:
        for name in ("fixed_bytes", "activation_bytes", "working_bytes", "received_bytes"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InvalidInput(f"{name}: must be a number >= 0, not {value!r}")

    def room(self, cap_bytes: float, most: int) -> int:
        """The number of micro-batches that may be in flight under a cap in bytes: 0 if not one fits, at most `most`."""
        left = cap_bytes - self.fixed_bytes - self.working_bytes
        if left >= most * self.activation_bytes:
            return most
        return max(0, math.floor(left / self.activation_bytes + 1e-9)) if self.activation_bytes > 0 else 0


def peak_bytes(schedule: Schedule, stages: Sequence[StageMemory]) -> tuple[float, ...]:
    """The largest number of bytes that a device of each rank holds at once.

    >>> from stretto.pipeline import eager_1f1b, one_f_one_b
    >>> each = StageMemory(fixed_bytes=100.0, activation_bytes=10.0)
    >>> peak_bytes(one_f_one_b(3, 8), [each] * 3), peak_bytes(eager_1f1b(3, 8), [each] * 3)
    ((130.0, 120.0, 110.0), (150.0, 130.0, 110.0))
    """
    if len(stages) != schedule.num_stages:
        raise InvalidInput(f"memory: is of {len(stages)} stages, the schedule has {schedule.num_stages}")
    peaks = []
    for row in schedule.ranks:
        held = sum(stages[stage].fixed_bytes for stage in {action.stage for action in row})
        peak = held
        posted: set[tuple[int, int]] = set()
        for action in row:
            memory = stages[action.stage]
            if action.kind == RECV_F:
                posted.add((action.stage, action.microbatch))
                held += memory.received_bytes
            elif action.kind == FORWARD:
                held += memory.activation_bytes
                if (action.stage, action.microbatch) in posted:
                    held -= memory.received_bytes
            peak = max(peak, held + (memory.working_bytes if action.kind in (INPUT, BACKWARD) else 0.0))
            if action.kind in (BACKWARD, WEIGHT):
                held -= memory.activation_bytes
        peaks.append(peak)
    return tuple(peaks)


@dataclass(frozen=True, kw_only=True)
class LayerMemory:
    """One layer of a stage, for one micro-batch on one device."""

    all_bytes: float
    """Bytes of everything that the layer's backward reads."""
    input_bytes: float
    """Bytes of the layer's input alone, from which the rest can be recomputed."""


def recomputed(
    layers: Sequence[LayerMemory], *, fixed_bytes: float, in_flight: int, cap_bytes: float, received_bytes: float = 0.0
) -> tuple[StageMemory, tuple[bool, ...]]:
    """Choose as few layers to recompute as let a stage fit under a cap.

    Layers that save the most are chosen first. The largest recomputed layer is in memory in full while its backward
    runs.

    Args:
        layers: the layers of the stage, each for one micro-batch on one device.
        fixed_bytes: bytes of weights, gradients and optimizer state.
        in_flight: micro-batches whose activations are held at once.
        cap_bytes: memory of the device in bytes.
        received_bytes: bytes of one receive buffer.

    Returns:
        The memory of the stage, and for each layer whether it is recomputed.

    Raises:
        Infeasible: the stage does not fit even with every layer recomputed.
    """
    chosen = [False] * len(layers)
    order = sorted(range(len(layers)), key=lambda at: (layers[at].input_bytes - layers[at].all_bytes, at))
    for count in range(len(layers) + 1):
        if count:
            chosen[order[count - 1]] = True
        pairs = list(zip(layers, chosen, strict=True))
        memory = StageMemory(
            fixed_bytes=fixed_bytes,
            activation_bytes=sum(layer.input_bytes if again else layer.all_bytes for layer, again in pairs),
            working_bytes=max((layer.all_bytes for layer, again in pairs if again), default=0.0),
            received_bytes=received_bytes,
        )
        needed = fixed_bytes + in_flight * memory.activation_bytes + memory.working_bytes + received_bytes
        if needed <= cap_bytes:
            return memory, tuple(chosen)
    raise Infeasible(
        f"memory: {needed / 1e9:.2f} GB for {in_flight} micro-batches in flight with everything recomputed, "
        f"over the cap of {cap_bytes / 1e9:.2f} GB"
    )


@dataclass(frozen=True, kw_only=True)
class TransformerLayer:
    """Table 1 of the cross-mesh paper: the memory of one transformer layer on one device.

    >>> layer = TransformerLayer(hidden=12288, sequence=1024, microbatch=2, tensor=8)
    >>> [round(value / 2**20) for value in (layer.parameters, layer.activation_elements, layer.activation_bytes)]
    [216, 24, 48]
    >>> round(layer.weight_bytes / 2**30, 2)
    2.95
    """

    hidden: int
    sequence: int
    microbatch: int
    tensor: int = 1

    @property
    def parameters(self) -> float:
        """The layer's parameters on one device: ``12 H^2 / TMP``."""
        return 12 * self.hidden**2 / self.tensor

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights and optimizer state: ``168 H^2 / TMP``."""
        return 14 * self.parameters

    @property
    def activation_elements(self) -> float:
        """Elements of the layer's input: ``B S H``."""
        return self.microbatch * self.sequence * self.hidden

    @property
    def activation_bytes(self) -> float:
        """Bytes of the layer's input in 16 bit: ``2 B S H``."""
        return 2 * self.activation_elements
