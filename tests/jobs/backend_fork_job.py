# SPDX-License-Identifier: Apache-2.0
"""Children that ranks fork: what they are told when they do what only a rank may do, and how the ranks go on."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DDP needs it: imported once, before the forks
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from capture_scenarios import chosen
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, Dataset

import stretto
import stretto.torch
from stretto.runtime.enforcer.enforcer import Enforcer

RANKS = 2
LIMIT_S = 240


def forked(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What a forked child is told that calls one thing after the other; an alarm ends it where it hangs."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(LIMIT_S)
        for name, call in calls.items():
            os.write(write, json.dumps([name, told(call)]).encode() + b"\n")
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = dict(json.loads(line) for line in pipe)
    os.waitpid(child, 0)
    return {name: said.get(name, "it hangs") for name in calls}


def told(call: Callable[[], object]) -> str:
    """The error of a call, or what it returned."""
    try:
        return f"fine: {call()}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def exited(call: Callable[[], object]) -> int:
    """How a forked child ends that calls something and then leaves as a program does."""
    child = os.fork()
    if not child:
        signal.alarm(LIMIT_S)
        call()
        sys.exit(0)
    return os.waitpid(child, 0)[1]


def go_on() -> list[Any]:
    """What the rank itself gets afterwards, on the executor and on gloo."""
    found: list[Any] = []
    for number in range(3):
        x = torch.full((1000,), float(number + 1))
        dist.all_reduce(x)
        found.append(x[0].item())
        objects: list[Any] = [None] * RANKS
        dist.all_gather_object(objects, dist.get_rank())
        found.append(objects)
        peer = 1 - dist.get_rank()
        message = torch.zeros(10)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, torch.full((10,), float(number)), peer), dist.P2POp(dist.irecv, message, peer)]
        )
        for work in works:
            work.wait()
        found.append(message[0].item())
    dist.barrier()
    return found


class Numbers(Dataset[torch.Tensor]):
    """Loaded by forked workers."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.tensor(float(at))


class CallingNumbers(Numbers):
    """Whose loading calls a collective, as nobody should."""

    def __getitem__(self, at: int) -> torch.Tensor:
        x = torch.full((1000,), 100.0)
        dist.all_reduce(x)
        return x[:1]


def loaded(data: Dataset[torch.Tensor]) -> Any:
    """The sum of what two workers load, or what they say."""
    try:
        return sum(batch.sum().item() for batch in DataLoader(data, batch_size=4, num_workers=2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def doors() -> dict[str, Callable[[], object]]:
    """Everything that ranks do together."""
    x, peer = torch.full((1000,), 100.0), 1 - dist.get_rank()
    group: Any = dist.new_group([0, 1])
    work: Any = dist.all_reduce(torch.ones(10), async_op=True)
    ahead: Any = dist.irecv(torch.ones(3), peer, tag=7)
    mesh = init_device_mesh("cpu", (RANKS,))
    tensor = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    sync = stretto.torch.WeightSync({"w": torch.ones(4)}, {"w": torch.ones(4)})
    model: torch.nn.Module = torch.nn.Linear(4, 4)
    model, optimizer = stretto.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    executor = group.engine.job.executor
    enforcer = Enforcer()

    def gathered() -> None:
        dist.all_gather_object([None] * RANKS, 1)

    def coalesced() -> None:
        with _coalescing_manager(group=group, async_ops=True):
            dist.all_reduce(x, group=group)

    def uneven() -> None:
        dist.all_to_all_single(torch.empty(3), torch.ones(3), [1, 2], [1, 2])

    def stepped() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    yes: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(x), "barrier": dist.barrier, "in a group": lambda: dist.barrier(group),
        "send": lambda: dist.send(x, peer), "recv": lambda: dist.recv(x, peer),
        "recv from anyone": lambda: dist.recv(x), "objects": gathered, "all_to_all with splits": uneven,
        "empty": lambda: dist.all_reduce(torch.empty(0)),
        "sparse": lambda: dist.all_reduce(torch.eye(3).to_sparse()), "coalesced": coalesced,
        "monitored_barrier": lambda: group.monitored_barrier(), "wait": work.wait,
        "future": lambda: work.get_future().wait(),
        "wait for a message": ahead.wait, "functional": lambda: functional.all_reduce(x, "sum", group).sum(),
        "new_group": lambda: dist.new_group([0, 1]),
        "reshard": lambda: stretto.torch.reshard(tensor, mesh, [Replicate()]),
        "update": sync.update, "WeightSync": lambda: stretto.torch.WeightSync({}, {}),
        "distribute": lambda: stretto.torch.distribute(model, torch.optim.SGD(model.parameters(), lr=1.0)),
        "optimizer.step": stepped, "DDP": lambda: ddp(torch.ones(2, 4)).sum().backward(),
        "DdpHook": lambda: stretto.torch.DdpHook().reduce(x), "Enforcer.step": stretto.torch.step,
        "counters": executor.counters,
    }  # fmt: skip
    doors.ends = [ahead, work, sync, optimizer, enforcer]  # type: ignore[attr-defined]
    return yes


def refused() -> Any:
    """Each door is tried by a child of every rank; afterwards the ranks go on."""
    said = forked(doors())
    ahead, work, sync, optimizer, enforcer = doors.ends  # type: ignore[attr-defined]
    enforcer.close()
    dist.send(torch.ones(3), 1 - dist.get_rank(), tag=7)
    ahead.wait()
    work.wait()
    version = sync.update()
    optimizer.close()
    return {"said": said, "version": version, "then": go_on()}


def left() -> Any:
    """Children end as programs do, with and without destroying what they have inherited."""
    ends = [exited(call) for call in (lambda: None, dist.destroy_process_group)]
    return {"ends": ends, "then": go_on()}


def own_job() -> Any:
    """Children make a job of their own, in which they are ranks."""
    folder, rank = Path(sys.argv[1]), dist.get_rank()

    def join() -> str:
        dist.destroy_process_group()
        store = c10d.FileStore(str(folder / "store-of-children"), RANKS)
        dist.init_process_group("stretto", store=store, rank=rank, world_size=RANKS)
        x = torch.full((1000,), 10.0)
        dist.all_reduce(x)
        objects: list[Any] = [None] * RANKS
        dist.all_gather_object(objects, rank)
        choice = stretto.torch.choices()[-2]
        dist.destroy_process_group()
        return f"{x[0].item()} {objects} {choice.backend}"

    return {"said": forked({"join": join}), "then": go_on()}


def loads() -> Any:
    """Workers of a DataLoader, which call nothing, or something."""
    return {"fine": loaded(Numbers()), "calling": loaded(CallingNumbers()), "then": go_on()}


def killed_with_children() -> Any:
    """Rank 1 dies; a child of it that lives on must not keep the others from noticing."""
    if dist.get_rank() == 1:
        child = os.fork()
        if not child:
            signal.alarm(LIMIT_S)
            time.sleep(LIMIT_S)
        (Path(sys.argv[1]) / "survivor").write_text(str(child))
        dist.all_reduce(torch.ones(1000))
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        while True:
            dist.all_reduce(torch.ones(1000))
    except stretto.PeerLost as error:
        said = str(error)
    os.kill(int((Path(sys.argv[1]) / "survivor").read_text()), signal.SIGKILL)
    return {"said": said, "s": time.monotonic() - begin}


def run(rank_main: Callable[[int], None], *, victims: int) -> None:
    """Ranks are forks of this process, so that torch is imported once; all but some end well."""
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if not child:
            rank_main(rank)
        children.append(child)
    ends = [os.waitpid(child, 0)[1] for child in children]
    if sum(map(bool, ends)) != victims:
        sys.exit(f"ranks ended with {ends}")


def main() -> None:
    """Each scenario with processes of its own."""
    folder = Path(sys.argv[1])
    reports: list[dict[str, Any]] = [{} for _ in range(RANKS)]
    for name, scenario in chosen((refused, left, own_job, loads, killed_with_children)).items():

        def rank_main(rank: int, name: str = name, scenario: Callable[[], Any] = scenario) -> None:
            store = c10d.FileStore(str(folder / f"store-{name}"), RANKS)
            dist.init_process_group(
                "stretto", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=LIMIT_S)
            )
            (folder / f"{name}-{rank}").write_text(json.dumps(scenario()))
            os._exit(0)

        run(rank_main, victims=1 if scenario is killed_with_children else 0)
        for rank in range(RANKS):
            path = folder / f"{name}-{rank}"
            reports[rank][name] = json.loads(path.read_text()) if path.exists() else None
    for rank in range(RANKS):
        (folder / f"{rank}.json").write_text(json.dumps(reports[rank]))


if __name__ == "__main__":
    main()
