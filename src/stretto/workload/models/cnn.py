# SPDX-License-Identifier: Apache-2.0
"""Convolutional networks, data parallel: ResNet from its real layers, and RegNetZ, SYNDICATE's A6.

Assumptions: FP16 products and activations, FP32 parameters and gradients (mixed precision as PyTorch does it), SGD with
momentum, DDP's buckets of 25 MiB after a first one of 1 MiB. The paper says of A6 only "RegNetZ" and "data parallel":
taken is the 4 GFLOP member of the family (28 blocks, w0 48, wa 14.5, wm 2.226, groups of 8, expansion 4,
squeeze-and-excitation 1/4; 27.1 M parameters) at 256 x 256 pixels, 64 images per GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from ...errors import unknown
from ...units import MB
from ..catalog import convolutional
from ..catalog.convolutional import CLASSES, RESNET_BLOCKS
from ..catalog.layers import Scale, VariableLayer, conv, linear
from ..dag import Workload
from ..roofline import Accelerator, accelerator
from .common import (
    DDP_BUCKET_BYTES,
    DDP_FIRST_BUCKET_BYTES,
    OpCollector,
    blocks_of_buckets,
    buckets,
    check_count,
    check_ranks,
    check_scale,
)
from .parallel import Replicas

GRADIENT_BYTES = 4
ACTIVATION_BYTES = 2
MOMENTUM_BYTES = 20
"""Bytes that the update of one parameter moves: read parameter, gradient and momentum, write parameter and momentum."""


@dataclass(frozen=True, kw_only=True)
class LayerBlock:
    """Layers that are computed together and whose gradients are ready together."""

    name: str
    layers: tuple[VariableLayer, ...]

    @property
    def params(self) -> int:
        """The parameters of all layers of the block."""
        return sum(layer.params for layer in self.layers)

    @property
    def flops(self) -> float:
        """Operations of one image's forward pass."""
        return sum(layer.flops for layer in self.layers)


def resnet_blocks(depth: str) -> list[LayerBlock]:
    """The blocks: stem, bottleneck blocks and classifier, for 224 x 224 pixels."""
    names = {"conv1": "stem", "fc": "classifier"}
    by_block = groupby(convolutional.resnet(depth, Scale()), lambda layer: layer.shapes[0][0].rsplit(".", 2)[0])
    return [
        LayerBlock(name=names.get(name, name.replace("layer", "stage")), layers=tuple(layers))
        for name, layers in by_block
    ]


@dataclass(frozen=True, kw_only=True)
class RegNet:
    """A member of the RegNet family: widths grow linearly and are rounded to a few stages."""

    depth: int
    start: int
    slope: float
    ratio: float
    group: int
    side: int

    def stages(self) -> Iterator[tuple[int, int]]:
        """Width and number of blocks of each stage."""
        widths = []
        for at in range(self.depth):
            power = round(math.log((self.start + self.slope * at) / self.start) / math.log(self.ratio))
            widths.append(round(self.start * self.ratio**power / 8) * 8)
        for width, same in groupby(widths):
            yield width, len(list(same))


REGNETZ = {
    "4gf": RegNet(depth=28, start=48, slope=14.5, ratio=2.226, group=8, side=256),
}
REGNETZ_EXPANSION = 4
STEM_WIDTH = 32


def regnetz_blocks(variant: str) -> list[LayerBlock]:
    """The blocks: stem, inverted bottlenecks with squeeze-and-excitation, and classifier."""
    model = REGNETZ[variant]
    side = model.side // 2
    blocks = [LayerBlock(name="stem", layers=(conv("stem", 3, STEM_WIDTH, 3, side, stride=2),))]
    inputs = STEM_WIDTH
    for stage, (width, count) in enumerate(model.stages()):
        for number in range(count):
            stride = 2 if number == 0 else 1
            before, side = side, side // stride
            inner = REGNETZ_EXPANSION * width
            squeeze = round(inputs / 4)
            layers = (
                conv("expand", inputs, inner, 1, before),
                conv("mix", inner, inner, 3, side, groups=inner // model.group, stride=stride),
                linear("squeeze", inner, squeeze),
                linear("excite", squeeze, inner),
                conv("project", inner, width, 1, side),
            )
            blocks.append(LayerBlock(name=f"stage{stage + 1}.{number}", layers=layers))
            inputs = width
    blocks.append(LayerBlock(name="classifier", layers=(linear("classifier", inputs, CLASSES),)))
    return blocks


def resnet(
    variant: str = "50",
    *,
    ranks: int = 128,
    batch: int = 32,
    bucket_mb: float = DDP_BUCKET_BYTES / MB,
    gradient_bytes: int = GRADIENT_BYTES,
    efficiency: float | None = None,
    device: str = "a100",
) -> Workload:
    """ResNet-50, 101 or 152 on 224 x 224 pixels, data parallel.

    Args:
        variant: "50", "101" or "152".
        ranks: number of ranks, 1..16384.
        batch: images per rank, 1..2^20.
        bucket_mb: size of a gradient bucket in MB, 0.001..1e6; the first bucket is 1 MiB as in DDP.
        gradient_bytes: bytes of one gradient element, 1..8.
        efficiency: share of the roofline that kernels reach, over 0 and at most 1; None takes the device's.
        device: one of `ACCELERATORS`.

    Returns:
        One training step.

    Raises:
        InvalidInput: an argument is unknown or out of range.
    """
    if variant not in RESNET_BLOCKS:
        raise unknown("variant of resnet", variant, RESNET_BLOCKS)
    chosen = accelerator(device, efficiency=efficiency)
    return _data_parallel(f"resnet:{variant}", resnet_blocks(variant), ranks, batch, bucket_mb, gradient_bytes, chosen)


def regnetz(
    variant: str = "4gf",
    *,
    ranks: int = 128,
    batch: int = 64,
    bucket_mb: float = DDP_BUCKET_BYTES / MB,
    gradient_bytes: int = GRADIENT_BYTES,
    efficiency: float | None = None,
    device: str = "v100_hgx2",
) -> Workload:
    """RegNetZ, SYNDICATE's A6: its only communication is a chain of all-reduces, each of which waits for the one
    before.

    Args:
        variant: "4gf".
        ranks: number of ranks, 1..16384.
        batch: images per rank, 1..2^20.
        bucket_mb: size of a gradient bucket in MB, 0.001..1e6; the first bucket is 1 MiB as in DDP.
        gradient_bytes: bytes of one gradient element, 1..8.
        efficiency: share of the roofline that kernels reach, over 0 and at most 1; None takes the device's.
        device: one of `ACCELERATORS`.

    Returns:
        One training step.

    Raises:
        InvalidInput: an argument is unknown or out of range.
    """
    if variant not in REGNETZ:
        raise unknown("variant of regnetz", variant, REGNETZ)
    chosen = accelerator(device, efficiency=efficiency)
    return _data_parallel(
        f"regnetz:{variant}", regnetz_blocks(variant), ranks, batch, bucket_mb, gradient_bytes, chosen
    )


def _data_parallel(
    name: str,
    blocks: Sequence[LayerBlock],
    ranks: int,
    batch: int,
    bucket_mb: float,
    gradient_bytes: int,
    device: Accelerator,
) -> Workload:
    check_ranks(ranks)
    check_count("batch", batch, 1, 1 << 20)
    check_count("gradient_bytes", gradient_bytes, 1, 8)
    check_scale("bucket_mb", bucket_mb, 0.001, 1e6)
    steps = OpCollector(ranks)
    sizes = [block.params * gradient_bytes for block in blocks]
    first = min(DDP_FIRST_BUCKET_BYTES, bucket_mb * MB)
    replicas = Replicas(
        steps,
        device,
        what="grads",
        params=[block.params for block in blocks],
        units=blocks_of_buckets(buckets(sizes, bucket_mb * MB, first_bytes=first)),
        members=ranks,
        param_bytes=GRADIENT_BYTES,
        grad_bytes=gradient_bytes,
        optimizer_bytes=MOMENTUM_BYTES,
        dtype="fp16",
    )

    def duration_us(block: LayerBlock, passes: int) -> float:
        return sum(
            device.compute_us(
                passes * batch * layer.flops,
                passes * (batch * layer.moved * ACTIVATION_BYTES + layer.params * ACTIVATION_BYTES),
                kernels=passes,
            )
            for layer in block.layers
        )

    before: list[str] = []
    for at, block in enumerate(blocks):
        needs = [*before, *replicas.enter_forward(at)]
        before = [steps.compute(f"fwd-{block.name}", duration_us(block, 1), needs, phase="forward")]
        replicas.leave_forward(at, before[0])
    for at in reversed(range(len(blocks))):
        before = [steps.compute(f"bwd-{blocks[at].name}", duration_us(blocks[at], 2), before, phase="backward")]
        replicas.leave_backward(at, before[0])
    total = sum(block.params for block in blocks)
    notes = (
        f"{total / 1e6:.4g} M parameters, {sum(block.flops for block in blocks) / 2e9:.3g} G multiply-adds per image; "
        f"{batch} images per rank",
        f"compute: {device.name} at {device.efficiency:.3g} of its roofline, FP16",
    )
    return steps.workload(name, samples=batch * ranks, unit="images", notes=notes)
