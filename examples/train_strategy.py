# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT as a strategy says: how each parameter is cut, placed, synchronised and encoded.

torchrun --nproc-per-node 4 examples/train_strategy.py --builder partitioned_ps
torchrun --nproc-per-node 4 examples/train_strategy.py --strategy strategy.yaml
stretto tune -- torchrun --nproc-per-node 4 examples/train_strategy.py
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from models.gpt import GPT, Shape
from train_job import arguments, join, leave
from train_loop import data_of_this_rank

import stretto.torch
from stretto.strategy import BUILDERS, build


def main() -> None:
    """The loss goes down alike with every strategy that loses nothing; the time is what the strategy makes of it."""
    parser = arguments(__doc__)
    parser.add_argument("--strategy", default=None, help="a strategy's file; without, STRETTO_STRATEGY or all-reduce")
    parser.add_argument("--builder", choices=sorted(BUILDERS), default=None, help="or what a builder makes")
    options = parser.parse_args()
    join(options.backend)
    model = GPT(Shape(width=options.width, batch=options.batch))
    tokens = model.batch(data_of_this_rank(options.shuffle))
    strategy = options.strategy
    if options.builder:
        strategy = build(options.builder, stretto.torch.model_spec(model), dist.get_world_size())
    net, optimizer = stretto.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy)
    losses, times = [], []
    for _ in range(options.iterations):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = net(tokens)
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    if dist.get_rank() == 0:
        print(f"strategy {optimizer.strategy.name}, backend {dist.get_backend()}, {dist.get_world_size()} ranks")
        print(f"loss {' '.join(f'{loss:.9f}' for loss in losses)}")
        late = times[min(3, len(times) - 1) :]
        print(f"iteration {1e3 * statistics.median(late):.2f} ms (median of {len(late)})")
    optimizer.close()
    leave(options.choices)


if __name__ == "__main__":
    main()
