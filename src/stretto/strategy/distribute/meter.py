# SPDX-License-Identifier: Apache-2.0
"""Describes a PyTorch model as a `ModelSpec`: its variables and, once it has run, their order of use and times."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import nn

from ...errors import InvalidInput
from ..model import DTYPE_BYTES, ModelSpec, Variable
from .factors import layers_of

NAMES = {getattr(torch, name): name for name in DTYPE_BYTES}


def described(model: nn.Module, sample: Any, *, name: str = "") -> ModelSpec:
    """The spec of a model; with a sample, after a few steps on it that leave gradients and random numbers as they were.

    Args:
        model: the model.
        sample: a tensor or a tuple of arguments for the model; None runs nothing.
        name: name of the model; empty takes its class's.

    Returns:
        The spec.

    Raises:
        InvalidInput: a parameter cannot be described, or the model's output has no gradient.
    """
    meter = ModuleMeter(model, name=name)
    if sample is None:
        meter.close()
        return meter.spec()
    arguments = sample if isinstance(sample, tuple) else (sample,)
    kept = {key: p.grad for key, p in model.named_parameters()}
    state = {key: buffer.clone() for key, buffer in model.named_buffers()}
    try:
        with torch.random.fork_rng():
            for _ in range(3):
                model.zero_grad()
                _sum_of(model(*arguments)).backward()  # type: ignore[no-untyped-call]
    finally:
        meter.close()
        for key, p in model.named_parameters():
            p.grad = kept[key]
        with torch.no_grad():
            for key, buffer in model.named_buffers():
                buffer.copy_(state[key])
    return meter.spec()


class ModuleMeter:
    """Hooks that record the order of modules, the time of each, and sizes of sparse gradients and linear layers."""

    def __init__(self, model: nn.Module, *, name: str = "") -> None:
        self.name = name or type(model).__name__
        self.variables = variables_of(model)
        self._batch = 0
        self._order: list[str] = []
        self._forward: dict[str, list[float]] = {}
        self._backward: dict[str, list[float]] = {}
        self._rows: dict[str, int] = {}
        self._factors: dict[str, int] = {}
        self._stack: list[list[float]] = []
        self._last = 0.0
        self._handles: list[Any] = [model.register_forward_pre_hook(self._whole)]
        self._layers = layers_of(model)
        ours = {id(p): key for key, p in model.named_parameters() if p.requires_grad}
        for module in model.modules():
            keys = [ours[id(p)] for p in module.parameters(recurse=False) if id(p) in ours]
            if keys:
                self._handles.append(module.register_forward_pre_hook(self._enter))
                self._handles.append(module.register_forward_hook(self._leaver(keys, module)))
        for key, p in model.named_parameters():
            if p.requires_grad:
                watched: Any = p
                self._handles.append(watched.register_post_accumulate_grad_hook(self._ready(key)))

    def _whole(self, _: nn.Module, inputs: Any) -> None:
        first = next((one for one in inputs if isinstance(one, torch.Tensor) and one.dim()), None)
        self._batch = len(first) if first is not None else 0

    def _enter(self, *_: Any) -> None:
        self._stack.append([time.perf_counter(), 0.0])

    def _leaver(self, keys: list[str], module: nn.Module) -> Any:
        def leave(_: nn.Module, inputs: Any, output: Any) -> None:
            begin, inside = self._stack.pop()
            self._last = time.perf_counter()
            took = self._last - begin
            if self._stack:
                self._stack[-1][1] += took
            for key in keys:
                if key not in self._order:
                    self._order.append(key)
                self._forward.setdefault(key, []).append(1e6 * (took - inside) / len(keys))
            if self._layers.get(keys[0]) is module and isinstance(inputs[0], torch.Tensor):
                self._factors[keys[0]] = inputs[0].numel() // max(inputs[0].shape[-1], 1)

        return leave

    def _ready(self, key: str) -> Any:
        def ready(parameter: torch.Tensor) -> None:
            now = time.perf_counter()
            self._backward.setdefault(key, []).append(1e6 * (now - self._last))
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                self._rows[key] = max(self._rows.get(key, 0), gradient.coalesce().indices().shape[1])
            self._last = time.perf_counter()

        return ready

    def spec(self) -> ModelSpec:
        """The spec from the records so far."""
        place = {key: at for at, key in enumerate(self._order)}
        order, last = {}, -1.0
        for at, v in enumerate(self.variables):
            # A variable whose module was never called is placed after the variable before it.
            last = float(place.get(v.name, last))
            order[v.name] = (last, at)
        made = []
        for v in sorted(self.variables, key=lambda v: order[v.name]):
            forward, backward = self._forward.get(v.name), self._backward.get(v.name)
            made.append(Variable(
                name=v.name, shape=v.shape, dtype=v.dtype, sparse=v.sparse, also=v.also,
                rows=min(max(self._rows.get(v.name, 1), 1), v.shape[0]) if v.sparse else 0,
                factors=self._factors.get(v.name, 0) if len(v.shape) == 2 else 0,
                forward_us=statistics.median(forward) if forward else 0.0,
                backward_us=statistics.median(backward) if backward else 0.0,
            ))  # fmt: skip
        return ModelSpec(name=self.name, variables=tuple(made), batch=self._batch, runtime="torch")

    def close(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()


def variables_of(model: nn.Module) -> list[Variable]:
    """The trainable parameters, tied ones once, without the properties that only a run shows."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    sparse = {id(module.weight) for module in tables if module.sparse}
    names: dict[int, list[str]] = {}
    for key, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(key)
    found = []
    for key, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise InvalidInput(f"{key}: has no shape yet: call the model once before")
        if not p.requires_grad or not p.numel():
            continue
        if p.dtype not in NAMES:
            raise InvalidInput(f"{key}: dtype must be one of {', '.join(DTYPE_BYTES)}, not {p.dtype}")
        found.append(Variable(
            name=key, shape=tuple(p.shape), dtype=NAMES[p.dtype], sparse=id(p) in sparse, rows=int(id(p) in sparse),
            also=tuple(names[id(p)][1:]),
        ))  # fmt: skip
    return found


def _sum_of(output: Any) -> torch.Tensor:
    """A scalar to start a backward pass from: the sum of the model's outputs."""
    if isinstance(output, torch.Tensor):
        return output.float().sum()
    values = output.values() if isinstance(output, dict) else output
    if not isinstance(output, dict | tuple | list):
        raise InvalidInput(f"sample: the model gives a {type(output).__name__}, not tensors")
    parts = [_sum_of(one) for one in values if isinstance(one, torch.Tensor) and one.requires_grad]
    if not parts:
        raise InvalidInput("sample: the model's output needs no gradient")
    return torch.stack(parts).sum()
