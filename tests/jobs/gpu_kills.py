# SPDX-License-Identifier: Apache-2.0
"""Ranks that are killed at random moments while collectives run on GPU memory: what the others get, and how soon.

python tests/jobs/gpu_kills.py --trials 50 --together 4 [--ranks 2] [--seed 0]

Run it without MPS (or start MPS anew for each trial): there a killed client can take the others' GPU with it, which is
counted as a failure of the bed. Every trial has processes of its own, forked from one that has loaded PyTorch already.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stretto.torch
from stretto.errors import StrettoError

START_S, END_S = 60.0, 25.0
LOST_CUDA = ("CUDA error", "CUDA:", "MPS", "the GPU has failed")


def calls_of(seed: int, device: torch.device, world: int) -> Any:
    """Collectives without end, the same on all ranks."""
    draw = random.Random(seed)
    shared = stretto.torch.symmetric_empty(1 << 18, device=device)
    while True:
        count = draw.choice([1, 100, 10_000, 200_000]) * world
        tensor = torch.ones(count, device=device)
        kind = draw.randrange(5)
        if kind == 0:
            yield dist.all_reduce(tensor)
        elif kind == 1:
            yield dist.all_gather_into_tensor(tensor, tensor[: count // world].clone())
        elif kind == 2:
            yield dist.reduce_scatter_tensor(tensor[: count // world].clone(), tensor)
        elif kind == 3:
            yield dist.all_reduce(shared)
        else:
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            yield work.wait()


def rank_main(folder: Path, rank: int, seed: int) -> None:
    """One rank: calls until something is raised; what, when, and whether its GPU still works."""
    faulthandler.dump_traceback_later(START_S + END_S, exit=True)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("stretto", timeout=timedelta(seconds=60))
    calls = calls_of(seed, device, dist.get_world_size())
    for _ in range(12):
        next(calls)
    torch.cuda.synchronize()
    dist.barrier()
    (folder / f"ready{rank}").touch()
    draw = random.Random(seed)
    found: dict[str, Any] = {"said": ""}
    try:
        while True:
            next(calls)
            if draw.random() < 0.3:
                torch.cuda.synchronize()
    except StrettoError as error:
        found["said"] = f"{type(error).__name__}: {error}"
    except Exception as error:
        found["said"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    found["at"] = time.time()
    try:
        found["gpu_works"] = float((torch.ones(100, device=device) * 2).sum()) == 200.0
    except RuntimeError as error:
        found["gpu_works"], found["cuda"] = False, str(error).splitlines()[0]
    (folder / f"{rank}.json").write_text(json.dumps(found))


def start_rank(folder: Path, rank: int, ranks: int, port: int, seed: int) -> int:
    """A forked process; its id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        out = os.open(folder / f"out{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo",
        )  # fmt: skip
        rank_main(folder, rank, seed)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait_until(check: Any, limit_s: float) -> bool:
    deadline = time.time() + limit_s
    while not check():
        if time.time() > deadline:
            return False
        time.sleep(0.02)
    return True


def trial(number: int, ranks: int, seed: int) -> tuple[str, str, float]:
    """One job, one kill: (right, bed, wrong, hang or no start), what was said, and seconds until the last one knew."""
    draw = random.Random(f"{seed} {number}")
    victim = draw.randrange(ranks)
    with tempfile.TemporaryDirectory() as name, socket.socket() as free:
        folder = Path(name)
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        children = [start_rank(folder, rank, ranks, port, seed * 1000 + number) for rank in range(ranks)]
        others = [rank for rank in range(ranks) if rank != victim]
        try:
            if not wait_until(lambda: all((folder / f"ready{r}").exists() for r in range(ranks)), START_S):
                return "no start", _said(folder, ranks), 0.0
            time.sleep(draw.random() * 0.5)
            killed = time.time()
            os.kill(children[victim], signal.SIGKILL)
            if not wait_until(lambda: all((folder / f"{r}.json").exists() for r in others), END_S):
                return "hang", _said(folder, ranks), END_S
            time.sleep(0.05)
            told = [json.loads((folder / f"{r}.json").read_text()) for r in others]
        finally:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    took_s = max(one["at"] for one in told) - killed
    said = "; ".join(sorted({one["said"] + one.get("cuda", "") for one in told}))
    # Rank 0 also serves the store, by which it may be named.
    names = [f"rank {victim}", *(["serves the store"] if victim == 0 else [])]
    if all(one["said"].startswith("PeerLost") and any(name in one["said"] for name in names) for one in told):
        if all(one["gpu_works"] for one in told):
            return "right", said, took_s
        return "bed", said, took_s
    return ("bed" if any(word in said for word in LOST_CUDA) else "wrong"), said, took_s


def _said(folder: Path, ranks: int) -> str:
    return " | ".join((folder / f"out{r}").read_text()[-600:] for r in range(ranks) if (folder / f"out{r}").exists())


def main() -> None:
    """All trials, several at a time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--together", type=int, default=4)
    parser.add_argument("--ranks", default="2,4", help="of a trial, drawn from these")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=140, help="no trial starts after so long")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    os.environ.setdefault("STRETTO_GPU", "on")
    began, sizes = time.time(), [int(one) for one in options.ranks.split(",")]
    with tempfile.NamedTemporaryFile() as results:
        workers = []
        for worker in range(options.together):
            # No threads here: each of these processes forks ranks.
            child = os.fork()
            if child:
                workers.append(child)
                continue
            for number in range(worker, options.trials, options.together):
                if time.time() - began > options.seconds:
                    break
                found = trial(number, sizes[number % len(sizes)], options.seed)
                print(f"{number}: {found[0]} after {found[2]:.2f} s: {found[1][:1200]}", flush=True)
                with open(results.name, "a") as file:
                    file.write(json.dumps(found) + "\n")
            os._exit(0)
        for child in workers:
            os.waitpid(child, 0)
        done = [json.loads(line) for line in Path(results.name).read_text().splitlines()]
    took = sorted(one[2] for one in done if one[0] == "right")
    print("kills:", dict(Counter(one[0] for one in done)), f"{time.time() - began:.0f} s", flush=True)
    if took:
        print(f"until the last rank knew: median {took[len(took) // 2]:.2f} s, most {took[-1]:.2f} s", flush=True)
    os._exit(any(one[0] in ("wrong", "hang") for one in done))


if __name__ == "__main__":
    main()
