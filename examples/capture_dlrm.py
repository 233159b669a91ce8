# SPDX-License-Identifier: Apache-2.0
"""Train a small hybrid-parallel DLRM on CPU ranks and record its training step as a workload.

torchrun --nproc-per-node 2 examples/capture_dlrm.py dlrm.yaml
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from models.dlrm import DLRM, Shape
from torch.nn import functional

import stretto.torch


def train() -> None:
    """Seven training steps, of which five are recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", help="where rank 0 writes the workload (.yaml or .json)")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--tables", type=int, default=Shape.tables, help="embedding tables of each rank")
    parser.add_argument("--batch", type=int, default=Shape.batch, help="samples of each rank")
    arguments = parser.parse_args()
    torch.manual_seed(dist.get_rank())
    shape = Shape(tables=arguments.tables, batch=arguments.batch)
    model = DLRM(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    samples = shape.batch * dist.get_world_size()
    with stretto.torch.capture(iterations=arguments.iterations, name="dlrm", samples=samples) as recorder:
        while not recorder.done:
            dense, indices, clicks = model.batch(generator)
            loss = functional.binary_cross_entropy_with_logits(model(dense, indices), clicks)
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
