# SPDX-License-Identifier: Apache-2.0
"""Train on some ranks and serve on the others: FSDP2 over half of them, tensor parallelism over the other half.

torchrun --nproc-per-node 4 examples/sync_weights.py
stretto lab run --hosts 2 --ranks 2 --uplink eth=100mbit -- python examples/sync_weights.py

After every step the servers get the new weights as one version, and answer with them what the trained model answers.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import stretto.torch


def main() -> None:
    """Some steps, each with a sync; servers print the loss that they compute for themselves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    width = options.width
    dist.init_process_group("gloo")
    rank, half = dist.get_rank(), dist.get_world_size() // 2
    trainers, servers = (DeviceMesh("cpu", ranks) for ranks in (list(range(half)), list(range(half, 2 * half))))
    torch.manual_seed(0)
    x, y = torch.randn(2, 64, width).unbind()
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    if rank < half:
        fully_shard(model, mesh=trainers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = stretto.torch.WeightSync(source=model.state_dict())
        for _ in range(options.steps):
            torch.autograd.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            sync.update()
    else:
        parallelize_module(model, servers, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        sync = stretto.torch.WeightSync(target=model.state_dict())
        for _ in range(options.steps):
            sync.update()
            with sync.read() as weights, torch.no_grad():
                loss = nn.functional.mse_loss(torch.func.functional_call(model, dict(weights), x), y)
            if rank == half:
                print(f"version {sync.version}: loss {float(loss):.4f}", flush=True)
    sync.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
