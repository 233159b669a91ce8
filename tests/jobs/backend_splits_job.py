# SPDX-License-Identifier: Apache-2.0
"""Ranks that exchange pieces of random, unequal sizes: on gloo, then on the executor, inside a host and between two.

Every matrix is drawn alike on all ranks, so that each can also work out by itself what it has to get: that judges both
backends. STRETTO_TEST_CASES says how many random cases are drawn.
"""

from __future__ import annotations

import os
import random
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from backend_scenarios import digest, is_stretto, run
from torch.distributed.distributed_c10d import _coalescing_manager

import stretto.torch
from stretto.runtime.torch_backend.recording import LEDGER

CASES = int(os.environ.get("STRETTO_TEST_CASES", "60"))
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int32, torch.int64,
]  # fmt: skip
ROWS = [(), (1,), (3,), (2, 5), (0,), (128,)]
GROUPS = [(0, 1, 2, 3), (0, 1, 2, 3), (1, 3), (0, 1, 2), (0, 3)]
Matrix = list[list[int]]


def matrix_of(draw: random.Random, size: int, row: int) -> Matrix:
    """How many rows each rank sends to each; often none, now and then messages of several slices, or just one slice."""
    most = draw.choice([1, 3, 17, 400, 20_000 // max(row, 1)])
    zeros = draw.choice([0.0, 0.3, 0.9, 1.0])
    found = [[0 if draw.random() < zeros else draw.randint(0, most) for _ in range(size)] for _ in range(size)]
    if draw.random() < 0.2:
        found[draw.randrange(size)] = [0] * size
    if draw.random() < 0.2:
        found[0][-1] = draw.choice([65536, 65537, 65535, 131072]) // max(row, 1)
    return found


def piece(rows: int, shape: tuple[int, ...], dtype: torch.dtype, source: int, target: int) -> torch.Tensor:
    """What one rank has for another."""
    count = rows * int(torch.tensor(shape).prod()) if shape else rows
    values = (torch.arange(count) * 5 + 31 * source + 7 * target) % 97
    return values.to(dtype).reshape(rows, *shape)


def exchange(draw: random.Random, groups: dict[tuple[int, ...], Any]) -> list[torch.Tensor]:
    """One random all-to-all; what this rank got, having been compared with what it has to get."""
    ranks = draw.choice(GROUPS)
    shape, dtype, how = draw.choice(ROWS), draw.choice(DTYPES), draw.choice(["wait", "async", "late", "coalesced"])
    row = int(torch.tensor(shape).prod()) if shape else 1
    matrix = matrix_of(draw, len(ranks), row)
    offset = draw.randint(0, 3)
    if dist.get_rank() not in ranks:
        return []
    me = ranks.index(dist.get_rank())
    gives, takes = matrix[me], [other[me] for other in matrix]
    given = torch.cat([piece(rows, shape, dtype, me, q) for q, rows in enumerate(gives)])
    # In the middle of other memory, at addresses that are multiples of nothing but the element.
    room = torch.zeros((offset + sum(takes) + 2, *shape), dtype=dtype)
    taken = room[offset : offset + sum(takes)]
    group = groups[ranks]
    if how == "coalesced":
        with _coalescing_manager(group=group):
            dist.all_to_all_single(taken, given, takes, gives, group=group)
    else:
        work = dist.all_to_all_single(taken, given, takes, gives, group=group, async_op=how != "wait")
        if how == "late":
            summed = torch.ones(10)
            dist.all_reduce(summed, group=group)
        if work is not None:
            work.wait()
    wanted = torch.cat([piece(rows, shape, dtype, p, me) for p, rows in enumerate(takes)])
    assert torch.equal(taken, wanted), f"{ranks} {matrix} {shape} {dtype} {how}"
    assert not room[:offset].any()
    assert not room[offset + sum(takes) :].any()
    return [taken]


def generated() -> Any:
    """Many random all-to-alls, in the world and in groups of it, one after the other on the same communicators."""
    LEDGER.clear()
    draw = random.Random(len(GROUPS))
    groups = {ranks: dist.new_group(list(ranks)) for ranks in dict.fromkeys(GROUPS)}
    found = [digest(exchange(draw, groups)) for _ in range(CASES)]
    if is_stretto():
        exchanges = [choice for choice in stretto.torch.choices() if choice.op == "all_to_all"]
        assert all(choice.backend == "executor" and choice.program == "direct" for choice in exchanges), exchanges
    return found


def several_under_way() -> Any:
    """Exchanges of different sizes that overlap each other and sums, waited for backwards."""
    draw, rank, world = random.Random(5), dist.get_rank(), dist.get_world_size()
    works, got = [], []
    for number in range(12):
        matrix = matrix_of(draw, world, 1)
        gives, takes = matrix[rank], [row[rank] for row in matrix]
        got.append(torch.zeros(sum(takes), dtype=torch.int32))
        given = torch.cat([piece(rows, (), torch.int32, rank + number, q) for q, rows in enumerate(gives)])
        works.append(dist.all_to_all_single(got[-1], given, takes, gives, async_op=True))
        got.append(torch.full((100 * number + 1,), rank, dtype=torch.int64))
        works.append(dist.all_reduce(got[-1], async_op=True))
    for work in reversed(works):
        work.wait()
    return digest(got)


def forms() -> Any:
    """Splits on one side only, on some ranks only with equal pieces, in place, and tensors that gloo would not take."""
    rank, world = dist.get_rank(), dist.get_world_size()
    equal = [2] * world
    x = torch.arange(2 * world) + 100 * rank
    found = []
    for output, given in ((equal, None), (None, equal), (equal, equal)):
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x, output, given)
        found.append(y)
    functional = torch.ops._c10d_functional.all_to_all_single(x, equal, equal, dist.group.WORLD.group_name)  # type: ignore[union-attr]
    found.append(torch.ops._c10d_functional.wait_tensor(functional))
    if is_stretto():
        same = x.clone()
        dist.all_to_all_single(same, same, equal, equal)
        assert torch.equal(same, found[0]), "in place, which gloo mixes up"
        short = torch.empty(2 * world, dtype=torch.int16)
        dist.all_to_all_single(short, x.to(torch.int16), equal, equal)
        assert torch.equal(short.to(torch.int64), found[0])
        lists = [torch.full((rank + peer, 3), float(rank)) for peer in range(world)]
        listed = [torch.empty(rank + peer, 3) for peer in range(world)]
        dist.all_to_all(listed, lists)
        assert all(torch.equal(one, torch.full((rank + peer, 3), float(peer))) for peer, one in enumerate(listed))
    return digest(found)


def refused() -> Any:
    """What torch says of splits that do not fit."""
    world = dist.get_world_size()
    x, y = torch.zeros(2 * world), torch.zeros(2 * world)
    told = []
    for output, given in (([2] * world, [1] * world), ([2] * (world - 1), [2] * world), ([3] * world, [2] * world)):
        try:
            dist.all_to_all_single(y, x, output, given)
        except RuntimeError as error:
            told.append(str(error))
        # Not a barrier: gloo's would fail with what came before it.
        dist.all_reduce(torch.ones(1))
    return told


def wrong_pairs() -> Any:
    """Two ranks that count on different sizes: an error that names both, on groups of their own, and never a hang."""
    if not is_stretto():
        return []
    rank, world, told = dist.get_rank(), dist.get_world_size(), []
    sizes = [(3, 4), (0, 1), (1, 0), (65536, 65537), (65536, 131072), (262144, 65536), (131072, 196608), (200000, 0)]
    for sent, expected in sizes:
        group = dist.new_group(list(range(world)), timeout=timedelta(seconds=60))
        gives = [sent if (rank, q) == (0, world - 1) else 2 for q in range(world)]
        takes = [expected if (p, rank) == (0, world - 1) else 2 for p in range(world)]
        x, y = torch.zeros(sum(gives), dtype=torch.uint8), torch.zeros(sum(takes), dtype=torch.uint8)
        try:
            dist.all_to_all_single(y, x, takes, gives, group=group)
            dist.all_to_all_single(y, x, takes, gives, group=group)
            told.append("nothing")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def mixed() -> Any:
    """Splits on some ranks, none on others, whose pieces are then equal; also none at all, and messages of slices."""
    rank, world, draw = dist.get_rank(), dist.get_world_size(), random.Random(9)
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=60))
    found = []
    for rows in (2, 0, 1, 65536, 0, 300_000, 7):
        without = draw.sample(range(world), draw.randint(1, world - 1))
        others = [[draw.choice([0, 1, 90, 70_000]) for _ in range(world)] for _ in range(world)]
        matrix = [[rows if p in without or q in without else others[p][q] for q in range(world)] for p in range(world)]
        gives, takes = matrix[rank], [row[rank] for row in matrix]
        given = torch.cat([piece(count, (), torch.uint8, rank, q) for q, count in enumerate(gives)])
        taken = torch.zeros(sum(takes), dtype=torch.uint8)
        equal = rank in without
        dist.all_to_all_single(taken, given, None if equal else takes, None if equal else gives, group=group)
        wanted = torch.cat([piece(count, (), torch.uint8, p, rank) for p, count in enumerate(takes)])
        assert torch.equal(taken, wanted), f"{without} {matrix}"
        found.append(taken)
    return digest(found)


SCENARIOS = (generated, several_under_way, forms, refused, wrong_pairs, mixed)

if __name__ == "__main__":
    run({scenario.__name__: scenario for scenario in SCENARIOS}, ("gloo", "stretto", "stretto:abab"))
