# SPDX-License-Identifier: Apache-2.0
"""A step compiled by Inductor on a GPU: collectives where the script has them, overlapped by Inductor's own estimates,
and by `stretto.torch.inductor_costs` with what NCCL's collectives take in this job.

Two ranks share the GPU (MPS) over loopback sockets, or have one each. Each layer gathers its weights and multiplies, as
FSDP does; nothing overlaps unless Inductor's scheduler moves the gathers. `off` is how far results are from eager ones.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import Row, common_options, finish, require_gpu

RANKS, LAYERS, WIDTH, ROWS, TIMES = 2, 6, 4096, 32768, 12
WAYS = ("as written", "inductor", "stretto")


def launched(args: Any) -> list[Row]:
    """What rank 0 has measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_MAX_NCHANNELS": "2", "CUDA_DEVICE_MAX_CONNECTIONS": "16", "OMP_NUM_THREADS": "1", "DEVICE": args.device,
    }  # fmt: skip
    # Several ranks on one GPU work with NCCL when each believes to be on a host of its own.
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank"],
            env=os.environ | shared | {"RANK": str(rank), "NCCL_HOSTID": f"r{rank}"},
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    out = processes[0].stdout
    assert out is not None
    rows = [json.loads(line) for line in out if line.startswith("{")]
    for process in processes:
        process.wait()
    return rows


def rank_main() -> None:
    """One rank: every way, compiled and timed."""
    import torch
    import torch._inductor.config as config
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol

    on_gpu = os.environ["DEVICE"] == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    width, rows, kind = (WIDTH, ROWS, torch.bfloat16) if on_gpu else (64, 32, torch.float32)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(dist.get_rank())
    shards = [torch.randn(width // RANKS, width, device=device, dtype=kind) / width**0.5 for _ in range(LAYERS)]
    x = torch.randn(rows, width, device=device, dtype=kind)
    world: Any = dist.group.WORLD

    def step(x: Any, shards: list[Any]) -> Any:
        for shard in shards:
            x = torch.relu(x @ funcol.all_gather_tensor(shard, 0, world))
        return x

    def timed(call: Any) -> float:
        took = []
        for _ in range(TIMES):
            dist.barrier()
            begin = time.perf_counter()
            call(x, shards)
            if on_gpu:
                torch.cuda.synchronize()
            took.append(time.perf_counter() - begin)
        return median(took[2:]) * 1e3

    options: Any = config.aten_distributed_optimizations
    with torch.no_grad():
        wanted = step(x, shards)
        for way in WAYS:
            torch._dynamo.reset()
            options.enable_overlap_scheduling = way != WAYS[0]
            costs = measured(width * width * kind.itemsize) if way == "stretto" and on_gpu else None
            try:
                begin = time.perf_counter()
                made = torch.compile(step)
                off = float((made(x, shards) - wanted).abs().max())
                compile_s = time.perf_counter() - begin
                row: Row = {"way": way, "ms": timed(made), "off": off, "compile_s": compile_s}
            except Exception as error:
                row = {"way": way, "wrong": f"{type(error).__name__}: {error}"[:200]}
            if costs is not None:
                row["gather_ms"] = costs.time_us("all_gather", (0, 1), float(width * width * kind.itemsize)) / 1e3
                costs.remove()
            if dist.get_rank() == 0:
                print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def measured(nbytes: int) -> Any:
    """Inductor's costs by what NCCL's gathers take between these ranks."""
    import stretto.torch
    from stretto.control.own_costs import OwnCosts
    from stretto.control.own_times import own_cluster, own_times

    hosts = [f"h{rank}" for rank in range(RANKS)]
    times = own_times(hosts, ("all_gather",), float(nbytes), "nccl")
    cluster = own_cluster(hosts, times)
    return stretto.torch.inductor_costs(cluster, costs=OwnCosts(cluster, times))


def main() -> None:
    """Print the table."""
    parser = common_options(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    require_gpu(args.device)
    rows = launched(args)
    first = next((row["ms"] for row in rows if row.get("ms")), None)
    for row in rows:
        ms = row.get("ms")
        row["gain"] = first / ms if isinstance(first, float) and isinstance(ms, float) else None
    finish(rows, args, title="A compiled step on a GPU")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    rank_main() if "--rank" in sys.argv else main()
