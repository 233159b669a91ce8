"""One rank of benchmarks/strategy.py: a model of a known shape, scaled down, under DDP or under a strategy.

``strategy_rank.py MODEL serve FOLDER`` runs one request after the other, so that a trial costs its iterations only;
``strategy_rank.py MODEL train`` is a plain training script for ``stretto tune``.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import stretto
from stretto.strategy.files import model_text, read_strategy

Batch = tuple[torch.Tensor, ...]


class Conv(nn.Sequential):
    """VGG16-shaped: little in convolutions, nearly everything in three linear layers."""

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
    """ResNet-shaped: many convolutions of similar size with normalisation between them."""

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
    """BERT-shaped: an embedding with a third of all parameters, encoders of four square matrices and two long ones."""

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
    """NCF-shaped: four tables with nearly all parameters, and a small perceptron."""

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
    "vgg16": (Conv, _images(32, 4)),
    "resnet": (Residual, _images(16, 4)),
    "bert": (lambda: Language(False), lambda: (torch.randint(3000, (4, 32)),)),
    "bert_sparse": (lambda: Language(True), lambda: (torch.randint(3000, (4, 32)),)),
    "ncf": (lambda: Recommender(False), lambda: (torch.randint(8000, (256,)), torch.randint(4000, (256,)))),
    "ncf_sparse": (lambda: Recommender(True), lambda: (torch.randint(8000, (256,)), torch.randint(4000, (256,)))),
}


def main() -> None:
    """Serve requests, or train until told to end."""
    torch.set_num_threads(1)
    if sys.argv[2] == "serve":
        serve(sys.argv[1], Path(sys.argv[3]))
        return
    dist.init_process_group("gloo")
    measured(sys.argv[1], {"system": "stretto", "warmup": 0, "timed": 1_000_000})


def serve(name: str, folder: Path) -> None:
    """Run what is asked for in files ``0.json``, ``1.json``, ... until one asks for nothing."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    for number in count():
        asked: list[Any] = [None]
        if dist.get_rank() == 0:
            path = folder / f"{number}.json"
            while not path.exists():
                time.sleep(0.005)
            asked = [json.loads(path.read_text())]
        dist.broadcast_object_list(asked)
        if not asked[0]:
            break
        answer = measured(name, asked[0])
        if dist.get_rank() == 0:
            beside = folder / ".answer"
            beside.write_text(json.dumps(answer))
            beside.replace(folder / f"{number}.answer")
    dist.destroy_process_group()


def measured(name: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The slowest rank's median iteration, from the same weights and the same data every time."""
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make()
    torch.manual_seed(1 + dist.get_rank())
    data = batch()
    if asked["system"] == "describe":
        return {"model": model_text(stretto.model_spec(model, data), as_json=True)}
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    trained: nn.Module = model
    if asked["system"] == "stretto":
        strategy = read_strategy(asked["strategy"], as_json=True) if "strategy" in asked else None
        trained, optimizer = stretto.distribute(model, optimizer, strategy)
    else:
        trained = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=asked["bucket_mb"])
    marks: list[float] = []
    while len(marks) <= asked["warmup"] + asked["timed"]:
        optimizer.zero_grad()
        trained(*data).square().mean().backward()
        optimizer.step()
        marks.append(time.perf_counter())
    spans = [1e6 * (b - a) for a, b in pairwise(marks[asked["warmup"] :])]
    slowest = torch.tensor([median(spans)], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if asked["system"] == "stretto":
        optimizer.close()
    return {"median_us": float(slowest[0])}


if __name__ == "__main__":
    main()
