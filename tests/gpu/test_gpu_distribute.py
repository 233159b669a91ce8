# SPDX-License-Identifier: Apache-2.0
"""`stretto.torch.distribute` on GPUs: run with ``make test-gpu``, on a machine that has one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

RANKS = 4
LIMIT_S = 180
JOBS = Path(__file__).parents[1] / "jobs"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    assert torch.cuda.is_available(), "make test-gpu needs a GPU and a PyTorch that sees it"
    folder = tmp_path_factory.mktemp("gpu")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(JOBS), os.environ.get("PYTHONPATH", "")])
    shared = {
        "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": path,
        "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    jobs = []
    for rank in range(RANKS):
        # Several ranks on one GPU work with NCCL when each believes to be on a host of its own.
        mine = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"}
        command = [sys.executable, str(JOBS / "gpu_distribute_job.py"), str(folder)]
        with (folder / f"log-{rank}").open("wb") as out:
            jobs.append(subprocess.Popen(command, env=mine, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [job.wait(LIMIT_S) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    said = [(folder / f"log-{rank}").read_text()[-3000:] for rank, code in enumerate(codes) if code]
    assert not said, said[0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_weights_are_those_of_one_process_on_the_gpu(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert len(report["same"]) == 56
        assert {label: apart for label, apart in report["same"].items() if apart > 1e-5} == {}


def test_encoders_and_stale_servers_learn_on_the_gpu(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert len(report["learned"]) == 14
        assert {label: share for label, share in report["learned"].items() if share > 0.3} == {}
