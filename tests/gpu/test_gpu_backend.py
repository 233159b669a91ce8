# SPDX-License-Identifier: Apache-2.0
"""The process group `stretto` on GPUs: run with ``make test-gpu``, on a machine that has one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

LIMIT_S = 180


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    assert torch.cuda.is_available(), "make test-gpu needs a GPU and a PyTorch that sees it"
    folder = tmp_path_factory.mktemp("gpu")
    # Several ranks on one GPU work with NCCL when each believes to be on a host of its own.
    code = (
        "import os, runpy, sys; os.environ['NCCL_HOSTID'] = os.environ['RANK']; "
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    script = Path(__file__).parents[1] / "jobs" / "gpu_job.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    done = subprocess.run(
        [*command, sys.executable, "-c", code, str(script), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_every_collective_is_right_on_the_gpu(reports: list[dict[str, Any]]) -> None:
    assert [report["collectives"] for report in reports] == [[True] * 6] * 2


def test_ddp_and_fsdp_train_on_the_gpu(reports: list[dict[str, Any]]) -> None:
    assert [report["training"] for report in reports] == [[True, True]] * 2


def test_the_same_group_moves_tensors_of_the_cpu(reports: list[dict[str, Any]]) -> None:
    assert all(report["cpu"] for report in reports)


def test_choices_say_that_programs_ran_on_gpu_memory(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        ran = {(op, backend) for op, backend, why in report["choices"] if why}
        assert {("all_reduce", "gpu"), ("all_gather", "gpu"), ("reduce_scatter", "gpu")} <= ran
