# SPDX-License-Identifier: Apache-2.0
"""The compute of a full-size model, measured once on a processor of this machine, for `strategy_full.py` to replay.

Each layer of the zoo runs by itself at its full size, one sample, on one thread: a convolution or a product with its
operations, or a lookup. Its forward pass and its backward pass (both gradients) are timed, the least of two runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn import functional

from stretto.strategy import ModelSpec, zoo
from stretto.workload.catalog.layers import Scale, VariableLayer

RUNS = 2


def measured(name: str) -> ModelSpec:
    """A model of the zoo whose layers take what they take here.

    Args:
        name: the model.

    Returns:
        The model; the first variable of each layer has its times.
    """
    model = zoo.model(name)
    times: dict[str, tuple[float, float]] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for layer in zoo.MODELS[name][0](Scale()):
            times[layer.shapes[0][0]] = timed_us(layer)
    finally:
        torch.set_num_threads(threads)
    none = (0.0, 0.0)
    variables = (
        replace(v, forward_us=times.get(v.name, none)[0], backward_us=times.get(v.name, none)[1])
        for v in model.variables
    )
    return replace(model, variables=tuple(variables), batch=1)


def timed_us(layer: VariableLayer) -> tuple[float, float]:
    """The times of a layer's forward and backward pass."""
    shape = layer.shapes[0][1]
    weight = torch.zeros(shape, requires_grad=True)
    run = operation(layer, weight)
    found = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        out = run()
        middle = time.perf_counter()
        torch.autograd.backward(out, torch.ones_like(out))
        found.append((middle - begin, time.perf_counter() - middle))
        weight.grad = None
    return min(one for one, _ in found) * 1e6, min(one for _, one in found) * 1e6


def operation(layer: VariableLayer, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What a layer computes with its first variable, for one sample."""
    shape = tuple(weight.shape)
    if layer.rows:
        picked = torch.arange(max(1, round(layer.rows))) % shape[0]
        return lambda: functional.embedding(picked, weight)
    places = max(1, round(layer.flops / (2 * math.prod(shape))))
    if len(shape) == 4:
        side = max(1, round(math.sqrt(places)))
        image = torch.zeros(1, shape[1], side, side, requires_grad=True)
        return lambda: functional.conv2d(image, weight, padding=(shape[2] // 2, shape[3] // 2))
    rows = torch.zeros(places, math.prod(shape[1:]), requires_grad=True)
    return lambda: functional.linear(rows, weight.reshape(shape[0], -1))


if __name__ == "__main__":
    for model in ("vgg16", "resnet50", "resnet101", "bert_12l", "ncf_dense"):
        found = measured(model)
        forward, backward = (sum(getattr(v, which) for v in found.variables) for which in ("forward_us", "backward_us"))
        print(f"{model}: {forward / 1e3:.0f} ms forward, {backward / 1e3:.0f} ms backward, one sample on one thread")
