# SPDX-License-Identifier: Apache-2.0
"""DTensors between meshes on real processes: every scenario on the executor, and by messages of gloo."""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import highspy  # noqa: F401  imported once, before the forks, as is the next one for DTensor
import torch
import torch._dynamo
import torch.distributed as dist
from backend_scenarios import digest
from capture_scenarios import chosen, fork, store_port
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import stretto
import stretto.torch
from stretto.runtime.executor import join as executor_join
from stretto.runtime.torch_backend import backend
from stretto.runtime.torch_backend import engine as backend_engine
from stretto.runtime.torch_backend import meeting as backend_meet

RANKS = 6
S, R = Shard, Replicate
Side = tuple[Any, Sequence[Any]]
CASES: dict[str, tuple[tuple[int, ...], torch.dtype, Side, Side]] = {
    "disjoint": ((8, 12), torch.float32, ([0, 1], [S(0)]), ([2, 3, 4, 5], [S(1)])),
    "overlapping": ((16, 8), torch.float32, ([0, 1, 2, 3], [S(0)]), ([2, 3, 4, 5], [S(0)])),
    "same mesh": ((12, 7), torch.float64, ([0, 1, 2, 3, 4, 5], [S(0)]), ([0, 1, 2, 3, 4, 5], [S(1)])),
    "other shape": ((16, 16), torch.bfloat16, ([[0, 1], [2, 3]], [S(0), S(1)]), ([[0, 2, 4], [1, 3, 5]], [R(), S(1)])),
    "uneven": ((7, 5, 3), torch.int64, ([0, 1, 2, 3], [S(0)]), ([[2, 3], [4, 5]], [S(1), S(1)])),
    "empty tiles": ((2, 3), torch.float32, ([0, 1, 2, 3], [S(0)]), ([1, 2, 3, 4, 5], [S(1)])),
    "copies": ((9, 4), torch.uint8, ([[0, 1], [2, 3]], [R(), S(0)]), ([4, 5], [R()])),
    "one to all": ((1000,), torch.float32, ([3], [R()]), ([0, 1, 2, 3, 4, 5], [R()])),
    "nested cuts": ((13, 4), torch.float32, ([[0, 1], [2, 3]], [S(0), S(0)]), ([4, 5], [S(0)])),
    "nothing to move": ((8, 4), torch.float32, ([0, 1], [R()]), ([0, 1], [S(0)])),
    "booleans": ((6, 6), torch.bool, ([0, 1, 2], [S(1)]), ([3, 4, 5], [S(0)])),
    "complex": ((6, 2), torch.complex64, ([0, 1, 2], [S(0)]), ([3, 4], [S(1)])),
    "no elements": ((0, 4), torch.float32, ([0, 1], [S(0)]), ([2, 3], [R()])),
    "no dimensions": ((), torch.float32, ([0, 1], [R()]), ([2, 3], [R()])),
    "larger": ((700, 501), torch.float32, ([[0, 1, 2], [3, 4, 5]], [S(1), S(0)]), ([0, 1, 2, 3], [S(0)])),
}
PENDING: dict[str, tuple[str, torch.dtype, Side, Side]] = {
    "sum": ("sum", torch.float32, ([0, 1, 2, 3], [Partial("sum")]), ([4, 5], [S(0)])),
    "sum on one mesh": ("sum", torch.int64, ([0, 1, 2, 3], [Partial("sum")]), ([0, 1, 2, 3], [R()])),
    "sum of cut parts": ("sum", torch.float32, ([[0, 1], [2, 3]], [Partial("sum"), S(1)]), ([2, 3, 4, 5], [S(0)])),
    "average": ("avg", torch.float64, ([0, 1, 2, 3], [Partial("avg")]), ([3, 4], [R()])),
    "maximum": ("max", torch.float32, ([0, 1, 2], [Partial("max")]), ([4, 5], [R()])),
}  # fmt: skip


def mesh(grid: Any) -> DeviceMesh:
    """On the CPU; only described, so that no group is made for it."""
    return DeviceMesh("cpu", grid, _init_backend=False)


def full_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Numbers that all differ, the same on all ranks."""
    count = int(torch.tensor(shape).prod()) if shape else 1
    return (torch.arange(count) % 251).to(dtype).reshape(shape) if shape else torch.tensor(3.5, dtype=dtype)


def cut(full: torch.Tensor, side: Side) -> DTensor:
    """A DTensor as PyTorch cuts it, without a message."""
    where, placements = mesh(side[0]), list(side[1])
    local = distribute_tensor(full, where, placements, src_data_rank=None)
    assert isinstance(local, DTensor)
    return local


def same(result: DTensor, want: DTensor) -> list[Any]:
    """Whether this rank has what PyTorch would have cut: shape, stride, dtype, placements and bits."""
    mine, theirs = result.to_local(), want.to_local()
    inside = want.device_mesh.get_coordinate() is not None
    bits = digest([mine]) == digest([theirs]) if inside and theirs.numel() else mine.numel() == 0
    return [
        bits, result.shape == want.shape, result.placements == want.placements, result.dtype == want.dtype,
        result.stride() == want.stride(), not inside or mine.shape == theirs.shape,
    ]  # fmt: skip


def takes_part(*sides: Side) -> bool:
    return dist.get_rank() in {r for side in sides for r in torch.tensor(side[0]).flatten().tolist()}


def case(name: str) -> Any:
    shape, dtype, src, dst = CASES[name]
    full = full_tensor(shape, dtype)
    source, want = cut(full, src), cut(full, dst)
    if not takes_part(src, dst):
        return [True]
    result = stretto.torch.reshard(source, want.device_mesh, want.placements)
    return same(result, want)


def pending(name: str) -> Any:
    op, dtype, src, dst = PENDING[name]
    where = mesh(src[0])
    at = where.get_coordinate()
    part = 0 if at is None else at[0]
    parts = [(full_tensor((6, 10), dtype) * (p + 2)) % 17 for p in range(where.shape[0])]
    stacked = torch.stack(parts)
    reduced = {"sum": stacked.sum(0), "avg": stacked.double().mean(0).to(dtype), "max": stacked.amax(0)}[op]
    others = [Replicate() if p.is_partial() else p for p in src[1]]
    local = cut(parts[part], (src[0], others)).to_local()
    source = DTensor.from_local(local, where, list(src[1]), run_check=False, shape=torch.Size((6, 10)), stride=(10, 1))
    want = cut(reduced, dst)
    if not takes_part(src, dst):
        return [True]
    return same(stretto.torch.reshard(source, want.device_mesh, want.placements), want)


def told(call: Callable[[], object]) -> list[str]:
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["fine", ""]


def asynchronous() -> Any:
    full = full_tensor((300, 40), torch.float32)
    src, dst = ([0, 1, 2], [S(0)]), ([3, 4, 5], [S(1)])
    works = [stretto.torch.reshard(cut(full + k, src), mesh(dst[0]), dst[1], async_op=True) for k in range(3)]
    return [all(same(work.wait(), cut(full + k, dst))) for k, work in enumerate(works)]


def without_tensor() -> Any:
    """Ranks that have no DTensor object describe it."""
    full, src, dst = full_tensor((10, 6), torch.float32), ([0, 1], [S(0)]), ([2, 3], [S(1)])
    if not takes_part(src, dst):
        return [True]
    if dist.get_rank() in (0, 1):
        return same(stretto.torch.reshard(cut(full, src), mesh(dst[0]), dst[1]), cut(full, dst))
    result = stretto.torch.reshard(
        None, mesh(dst[0]), dst[1], shape=(10, 6), dtype=torch.float32, src_mesh=mesh(src[0]), src_placements=src[1]
    )
    return same(result, cut(full, dst))


def planned_once() -> Any:
    """The second of two equal calls, with other numbers, plans nothing."""
    src, dst = ([0, 1], [S(0)]), ([2, 3, 4, 5], [S(0)])
    full = full_tensor((24, 3), torch.float32)
    first = same(stretto.torch.reshard(cut(full, src), mesh(dst[0]), dst[1]), cut(full, dst))
    with mock.patch("stretto.resharding.tensors.transfer.plan_tensors", side_effect=AssertionError):
        again = same(stretto.torch.reshard(cut(-full, src), mesh(dst[0]), dst[1]), cut(-full, dst))
    return first + again


def many_calls() -> Any:
    """What the calls leave in the store stays little."""
    src, dst, full = ([0, 1], [S(0)]), ([0, 1], [S(1)]), full_tensor((4, 4), torch.float32)
    if dist.get_rank() > 1:
        return [True]
    store = dist.distributed_c10d._get_default_store()
    stretto.torch.reshard(cut(full, src), mesh(dst[0]), dst[1])
    before = store.num_keys()
    for _ in range(20):
        stretto.torch.reshard(cut(full, src), mesh(dst[0]), dst[1])
    return [store.num_keys() <= before + 4]


def wrong() -> Any:
    """What is wrong on all ranks."""
    x = cut(full_tensor((8, 8), torch.float32), ([0, 1, 2, 3, 4, 5], [S(0)]))
    all_of = mesh([0, 1, 2, 3, 4, 5])
    plain: Any = x.to_local()
    numbers: Any = [0, 1]
    return {
        "permuted": told(lambda: stretto.torch.reshard(x, mesh([1, 0, 2, 3, 4, 5]), [S(0)])),
        "dimension": told(lambda: stretto.torch.reshard(x, all_of, [S(2)])),
        "count": told(lambda: stretto.torch.reshard(x, all_of, [S(0), S(1)])),
        "partial": told(lambda: stretto.torch.reshard(x, all_of, [Partial()])),
        "plain": told(lambda: stretto.torch.reshard(plain, all_of, [S(0)])),
        "mesh": told(lambda: stretto.torch.reshard(x, numbers, [S(0)])),
        "undescribed": told(lambda: stretto.torch.reshard(None, all_of, [S(0)], shape=(8, 8))),
    }


def one_is_wrong() -> Any:
    """One rank's arguments are no good, or others; the next call works again."""
    rank = dist.get_rank()
    x = cut(full_tensor((8, 8), torch.float32), ([0, 1, 2, 3, 4, 5], [S(0)]))
    all_of = mesh([0, 1, 2, 3, 4, 5])
    return {
        "bad": told(lambda: stretto.torch.reshard(x, all_of, [S(7 if rank == 2 else 1)])),
        "placements": told(lambda: stretto.torch.reshard(x, all_of, [S(1) if rank == 3 else R()])),
        "shape": told(lambda: stretto.torch.reshard(cut(full_tensor((8 + (rank == 1), 8), torch.float32),
                                                  ([0, 1, 2, 3, 4, 5], [S(0)])), all_of, [S(1)])),
        "then": told(lambda: stretto.torch.reshard(x, all_of, [S(1)])),
    }  # fmt: skip


def meshes_differ() -> Any:
    """Rank 0 sees another destination than ranks 1 and 2, which it is not even in."""
    rank = dist.get_rank()
    if rank > 3:
        return ["", ""]
    x = cut(full_tensor((8, 8), torch.float32), ([0, 1], [S(0)]))
    return told(lambda: stretto.torch.reshard(x, mesh([1, 3] if rank in (0, 3) else [1, 2]), [S(0)]))


SCENARIOS: dict[str, Callable[[], Any]] = {
    **{name: partial(case, name) for name in CASES},
    **{name: partial(pending, name) for name in PENDING},
    "asynchronous": asynchronous, "without_tensor": without_tensor, "planned_once": planned_once,
    "many_calls": many_calls, "wrong": wrong, "one_is_wrong": one_is_wrong, "meshes_differ": meshes_differ,
}  # fmt: skip
LAYOUTS = ("gloo", "messages", "hosts")
"""Beside gloo with the executor; without it; and with ranks that believe to be on two hosts."""
ONLY = {
    "messages": ("overlapping", "other shape", "uneven", "copies", "sum of cut parts", "average", "asynchronous"),
    "hosts": ("disjoint", "other shape", "uneven", "larger", "sum", "sum on one mesh"),
}  # fmt: skip


def joined(port: int, name: str, rank: int, ranks: int) -> None:
    """Join a job by a store that has a server: a file would be read again and again."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=300))
    dist.init_process_group(
        "stretto" if name == "stretto" else "gloo", store=PrefixStore(name, store), rank=rank, world_size=ranks,
        timeout=timedelta(seconds=300),
    )  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    port = store_port()
    wanted = chosen(SCENARIOS)

    def rank_main(rank: int) -> None:
        # Many processes of a busy machine.
        faulthandler.dump_traceback_later(500, exit=True)
        outcomes: dict[str, dict[str, Any]] = {}
        for layout in LAYOUTS:
            key = (lambda: f"host {rank % 2}") if layout == "hosts" else executor_join.host_key
            absent = (lambda: "left out") if layout == "messages" else backend_engine.missing
            with (
                mock.patch.multiple(backend_meet, host_key=key),
                mock.patch.multiple(executor_join, host_key=key),
                mock.patch.multiple(backend, missing=absent),
            ):
                joined(port, layout, rank, RANKS)
                for name in filter(wanted.__contains__, ONLY.get(layout, tuple(SCENARIOS))):
                    outcomes.setdefault(name, {})[layout] = SCENARIOS[name]()
                dist.barrier()
                dist.destroy_process_group()
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))

    fork(RANKS, rank_main)


if __name__ == "__main__":
    main()
