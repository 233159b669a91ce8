# SPDX-License-Identifier: Apache-2.0
"""What the processes of a capture test run: scenarios by name, each recorded, each outcome reported as JSON."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import stretto
import stretto.torch

Step = Callable[[int], object]


def record(step: Step, *, iterations: int = 3, skip: int = 2, extra: int = 0) -> Any:
    """The workload of a step function that is called with the iteration's number, or the error's message."""
    try:
        with stretto.torch.capture(iterations=iterations, skip=skip) as recorder:
            for number in range(skip + iterations + extra):
                step(number)
                recorder.step()
    except stretto.InvalidInput as error:
        return str(error)
    return asdict(recorder.workload)


def compute(amount: int = 256) -> torch.Tensor:
    """A fraction of a millisecond of work."""
    return torch.ones(amount, amount) @ torch.ones(amount, amount)


S = TypeVar("S", bound=Callable[..., Any])


def chosen(scenarios: Mapping[str, S] | Iterable[S]) -> dict[str, S]:
    """The scenarios to run: those that the command line names after FOLDER and RANKS, else those that tests need.

    `tests/runtime/conftest.py` gives the words of each test that pytest was asked for, where that is not all of them; a
    test without a scenario among its words may need any.
    """
    known = dict(scenarios) if isinstance(scenarios, Mapping) else {each.__name__: each for each in scenarios}
    if names := sys.argv[3:]:
        if unknown := sorted({*names} - {*known}):
            sys.exit(f"no scenario {', '.join(unknown)}; there are: {', '.join(known)}")
        return {name: known[name] for name in known if name in names}
    tests = [known.keys() & set(words) for words in json.loads(os.environ.get("STRETTO_TEST_WORDS", "[]"))]
    needed = set().union(*tests) if tests and all(tests) else set(known)
    return {name: known[name] for name in known if name in needed}


def run(scenarios: dict[str, Callable[[], Any]]) -> None:
    """Run the scenarios one after the other on every rank of one job, and report."""
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    scenarios = chosen(scenarios)

    def rank_main(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
        outcomes = {name: scenario() for name, scenario in scenarios.items()}
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
        dist.barrier()
        dist.destroy_process_group()

    fork(ranks, rank_main)


def store_port() -> int:
    """The port of a store in a process of its own: who forks must have no threads, whose locks stay taken."""
    parent = os.getpid()
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        port = int(listening.getsockname()[1])
        if not os.fork():
            mine = listening.detach()
            store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=mine)
            while os.getppid() == parent and store.port:
                time.sleep(0.2)
            os._exit(0)
    return port


def fork(ranks: int, rank_main: Callable[[int], None]) -> None:
    """Run the ranks as forks of this process, so that torch is imported once; the first that fails ends it."""
    waiting = {_start(rank, rank_main): rank for rank in range(ranks)}
    while waiting:
        process, status = os.wait()
        rank = waiting.pop(process)
        if status:
            sys.exit(f"rank {rank} failed")


def _start(rank: int, rank_main: Callable[[int], None]) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    # A hanging rank says where, well before its parent is killed.
    faulthandler.dump_traceback_later(500, exit=True)
    try:
        torch.set_num_threads(1)
        rank_main(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
