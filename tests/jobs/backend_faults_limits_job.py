# SPDX-License-Identifier: Apache-2.0
"""Jobs that run into limits, strangers and pauses: what each rank is told, and that nobody hangs."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from backend_faults_job import told
from capture_scenarios import _start, chosen
from executor_faults_job import listening_ports, shout
from torch._C import _distributed_c10d as c10d

import stretto.torch
from stretto.runtime.executor.executor import Executor
from stretto.runtime.torch_backend import engine as backend_engine

RANKS = 3
AT_ONCE = 3
VICTIM = 2
JOIN = timedelta(seconds=200)
PAUSE_S = float(os.environ.get("PAUSE_S", "1.5"))
FULL_AT = 4 << 20
"""Where the victim's shared memory ends."""


class Here:
    """What a scenario gets: its rank, a folder that all ranks share, and how to join."""

    def __init__(self, rank: int, folder: Path, name: str) -> None:
        self.rank, self.folder, self.name = rank, folder, name

    def join(self) -> None:
        """Make the default group."""
        store = c10d.FileStore(f"{self.folder}/store-{self.name}", RANKS)
        dist.init_process_group("stretto", store=store, rank=self.rank, world_size=RANKS, timeout=JOIN)

    def pids(self) -> list[int]:
        """Everybody's process."""
        found: list[Any] = [0] * RANKS
        dist.all_gather_object(found, os.getpid())
        return found


def sums(count: int, times: int) -> bool:
    """Whether all-reduces give what they must."""
    good = True
    for i in range(times):
        tensor = torch.full((count,), dist.get_rank() + i, dtype=torch.int64)
        dist.all_reduce(tensor)
        good &= bool((tensor == sum(range(RANKS)) + i * RANKS).all())
    return good


def killed_in_the_middle(here: Here) -> Any:
    """The victim dies while megabytes are on their way."""
    here.join()
    if here.rank == VICTIM:
        sums(1_000_000, 1)
        threading.Timer(0.05, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    return told(lambda: sums(1_000_000, 10_000))


def paused(here: Here) -> Any:
    """The victim stops for a while, and then everything goes on."""
    here.join()
    pids = here.pids()
    begun = [here.folder / f"paused-begun-{rank}" for rank in range(RANKS) if rank != VICTIM]

    def wake() -> None:
        while not all(path.exists() for path in begun):
            time.sleep(0.01)
        time.sleep(PAUSE_S)
        os.kill(pids[VICTIM], signal.SIGCONT)

    if here.rank == 0:
        os.kill(pids[VICTIM], signal.SIGSTOP)
        threading.Thread(target=wake).start()
    begin = time.monotonic()
    if here.rank != VICTIM:
        begun[here.rank].touch()
    good = sums(300_000, 3)
    return [good, time.monotonic() - begin]


def paused_too_long(here: Here) -> Any:
    """The victim stops for longer than the group's timeout."""
    here.join()
    pids = here.pids()
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    # Long enough for the ranks that are not stopped to make the call on a busy machine.
    group.set_timeout(timedelta(seconds=6))
    if here.rank == 0:
        os.kill(pids[VICTIM], signal.SIGSTOP)
    try:
        outcome = told(lambda: [dist.all_reduce(torch.ones(300_000), group=group) for _ in range(10)])
    finally:
        if here.rank == 0:
            os.kill(pids[VICTIM], signal.SIGCONT)
    # The job's other groups are not touched: they go on once the victim does.
    return [*outcome, sums(1000, 1)]


def another_backend(here: Here) -> Any:
    """The victim calls what gloo runs, where the others call what the executor runs."""
    here.join()
    dist.barrier()
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=6))
    tensor = torch.ones(RANKS * 100)
    if here.rank == VICTIM:
        return told(lambda: dist.recv(torch.empty_like(tensor), 0))
    return told(lambda: dist.all_reduce(tensor))


def left_early(here: Here) -> Any:
    """The victim thinks that the job is over."""
    here.join()
    good = sums(100, 1)
    if here.rank == VICTIM:
        dist.destroy_process_group()
        return ["fine", "", 0.0, good]
    return [*told(lambda: sums(100, 1)), good]


def killed_while_joining(here: Here) -> Any:
    """The victim dies where it should join the executor."""

    def die(*args: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(backend_engine, "Executor", die if here.rank == VICTIM else Executor):
        return told(here.join)


def no_descriptors_to_join(here: Here) -> Any:
    """The victim may open no more files once the executor is made."""

    def starved(*args: Any, **options: Any) -> Any:
        limit = len(os.listdir("/proc/self/fd")) + 3
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return Executor(*args, **options)

    with mock.patch.object(backend_engine, "Executor", starved if here.rank == VICTIM else Executor):
        outcome = told(here.join)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return [*outcome, *_what_runs()]


def no_descriptors_left(here: Here) -> Any:
    """The victim's descriptors run out while it works."""
    here.join()
    good = sums(1000, 2)
    held = []
    if here.rank == VICTIM:
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 8, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
    outcome = [good, sums(1000, 3), sums(3_000_000, 1), len(held) > 0]
    for fd in held:
        os.close(fd)
    return outcome


def memory_full(here: Here) -> Any:
    """Shared memory ends on the victim when a larger call needs more of it."""
    if here.rank == VICTIM:
        refuse_fallocate_behind(FULL_AT)
    here.join()
    good = sums(1000, 1)
    group = dist.new_group()
    tensors = [torch.ones(1_000_000) for _ in range(16)]

    def reduce() -> None:
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
        for work in works:
            assert work is not None
            work.wait()

    outcome = told(reduce)
    return [*outcome, good, sums(1000, 1)]


def garbage(here: Here) -> Any:
    """Strangers talk to every port of the job, while the ranks join and while they work."""
    heard = 0
    over = threading.Event()

    def strangers() -> None:
        nonlocal heard
        while not over.wait(0.02):
            heard += shout(listening_ports(), here.rank)

    def surrounded(rank: int, ranks: int, exchange: Callable[[bytes], list[bytes]], **options: Any) -> Executor:
        def once_heard(mine: bytes) -> list[bytes]:
            while not heard:  # it listens already, and cannot have joined before this has told the others where
                time.sleep(0.01)
            return exchange(mine)

        return Executor(rank, ranks, once_heard, **options)

    talk = threading.Thread(target=strangers, daemon=True)
    talk.start()
    with mock.patch.object(backend_engine, "Executor", surrounded):
        here.join()
    joined = heard
    good = sums(1000, 20)
    group = dist.new_group()
    all_heard = torch.zeros(1, dtype=torch.int64)
    while not all_heard:  # until every rank was shouted at while it worked
        good &= sums(1000, 5)
        all_heard[0] = heard > joined
        dist.all_reduce(all_heard, dist.ReduceOp.MIN, group=group)
    peer = torch.zeros(10)
    if here.rank == 0:
        dist.send(torch.full((10,), 7.0), VICTIM)
    elif here.rank == VICTIM:
        dist.recv(peer, 0)
        good &= float(peer[0]) == 7.0
    over.set()
    talk.join()
    dist.barrier()
    last = stretto.torch.last_choice()
    assert last is not None
    return [good, joined, heard - joined, last.backend]


def wrong_token(here: Here) -> Any:
    """The victim has read another secret from the store."""

    def mistaken(*args: Any, **options: Any) -> Any:
        return Executor(*args, **(options | {"token": b"quite another secret"}))

    with mock.patch.object(backend_engine, "Executor", mistaken if here.rank == VICTIM else Executor):
        outcome = told(here.join)
    return [*outcome, *_what_runs()]


def _what_runs() -> list[Any]:
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    last = stretto.torch.last_choice()
    assert last is not None
    return [last.backend, last.why, float(tensor[0])]


def refuse_fallocate_behind(offset: int) -> None:
    """From now on the kernel answers this process's fallocate with ENOSPC where it begins behind an offset.

    A seccomp filter: the kernel's own memory files know no quota that could be reached instead.
    """
    number = {"x86_64": 285, "aarch64": 47}[platform.machine()]
    load, jump_equal, jump_ge, give = 0x20, 0x15, 0x35, 0x06
    low_word_of_third_argument = 16 + 2 * 8
    program = [
        (load, 0, 0, 0),
        (jump_equal, 0, 3, number),
        (load, 0, 0, low_word_of_third_argument),
        (jump_ge, 0, 1, offset),
        (give, 0, 0, 0x00050000 | 28),
        (give, 0, 0, 0x7FFF0000),
    ]
    words = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in program))
    filter_ = struct.pack("@HP", len(program), ctypes.addressof(words))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, by_filter = 38, 22, 2
    for arguments in ((no_new_privileges, 1, 0, 0, 0), (set_seccomp, by_filter, filter_, 0, 0)):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")


SCENARIOS: list[Callable[[Here], Any]] = [
    killed_in_the_middle, paused, paused_too_long, another_backend, left_early, killed_while_joining,
    no_descriptors_to_join, no_descriptors_left, memory_full, garbage, wrong_token,
]  # fmt: skip


def main() -> None:
    """Each scenario with processes of its own, a few at a time; ``job.py FOLDER RANKS [NAME...]``."""
    folder, scenarios = Path(sys.argv[1]), list(chosen(SCENARIOS).values())

    def rank_main(rank: int, scenario: Callable[[Here], Any]) -> None:
        name = scenario.__name__
        outcome = json.dumps(scenario(Here(rank, folder, name)))
        (folder / f"{name}-{rank}").write_text(outcome)
        # Who ends is a fault of its own: nobody does before the survivors have said what they were told.
        survivors = [folder / f"{name}-{other}" for other in range(RANKS) if other != VICTIM]
        limit = time.monotonic() + 200
        while not all(path.exists() for path in survivors) and time.monotonic() < limit:
            time.sleep(0.01)
        os._exit(0)

    for first in range(0, len(scenarios), AT_ONCE):
        batch = [partial(rank_main, scenario=scenario) for scenario in scenarios[first : first + AT_ONCE]]
        for _ in [_start(rank, main_) for main_ in batch for rank in range(RANKS)]:
            os.wait()
    for rank in range(RANKS):
        paths = {scenario.__name__: folder / f"{scenario.__name__}-{rank}" for scenario in scenarios}
        found = {name: json.loads(path.read_text()) if path.exists() else None for name, path in paths.items()}
        (folder / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
