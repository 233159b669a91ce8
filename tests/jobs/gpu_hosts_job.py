# SPDX-License-Identifier: Apache-2.0
"""Scenarios of collectives over GPUs of several hosts, with stand-ins for the GPUs; hosts are names in the executor."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from executor_ranks import Rank, Scenario, main
from hosts_standin import StandinDevice, StandinEvent, StandinLegs, StandinStream

from stretto.errors import StrettoError
from stretto.runtime.executor.executor import failure_error
from stretto.runtime.gpu import hosts as hosts_module
from stretto.runtime.gpu.hosts import HostsCommunicator
from stretto.runtime.gpu.hosts_programs import KINDS, program_for, two_level
from stretto.runtime.gpu.hosts_proxy import NetworkProxy, ProgressBoard, board_bytes
from stretto.runtime.torch_backend.executor_legs import ExecutorLegs

FOLDER = Path(sys.argv[1]).parent
PLACES = {
    2: [[0, 1]],
    3: [[0, 0, 1], [1, 0, 1], [0, 1, 2]],
    4: [[0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 1]],
    5: [[0, 0, 0, 1, 1], [0, 1, 2, 2, 2]],
    6: [[0, 0, 0, 1, 1, 2], [0, 0, 1, 1, 2, 2]],
}
TYPES = (
    "float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64", "uint8",
)  # fmt: skip
WAYS: dict[str, Any] = {
    "sum": lambda x: x.sum(0), "avg": lambda x: x.mean(0), "min": lambda x: x.amin(0), "max": lambda x: x.amax(0),
    "prod": lambda x: x.prod(0),
}  # fmt: skip


class Group:
    """One rank's communicator in a job whose hosts are names."""

    def __init__(self, rank: Rank, hosts: list[int], name: str, *, arena_bytes: int, delay_s: float = 0.0) -> None:
        self.hosts, self.rank = hosts, rank.rank
        self.errors: list[str] = []
        self.executor = rank.executor(timeout_s=60, host=f"host{hosts[rank.rank]}")
        near = [r for r, host in enumerate(hosts) if host == hosts[rank.rank]]
        path = FOLDER / f"{name}-{hosts[rank.rank]}"
        if near[0] == rank.rank:
            path.write_bytes(bytes(board_bytes(len(near))))
        rank.barrier()
        self.device = StandinDevice(delay_s)
        board = ProgressBoard(path, near.index(rank.rank), len(near))
        network = ExecutorLegs(self.executor, range(rank.world), 2)
        self.proxy = NetworkProxy(partial(network.carrier, board), self.device, failure_error, self._failed, self._look)
        local = StandinLegs(self.executor, near, 1) if len(near) > 1 else None
        self.communicator = HostsCommunicator(
            rank.rank, hosts, local=local, network=network, proxy=self.proxy, device=self.device,
            arena_bytes=arena_bytes,
        )  # fmt: skip
        self.stream = StandinStream()

    def _failed(self, error: Exception) -> None:
        self.errors.append(f"{type(error).__name__}: {error}")

    def _look(self) -> None:
        found = self.executor.find_culprit(range(len(self.hosts)))
        if found is not None:
            raise StrettoError(found[1])

    def run(self, loaded: Any, source: torch.Tensor, target: torch.Tensor, limit_s: float = 30) -> StandinEvent:
        """Launch a call; the event of its end."""
        end = StandinEvent()
        self.communicator.launch(loaded, source, target, self.stream, limit_s)
        self.stream.add(end.set)
        return end

    def close(self) -> None:
        """Leave the job."""
        self.communicator.close()
        self.executor.close()


def wanted(kind: str, parts: list[torch.Tensor], rank: int, root: int, how: str) -> torch.Tensor:
    """What a rank ends with, from the definition."""
    n = len(parts)
    if kind in ("all_reduce", "reduce", "reduce_scatter"):
        stack = torch.stack(parts)
        wide = stack.to(torch.float64 if stack.dtype.is_floating_point else torch.int64)
        total: torch.Tensor = WAYS[how](wide).to(stack.dtype)
        return total.view(n, -1)[rank] if kind == "reduce_scatter" else total
    if kind == "all_gather":
        return torch.cat(parts)
    if kind == "all_to_all":
        return torch.cat([part.view(n, -1)[rank] for part in parts])
    return parts[root]


def one_call(group: Group, seed: int, programs: dict[Any, Any]) -> str:
    """A collective drawn from a seed; what was wrong."""
    rng = np.random.default_rng(seed)
    n, rank, kind = len(group.hosts), group.rank, str(rng.choice(KINDS))
    root, how = int(rng.integers(n)), str(rng.choice(list(WAYS)))
    dtype = str(rng.choice(TYPES))
    how = "sum" if how == "avg" and dtype not in TYPES[:4] else how
    moved = kind in ("all_gather", "all_to_all", "broadcast")
    dtype, how = ("uint8", "sum") if moved else (dtype, how)
    count = int(2 ** rng.uniform(0, 14))
    make = program_for if rng.integers(2) else two_level
    key = make, kind, root
    programs.setdefault(key, make(kind, group.hosts, root))
    many = count * (n if kind in ("reduce_scatter", "all_to_all") else 1)
    low = 0 if dtype == "uint8" else -2
    size = n if how == "avg" else 1
    draw = [rng.integers(low, 3, many) * size for _ in range(n)]
    if how == "prod":
        draw = [rng.choice([1, 2] if low == 0 else [-1, 1, 2], many) for _ in range(n)]
    parts = [torch.from_numpy(values).to(getattr(torch, dtype)) for values in draw]
    outputs = {"all_gather": count * n, "reduce_scatter": count}.get(kind, many)
    mine = parts[rank].clone()
    in_place = kind in ("all_reduce", "broadcast", "reduce") or (kind == "all_gather" and bool(rng.integers(2)))
    target = mine if in_place else torch.full((outputs,), 99).to(mine.dtype)
    if kind == "all_gather" and in_place:
        target = torch.full((outputs,), 99).to(mine.dtype)
        target[rank * count : (rank + 1) * count] = mine
        mine = target[rank * count : (rank + 1) * count]
    nbytes = max(mine.nbytes, target.nbytes)
    loaded = group.communicator.load(programs[key], dtype=dtype, reduce=how, nbytes=nbytes)
    group.run(loaded, mine, target).wait()
    if kind == "reduce" and rank != root:
        return ""
    if torch.equal(target, wanted(kind, parts, rank, root, how)):
        return ""
    return f"{kind} {how} {dtype} {count} root {root} {loaded.describe()} on {group.hosts}: {group.errors}"


def random_calls(rank: Rank) -> list[str]:
    """What came out wrong over random collectives on all placements, with small slices so that there are many."""
    wrong = []
    for at, hosts in enumerate(PLACES[rank.world]):
        hosts_module.SLICE_BYTES = [1 << 12, 1 << 16][at % 2]
        group = Group(rank, hosts, f"random{rank.world}{at}", arena_bytes=1 << 19, delay_s=0.0002 * (at % 2))
        programs: dict[Any, Any] = {}
        for seed in range(40):
            said = one_call(group, 1000 * at + seed, programs)
            wrong += [said] if said else []
        wrong += group.errors
        rank.barrier()
        group.close()
    return wrong


def in_flight(rank: Rank) -> Any:
    """Many calls behind each other without a wait between: all right, the same bits on all ranks."""
    hosts = PLACES[rank.world][0]
    hosts_module.SLICE_BYTES = 1 << 14
    group = Group(rank, hosts, f"flight{rank.world}", arena_bytes=1 << 20)
    program = program_for("all_reduce", hosts)
    sums = []
    tensors = []
    asks = threading.Event()

    def ask() -> None:
        # Whoever asks has the interpreter's lock: the thread that carries slices must not need it.
        while not asks.is_set():
            group.proxy.state()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    for seed in range(12):
        draw = torch.Generator().manual_seed(100 * seed + rank.rank)
        tensor = torch.randn(5000 + 3000 * (seed % 3), generator=draw)
        loaded = group.communicator.load(program, dtype="float32", reduce="sum", nbytes=tensor.nbytes)
        tensors.append((tensor, group.run(loaded, tensor, tensor)))
    for tensor, end in tensors:
        end.wait()
        sums.append(int(tensor.view(torch.int32).sum()))
    asks.set()
    asking.join()
    rank.barrier()
    group.close()
    return sums


def mismatch(rank: Rank) -> list[str]:
    """The last rank runs another size: everybody is told so, and no stream hangs."""
    hosts = list(range(rank.world))
    group = Group(rank, hosts, f"mismatch{rank.world}", arena_bytes=1 << 20)
    program = program_for("all_reduce", hosts)
    for count in (64, 128 if rank.rank == rank.world - 1 else 64):
        tensor = torch.ones(count)
        loaded = group.communicator.load(program, dtype="float32", reduce="sum", nbytes=tensor.nbytes)
        group.run(loaded, tensor, tensor).wait()
    deadline = time.monotonic() + 20
    while not group.errors and time.monotonic() < deadline:
        time.sleep(0.01)
    rank.barrier()
    group.close()
    return [text.partition(":")[0] for text in group.errors[:1]]


def killed(rank: Rank) -> Any:
    """The last rank dies in a call: the streams of the others end, and they say who it was."""
    hosts = list(range(rank.world))
    group = Group(rank, hosts, f"killed{rank.world}", arena_bytes=1 << 20)
    program = program_for("all_reduce", hosts)
    tensor = torch.ones(100_000)
    loaded = group.communicator.load(program, dtype="float32", reduce="sum", nbytes=tensor.nbytes)
    group.run(loaded, tensor, tensor).wait()
    rank.barrier()
    if rank.rank == rank.world - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with contextlib.suppress(StrettoError):
        group.run(loaded, tensor, tensor).wait()
    deadline = time.monotonic() + 20
    while not group.errors and time.monotonic() < deadline:
        time.sleep(0.01)
    took_s = time.monotonic() - began
    # A survivor that leaves first would be a lost rank for the other one, too.
    (FOLDER / f"told-{rank.rank}").touch()
    while time.monotonic() < deadline and not all((FOLDER / f"told-{r}").exists() for r in range(rank.world - 1)):
        time.sleep(0.01)
    return {"said": group.errors[:1], "took_s": round(took_s, 1)}


SCENARIOS: dict[str, Scenario] = {
    "random_calls": random_calls, "in_flight": in_flight, "mismatch": mismatch, "killed": killed,
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(SCENARIOS)
