# SPDX-License-Identifier: Apache-2.0
"""The models of enforcer_models.py that exchange unequal pieces: tables spread unevenly, mixtures of experts.

With `shuffle` the same samples are dealt to the ranks in another order: sums are then the same but for their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LossOf = Callable[[], torch.Tensor]


class Exchange(torch.autograd.Function):
    """Rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx, rows, gives, takes, group):  # type: ignore[no-untyped-def]
        """Gives and takes so many rows to and from each rank."""
        ctx.given = gives, takes, group
        got = rows.new_empty(sum(takes), rows.shape[1])
        dist.all_to_all_single(got, rows.contiguous(), takes, gives, group=group)
        return got

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        """The other way around."""
        gives, takes, group = ctx.given
        got = gradient.new_empty(sum(gives), gradient.shape[1])
        dist.all_to_all_single(got, gradient.contiguous(), gives, takes, group=group)
        return got, None, None, None


def exchanged(rows: torch.Tensor, gives: list[int], takes: list[int], group: Any) -> torch.Tensor:
    got: torch.Tensor = Exchange.apply(rows, gives, takes, group)  # type: ignore[no-untyped-call]
    return got


def build_tables(group: Any, shuffle: int, shape: dict[str, int]) -> tuple[nn.Module, LossOf]:
    """Every second rank has more tables; the perceptron above them is copied. Sizes are unequal, and do not change."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 + rank)
    counts = [shape["tables"] * (1 + at % 2) for at in range(ranks)]
    tables = nn.ModuleList([nn.Embedding(shape["rows"], shape["width"]) for _ in range(counts[rank])])
    torch.manual_seed(1)
    inputs, hidden = sum(counts) * shape["width"], shape["hidden"]
    plain = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
    top = DistributedDataParallel(nn.Sequential(plain, nn.Linear(hidden, 1)), process_group=group, bucket_cap_mb=1)
    samples = shape["batch"]
    drawn = torch.Generator().manual_seed(7)
    ids = torch.randint(0, shape["rows"], (sum(counts), ranks, samples), generator=drawn)
    ids = ids[sum(counts[:rank]) : sum(counts[: rank + 1])].roll(-shuffle, dims=1).reshape(counts[rank], -1)

    def loss() -> torch.Tensor:
        rows = torch.stack([table(mine) for table, mine in zip(tables, ids, strict=True)], 1)
        gives, takes = [samples * counts[rank]] * ranks, [samples * count for count in counts]
        got = exchanged(rows.reshape(-1, shape["width"]), gives, takes, group)
        features = [part.reshape(samples, -1) for part in torch.split(got, takes)]
        found: torch.Tensor = (top(torch.cat(features, 1)) - 1).pow(2).mean()
        return found

    return nn.ModuleList([tables, top]), loss


def build_moe(group: Any, shuffle: int, shape: dict[str, int]) -> tuple[nn.Module, LossOf]:
    """An expert on every rank: how many tokens go to each changes with every batch."""
    rank, ranks, width = dist.get_rank(), dist.get_world_size(), shape["width"]
    torch.manual_seed(1 + rank)
    expert = nn.Linear(width, width)
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Linear(width, shape["hidden"]), nn.ReLU(), nn.Linear(shape["hidden"], width))
    dense = DistributedDataParallel(plain, process_group=group, bucket_cap_mb=1)
    step = 0

    def loss() -> torch.Tensor:
        nonlocal step
        step += 1
        drawn = torch.Generator().manual_seed(step)
        routed = torch.randint(shape["tokens"] // 4, shape["tokens"], (ranks, ranks), generator=drawn)
        routed = routed.roll(-shuffle, dims=0)
        gives, takes = routed[rank].tolist(), routed[:, rank].tolist()
        own = torch.Generator().manual_seed(step * ranks + (rank + shuffle) % ranks)
        tokens = torch.randn(sum(gives), width, generator=own)
        there = exchanged(dense(tokens), gives, takes, group)
        back = exchanged(expert(there), takes, gives, group)
        return (back - tokens).pow(2).mean()

    return nn.ModuleList([expert, dense]), loss


BUILD = {"dlrm_uneven": build_tables, "moe": build_moe}
