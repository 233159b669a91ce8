# SPDX-License-Identifier: Apache-2.0
"""One rank of `gpu_selftest`; started with a folder for the results and what to run, as JSON."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ..algorithms import algorithm
from ..algorithms.registry import FOR_COMPARISON, defined_for
from ..collectives import ROOTED
from ..errors import StrettoError
from ..runtime.torch_backend.backend import register
from ..runtime.torch_backend.recording import LEDGER
from .gpu_selftest import SelfTestMachine, SelfTestRow
from .gpu_timing import GpuTime, time_calls, time_graph

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce")
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
IN_PLACE = ("all_reduce", "broadcast", "reduce")
WHOLE = ("int8", "uint8", "bool")
"""Types of which only sums are tried; products and averages are tried with other types, where they are exact."""
ALL_DTYPES_UP_TO = 1 << 20
"""Larger messages are sent as the first type only: all types move the same bytes."""


class SelfTestRank:
    """The groups of this rank, and the tensors of one case at a time."""

    def __init__(self, device: torch.device, most_bytes: int) -> None:
        self.device, self.rank, self.world = device, dist.get_rank(), dist.get_world_size()
        self.group = _world()
        self.nccl: Any = dist.new_group(backend="nccl")
        # Input and output of calls in symmetric memory; a size is rounded up to a whole number for every rank.
        room = most_bytes + 8 * self.world
        self.symmetric = [self.group.gpu.empty(room, torch.uint8, device) for _ in range(2)]

    def meet(self) -> None:
        """Wait until all ranks have come here."""
        torch.cuda.synchronize()
        dist.barrier()

    def parts(self, kind: str, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The inputs of all ranks: small whole numbers, whose sums are exact in every type.

        Args:
            kind: The collective.
            count: Elements of each tensor.
            dtype: Their type.

        Returns:
            One tensor for each rank, the same on all ranks.
        """
        found = []
        for rank in range(self.world):
            draw = torch.Generator(device=self.device).manual_seed(rank + 1)
            found.append(torch.randint(0, 4, (count,), generator=draw, device=self.device).to(dtype))
        return found

    def expected(self, kind: str, parts: list[torch.Tensor], reduce: str = "sum") -> torch.Tensor:
        """What this rank must get.

        Args:
            kind: The collective.
            parts: The inputs of all ranks.
            reduce: How they are reduced, where they are.

        Returns:
            This rank's output.
        """
        if kind in REDUCING:
            wide = torch.stack(parts).to(torch.float64)
            ways: dict[str, Any] = {
                "sum": wide.sum,
                "avg": wide.mean,
                "min": wide.amin,
                "max": wide.amax,
                "prod": wide.prod,
            }
            whole: torch.Tensor = ways[reduce](0).to(parts[0].dtype)
            return whole.view(self.world, -1)[self.rank] if kind == "reduce_scatter" else whole
        if kind == "broadcast":
            return parts[0]
        if kind == "all_gather":
            return torch.cat(parts)
        return torch.cat([part.view(self.world, -1)[self.rank] for part in parts])

    def cases(self, kind: str, dtypes: list[str], sizes: list[int]) -> Iterator[tuple[str, int]]:
        """Types and sizes.

        Args:
            kind: The collective.
            dtypes: Names of element types; large sizes are tried with the first alone.
            sizes: Bytes.

        Yields:
            Each type with each size.
        """
        for nbytes in sizes:
            for dtype in dtypes if nbytes <= ALL_DTYPES_UP_TO else dtypes[:1]:
                yield dtype, nbytes

    def time_nccl(self, kind: str, source: torch.Tensor, target: torch.Tensor) -> float:
        """How long NCCL takes for the same call; 0 where it cannot.

        Args:
            kind: The collective.
            source: This rank's input.
            target: Its output; also the input where the collective works in place.

        Returns:
            Microseconds of the slowest rank.
        """
        group = self.nccl
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(target, group=group),
            "broadcast": lambda: dist.broadcast(target, 0, group=group),
            "reduce": lambda: dist.reduce(target, 0, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(target, source, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(target, source, group=group),
            "all_to_all": lambda: dist.all_to_all_single(target, source, group=group),
        }
        try:
            return self.slowest(time_calls(calls[kind], self.meet, calls=3, rounds=3))
        except (RuntimeError, TypeError, ValueError):
            # A type that NCCL does not know.
            return 0.0

    def slowest(self, taken: GpuTime) -> float:
        """The median of the slowest rank: a collective has ended when the last one has."""
        times: list[Any] = [None] * self.world
        dist.all_gather_object(times, taken.median_us)
        return float(max(times))

    def all_right(self, right: bool) -> bool:
        """Whether it is right on all ranks."""
        said: list[Any] = [None] * self.world
        dist.all_gather_object(said, right)
        return all(said)

    def run_kind(self, kind: str, asked: dict[str, Any]) -> Iterator[SelfTestRow]:
        """Every algorithm on every size and type."""
        communicator = self.group.gpu.site.communicator
        for dtype, nbytes in self.cases(kind, asked["dtypes"], asked["sizes"]):
            typed: torch.dtype = getattr(torch, dtype)
            whole = max(self.world, nbytes // typed.itemsize // self.world * self.world)
            mine = whole // self.world if kind == "all_gather" else whole
            parts = self.parts(kind, mine, typed)
            want = self.expected(kind, parts)
            source, target = parts[self.rank], torch.zeros_like(want)
            size = {"collective": kind, "dtype": dtype, "nbytes": whole * typed.itemsize}
            row = size | {"nccl_us": self.time_nccl(kind, source, target)}
            for name in defined_for(kind, self.world):
                if name in FOR_COMPARISON:
                    continue
                yield self.run_one(row | {"algorithm": name}, communicator, source, target, want)
                if dtype == asked["dtypes"][0]:
                    there, made = (
                        self.symmetric[at][: one.nbytes].view(typed) for at, one in enumerate((source, target))
                    )
                    there.copy_(source)
                    given = row | {"algorithm": name, "memory": "symmetric"}
                    yield self.run_one(given, communicator, there, made, want)
            if kind in REDUCING and nbytes == asked["sizes"][0] and dtype not in WHOLE:
                # An average over other numbers of ranks is rounded twice in the types of two bytes.
                exact = self.world & (self.world - 1) == 0 or typed.itemsize > 2
                for reduce in ("avg", "min", "max", "prod") if exact else ("min", "max", "prod"):
                    wanted = self.expected(kind, parts, reduce)
                    named = size | {"nccl_us": 0.0, "algorithm": "direct", "reduce": reduce}
                    yield self.run_one(named, communicator, source, target, wanted)

    def run_one(
        self, row: dict[str, Any], communicator: Any, source: torch.Tensor, target: torch.Tensor, want: torch.Tensor
    ) -> SelfTestRow:
        """One algorithm: whether it is right, and its time.

        Args:
            row: The fields of the row that are known: algorithm, collective, type, size.
            communicator: A `GpuCommunicator` of all ranks.
            source: This rank's input.
            target: Its output.
            want: What the output must be.

        Returns:
            The row.
        """
        kind, in_place = row["collective"], row["collective"] in IN_PLACE
        try:
            given: dict[str, Any] = {"root": 0} if kind in ROOTED else {}
            program = algorithm(row["algorithm"], kind, self.world, in_place=in_place, **given)
            loaded = communicator.load(
                program, dtype=want.dtype, reduce=row.get("reduce", "sum"), nbytes=row["nbytes"],
                symmetric="memory" in row, anchored=True,
            )  # fmt: skip
        except StrettoError as error:
            return SelfTestRow(**row, right=False, us=0.0, error=str(error))
        if in_place:
            target.copy_(source)
        self.meet()
        # In a broadcast only the root has an input, in a reduce an output.
        begin = (target if in_place else source)[: loaded.encoded.inputs[self.rank]]
        end = target[: loaded.encoded.outputs[self.rank]]
        communicator.launch(loaded, begin, end)
        torch.cuda.synchronize()
        right = self.all_right(bool(torch.equal(target, want)) or (kind == "reduce" and self.rank != 0))
        taken = time_graph(lambda: communicator.launch(loaded, begin, end), self.meet, calls=10, rounds=5)
        return SelfTestRow(**row, right=right, us=round(self.slowest(taken), 2))


def _world() -> Any:
    """The group of all ranks, which is one of ours."""
    return dist.group.WORLD


def machine(device: torch.device) -> SelfTestMachine:
    """What this job runs on; all ranks call it, at the same point, after the first call on GPU tensors."""
    group: Any = dist.group.WORLD
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, torch.cuda.get_device_name(device))
    last = LEDGER.last()
    refusal = last.why if last is not None and last.backend == "nccl" else ""
    nccl: Any = torch.cuda
    return SelfTestMachine(
        ranks=dist.get_world_size(), gpus=tuple(names), torch=str(torch.__version__), cuda=str(torch.version.cuda),
        nccl=".".join(map(str, nccl.nccl.version())),
        driver=_asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        topology=_asked("nvidia-smi", "topo", "-m"), held_bytes=group.gpu.held_bytes, refusal=refusal,
    )  # fmt: skip


def _asked(*command: str) -> str:
    """What a program prints; empty where it is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def main() -> None:
    """Join, run everything, write each row as soon as it is known."""
    folder, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
    faulthandler.dump_traceback_later(asked["limit_s"], exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    register()
    dist.init_process_group("stretto")
    dist.all_reduce(torch.ones(4, device=device))
    about = machine(device)
    if dist.get_rank() == 0:
        (folder / "machine.json").write_bytes(msgspec.json.encode(about))
    if not about.refusal:
        ranks = SelfTestRank(device, max(asked["sizes"]))
        for kind in KINDS:
            for row in ranks.run_kind(kind, asked):
                if ranks.rank == 0:
                    with (folder / "rows").open("ab") as file:
                        file.write(msgspec.json.encode(row) + b"\n")
    dist.barrier()
    torch.cuda.synchronize()
    # NCCL's destructors may wait for connections that no longer matter.
    os._exit(0)


if __name__ == "__main__":
    main()
