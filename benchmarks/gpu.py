# SPDX-License-Identifier: Apache-2.0
"""Collectives on GPU memory: ours beside PyTorch's symmetric memory, copy engines, MSCCL++ and NCCL, on one GPU.

All ranks share the GPU, under NVIDIA's MPS, which must run; every "link" is that GPU's own memory. So only ratios
inside one run say something. Times are medians over replays of a CUDA graph (NCCL: of plain calls, over sockets), with
the spread of our better one: through slots, or in place in symmetric memory. `over_bound` is the distance to moving the
bytes at the rate of a plain copy by all ranks at once. MSCCL++ runs where it is installed and `--mscclpp` names plans
of it; its best one counts. Where it is not installed, `--mscclpp-times` takes them from an earlier run on the same kind
of machine (`mscclpp_beside.py`, which times in the same way).

Below the table: memory that is held, 256 MiB beside copies, and what a step costs.
"""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import Row, common_options, finish

RANK = Path(__file__).with_name("gpu_rank.py")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
SIZES = tuple(1 << k for k in (10, 12, 14, 16, 17, 18, 19, 20, 22, 24, 26, 28))
OTHER_SIZES = tuple(1 << k for k in (14, 16, 20, 24, 26))
"""Of the collectives behind the first one."""
SYSTEMS = ("stretto", "in place", "one-shot", "two-shot", "copy engine", "mscclpp", "nccl")
OURS = SYSTEMS[:2]
BOUND_FROM = 16 << 20
"""Smaller messages stay in the GPU's cache, which the rate of a copy says nothing of."""


def run_ranks(ranks: int, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What one job of so many ranks measured; as much of it as it came to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
        "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_NCHANNELS": "2", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "STRETTO_GPU": "on",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows")
        command = [sys.executable, str(RANK), str(rows), json.dumps(asked)]
        jobs = [
            subprocess.Popen(
                command,
                # NCCL takes several ranks on one GPU when each believes to be on a host of its own.
                env=os.environ | shared | {"RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"},
                stdout=None if rank == 0 else subprocess.DEVNULL,
            )
            for rank in range(ranks)
        ]
        try:
            for job in jobs:
                job.wait(asked["limit_s"] + 30)
        except subprocess.TimeoutExpired:
            print(f"{ranks} ranks did not end in time", file=sys.stderr)
        finally:
            for job in jobs:
                job.kill()
                job.wait()
        return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def least_bytes(kind: str, nbytes: int, ranks: int) -> int:
    """The bytes that all ranks together must at least read and write, where all memory is one GPU's."""
    shards = {"all_reduce": (ranks, ranks), "all_gather": (1, ranks), "reduce_scatter": (ranks, 1)}
    reads, writes = shards.get(kind, (ranks, ranks))
    return (reads + writes) * nbytes


def earlier_times(path: str) -> dict[tuple[str, int, int], list[float]]:
    """MSCCL++'s best median, least and most by collective, ranks and bytes, as `mscclpp_beside.py` wrote them."""
    best: dict[tuple[str, int, int], list[float]] = {}
    with Path(path).open() as file:
        for row in csv.DictReader(file):
            if row["system"] == "mscclpp":
                key = (row["collective"], int(row["ranks"]), int(row["nbytes"]))
                times = [float(row[name]) for name in ("median_us", "least_us", "most_us")]
                best[key] = min(best.get(key, times), times)
    return best


def table_row(found: dict[str, Any]) -> Row:
    """One row of the table: a column for each system."""
    kind, nbytes, ranks = found["collective"], found["nbytes"], found["ranks"]
    row: Row = {"case": f"{kind} x{ranks}", "nbytes": nbytes}
    own = [times for system, times in found.items() if system.startswith("mscclpp ") and isinstance(times[0], float)]
    if own:
        found["mscclpp"] = min(own)
    for system in SYSTEMS:
        times = found.get(system)
        row[f"{system}_us"] = None if times is None else round(times[0], 1)
    ours = min((found[system] for system in OURS if system in found), default=None)
    row["spread_us"] = None if ours is None else f"{ours[1]:.1f}..{ours[2]:.1f}"
    others = [found[system][0] for system in SYSTEMS if system not in (*OURS, "nccl") and system in found]
    row["over_best"] = round(ours[0] / min(others), 2) if ours and others else None
    rate = found["copy_bytes_per_us"]
    if ours and rate and nbytes >= BOUND_FROM:
        row["over_bound"] = round(ours[0] * rate / least_bytes(kind, nbytes, ranks), 2)
    return row


def main() -> None:
    """Measure and print one table."""
    parser = common_options(__doc__)
    parser.add_argument("--ranks", default="2,4,8", help="ranks, one job each")
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="the largest size in bytes")
    parser.add_argument("--no-nccl", action="store_true", help="leave NCCL out: it takes most of the time")
    parser.add_argument("--mscclpp", default="", help="a folder with plans of MSCCL++ (NAME_RANKS.json) to run beside")
    parser.add_argument("--mscclpp-times", default="", help="times of MSCCL++ in an earlier run, where it is not run")
    parser.add_argument("--no-parts", action="store_true", help="leave out 256 MiB beside copies, and costs of steps")
    parser.add_argument("--limit", type=int, default=600, help="seconds for all")
    parser.add_argument("--rows-limit", type=float, help="seconds of each job after which it begins no row any more")
    args = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a GPU, and a PyTorch that sees it")
    if not args.mscclpp or find_spec("mscclpp") is None:
        print("MSCCL++ does not run beside: " + ("it is not installed" if args.mscclpp else "no --mscclpp"))
        args.mscclpp = ""
    sizes = [size for size in (SIZES[::2] if args.quick else SIZES) if size <= args.largest]
    numbers = [int(ranks) for ranks in args.ranks.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        asked = {
            "sizes": sizes, "collectives": args.collectives.split(","), "rounds": 5 if args.quick else 9,
            "other_sizes": [size for size in OTHER_SIZES if size in sizes], "plans": args.mscclpp,
            "parts": not args.no_parts, "nccl": not args.no_nccl, "bound": max(sizes) >= BOUND_FROM,
            "limit_s": args.limit, "rows_s": args.rows_limit or args.limit, "gate": str(Path(folder, "gate")),
            "jobs": len(numbers),
        }  # fmt: skip
        # They start together, which takes longest, and time one after the other.
        with ThreadPoolExecutor(len(numbers)) as pool:
            found = [row for rows in pool.map(lambda ranks: run_ranks(ranks, asked), numbers) for row in rows]
    earlier = earlier_times(args.mscclpp_times) if args.mscclpp_times else {}
    for row in found:
        times = earlier.get((row["collective"], row["ranks"], row["nbytes"]))
        if times and not any(system.startswith("mscclpp ") for system in row):
            row["mscclpp"] = times
    rows = [table_row(row) for row in found]
    finish(rows, args, title="collectives on GPU memory, us")


if __name__ == "__main__":
    main()
