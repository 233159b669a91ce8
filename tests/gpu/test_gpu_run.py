# SPDX-License-Identifier: Apache-2.0
"""``stretto run`` of unchanged NCCL jobs: recorded, and trained as without us. Run with ``make test-gpu``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

JOB = Path(__file__).parents[1] / "jobs" / "gpu_run_job.py"
RANKS, LIMIT_S = 2, 240.0


def train(style: str, folder: Path, *front: str) -> tuple[list[list[float]], str]:
    """The losses of every rank, and what was said."""
    assert torch.cuda.is_available(), "make test-gpu needs a GPU and a PyTorch that sees it"
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Several ranks on one GPU work with NCCL when each believes to be on a host of its own.
    ranks = " & ".join(f"RANK={r} NCCL_HOSTID=r{r} {sys.executable} {JOB} {style} {folder}" for r in range(RANKS))
    shared = {
        "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(RANKS), "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_NCHANNELS": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    done = subprocess.run(
        [*front, "bash", "-c", f"{ranks} & wait"], env=os.environ | shared, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(list(folder.iterdir())) == RANKS, done.stderr[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)], done.stderr


@pytest.mark.parametrize("style", ["ddp", "hand", "fsdp"])
def test_unchanged_job_is_recorded_and_trains_as_without_us(style: str, tmp_path: Path) -> None:
    plainly, _ = train(style, tmp_path / "plain")
    under, said = train(style, tmp_path / "run", sys.executable, "-m", "stretto", "run", "--budget", "1", "--")
    assert "stretto: recorded 5 iterations" in said, said[-4000:]
    assert "unchanged job (nccl)" in said, said[-4000:]
    for mine, ours in zip(plainly, under, strict=True):
        assert ours == pytest.approx(mine, rel=1e-3)


def test_early_gathers_train_as_plain_ones(tmp_path: Path) -> None:
    plainly, _ = train("fsdp", tmp_path / "plain")
    early, _ = train("early", tmp_path / "early")
    assert early == plainly
    under, said = train("early", tmp_path / "run", sys.executable, "-m", "stretto", "run", "--budget", "1", "--")
    assert "stretto: recorded 5 iterations" in said, said[-4000:]
    for mine, ours in zip(plainly, under, strict=True):
        assert ours == pytest.approx(mine, rel=1e-3)
