# SPDX-License-Identifier: Apache-2.0
"""Drawn boxes copied by the tiles of `GpuCopies` on a CPU build of its kernel, beside PyTorch's own copies."""

from __future__ import annotations

import ctypes
import random
import subprocess
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from stretto.resharding.tensors.pulls import chosen_holders
from stretto.resharding.tensors.rounds import Stream
from stretto.runtime.gpu.copies import SOURCE, TILE_BYTES, BoxCopy, CopyParams, tiles_of

SHIM = """
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint4 { u32 x, y, z, w; };
#define STRETTO_CPU
#define DEV static inline
#define UNROLL
#define KERNEL static void
static u32 THREAD, BLOCK;
static const u32 THREADS = 512, BLOCKS = 5;
#include "%s"
extern "C" void run(CopyParams P) {
  for (BLOCK = 0; BLOCK < BLOCKS; BLOCK++)
    for (THREAD = 0; THREAD < THREADS; THREAD++) stretto_run(P);
}
"""
DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("copies")
    (folder / "copies.cpp").write_text(SHIM % SOURCE)
    command = ["g++", "-O1", "-w", "-shared", "-fPIC", "-o", str(folder / "copies.so"), str(folder / "copies.cpp")]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(folder / "copies.so"))
    library.run.argtypes = [CopyParams]
    return library


def drawn_box(rng: random.Random) -> torch.Tensor:
    """A box of a tensor with some room around it, perhaps with two dimensions exchanged."""
    dims = rng.randint(0, 4)
    shape = [rng.choice([1, 2, 3, 5, 8, 17, 64, 300 if dims < 3 else 7]) for _ in range(dims)]
    whole = [n + rng.choice([0, 1, 8, 16]) for n in shape]
    dtype = rng.choice(DTYPES)
    base = torch.randint(0, 255, (prod(whole) * dtype.itemsize,), dtype=torch.uint8).view(dtype).view(whole)
    box = base[tuple(slice(at := rng.randint(0, m - n), at + n) for m, n in zip(whole, shape, strict=True))]
    return box.transpose(*rng.sample(range(dims), 2)) if dims > 1 and rng.random() < 0.3 else box


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def run(kernel: Any, copies: list[BoxCopy]) -> None:
    tiles = tiles_of(copies)
    assert all(int(rows) * int(row) <= TILE_BYTES for rows, row in zip(tiles["rows"], tiles["row_bytes"], strict=True))
    kernel.run(CopyParams(tiles=tiles.ctypes.data, count=len(tiles)))


@pytest.mark.parametrize("seed", range(60))
def test_drawn_boxes_are_packed_and_unpacked_bit_for_bit(kernel: Any, seed: int) -> None:
    rng = random.Random(seed)
    boxes = [drawn_box(rng) for _ in range(rng.randint(1, 4))]
    begins, end = [], 0
    for box in boxes:
        begins.append(end + rng.choice([0, 16, box.itemsize, 1]))
        end = begins[-1] + box.numel() * box.itemsize
    packed = torch.zeros(end + 64, dtype=torch.uint8)
    run(kernel, [BoxCopy.between(b, packed.data_ptr() + at) for b, at in zip(boxes, begins, strict=True)])
    want = torch.zeros_like(packed)
    for box, at in zip(boxes, begins, strict=True):
        want[at : at + box.numel() * box.itemsize] = as_bytes(box)
    assert torch.equal(packed, want)
    # The goal has other strides than the box had, and what lies around it stays as it is.
    rooms = [torch.zeros([n + 3 for n in box.shape], dtype=box.dtype) for box in boxes]
    goals = [room[tuple(slice(2, 2 + n) for n in box.shape)] for room, box in zip(rooms, boxes, strict=True)]
    run(kernel, [BoxCopy.between(g, packed.data_ptr() + at, reverse=True) for g, at in zip(goals, begins, strict=True)])
    for room, goal, box in zip(rooms, goals, boxes, strict=True):
        assert torch.equal(as_bytes(goal), as_bytes(box))
        around = room.clone()
        around[tuple(slice(2, 2 + n) for n in box.shape)] = 0
        assert not as_bytes(around).any()


def test_every_receiver_pulls_from_a_holder_and_loads_are_even() -> None:
    streams = [Stream(holders=((0, 1),), receivers=(4 + n % 2, 1), reduction="", align=1, nbytes=8) for n in range(10)]
    found = chosen_holders(streams)
    assert all(each[1] == 1 and each[4 + n % 2] in (0, 1) for n, each in enumerate(found))
    assert sum(each[4 + n % 2] == 0 for n, each in enumerate(found)) == 10  # Rank 1 has its own to copy.
