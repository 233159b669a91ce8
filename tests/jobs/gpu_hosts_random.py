# SPDX-License-Identifier: Apache-2.0
"""Started by torchrun: random collectives of the backend over GPUs of several hosts, beside a reference.

torchrun --nproc-per-node 4 tests/jobs/gpu_hosts_random.py --hosts a,a,b,b --trials 200 [--most BYTES] [--seed S]

``--fault kill`` (or stop, mismatch) has the last rank go wrong instead. Hosts are names, one for each rank, and all
ranks may share a GPU; without ``--hosts`` they are those of a lab. What is in the way of a call that does not end is
printed after ``--seconds``: every thread, and where the group's slices are.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

RANK = int(os.environ["RANK"])
# NCCL takes several ranks on one GPU when each believes to be on a host of its own.
os.environ.setdefault("NCCL_HOSTID", f"rank{RANK}")
os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import stretto.torch  # noqa: E402
from stretto.programs.fused import fuse  # noqa: E402
from stretto.programs.stages import cut  # noqa: E402
from stretto.runtime.executor import executor as executor_module  # noqa: E402
from stretto.runtime.gpu.compile import compiled  # noqa: E402
from stretto.runtime.gpu.encode import kernel_shapes  # noqa: E402
from stretto.runtime.gpu.hosts_programs import program_for  # noqa: E402
from stretto.runtime.torch_backend import gpu_meeting, meeting  # noqa: E402
from stretto.runtime.torch_backend.gpu_watch import WATCHDOG  # noqa: E402

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TYPES = (*FLOATS, torch.int32, torch.int64, torch.uint8)
BEGAN = time.monotonic()


def say(*words: object) -> None:
    """One line of this rank."""
    print(f"[{RANK} {time.monotonic() - BEGAN:6.2f}]", *words, flush=True)


def parts_of(draw: random.Random, seed: int, ranks: int, options: argparse.Namespace) -> tuple[Any, ...]:
    """A drawn call: its kind, reduction, root and every rank's input; small whole numbers, so that sums are exact."""
    op = draw.choice(KINDS)
    dtype = draw.choice(TYPES) if options.types else torch.float32
    reduce = draw.choice(("sum", "min", "max", "avg", "prod")) if options.types else "sum"
    if not dtype.is_floating_point and reduce == "avg":
        reduce = "sum"
    count = max(1, int(options.most ** draw.random()) // dtype.itemsize)
    if op in ("reduce_scatter", "all_to_all"):
        count = max(count // ranks, 1) * ranks
    if op == "all_gather":
        count = max(count // ranks, 1)
    generator = torch.Generator("cuda").manual_seed(seed)
    high = 3 if reduce == "prod" else 5
    scale = ranks if reduce == "avg" else 1
    parts = [
        (torch.randint(1, high, (count,), generator=generator, device="cuda") * scale).to(dtype) for _ in range(ranks)
    ]
    return op, reduce, draw.randrange(ranks), parts


def wanted_of(op: str, reduce: str, root: int, parts: list[torch.Tensor], me: int) -> torch.Tensor | None:
    """What this rank must get; None where it gets nothing."""
    ranks = len(parts)
    if op == "all_gather":
        return torch.cat(parts)
    if op == "all_to_all":
        return torch.cat([part.view(ranks, -1)[me] for part in parts])
    if op == "broadcast":
        return parts[root]
    stack = torch.stack(parts)
    wide = stack.double() if stack.is_floating_point() else stack.long()
    ways: dict[str, Any] = {"sum": wide.sum, "avg": wide.mean, "prod": wide.prod, "min": wide.amin, "max": wide.amax}
    total: torch.Tensor = ways[reduce](0).to(stack.dtype)
    if op == "reduce_scatter":
        return total.view(ranks, -1)[me].contiguous()
    return total if op == "all_reduce" or me == root else None


def start(op: str, reduce: str, root: int, parts: list[torch.Tensor], group: Any, draw: random.Random) -> Any:
    """Make the call; its output and its work, if it is asynchronous."""
    me, ranks, how = (
        dist.get_rank(group),
        len(parts),
        getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(reduce, reduce.upper())),
    )
    mine, later = parts[me].clone(), draw.random() < 0.5
    there = dist.get_global_rank(group, root) if group is not None else root
    more: dict[str, Any] = {"group": group, "async_op": later}
    if op in ("all_reduce", "broadcast", "reduce"):
        calls: dict[str, Any] = {
            "all_reduce": lambda: dist.all_reduce(mine, how, **more),
            "broadcast": lambda: dist.broadcast(mine, there, **more),
            "reduce": lambda: dist.reduce(mine, there, how, **more),
        }
        return mine, calls[op]()
    size = {"all_gather": mine.numel() * ranks, "reduce_scatter": mine.numel() // ranks}.get(op, mine.numel())
    out = torch.full((size,), 7, dtype=mine.dtype, device="cuda")
    if op == "all_gather":
        return out, dist.all_gather_into_tensor(out, mine, **more)
    if op == "reduce_scatter":
        return out, dist.reduce_scatter_tensor(out, mine, how, **more)
    return out, dist.all_to_all_single(out, mine, **more)


def run(options: argparse.Namespace, group: Any) -> tuple[int, int]:
    """Random calls, some under way at a time; how many ran and how many were wrong."""
    ran = wrong = 0
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    flying: list[tuple[Any, ...]] = []
    for trial in range(options.trials):
        seed = options.seed * 1_000_003 + trial
        draw = random.Random(seed)
        op, reduce, root, parts = parts_of(draw, seed, ranks, options)
        out, work = start(op, reduce, root, parts, group, draw)
        flying.append((op, reduce, root, parts, out, work, trial))
        ran += 1
        if len(flying) < draw.randrange(1, 9) and trial + 1 < options.trials:
            continue
        for op, reduce, root, parts, out, work, at in flying:
            if work is not None:
                work.wait()
            want = wanted_of(op, reduce, root, parts, me)
            if want is not None and not torch.equal(out, want):
                wrong += 1
                off = (out != want).nonzero().flatten()
                say(
                    "WRONG", at, op, reduce, out.dtype, out.numel(), "root", root, "off", off.numel(),
                    off[:4].tolist(), out[off[:4]].tolist(), want[off[:4]].tolist(),
                )  # fmt: skip
        flying.clear()
        # All ranks stop at the same trial.
        if trial % 16 == 15:
            over = torch.tensor([float(time.monotonic() - BEGAN > options.seconds * 0.7)])
            dist.all_reduce(over, dist.ReduceOp.MAX, group=group)
            if over.item():
                break
    return ran, wrong


def sizes(options: argparse.Namespace) -> int:
    """All-reduces of growing sizes, each waited for; how many were wrong."""
    wrong, ranks = 0, dist.get_world_size()
    for nbytes in [int(size) for size in options.sizes.split(",") if size]:
        tensor = torch.full((max(1, nbytes // 4),), float(RANK + 1), device="cuda")
        took = []
        for _ in range(4):
            tensor.fill_(RANK + 1)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            torch.cuda.synchronize()
            took.append((time.perf_counter() - begin) * 1e3)
        right = bool((tensor == ranks * (ranks + 1) / 2).all())
        wrong += not right
        if RANK == 0 or not right:
            say("all_reduce", nbytes, "right" if right else "WRONG", "ms", *(f"{each:.2f}" for each in took))
    return wrong


def compile_together(hosts: list[str], types: bool) -> int:
    """All kernels of this placement, each by one rank in a thread; the others find them in the cache."""
    numbers, kernels = [hosts.index(host) for host in hosts], set()
    wanted = [(str(t).removeprefix("torch."), r) for t in TYPES for r in ("sum", "min", "max", "prod")]
    for kind in KINDS:
        for root in range(len(hosts) if kind in ("broadcast", "reduce") else 1):
            stages = cut(program_for(kind, hosts, root), numbers).stages
            for program in (leg.program for stage in stages if not stage.network for leg in stage.legs):
                shapes = [kernel_shapes(fuse(program, protocol=each)) for each in ("ll", "simple")]
                how = (
                    (wanted if types else [("float32", "sum")]) if program.collective.combining else [("uint8", "sum")]
                )
                kernels |= {(*each, shape) for each in how for shape in shapes}
    capability = torch.cuda.get_device_capability()
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // len(hosts))) as pool:
        mine = [each for at, each in enumerate(sorted(kernels)) if at % len(hosts) == RANK]
        for job in [pool.submit(compiled, *each, capability) for each in mine]:
            job.result()
    dist.barrier()
    return len(kernels)


def fault(how: str) -> None:
    """The last rank does something in the middle of calls; what the others get, when, and whether their GPU goes on."""
    last = dist.get_world_size() - 1
    tensor = torch.ones(1 << 20, device="cuda")
    for _ in range(5):
        dist.all_reduce(tensor)
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.monotonic()
    if last == RANK and how in ("kill", "stop"):
        dist.all_reduce(tensor)
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    said = ""
    try:
        for at in range(100):
            other = last == RANK and how == "mismatch" and at == 3
            dist.all_reduce(tensor[:77] if other else tensor)
            torch.cuda.synchronize()
            time.sleep(0.05)
    except Exception as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    took = time.monotonic() - begin
    try:
        usable = float(torch.full((1000,), 2.0, device="cuda").sum().item()) == 2000
    except Exception as error:
        usable = False
        said += f" and then {error}"
    say("FAULT", how, f"{took:.1f} s", "GPU usable" if usable else "GPU NOT usable", "|", said)
    os._exit(0)


def stands(seconds: float) -> None:
    """After so long, say where everything is, and end."""
    faulthandler.dump_traceback_later(seconds + 1.0, exit=True)

    def look() -> None:
        time.sleep(seconds)
        for text in WATCHDOG.states():
            say(text)

    threading.Thread(target=look, daemon=True).start()


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", default="")
    parser.add_argument("--trials", type=int, default=0)
    parser.add_argument("--types", action="store_true", help="all element types and reductions, not float32 sums alone")
    parser.add_argument("--most", type=int, default=1 << 22)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sizes", default="")
    parser.add_argument("--fault", default="", choices=["", "kill", "stop", "mismatch"])
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    stands(options.seconds)
    if options.hosts:
        mine = options.hosts.split(",")[RANK]
        for module in (meeting, gpu_meeting, executor_module):
            setattr(module, "host_key", lambda: mine)  # noqa: B010
    torch.cuda.set_device(0 if torch.cuda.device_count() == 1 else int(os.environ.get("LOCAL_RANK", 0)))
    limit_s = options.seconds if not options.fault else 8.0
    dist.init_process_group("stretto", timeout=timedelta(seconds=limit_s))
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, meeting.card(0, executor="", rules="").host)
    if options.trials:
        count = compile_together(names, options.types)
        if RANK == 0:
            say(f"joined, {count} kernels")
    if options.fault:
        fault(options.fault)
    wrong = sizes(options)
    ran, more = run(options, None)
    others = {(c.op, c.backend, c.why) for c in stretto.torch.choices() if c.backend not in ("gpu", "executor", "gloo")}
    say(f"{ran} random collectives, {wrong + more} wrong", *others)
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    if wrong + more:
        sys.exit(1)


if __name__ == "__main__":
    main()
