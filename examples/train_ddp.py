# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT with DistributedDataParallel: gradients in buckets, an all-reduce for each.

torchrun --nproc-per-node 4 examples/train_ddp.py --backend stretto
"""

from __future__ import annotations

from models.gpt import GPT, Shape, distributed
from train_job import arguments, join, leave
from train_loop import data_of_this_rank, train


def main() -> None:
    """The loss goes down; the time is what the backend makes of it."""
    options = arguments(__doc__).parse_args()
    join(options.backend)
    model = GPT(Shape(width=options.width, batch=options.batch))
    tokens = model.batch(data_of_this_rank(options.shuffle))
    train(distributed(model, "ddp"), lambda parallel: parallel(tokens), options.iterations)
    leave(options.choices)


if __name__ == "__main__":
    main()
