# SPDX-License-Identifier: Apache-2.0
"""One rank of benchmarks/gpu.py: every collective by every system, in CUDA graphs, all ranks on one GPU."""

from __future__ import annotations

import faulthandler
import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from gpu_parts import time_large, time_steps

import stretto.torch
from stretto.algorithms import collective_kind
from stretto.doctor.gpu_timing import GpuTime, time_calls, time_graph
from stretto.runtime.probe.mscclpp_ranks import MscclppRanks

Run = Callable[[], object]
ONE_SHOT_MOST = 1 << 20
NCCL_MOST = 4 << 20
MSCCLPP_MOST = 256 << 20
PAUSE_S, READY_S = 0.01, 30.0
HANGS_FROM = (8, 1 << 20)
"""symm_mem's two-shot hangs on one GPU with so many ranks and more bytes: not all of its blocks are resident."""


class RankBench:
    """The buffers and groups of this rank."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", self.rank % torch.cuda.device_count())
        self.asked = asked
        # PyTorch's symmetric memory asks a group for a store, which only the plain group beside ours has.
        dist.all_reduce(torch.ones(4, device=self.device))
        group: Any = dist.group.WORLD
        self.group: Any = group.gpu.site.symmetric.plain
        self.name: str = self.group.group_name
        self.nccl = dist.new_group(backend="nccl") if asked["nccl"] else None
        self._made: dict[int, torch.Tensor] = {}
        self._in_place: dict[tuple[int, str], torch.Tensor] = {}
        self._mscclpp: MscclppRanks | None = None
        self._plans: list[dict[str, Any]] = []
        if asked["plans"]:
            self._plans = plans_of(Path(asked["plans"]), self.world)
            try:
                gloo = dist.new_group(backend="gloo")
                self._mscclpp = MscclppRanks(min(max(asked["sizes"]), MSCCLPP_MOST), gloo)
            except Exception:
                print(f"MSCCL++ does not run beside: {traceback.format_exc()}", file=sys.stderr, flush=True)

    def meet(self) -> None:
        """All ranks come here."""
        torch.cuda.synchronize()
        dist.barrier()

    def is_late(self, began: float) -> bool:
        """Whether no further row is begun, so that there is time for what comes behind the table."""
        late = torch.tensor(float(time.monotonic() - began > self.asked["rows_s"]))
        dist.broadcast(late, 0)
        return bool(late)

    def shared(self, nbytes: int) -> torch.Tensor:
        """Symmetric memory of so many bytes, of float32."""
        if nbytes not in self._made:
            tensor = symmetric.empty(nbytes // 4, dtype=torch.float32, device=self.device)
            tensor.zero_()
            torch.cuda.synchronize()
            symmetric.rendezvous(tensor, self.group)
            self._made[nbytes] = tensor
        return self._made[nbytes]

    def in_place(self, nbytes: int, use: str) -> torch.Tensor:
        """Memory that our programs use where it lies."""
        if (nbytes, use) not in self._in_place:
            made = stretto.torch.symmetric_empty(nbytes // 4, dtype=torch.float32, device=self.device)
            self._in_place[nbytes, use] = made.zero_()
        return self._in_place[nbytes, use]

    def plain(self, nbytes: int) -> torch.Tensor:
        """Memory as PyTorch gives it."""
        return torch.zeros(nbytes // 4, dtype=torch.float32, device=self.device)

    def systems(self, kind: str, nbytes: int) -> dict[str, Run]:
        """What to time for a collective whose larger side has so many bytes."""
        n, ops = self.world, torch.ops.symm_mem
        whole, shard = self.plain(nbytes), self.plain(nbytes // n)
        found: dict[str, Run] = {}
        large, small = self.in_place(nbytes, "whole"), self.in_place(max(nbytes // n, 4), "shard")
        if kind == "all_reduce":
            found["stretto"] = lambda: dist.all_reduce(whole)
            found["in place"] = lambda: dist.all_reduce(large)
            mine = self.shared(nbytes)
            if nbytes <= ONE_SHOT_MOST:
                found["one-shot"] = lambda: ops.one_shot_all_reduce(mine, "sum", self.name)
            if n < HANGS_FROM[0] or nbytes <= HANGS_FROM[1]:
                found["two-shot"] = lambda: ops.two_shot_all_reduce_(mine, "sum", self.name)
            found["nccl"] = lambda: dist.all_reduce(whole, group=self.nccl)
        elif kind == "all_gather":
            found["stretto"] = lambda: dist.all_gather_into_tensor(whole, shard)
            # As NCCL and MSCCL++ mean it: the input is this rank's part of the output.
            mine = large.chunk(n)[self.rank]
            found["in place"] = lambda: dist.all_gather_into_tensor(large, mine)
            part = self.shared(nbytes // n)
            found["copy engine"] = lambda: ops._low_contention_all_gather(part, self.name)
            found["nccl"] = lambda: dist.all_gather_into_tensor(whole, shard, group=self.nccl)
        elif kind == "reduce_scatter":
            found["stretto"] = lambda: dist.reduce_scatter_tensor(shard, whole)
            found["in place"] = lambda: dist.reduce_scatter_tensor(small, large)
            found["nccl"] = lambda: dist.reduce_scatter_tensor(shard, whole, group=self.nccl)
        else:
            other = self.plain(nbytes)
            second = self.in_place(nbytes, "other")
            found["stretto"] = lambda: dist.all_to_all_single(other, whole)
            found["in place"] = lambda: dist.all_to_all_single(second, large)
            found["nccl"] = lambda: dist.all_to_all_single(other, whole, group=self.nccl)
        if self.nccl is None or nbytes > NCCL_MOST:
            del found["nccl"]
        return found | self._own_plans(kind, nbytes)

    def _own_plans(self, kind: str, nbytes: int) -> dict[str, Run]:
        """MSCCL++'s own plans for a case; the best of them counts."""
        found: dict[str, Run] = {}
        if self._mscclpp is None or nbytes > self._mscclpp.most_bytes or nbytes % (16 * self.world):
            return found
        for one in self._plans:
            if one["kind"] == kind and one["least"] <= nbytes <= one["most"]:
                given, made = self._mscclpp.buffers(kind, nbytes, one["in_place"])
                given.zero_()
                found[f"mscclpp {one['name']}"] = partial(
                    self._mscclpp.launch, self._mscclpp.plan(one["text"]), given, made
                )
        return found

    def time(self, system: str, run: Run, nbytes: int) -> GpuTime:
        """One system's time."""
        few = nbytes >= 16 << 20
        if system in ("nccl", "copy engine"):
            # Not in graphs: NCCL's proxies on sockets are driven by the host, and PyTorch's copies use streams that
            # it does not join in a graph.
            return time_calls(run, self.meet, calls=2 if few else 5, rounds=3 if few else 5)
        calls = 6 if few else 100 if nbytes < 1 << 20 else 40
        return time_graph(run, self.meet, calls=calls, rounds=self.asked["rounds"])

    def copy_us(self, nbytes: int) -> float:
        """How long all ranks take together to copy so many bytes each, inside their memory."""
        source, target = self.plain(nbytes), self.plain(nbytes)
        return time_graph(lambda: target.copy_(source), self.meet, calls=10).median_us


def plans_of(folder: Path, ranks: int) -> list[dict[str, Any]]:
    """Plans of MSCCL++ (NAME_RANKS.json) for so many ranks: those of packets up to 1 MiB, others from 16 KiB on."""
    found = []
    for path in sorted(folder.glob(f"*_{ranks}.json")):
        text = path.read_text()
        data = json.loads(text)
        packets = data["protocol"] == "LL"
        found.append({
            "name": path.stem, "text": text, "kind": collective_kind(data["collective"]),
            "in_place": bool(data["inplace"]), "least": 0 if packets else 16 << 10,
            "most": 1 << 20 if packets else MSCCLPP_MOST,
        })  # fmt: skip
    return found


def pass_gate(gate: Path, bench: RankBench) -> object:
    """Jobs of other numbers of ranks start at the same time; once all are ready, they time one after the other.

    Args:
        gate: A file that all jobs lock.
        bench: This rank's.

    Returns:
        What holds the lock.
    """
    torch.cuda.synchronize()
    passed = gate.with_name(f"{gate.name}-{bench.world}")
    if bench.rank == 0:
        gate.with_name(f"{gate.name}-ready-{bench.world}").touch()
        deadline = time.monotonic() + READY_S
        while len(list(gate.parent.glob(f"{gate.name}-ready-*"))) < bench.asked["jobs"] and time.monotonic() < deadline:
            time.sleep(PAUSE_S)
        file = gate.open("w")
        fcntl.flock(file, fcntl.LOCK_EX)
        passed.touch()
        return file
    while not passed.exists():
        time.sleep(PAUSE_S)
    return None


def print_parts(bench: RankBench) -> None:
    """Large calls beside copies, and what the interpreter's steps cost."""
    group: Any = dist.group.WORLD
    steps = time_steps(group.gpu.site.communicator, bench.device, bench.meet)
    large = time_large(bench.group, bench.device, bench.meet)
    if bench.rank:
        return
    print(f"x{bench.world} " + ", ".join(f"{name} {us:.2f}" for name, us in steps.items()), flush=True)
    for row in large:
        ours, copied, everywhere = row["ours_us"], row["copy_us"], row["all_sms_us"]
        print(
            f"x{bench.world} all_reduce of 256 MiB, {row['blocks']} blocks: {ours:.0f} us; a copy with as many blocks "
            f"{copied:.0f} us ({ours / copied:.2f}x), with all SMs {everywhere:.0f} us ({ours / everywhere:.2f}x)",
            flush=True,
        )


def main() -> None:
    """Time everything that rank 0's parent asks for; rank 0 writes the rows, each as soon as it is known."""
    asked = json.loads(sys.argv[2])
    faulthandler.dump_traceback_later(asked["limit_s"], exit=True)
    torch.cuda.set_device(int(os.environ["RANK"]) % torch.cuda.device_count())
    dist.init_process_group("stretto")
    bench = RankBench(asked)
    out = Path(sys.argv[1])
    rate = 0.0
    lock = pass_gate(Path(asked["gate"]), bench)
    if asked["bound"]:
        rate = 2 * (64 << 20) * bench.world / bench.copy_us(64 << 20)
    began = time.monotonic()
    for at, kind in enumerate(asked["collectives"]):
        for nbytes in asked["other_sizes" if at else "sizes"]:
            if bench.is_late(began):
                break
            row: dict[str, Any] = {
                "collective": kind,
                "ranks": bench.world,
                "nbytes": nbytes,
                "copy_bytes_per_us": rate,
            }
            for system, run in bench.systems(kind, nbytes).items():
                try:
                    taken = bench.time(system, run, nbytes)
                    times: list[Any] = [None] * bench.world
                    dist.all_gather_object(times, (taken.median_us, taken.least_us, taken.most_us))
                    # A collective has ended when the last rank has.
                    row[system] = [max(one[at] for one in times) for at in range(3)]
                except Exception:
                    row[f"{system} failed"] = traceback.format_exc()[-300:]
                    print(traceback.format_exc(), file=sys.stderr, flush=True)
            if bench.rank == 0:
                with out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)
    held = stretto.torch.gpu_held_bytes()
    if bench.rank == 0:
        print(f"GPU memory held on rank 0: {held} bytes", flush=True)
    bench.meet()
    if asked["parts"]:
        try:
            print_parts(bench)
        except Exception:
            print(traceback.format_exc(), file=sys.stderr, flush=True)
    torch.cuda.synchronize()
    del lock
    # Not through destructors: a system that failed may have left something that waits.
    os._exit(0)


if __name__ == "__main__":
    main()
