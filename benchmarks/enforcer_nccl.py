# SPDX-License-Identifier: Apache-2.0
"""The case of benchmarks/enforcer.py that needs a GPU: data-parallel training with plain NCCL, with our backend, and
under plans that NCCL carries out.

All ranks may share one GPU: each then believes to be on a host of its own, and the loopback interface is the network.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Row

RANK = Path(__file__).with_name("enforcer_nccl_rank.py")
LIMIT_S = 240.0
SHAPES: dict[str, dict[str, Any]] = {
    "nccl ddp": {"how": "ddp", "layers": 8, "width": 1024, "batch": 2048, "bucket_mb": 8.0},
    "nccl fsdp2": {"how": "fsdp", "layers": 8, "width": 1024, "batch": 2048, "bucket_mb": 8.0},
}


def missing() -> str:
    """Why this case cannot run here; empty where it can."""
    import torch
    import torch.distributed as dist

    if not torch.cuda.is_available():
        return "there is no GPU (or PyTorch does not see it)"
    return "" if dist.is_nccl_available() else "this PyTorch has no NCCL"


def nccl(quick: bool) -> list[Row]:
    """Plain NCCL, our backend that hands calls on to it, and plans: the identity, and the joint one."""
    rows: list[Row] = []
    for case, shape in SHAPES.items():
        for ranks in (2,) if quick else (2, 4):
            asked = shape | {"budget_s": 4.0, "rounds": 2 if quick else 4, "times": 10}
            rows += _rows(f"{case} x{ranks}", _launched(asked, ranks))
    return rows


def _rows(case: str, found: dict[str, Any]) -> list[Row]:
    times = found["times"]
    return [
        {
            "case": case,
            "system": system,
            "iteration_us": us,
            "gain": times["nccl"] / us,
            "over_backend_percent": 100 * (us / times["backend"] - 1),
            "predicted_us": found["predicted_us"].get(system),
            "losses_off": found["losses_off"][system],
            "motifs": found["motifs"].get(system),
        }
        for system, us in times.items()
    ]


def _launched(asked: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Every rank in a process of its own; what the first has found."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "asked.json").write_text(json.dumps(asked))
        shared = {"OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "lo", "WORLD_SIZE": str(ranks)}
        shared |= {"STRETTO_CHANNELS": "a=lo;b=lo", "GLOO_SOCKET_IFNAME": "lo"}
        processes = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"}
            with (folder / f"out-{rank}").open("wb") as out:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(RANK), name], env=os.environ | shared | own, stdout=out,
                        stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip
        deadline = time.monotonic() + LIMIT_S
        try:
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                if any(process.poll() for process in processes):
                    break
                time.sleep(0.1)
            failed = next((rank for rank, process in enumerate(processes) if process.poll() != 0), None)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if failed is not None:
            sys.exit(f"rank {failed}: {(folder / f'out-{failed}').read_text()[-3000:]}")
        found: dict[str, Any] = json.loads((folder / "found.json").read_text())
        return found


CASES: dict[str, Callable[[bool], list[Row]]] = {"nccl": nccl}
