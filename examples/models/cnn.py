# SPDX-License-Identifier: Apache-2.0
"""A small residual network: much to compute, little to communicate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large it is; `batch` is per rank."""

    classes: int = 10
    side: int = 16
    width: int = 16
    stages: int = 3
    batch: int = 8


class Block(nn.Module):
    """Two convolutions around a residual; the first may halve the image."""

    def __init__(self, width: int, channels: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, channels, 3, padding=1, stride=stride)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.skip = nn.Identity() if width == channels else nn.Conv2d(width, channels, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        """The image, or a smaller one with more channels."""
        return torch.relu(self.second(torch.relu(self.first(x))) + self.skip(x))


class CNN(nn.Module):
    """Says what an image shows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        widths = [shape.width << stage for stage in range(shape.stages)]
        blocks: list[nn.Module] = []
        for before, width in zip([widths[0], *widths[:-1]], widths, strict=True):
            blocks += [Block(before, width, 1 if width == before else 2), Block(width, width, 1)]
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], shape.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean loss over a batch."""
        features = self.blocks(self.stem(images)).mean((2, 3))
        return functional.cross_entropy(self.head(features), labels)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random images and labels for one rank."""
        shape = self.shape
        images = torch.randn(shape.batch, 3, shape.side, shape.side, generator=generator)
        return images, torch.randint(shape.classes, (shape.batch,), generator=generator)
