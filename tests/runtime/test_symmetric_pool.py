# SPDX-License-Identifier: Apache-2.0
"""Pieces of symmetric memory for PyTorch's tensors, and DDP's reducer that makes its buckets there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from stretto import InvalidInput
from stretto.runtime.torch_backend import symmetric_models
from stretto.runtime.torch_backend.symmetric_pool import MemoryPiece, MemoryRing, SymmetricPool, arenas
from stretto.torch import symmetric_buffers


class HostPool(SymmetricPool):
    """A pool on the host's memory, whose functions are called as PyTorch calls them."""

    def take(self, size: int) -> int | None:
        before = arenas().stretto_arena_use(self._number)
        call = arenas().stretto_arena_alloc
        call.restype = ctypes.c_void_p
        found = call(ctypes.c_ssize_t(size), 0, None)
        arenas().stretto_arena_use(before)
        return None if found is None else int(found) - self.memory.data_ptr()

    def give_back(self, at: int) -> None:
        arenas().stretto_arena_free(ctypes.c_void_p(self.memory.data_ptr() + at), 0, 0, None)


def test_pieces_never_overlap_and_are_where_the_same_calls_put_them() -> None:
    pools = [HostPool(torch.empty(1 << 20, dtype=torch.uint8)) for _ in range(2)]
    shift = [-pool.memory.data_ptr() % 512 for pool in pools]
    rng = random.Random(0)
    held: list[tuple[int, int, int]] = []
    full = 0
    for _ in range(500):
        if held and rng.random() < 0.45:
            first, second, _ = held.pop(rng.randrange(len(held)))
            pools[0].give_back(first)
            pools[1].give_back(second)
            continue
        size = rng.randrange(1, 60_000)
        one, two = (pool.take(size) for pool in pools)
        assert (one is None) == (two is None)
        if one is None or two is None:
            full += 1
            continue
        assert one - shift[0] == two - shift[1]
        assert all(one + size <= at or at + other <= one for at, _, other in held)
        held.append((one, two, size))
    assert full and len(pools[0].pieces) == len(held) > 3


def test_ranks_that_allocated_differently_have_different_layouts() -> None:
    one, two = (HostPool(torch.empty(1 << 16, dtype=torch.uint8)) for _ in range(2))
    assert one.layout == two.layout
    one.take(100)
    assert one.layout != two.layout and one.pieces[0][1] - one.pieces[0][0] == 512


class RingPool(SymmetricPool):
    """A pool on the host's memory, with streams by name."""

    stream = 0

    def _stream(self) -> int:
        return self.stream


def test_pieces_in_turn_do_not_depend_on_when_others_were_dropped() -> None:
    rng, pools = random.Random(1), [RingPool(torch.zeros(1 << 16, dtype=torch.uint8)) for _ in range(2)]
    held: list[list[tuple[int, int, MemoryRing, Any]]] = [[], []]
    inside = 0
    for _ in range(400):
        stream, size = rng.randrange(3), rng.randrange(1, 2000)
        places = []
        for which, pool in enumerate(pools):
            pool.stream = stream
            ring = pool._rings.setdefault(stream, MemoryRing(len(pool._rings), (1 << 16) // 4))
            at = ring.take(size)
            places.append(at)
            if at is None:
                continue
            assert all(at + size <= begin or end <= at for begin, end, *_ in held[which])
            piece = MemoryPiece(pool.memory[at : at + size])
            ring.given.append((at, at + size, weakref.ref(piece)))
            held[which].append((at, at + size, ring, piece))
            # One rank drops its pieces a little later than the other.
            del held[which][: max(0, len(held[which]) - 3 - which)]
        assert places[0] == places[1]
        inside += places[0] is not None
    assert inside == 400


def test_a_piece_that_is_in_use_is_not_given_again() -> None:
    ring = MemoryRing(1, 2048)
    keep = MemoryPiece(torch.zeros(1))
    assert ring.take(1000) == 2048
    ring.given.append((2048, 3048, weakref.ref(keep)))
    assert ring.take(1000) == 3072 and ring.take(100) is None and ring.take(4000) is None
    del keep
    assert ring.take(100) == 2048 + 512


def test_nothing_is_given_outside_of_a_pool() -> None:
    call = arenas().stretto_arena_alloc
    call.restype = ctypes.c_void_p
    assert call(ctypes.c_ssize_t(100), 0, None) is None


def test_buckets_are_made_and_made_anew_inside_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Pool:
        @contextlib.contextmanager
        def use(self) -> Iterator[None]:
            told.append(f"in {os.environ['DDP_DISABLE_COMM_MEM']}")
            yield
            told.append("out")

    class Group:
        def agree_pool(self, pool: Pool) -> None:
            told.append("agree")

    monkeypatch.setattr(symmetric_models, "pool_for", lambda group, parameters: Pool())
    torch_distributed: Any = dist
    monkeypatch.setattr(torch_distributed, "Reducer", symmetric_models.SymmetricReducer)
    torch_distributed.init_process_group("gloo", store=torch_distributed.HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD
        monkeypatch.setattr(type(group), "gpu", Group(), raising=False)
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))))
        assert told == ["in 1", "out", "agree"]
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
        assert told.count("agree") == 2 and told.count("in 1") == told.count("out") >= 2
        assert told[-1] == "agree", "and not again once they are made anew"
        assert "DDP_DISABLE_COMM_MEM" not in os.environ
    finally:
        dist.destroy_process_group()


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(InvalidInput, match="fully_shard was applied to none"):
        symmetric_buffers(torch.nn.Linear(2, 2), 1 << 20)
