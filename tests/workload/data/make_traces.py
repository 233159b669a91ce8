# SPDX-License-Identifier: Apache-2.0
"""Makes the golden traces of this directory: ``python make_traces.py gpu`` or ``python make_traces.py ddp``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RANKS, STEPS = 4, 3


class _Recorder:
    """Chrome trace events in the shape in which the profiler writes those of a GPU rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.events, self.next = rank, list[dict[str, Any]](), 1

    def span(self, cat: str, name: str, ts: float, dur: float, tid: int | str, **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}
        self.events.append(event)

    def kernel(self, name: str, launch: float, ts: float, dur: float, stream: int, **args: Any) -> None:
        self.next += 1
        self.span("cuda_runtime", "cudaLaunchKernel", launch, 2.0, 1, correlation=self.next)
        cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        self.span(cat, name, ts, dur, stream, correlation=self.next, stream=stream, device=0, **args)

    def collective(self, call: dict[str, Any], kernel: str, cpu: float, ts: float, dur: float, stream: int) -> None:
        self.next += 1
        external = {"External id": 1000 + self.next}
        self.span("cpu_op", "record_param_comms", cpu, 5.0, 1, **external, **call)
        self.kernel(kernel, cpu + 2, ts, dur, stream, **external, **call)

    def wait(self, call: dict[str, Any], cpu: float) -> None:
        self.span("cpu_op", "record_param_comms", cpu, 1.0, 1, **{**call, "Collective name": "wait"})


def _call(name: str, before: int, after: int, dtype: str, group: list[int], pg: str, seq: int) -> dict[str, Any]:
    return {
        "Collective name": name, "In msg nelems": before, "Out msg nelems": after, "Group size": len(group),
        "dtype": dtype, "Process Group Name": pg, "Process Group Ranks": str(group), "Seq": seq,
    }  # fmt: skip


def gpu_rank(rank: int) -> dict[str, Any]:
    """A step of four ranks: an all-gather in the forward pass (pairs of neighbours), a gradient all-reduce (across)."""
    recorder = _Recorder(rank)
    tensor, data = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    for step in range(STEPS):
        t = 1000.0 + 600.0 * step
        gathered = {r: t + 152 + 5 * r for r in range(RANKS)}
        done = {r: max(gathered[r // 2 * 2], gathered[r // 2 * 2 + 1]) + 40 for r in range(RANKS)}
        reduced = {r: done[r] + 1 + 80 + 1 + 120 + 2 for r in range(RANKS)}
        updated = max(reduced[rank % 2], reduced[rank % 2 + 2]) + 150
        gather = _call("_allgather_base", 1_000_000, 2_000_000, "BFloat16", tensor, "1", 10 + step)
        reduce = _call("allreduce", 3_000_000, 3_000_000, "Float", data, "2", 20 + step)
        recorder.span("user_annotation", f"ProfilerStep#{step + 3}", t, 590.0, 1)
        recorder.kernel("Memcpy HtoD", t + 5, t + 55, 20.0, 11, bytes=4096)
        recorder.kernel("forward_0", t + 10, t + 50, 100.0 + 5 * rank, 7)
        start, name = gathered[rank], "ncclDevKernel_AllGather_RING_LL(args)"
        recorder.collective(gather, name, t + 20, start, done[rank] - start, 24)
        recorder.wait(gather, t + 30)
        recorder.kernel("forward_1", t + 40, done[rank] + 1, 80.0, 7)
        recorder.span("cpu_op", "autograd::engine::evaluate_function: MmBackward0", t + 50, 40.0, 2)
        recorder.kernel("backward_0", t + 52, done[rank] + 82, 120.0, 7)
        start, name = reduced[rank], "ncclDevKernel_AllReduce_Sum_f32_RING_LL(args)"
        recorder.collective(reduce, name, t + 60, start, updated - start, 20)
        recorder.kernel("backward_1", t + 70, done[rank] + 203, 100.0, 7)
        recorder.wait(reduce, t + 100)
        recorder.span("user_annotation", "Optimizer.step#SGD.step", t + 110, 10.0, 1)
        recorder.kernel("update", t + 112, updated + 1, 30.0, 7)
    groups = [("0", list(range(RANKS))), ("1", tensor), ("2", data)]
    config = [{"pg_name": name, "pg_size": len(ranks), "ranks": ranks} for name, ranks in groups]
    about = {"backend": "nccl", "rank": rank, "world_size": RANKS, "pg_count": 3, "pg_config": config}
    return {"schemaVersion": 1, "distributedInfo": about, "host_name": "synthetic", "traceEvents": recorder.events}


def _trimmed(path: Path) -> None:
    """Only what is read, to keep the repository small; nothing is changed."""
    trace = json.loads(path.read_text())
    keep = ("ph", "cat", "name", "ts", "dur", "tid", "args")
    about = ("External id", "Input Dims", "Input type", "Concrete Inputs")
    events = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") not in ("cpu_op", "user_annotation"):
            continue
        comm = event["name"].startswith(("c10d::", "gloo:"))
        args = {key: value for key, value in event.get("args", {}).items() if comm and key in about}
        events.append({key: event[key] for key in keep if key in event} | {"args": args})
    head = {key: trace[key] for key in ("schemaVersion", "distributedInfo", "baseTimeNanoseconds")}
    path.write_text(json.dumps({**head, "host_name": "golden", "traceEvents": events}, separators=(",", ":")) + "\n")


def _train(rank: int) -> None:
    import os

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.profiler import ProfilerActivity, profile, schedule

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29613")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)]
    layers += [torch.nn.ReLU(), torch.nn.Linear(256, 10)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, labels = torch.randn(32, 64), torch.randint(0, 10, (32,))
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=2, active=4), record_shapes=True
    ) as profiler:
        for step in range(7):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            dist.all_reduce(loss.detach().clone())
            if step < 6:
                profiler.step()
    path = HERE / f"ddp_gloo.{rank}.json"
    profiler.export_chrome_trace(str(path))
    _trimmed(path)
    dist.destroy_process_group()


def main() -> None:
    if sys.argv[1:] == ["gpu"]:
        for rank in range(RANKS):
            text = json.dumps(gpu_rank(rank), separators=(",", ":"))
            (HERE / f"gpu_nccl.{rank}.json").write_text(text + "\n")
    elif sys.argv[1:] == ["ddp"]:
        from torch.multiprocessing.spawn import spawn

        spawn(_train, nprocs=2)  # type: ignore[no-untyped-call]
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    main()
