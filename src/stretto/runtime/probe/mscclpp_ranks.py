# SPDX-License-Identifier: Apache-2.0
"""`MscclppRanks`: the executor of MSCCL++, where it is installed, runs plans on the GPUs of a job's ranks."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidInput, StrettoError

CHECKED = 8
"""The launches, without waiting in between, whose results are checked."""
LARGE = 16 << 20
"""The bytes of a call from which on fewer launches are checked and timed."""
TRIES = 5
QUEUED_CYCLES = 4_000_000
"""The cycles, some two milliseconds, for which the GPU is kept busy while a try is queued."""
MODULO = 17
"""Inputs are whole numbers below this, so that any order of adding gives the same float32."""


class MscclppRanks:
    """The ranks of a job with MSCCL++'s executor and one pair of buffers for all plans.

    Making one is collective, and so are all of its methods. `torch.distributed` must be initialised, and this rank's
    GPU the current one.

    Args:
        most_bytes: The largest call.
        group: A group of gloo of all ranks, by which they meet; the default one where none is given. MSCCL++ broadcasts
            tensors of different sizes, which only gloo lets pass.
    """

    def __init__(self, most_bytes: int, group: dist.ProcessGroup | None = None) -> None:
        try:
            library = importlib.import_module("mscclpp")
        except ImportError as error:
            raise StrettoError(f"MSCCL++ is not installed: {error}") from None
        group = group if group is not None else dist.group.WORLD
        assert group is not None
        self.rank, self.ranks, self.most_bytes = group.rank(), group.size(), most_bytes
        self._group = library.CommGroup(torch_group=group)
        self._executor = library.Executor(self._group.communicator)
        self._load, self._float = library.ExecutionPlan, library.DataType.float32
        self._packets = library.PacketType.LL16
        self._folder = tempfile.TemporaryDirectory(prefix="stretto-plans-")
        self._plans: dict[str, Any] = {}
        # Peers reach into both: each is an allocation of its own, and begins with it on every rank.
        self._raw = [library.RawGpuBuffer(max(most_bytes, 1 << 21)) for _ in range(2)]
        self._bytes = [torch.as_tensor(_Memory(raw.data(), raw.bytes()), device="cuda") for raw in self._raw]

    def close(self) -> None:
        """Give back what plans hold."""
        torch.cuda.synchronize()
        dist.barrier()
        self._folder.cleanup()

    def plan(self, text: str) -> Any:
        """Load a plan by its text."""
        if text not in self._plans:
            path = Path(self._folder.name) / f"{len(self._plans)}.json"
            path.write_text(text)
            self._plans[text] = self._load(str(path), self.rank)
        return self._plans[text]

    def forget(self) -> None:
        """Give back the channels and the scratch memory of all plans, where this version of MSCCL++ can."""
        torch.cuda.synchronize()
        dist.barrier()
        self._plans.clear()
        reset = getattr(self._executor, "reset", None)
        if reset is not None:
            reset()

    def buffers(self, kind: str, nbytes: int, in_place: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The input and output of a call, as float32; in place they overlap as MSCCL++ wants it.

        Args:
            kind: The collective.
            nbytes: The bytes of the larger of the two.
            in_place: Whether they overlap.

        Returns:
            Both, on this rank.

        Raises:
            InvalidInput: The size does not fit.
        """
        if nbytes > self.most_bytes or nbytes % (16 * self.ranks):
            raise InvalidInput(f"nbytes: must be a multiple of {16 * self.ranks} up to {self.most_bytes}, not {nbytes}")
        part = slice(self.rank * nbytes // self.ranks, (self.rank + 1) * nbytes // self.ranks)
        first, second = (memory[:nbytes] for memory in self._bytes)
        if kind == "all_gather":
            given, made = (first[part] if in_place else second[: nbytes // self.ranks]), first
        elif kind == "reduce_scatter":
            given, made = first, (first[part] if in_place else second[: nbytes // self.ranks])
        else:
            given, made = first, (first if in_place else second)
        return given.view(torch.float32), made.view(torch.float32)

    def launch(self, plan: Any, given: torch.Tensor, made: torch.Tensor) -> None:
        """Run a plan once on the current stream.

        Args:
            plan: What `plan` has loaded.
            given: The input.
            made: The output.
        """
        self._executor.execute(
            self.rank, given.data_ptr(), made.data_ptr(), given.nbytes, made.nbytes, self._float, plan,
            torch.cuda.current_stream().cuda_stream, self._packets,
        )  # fmt: skip

    def wrong(self, plan: Any, kind: str, nbytes: int, in_place: bool) -> int:
        """Launch a plan several times on new inputs without waiting, and count the elements that are wrong.

        Args:
            plan: What `plan` has loaded.
            kind: The collective.
            nbytes: The bytes of the larger of input and output.
            in_place: Whether they overlap.

        Returns:
            How many are wrong on this rank.
        """
        given, made = self.buffers(kind, nbytes, in_place)
        count, bad = given.numel(), torch.zeros((), dtype=torch.int64, device=given.device)
        for turn in range(CHECKED if nbytes < LARGE else 3):
            given.copy_(_input(self.rank, turn, count))
            self.launch(plan, given, made)
            bad += (made != _output(kind, self.rank, self.ranks, turn, count)).sum()
        torch.cuda.synchronize()
        dist.barrier()
        return int(bad)

    def times_us(self, plan: Any, kind: str, nbytes: int, in_place: bool) -> list[float]:
        """The times of a launch in a CUDA graph of many, in several tries; the slowest rank's.

        Args:
            plan: What `plan` has loaded.
            kind: The collective.
            nbytes: The bytes of the larger of input and output.
            in_place: Whether they overlap.

        Returns:
            Microseconds, the least first.
        """
        given, made = self.buffers(kind, nbytes, in_place)
        given.zero_()
        launches = 100 if nbytes < 1 << 20 else 40 if nbytes < LARGE else 6
        return slowest(graph_times_us(lambda: self.launch(plan, given, made), launches))


def graph_times_us(
    run: Callable[[], object], launches: int, *, meet: Callable[[], object] = dist.barrier, tries: int = TRIES
) -> list[float]:
    """The time of one of many launches in a CUDA graph, in several tries.

    The GPU is kept busy while a try is queued, and a launch before it lets all ranks begin together: hosts come apart
    by more than a small call takes.

    Args:
        run: Launches a collective once.
        launches: How many are timed together.
        meet: Waits, on the host, until all ranks have come.
        tries: How often.

    Returns:
        The times of this rank.
    """
    torch.cuda.synchronize()
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(tries):
        meet()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(QUEUED_CYCLES)  # type: ignore[no-untyped-call]
        run()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / launches)
    return times


def slowest(times: list[float]) -> list[float]:
    """The times of the slowest rank in every try, sorted."""
    found = torch.tensor(times)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return sorted(found.tolist())


def anybody(says: bool) -> bool:
    """Whether any rank says so."""
    found = torch.tensor(float(says))
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


def join_gpus() -> int:
    """Let this rank of a job that torchrun started take its GPU and meet the others over gloo; returns the rank.

    Raises:
        StrettoError: There is no GPU.
    """
    if not torch.cuda.is_available():
        raise StrettoError("no GPU: prices of GPU runtimes are measured on GPUs")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    return dist.get_rank()


class _Memory:
    """Memory that PyTorch can see as a tensor of bytes."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (nbytes,), "typestr": "|u1", "strides": None, "version": 3,
        }  # fmt: skip


def _input(rank: int, turn: int, count: int) -> torch.Tensor:
    """What a rank gives in a turn: small whole numbers that differ by place, rank and turn."""
    at = torch.arange(count, device="cuda", dtype=torch.int32)
    return ((at * (2 * rank + 3) + 5 * rank + 7 * turn) % MODULO - MODULO // 2).float()


def _output(kind: str, rank: int, ranks: int, turn: int, count: int) -> torch.Tensor:
    """What a rank must have afterwards; `count` is that of an input."""
    inputs = [_input(r, turn, count) for r in range(ranks)]
    if kind == "all_gather":
        return torch.cat(inputs)
    if kind == "all_to_all":
        return torch.cat([x.chunk(ranks)[rank] for x in inputs])
    total = sum(inputs[1:], inputs[0])
    return total if kind == "all_reduce" else total.chunk(ranks)[rank]
