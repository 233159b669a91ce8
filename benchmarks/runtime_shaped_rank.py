# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/runtime_shaped.py: gloo and ours in turn, on the lab's shaped links.

All ranks of a lab are processes of one machine and share its clock: a run begins on all of them at a moment that was
agreed before, and ends when the last rank has its result.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stretto.torch
from stretto.runtime.torch_backend.torch_versions import all_gather_single, reduce_scatter_single

LEAD_S = 0.03
"""Between agreeing on a moment and the moment: the shapers' buckets fill up again, and messages are through."""
EXACT = 10_007
"""Elements that divide evenly by nothing."""
LONG_BYTES = 1 << 26
"""Not run once more to warm up."""


def call(kind: str, x: torch.Tensor, y: torch.Tensor, group: Any) -> None:
    """One collective of `x` into `y` (an all-reduce works in `x`)."""
    part = len(x) // dist.get_world_size()
    if kind == "all_reduce":
        dist.all_reduce(x, group=group)
    elif kind == "all_gather":
        all_gather_single(y, x[:part], group=group)
    elif kind == "reduce_scatter":
        reduce_scatter_single(y[:part], x, group=group)
    else:
        dist.all_to_all_single(y, x, group=group)


def exact(kind: str, groups: dict[str, Any]) -> bool:
    """Whether both systems give the same bits for whole numbers."""
    count = EXACT * dist.get_world_size()
    results = []
    for group in groups.values():
        x = torch.randint(-9999, 9999, (count,), generator=torch.Generator().manual_seed(dist.get_rank())).float()
        y = torch.zeros(count)
        call(kind, x, y, group)
        results.append(x if kind == "all_reduce" else y)
    same = torch.tensor([float(torch.equal(*results))])
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def hurry() -> None:
    """Let all threads of this process go before everything else on the machine, where that is allowed."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


def processor_ticks() -> tuple[int, int]:
    """(busy, all) of this machine's processors so far."""
    numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)


def sent_bytes() -> int:
    """What this host has sent on its uplink so far."""
    device = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == device:
            return int(counts.split()[8])
    raise SystemExit(f"no interface {device}")


def measure(run: Callable[[], object], times: int, group: Any = None) -> dict[str, Any]:
    """Per run from the agreed beginning until the last rank's end; and how busy processors and uplinks were.

    Args:
        run: what is measured.
        times: how often.
        group: the ranks that measure together; None takes all.

    Returns:
        Times of all runs, shares of processors, and bytes on the busiest uplink.
    """
    taken, busy, total, own, sent = [], 0, 0, 0.0, 0
    for _ in range(times):
        start = torch.tensor([time.monotonic() + LEAD_S], dtype=torch.float64)
        dist.all_reduce(start, dist.ReduceOp.MAX, group=group)
        time.sleep(max(0.0, float(start) - time.monotonic()))
        before, ticks, spent = sent_bytes(), processor_ticks(), time.process_time()
        run()
        end, spent = time.monotonic(), time.process_time() - spent
        after, sends = processor_ticks(), sent_bytes() - before
        slowest = torch.tensor([end, float(sends)], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        everyone = torch.tensor([spent], dtype=torch.float64)
        dist.all_reduce(everyone, group=group)
        taken.append((float(slowest[0]) - float(start)) * 1e6)
        own += float(everyone)
        busy, total, sent = busy + after[0] - ticks[0], total + after[1] - ticks[1], max(sent, int(slowest[1]))
    return {
        "times_us": taken,
        "cpu": own * 1e6 / sum(taken) / (os.cpu_count() or 1),
        "machine_cpu": busy / max(total, 1),
        "uplink_bytes": sent,
    }


def main() -> None:
    """Cases are [collective, bytes, runs]; rank 0 prints a line of JSON for each and system."""
    cases, urgent = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    groups = {"stretto": dist.new_group(backend="stretto"), "gloo": None}
    exact("all_reduce", groups)
    if urgent:
        hurry()
    for kind, nbytes, times in cases:
        same = exact(kind, groups)
        x, y = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
        for system, group in groups.items():
            if system == "stretto" or nbytes < LONG_BYTES:
                call(kind, x, y, group)
            found = measure(partial(call, kind, x, y, group), times)
            choice = stretto.torch.last_choice()
            ran = choice.program if system == "stretto" and choice is not None else ""
            if dist.get_rank() == 0:
                what = {"system": system, "collective": kind, "nbytes": nbytes, "program": ran, "exact": same}
                print(json.dumps(what | found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
