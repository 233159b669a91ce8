# SPDX-License-Identifier: Apache-2.0
"""Groups made and destroyed again and again: how many communicators that takes, and that the groups work."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from capture_scenarios import fork
from torch._C import _distributed_c10d as c10d

import stretto.torch
from stretto.runtime.torch_backend.backend import StrettoGroup
from stretto.runtime.torch_backend.engine import CURRENT_JOB

TIMES = 3


def tried(ranks: list[int], rank: int) -> list[Any]:
    """A group is made, used and destroyed: the first sum in it, who ran it, and how many communicators there are."""
    group = dist.new_group(ranks)
    x = torch.full((1000,), float(rank + 1))
    if rank in ranks:
        dist.all_reduce(x, group=group)
    choice = stretto.torch.last_choice()
    if rank in ranks:
        dist.barrier(group=group)
        dist.destroy_process_group(group)
    assert choice is not None and CURRENT_JOB.job is not None
    return [float(x[0]), choice.backend, CURRENT_JOB.job.next]


def same_ranks(rank: int) -> list[list[Any]]:
    """The same two ranks again and again; another one is never asked."""
    return [tried([0, 1], rank) for _ in range(TIMES)]


def more_ranks(rank: int) -> list[list[Any]]:
    """All ranks can have what a part of them has had, and counts for it differently."""
    return [tried([0, 1, 2], rank) for _ in range(TIMES)]


def other_ranks(rank: int) -> list[list[Any]]:
    """Two that do not know whether a third has left need a new one."""
    return [tried([1, 2], rank) for _ in range(TIMES)]


def whole_jobs(rank: int, ranks: int, folder: Path) -> list[list[int]]:
    """The job is left and joined again: how many groups outlive it, and how many descriptors are open each time."""
    found = []
    # More than `select` knows of.
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    for time in range(TIMES):
        store = c10d.FileStore(f"{folder}/store-{time}", ranks)
        dist.init_process_group("stretto", store=store, rank=rank, world_size=ranks)
        # A message between two ranks goes to the wrapped gloo.
        received = torch.empty(3)
        works = [dist.isend(torch.ones(3), (rank + 1) % ranks), dist.irecv(received, (rank - 1) % ranks)]
        for work in works:
            assert work is not None
            work.wait()
        choice = stretto.torch.last_choice()
        assert choice is not None and choice.backend == "gloo" and received.sum() == 3
        dist.barrier()
        dist.destroy_process_group()
        del store
        gc.collect()
        found.append(
            [sum(isinstance(each, StrettoGroup) for each in gc.get_objects()), len(os.listdir("/proc/self/fd"))]
        )
    for each in many:
        os.close(each)
    return found


def main() -> None:
    """Each rank reports every scenario."""
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    scenarios: list[Callable[[int], Any]] = [same_ranks, more_ranks, other_ranks]

    def rank_main(rank: int) -> None:
        store = c10d.FileStore(f"{folder}/store", ranks)
        dist.init_process_group("stretto", store=store, rank=rank, world_size=ranks)
        dist.barrier()
        found = {scenario.__name__: scenario(rank) for scenario in scenarios}
        dist.destroy_process_group()
        found["whole_jobs"] = whole_jobs(rank, ranks, folder)
        (folder / f"{rank}.json").write_text(json.dumps(found))

    fork(ranks, rank_main)


if __name__ == "__main__":
    main()
