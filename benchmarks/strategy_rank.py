# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/strategy_real.py: a training script around a model of a known shape, scaled down.

``strategy_rank.py MODEL`` trains as `stretto.torch.distribute` is told to, until it is ended; ``strategy_rank.py MODEL
ddp`` trains under PyTorch's DDP and says how long an iteration takes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stretto.torch

Batch = tuple[torch.Tensor, ...]
WARMUP, TIMED = 5, 20


class Conv(nn.Sequential):
    """VGG-shaped, with 1.0 M parameters: little in convolutions, nearly everything in three linear layers."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        width = 3
        for block, (channels, depth) in enumerate(((8, 2), (16, 2), (24, 3), (32, 3), (32, 3))):
            for _ in range(depth):
                layers += [nn.Conv2d(width, channels, 3, padding=1), nn.ReLU()]
                width = channels
            layers += [nn.MaxPool2d(2)] if block < 3 else []
        head = [nn.Flatten(), nn.Linear(32 * 16, 768), nn.ReLU(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 250)]
        super().__init__(*layers, *head)


class Residual(nn.Module):
    """ResNet-shaped, with 0.41 M parameters: many convolutions of similar size with normalisation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList()
        width = 32
        for channels, depth in ((32, 3), (64, 4), (128, 6)):
            for at in range(depth):
                self.blocks.append(_Block(width, channels, 2 if at == 0 and channels > 32 else 1))
                width = channels
        self.head = nn.Linear(width, 100)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


class _Block(nn.Module):
    def __init__(self, width: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, channels // 2, 1), nn.BatchNorm2d(channels // 2), nn.ReLU(),
            nn.Conv2d(channels // 2, channels // 2, 3, padding=1, stride=stride), nn.BatchNorm2d(channels // 2),
            nn.ReLU(),
            nn.Conv2d(channels // 2, channels, 1), nn.BatchNorm2d(channels),
        )  # fmt: skip
        same = width == channels and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(width, channels, 1, stride=stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class Language(nn.Module):
    """BERT-shaped, with 1.0 M parameters: a third in an embedding; encoders of four square and two long matrices."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3000, 128, sparse=sparse)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(self.embedding(tokens)).mean(1))
        return out


class Recommender(nn.Module):
    """NCF-shaped, with 0.77 M parameters: four tables with nearly all parameters, and a small perceptron."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, 32, sparse=sparse) for rows in (8000, 4000, 8000, 4000))
        self.perceptron = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU())
        self.head = nn.Linear(64, 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        a, b, c, d = self.tables
        deep = self.perceptron(torch.cat((a(users), b(items)), 1))
        out: torch.Tensor = self.head(torch.cat((deep, c(users) * d(items)), 1))
        return out


def _images(size: int, count: int) -> Callable[[], Batch]:
    return lambda: (torch.randn(count, 3, size, size),)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "vgg_like": (Conv, _images(32, 16)),
    "resnet_like": (Residual, _images(16, 4)),
    "bert_like": (lambda: Language(False), lambda: (torch.randint(3000, (4, 32)),)),
    "bert_like_sparse": (lambda: Language(True), lambda: (torch.randint(3000, (4, 32)),)),
    "ncf_like": (lambda: Recommender(False), lambda: (torch.randint(8000, (256,)), torch.randint(4000, (256,)))),
    "ncf_like_sparse": (lambda: Recommender(True), lambda: (torch.randint(8000, (256,)), torch.randint(4000, (256,)))),
}


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    make, batch = MODELS[sys.argv[1]]
    model = make()
    torch.manual_seed(1 + dist.get_rank())
    data = batch()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    trained: nn.Module = model
    plain = sys.argv[2:] == ["ddp"]
    if plain:
        trained = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    else:
        trained, optimizer = stretto.torch.distribute(model, optimizer)
    marks: list[float] = []
    while not plain or len(marks) <= WARMUP + TIMED:
        optimizer.zero_grad()
        trained(*data).square().mean().backward()
        optimizer.step()
        if plain:
            marks.append(time.perf_counter())
    spans = [b - a for a, b in pairwise(marks[WARMUP:])]
    slowest = torch.tensor([median(spans)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"median {1e3 * float(slowest[0]):.3f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
