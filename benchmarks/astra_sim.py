# SPDX-License-Identifier: Apache-2.0
"""Whole jobs beside whole jobs: the same collective on the same network, by Stretto and by ASTRA-sim.

ASTRA-sim (its analytical backend, https://github.com/astra-sim/astra-sim) is built by hand beside this project; its
binary is named with `--astra-sim`. This script writes its inputs, runs it and compares the predicted time and the CPU
seconds (user and system, of the whole process) with ours. Our process starts Python, builds the program, proves it
right and simulates it link by link, with the bytecode that an installed package has (the first of four runs makes it,
`cpu_s` is the best of the others, `numpy_cpu_s` that of a process that imports NumPy and does nothing);
`work_cpu_s` leaves out the start of Python and the imports. One rank stands for all of them; `whole_cpu_s` and
`whole_time_us` are those of a process that does the same for every rank. Without `--astra-sim` its figures are those
that this script measured at commit b017779 (`MARKS`).

One job is not alike, and says so: with several chunks ASTRA-sim's congestion-unaware backend gives every chunk in
flight the whole rate of its link, so that its time falls below what the links can carry.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from astra_jobs import JOBS, Job
from common import Row, common_options, finish

GIB_PER_GB = 1e9 / 2**30  # ASTRA-sim's GB/s are 2^30 bytes per second
TOPOLOGIES = {"ring": "Ring", "switch": "Switch", "fully_connected": "FullyConnected"}
IMPLEMENTATIONS = {"ring": "ring", "switch": "halvingDoubling", "fully_connected": "direct"}


SCRIPT = Path(__file__).with_name("astra_jobs.py")
BYTECODE = tempfile.TemporaryDirectory()
RUNS = 3
MAX_WHOLE = 1024
"""The most ranks that are also simulated rank by rank."""


MARKS = {
    3: (3583.0, 4.137), 7: (2578.0, 0.7696), 11: (1389.0, 0.1943), 12: (9959.0, 95.68),
}  # fmt: skip
"""The predicted time and the CPU seconds of ASTRA-sim's jobs at commit b017779, for the larger jobs."""


def astra_inputs(job: Job, folder: Path) -> list[str]:
    """Write what ASTRA-sim reads and return its options."""
    from stretto.workload import Op, Workload, chakra_write

    op = Op(name="collective", kind="all_reduce", nbytes=job.nbytes)
    chakra_write.write(Workload(name="job", num_ranks=job.ranks, ops=(op,)), folder / "trace")
    implementations = [IMPLEMENTATIONS[kind] for kind, _, _, _ in job.dims]
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
    files = {
        "system.json": json.dumps({
            "scheduling-policy": "LIFO", "endpoint-delay": 1, "active-chunks-per-dimension": 1,
            "preferred-dataset-splits": job.chunks, "local-mem-bw": 1_000_000_000, "boost-mode": 0,
            "collective-optimization": "localBWAware",  # reduce-scatter inwards, all-gather outwards
            **{f"{kind}-implementation": implementations for kind in kinds},
        }),
        "memory.json": json.dumps({"memory-type": "NO_MEMORY_EXPANSION"}),
        "network.yml": "\n".join([
            f"topology: [ {', '.join(TOPOLOGIES[kind] for kind, _, _, _ in job.dims)} ]",
            f"npus_count: [ {', '.join(str(size) for _, size, _, _ in job.dims)} ]",
            f"bandwidth: [ {', '.join(repr(rate * GIB_PER_GB) for _, _, rate, _ in job.dims)} ]",
            f"latency: [ {', '.join(repr(1e3 * latency) for _, _, _, latency in job.dims)} ]",
        ]),
    }  # fmt: skip
    for name, text in files.items():
        (folder / name).write_text(text + "\n")
    return [
        f"--workload-configuration={folder / 'trace' / 'job'}",
        f"--system-configuration={folder / 'system.json'}",
        f"--remote-memory-configuration={folder / 'memory.json'}",
        f"--network-configuration={folder / 'network.yml'}",
    ]


def run(command: Sequence[str | Path], folder: Path) -> tuple[str, float]:
    """What a command printed, and the CPU seconds of its process."""
    settings = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    settings["PYTHONPYCACHEPREFIX"] = BYTECODE.name
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, check=False, env=settings)
    if done.returncode:
        sys.exit(f"{command[0]}: exit code {done.returncode}\n{done.stdout[-500:]}{done.stderr[-1500:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def compare(number: int, binary: Path | None) -> Row:
    """One row: both times, both CPU seconds, and how many times ours ASTRA-sim needs."""
    job = JOBS[number]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        theirs_us, theirs_s = astra(job, binary, folder) if binary else MARKS.get(number, (None, None))
        run([sys.executable, SCRIPT, str(number)], folder)
        runs = [run([sys.executable, SCRIPT, str(number)], folder) for _ in range(RUNS)]
        numpy_s = min(run([sys.executable, "-c", "import numpy"], folder)[1] for _ in range(RUNS))
        said, ours_s = min(runs, key=lambda one: one[1])
        found = json.loads(said)
        whole: Row = {}
        if job.ranks <= MAX_WHOLE:
            said, whole_s = run([sys.executable, SCRIPT, f"{number}:whole"], folder)
            whole = {"whole_time_us": json.loads(said)["time_us"], "whole_cpu_s": whole_s}
    return {
        "case": job.name, "time_us": found["time_us"], "astra_time_us": theirs_us,
        "cpu_s": ours_s, "numpy_cpu_s": numpy_s, "work_cpu_s": found["work_cpu_s"], "astra_cpu_s": theirs_s,
        "astra_over_ours": None if theirs_s is None else theirs_s / ours_s, **whole, "note": job.note or None,
    }  # fmt: skip


def astra(job: Job, binary: Path, folder: Path) -> tuple[float, float]:
    """ASTRA-sim's time in microseconds, and its CPU seconds."""
    text, theirs_s = run([binary, *astra_inputs(job, folder)], folder)
    cycles = [int(found) for found in re.findall(r"sys\[\d+\] finished, (\d+) cycles", text)]
    if not cycles:
        sys.exit(f"{binary}: printed no finished cycles\n{text[-2000:]}")
    return max(cycles) / 1e3, theirs_s


def main() -> None:
    parser = common_options(__doc__)
    parser.add_argument("--astra-sim", type=Path, metavar="BINARY", help="AstraSim_Analytical_Congestion_Unaware")
    parser.add_argument(
        "--only", default="", metavar="PATTERN", help="the jobs whose names have it (a regular expression)"
    )
    args = parser.parse_args()
    if args.astra_sim is not None and not os.access(args.astra_sim, os.X_OK):
        parser.error("--astra-sim: name the binary of ASTRA-sim; it is built by hand, see its own documentation")
    small = [at for at, job in enumerate(JOBS) if not args.quick or job.ranks <= 256]
    numbers = [at for at in small if re.search(args.only, JOBS[at].name)]
    rows = [compare(at, args.astra_sim and args.astra_sim.resolve()) for at in numbers]
    finish(rows, args, title="Stretto beside ASTRA-sim")


if __name__ == "__main__":
    main()
