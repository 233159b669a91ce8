# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/gpu_hosts.py: all-reduces and models on GPUs of several hosts, by us and by NCCL."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANK = int(os.environ["RANK"])
# NCCL takes several ranks on one GPU when each believes to be on a host of its own; then everything goes by sockets.
os.environ.setdefault("NCCL_HOSTID", f"rank{RANK}")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import stretto.torch  # noqa: E402
from stretto.runtime.torch_backend.gpu_watch import WATCHDOG  # noqa: E402

WIDTH, LAYERS, BATCH = 1024, 8, 64
STEPS, WARM = 6, 2


def times_ms(run: Callable[[], object], turns: int) -> list[float]:
    """Of each call, from when all ranks have come to it until the GPU is done; the slowest rank's."""
    found = []
    for _ in range(turns + 1):
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) * 1e3)
    slowest = torch.tensor(found[1:])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return sorted(slowest.tolist())


def all_reduces(asked: dict[str, Any], nccl: Any) -> list[dict[str, Any]]:
    """Every size by us and by NCCL; whether the sums are right."""
    rows = []
    world = dist.get_world_size()
    for nbytes in asked["sizes"]:
        if out_of_time(asked, 6.0):
            break
        tensor = torch.full((nbytes // 4,), float(RANK + 1), device="cuda")
        dist.all_reduce(tensor)
        right = bool((tensor == world * (world + 1) / 2).all())
        tensor.zero_()
        row: dict[str, Any] = {"case": "all_reduce", "nbytes": nbytes, "right": right}
        turns = 3 if nbytes > 16 << 20 else 5
        row["stretto"] = times_ms(lambda tensor=tensor: dist.all_reduce(tensor), turns)  # type: ignore[misc]
        if nccl is not None:
            row["nccl"] = times_ms(lambda tensor=tensor: dist.all_reduce(tensor, group=nccl), turns)  # type: ignore[misc]
        rows.append(row)
        write(asked, rows[-1])
    return rows


def model_of(how: str, group: Any) -> Any:
    """A stack of layers, the same on all ranks."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(LAYERS)]
    net: Any = torch.nn.Sequential(*layers).cuda()
    if how == "ddp":
        return DistributedDataParallel(net, device_ids=[0], process_group=group)
    whole = (dist.get_world_size(),)
    mesh = init_device_mesh("cuda", whole) if group is None else DeviceMesh.from_group(group, "cuda")
    for layer in net:
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(how: str, group: Any) -> dict[str, Any]:
    """Some steps: losses, the sum of the weights' bits, the times of steps, and the bytes that leave a host."""
    model = model_of(how, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(RANK)
    data = torch.randn(BATCH, WIDTH, generator=draw).cuda()
    losses, took = [], []
    before = moved()
    for _ in range(STEPS + WARM):
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        loss = (model(data) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()
        took.append((time.perf_counter() - begin) * 1e3)
        losses.append(float(loss.detach()))
    sent = (moved() - before) / (STEPS + WARM)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    bits = [int(w.detach().contiguous().view(torch.int32).long().sum()) for w in weights]
    slowest = torch.tensor(took[WARM:])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return {"losses": losses, "bits": bits, "ms": sorted(slowest.tolist()), "sent": sent}


def models(asked: dict[str, Any], nccl: Any) -> None:
    """DDP and FSDP2 twice by us and once by NCCL: the same bits in both runs and on all ranks, and losses beside."""
    for how in asked["models"]:
        if out_of_time(asked, 10.0):
            break
        one = train(how, None)
        two = train(how, None)
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, one["bits"])
        row: dict[str, Any] = {
            "case": how, "nbytes": one["sent"],
            "same_runs": one["bits"] == two["bits"] and one["losses"] == two["losses"],
            "same_ranks": all(bits == everybody[0] for bits in everybody), "stretto": two["ms"],
            "losses": one["losses"],
        }  # fmt: skip
        write(asked, row | {"right": row["same_runs"] and row["same_ranks"]})
        if nccl is not None and not out_of_time(asked, 6.0):
            theirs = train(how, nccl)
            pairs = zip(one["losses"], theirs["losses"], strict=True)
            row["apart"] = max(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)
            row["nccl"] = theirs["ms"]
            write(asked, row | {"right": row["same_runs"] and row["same_ranks"] and row["apart"] < 1e-4})


def moved() -> float:
    """Bytes that had to leave each of two hosts in the calls so far that ran on GPU memory."""
    share = {"all_reduce": 1.0, "all_gather": 0.5, "reduce_scatter": 0.5, "broadcast": 1.0}
    found = [c for c in stretto.torch.choices() if c.backend == "gpu"]
    return sum(share.get(c.op, 0.0) * c.nbytes * c.calls for c in found)


def out_of_time(asked: dict[str, Any], needed_s: float) -> bool:
    """Whether so much time is not left; the same on all ranks."""
    over = torch.tensor([float(time.time() + needed_s > asked["until"])])
    dist.all_reduce(over, dist.ReduceOp.MAX)
    if RANK == 0:
        print(f"{asked['until'] - time.time():.1f} s left", flush=True)
    return bool(over.item())


def stands(left_s: float) -> None:
    """In the end say where everything is that has not ended: every thread, and the slices of every group."""
    faulthandler.dump_traceback_later(left_s, exit=True)

    def look() -> None:
        time.sleep(max(left_s - 1.0, 0.0))
        for text in WATCHDOG.states():
            print(f"rank {RANK}: {text}", flush=True)

    threading.Thread(target=look, daemon=True).start()


def write(asked: dict[str, Any], row: dict[str, Any]) -> None:
    """One line more of what is known."""
    if RANK == 0:
        print(json.dumps(row), flush=True)
        with Path(asked["out"]).open("a") as file:
            file.write(json.dumps(row) + "\n")


def main() -> None:
    """Measure what is asked for."""
    asked = json.loads(sys.argv[1])
    stands(asked["until"] - time.time())
    torch.cuda.set_device(0)
    dist.init_process_group("stretto")
    nccl = dist.new_group(backend="nccl") if asked["nccl"] else None
    try:
        all_reduces(asked, nccl)
        models(asked, nccl)
        if RANK == 0:
            ran = sorted({(c.op, c.backend, c.program, c.why) for c in stretto.torch.choices()})
            write(asked, {"case": "choices", "ran": ran, "held": stretto.torch.gpu_held_bytes()})
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
