# SPDX-License-Identifier: Apache-2.0
"""Every algorithm on this machine's GPUs, checked and timed beside NCCL, with a report that can be sent to us.

Nobody here has every kind of link between GPUs. Whoever has one runs this, and the report says what works there.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..children import Child
from ..errors import InvalidInput, StrettoError
from ..files import convert

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20)
DTYPES = ("float32", "float16", "bfloat16", "float64", "int16", "int32", "int64", "int8", "uint8", "bool")
LIMIT_S = 600.0
SETTLE_S = 30.0
MAX_ROWS = 1_000_000
MAX_RANKS = 32


class SelfTestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One algorithm on one size and type: whether all ranks got the right bits, and the times."""

    collective: str
    algorithm: str
    dtype: str
    nbytes: int
    right: bool
    us: float
    """Median of the slowest rank, in a CUDA graph."""
    nccl_us: float
    """The time of the same call by NCCL; 0 where NCCL was not asked, or could not run it."""
    error: str = ""
    memory: str = "staged"
    """Whether tensors went through slots, or were used where they lie ("symmetric")."""
    reduce: str = "sum"


class SelfTestMachine(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks ran on."""

    ranks: int
    gpus: tuple[str, ...]
    torch: str
    cuda: str
    nccl: str
    driver: str
    topology: str
    held_bytes: int
    refusal: str = ""
    """Why no program ran on GPU memory; empty where some did."""


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """What `gpu_selftest` found."""

    machine: SelfTestMachine
    rows: tuple[SelfTestRow, ...]
    finished: bool
    """Whether the ranks came to the end."""

    @property
    def wrong(self) -> tuple[SelfTestRow, ...]:
        """Runs whose result was not right, or that failed."""
        return tuple(row for row in self.rows if not row.right)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for the report."""
        return {
            "stretto_selftest": 1,
            "machine": msgspec.to_builtins(self.machine),
            "finished": self.finished,
            "rows": [msgspec.to_builtins(row) for row in self.rows],
        }


def gpu_selftest(
    *, ranks: int | None = None, sizes: Sequence[int] = SIZES, dtypes: Sequence[str] = DTYPES, limit_s: float = LIMIT_S
) -> SelfTest:
    """Start a rank for each GPU and run every algorithm of the library on them.

    Args:
        ranks: How many; by default one for each GPU, and two where there is one GPU only, which they share.
        sizes: Bytes of the collectives.
        dtypes: Types of the elements.
        limit_s: Seconds after which the ranks are ended, with what they have found by then.

    Returns:
        The findings.

    Raises:
        InvalidInput: There is no GPU, or an argument is wrong.
        StrettoError: The ranks ended before they could say anything.
    """
    gpus = gpu_count()
    number = ranks if ranks is not None else max(2, gpus)
    if not 2 <= number <= MAX_RANKS:
        raise InvalidInput(f"ranks: must be from 2 to {MAX_RANKS}, not {number}")
    unknown_types = [name for name in dtypes if name not in DTYPES]
    if unknown_types:
        raise InvalidInput(f"dtypes: {unknown_types[0]!r} must be one of {', '.join(DTYPES)}")
    with tempfile.TemporaryDirectory() as folder:
        asked = {"sizes": list(sizes), "dtypes": list(dtypes), "limit_s": limit_s}
        finished = _run_ranks(Path(folder), number, shared=number > gpus, asked=asked)
        return _read(Path(folder), finished)


def gpu_count() -> int:
    """How many GPUs PyTorch sees; raises `InvalidInput` where there is none."""
    try:
        import torch
    except ImportError:
        raise InvalidInput("selftest: needs PyTorch for CUDA: pip install 'stretto[torch]'") from None
    if not torch.cuda.is_available():
        raise InvalidInput("selftest: there is no GPU here, or this PyTorch is not built for CUDA and does not see it")
    return int(torch.cuda.device_count())


def _run_ranks(folder: Path, ranks: int, *, shared: bool, asked: dict[str, Any]) -> bool:
    """Whether all ranks came to the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "STRETTO_GPU": "on"}
    if shared:
        common |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "NCCL_SOCKET_IFNAME": "lo"}
    jobs = []
    for rank in range(ranks):
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if shared:
            # NCCL takes several ranks on one GPU when each believes to be on a host of its own.
            mine["NCCL_HOSTID"] = f"rank{rank}"
        command = [sys.executable, "-m", "stretto.doctor.gpu_selftest_rank", str(folder), json.dumps(asked)]
        with (folder / f"out-{rank}").open("wb") as out:
            jobs.append(Child(command, environment=os.environ | common | mine, stdout=out, stderr=subprocess.STDOUT))
    try:
        return [job.wait(asked["limit_s"] + SETTLE_S) for job in jobs] == [0] * ranks
    except subprocess.TimeoutExpired:
        return False
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill_all()


def _read(folder: Path, finished: bool) -> SelfTest:
    about, rows = folder / "machine.json", folder / "rows"
    if not about.exists():
        said = (folder / "out-0").read_text(errors="replace").strip().splitlines()
        raise StrettoError(f"selftest: the ranks ended before they had joined: {said[-1] if said else 'nothing said'}")
    lines = rows.read_text().splitlines()[:MAX_ROWS] if rows.exists() else []
    return SelfTest(
        machine=convert(json.loads(about.read_text()), SelfTestMachine, where="machine.json"),
        rows=tuple(convert(json.loads(line), SelfTestRow, where="rows") for line in lines),
        finished=finished,
    )
