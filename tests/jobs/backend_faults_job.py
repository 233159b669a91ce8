# SPDX-License-Identifier: Apache-2.0
"""Jobs that go wrong: what the survivors are told."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # DDP needs it: imported once, before the forks
import torch.distributed as dist
from capture_scenarios import _start, chosen
from torch.nn.parallel import DistributedDataParallel

import stretto.torch
from stretto import StrettoError
from stretto.runtime.executor.executor import load_native

RANKS = 3


def told(call: Callable[[], object]) -> list[Any]:
    """The error of a call, its text, and after how many seconds."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - begin]
    return ["fine", "", time.monotonic() - begin]


def killed() -> Any:
    """Rank 2 dies while the others reduce with it again and again."""
    if dist.get_rank() == 2:
        dist.all_reduce(torch.ones(1000))
        os.kill(os.getpid(), signal.SIGKILL)

    def reduce() -> None:
        for _ in range(10_000):
            dist.all_reduce(torch.ones(1000))

    return told(reduce)


def killed_while_sending() -> Any:
    """Rank 2 dies where rank 1 waits for a message of it."""
    if dist.get_rank() == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return told(lambda: dist.recv(torch.ones(10), 2))


def killed_before_a_future() -> Any:
    """Rank 2 dies; the others hold futures."""
    dist.barrier()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    assert work is not None
    return told(work.get_future().wait)


def waits_that_time_out() -> Any:
    """A wait with a timeout for what has not come, then for good."""
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait([f"waited {other}" for other in range(1, RANKS)])
    work = dist.all_reduce(torch.ones(10), async_op=True)
    assert work is not None
    first = told(lambda: work.wait(timedelta(milliseconds=100))) if rank else ["fine", "", 0.0]
    store.set(f"waited {rank}", "")
    return [*first, told(work.wait)[0]]


def other_sizes() -> Any:
    """Rank 1 brings fewer elements."""
    return told(lambda: dist.all_reduce(torch.ones(100 if dist.get_rank() == 1 else 1000)))


def other_order() -> Any:
    """Rank 1 broadcasts where the others reduce."""
    tensor = torch.ones(1000)
    return told(lambda: dist.broadcast(tensor, 0) if dist.get_rank() == 1 else dist.all_reduce(tensor))


def other_reduction() -> Any:
    """Rank 1 takes the maximum where the others sum up."""
    op = dist.ReduceOp.MAX if dist.get_rank() == 1 else dist.ReduceOp.SUM
    return told(lambda: dist.all_reduce(torch.ones(1000), op))


def killed_in_ddp() -> Any:
    """Rank 2 dies before the others' backward pass, whose sums DDP waits for in C++."""
    model = DistributedDataParallel(torch.nn.Linear(300, 300))
    loss = model(torch.ones(4, 300)).square().mean()
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return told(loss.backward)


def stopped(call: Callable[[Any], object]) -> Any:
    """Rank 2 stops; the others make a call with it that gloo runs, and that times out."""
    group: Any = dist.new_group(timeout=timedelta(seconds=3))
    dist.barrier(group)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 2:
        store.set("victim", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    victim = int(store.get("victim"))
    found = told(lambda: call(group))
    store.set(f"told {dist.get_rank()}", "")
    store.wait(["told 0", "told 1"])
    if dist.get_rank() == 0:
        os.kill(victim, signal.SIGKILL)
    return found


def stopped_while_sending() -> Any:
    """The others wait for a message."""
    return stopped(lambda group: dist.recv(torch.ones(3), 2, group=group))


def stopped_where_another_is_done() -> Any:
    """Rank 2 stops; rank 0 waits for its message, and rank 1, which nobody waits for, has ended by then."""
    group: Any = dist.new_group(timeout=timedelta(seconds=3))
    dist.barrier(group)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 2:
        store.set("victim", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if dist.get_rank() == 1:
        os._exit(0)
    victim = int(store.get("victim"))
    found = told(lambda: dist.recv(torch.ones(3), 2, group=group))
    os.kill(victim, signal.SIGKILL)
    return found


def stopped_in_a_delegated_collective() -> Any:
    """The others wait for a sum that only gloo can do."""
    return stopped(lambda group: dist.all_reduce(torch.eye(3).to_sparse(), group=group))


def absent_from_a_delegated_collective() -> Any:
    """Rank 2 is there, but calls something else."""
    group: Any = dist.new_group(timeout=timedelta(seconds=3))
    store = dist.distributed_c10d._get_default_store()
    found = ["fine", "", 0.0]
    if dist.get_rank() != 2:
        found = told(lambda: dist.all_reduce(torch.eye(3).to_sparse(), group=group))
        store.set(f"told {dist.get_rank()}", "")
    store.wait(["told 0", "told 1"])
    return found


def wait_that_times_out_for_a_message() -> Any:
    """A short wait for a message that nobody sends says nothing about other ranks."""
    if dist.get_rank() == 2:
        dist.distributed_c10d._get_default_store().wait(["told 0", "told 1"])
        return None
    work: Any = dist.irecv(torch.ones(3), 2)
    found = told(lambda: work.wait(timedelta(milliseconds=100)))
    dist.distributed_c10d._get_default_store().set(f"told {dist.get_rank()}", "")
    return found


def left_because_of_another(wait: Callable[[int, Any], object]) -> Any:
    """Rank 2 dies; rank 1 notices, and leaves at once; rank 0 has nothing to do with rank 2, and waits for rank 1."""
    groups: list[Any] = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    dist.barrier()
    rank = dist.get_rank()
    if rank == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return told(lambda: wait(2 if rank == 1 else 1, groups[rank]))


def left_a_collective_because_of_another() -> Any:
    """On the executor."""
    return left_because_of_another(lambda _, group: [dist.all_reduce(torch.ones(10), group=group) for _ in range(9)])


def left_a_message_because_of_another() -> Any:
    """On gloo."""
    return left_because_of_another(lambda peer, _: dist.recv(torch.ones(10), peer))


SCENARIOS = [
    stopped_while_sending, stopped_where_another_is_done, stopped_in_a_delegated_collective,
    absent_from_a_delegated_collective, wait_that_times_out_for_a_message, left_a_collective_because_of_another,
    left_a_message_because_of_another, killed, killed_while_sending, killed_before_a_future, killed_in_ddp,
    waits_that_time_out, other_sizes, other_order, other_reduction,
]  # fmt: skip


def main() -> None:
    """Each scenario with processes of its own."""
    folder = Path(sys.argv[1])
    for name, scenario in chosen(SCENARIOS).items():

        def rank_main(rank: int, name: str = name, scenario: Callable[[], Any] = scenario) -> None:
            store = f"file://{folder}/store-{name}"
            dist.init_process_group("stretto", init_method=store, rank=rank, world_size=RANKS)
            (folder / f"{name}-{rank}").write_text(json.dumps(scenario()))
            os._exit(0)

        _run(rank_main)

    def without_executor(rank: int) -> None:
        def unavailable() -> None:
            raise StrettoError("the executor is not available")

        logging.basicConfig(filename=folder / f"without_executor.log-{rank}", level=logging.INFO)
        native = unavailable if rank == 1 else load_native
        with mock.patch("stretto.runtime.torch_backend.engine.load_native", native):
            dist.init_process_group(
                "stretto", init_method=f"file://{folder}/store-without", rank=rank, world_size=RANKS
            )
            tensor = torch.ones(10)
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 0)
        last = stretto.torch.last_choice()
        assert last is not None
        said = (folder / f"without_executor.log-{rank}").read_text().count("goes to gloo")
        outcome = [last.backend, last.why, float(tensor[0]), said]
        (folder / f"without_executor-{rank}").write_text(json.dumps(outcome))
        dist.destroy_process_group()
        os._exit(0)

    _run(without_executor)

    def differing(rank: int) -> None:
        os.environ["STRETTO_CLUSTER"] = "ring:4" if rank == 2 else "ring:3"
        store = f"file://{folder}/store-rules"

        def join() -> None:
            dist.init_process_group("stretto", init_method=store, rank=rank, world_size=RANKS)

        (folder / f"other_rules-{rank}").write_text(json.dumps(told(join)))
        os._exit(0)

    _run(differing)
    port = free_port()

    def without_store(rank: int) -> None:
        """Rank 0 holds the store, and leaves while the others make a group."""
        where = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("stretto", init_method=where, rank=rank, world_size=RANKS)
        dist.barrier()
        if rank == 0:
            os._exit(0)
        (folder / f"store_leaves-{rank}").write_text(json.dumps(told(lambda: dist.new_group(list(range(RANKS))))))
        os._exit(0)

    _run(without_store)
    names = [scenario.__name__ for scenario in SCENARIOS] + ["other_rules", "without_executor", "store_leaves"]
    for rank in range(RANKS):
        found = {name: _read(folder / f"{name}-{rank}") for name in names}
        (folder / f"{rank}.json").write_text(json.dumps(found))


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.exists() else None


def _run(rank_main: Callable[[int], None]) -> None:
    for _ in [_start(rank, rank_main) for rank in range(RANKS)]:
        os.wait()


if __name__ == "__main__":
    main()
