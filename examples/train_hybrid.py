# SPDX-License-Identifier: Apache-2.0
"""Train a small DLRM: embedding tables spread over the ranks (all-to-all), perceptrons copied to all (all-reduce).

torchrun --nproc-per-node 4 examples/train_hybrid.py --backend stretto
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from models.dlrm import DLRM, Shape
from torch import nn
from torch.nn import functional
from train_job import arguments, join, leave
from train_loop import data_of_this_rank, train


def train_here(options: argparse.Namespace) -> None:
    """Train the model of this rank."""
    torch.manual_seed(dist.get_rank())
    model = DLRM(Shape(hidden=2 * options.width, batch=options.batch))
    dense, indices, clicks = model.batch(data_of_this_rank(options.shuffle))

    def loss_of(model: nn.Module) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(model(dense, indices), clicks)

    train(model, loss_of, options.iterations)


def main() -> None:
    """The loss goes down; the time is what the backend makes of it."""
    options = arguments(__doc__).parse_args()
    join(options.backend)
    train_here(options)
    leave(options.choices)


if __name__ == "__main__":
    main()
