# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training as any tutorial has it: plain PyTorch, and nothing of Stretto.

torchrun --nproc-per-node 2 examples/train_unchanged.py
stretto run -- torchrun --nproc-per-node 2 examples/train_unchanged.py
"""

import argparse
import itertools
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train(options: argparse.Namespace) -> None:
    """Learn a random function with a multilayer perceptron."""
    layers: list[nn.Module] = [nn.Linear(32, options.width), nn.ReLU()]
    for _ in range(options.layers - 2):
        layers += [nn.Linear(options.width, options.width), nn.ReLU()]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(options.width, 1)), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(4096, 32)
    data = TensorDataset(inputs, inputs.sin().sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data), num_workers=options.workers)

    begun = time.perf_counter()
    for batch, wanted in itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), options.steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), wanted)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        each_ms = 1e3 * (time.perf_counter() - begun) / options.steps
        print(f"{options.steps} steps, {each_ms:.2f} ms each, loss {loss.item():.6f}")


def main() -> None:
    """The group ends after the model, which holds on to it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
