# SPDX-License-Identifier: Apache-2.0
"""How tests start ranks on GPUs, or all on the only one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

JOBS = Path(__file__).parents[1] / "jobs"
LIMIT_S = 150.0
NO_MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
"""Under MPS a killed client can take all others with it, those of other jobs too: jobs that lose a rank run without."""
Launch = Callable[..., list[Any]]


def free_port() -> int:
    """A port below those that connections get by themselves, so that nobody else takes it before the job does."""
    for port in random.sample(range(15_000, 30_000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("of 100 ports none is free")


def start_ranks(
    folder: Path, ranks: int, arguments: Sequence[str], lost: Sequence[int] = (), job: str = "gpu_programs_job.py"
) -> list[Any]:
    """Every rank of a job of tests/jobs in a process of its own; what each reports, but for those that are `lost` on
    purpose.
    """
    assert torch.cuda.is_available(), "make test-gpu needs a GPU and a PyTorch that sees it"
    shared = {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1",
        "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_NCHANNELS": "2", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "STRETTO_CACHE": str(folder.parent / "kernels"), "STRETTO_GPU": os.environ.get("STRETTO_GPU", "on"),
        "STRETTO_GPU_POOL": "on",
    }  # fmt: skip
    if lost:
        shared |= NO_MPS
    processes = []
    for rank in range(ranks):
        # Several ranks on one GPU work with NCCL when each believes to be on a host of its own.
        mine = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"}
        command = [sys.executable, str(JOBS / job), str(folder), *arguments]
        with (folder / f"out-{rank}").open("wb") as out:
            processes.append(
                subprocess.Popen(command, env=mine, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
            )
    waited = [processes[rank] for rank in range(ranks) if rank not in lost]
    deadline = time.monotonic() + LIMIT_S
    try:
        while any(process.poll() is None for process in waited) and time.monotonic() < deadline:
            if any(process.poll() for process in waited):
                break
            time.sleep(0.05)
        codes = [process.poll() for process in waited]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = "\n".join(
        f"rank {rank}: {(folder / f'out-{rank}').read_text()[-3000:]} {report_of(folder, rank)}"
        for rank in range(ranks)
    )
    assert codes == [0] * len(waited), f"{codes}\n{said}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks) if rank not in lost]


def report_of(folder: Path, rank: int) -> str:
    """What a rank has written, if anything: some jobs put what went wrong there."""
    path = folder / f"{rank}.json"
    return path.read_text()[-2000:] if path.exists() else ""


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Runs a scenario of tests/jobs/gpu_programs_job.py, or of another job, on so many ranks."""

    def run(ranks: int, *arguments: str, lost: Sequence[int] = (), job: str = "gpu_programs_job.py") -> list[Any]:
        return start_ranks(tmp_path, ranks, arguments, lost, job)

    return run
