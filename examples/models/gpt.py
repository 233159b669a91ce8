# SPDX-License-Identifier: Apache-2.0
"""A small GPT, and its two usual ways to be trained by many ranks: DDP and FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How large it is; `batch` is per rank."""

    vocabulary: int = 512
    context: int = 64
    width: int = 128
    heads: int = 4
    layers: int = 3
    batch: int = 4


class Block(nn.Module):
    """Causal attention and a perceptron, each around a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape again."""
        batch, context, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        moved: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return moved


class GPT(nn.Module):
    """Predicts the next token."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean loss over a batch of sequences, each one token longer than the context."""
        x = self.tokens(tokens[:, :-1]) + self.positions(torch.arange(self.shape.context))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def batch(self, generator: torch.Generator) -> Tensor:
        """Random sequences for one rank."""
        shape = self.shape
        return torch.randint(shape.vocabulary, (shape.batch, shape.context + 1), generator=generator)


def distributed(model: GPT, how: str, *, bucket_mb: float = 0.5, group: Any = None) -> nn.Module:
    """The model wrapped for data-parallel training: ``ddp`` (copies) or ``fsdp`` (shards)."""
    if how == "ddp":
        return DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb)
    mesh = None if group is None else DeviceMesh.from_group(group, "cpu")
    return sharded(model, mesh)


def sharded(model: GPT, mesh: DeviceMesh | None = None) -> nn.Module:
    """The model with its parameters in shards; in two dimensions the first one of `mesh` has copies of them."""
    for part in (*model.blocks, model):
        made: Any = fully_shard(part, mesh=mesh)
        if dist.get_backend() == "gloo":
            # Asked for an average, gloo of PyTorch 2.8 gives the sum.
            made.set_force_sum_reduction_for_comms(True)
    return model
