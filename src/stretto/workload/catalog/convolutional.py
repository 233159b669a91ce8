# SPDX-License-Identifier: Apache-2.0
"""Convolutional networks on 224 x 224 (Inception: 299 x 299) pixels, 1000 classes."""

from __future__ import annotations

from .layers import Scale, VariableLayer, conv, linear

CLASSES = 1000


RESNET_BLOCKS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}


def resnet(depth: str, w: Scale) -> list[VariableLayer]:
    """The layers of ResNet-50, 101 or 152: stem, bottlenecks (stride in the 3 x 3 convolution) and classifier."""
    layers = [conv("conv1", 3, w(64), 7, 112, stride=2)]
    inputs, side = w(64), 56
    for stage, count in enumerate(RESNET_BLOCKS[depth]):
        width, outputs = w(64 << stage), w(256 << stage)
        for number in range(count):
            name = f"layer{stage + 1}.{number}"
            stride = 2 if stage and not number else 1
            before, side = side, side // stride
            layers += [
                conv(f"{name}.conv1", inputs, width, 1, before),
                conv(f"{name}.conv2", width, width, 3, side, stride=stride),
                conv(f"{name}.conv3", width, outputs, 1, side),
            ]
            if not number:
                layers.append(conv(f"{name}.downsample", inputs, outputs, 1, side, stride=stride))
            inputs = outputs
    return [*layers, linear("fc", inputs, w(CLASSES))]


def densenet121(w: Scale) -> list[VariableLayer]:
    """The layers of DenseNet-121: growth 32, blocks of 6, 12, 24, 16."""
    growth, width, side = w(32), w(64), 56
    layers = [conv("conv0", 3, width, 7, 112, stride=2)]
    blocks = (6, 12, 24, 16)
    for block, count in enumerate(blocks):
        for number in range(count):
            name = f"block{block + 1}.{number}"
            layers.append(conv(f"{name}.conv1", width, 4 * growth, 1, side))
            layers.append(conv(f"{name}.conv2", 4 * growth, growth, 3, side))
            width += growth
        if block < len(blocks) - 1:
            layers.append(conv(f"transition{block + 1}", width, width // 2, 1, side))
            width, side = width // 2, side // 2
    return [*layers, linear("classifier", width, w(CLASSES))]


def vgg16(w: Scale) -> list[VariableLayer]:
    """The layers of VGG16: thirteen convolutions with biases and three large fully connected layers."""
    layers: list[VariableLayer] = []
    inputs, side = 3, 224
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers.append(conv(f"features.{len(layers)}", inputs, w(width), 3, side, norm=False))
            inputs = w(width)
        side //= 2
    hidden = w(4096)
    return [
        *layers, linear("classifier.0", inputs * side**2, hidden), linear("classifier.1", hidden, hidden),
        linear("classifier.2", hidden, w(CLASSES)),
    ]  # fmt: skip


Conv = tuple[int, int | tuple[int, int], int]
"""A convolution as (output channels, kernel, stride)."""


def inceptionv3(w: Scale) -> list[VariableLayer]:
    """The layers of Inception v3: five kinds of blocks whose branches are joined; without the auxiliary classifier."""
    layers = []
    inputs = 3
    stem = ((32, 3, 149, 2), (32, 3, 147, 1), (64, 3, 147, 1), (80, 1, 73, 1), (192, 3, 71, 1))
    for at, (outputs, kernel, side, stride) in enumerate(stem):
        layers.append(conv(f"stem.{at}", inputs, w(outputs), kernel, side, stride=stride))
        inputs = w(outputs)
    for at, (side, branches, passed) in enumerate(_inception_blocks()):
        joined = 0
        for number, branch in enumerate(branches):
            width = inputs
            for depth, (outputs, size, stride) in enumerate(branch):
                after = side // stride if stride == 1 else (side - 1) // 2
                name = f"mixed{at}.branch{number}.{depth}"
                layers.append(conv(name, width, w(outputs), size, after, stride=stride))
                width = w(outputs)
            joined += width
        # In the last two blocks convolutions fork, so that more channels are joined than the branches' ends have.
        inputs = joined + (inputs if passed < 0 else w(passed) if passed else 0)
    return [*layers, linear("fc", inputs, w(CLASSES))]


def _inception_blocks() -> list[tuple[int, list[list[Conv]], int]]:
    """Blocks as (side, branches, further channels that are joined: -1 for the pooled input
    itself, or those of forks).
    """
    wide, tall = (1, 7), (7, 1)

    def block_a(pool: int) -> list[list[Conv]]:
        return [[(64, 1, 1)], [(48, 1, 1), (64, 5, 1)], [(64, 1, 1), (96, 3, 1), (96, 3, 1)], [(pool, 1, 1)]]

    def block_c(c: int) -> list[list[Conv]]:
        return [
            [(192, 1, 1)], [(c, 1, 1), (c, wide, 1), (192, tall, 1)],
            [(c, 1, 1), (c, tall, 1), (c, wide, 1), (c, tall, 1), (192, wide, 1)], [(192, 1, 1)],
        ]  # fmt: skip

    block_e: list[list[Conv]] = [
        [(320, 1, 1)], [(384, 1, 1), (384, (1, 3), 1), (384, (3, 1), 1)],
        [(448, 1, 1), (384, 3, 1), (384, (1, 3), 1), (384, (3, 1), 1)], [(192, 1, 1)],
    ]  # fmt: skip
    return [
        (35, block_a(32), 0), (35, block_a(64), 0), (35, block_a(64), 0),
        (35, [[(384, 3, 2)], [(64, 1, 1), (96, 3, 1), (96, 3, 2)]], -1),
        (17, block_c(128), 0), (17, block_c(160), 0), (17, block_c(160), 0), (17, block_c(192), 0),
        (17, [[(192, 1, 1), (320, 3, 2)], [(192, 1, 1), (192, wide, 1), (192, tall, 1), (192, 3, 2)]], -1),
        (8, block_e, 768), (8, block_e, 768),
    ]  # fmt: skip
