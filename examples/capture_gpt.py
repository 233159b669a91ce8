# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT on CPU ranks with DDP or FSDP2 and record its training step as a workload.

torchrun --nproc-per-node 2 examples/capture_gpt.py gpt.yaml --how fsdp
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from models.gpt import GPT, Shape, distributed

import stretto.torch


def train() -> None:
    """Seven training steps, of which five are recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", help="where rank 0 writes the workload (.yaml or .json)")
    parser.add_argument("--how", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shape = Shape(layers=arguments.layers)
    gpt = GPT(shape)
    model = distributed(gpt, arguments.how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    words = shape.batch * shape.context * dist.get_world_size()
    with stretto.torch.capture(iterations=arguments.iterations, name=f"gpt-{arguments.how}", samples=words) as recorder:
        while not recorder.done:
            loss = model(gpt.batch(generator))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.step()
    if dist.get_rank() == 0:
        recorder.workload.save(arguments.output)
        print(recorder.workload, *recorder.workload.notes, sep="\n")


def main() -> None:
    """The group ends after the model, which holds on to it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
