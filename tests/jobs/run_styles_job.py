# SPDX-License-Identifier: Apache-2.0
"""Training scripts in the styles that are about, of which only the last knows of Stretto.

``run_styles_job.py FOLDER [STYLE...]``: two forked ranks train every style once without and once with whatever
`stretto run` has put in front: whole numbers of gradients make both bit for bit the same.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import stretto.torch

RANKS = 2
STEPS = 90
GRAIN = 1 << 10


def model(bucket_mb: float = 0.0005) -> DistributedDataParallel:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: (gradient * GRAIN).round() / GRAIN)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(net, bucket_cap_mb=bucket_mb)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    return inputs, inputs.sum(1, keepdim=True)


def loss_of(net: nn.Module, step: int) -> torch.Tensor:
    inputs, wanted = batch(step)
    return nn.functional.mse_loss(net(inputs), wanted)


def amp() -> float:
    """AdamW, and bfloat16 where autocast has it."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(net, step)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        optimizer.step()
    return loss.item()


def accumulated() -> float:
    """Three batches to a step, only the last of which communicates."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(2):
            with net.no_sync():
                loss_of(net, 3 * step + part).backward()  # type: ignore[no-untyped-call]
        loss = loss_of(net, 3 * step + 2)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return loss.item()


class Checkpointed(nn.Module):
    """Computes its activations again in the backward pass instead of keeping them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, inputs, use_reentrant=False)
        return out


def checkpointed() -> float:
    """Activation checkpointing: the forward pass of a part runs again inside of the backward pass."""
    net = model()
    net.module = Checkpointed(net.module)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return loss.item()


def compiled() -> float:
    """A model that is compiled, in the first steps and never again, whatever is recorded or planned."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    net: Any = torch.compile(model(bucket_mb=25), backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    frames: dict[str, int] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        frames = frames or (dict(counters["frames"]) if step == 3 else {})
    assert dict(counters["frames"]) == frames, "it was compiled anew"
    return loss.item()


def evaluated() -> float:
    """A metric is summed up every few steps, behind a barrier."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    metric = torch.zeros(1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 20 == 19:
            net.eval()
            dist.barrier()
            with torch.no_grad():
                metric = loss_of(net, step).detach().round(decimals=1).reshape(1)
            dist.all_reduce(metric)
            net.train()  # type: ignore[no-untyped-call]
    return loss.item() + metric.item()


@torch.no_grad()
def descend(net: nn.Module) -> None:
    """A step of SGD without an optimizer."""
    for parameter in net.parameters():
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=0.01)
        parameter.grad = None


def by_hand() -> float:
    """No optimizer at all."""
    net = model()
    for step in range(STEPS):
        loss = loss_of(net, step)
        loss.backward()  # type: ignore[no-untyped-call]
        descend(net)
    return loss.item()


def critic() -> float:
    """Two steps of one model to one of another: neither optimizer alone marks iterations that are alike."""
    judge, maker = model(), model()
    judging, making = (torch.optim.SGD(net.parameters(), lr=0.01) for net in (judge, maker))
    loss = torch.zeros(())
    for step in range(STEPS):
        judging.zero_grad()
        loss_of(judge, step).backward()  # type: ignore[no-untyped-call]
        judging.step()
        if step % 2:
            making.zero_grad()
            loss = loss_of(maker, step)
            loss.backward()  # type: ignore[no-untyped-call]
            making.step()
    return loss.item()


def critic_by_hand() -> float:
    """The same, with two backward passes to a step and no optimizer at all."""
    judge, maker = model(), model()
    for step in range(STEPS):
        for net, batches in ((judge, 2), (maker, 1)):
            for part in range(batches):
                loss = loss_of(net, 2 * step + part)
                loss.backward()  # type: ignore[no-untyped-call]
            descend(net)
    return loss.item()


def marked() -> float:
    """Steps that have nothing to repeat, but say where they end."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        # Twice, and a third time in some steps: only the script knows that the sum of both is an iteration.
        for part in range(2):
            loss = loss_of(net, 2 * step + part)
            loss.backward()  # type: ignore[no-untyped-call]
            for _ in range(1 + (step % 7 == 0)):
                optimizer.step()
        stretto.torch.step()
    return loss.item()


def uneven() -> float:
    """One rank steps an optimizer that no other has, and iterations differ: nothing can be agreed, nothing may fail."""
    net, local = model(), nn.Linear(2, 2)
    optimizer, mine = (torch.optim.SGD(part.parameters(), lr=0.01) for part in (net, local))
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(net, step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if dist.get_rank() == 0:
            mine.step()
        if step % 3 == 0:
            dist.all_reduce(torch.ones(3))
    return loss.item()


def served() -> float:
    """Only rank 0 steps an optimizer, for all: no other rank ever comes to the end of an iteration."""
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    loss = torch.zeros(())
    for step in range(STEPS):
        net.zero_grad()
        loss = loss_of(net, step)
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad = (parameter.grad * GRAIN).round() / GRAIN
            dist.reduce(parameter.grad, 0)
        if dist.get_rank() == 0:
            optimizer.step()
        for parameter in net.parameters():
            dist.broadcast(parameter.data, 0)
    return loss.item()


STYLES: dict[str, Callable[[], float]] = {
    "amp": amp, "accumulated": accumulated, "evaluated": evaluated, "by_hand": by_hand, "critic": critic,
    "critic_by_hand": critic_by_hand, "marked": marked, "checkpointed": checkpointed,
    "uneven": uneven, "served": served, "compiled": compiled,
}  # fmt: skip


def rank_main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    found: dict[str, list[float]] = {}
    for name in sys.argv[2:] or STYLES:
        train = STYLES[name]
        for once in ("plainly", "controlled"):
            # A backend for each kind of device is none of ours, and left as it is.
            backend = "cpu:gloo,cuda:gloo" if once == "plainly" else "gloo"
            dist.init_process_group(backend, init_method=f"file://{folder}/{name}-{once}", rank=rank, world_size=RANKS)
            found.setdefault(name, []).append(train())
            found.setdefault(f"{name} on", []).append(float(dist.get_backend() == "stretto"))
            dist.barrier()
            dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(found))


def main() -> None:
    folder = Path(sys.argv[1])
    processes = [
        multiprocessing.get_context("fork").Process(target=rank_main, args=(folder, rank)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in processes))


if __name__ == "__main__":
    main()
