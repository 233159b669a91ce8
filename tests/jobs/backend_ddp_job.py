# SPDX-License-Identifier: Apache-2.0
"""DDP on gloo, plain and with our communication hook; jobs that lose a rank."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP needs it: imported once, before the forks
import torch.distributed as dist
from backend_faults_job import told
from capture_scenarios import _start, fork
from enforcer_plans import cluster_of, step_of, variant_plans
from torch.nn.parallel import DistributedDataParallel

import stretto.torch

STEPS = 4


class Net(torch.nn.Module):
    """Several buckets: the layers are larger than a bucket may be."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


def whole_numbers(model: torch.nn.Module) -> None:
    """Parameters such that gradients of whole inputs are small whole numbers."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.dtype))


def trained(hook: stretto.torch.DdpHook | None, *, dtype: torch.dtype = torch.float32, **options: Any) -> list[Any]:
    """The losses of some steps, and every 7th of the last gradients."""
    torch.manual_seed(3)
    width = 16 if dtype == torch.bfloat16 else 64
    model = Net(width).to(dtype)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02, **options)
    if hook is not None:
        ddp.register_comm_hook(hook, stretto.torch.ddp_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(8, width, generator=generator).to(dtype)
        optimizer.zero_grad()
        loss = ddp(x).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = [p.grad.flatten()[::7] for p in model.parameters() if p.grad is not None]
    return [losses, torch.cat(gradients).float().tolist()]


def exact(hook: stretto.torch.DdpHook | None, *, steps: int = 3, **options: Any) -> list[Any]:
    """The gradients of a sum over whole numbers, bit for bit, through a rebuild of buckets; and the buckets' sizes."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20))
    whole_numbers(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, **options)
    sizes: list[int] = []
    if hook is not None:

        def noted(state: stretto.torch.DdpHook, bucket):  # type: ignore[no-untyped-def]  # PyTorch wants types, not text
            sizes.append(bucket.buffer().nbytes)
            return stretto.torch.ddp_hook(state, bucket)

        ddp.register_comm_hook(hook, noted)
    found = []
    for step in range(steps):
        ddp.zero_grad()
        sizes.clear()
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp(torch.randint(0, 3, (4, 40), generator=generator).float()).sum().backward()
        found.append([p.grad.flatten().tolist() for p in model.parameters() if p.grad is not None])
    return [found, sizes]


def planned(carrier: str, sizes: list[int]) -> list[Any]:
    """Every way to carry out a plan of the buckets; the gradients are those of plain DDP."""
    workload = step_of([("all_reduce", float(nbytes), 0) for nbytes in sizes], dist.get_world_size())
    cluster = cluster_of()
    outcomes = []
    for plan in variant_plans(workload, cluster, most=2):
        want, _ = exact(None, steps=6)
        hook = stretto.torch.DdpHook(plan=plan, workload=workload, cluster=cluster, carrier=carrier, every=1)
        with hook:
            got, _ = exact(hook, steps=6)
            assert hook.enforcer is not None
            report = hook.enforcer.report()
            kind = type(hook.enforcer._carrier).__name__
        outcomes.append([got == want, report.number, report.fell_back, kind])
    return outcomes


def joined(hook: stretto.torch.DdpHook | None) -> list[Any]:
    """Ranks with different numbers of batches."""
    model = torch.nn.Linear(10, 10)
    whole_numbers(model)
    ddp = DistributedDataParallel(model)
    if hook is not None:
        ddp.register_comm_hook(hook, stretto.torch.ddp_hook)
    with ddp.join():
        for _ in range(2 + dist.get_rank()):
            ddp(torch.ones(3, 10)).sum().backward()
    return [] if model.weight.grad is None else model.weight.grad.flatten().tolist()


def both(run: Callable[..., Any], hook: stretto.torch.DdpHook, **options: Any) -> list[Any]:
    """Without and with the hook."""
    return [run(None, **options), run(hook, **options)]


def whole_job(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """All that goes well, in one job."""
    os.environ["STRETTO_CHANNELS"] = "rdma=lo;eth=lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    outcomes: dict[str, Any] = {}
    with stretto.torch.DdpHook() as hook:
        outcomes["fractions"] = both(trained, hook)
        outcomes["views"] = both(trained, hook, gradient_as_bucket_view=True)
        outcomes["static"] = both(trained, hook, static_graph=True)
        outcomes["bfloat16"] = both(trained, hook, dtype=torch.bfloat16)
        (outcomes["exact"], _), (hooked, sizes) = both(exact, hook)
        outcomes["exact"] = [outcomes["exact"], hooked]
        outcomes["buckets"] = len(sizes)
        outcomes["joined"] = both(joined, hook)
        ours = [choice for choice in stretto.torch.choices() if choice.op == "all_reduce"]
        outcomes["ran"] = [sorted({choice.backend for choice in ours}), sum(choice.calls for choice in ours)]
    # The user's backend is what it was.
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    outcomes["afterwards"] = [dist.get_backend(), float(tensor[0])]
    half = [r for r in range(ranks) if r % 2 == rank % 2]
    group = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    with stretto.torch.DdpHook(group) as hook:
        gradients = torch.full((1000,), float(rank))
        hook.reduce(gradients).wait()
        outcomes["some"] = [float(gradients[0]), sum(half) / len(half)]
    # Members that are in different numbers of other groups, and two hooks over the same ranks.
    alone = [dist.new_group([rank], use_local_synchronization=True) for _ in range(rank)]
    with stretto.torch.DdpHook(group) as hook, stretto.torch.DdpHook(group) as other:
        sums = []
        for one in (hook, other):
            gradients = torch.full((1000,), float(rank))
            one.reduce(gradients).wait()
            sums.append(float(gradients[0]))
        outcomes["numbered"] = [len(alone), sums, [sum(half) / len(half)] * 2]
    for carrier in ("auto", "gloo"):
        outcomes[f"planned on {carrier}"] = planned(carrier, sizes)
    dist.barrier()
    dist.destroy_process_group()
    return outcomes


def lost(rank: int, ranks: int, folder: Path) -> Any:
    """Rank 2 dies before the others' backward pass."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-lost", rank=rank, world_size=ranks)
    ddp = DistributedDataParallel(torch.nn.Linear(300, 300))
    ddp.register_comm_hook(stretto.torch.DdpHook(), stretto.torch.ddp_hook)
    ddp(torch.ones(4, 300)).sum().backward()
    loss = ddp(torch.ones(4, 300)).sum()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return told(loss.backward)


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])

    def rank_main(rank: int) -> None:
        outcomes = whole_job(rank, ranks, folder)
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))

    fork(ranks, rank_main)

    def losing(rank: int) -> None:
        outcome = lost(rank, ranks, folder)
        (folder / f"lost-{rank}").write_text(json.dumps(outcome))
        # The others still need to hear it from the victim, not from us.
        while not all((folder / f"lost-{other}").exists() for other in range(ranks) if other != 2):
            time.sleep(0.01)
        os._exit(0)

    for _ in [_start(rank, losing) for rank in range(ranks)]:
        os.wait()
    for rank in range(ranks):
        outcomes = json.loads((folder / f"{rank}.json").read_text())
        path = folder / f"lost-{rank}"
        outcomes["lost"] = json.loads(path.read_text()) if path.exists() else None
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
