# SPDX-License-Identifier: Apache-2.0
"""Many strided copies between addresses of GPU memory in one launch, by a table of tiles that is made once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .compile import GpuKernel, cached_cubin

SOURCE = Path(__file__).with_name("copies.cu")
TILE_BYTES = 1 << 16
"""The most bytes of a tile: what the threads of a block have under way at a time."""
THREADS = 512
BLOCKS_PER_SM = 2
"""The blocks of `THREADS` threads that an SM runs at once; further blocks would wait for these."""
TILE = np.dtype(
    [("from", "<u8"), ("to", "<u8"), ("from_step", "<u8"), ("to_step", "<u8"), ("rows", "<u4"), ("row_bytes", "<u4")]
)
"""`Tile` in copies.cu."""


@dataclass(frozen=True, kw_only=True)
class BoxCopy:
    """A copy of a box of equal elements from one address to another, each with its own strides, in bytes."""

    source: int
    target: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    itemsize: int

    @classmethod
    def between(cls, source: torch.Tensor, target: int, *, reverse: bool = False) -> BoxCopy:
        """A copy between a tensor, which may have any strides, and contiguous memory.

        Args:
            source: The tensor.
            target: The address of the contiguous memory.
            reverse: Copy from there into the tensor, instead of to there.

        Returns:
            The copy.
        """
        size = source.element_size()
        strides = tuple(int(stride) * size for stride in source.stride())
        packed, dense = [], size
        for extent in reversed(source.shape):
            packed.append(dense)
            dense *= int(extent)
        there = tuple(reversed(packed))
        ends = (target, source.data_ptr()) if reverse else (source.data_ptr(), target)
        both = (there, strides) if reverse else (strides, there)
        return cls(
            source=ends[0], target=ends[1], shape=tuple(map(int, source.shape)), source_strides=both[0],
            target_strides=both[1], itemsize=size,
        )  # fmt: skip


def tiles_of(copies: Iterable[BoxCopy]) -> np.ndarray[Any, Any]:
    """The tiles of some copies: rows of equal length, at most `TILE_BYTES` of them in a tile.

    Args:
        copies: The copies.

    Returns:
        An array of `TILE`.
    """
    found = [_tiles(each) for each in copies if 0 not in each.shape]
    return np.concatenate(found) if found else np.zeros(0, dtype=TILE)


def _tiles(copy: BoxCopy) -> np.ndarray[Any, Any]:
    run, dims = _rows(copy)
    number, source_step, target_step = dims[0] if dims else (1, 0, 0)
    # Where each group of rows begins: what lies outside of the rows, then so many rows at a time.
    begins = [np.array([copy.source], dtype=np.uint64), np.array([copy.target], dtype=np.uint64)]
    for extent, *strides in dims[1:]:
        steps = np.arange(extent, dtype=np.uint64)
        begins = [
            (begin[:, None] + steps * np.uint64(stride)).reshape(-1)
            for begin, stride in zip(begins, strides, strict=True)
        ]
    together = max(1, TILE_BYTES // run)
    cuts = np.arange(0, number, together, dtype=np.uint64)
    rows = np.minimum(together, number - cuts.astype(np.int64))
    parts = np.arange(0, run, TILE_BYTES, dtype=np.uint64) if run > TILE_BYTES else np.zeros(1, dtype=np.uint64)
    lengths = np.minimum(TILE_BYTES, run - parts.astype(np.int64)) if run > TILE_BYTES else np.array([run])
    found = np.zeros((len(begins[0]), len(cuts), len(parts)), dtype=TILE)
    for end, step, begin in zip(("from", "to"), (source_step, target_step), begins, strict=True):
        found[end] = begin[:, None, None] + (cuts * np.uint64(step))[:, None] + parts
        found[f"{end}_step"] = step
    found["rows"], found["row_bytes"] = rows[:, None], lengths
    return found.reshape(-1)


def _rows(copy: BoxCopy) -> tuple[int, list[tuple[int, int, int]]]:
    """The bytes that lie together on both sides, and the dimensions of such rows, inner ones first."""
    run = copy.itemsize
    dims: list[tuple[int, int, int]] = []
    ends = list(zip(copy.shape, copy.source_strides, copy.target_strides, strict=True))
    for extent, source, target in reversed([end for end in ends if end[0] != 1]):
        if not dims and source == target == run:
            run *= extent
        elif dims and source == dims[-1][0] * dims[-1][1] and target == dims[-1][0] * dims[-1][2]:
            dims[-1] = (dims[-1][0] * extent, *dims[-1][1:])
        else:
            dims.append((extent, source, target))
    return run, dims


class CopyParams(ctypes.Structure):
    """The kernel's one argument; `CopyParams` in copies.cu."""

    _fields_ = [("tiles", ctypes.c_uint64), ("count", ctypes.c_uint32), ("unused", ctypes.c_uint32)]


class GpuCopies:
    """Copies that are launched again and again between the same addresses."""

    def __init__(self, copies: Sequence[BoxCopy], device: torch.device) -> None:
        tiles = tiles_of(copies)
        self._count, self._device = len(tiles), device
        self._tiles = torch.from_numpy(tiles.view(np.uint8).copy()).to(device)
        # The first launch may be on another stream than the one that has filled the table.
        torch.cuda.current_stream(device).synchronize()

    def launch(self, blocks: int | None = None) -> None:
        """Put all copies onto the current stream.

        Args:
            blocks: The most thread blocks at a time, of 512 threads each; None for all that the GPU takes.
        """
        if not self._count:
            return
        sms = torch.cuda.get_device_properties(self._device).multi_processor_count
        most = min(self._count, blocks or sms * BLOCKS_PER_SM)
        params = CopyParams(tiles=self._tiles.data_ptr(), count=self._count)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        _kernel(self._device.index or 0).launch(params, blocks=most, threads=THREADS, stream=stream)


@lru_cache
def _kernel(index: int) -> GpuKernel:
    capability = torch.cuda.get_device_capability(index)
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    with torch.cuda.device(index):
        return GpuKernel(cached_cubin(SOURCE.read_text(), options))
