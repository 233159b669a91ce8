# SPDX-License-Identifier: Apache-2.0
"""`PipelineModel`: the layers of a model as a search for pipelines over meshes needs them, and their file form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import InvalidInput
from ..files import convert, parse_yaml, read_text

MAX_LAYERS = 4096


@dataclass(frozen=True, kw_only=True)
class PipelineLayer:
    """One layer; all figures are of one sample, times on one device."""

    name: str
    forward_us: float
    output: tuple[int, ...]
    """The shape of what the next layer gets."""
    backward_us: float | None = None
    """The time of the backward, half of it for the weights; twice that of the forward if not given."""
    parameters: float = 0.0
    saved_elements: float | None = None
    """Elements kept for the backward; if not given, those of the output."""
    shared_elements: float = 0.0
    """Elements summed over the devices that share the layer, in the forward and again in the backward."""
    needs: tuple[str, ...] = ()
    """Earlier layers whose outputs the layer takes besides that of the layer before: skip connections."""

    def __post_init__(self) -> None:
        for field in ("forward_us", "backward_us", "parameters", "saved_elements", "shared_elements"):
            value = getattr(self, field)
            if value is not None and not (math.isfinite(value) and 0 <= value <= 1e15):
                raise InvalidInput(f"layers: {self.name!r}: {field}: must be 0 to 1e15, not {value!r}")
        if not self.output or any(not 1 <= size <= 1 << 32 for size in self.output):
            raise InvalidInput(f"layers: {self.name!r}: output: must be sizes >= 1, not {list(self.output)}")

    @property
    def back_us(self) -> float:
        """The time of the backward."""
        return 2 * self.forward_us if self.backward_us is None else self.backward_us

    @property
    def kept_elements(self) -> float:
        """Elements kept for the backward."""
        return float(math.prod(self.output)) if self.saved_elements is None else self.saved_elements


@dataclass(frozen=True, kw_only=True)
class PipelineModel:
    """The layers of a model, first to last, and the micro-batch.

    >>> layers = [PipelineLayer(name=f"block{at}", forward_us=10.0, output=(8, 16)) for at in range(6)]
    >>> model = PipelineModel(name="small", layers=tuple(layers), samples=4)
    >>> model.balanced_cuts((2, 4)), model.crossing(2)
    ((0, 2, 6), [(8, 16)])
    """

    name: str
    layers: tuple[PipelineLayer, ...]
    samples: int
    """Samples of one micro-batch."""
    dtype_bytes: int = 2
    bytes_per_parameter: float = 16.0
    """Weight, gradient and optimizer: 2, 2 and 12 bytes in 16 bit with Adam."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise InvalidInput(f"layers: must be 1..{MAX_LAYERS}, not {len(self.layers)}")
        if not 1 <= self.samples <= 1 << 24 or self.dtype_bytes not in (1, 2, 4, 8):
            raise InvalidInput(f"samples: must be >= 1, dtype_bytes 1, 2, 4 or 8: {self.samples}, {self.dtype_bytes}")
        if not (math.isfinite(self.bytes_per_parameter) and self.bytes_per_parameter >= 0):
            raise InvalidInput(f"bytes_per_parameter: must be a number >= 0, not {self.bytes_per_parameter!r}")
        seen: set[str] = set()
        for layer in self.layers:
            for need in layer.needs:
                if need not in seen:
                    raise InvalidInput(f"layers: {layer.name!r}: needs: {need!r} is no layer before it")
            if layer.name in seen:
                raise InvalidInput(f"layers: the name {layer.name!r} is there twice")
            seen.add(layer.name)

    def crossing(self, cut: int) -> list[tuple[int, ...]]:
        """Shapes, of one sample, of what the layers from `cut` on need of those before."""
        number = {layer.name: at for at, layer in enumerate(self.layers)}
        needed = {number[need] for layer in self.layers[cut:] for need in layer.needs if number[need] < cut}
        return [self.layers[at].output for at in sorted({cut - 1} | needed)]

    def balanced_cuts(self, devices: Sequence[int]) -> tuple[int, ...]:
        """Where to cut for stages of so many devices, so that the slowest takes the least: 0, the cuts, the end."""
        work = [layer.forward_us + layer.back_us for layer in self.layers]
        count, total = len(work), [0.0]
        for each in work:
            total.append(total[-1] + each)
        # best[n]: the slowest of the stages so far, if these have n layers, and where the last of them begins.
        best: list[tuple[float, int]] = [(0.0 if n == 0 else math.inf, 0) for n in range(count + 1)]
        begins: list[list[int]] = []
        for at, size in enumerate(devices):
            rest = len(devices) - at - 1
            new = [(math.inf, 0)] * (count + 1)
            for end in range(at + 1, count - rest + 1):
                new[end] = min((max(best[n][0], (total[end] - total[n]) / size), n) for n in range(at, end))
            begins.append([begin for _, begin in new])
            best = new
        cuts = [count]
        for row in reversed(begins):
            cuts.append(row[cuts[-1]])
        return tuple(reversed(cuts))

    @classmethod
    def load(cls, path: str | Path) -> PipelineModel:
        """Read a YAML file (docs/pipeline.md)."""
        form = convert(parse_yaml(read_text(path), where=str(path)), _ModelForm, where=str(path))
        layers = []
        for layer in form.layers:
            for at in range(layer.repeat):
                name = layer.name if layer.repeat == 1 else f"{layer.name}{at}"
                layers.append(
                    PipelineLayer(
                        name=name, forward_us=layer.forward_us, output=tuple(layer.output),
                        backward_us=layer.backward_us, parameters=layer.parameters,
                        saved_elements=layer.saved_elements, shared_elements=layer.shared_elements,
                        needs=tuple(layer.needs),
                    )
                )  # fmt: skip
                if len(layers) > MAX_LAYERS:
                    raise InvalidInput(f"{path}: $.layers: more than {MAX_LAYERS} layers")
        return cls(
            name=form.name, layers=tuple(layers), samples=form.samples, dtype_bytes=form.dtype_bytes,
            bytes_per_parameter=form.bytes_per_parameter,
        )  # fmt: skip


class _LayerForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    forward_us: float
    output: list[int]
    backward_us: float | None = None
    parameters: float = 0.0
    saved_elements: float | None = None
    shared_elements: float = 0.0
    needs: list[str] = []
    repeat: int = 1


class _ModelForm(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    version: Literal[1]
    kind: Literal["pipeline_model"]
    name: str
    samples: int
    layers: list[_LayerForm]
    dtype_bytes: int = 2
    bytes_per_parameter: float = 16.0
