# SPDX-License-Identifier: Apache-2.0
"""Models and training loops of the tests of `stretto.torch.distribute`, the same on one process and on many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from stretto.strategy import ModelSpec, NodeConfig, Strategy, Sync
from stretto.strategy.distribute import dense

dense.LARGE_BYTES = 200  # so that these models have large variables too
BATCH = 4
STEPS = 4


class Mlp(nn.Module):
    """Odd sizes, a frozen layer, a scalar, and two data types: the last layer is in 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.frozen = nn.Linear(13, 13)
        self.frozen.requires_grad_(False)
        self.last = nn.Linear(13, 5).double()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ends in 64 bits."""
        x = self.frozen(self.first(x).tanh()) * self.scale
        out: torch.Tensor = self.last(x.double())
        return out


class Conv(nn.Module):
    """Four axes to cut, and a layer that no batch uses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.other = nn.Conv2d(3, 6, 3)
        self.fc = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mean over the picture."""
        conv = self.other if float(x[0, 0, 0, 0]) > 1e9 else self.conv
        out: torch.Tensor = self.fc(conv(x).relu().mean((2, 3)))
        return out


class Tied(nn.Module):
    """A tiny language model whose embedding is also its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.mix = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the next token."""
        out: torch.Tensor = self.out(self.mix(self.embedding(x)))
        return out


class Ncf(nn.Module):
    """Two sparse tables and a small dense part."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(23, 5, sparse=True)
        self.items = nn.Embedding(17, 4, sparse=True)
        self.mlp = nn.Sequential(nn.Linear(9, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A score for each pair."""
        out: torch.Tensor = self.mlp(torch.cat([self.users(x[:, 0]), self.items(x[:, 1])], 1))
        return out


class Mixed(nn.Module):
    """All at once: a sparse table used twice, tied words, a frozen layer, two data types."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(23, 4, sparse=True)
        self.frozen = nn.Linear(4, 6).requires_grad_(False)
        self.words = nn.Embedding(11, 6).double()
        self.mix = nn.Linear(12, 6).double()
        self.out = nn.Linear(6, 11, bias=False).double()
        self.out.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of words, in 64 bits."""
        who = self.frozen(self.users(x[:, 0]) + self.users(x[:, 1])).double()
        out: torch.Tensor = self.out(self.mix(torch.cat([who, self.words(x[:, 1])], 1)).tanh())
        return out


MODELS: dict[str, type[nn.Module]] = {"mlp": Mlp, "conv": Conv, "tied": Tied, "ncf": Ncf, "mixed": Mixed}


def batch(name: str, step: int, rank: int) -> torch.Tensor:
    """What a rank trains on in a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if name == "tied":
        return torch.randint(0, 11, (BATCH, 6), generator=generator)
    if name in ("ncf", "mixed"):
        counts = (23, 17) if name == "ncf" else (23, 11)
        return torch.stack([torch.randint(0, n, (BATCH,), generator=generator) for n in counts], 1)
    shape = (BATCH, 7) if name == "mlp" else (BATCH, 3, 6, 6)
    return torch.randn(shape, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A mean over samples, so that the mean over ranks is the mean over the whole batch."""
    loss: torch.Tensor = (model(x) - 0.3).square().mean()
    return loss


def made(name: str) -> nn.Module:
    """The model with the weights that everyone begins with."""
    torch.manual_seed(5)
    # Attention has gradients that are zero but for rounding, and Adam makes steps of them: there in 64 bits.
    model = MODELS[name]()
    return model.double() if name == "tied" else model


def optimizer_of(name: str, model: nn.Module, kind: str = "") -> torch.optim.Optimizer:
    """Adam with weight decay for dense models, SGD for sparse ones, one with momentum; `kind` names another."""
    kind = kind or {"ncf": "sgd", "mixed": "momentum"}.get(name, "adamw")
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.5)
    if kind == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    if kind == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=0.1)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


def alone(name: str, ranks: int, *, kind: str = "", steps: int = STEPS, clip: float = 0.0) -> list[float]:
    """The weights after training on all ranks' batches in one process."""
    model = made(name)
    optimizer = optimizer_of(name, model, kind)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, torch.cat([batch(name, step, rank) for rank in range(ranks)])).backward()  # type: ignore[no-untyped-call]
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return weights(model)


def weights(model: nn.Module) -> list[float]:
    """All parameters, in one list."""
    found: list[float] = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).tolist()
    return found


def strategies(spec: ModelSpec, devices: tuple[str, ...]) -> Iterator[tuple[str, Strategy]]:
    """Strategies that no builder makes: mixed kinds in one variable, sequences, stations, lossless encodings."""

    def strategy(name: str, node: Callable[[Any], NodeConfig]) -> tuple[str, Strategy]:
        nodes = tuple(node(v) for v in spec.variables)
        made = Strategy(name=name, model=spec.name, model_digest=spec.digest, devices=devices, nodes=nodes)
        return name, made

    def mixed(v: Any) -> NodeConfig:
        if not v.shape or v.shape[-1] < 3:
            return NodeConfig(variable=v.name, sync=Sync(kind="parameter_server", placement=(devices[-1],)))
        cut: tuple[Any, ...] = (*(1,) * (len(v.shape) - 1), (1, v.shape[-1] - 2, 1))
        server = Sync(kind="parameter_server", placement=(devices[0],))
        return NodeConfig(variable=v.name, partition=cut, parts=(Sync(group=1), server, Sync(group=1)))

    def ordered(v: Any) -> NodeConfig:
        return NodeConfig(variable=v.name, sync=Sync(sequence=devices[::-1], group=0))

    def two_level(v: Any) -> NodeConfig:
        if v.sparse:
            sync = Sync(kind="parameter_server", placement=(devices[1],), transfer=(devices[1], devices[2]), group=2)
        else:
            sync = Sync(transfer=(devices[0], devices[2]), group=len(v.name) % 3)
        return NodeConfig(variable=v.name, sync=sync)

    def factors(v: Any) -> NodeConfig:
        kind = "sparse_all_gather" if v.sparse else "all_reduce"
        fits = len(v.shape) == 2 and not v.sparse and not v.also and "_proj" not in v.name
        encoder = "sufficient_factors" if fits else "none"
        return NodeConfig(variable=v.name, sync=Sync(kind=kind, encoder=encoder))

    yield strategy("mixed", mixed)
    yield strategy("ordered", ordered)
    yield strategy("two_level", two_level)
    yield strategy("factors", factors)
