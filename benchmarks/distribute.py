# SPDX-License-Identifier: Apache-2.0
"""What `stretto.torch.distribute` costs beside DDP: the same model, buckets and backend, taking turns in one job.

`ddp` is PyTorch's with its defaults but the bucket size, `ddp_lean` also has gradients as views of its buckets and
sends no buffers, `stretto` is the all_reduce builder's strategy. `over_ddp` is the median over rounds of a round's
ratio of DDP's time to ours with its defaults; `over_best_ddp` is the same for the best bucket of each (more than 1: we
are faster). The models are miniatures (strategy_models.py).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from common import Row, finish
from strategy_models import LABELS

from stretto.lab import Lab, unavailable

RANK = Path(__file__).with_name("distribute_rank.py")
WHERE = ("1x4", "2x2")
BACKENDS = ("gloo", "stretto")
SIZES_MB = ("25", "4", "1", "0.25")
UPLINK = "300mbit"
LIMIT_S = 200.0


def on_one_host(command: Sequence[str], ranks: int) -> str:
    """What rank 0 of a job on this host prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    jobs = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        })
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        printed, _ = jobs[0].communicate(timeout=LIMIT_S)
        for job in jobs:
            if job.wait(LIMIT_S):
                sys.exit(f"{' '.join(command)}: a rank ended with {job.returncode}")
        return printed
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
                job.wait()


def in_the_lab(command: Sequence[str]) -> str:
    """The same on two hosts with two ranks each."""
    with Lab(hosts=2, ranks_per_host=2, uplinks={"eth": UPLINK}) as lab:
        done = lab.run(list(command), timeout_s=LIMIT_S)
        if done.failed is not None or done.timed_out:
            sys.exit(f"{' '.join(command)}: {done.why}")
        return done.outputs[0]


def compared(model: str, where: str, backend: str, rounds: int, iterations: int, sizes: Sequence[str]) -> list[Row]:
    """One case."""
    systems = [f"{kind} {size}" for size in ("default", *sizes) for kind in ("ddp", "stretto")] + ["ddp_lean default"]
    command = [sys.executable, str(RANK), model, backend, str(rounds), str(iterations), *systems]
    printed = on_one_host(command, 4) if where == "1x4" else in_the_lab(command)
    times: dict[str, list[float]] = json.loads(printed.strip().splitlines()[-1])
    middle = {system: median(values) for system, values in times.items()}

    def ratio(theirs: str, ours: str) -> float:
        return median(a / b for a, b in zip(times[theirs], times[ours], strict=True))

    best = {kind: min((s for s in systems if s.startswith(f"{kind} ")), key=middle.__getitem__) for kind in (
        "ddp", "stretto",
    )}  # fmt: skip
    spread = max((max(values) / min(values) for values in times.values()), default=1.0)
    return [{
        "case": f"{LABELS[model]} {where} {backend}", "system": "stretto/ddp", "ddp_ms": middle["ddp default"],
        "ddp_lean_ms": middle["ddp_lean default"], "stretto_ms": middle["stretto default"],
        "over_ddp": ratio("ddp default", "stretto default"),
        "over_lean_ddp": ratio("ddp_lean default", "stretto default"),
        "best_ddp_mb": best["ddp"].split()[1], "best_mb": best["stretto"].split()[1],
        "best_ddp_ms": middle[best["ddp"]], "best_ms": middle[best["stretto"]],
        "over_best_ddp": ratio(best["ddp"], best["stretto"]), "spread": spread,
    }]  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="end within a minute on two cores")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/results.md has it")
    parser.add_argument("--model", action="append", choices=LABELS, help="repeatable; all")
    parser.add_argument("--where", action="append", choices=WHERE, help="repeatable; both")
    parser.add_argument("--backend", action="append", choices=BACKENDS, help="repeatable; both")
    parser.add_argument("--sizes", nargs="+", default=SIZES_MB, help="bucket sizes in MiB beside the default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--iterations", type=int, default=8)
    args = parser.parse_args(argv)
    if args.quick:
        args.model, args.where, args.backend = ["vgg_like", "ncf_like_sparse"], ["1x4"], ["gloo"]
        args.rounds, args.iterations, args.sizes = 3, 5, SIZES_MB[:1]
    rows: list[Row] = []
    for where in args.where or WHERE:
        if where == "2x2" and (reason := unavailable()):
            print(f"2x2: skipped, {reason}", file=sys.stderr)
            continue
        for backend in args.backend or BACKENDS:
            for model in args.model or LABELS:
                begin = time.perf_counter()
                rows += compared(model, where, backend, args.rounds, args.iterations, args.sizes)
                told = " ".join(f"{key}={rows[-1][key]:.3g}" for key in ("over_ddp", "over_lean_ddp", "over_best_ddp"))
                print(f"{rows[-1]['case']}: {told} ({time.perf_counter() - begin:.0f} s)", file=sys.stderr, flush=True)
    finish(rows, args, title="stretto.torch.distribute beside DDP (over 1: ours is faster)")


if __name__ == "__main__":
    main()
