# SPDX-License-Identifier: Apache-2.0
"""Ranks of the backend on several hosts with a stand-in for CUDA; joining, calls, watching and faults are real.

``gpu_hosts_backend_job.py FOLDER SCENARIO``; each rank writes FOLDER/RANK.json. Hosts are those of the lab, or the
names in STRETTO_TEST_HOSTS, one for each rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from hosts_standin import StandinDevice, StandinEvent, StandinLegs, StandinStream

import stretto.torch  # noqa: F401
from stretto.errors import StrettoError
from stretto.runtime.executor import executor as executor_module
from stretto.runtime.gpu import hosts as hosts_module
from stretto.runtime.torch_backend import (
    cuda_clock,
    gpu_engine,
    gpu_hosts,
    gpu_hosts_join,
    gpu_meeting,
    gpu_work,
    launch_queue,
    meeting,
)
from stretto.runtime.torch_backend.buffers import CollectiveCall
from stretto.runtime.torch_backend.gpu_options import GpuOptions

RANK = int(os.environ["RANK"])
CPU = torch.device("cpu")
LOCAL_COMMUNICATOR = 200


class FakeEvent(StandinEvent):
    """An event of the stand-in for CUDA."""

    def record(self, stream: Any) -> None:
        """It is over once everything that the stream holds is."""
        stream.add(self.set)

    def synchronize(self) -> None:
        """Until it is over."""
        self.wait()

    def elapsed_time(self, other: object) -> float:
        """Nobody asks here."""
        return 0.0


class FakeStream(StandinStream):
    """A stream of the stand-in for CUDA."""

    device = CPU

    def wait_event(self, event: Any) -> None:
        """Everything behind waits for it."""
        self.add(event.wait)

    def wait_stream(self, other: Any) -> None:
        """Everything behind waits for what the other one holds."""
        event = FakeEvent()
        event.record(other)
        self.wait_event(event)


class FakeCuda:
    """What the backend asks of `torch.cuda`."""

    def __init__(self) -> None:
        self.main = FakeStream()
        self._current = self.main

    def current_stream(self, device: object = None) -> FakeStream:
        """The stream that calls go to."""
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """Another one meanwhile."""
        before, self._current = self._current, stream
        yield
        self._current = before

    def device(self, device: object) -> Any:
        """There is one."""
        return contextlib.nullcontext()

    def Stream(self, device: object = None, priority: int = 0) -> FakeStream:
        """A new one."""
        return FakeStream()

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        """A new one."""
        return FakeEvent()

    def is_current_stream_capturing(self) -> bool:
        """No graphs here."""
        return False

    def synchronize(self) -> None:
        """Until everything is done."""
        event = FakeEvent()
        event.record(self.main)
        event.wait()


CUDA = FakeCuda()


def set_up() -> None:
    """Put the stand-ins in their places."""
    modules: tuple[Any, ...] = (
        cuda_clock, gpu_engine, gpu_hosts, gpu_hosts_join, gpu_meeting, gpu_work, launch_queue,
    )  # fmt: skip
    for module in modules:
        module.cuda = CUDA
    names = os.environ.get("STRETTO_TEST_HOSTS", "")
    if names:
        mine = names.split(",")[RANK]
        for module in (meeting, gpu_meeting, executor_module):
            setattr(module, "host_key", lambda: mine)  # noqa: B010
    seam: Any = gpu_hosts_join
    seam_meeting: Any = gpu_meeting
    seam.sm_count = lambda device: 16
    seam.QUEUES = SimpleNamespace(of=lambda index, blocks: launch_queue.LaunchQueue(blocks))
    seam.CudaDevice = lambda device: StandinDevice()
    seam.gpu_card = lambda rank, device, options, held, rendezvous: gpu_meeting.GpuCard(
        rank=rank, host=seam_meeting.host_key(), uuid=f"gpu{rank}", reached=(f"gpu{rank}",), seen=(f"gpu{rank}",),
        shares=False, options=options.text, held_bytes=held, rendezvous=rendezvous, torch="x",
    )  # fmt: skip


def world() -> Any:
    """The backend's group of all ranks, with the GPU's part switched on."""
    group: Any = dist.distributed_c10d._get_default_group()
    group = getattr(group, "_stretto", group)
    return group


def gpu_of(group: Any) -> Any:
    """A group's engine for GPU tensors, which here takes those of the CPU."""
    engine = group.gpu
    engine._options = GpuOptions(between_hosts=True)

    def local(made: Any, store: Any, path: str, rank: int, size: int, *_: object) -> None:
        hosts = [card.host for card in group.cards]
        near = [at for at, host in enumerate(hosts) if host == hosts[group.rank()]]
        ranks = [engine.engine.job.rank_of[engine.engine.selector.devices[at]] for at in near]
        made.local = StandinLegs(engine.engine.job.executor, ranks, LOCAL_COMMUNICATOR + group.rank() * 0)

    seam: Any = gpu_hosts_join
    seam._join_local = local

    def refusal(given: object) -> str:
        if engine.site is None and not engine._why:
            engine._join(CPU)
        return str(engine._why)

    engine._refusal_of = refusal
    return engine


class Opts:
    """Options of a call."""

    def __init__(self, asynchronous: bool) -> None:
        self.asyncOp, self.timeout = asynchronous, timedelta(0)


def run(engine: Any, call: CollectiveCall, asynchronous: bool = False) -> Any:
    """Run a call, which must not be refused."""
    work = engine.start([call], call.outputs, Opts(asynchronous))
    assert not isinstance(work, str), work
    return work


def all_reduce(engine: Any, tensor: torch.Tensor, reduce: Any = dist.ReduceOp.SUM, **more: Any) -> Any:
    """An all-reduce of the backend."""
    return run(engine, CollectiveCall.of("all_reduce", [tensor], reduce=reduce), **more)


def calls(group: Any) -> Any:
    """Random collectives; which were wrong."""
    engine = gpu_of(group)
    n, rank, wrong = group.size(), group.rank(), []
    hosts_module.SLICE_BYTES = 1 << 14
    for seed in range(60):
        draw = random.Random(seed)
        op = draw.choice(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"])
        count, root = int(2 ** draw.uniform(0, 12)), draw.randrange(n)
        whole = count * n if op in ("reduce_scatter", "all_to_all") else count
        torch.manual_seed(seed)
        parts = [torch.randint(-9, 9, (whole,)).float() for _ in range(n)]
        mine, total = parts[rank].clone(), torch.stack(parts).sum(0)
        reduce = dist.ReduceOp.SUM if "reduce" in op else None
        asynchronous = draw.random() < 0.5
        if op in ("all_reduce", "broadcast", "reduce"):
            call = CollectiveCall.of(op, [mine], reduce=reduce, root=root)
            got = mine
            want = parts[root] if op == "broadcast" else total
        else:
            got = torch.zeros({"all_gather": count * n, "reduce_scatter": count}.get(op, whole))
            call = CollectiveCall.of(op, [mine], outputs=[got], reduce=reduce)
            want = {
                "all_gather": torch.cat(parts), "reduce_scatter": total.view(n, -1)[rank] if whole % n == 0 else total,
                "all_to_all": torch.cat([part.view(n, -1)[rank] for part in parts]) if whole % n == 0 else total,
            }[op]  # fmt: skip
        work = run(engine, call, asynchronous)
        work.wait()
        CUDA.synchronize()
        if (op != "reduce" or rank == root) and not torch.equal(got, want):
            wrong.append(f"{op} {count} root {root} seed {seed}")
    run(engine, CollectiveCall.barrier(CPU)).wait()
    held = engine.held_bytes
    return {"wrong": wrong, "why": engine._why, "held": held, "threads": engine.site.proxy.through > 0}


def everywhere(group: Any) -> Any:
    """The same with sub-groups: the last ranks of each host, and every second rank."""
    found = {"world": calls(group)}
    size = dist.get_world_size()
    for name, ranks in (("ends", [0, size - 1]), ("odd", list(range(1, size, 2)))):
        sub: Any = dist.new_group(ranks)
        if RANK in ranks and len(ranks) > 1:
            engine = gpu_of(sub)
            if type(engine).__name__ == "HostsGpuEngine":
                tensor = torch.ones(1000)
                all_reduce(engine, tensor).wait()
                CUDA.synchronize()
                found[name] = bool((tensor == len(ranks)).all())
    dist.barrier()
    return found


def fault(group: Any, how: str) -> Any:
    """The last rank does something; what the others get, and how long it took."""
    engine, last = gpu_of(group), dist.get_rank() == dist.get_world_size() - 1
    tensor = torch.ones(20_000)
    for _ in range(3):
        all_reduce(engine, tensor)
    CUDA.synchronize()
    dist.barrier()
    began = time.monotonic()
    if last and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if last and how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    said = ""
    try:
        while time.monotonic() < began + 40:
            all_reduce(engine, torch.ones(77) if last and how == "mismatch" else tensor)
            CUDA.synchronize()
    except StrettoError as error:
        said = f"{type(error).__name__}: {error}"
    return {"said": said, "took_s": round(time.monotonic() - began, 1)}


def main() -> None:
    """One rank."""
    folder, scenario, *arguments = sys.argv[1:]
    faulthandler.dump_traceback_later(100, exit=True)
    torch.set_num_threads(1)
    set_up()
    limit = timedelta(seconds=5 if scenario == "fault" else 60)
    dist.init_process_group("stretto", timeout=limit)
    scenarios: dict[str, Any] = {"everywhere": everywhere, "fault": fault}
    found = scenarios[scenario](world(), *arguments)
    Path(folder, f"{RANK}.json").write_text(json.dumps(found))
    if scenario == "fault":
        # The store is rank 0's: it stays until the others have asked it what happened.
        others = [Path(folder, f"{rank}.json") for rank in range(1, dist.get_world_size() - 1)]
        deadline = time.monotonic() + 40
        while RANK == 0 and not all(other.exists() for other in others) and time.monotonic() < deadline:
            time.sleep(0.05)
        os._exit(0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
