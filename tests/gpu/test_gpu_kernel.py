# SPDX-License-Identifier: Apache-2.0
"""Programs on GPU memory: run with ``make test-gpu``. Ranks share the GPUs that there are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

LIMIT_S = 300
JOBS = Path(__file__).parents[1] / "jobs"


def torchrun(ranks: int, script: str, *words: str) -> str:
    assert torch.cuda.is_available(), "make test-gpu needs a GPU and a PyTorch that sees it"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(JOBS / script), *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    said = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0 and "WRONG" not in said and "LOST" not in said, said
    return said


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_direct_collectives_are_right(ranks: int) -> None:
    assert torchrun(ranks, "gpu_worker.py", "check").count("ok") >= 50


def test_calls_replay_in_graphs() -> None:
    assert "graph ok" in torchrun(4, "gpu_worker.py", "graph")


@pytest.mark.parametrize("ranks", [2, 4])
def test_random_collectives_are_right(ranks: int) -> None:
    types = "float32,float16,bfloat16,float64,int8,int16,int32,int64,uint8,bool"
    said = torchrun(ranks, "gpu_random.py", "--trials", "500", "--library", "--reductions", "--dtypes", types)
    assert " 0 wrong" in said
    assert " 0 wrong" in torchrun(ranks, "gpu_random.py", "--trials", "200", "--delays")


def test_who_does_not_come_is_named() -> None:
    assert torchrun(4, "gpu_worker.py", "lost").count("(0, 1)") == 3
