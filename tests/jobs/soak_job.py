# SPDX-License-Identifier: Apache-2.0
"""A long job whose plan changes again and again: ``soak_job.py FOLDER CARRIER ITERATIONS EVERY [PAUSE_S]``.

Writes FOLDER/report: memory, descriptors, threads and shared memory of the controller and of every rank under each
plan, their growth by a straight line after the first fifth, and for how many iterations plans have run. A real planner
plans now and then; plans made by hand take the place of what it finds, so that they really change. For 10,000
iterations with a new plan every 200:

``GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 python tests/jobs/soak_job.py /tmp/soak executor 10000 200``
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from kills_job import FORK, TOKEN, RestlessController, judge_iterations, read_log, train

from stretto.control.worker import Worker

RANKS = 2
CALL_TIMEOUT_S = 120.0
SILENT_S = 300.0
"""Without an iteration for so long the job hangs."""
KEYS = ("resident_kib", "anonymous_kib", "descriptors", "threads", "shared_files")
PAUSE_S = 0.02
"""After every iteration of a rank, so that 200 iterations are longer than a real planner takes (some seconds)."""


class PunctualController(RestlessController):
    """Plan number n is made in iteration n x `every`, or as soon as the one before it is active."""

    def _activated(self, iteration: int) -> None:
        """Leave the iteration of the next plan as it is: plans that came late are caught up with."""


def control(folder: Path, every: int) -> None:
    """The controller, until it is killed."""
    controller = PunctualController(folder / "state.json", 0, every, Worker)
    controller._budget_s = 0.1
    server = controller.serve(f"unix:{folder}/socket", token=TOKEN)
    while server.address:
        time.sleep(60)


def sample(pid: int) -> dict[str, int]:
    """What a process holds."""
    proc = Path(f"/proc/{pid}")
    rollup = dict(line.split()[:2] for line in (proc / "smaps_rollup").read_text().splitlines()[1:])
    shared = {word for word in (proc / "maps").read_text().split() if word.startswith(("/dev/shm/", "/memfd:"))}
    memory = (int(rollup["Rss:"]), int(rollup["Anonymous:"]))
    counts = (*memory, len(os.listdir(proc / "fd")), len(os.listdir(proc / "task")), len(shared))
    return dict(zip(KEYS, counts, strict=True))


def thread_names(pid: int) -> dict[str, int]:
    """How many threads of a process have each name; gRPC names its own, and Python's have that of the process."""
    return dict(Counter((task / "comm").read_text().strip() for task in Path(f"/proc/{pid}/task").iterdir()))


def slopes(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Growth per 1,000 iterations after the first fifth, by process and quantity."""
    later = rows[len(rows) // 5 :]
    at = np.array([row["iteration"] for row in later]) / 1000
    return {
        name: {key: round(float(np.polyfit(at, [row[name][key] for row in later], 1)[0]), 3) for key in KEYS}
        for name in rows[0]
        if name not in ("iteration", "plan", "hash")
    }


def plan_lengths(folder: Path) -> list[int]:
    """For how many iterations each plan but the last has run on rank 0."""
    plans = [plan for _, plan, _ in read_log(folder, 0)]
    starts = [at for at in range(1, len(plans)) if plans[at] != plans[at - 1]]
    return np.diff(starts).tolist()


def main(folder: Path, carrier: str, iterations: int, every: int, pause_s: float = PAUSE_S) -> None:
    """Run the job, and take samples, until so many iterations have run under so many plans."""
    folder.mkdir(parents=True, exist_ok=True)
    # On a busy machine the controller is late, and plans last for longer than they should.
    least_plans = iterations // every // 2
    controller = FORK.Process(target=control, args=(folder, every))
    ranks = [
        FORK.Process(target=train, args=(folder, rank, RANKS, carrier, CALL_TIMEOUT_S, pause_s))
        for rank in range(RANKS)
    ]
    processes = {"controller": controller, **{f"rank {rank}": process for rank, process in enumerate(ranks)}}
    for process in processes.values():
        process.start()
    rows: list[dict[str, Any]] = []
    names: list[dict[str, dict[str, int]]] = []
    reached, reached_at = 0, time.monotonic()
    try:
        while reached < iterations or len(rows) < least_plans:
            time.sleep(0.2)
            log = read_log(folder, 0)
            if len(log) > reached:
                reached, reached_at = len(log), time.monotonic()
            assert all(process.exitcode is None for process in processes.values()), "a process has ended"
            assert time.monotonic() < reached_at + SILENT_S, f"no iteration after {reached}"
            plan, _, hash_ = log[-1][1].partition(".") if log else ("0", "", "")
            if int(plan):
                now = {name: sample(process.pid or 0) for name, process in processes.items()}
                if rows and rows[-1]["plan"] == int(plan):
                    # The plan before may have run out by now.
                    rows[-1] |= {name: {key: min(rows[-1][name][key], now[name][key]) for key in KEYS} for name in now}
                else:
                    rows.append({"iteration": reached, "plan": int(plan), "hash": hash_, **now})
                    names.append({name: thread_names(process.pid or 0) for name, process in processes.items()})
        (folder / "stop").touch()
        for process in ranks:
            process.join(SILENT_S)
        wrong, counts = judge_iterations(folder, RANKS)
        wrong += [f"rank {rank} ended with {one.exitcode}" for rank, one in enumerate(ranks) if one.exitcode]
        report = {"wrong": wrong, **counts, "per_1000_iterations": slopes(rows), "rows": rows}
        report |= {"plan_lengths": plan_lengths(folder), "thread_names": [names[0], names[-1]]}
        (folder / "report").write_text(json.dumps(report))
    finally:
        for process in processes.values():
            if process.exitcode is None:
                process.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *map(float, sys.argv[5:6]))
