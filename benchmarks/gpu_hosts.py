# SPDX-License-Identifier: Apache-2.0
"""Collectives and models on GPUs of several hosts: our programs in stages beside NCCL over the same shaped links.

Hosts are emulated (`stretto lab`), and all ranks share one GPU, under NVIDIA's MPS, which must run. NCCL takes several
ranks on one GPU only where each believes to be on a host of its own, so it uses sockets also inside a host, where we
use GPU memory: `over_nccl` says what happens on such a machine, not what NCCL does with NVLink. The bound is the least
that must go through a host's uplink, at its rate: of an all-reduce between two hosts its bytes once each way.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Row, common_options, finish

RANK = Path(__file__).with_name("gpu_hosts_rank.py")
SIZES = (64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
MODELS = ("ddp", "fsdp")


def run_lab(args: Any, asked: dict[str, Any], blocks: int) -> list[dict[str, Any]]:
    """What the ranks of one lab wrote; as much of it as they came to."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows")
        environment = {
            "OMP_NUM_THREADS": "1", "NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": "eth", "NCCL_IB_DISABLE": "1",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "STRETTO_GPU": "hosts", "STRETTO_GPU_BLOCKS": str(blocks),
            "NCCL_MAX_NCHANNELS": "2",
        }  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "stretto",
            "lab",
            "run",
            "--hosts",
            str(args.hosts),
            "--ranks",
            str(args.ranks),
        ]
        command += ["--uplink", f"eth={args.uplink}", "--timeout", str(args.limit - 1)]
        for name, value in environment.items():
            command += ["--env", f"{name}={value}"]
        command += ["--", sys.executable, str(RANK), json.dumps(asked | {"out": str(rows)})]
        try:
            subprocess.run(command, timeout=args.limit + 3, check=False)
        except subprocess.TimeoutExpired:
            print("the lab did not end in time", file=sys.stderr)
        return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def table_row(found: dict[str, Any], bytes_per_ms: float) -> Row:
    """One row of the table."""
    bound = found["nbytes"] / bytes_per_ms
    ours, theirs = found["stretto"], found.get("nccl")
    middle = ours[len(ours) // 2]
    row: Row = {
        "case": found["case"], "nbytes": round(found["nbytes"]), "right": found["right"],
        "stretto_ms": round(middle, 2),
        "spread_ms": f"{ours[0]:.2f}..{ours[-1]:.2f}",
        "nccl_ms": round(theirs[len(theirs) // 2], 2) if theirs else None,
        "over_nccl": round(middle / theirs[len(theirs) // 2], 2) if theirs else None,
        "bound_ms": round(bound, 2), "over_bound": round(middle / bound, 2),
    }  # fmt: skip
    if "apart" in found:
        row["losses_apart"] = f"{found['apart']:.1e}"
    return row


def main() -> None:
    """Measure and print one table."""
    parser = common_options(__doc__)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=4, help="ranks on each host")
    parser.add_argument("--uplink", default="2gbit", help="the rate of each host's uplink, each way")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes of all-reduces; none where empty")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--no-nccl", action="store_true")
    parser.add_argument("--limit", type=int, default=240, help="seconds for the job")
    args = parser.parse_args()
    import torch

    from stretto.units import parse_rate

    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu_hosts.py needs a GPU, and a PyTorch that sees it")
    asked = {
        "sizes": [int(size) for size in args.sizes.split(",") if size][: 2 if args.quick else None],
        "models": [name for name in args.models.split(",") if name], "nccl": not args.no_nccl,
        "until": time.time() + args.limit - 3,
    }  # fmt: skip
    rows: list[Row] = []
    # All ranks' blocks must be on the GPU together.
    blocks = max(1, torch.cuda.get_device_properties(0).multi_processor_count // (args.hosts * args.ranks))
    for found in run_lab(args, asked, blocks):
        if found["case"] == "choices":
            print("GPU memory held:", found["held"], "bytes")
            for ran in found["ran"]:
                print("  ", *ran)
        else:
            rows = [row for row in rows if (row["case"], row["nbytes"]) != (found["case"], round(found["nbytes"]))]
            rows.append(table_row(found, parse_rate(args.uplink) / 8e3))
    finish(rows, args, title=f"{args.hosts} hosts of {args.ranks} GPU ranks, uplinks of {args.uplink}, ms")


if __name__ == "__main__":
    main()
