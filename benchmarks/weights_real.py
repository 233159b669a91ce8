# SPDX-License-Identifier: Apache-2.0
"""Real weights from trainers to servers, on the ranks of one host: ours beside other ways, training beside it, faults.

All ranks may share one GPU (under MPS). `one copy` is what servers get, copied once on all of them at the same time:
`over_copy` is the time over that. `stretto` is `WeightSync.update`, versions and votes included. On a GPU `send_recv`
and `gather_broadcast` run on our executor with their own plans, `gather_direct` with plain messages instead of a
broadcast, `passed_on` with the plan in which servers pass weights on (ours sends directly where all share one GPU);
`symmetric_pull` is written by hand on PyTorch's symmetric memory; the `nccl_` ones are NCCL's, which among ranks of one
GPU goes by sockets. `stopped_ms` is how long a server's memory is written. `slowdown` is a trainer's step (a matrix
product) beside updates, or beside servers that only copy, over one alone; `lost_ms` the training time that one update
costs. Of a killed rank: when the others noticed, whether all servers kept the old version, and whether those that were
left got the new one. Rows are printed as they come.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Row, common_options, finish, require_gpu

from stretto.units import parse_bytes

RANK = Path(__file__).with_name("weights_real_rank.py")
GPU_SYSTEMS = "stretto,send_recv,passed_on,symmetric_pull,gather_direct,gather_broadcast"
"""NCCL's are asked for by --systems nccl_send_recv,nccl_gather_broadcast, with fewer bytes."""
CPU_SYSTEMS = "stretto,send_recv,gather_broadcast"
TREE_PART, FAULT_PART = 4, 8
"""A tree of seven receivers, and losing a rank, move so much less than the others."""
CASES: dict[str, tuple[str, int, str, str]] = {
    "4 FSDP to 2 x TP2": ("systems", 1, "fsdp=4", "tp=2,dp=2"),
    "4 FSDP to TP4": ("systems", 1, "fsdp=4", "tp=4"),
    "2 FSDP to TP2": ("systems", 1, "fsdp=2", "tp=2"),
    "1 to 7 replicas": ("systems", TREE_PART, "fsdp=1", "dp=7"),
    "a server dies": ("server", FAULT_PART, "fsdp=2", "dp=3"),
    "a trainer dies": ("trainer", FAULT_PART, "fsdp=2", "tp=2"),
}
"""What is run, the bytes' divisor, the trainers, the servers."""


def ranks_of(side: str) -> int:
    """The number of ranks of one side's degrees."""
    count = 1
    for word in side.split(","):
        count *= int(word.split("=")[1])
    return count


def run(name: str, args: Any, folder: Path) -> list[Row]:
    """One case in processes of its own; its rows, as far as they came."""
    part, divisor, trainer, server = CASES[name]
    ranks, rows = ranks_of(trainer) + ranks_of(server), folder / "rows"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MAX_NCHANNELS": "2",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "8",
        "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip
    systems = args.systems or (GPU_SYSTEMS if args.device == "cuda" else CPU_SYSTEMS)
    nbytes = parse_bytes(args.bytes) // divisor
    command = [sys.executable, str(RANK), str(rows), part, args.device, trainer, server]
    command += [str(nbytes), str(parse_bytes(args.staging)), str(args.runs), systems]
    processes = []
    for rank in range(ranks):
        # Several ranks on one GPU work with NCCL when each believes to be on a host of its own.
        mine = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"rank{rank}"}
        with (folder / f"log-{rank}").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    command, env=os.environ | shared | mine, stdout=log, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )  # fmt: skip
    deadline = min(time.monotonic() + args.limit, args.until)
    found: list[Row] = []
    why = ""
    head = {"case": name, "ranks": ranks, "gb": nbytes / 1e9}
    while True:
        over = all(process.poll() is not None for process in processes)
        for line in rows.read_text().splitlines()[len(found) :] if rows.exists() else []:
            found.append(head | json.loads(line))
            print(json.dumps(found[-1]), flush=True)
        if time.monotonic() > deadline:
            why = "ended by its limit"
        if over or why:
            break
        time.sleep(0.05)
    if why:
        # Each says in its log where it stands.
        for process in processes:
            process.send_signal(signal.SIGABRT)
        time.sleep(1.0)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode not in (0, -signal.SIGKILL)]
    if why or failed:
        for rank in failed[:1]:
            why += " " + (folder / f"log-{rank}").read_text(errors="replace")[-1500:]
        found.append(head | {"system": "", "said": why})
        print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    """Run the cases that fit into the time."""
    parser = common_options(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--bytes", default="1G", help="of the state dict")
    parser.add_argument("--staging", default="1G", help="the most bytes that a rank packs at a time")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--systems", default="", help="only these, with commas between")
    parser.add_argument("--only", default="", help="only cases that have this in their names")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one case")
    parser.add_argument("--total", type=float, default=120.0, help="seconds of all")
    args = parser.parse_args()
    require_gpu(args.device)
    if args.quick:
        args.bytes, args.runs, args.staging = "8M", 1, "1M"
    args.until = time.monotonic() + args.total
    rows: list[Row] = []
    for name in CASES:
        if args.only in name and args.until - time.monotonic() > 5.0:
            with tempfile.TemporaryDirectory() as folder:
                rows += run(name, args, Path(folder))
    finish(rows, args, title="Weights, really sent")


if __name__ == "__main__":
    main()
