# SPDX-License-Identifier: Apache-2.0
"""A small DLRM as it is trained at scale: tables spread over the ranks, perceptrons copied to all of them.

Each rank sends the indices of its batch to the owners of the tables, which look them up for everybody and send the
rows back while the dense features go through their perceptron. The gradients take the same way back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large it is; `tables` and `batch` are per rank."""

    tables: int = 4
    rows: int = 2000
    width: int = 32
    dense: int = 16
    hidden: int = 256
    batch: int = 128


class _Exchange:
    """An all-to-all on its way: started at one place of the model, waited for at another, in both directions."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.work: Any = None
        self.buffer = torch.empty(0)

    def start(self, rows: Tensor) -> None:
        rows = rows.contiguous()  # gradients may come transposed, and gloo fills buffers in the order of memory
        self.buffer = torch.empty_like(rows)
        self.work = dist.all_to_all_single(self.buffer, rows, group=self.group, async_op=True)

    def finish(self) -> Tensor:
        self.work.wait()
        return self.buffer


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, rows: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange.start(rows)
        return rows.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        return None, ctx.exchange.finish()


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: _Exchange, token: Tensor) -> Tensor:
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.exchange.start(grads[0])
        return None, grads[0].new_zeros(1)


class DLRM(nn.Module):
    """This rank's part of the model: its own tables, and its copy of the perceptrons."""

    def __init__(self, shape: Shape, *, bucket_mb: float = 0.25, group: Any = None) -> None:
        super().__init__()
        self.shape, self.group = shape, group
        self.world = dist.get_world_size()
        self.tables = nn.ModuleList(nn.Embedding(shape.rows, shape.width) for _ in range(shape.tables))
        features = shape.tables * self.world + 1
        pairs = features * (features - 1) // 2
        bottom = nn.Sequential(
            nn.Linear(shape.dense, shape.hidden), nn.ReLU(), nn.Linear(shape.hidden, shape.width), nn.ReLU()
        )
        top = nn.Sequential(
            nn.Linear(pairs + shape.width, shape.hidden),
            nn.ReLU(),
            nn.Linear(shape.hidden, shape.hidden),
            nn.ReLU(),
            nn.Linear(shape.hidden, 1),
        )
        self.bottom = DistributedDataParallel(bottom, process_group=group, bucket_cap_mb=bucket_mb)
        self.top = DistributedDataParallel(top, process_group=group, bucket_cap_mb=bucket_mb)

    def forward(self, dense: Tensor, indices: Tensor) -> Tensor:
        """Click logits of this rank's batch; `indices` has one column for each table of the whole model."""
        shape = self.shape
        wanted = indices.view(shape.batch, self.world, shape.tables).transpose(0, 1).contiguous()
        given = torch.empty_like(wanted)
        dist.all_to_all_single(given, wanted, group=self.group)
        rows = torch.stack([table(given[:, :, at]) for at, table in enumerate(self.tables)], dim=2)
        exchange = _Exchange(self.group)
        token = _Start.apply(exchange, rows)  # type: ignore[no-untyped-call]
        x = self.bottom(dense)
        arrived = _Finish.apply(exchange, token)  # type: ignore[no-untyped-call]
        looked_up = arrived.transpose(0, 1).reshape(shape.batch, -1, shape.width)
        features = torch.cat([x.unsqueeze(1), looked_up], dim=1)
        products = features @ features.transpose(1, 2)
        left, right = torch.tril_indices(products.shape[1], products.shape[2], offset=-1)
        logits: Tensor = self.top(torch.cat([x, products[:, left, right]], dim=1))
        return logits.squeeze(1)

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """A random batch of this rank: dense features, indices, clicks."""
        shape = self.shape
        dense = torch.randn(shape.batch, shape.dense, generator=generator)
        indices = torch.randint(shape.rows, (shape.batch, shape.tables * self.world), generator=generator)
        return dense, indices, torch.randint(2, (shape.batch,), generator=generator).float()
