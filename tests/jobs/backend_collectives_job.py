# SPDX-License-Identifier: Apache-2.0
"""Four ranks that call every collective of torch.distributed, in every way there is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from backend_scenarios import digest, is_stretto, run
from torch.distributed.distributed_c10d import _coalescing_manager

import stretto.torch
from stretto.report import write_perfetto
from stretto.runtime.torch_backend.torch_versions import group_method

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64,
]  # fmt: skip
OPS = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"]
SIZES = [0, 1, 3, 7, 257, 4096, 50_001]


def numbers(count: int, dtype: torch.dtype = torch.float32, rank: int | None = None) -> torch.Tensor:
    """Small whole numbers that differ between ranks and places."""
    rank = dist.get_rank() if rank is None else rank
    return ((torch.arange(count) * 7 + rank * 3) % 5 + 1).to(dtype)


def attempt(call: Callable[[], Any]) -> str:
    """What a call raises, by type."""
    try:
        call()
    except (RuntimeError, ValueError, TypeError) as error:
        return type(error).__name__
    return "fine"


def all_reduces() -> Any:
    """Every dtype with every reduction; what gloo refuses must be refused."""
    found = {}
    for dtype in DTYPES:
        for op in OPS:
            tensor = numbers(33, dtype)
            outcome = attempt(partial(dist.all_reduce, tensor, getattr(dist.ReduceOp, op)))
            found[f"{dtype} {op}"] = digest([tensor]) if outcome == "fine" else outcome
    return found


def sizes() -> Any:
    """Every collective at sizes that do not divide, and with nothing at all."""
    rank, world = dist.get_rank(), dist.get_world_size()
    found = {}
    for size in SIZES:
        for dtype in (torch.float32, torch.int64, torch.bfloat16):
            mine, parts = numbers(size, dtype), [torch.empty(size, dtype=dtype) for _ in range(world)]
            whole = numbers(size * world, dtype)
            summed, shard, together = mine.clone(), torch.empty(size, dtype=dtype), torch.empty_like(whole)
            exchanged, sent, least = torch.empty_like(whole), mine.clone(), mine.clone()
            dist.all_reduce(summed)
            dist.all_gather(parts, mine)
            dist.all_gather_into_tensor(together, mine)
            dist.reduce_scatter_tensor(shard, whole.clone())
            dist.all_to_all_single(exchanged, whole)
            dist.broadcast(sent, src=world - 1)
            dist.reduce(least, dst=1, op=dist.ReduceOp.MAX)
            if rank != 1:
                least.zero_()
            given = torch.empty(size, dtype=dtype)
            dist.scatter(given, list(whole.chunk(world)) if size and rank == 2 else parts if rank == 2 else None, src=2)
            taken = [torch.empty(size, dtype=dtype) for _ in range(world)] if rank == 3 else None
            dist.gather(mine, taken, dst=3)
            found[f"{dtype} {size}"] = digest(
                [summed, *parts, together, shard, exchanged, sent, least, given, *(taken or [])]
            )
    return found


def odd_tensors() -> Any:
    """Transposed, strided, complex, bool, several dimensions, in place."""
    world = dist.get_world_size()
    transposed = numbers(12).reshape(3, 4).t()
    dist.all_reduce(transposed)
    spread = numbers(20)
    expected = spread.clone()
    expected[::2] = sum(numbers(20, rank=peer)[::2] for peer in range(world))
    if is_stretto():
        # gloo reduces the first elements of the memory instead.
        dist.all_reduce(spread[::2])
        assert torch.equal(spread, expected)
    turned = torch.complex(numbers(9), numbers(9) * 2)
    dist.all_reduce(turned)
    gathered = torch.empty(9 * world, dtype=torch.complex64)
    dist.all_gather_into_tensor(gathered, turned)
    truth = [torch.empty(5, dtype=torch.bool) for _ in range(world)]
    dist.all_gather(truth, numbers(5) > 2)
    cube = numbers(24).reshape(2, 3, 4)
    dist.all_reduce(cube)
    place = torch.zeros(6 * world)
    mine = place[6 * dist.get_rank() : 6 * dist.get_rank() + 6]
    mine.copy_(numbers(6))
    dist.all_gather_into_tensor(place, mine)
    scalar = numbers(1).squeeze()
    dist.all_reduce(scalar)
    columns = [torch.empty(4, 3).t() for _ in range(world)]
    dist.all_gather(columns, numbers(12).reshape(3, 4))
    rows = torch.empty(3 * world, 4)
    dist.all_gather_into_tensor(rows, numbers(12).reshape(4, 3).t())
    halves = torch.empty(3, 4)
    dist.reduce_scatter_tensor(halves, numbers(12 * world).reshape(4, 3 * world).t())
    turned_back = torch.empty(4, 2 * world).t()
    dist.all_to_all_single(turned_back, numbers(8 * world).reshape(2 * world, 4))
    return digest(
        [transposed, turned, gathered, *truth, cube, place, scalar, *columns, rows, halves, turned_back.contiguous()]
    )


def lists_and_splits() -> Any:
    """The forms that take lists, and the all-to-all with splits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = [numbers(11, rank=rank + peer) for peer in range(world)]
    out = torch.empty(11)
    dist.reduce_scatter(out, [s.clone() for s in shards])
    rows_in = [rank + peer + 1 for peer in range(world)]
    rows_out = [peer + rank + 1 for peer in range(world)]
    wide = torch.empty(sum(rows_out), 3)
    dist.all_to_all_single(wide, numbers(3 * sum(rows_in)).reshape(-1, 3), rows_out, rows_in)
    exchanged = [torch.empty(11) for _ in range(world)]
    try:
        dist.all_to_all(exchanged, shards)
    except RuntimeError:
        # gloo has none with lists in PyTorch 2.11; ours must.
        assert not is_stretto()
        together = torch.empty(11 * world)
        dist.all_to_all_single(together, torch.cat(shards))
        exchanged = list(together.chunk(world))
    at_root = torch.empty(11 * world)
    if is_stretto() and hasattr(dist, "gather_single"):
        dist.gather_single(shards[1], at_root if rank == 2 else None, dst=2)
    else:
        # gloo has none for one tensor.
        dist.gather(shards[1], list(at_root.view(world, 11)) if rank == 2 else None, dst=2)
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    told: list[Any] = [{"only": "root"}] if rank == 0 else [None]
    dist.broadcast_object_list(told, src=0)
    return [digest([out, wide, *exchanged, *([at_root] if rank == 2 else [])]), objects, told]


def coalesced() -> Any:
    """The coalescing manager, and the methods of a group that take several tensors."""
    world = dist.get_world_size()
    several = [numbers(size) for size in (5, 100, 33)]
    with _coalescing_manager():
        for tensor in several:
            dist.all_reduce(tensor)
    later = [numbers(size) for size in (5, 100)]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in later:
            dist.all_reduce(tensor)
    manager.wait()
    group = dist.group.WORLD
    assert group is not None
    outs = [torch.empty(size * world) for size in (6, 8)]
    getattr(group, group_method("all_gather_single_coalesced"))(outs, [numbers(6), numbers(8)]).wait()
    shards = [torch.empty(size) for size in (6, 8)]
    scatter = getattr(group, group_method("reduce_scatter_single_coalesced"))
    scatter(shards, [numbers(6 * world), numbers(8 * world)]).wait()
    return digest([*several, *later, *outs, *shards])


def overlapped() -> Any:
    """Many calls under way at once, waited for in another order, by work and by future."""
    world = dist.get_world_size()
    tensors = [numbers(size) for size in (10, 2000, 30, 40_000, 50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    gathered = torch.empty(world * 100)
    gather = dist.all_gather_into_tensor(gathered, numbers(100), async_op=True)
    assert gather is not None
    future = works[3].get_future()
    value = future.wait()
    same = value[0].data_ptr() == tensors[3].data_ptr()
    doubled = works[2].get_future().then(lambda done: done.value()[0] * 2).wait()
    gather.wait()
    for work in reversed(works):
        assert work is not None
        assert work.wait(timedelta(seconds=200))
        assert work.wait()
        assert work.is_completed()
    return [digest([*tensors, gathered, doubled]), same, len(value)]


def subgroups() -> Any:
    """Rows, columns, a group of one, and a group with its ranks in another order."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    alone = dist.new_group([rank], use_local_synchronization=True)
    three = dist.new_group([3, 1, 2])
    tensors = [numbers(9) for _ in range(5)]
    dist.all_reduce(tensors[0], group=rows[rank // 2])
    dist.all_reduce(tensors[1], group=columns[rank % 2])
    dist.all_reduce(tensors[2], group=alone)
    if rank:
        dist.all_reduce(tensors[3], group=three)
        dist.broadcast(tensors[4], src=2, group=three)
    for group in (*rows, *columns, three):
        dist.destroy_process_group(group)
    return digest(tensors)


def point_to_point() -> Any:
    """A ring of sends, any source, tags, batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    left, right = (rank - 1) % world, (rank + 1) % world
    got, tagged = torch.empty(17), [torch.empty(3), torch.empty(3)]
    send = dist.isend(numbers(17), right)
    dist.recv(got, left)
    assert send is not None
    send.wait()
    sends = [dist.isend(numbers(3) * tag, right, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        dist.recv(tagged[tag - 1], left, tag=tag)
    for work in sends:
        assert work is not None
        work.wait()
    batch = torch.empty(5)
    ops = [dist.P2POp(dist.isend, numbers(5), left), dist.P2POp(dist.irecv, batch, right)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    source = -1
    whoever = torch.zeros(2)
    if rank == 0:
        source = dist.recv(whoever)
    elif rank == 3:
        dist.send(numbers(2), 0)
    return [digest([got, *tagged, batch, whoever]), source]


def functionals() -> Any:
    """Functional collectives, which are waited for when used."""
    world, ranks = dist.get_world_size(), list(range(dist.get_world_size()))
    reduced = functional.all_reduce(numbers(10), "sum", ranks) + 0
    gathered = functional.all_gather_tensor(numbers(6).reshape(2, 3), 1, ranks) + 0
    scattered = functional.reduce_scatter_tensor(numbers(4 * world).reshape(2, -1), "sum", 1, ranks) + 0
    exchanged = functional.all_to_all_single(numbers(2 * world), None, None, ranks) + 0
    told = functional.broadcast(numbers(5), 1, ranks) + 0
    several = functional.all_reduce_coalesced([numbers(3), numbers(4)], "sum", ranks)
    return digest([reduced, gathered, scattered, exchanged, told, *(part + 0 for part in several)])


def floats() -> Any:
    """Fractions, whose sum depends on the order: the digests of two runs."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = [torch.randn(size, generator=generator) for size in (5, 1000, 300_000)]
    runs = []
    for _ in range(2):
        tensors = [tensor.clone() for tensor in data]
        for tensor in tensors:
            dist.all_reduce(tensor)
        runs.append(digest(tensors))
    return runs


def averages() -> Any:
    """What gloo does not have."""
    if not is_stretto():
        return None
    world = dist.get_world_size()
    mean = numbers(1000) * world
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    shard = torch.empty(25)
    dist.reduce_scatter_tensor(shard, numbers(25 * world) * world, dist.ReduceOp.AVG)
    everyone = [numbers(1000, rank=rank) for rank in range(world)]
    expected = torch.stack([numbers(25 * world, rank=rank) for rank in range(world)]).sum(0)
    mine = expected[25 * dist.get_rank() :][:25]
    return torch.equal(mean, torch.stack(everyone).sum(0)) and torch.equal(shard, mine)


def told() -> Any:
    """What our backend says about itself: choices, a measured timeline."""
    if not is_stretto():
        return None
    with stretto.torch.record() as recording:
        dist.all_reduce(torch.ones(5000))
        work = dist.all_gather_into_tensor(torch.empty(400), torch.ones(100), async_op=True)
        assert work is not None
        work.wait()
    timeline = recording.timeline
    path = Path(sys.argv[1]) / f"{dist.get_rank()}.pftrace"
    write_perfetto(timeline, path)
    last = stretto.torch.last_choice()
    assert last is not None
    dist.all_reduce(torch.ones(5000))
    again = next(c for c in stretto.torch.choices() if (c.op, c.nbytes) == ("all_reduce", 20_000))
    return {
        "names": list(timeline.names),
        "nbytes": timeline.nbytes.tolist(),
        "ordered": bool((timeline.start_us <= timeline.end_us).all() and timeline.end_us.max() <= timeline.total_us),
        "trace": path.stat().st_size,
        "rank": timeline.rank.tolist(),
        "last": [last.op, last.nbytes, last.dtype, last.program, last.backend, last.why],
        "calls": again.calls,
        "text": str(again),
    }


SCENARIOS = (
    all_reduces, sizes, odd_tensors, lists_and_splits, coalesced, overlapped, subgroups, point_to_point, functionals,
    floats, averages, told,
)  # fmt: skip

if __name__ == "__main__":
    scenarios = {scenario.__name__: scenario for scenario in SCENARIOS}
    run(scenarios, ("gloo", "stretto", "stretto:abab"))
