# SPDX-License-Identifier: Apache-2.0
"""Two ranks that train small models the usual ways."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from capture_scenarios import record, run
from models import dlrm, gpt
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

SMALL_GPT = gpt.Shape(vocabulary=128, context=32, width=64, layers=2)
SMALL_DLRM = dlrm.Shape(tables=2, rows=100, width=16, hidden=64, batch=32)


def trainer(model: nn.Module, parameters: Iterable[Tensor], loss: Callable[[], Tensor]) -> Callable[[int], None]:
    """A training step."""
    optimizer = torch.optim.SGD(parameters, lr=0.01)

    def step(number: int) -> None:
        value = loss()
        optimizer.zero_grad()
        torch.autograd.backward(value)
        optimizer.step()

    return step


def gpt_step(how: str, prepare: Callable[[Any], None] = lambda model: None) -> tuple[Callable[[int], None], nn.Module]:
    """A training step of the small GPT, and its model."""
    torch.manual_seed(0)
    plain = gpt.GPT(SMALL_GPT)
    model = gpt.distributed(plain, how, bucket_mb=0.1)
    prepare(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    return trainer(model, model.parameters(), lambda: model(plain.batch(generator))), model


def gpt_ddp() -> Any:
    """Copies, with buckets of gradients summed during the backward pass."""
    return record(gpt_step("ddp")[0])


def gpt_fsdp() -> Any:
    """Shards, gathered layer by layer."""
    return record(gpt_step("fsdp")[0])


def gpt_compressed() -> Any:
    """A communication hook in Python instead of DDP's own."""
    return record(gpt_step("ddp", lambda model: model.register_comm_hook(None, fp16_compress_hook))[0])


def gpt_accumulated() -> Any:
    """Two micro-batches, of which only the second sums gradients."""
    torch.manual_seed(0)
    plain = gpt.GPT(SMALL_GPT)
    model = DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def step(number: int) -> None:
        optimizer.zero_grad()
        with model.no_sync():
            model(plain.batch(generator)).backward()
        model(plain.batch(generator)).backward()
        optimizer.step()

    return record(step)


def dlrm_hybrid() -> Any:
    """Tables spread over the ranks, perceptrons copied."""
    torch.manual_seed(0)
    model = dlrm.DLRM(SMALL_DLRM)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def loss() -> Tensor:
        dense, indices, clicks = model.batch(generator)
        return binary_cross_entropy_with_logits(model(dense, indices), clicks)

    return record(trainer(model, model.parameters(), loss))


def buffers() -> Any:
    """Batch statistics that DDP broadcasts, and waits for in C++, before each forward pass."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)))
    return record(trainer(model, model.parameters(), lambda: model(torch.randn(128, 64)).square().mean()))


def unchanged_training() -> Any:
    """A digest of the parameters after five steps, recorded and not."""
    digests = []
    for recorded in (True, False):
        step, model = gpt_step("ddp")
        if recorded:
            record(step)
        else:
            for number in range(5):
                step(number)
        state = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
        digests.append(hashlib.sha256(state).hexdigest())
    return digests


if __name__ == "__main__":
    scenarios = (gpt_ddp, gpt_fsdp, gpt_compressed, gpt_accumulated, dlrm_hybrid, buffers, unchanged_training)
    run({scenario.__name__: scenario for scenario in scenarios})
