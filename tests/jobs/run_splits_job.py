# SPDX-License-Identifier: Apache-2.0
"""A job with unequal all-to-alls, which knows nothing of plans: ``run_splits_job.py FOLDER``.

Two forked ranks train it under what `stretto run` has put in front, until a plan has carried out some iterations,
and then as often without: on two ranks every sum has one order, so both are bit for bit the same.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stretto.runtime.torch_backend.current import CURRENT

RANKS = 2
WIDTH = 16
LIMIT_S = 400.0
"""How long to wait for a plan: on a busy machine the controller's planner takes minutes to start."""
ENOUGH = 15
"""Iterations under a plan."""
PAUSE_S = 0.02
"""Between two iterations without one: planning needs time, and the steps are to be done again without it."""


class Exchange(torch.autograd.Function):
    """Rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx, rows, gives, takes):  # type: ignore[no-untyped-def]
        """Gives and takes so many rows to and from each rank."""
        ctx.splits = gives, takes
        got = rows.new_empty(sum(takes), rows.shape[1])
        dist.all_to_all_single(got, rows.contiguous(), takes, gives)
        return got

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        """The other way around."""
        gives, takes = ctx.splits
        got = gradient.new_empty(sum(gives), gradient.shape[1])
        dist.all_to_all_single(got, gradient.contiguous(), gives, takes)
        return got, None, None


TABLES = [[20, 20], [60, 60]]
"""As many rows from each rank as it has tables: unequal, and always the same."""


def experts(step: int) -> list[list[int]]:
    """What a gate sends to each expert: it changes with every batch, grows, and now and then a rank has nothing."""
    draw = torch.Generator().manual_seed(step)
    found: list[list[int]] = torch.randint(0, 20 + step % 200, (RANKS, RANKS), generator=draw).tolist()
    return [[0, 0], found[1]] if step % 9 == 8 else found


def exchanged(rows: torch.Tensor, matrix: list[list[int]]) -> torch.Tensor:
    rank = dist.get_rank()
    got: torch.Tensor = Exchange.apply(rows, matrix[rank], [row[rank] for row in matrix])  # type: ignore[no-untyped-call]
    return got


def train(more: Callable[[int], bool]) -> list[float]:
    """The losses of a model with both kinds of exchanges, as long as there are more iterations."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    table, expert = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    shared = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH)))
    optimizer = torch.optim.SGD([*table.parameters(), *expert.parameters(), *shared.parameters()], lr=0.001)
    losses: list[float] = []
    while more(len(losses)):
        step = len(losses)
        draw = torch.Generator().manual_seed(2 * step + rank)
        ids = torch.randn(sum(TABLES[rank]), WIDTH, generator=draw)
        tokens = torch.randn(sum(experts(step)[rank]), WIDTH, generator=draw)
        hidden = shared(torch.cat([exchanged(table(ids), TABLES), tokens]))
        routed = exchanged(hidden[len(hidden) - len(tokens) :], experts(step))
        loss = (hidden.pow(2).sum() + expert(routed).pow(2).sum()) / 100
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class UntilPlanned:
    """Goes on until the first rank has seen enough iterations under a plan, and tells the other through the store."""

    def __init__(self) -> None:
        self.planned = 0
        self._store = dist.distributed_c10d._get_default_store()
        self._told = False
        self._begun = time.monotonic()

    def __call__(self, step: int) -> bool:
        """Whether there is an iteration of this number."""
        report = CURRENT.enforcer.report() if CURRENT.enforcer is not None else None  # type: ignore[attr-defined]
        self.planned += bool(report is not None and report.number and report.motifs)
        if not self.planned:
            time.sleep(PAUSE_S)
        over = self.planned >= ENOUGH or time.monotonic() > self._begun + LIMIT_S
        if dist.get_rank() == 0 and not self._told and over:
            # No rank can be a whole iteration ahead of another.
            self._store.set("last", str(step + 3))
            self._told = True
        return not self._store.check(["last"]) or step < int(self._store.get("last"))


def rank_main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    until = UntilPlanned()
    controlled = train(until)
    dist.barrier()
    dist.destroy_process_group()
    # A backend for each kind of device is none of ours, and left as it is.
    store = f"file://{folder}/store-plainly"
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=store, rank=rank, world_size=RANKS)
    plainly = train(len(controlled).__gt__)
    dist.barrier()
    dist.destroy_process_group()
    found = {"same": controlled == plainly, "steps": len(controlled), "planned": until.planned}
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
