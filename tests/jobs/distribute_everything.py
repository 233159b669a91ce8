# SPDX-License-Identifier: Apache-2.0
"""The model of the generated test: every kind of parameter, used in every way that a script may use one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

BATCH = 4


class Batch(NamedTuple):
    """What a rank trains on in a step; `some` and `pausing` say whether those layers are used."""

    x: torch.Tensor
    picture: torch.Tensor
    ids: torch.Tensor
    few: torch.Tensor
    some: bool
    pausing: bool

    def halves(self) -> list[Batch]:
        """Two batches of half the size."""
        whole = (self.x, self.picture, self.ids, self.few)
        parts = zip(*(one.chunk(2) for one in whole), strict=True)
        return [Batch(x, picture, ids, few, self.some, self.pausing) for x, picture, ids, few in parts]


def batch(step: int, rank: int) -> Batch:
    """The batch of a step and a rank: layer `some` is used on rank 1 only, `pausing` not in step 1."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return Batch(
        torch.randn(BATCH, 7, generator=generator, dtype=torch.float64),
        torch.randn(BATCH, 2, 3, 3, generator=generator, dtype=torch.float64),
        torch.randint(0, 9, (BATCH,), generator=generator),
        torch.randint(0, 5, (BATCH,), generator=generator),
        rank == 1,
        step != 1,
    )  # fmt: skip


class Everything(nn.Module):
    """Linear layers, a convolution in channels_last, three axes, a scalar, transposed memory, tables, tied words, a
    frozen layer, layers that some ranks, some steps or nobody uses, and up to three other data types.

    With `linear` the loss is linear in every parameter, so that gradients do not depend on weights.
    """

    def __init__(self, *, sparse: bool, mixed: int, linear: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = linear
        self.first, self.mix = nn.Linear(7, 6), nn.Linear(6, 5)
        self.conv = nn.Conv2d(2, 3, 2)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.cube = nn.Parameter(torch.randn(3, 4, 2))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(5, 4).t())
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.table, self.rows = nn.Embedding(9, 4, sparse=sparse), nn.Embedding(5, 3, sparse=sparse)
        self.words = nn.Embedding(9, 5)
        self.out = nn.Linear(5, 9, bias=False)
        self.out.weight = self.words.weight
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.some, self.pausing, self.nobody = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(3, 2)
        self.double()
        self.singles = nn.ParameterList()
        for dtype in (torch.float32, torch.bfloat16, torch.float16)[:mixed]:
            self.singles.append(nn.Parameter(torch.randn(4, 3).to(dtype)))

    def forward(self, data: Batch) -> torch.Tensor:
        """The loss itself."""
        return self._linear(data) if self.linear else self._deep(data)

    def _deep(self, data: Batch) -> torch.Tensor:
        y = self.mix(self.first(data.x).tanh())
        y = y + self.some(y) if data.some else y
        y = y + self.pausing(y) if data.pausing else y
        scores = self.out((self.frozen(y) + self.words(data.ids)).tanh())
        loss = scores.square().mean() * self.scale
        loss = loss + self.conv(data.picture).tanh().square().mean() + (data.x[:, :4] @ self.turned).tanh().mean()
        loss = loss + (self.cube * data.x[0, :2]).tanh().mean() + (self.table(data.ids) * data.x[:, :4]).tanh().mean()
        loss = loss + (self.rows(data.few) * data.x[:, :3]).tanh().mean()
        # Apart from the rest: what is rounded here must not be felt there.
        for single in self.singles:
            loss = loss + (single.double() * data.x[0, :3]).tanh().mean()
        out: torch.Tensor = loss
        return out

    def _linear(self, data: Batch) -> torch.Tensor:
        factor = data.x.mean()
        loss = (self.table(data.ids) * data.x[:, :4]).mean() + (self.rows(data.few) * data.x[:, :3]).mean()
        tables = {id(self.table.weight), id(self.rows.weight)}
        unused = {id(p) for p in self.nobody.parameters()}
        unused |= set() if data.some else {id(p) for p in self.some.parameters()}
        unused |= set() if data.pausing else {id(p) for p in self.pausing.parameters()}
        for number, p in enumerate(self.parameters()):
            if id(p) not in tables | unused and p.numel():
                wave = torch.linspace(-1.0, 1.0 + number, p.numel(), dtype=torch.float64).view(p.shape)
                loss = loss + (p.double() * (wave * factor + data.x[0, 0])).sum()
        out: torch.Tensor = loss
        return out


def optimizer_of(model: Everything, kind: str) -> torch.optim.Optimizer:
    """An optimizer with two groups of different options."""
    if kind == "sparse_adam":
        return torch.optim.SparseAdam([model.table.weight, model.rows.weight], lr=0.05)
    tables = [model.table.weight, model.rows.weight]
    ours = {id(p) for p in tables}
    rest = [p for p in model.parameters() if id(p) not in ours]
    groups: list[dict[str, Any]] = [{"params": rest, "lr": 0.03}, {"params": tables}]
    made: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(groups, lr=0.05),
        "momentum": lambda: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
        "nesterov": lambda: torch.optim.SGD(groups, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1),
        "adagrad": lambda: torch.optim.Adagrad(groups, lr=0.05, lr_decay=0.1),
        "adam": lambda: torch.optim.Adam(groups, lr=0.02),
        "amsgrad": lambda: torch.optim.Adam(groups, lr=0.02, amsgrad=True, weight_decay=0.1),
        "adamw": lambda: torch.optim.AdamW(groups, lr=0.02),
        "adadelta": lambda: torch.optim.Adadelta(groups, lr=0.5),
        "adamax": lambda: torch.optim.Adamax(groups, lr=0.02),
        "nadam": lambda: torch.optim.NAdam(groups, lr=0.02),
        "radam": lambda: torch.optim.RAdam(groups, lr=0.02),
        "rmsprop": lambda: torch.optim.RMSprop(groups, lr=0.01, momentum=0.5, centered=True),
        "rprop": lambda: torch.optim.Rprop(groups, lr=0.01),
        "asgd": lambda: torch.optim.ASGD(groups, lr=0.05),
        "adafactor": lambda: torch.optim.Adafactor(groups, lr=0.02),
    }
    found: torch.optim.Optimizer = made[kind]()
    return found
