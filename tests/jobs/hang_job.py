# SPDX-License-Identifier: Apache-2.0
"""A script that knows nothing of Stretto, in which rank 1 comes late, is stopped, differs, and dies, in that order.

``python hang_job.py FOLDER [BACKEND] [DEVICE]``; goes on to the next when the file for it is in the folder. Lines of
calls end in a comment with a name, by which a test finds their number.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def wait_for(file: Path) -> None:
    """Until the file is there."""
    while not file.exists():
        time.sleep(0.05)


def main(folder: Path, backend: str, device: str) -> None:
    """One rank."""
    # A file, since a port that is free now may be another's when the job starts.
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(minutes=20)
    )
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    value = torch.ones(1000, device=device)
    for _ in range(3):
        dist.all_reduce(value)
    if rank == 1:
        wait_for(folder / "late")  # late
    dist.all_reduce(value)  # after late
    value.sum().item()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(value)  # after stopped
    value.sum().item()
    if rank == 1:
        dist.broadcast(value, 0, async_op=True)  # differs here
        wait_for(folder / "never")
    else:
        dist.all_reduce(value)  # differs there
        value.sum().item()


if __name__ == "__main__":
    main(Path(sys.argv[1]), (sys.argv[2:] or ["gloo"])[0], (sys.argv[3:] or ["cpu"])[0])
