# SPDX-License-Identifier: Apache-2.0
"""Collectives on one host, side by side in one run: the executor and OpenMPI, without Python; stretto and gloo, as
`torch.distributed` runs them.

Every run begins at a barrier; a time is the slowest rank's, of several runs the median. The systems take turns, and of
their turns the best counts: a virtual machine's cores may share a cache at one moment and not at the next. `ratio` is
the system's time over ours at the same level. `bound_us` is one pass over memory, all ranks at once copying one buffer
of that size; `passes` is how many of them a system takes. Collectives between hosts, and training there, are in
benchmarks/runtime_shaped.py, which this runs, too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import runtime_shaped
from common import Row, finish, in_own_process, options, save

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SIZES = {1 << 10: "1 KB", 1 << 20: "1 MB", 1 << 26: "64 MB"}
SMALL = 1 << 14
SOAK = 10_000
ROUNDS = 3
Job = Callable[[int, int, "Meeting"], Any]


def runs_of(nbytes: int, quick: bool) -> int:
    few = {1 << 10: 50, 1 << 20: 9, 1 << 26: 3}[nbytes]
    return few if quick else 4 * few


def algorithm_for(kind: str, nbytes: int, world: int) -> str:
    """What the executor runs here: one step where latency counts, pieces through the cache where bandwidth does."""
    if kind == "all_reduce" and nbytes <= SMALL and world & (world - 1) == 0:
        return "recursive_doubling"
    return "direct"


class Meeting:
    """An all-gather of bytes among forked ranks, through files."""

    def __init__(self, folder: str, rank: int, world: int) -> None:
        self.folder, self.rank, self.world, self.round = Path(folder), rank, world, 0

    def exchange(self, mine: bytes) -> list[bytes]:
        self.round += 1
        draft = self.folder / f"draft.{self.rank}"
        draft.write_bytes(mine)
        draft.rename(self.folder / f"{self.round}.{self.rank}")
        found = []
        for rank in range(self.world):
            path = self.folder / f"{self.round}.{rank}"
            while not path.exists():
                time.sleep(0.001)
            found.append(path.read_bytes())
        return found


def on_ranks(world: int, job: Job) -> Any:
    """Fork the ranks; what rank 0 returns."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        here, there = context.Pipe(duplex=False)

        def main(rank: int) -> None:
            result = job(rank, world, Meeting(folder, rank, world))
            if rank == 0:
                there.send(result)

        ranks = [context.Process(target=main, args=(rank,)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        there.close()
        try:
            result = here.recv()
        except EOFError:
            sys.exit("a rank failed; its output is above")
        for rank in ranks:
            rank.join()
    return result


def slowest(meeting: Meeting, taken: list[float]) -> float:
    """The median over runs of the slowest rank's time."""
    everyone = [np.frombuffer(b) for b in meeting.exchange(np.array(taken).tobytes())]
    return float(np.median(np.max(everyone, axis=0)))


def row(kind: str, nbytes: int, world: int, system: str, time_us: float, **more: Any) -> Row:
    case = f"1x{world} {kind} {SIZES[nbytes]}"
    return {"case": case, "system": system, "layout": f"1x{world}", "collective": kind, "nbytes": nbytes,
            "time_us": time_us, **more}  # fmt: skip


def stretto(world: int, quick: bool) -> list[Row]:
    from stretto.algorithms import algorithm
    from stretto.programs.lower import lower
    from stretto.runtime.executor.executor import Executor

    programs = {
        (kind, nbytes): lower(algorithm(algorithm_for(kind, nbytes, world), kind, world), fifo_depth=2)
        for kind in COLLECTIVES
        for nbytes in SIZES
    }
    fence = lower(algorithm("direct", "all_reduce", world))

    def job(rank: int, world: int, meeting: Meeting) -> list[Row]:
        rows = []
        with Executor(rank, world, meeting.exchange, token=b"only for this run") as ex:
            gate = ex.load(fence)
            for (kind, nbytes), program in programs.items():
                handle = ex.load(program)
                count = nbytes // 4
                inputs, outputs = handle.buffer_elements(count)
                x, y = np.ones(inputs, np.float32), np.zeros(outputs, np.float32)
                times = runs_of(nbytes, quick)
                taken = ex.repeat(handle, x.ctypes.data, y.ctypes.data, count, times=times + 2, fence=gate)[2:]
                rows.append(row(kind, nbytes, world, "stretto", slowest(meeting, taken), algorithm=program.name))
            for nbytes in SIZES:
                x, y = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
                passes = []
                for _ in range(runs_of(nbytes, quick)):
                    ex.start(gate, x.ctypes.data, y.ctypes.data, world, "uint8").wait()
                    begin = time.perf_counter()
                    np.copyto(y, x)
                    passes.append((time.perf_counter() - begin) * 1e6)
                bound = slowest(meeting, passes)
                for each in rows:
                    if each["nbytes"] == nbytes:
                        each["bound_us"] = bound
            meeting.exchange(b"")
        return rows

    result: list[Row] = on_ranks(world, job)
    return result


def through_torch(backend: str, system: str, world: int, quick: bool) -> list[Row]:
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    import torch
    import torch.distributed as dist

    import stretto.torch  # noqa: F401  (registers the backend)

    def job(rank: int, world: int, meeting: Meeting) -> list[Row]:
        dist.init_process_group(backend, f"file://{meeting.folder}/store", rank=rank, world_size=world)
        rows = []
        for kind in COLLECTIVES:
            for nbytes in SIZES:
                x, y = torch.ones(nbytes // 4), torch.zeros(nbytes // 4)
                part = nbytes // 4 // world
                calls: dict[str, Callable[[], object]] = {
                    "all_reduce": partial(dist.all_reduce, y),
                    "all_gather": partial(dist.all_gather_into_tensor, y, x[:part]),
                    "reduce_scatter": partial(dist.reduce_scatter_tensor, y[:part], x),
                    "all_to_all": partial(dist.all_to_all_single, y, x),
                    "broadcast": partial(dist.broadcast, y, 0),
                }
                taken = []
                for _ in range(runs_of(nbytes, quick) + 2):
                    dist.barrier()
                    begin = time.perf_counter()
                    calls[kind]()
                    taken.append((time.perf_counter() - begin) * 1e6)
                rows.append(row(kind, nbytes, world, system, slowest(meeting, taken[2:])))
        dist.destroy_process_group()
        return rows

    result: list[Row] = on_ranks(world, job)
    return result


def openmpi(world: int, quick: bool) -> list[Row]:
    source = Path(__file__).with_name("openmpi_collectives.c")
    sizes = [str(v) for nbytes in SIZES for v in (nbytes, runs_of(nbytes, quick))]
    allowed = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "collectives"
        subprocess.run(["mpicc", "-O2", "-o", str(program), str(source)], check=True)
        command = ["mpirun", *allowed, "--oversubscribe", "--mca", "btl", "self,vader", "-n", str(world), str(program)]
        done = subprocess.run([*command, *sizes], check=True, capture_output=True, text=True)
    found = []
    for line in done.stdout.splitlines():
        kind, nbytes, taken = line.split()
        found.append(row(kind, int(nbytes), world, "openmpi", float(taken)))
    return found


def soak(world: int, quick: bool) -> list[Row]:
    """Mixed collectives, every result checked; what a rank holds before and after."""
    from stretto.algorithms import algorithm
    from stretto.programs.lower import lower
    from stretto.runtime.executor.executor import Executor

    names = {"all_reduce": "ring", "all_gather": "direct", "reduce_scatter": "ring", "all_to_all": "direct"}
    programs = {kind: lower(algorithm(name, kind, world)) for kind, name in names.items()}
    total = SOAK // 10 if quick else SOAK

    def held() -> tuple[int, int]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/smaps_rollup") as rollup:
            sizes = dict(line.split()[:2] for line in list(rollup)[1:])
        return len(os.listdir("/proc/self/fd")), int(sizes["Anonymous:"]) // 1024

    def job(rank: int, world: int, meeting: Meeting) -> list[Row]:
        wrong, before, begin = 0, (0, 0), time.perf_counter()
        with Executor(rank, world, meeting.exchange, token=b"only for this run") as ex:
            handles = {kind: ex.load(program) for kind, program in programs.items()}
            for i in range(total):
                if i == total // 10:
                    before = held()
                kind = list(programs)[i % len(programs)]
                count = world * (1 + (i * 7919) % (30_000 if i % 20 == 0 else 500))
                inputs, outputs = handles[kind].buffer_elements(count)
                shards = [(np.arange(inputs) % 17 + r + i % 5).astype(np.float32) for r in range(world)]
                y = np.zeros(outputs, np.float32)
                ex.start(handles[kind], shards[rank].ctypes.data, y.ctypes.data, count).wait()
                if kind == "all_gather":
                    want = np.concatenate(shards)
                elif kind == "all_to_all":
                    want = np.concatenate([np.split(s, world)[rank] for s in shards])
                else:
                    want = np.sum(shards, axis=0, dtype=np.float32)
                    want = np.split(want, world)[rank] if kind == "reduce_scatter" else want
                wrong += not np.array_equal(y, want)
            meeting.exchange(b"")
            after, counters = held(), ex.counters()
        taken = (time.perf_counter() - begin) * 1e6
        everyone = [json.loads(b) for b in meeting.exchange(json.dumps([wrong, *before, *after]).encode())]
        return [{
            "case": f"soak of {total} on {world} ranks", "system": "stretto", "layout": f"1x{world}",
            "collective": "mixed", "time_us": taken, "wrong": sum(e[0] for e in everyone),
            "leaked_descriptors": max(e[3] - e[1] for e in everyone),
            "grown_mib": max(e[4] - e[2] for e in everyone), "staging_bytes": counters["staging_bytes"],
        }]  # fmt: skip

    result: list[Row] = on_ranks(world, job)
    return result


CASES: dict[str, Callable[[int, bool], list[Row]]] = {
    "stretto": stretto,
    "openmpi": openmpi,
    "stretto (torch)": partial(through_torch, "stretto", "stretto (torch)"),
    "gloo": partial(through_torch, "gloo", "gloo"),
    "soak": soak,
}
OURS = {"stretto": "stretto", "openmpi": "stretto", "stretto (torch)": "stretto (torch)", "gloo": "stretto (torch)"}
"""What a system is compared with."""


def one_host(quick: bool) -> list[Row]:
    systems = list(OURS)
    if not (shutil.which("mpicc") and shutil.which("mpirun")):
        print("OpenMPI is not installed here (apt-get install openmpi-bin libopenmpi-dev): without it", file=sys.stderr)
        systems.remove("openmpi")
    rows: list[Row] = []
    for world in (4,) if quick else (4, 8):
        found: dict[str, dict[str, Row]] = {system: {} for system in systems}
        for system in systems * ROUNDS:
            for r in in_own_process(__file__, f"{system}:{world}", quick):
                known = found[system].setdefault(r["case"], r)
                known |= {key: min(known[key], r[key]) for key in ("time_us", "bound_us") if key in r}
        for case, first in found["stretto"].items():
            for system in systems:
                each, ours = found[system][case]["time_us"], found[OURS[system]][case]["time_us"]
                bound = first["bound_us"]
                more = {"ratio": each / ours, "bound_us": bound, "passes": each / bound}
                rows.append(found[system][case] | more)
    return rows + in_own_process(__file__, "soak:8", quick)


def main() -> None:
    args = options(__doc__, only=("one_host", "shaped", "examples"))
    if args.case:
        system, world = args.case.split(":")
        print(json.dumps(CASES[system](int(world), args.quick)))
        return
    here = one_host(args.quick) if args.only in (None, "one_host") else []
    if here:
        finish(here, args, title="Collectives on one host")
    there = [] if args.only == "one_host" else runtime_shaped.run(args)
    if args.json:
        save(here + there, args.json)


if __name__ == "__main__":
    main()
