# SPDX-License-Identifier: Apache-2.0
"""Ranks on GPUs (or all on the only one): collectives on GPU memory, run as programs by the backend `stretto`.

``gpu_programs_job.py FOLDER SCENARIO [ARGUMENT ...]``; each rank writes FOLDER/RANK.json.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import stretto.torch
from stretto.errors import StrettoError

cuda: Any = torch.cuda
distributed: Any = dist
"""Without the types that their stubs lack."""
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool,
)  # fmt: skip
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}
OPS = ("all_reduce", "all_gather", "all_gather_list", "reduce_scatter", "all_to_all", "broadcast", "reduce")


def device_of() -> torch.device:
    """This rank's GPU."""
    return torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())


def values(seed: int, rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, of which every sum and product over eight ranks is exact in every dtype."""
    draw = torch.Generator(device=device_of()).manual_seed(seed * 1009 + rank)
    found = torch.randint(1, 3, (count,), generator=draw, device=device_of())
    if dtype == torch.bool:
        return found == 1
    if dtype != torch.uint8:
        found = found * (2 * torch.randint(0, 2, (count,), generator=draw, device=device_of()) - 1)
    return found.to(dtype)


def reduced(parts: list[torch.Tensor], how: str) -> torch.Tensor:
    """What a reduction of all ranks' tensors must give, worked out on one GPU."""
    stack = torch.stack(parts)
    if stack.dtype == torch.bool:
        return stack.any(0) if how in ("sum", "max") else stack.all(0)
    wide = stack.to(torch.float64 if stack.dtype.is_floating_point else torch.int64)
    ways: dict[str, Any] = {"sum": wide.sum, "avg": wide.mean, "min": wide.amin, "max": wide.amax, "prod": wide.prod}
    done: torch.Tensor = ways[how](0).to(stack.dtype)
    return done


class RandomCall:
    """One collective, drawn from a seed that all ranks know."""

    def __init__(self, seed: int, size: int, largest: int, types: int = len(DTYPES)) -> None:
        draw = random.Random(seed)
        self.seed, self.size = seed, size
        self.op = draw.choice(OPS)
        self.dtype = draw.choice(DTYPES[:types])
        self.count = max(1, int(2 ** draw.uniform(0, largest)))
        self.root = draw.randrange(size)
        how = [name for name in REDUCTIONS if name != "avg" or self.dtype.is_floating_point]
        self.how = draw.choice(how)
        self.asynchronous = draw.random() < 0.5
        self.strided = draw.random() < 0.2
        self.stream = draw.randrange(3)

    def run(self, rank: int, group: Any, streams: list[Any]) -> torch.Tensor:
        """Run it on this rank; whether the result is right, as a tensor on the GPU."""
        n = self.size
        whole = self.op in ("reduce_scatter", "all_to_all")
        parts = [values(self.seed, r, self.count * (n if whole else 1), self.dtype) for r in range(n)]
        mine = parts[rank].clone()
        if self.strided and self.op in ("all_reduce", "broadcast", "reduce"):
            mine = torch.stack([mine, mine], 1)[:, 0]
        current = torch.cuda.current_stream()
        stream = streams[self.stream]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            got, want = self._call(mine, parts, rank, group)
            right: torch.Tensor = (got == want).all()
        current.wait_stream(stream)
        return right

    def _call(self, mine: torch.Tensor, parts: list[torch.Tensor], rank: int, group: Any) -> Any:
        n, op, more = self.size, REDUCTIONS[self.how], {"group": group, "async_op": self.asynchronous}
        root = dist.get_global_rank(group, self.root) if group is not None else self.root
        empty = torch.empty
        if self.op == "all_reduce":
            self._wait(dist.all_reduce(mine, op, **more))
            return mine, reduced(parts, self.how)
        if self.op == "reduce":
            self._wait(dist.reduce(mine, root, op, **more))
            return (mine, reduced(parts, self.how)) if rank == self.root else (mine, mine)
        if self.op == "broadcast":
            self._wait(dist.broadcast(mine, root, **more))
            return mine, parts[self.root]
        if self.op == "reduce_scatter":
            out = empty(self.count, dtype=self.dtype, device=mine.device)
            self._wait(dist.reduce_scatter_tensor(out, mine, op, **more))
            return out, reduced(parts, self.how).view(n, -1)[rank]
        if self.op == "all_to_all":
            out = empty(self.count * n, dtype=self.dtype, device=mine.device)
            self._wait(dist.all_to_all_single(out, mine, **more))
            return out, torch.cat([part.view(n, -1)[rank] for part in parts])
        if self.op == "all_gather":
            out = empty(self.count * n, dtype=self.dtype, device=mine.device)
            self._wait(dist.all_gather_into_tensor(out, mine, **more))
            return out, torch.cat(parts)
        outs = [torch.empty_like(mine) for _ in range(n)]
        self._wait(dist.all_gather(outs, mine, **more))
        return torch.cat(outs), torch.cat(parts)

    def _wait(self, work: Any) -> None:
        if work is not None:
            work.wait()

    def __str__(self) -> str:
        how = f" {self.how}" if "reduce" in self.op else ""
        return f"{self.op}{how} {self.dtype} count {self.count} root {self.root} seed {self.seed} {vars(self)}"


def random_calls(calls: int, seed: int, largest: int, types: int) -> dict[str, Any]:
    """Random collectives in the world and in two sub-groups, on several streams; which were wrong."""
    rank, world = dist.get_rank(), dist.get_world_size()
    half = world // 2
    subs = [dist.new_group(list(range(half))), dist.new_group(list(range(half, world)))] if half > 1 else []
    streams = [cuda.current_stream(), cuda.Stream(), cuda.Stream()]
    wrong: list[str] = []
    pending: list[tuple[torch.Tensor, str]] = []
    for at in range(calls):
        number = seed * 1_000_003 + at
        in_sub = bool(subs) and random.Random(number + 7).random() < 0.3
        group = subs[rank // half] if in_sub else None
        size = half if in_sub else world
        call = RandomCall(number, size, largest, types)
        pending.append((call.run(rank % half if in_sub else rank, group, streams), str(call)))
        if len(pending) == 100 or at == calls - 1:
            wrong += [text for right, text in pending if not bool(right)]
            pending = []
    ran = Counter((choice.op, choice.backend) for choice in stretto.torch.choices())
    return {"wrong": wrong, "ran": sorted([*key, count] for key, count in ran.items())}


def every_kind(types: str) -> dict[str, Any]:
    """Every collective with the first dtypes and every reduction, small and large, once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong, streams = [], [torch.cuda.current_stream()] * 3
    for op in OPS:
        for dtype in DTYPES[: int(types)]:
            for how in REDUCTIONS if "reduce" in op else ("sum",):
                if how == "avg" and not dtype.is_floating_point:
                    continue
                for count in (1, 5000, 300_007):
                    call = RandomCall(1, world, 1)
                    call.op, call.dtype, call.how, call.count = op, dtype, how, count
                    if not bool(call.run(rank, None, streams)):
                        wrong.append(str(call))
    gpu = sum(choice.calls for choice in stretto.torch.choices() if choice.backend == "gpu")
    return {"wrong": wrong, "gpu": gpu, "held": stretto.torch.gpu_held_bytes()}


def delegated() -> dict[str, Any]:
    """What goes to NCCL, and is right there."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), device_of()
    found: dict[str, Any] = {}
    splits = [1 + (rank + other) % 2 for other in range(world)]
    out = torch.empty(sum(splits), device=device)
    dist.all_to_all_single(out, torch.full((sum(splits),), float(rank), device=device), splits, splits)
    found["splits"] = out.tolist() == [float(other) for other in range(world) for _ in range(splits[other])]
    found["why"] = sorted({(c.op, c.why) for c in stretto.torch.choices() if c.backend == "nccl"})
    return found


def streams_and_works() -> dict[str, Any]:
    """Works, futures, timeouts and waits behave as under NCCL."""
    world, device = dist.get_world_size(), device_of()
    found: dict[str, Any] = {}
    tensor = torch.ones(1 << 20, device=device)
    # The first call joins the ranks and compiles the kernel, for which the host waits.
    dist.all_reduce(tensor.clone())
    torch.cuda.synchronize()
    dist.barrier()
    cuda._sleep(2_000_000_000)  # About a second: hosts that have just started are slow.
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    found["busy"] = not work.is_completed()
    work.wait()
    found["host_went_on"] = not work.is_completed()
    doubled = tensor * 2
    torch.cuda.synchronize()
    found["right"] = bool((doubled == 2 * world).all()) and work.is_completed() and work.is_success()
    later = torch.ones(1000, device=device)
    future = dist.all_reduce(later, async_op=True).get_future()
    found["future"] = bool((future.then(lambda done: done.value()[0] * 3).wait() == 3 * world).all())
    many = [torch.full((100 + at,), float(at), device=device) for at in range(20)]
    works = [dist.all_reduce(one, async_op=True) for one in many]
    for one in works:
        one.wait(timedelta(seconds=60))
    found["many"] = all(bool((one == at * world).all()) for at, one in enumerate(many))
    pair = [torch.ones(50, device=device), torch.ones(70, device=device)]
    with distributed._coalescing_manager(async_ops=True) as batch:
        for one in pair:
            dist.all_reduce(one)
    batch.wait()
    found["coalesced"] = all(bool((one == world).all()) for one in pair)
    dist.barrier(device_ids=[device.index])
    found["kept"], found["eighths"] = memory_is_kept(device), eighths_are_moved(device)
    with stretto.torch.record() as recording:
        dist.all_reduce(torch.ones(1 << 18, device=device))
        torch.cuda.synchronize()
    line = recording.timeline
    found["spans"] = [line.names[int(name)] for name in line.name]
    found["durations_us"] = [round(float(us), 1) for us in line.end_us - line.start_us]
    found["choice"] = str(stretto.torch.last_choice())
    return found


def memory_is_kept(device: torch.device) -> bool:
    """Tensors that the caller drops while an asynchronous call is under way are not given to others before its end."""
    rank, world, right = dist.get_rank(), dist.get_world_size(), []
    for turn in range(20):
        whole = torch.empty(world << 18, device=device)
        cuda._sleep(2_000_000)
        work = dist.all_gather_into_tensor(
            whole, torch.full((1 << 18,), float(rank + turn), device=device), async_op=True
        )
        others = [torch.full((1 << 18,), -1.0, device=device) for _ in range(4)]
        assert work is not None
        work.wait()
        want = torch.arange(turn, turn + world, device=device).repeat_interleave(1 << 18)
        right.append(bool((whole == want).all()) and all(bool((one == -1).all()) for one in others))
    return all(right)


def eighths_are_moved(device: torch.device) -> bool:
    """Types that nobody adds up go as bytes: numbers of eight bits."""
    world = dist.get_world_size()
    mine = (torch.arange(1000, device=device) % 7 + dist.get_rank()).to(torch.float8_e4m3fn)
    whole = torch.empty(1000 * world, dtype=torch.float8_e4m3fn, device=device)
    dist.all_gather_into_tensor(whole, mine)
    want = torch.cat([(torch.arange(1000, device=device) % 7 + r).float() for r in range(world)])
    last = stretto.torch.last_choice()
    return last is not None and last.backend == "gpu" and bool((whole.float() == want).all())


def graphs() -> dict[str, Any]:
    """Collectives captured in a CUDA graph and replayed, synchronous and asynchronous."""
    world, device = dist.get_world_size(), device_of()
    tensor, shard = torch.ones(5000, device=device), torch.ones(100, device=device)
    whole = torch.zeros(100 * world, device=device)
    dist.all_reduce(tensor)
    dist.all_gather_into_tensor(whole, shard)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor)
        work = dist.all_gather_into_tensor(whole, shard, async_op=True)
        shard2 = tensor[:100] * 0 + 2
        work.wait()
        summed = whole.sum() + shard2.sum()
    right = []
    for at in range(5):
        tensor.fill_(1.0)
        shard.fill_(float(at))
        graph.replay()
        torch.cuda.synchronize()
        right.append(bool((tensor == world).all()) and float(summed) == 100.0 * world * at + 200)
    dist.all_reduce(tensor)
    torch.cuda.synchronize()
    return {"right": [*right, bool((tensor == world * world).all())]}


def symmetric() -> dict[str, Any]:
    """Collectives in symmetric memory, and ranks that use different places of it."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), device_of()
    count = 100_000 * world
    one = stretto.torch.symmetric_empty(2, count, device=device)
    two = stretto.torch.symmetric_empty(count, device=device)
    found: dict[str, Any] = {"right": []}
    for _ in range(3):
        one.copy_(torch.arange(2 * count, device=device).view(2, -1) % 1000 + rank)
        base = torch.arange(count, device=device) % 1000
        dist.all_reduce(one[0])
        total = world * base + world * (world - 1) // 2
        found["right"].append(bool((one[0] == total).all()))
        dist.all_gather_into_tensor(two, one[1][:100_000])
        want = (torch.arange(count, 2 * count, device=device) % 1000)[:100_000]
        found["right"].append(bool((two.view(world, -1) == torch.stack([want + r for r in range(world)])).all()))
        two.view(world, -1)[rank].add_(1)  # in place: the input is this rank's part of the output
        dist.all_gather_into_tensor(two, two.view(world, -1)[rank])
        found["right"].append(bool((two.view(world, -1) == torch.stack([want + r + 1 for r in range(world)])).all()))
        one[1].fill_(rank + 1.0)
        dist.reduce_scatter_tensor(two[:100_000], one[1])
        found["right"].append(bool((two[:100_000] == world * (world + 1) / 2).all()))
    found["said"] = ""
    try:
        dist.all_reduce(one[rank % 2])
        torch.cuda.synchronize()
        time.sleep(0.5)
        dist.all_reduce(one[0])
    except StrettoError as error:
        found["said"] = f"{type(error).__name__}: {error}"
    return found


def training() -> dict[str, Any]:
    """DDP, FSDP2 and DTensor: losses of every step, and whether all ranks have the same bits."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.nn.parallel import DistributedDataParallel

    device = device_of()
    found: dict[str, Any] = {}
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    for how in ("ddp", "fsdp"):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1)).to(device)
        model: Any = (
            DistributedDataParallel(net, device_ids=[device.index]) if how == "ddp" else fully_shard(net, mesh=mesh)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
        losses = []
        for _ in range(6):
            loss = (model(data) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        parameters: list[Any] = list(model.parameters())
        weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
        flat = torch.cat([w.detach().reshape(-1) for w in weights]).cpu()
        found[how] = {"losses": losses, "weights": flat.view(torch.int32).sum().item()}
    matrix = torch.arange(64.0 * 64, device=device).view(64, 64)
    sharded = distribute_tensor(matrix, mesh, [Shard(0)])
    moved = sharded.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()]).to_local()
    product: Any = sharded @ distribute_tensor(matrix, mesh, [Replicate()])
    total = product.full_tensor()
    found["dtensor"] = bool(torch.equal(moved, matrix)) and bool(torch.allclose(total, matrix @ matrix))
    found["backends"] = sorted({(c.op, c.backend) for c in stretto.torch.choices()})
    return found


def pool() -> dict[str, Any]:
    """DDP and FSDP2 with and without their buffers in symmetric memory: losses, places and times."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    device, world = device_of(), dist.get_world_size()
    group: Any = dist.group.WORLD
    mesh = init_device_mesh("cuda", (world,))
    found: dict[str, Any] = {}
    for how in ("ddp", "ddp in pool", "fsdp", "fsdp in pool"):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(1024, 1024) for _ in range(24)]
        model: Any = torch.nn.Sequential(*layers).to(device)
        os.environ["DDP_DISABLE_COMM_MEM"] = "0" if "pool" in how else "1"
        before = set(group.gpu._ready)
        if "ddp" in how:
            model = DistributedDataParallel(model, device_ids=[device.index], gradient_as_bucket_view=True)
        else:
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            if "pool" in how:
                found["modules"] = stretto.torch.symmetric_buffers(model, 128 << 20)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        data = torch.randn(8, 1024, generator=torch.Generator().manual_seed(dist.get_rank())).to(device)
        losses, times = [], []
        for _ in range(12):
            torch.cuda.synchronize()
            dist.barrier()
            began = time.perf_counter()
            loss = (model(data) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            losses.append(float(loss.detach()))
        texts = [ready[2] for key, ready in group.gpu._ready.items() if key not in before]
        found[how] = {
            "losses": losses, "in_pool": sum("in memory" in text and "pool" in text for text in texts),
            "elsewhere": [text for text in texts if "pool" not in text], "ms": round(sorted(times)[6] * 1e3, 2),
        }  # fmt: skip
    found["collectives_us"] = {name: round(us, 1) for name, us in _bucket_times(world, device).items()}
    found["held"] = stretto.torch.gpu_held_bytes()
    return found


def _bucket_times(world: int, device: torch.device) -> dict[str, float]:
    """A bucket of 25 MiB as DDP reduces it, in symmetric memory and elsewhere; us of one of 20 calls."""
    took = {}
    shared = stretto.torch.symmetric_empty(25 << 18, device=device)
    for name, tensor in (("symmetric", shared), ("elsewhere", torch.zeros(25 << 18, device=device))):
        tensor.zero_()
        for calls in (3, 20):
            torch.cuda.synchronize()
            dist.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                dist.all_reduce(tensor)
            torch.cuda.synchronize()
            took[name] = (time.perf_counter() - began) * 1e6 / calls
    return took


def fault(how: str, seed: str = "0") -> dict[str, Any]:
    """The last rank does something; what the others get, how long it took, and whether their GPU still works."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), device_of()
    tensor = torch.ones(random.Random(int(seed)).choice([100, 10_000, 1_000_000]), device=device)
    for _ in range(3):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    dist.barrier()
    began = time.monotonic()
    if rank == world - 1:
        if how == "kill":
            # In the middle of a burst, not between calls.
            for _ in range(random.Random(int(seed)).randrange(50)):
                dist.all_reduce(tensor)
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "exit":
            os._exit(3)
    said = ""
    try:
        while time.monotonic() < began + 60:
            if how == "mismatch" and rank == world - 1:
                dist.all_reduce(torch.ones(77, device=device), dist.ReduceOp.MAX)
            else:
                dist.all_reduce(tensor)
            torch.cuda.synchronize()
            time.sleep(0.001)
    except StrettoError as error:
        said = f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - began
    works = float((torch.ones(100, device=device) * 2).sum())
    return {"said": said, "took_s": round(took_s, 2), "gpu_works": works == 200.0}


def main() -> None:
    """One rank."""
    folder, scenario, *arguments = sys.argv[1:]
    faulthandler.dump_traceback_later(float(os.environ.get("GPU_JOB_LIMIT_S", "140")), exit=True)
    torch.cuda.set_device(device_of())
    limit = timedelta(seconds=4 if scenario == "fault" and arguments[0] == "stop" else 60)
    dist.init_process_group("stretto", timeout=limit)
    scenarios: dict[str, Any] = {
        "every_kind": every_kind, "delegated": delegated, "streams": streams_and_works, "graphs": graphs,
        "training": training, "fault": fault, "symmetric": symmetric, "pool": pool,
        "random": lambda *numbers: random_calls(*map(int, numbers)),
    }  # fmt: skip
    found = scenarios[scenario](*arguments)
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    if scenario in ("fault", "symmetric"):
        os._exit(0)
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
