# SPDX-License-Identifier: Apache-2.0
"""The layers of the cross-mesh paper's two models: arithmetic, memory traffic, parameters, saved and output tensors.

All figures are of one sample. GPT-3 2.6B is as in the literature: 32 layers, hidden 2560, 32 heads, 1024 tokens, FP16.
The U-Transformer follows the sizes that its authors published with their system: a latent of 32 x 32, four levels of
672, 1344, 2688 and 2688 channels with one block each, attention on the three upper levels and in the middle, FP32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

GPT_LAYERS, GPT_HIDDEN, GPT_HEADS, GPT_SEQUENCE, GPT_VOCABULARY = 32, 2560, 32, 1024, 51200
UNET_LATENT, UNET_CHANNELS, UNET_HEADS = 32, (672, 1344, 2688, 2688), 8
CONTEXT_TOKENS = 16

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ModelLayer:
    """One layer of a model; all figures are of one sample."""

    name: str
    flops: float
    """Operations of the forward pass in matrix products and convolutions."""
    traffic_elements: float
    """Elements read and written by operations other than matrix products: norms, activations, softmax."""
    parameters: float
    saved_elements: float
    """Elements kept for the backward if the layer is not recomputed."""
    inputs: tuple[Shape, ...]
    """Shapes of the layer's inputs, which are kept if the layer is recomputed."""
    output: Shape
    pushes: bool = False
    """Whether a later layer takes its output as a skip connection."""
    pops: bool = False
    """Whether the layer takes one of the newest skip connections that no other layer has taken."""
    shared: float = 0.0
    """Elements summed over the devices that share the layer (operator parallelism), in the forward pass."""
    kernels: int = field(default=10)

    @property
    def input_elements(self) -> float:
        """Elements of all inputs together."""
        return float(sum(prod(shape) for shape in self.inputs))


def gpt_layers() -> list[ModelLayer]:
    """The layers of GPT-3 2.6B: the embedding, 32 equal transformer layers, the output layer."""
    width, seq, heads, words = GPT_HIDDEN, GPT_SEQUENCE, GPT_HEADS, GPT_VOCABULARY
    flat = (seq, width)
    tokens, scores = seq * width, heads * seq * seq
    found = [
        ModelLayer(
            name="embedding", flops=0.0, traffic_elements=3 * tokens, parameters=(words + seq) * width,
            saved_elements=seq, inputs=((seq,),), output=flat, kernels=3,
        )
    ]  # fmt: skip
    found += [
        ModelLayer(
            name=f"layer{at}",
            flops=24 * seq * width**2 + 4 * seq * seq * width,
            # Two norms and residuals, bias of the projections, GELU over 4 H, softmax with mask and dropout.
            traffic_elements=20 * tokens + 8 * tokens + 4 * scores,
            parameters=12 * width**2,
            # Korthikanti et al. (2022): (34 + 5 a S / H) S H bytes in 16 bit.
            saved_elements=17 * tokens + 2.5 * scores,
            inputs=(flat,),
            output=flat,
            shared=2 * tokens,
            kernels=16,
        )
        for at in range(GPT_LAYERS)
    ]
    found.append(
        ModelLayer(
            name="output", flops=2 * seq * width * words, traffic_elements=4 * seq * words, parameters=words * width,
            saved_elements=seq * words, inputs=(flat,), output=(1,), shared=seq, kernels=6,
        )
    )  # fmt: skip
    return found


def unet_layers() -> list[ModelLayer]:
    """The layers of the U-Transformer, with its long skip connections."""
    size, widths = UNET_LATENT, UNET_CHANNELS
    found = [_conv("conv_in", 3, widths[0], size, size, pushes=True)]
    before = widths[0]
    levels = len(widths)
    for level, width in enumerate(widths):
        found.append(_block(f"down{level}", before, width, size, attends=level < levels - 1, pushes=True))
        before = width
        if level < levels - 1:
            found.append(_conv(f"down{level}.half", width, width, size, size // 2, pushes=True))
            size //= 2
    found.append(_block("middle.0", before, before, size, attends=True))
    found.append(_block("middle.1", before, before, size, attends=False))
    skips = [layer.output for layer in found if layer.pushes]
    for level in reversed(range(levels)):
        width = widths[level]
        # Each level is offered the two newest skip connections; all but the lowest take one of them.
        older, newer = skips.pop(-2), skips.pop(-1)
        for at, skip in enumerate((newer, older) if level == levels - 1 else (newer,)):
            found.append(_block(f"up{level}.{at}", before, width, size, attends=level < levels - 1, skip=skip[-1]))
            before = width
        if level:
            found.append(_conv(f"up{level}.double", width, width, size, 2 * size))
            size *= 2
    found.append(_conv("conv_out", widths[0], 4, size, size))
    return found


def _conv(name: str, into: int, out: int, size: int, after: int, *, pushes: bool = False) -> ModelLayer:
    return ModelLayer(
        name=name, flops=2 * after * after * 9 * into * out, traffic_elements=0.0, parameters=9 * into * out,
        saved_elements=size * size * into, inputs=((size, size, into),), output=(after, after, out), pushes=pushes,
        kernels=1,
    )  # fmt: skip


def _block(
    name: str, into: int, out: int, size: int, *, attends: bool, pushes: bool = False, skip: int = 0
) -> ModelLayer:
    """A residual block of two 3 x 3 convolutions, and a transformer block over the pixels where it attends."""
    pixels = size * size
    wide = into + skip
    weights = 9 * wide * out + 9 * out * out + (wide * out if wide != out else 0)
    timing = 4 * UNET_CHANNELS[0] * out
    flops = 2.0 * pixels * weights
    traffic = pixels * (4 * wide + 7 * out)
    saved = pixels * (2 * wide + 3 * out)
    kernels = 8
    parameters = float(weights + timing)
    if attends:
        context = UNET_CHANNELS[-1]
        # Projections in and out, self-attention, cross-attention (keys and values from the context), gated MLP.
        dense = 2 * out * out + 4 * out * out + 2 * out * out + 12 * out * out
        parameters += dense + 2 * context * out
        flops += 2.0 * pixels * dense + 4.0 * pixels * pixels * out + 4.0 * CONTEXT_TOKENS * (pixels + context) * out
        scores = UNET_HEADS * pixels * pixels
        traffic += pixels * 40 * out + 4 * scores
        saved += pixels * 28 * out + 2 * scores
        kernels += 24
    inputs: tuple[Shape, ...] = ((size, size, into),) + (((size, size, skip),) if skip else ())
    return ModelLayer(
        name=name, flops=flops, traffic_elements=traffic, parameters=parameters, saved_elements=saved, inputs=inputs,
        output=(size, size, out), pushes=pushes, pops=bool(skip), kernels=kernels,
    )  # fmt: skip


def balanced_cut(layers: list[ModelLayer]) -> int:
    """The number of layers on the first of two stages for which the larger of the two stages' flops is least."""
    total = sum(layer.flops for layer in layers)
    done, best, at_best = 0.0, total, 1
    for at, layer in enumerate(layers[:-1], start=1):
        done += layer.flops
        if max(done, total - done) < best:
            best, at_best = max(done, total - done), at
    return at_best


def crossing(layers: list[ModelLayer], cut: int) -> list[Shape]:
    """Shapes of the tensors that the second stage needs from the first: the last output, and every skip connection it
    takes.
    """
    needed = {cut - 1} | {source for source, user in skip_connections(layers) if source < cut <= user}
    return [layers[at].output for at in sorted(needed)]


def skip_connections(layers: list[ModelLayer]) -> list[tuple[int, int]]:
    """The numbers of the layers that each skip connection comes from and goes to."""
    left = [at for at, layer in enumerate(layers) if layer.pushes]
    taken: list[tuple[int, int]] = []
    offered: list[int] = []
    for user, layer in enumerate(layers):
        if layer.name.endswith(".0") and layer.pops:
            offered, left = left[-2:], left[:-2]
        if layer.pops:
            taken.append((offered.pop(), user))
    return taken
