# SPDX-License-Identifier: Apache-2.0
"""Collectives over GPUs of several hosts, which here are names: random calls, and a rank that goes wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

JOB = Path(__file__).parents[1] / "jobs" / "gpu_hosts_random.py"
LIMIT_S = 120


def ranks(folder: Path, hosts: str, *options: str) -> list[str]:
    """What each rank said."""
    assert torch.cuda.is_available(), "make test-gpu needs a GPU and a PyTorch that sees it"
    names = hosts.split(",")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": str(len(names)), "LOCAL_WORLD_SIZE": str(len(names)), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
        "STRETTO_GPU": "hosts", "STRETTO_CACHE": str(folder.parent / "kernels"),
    }  # fmt: skip
    command = [sys.executable, str(JOB), "--hosts", hosts, "--seconds", str(LIMIT_S - 20), *options]
    jobs = [
        subprocess.Popen(
            command,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(len(names))
    ]
    try:
        return [job.communicate(timeout=LIMIT_S)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()


@pytest.mark.parametrize("hosts", ["a,b", "a,a,b,b", "a,b,b,b"])
def test_random_collectives_over_hosts(tmp_path: Path, hosts: str) -> None:
    said = ranks(tmp_path, hosts, "--trials", "100")
    assert all("100 random collectives, 0 wrong" in text for text in said), said[0][-3000:]
    assert all("nccl" not in text for text in said)


def test_different_calls_end_all_ranks_and_leave_their_gpu_usable(tmp_path: Path) -> None:
    said = ranks(tmp_path, "a,a,b,b", "--fault", "mismatch")
    assert all("FAULT mismatch" in text and "GPU usable" in text for text in said), said[0][-3000:]
    assert all("ProgramMismatch" in text for text in said), said[0][-3000:]
