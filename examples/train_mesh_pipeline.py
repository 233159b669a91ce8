# SPDX-License-Identifier: Apache-2.0
"""Train in two stages on meshes of different shapes: (2, 1), data parallel, then (1, 2), tensor parallel.

torchrun --nproc-per-node 4 examples/train_mesh_pipeline.py --schedule eager_1f1b
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

from stretto.pipeline import MAKERS, make
from stretto.torch import MeshPipeline, StageMesh

MICROBATCHES, ROWS, WIDTH = 8, 16, 256


def tensor_parallel(name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the first layer by outputs and the second by inputs over the mesh's second axis."""
    if isinstance(layer, nn.Linear):
        cut = Shard(0) if name == "0" else Shard(1)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Replicate(), cut]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=sorted({*MAKERS} - {"interleaved"}), default="eager_1f1b")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    dp, tp = DeviceMesh("cpu", [[0], [1]]), DeviceMesh("cpu", [[2, 3]])
    stages = [StageMesh(mesh=dp, inputs=[Shard(0), Replicate()]), StageMesh(mesh=tp, inputs=[Shard(0), Replicate()])]
    last = dist.get_rank() >= 2
    torch.manual_seed(int(last))
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    module = distribute_module(layers, tp if last else dp, tensor_parallel if last else None)
    schedule = make(options.schedule, 2, MICROBATCHES)
    pipe = MeshPipeline(module, stages, schedule, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    inputs, targets = torch.randn(2, MICROBATCHES, ROWS, WIDTH, generator=torch.manual_seed(7))
    for step in range(5):
        begin = time.perf_counter()
        losses = pipe.step(list(inputs), list(targets))
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 3:
            took_ms = 1e3 * (time.perf_counter() - begin)
            print(f"step {step}: {took_ms:.1f} ms, loss {torch.stack(losses).mean():.6f}", flush=True)
    pipe.close()
    dist.destroy_process_group()
