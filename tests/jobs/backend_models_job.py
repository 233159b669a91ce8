# SPDX-License-Identifier: Apache-2.0
"""Training as people write it: DDP, FSDP2, HSDP, DTensor, pipelines and checkpoints, on four ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from backend_scenarios import digest, is_stretto, run
from models.dlrm import DLRM
from models.dlrm import Shape as DlrmShape
from models.gpt import GPT, distributed, sharded
from models.gpt import Shape as GptShape
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

GPT_SHAPE = GptShape(vocabulary=64, context=16, width=32, heads=2, layers=2, batch=2)


def train(model: nn.Module, batch: Any, steps: int = 3) -> list[float]:
    """The losses of a few steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = batch(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def gpt_losses(how: str) -> list[float]:
    """A GPT's losses on this rank's own batch."""
    model = GPT(GPT_SHAPE)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = model.batch(generator)
    return train(distributed(model, how, bucket_mb=0.05), lambda m: m(tokens))


def ddp() -> Any:
    """Copies, gradients in buckets."""
    return gpt_losses("ddp")


def ddp_with_unused_and_buffers() -> Any:
    """Parameters that some ranks do not use, buffers that are broadcast, uneven inputs joined."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
            x = self.norm(self.first(x))
            return (self.second(x) if both else x).square().mean()

    rank = dist.get_rank()
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank))
    losses = train(model, lambda m: m(data, rank % 2 == 0))
    plain = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    with plain.join():
        for _ in range(1 + rank % 2):
            optimizer.zero_grad()
            plain(data).square().mean().backward()
            optimizer.step()
    return [*losses, float(sum(p.double().sum() for p in plain.parameters()))]


def ddp_with_sparse_tables() -> Any:
    """Two sparse tables in a model of DDP's; on gloo, where DDP could crash on them, averaged by hand."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items = nn.Embedding(23, 8, sparse=True), nn.Embedding(11, 8, sparse=True)
            self.out = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.out(self.users(x[:, 0]) * self.items(x[:, 1]))
            return out

    net: nn.Module = Net()
    model = DistributedDataParallel(net, bucket_cap_mb=0.001) if is_stretto() else net
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        pairs = torch.stack([torch.randint(0, n, (6,), generator=generator) for n in (23, 11)], 1)
        optimizer.zero_grad()
        (model(pairs) - 0.3).square().mean().backward()
        for p in () if is_stretto() else model.parameters():
            assert p.grad is not None
            p.grad = p.grad.to_dense()
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
    return [float(v) for p in net.parameters() for v in p.detach().flatten()[:50]]


def ddp_with_power_sgd() -> Any:
    """PyTorch's own hook: its callbacks submit sums, and wait for their futures."""
    model = GPT(GPT_SHAPE)
    tokens = model.batch(torch.Generator().manual_seed(dist.get_rank()))
    parallel: Any = distributed(model, "ddp")
    state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(parallel, lambda m: m(tokens), steps=5)


def nested_futures() -> Any:
    """A callback waits for the future of another call; dense sums are for the executor, sparse ones for gloo."""
    found = []
    for sparse in (False, True):

        def started(sparse: bool = sparse) -> Any:
            tensor = torch.arange(4.0)
            # Plain gloo has two workers, which may not end sparse sums side by side.
            return dist.all_reduce(tensor.to_sparse() if sparse and is_stretto() else tensor, async_op=True)

        def again(_: Any, started: Any = started) -> Any:
            return started().get_future().wait()

        (total,) = started().get_future().then(again).wait()
        found.append((total.to_dense() if total.is_sparse else total).tolist())
    return found


def fsdp() -> Any:
    """Shards."""
    return gpt_losses("fsdp")


def hsdp() -> Any:
    """Shards in rows, copies over columns."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = GPT(GPT_SHAPE)
    generator = torch.Generator().manual_seed(dist.get_rank())
    tokens = model.batch(generator)
    return train(sharded(model, mesh), lambda m: m(tokens))


def dlrm() -> Any:
    """Tables spread over the ranks, perceptrons copied."""
    shape = DlrmShape(tables=2, rows=50, width=8, hidden=16, batch=8)
    model = DLRM(shape)
    dense, indices, clicks = model.batch(torch.Generator().manual_seed(dist.get_rank()))
    return train(model, lambda m: functional.binary_cross_entropy_with_logits(m(dense, indices), clicks))


def dtensor() -> Any:
    """Every redistribution over one mesh, then over two dimensions."""
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2))
    square = torch.arange(8 * 12, dtype=torch.float32).reshape(8, 12)
    ragged = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)
    found = []
    for tensor in (square, ragged):
        for source in (Shard(0), Shard(1), Replicate()):
            for target in (Shard(0), Shard(1), Replicate()):
                placed = distribute_tensor(tensor, line, [source])
                found.append(placed.redistribute(line, [target]).to_local())
        partial = DTensor.from_local(tensor.clone(), line, [Partial()])
        found += [partial.redistribute(line, [target]).to_local() for target in (Shard(0), Shard(1), Replicate())]
        both = distribute_tensor(tensor, grid, [Shard(0), Shard(1)])
        found.append(both.redistribute(grid, [Replicate(), Shard(0)]).to_local())
        found.append(both.full_tensor())
    left = distribute_tensor(square, line, [Shard(0)])
    right = distribute_tensor(square.t().contiguous(), line, [Replicate()])
    found.append(whole(left @ right))
    return digest(found)


def pipeline() -> Any:
    """Two pipelines of two stages, 1F1B, their gradients summed."""
    rank = dist.get_rank()
    stage_of, column = rank % 2, rank // 2
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    copies = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(7 + stage_of)
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    stage = PipelineStage(module, stage_of, 2, torch.device("cpu"), group=pairs[column])
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=functional.mse_loss)
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(column))
    losses: list[torch.Tensor] = []
    if stage_of == 0:
        schedule.step(data)
    else:
        schedule.step(target=data * 0.5, losses=losses)
    for parameter in module.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=copies[stage_of])
    gradient = sum(float(p.grad.double().sum()) for p in module.parameters() if p.grad is not None)
    for group in (*pairs, *copies):
        dist.destroy_process_group(group)
    return [gradient, *(float(loss.detach()) for loss in losses)]


def whole(parameter: torch.Tensor) -> torch.Tensor:
    """A sharded parameter in one piece."""
    assert isinstance(parameter, DTensor)
    return parameter.full_tensor()


def checkpoints() -> Any:
    """A sharded model, saved and loaded into another one."""
    folder = Path(sys.argv[1]) / f"checkpoint-{dist.get_backend()}"
    model = distributed(GPT(GPT_SHAPE), "fsdp")
    state = {"model": model.state_dict()}
    save(state, checkpoint_id=str(folder))
    torch.manual_seed(99)
    other = distributed(GPT(GPT_SHAPE), "fsdp")
    loaded = {"model": other.state_dict()}
    load(loaded, checkpoint_id=str(folder))
    other.load_state_dict(loaded["model"])
    before, after = ([whole(p) for p in m.parameters()] for m in (model, other))
    assert digest(before) == digest(after)
    return digest(after)


SCENARIOS = (
    ddp, ddp_with_unused_and_buffers, ddp_with_sparse_tables, ddp_with_power_sgd, nested_futures, fsdp, hsdp, dlrm,
    dtensor, pipeline, checkpoints,
)  # fmt: skip

if __name__ == "__main__":
    run({scenario.__name__: scenario for scenario in SCENARIOS})
