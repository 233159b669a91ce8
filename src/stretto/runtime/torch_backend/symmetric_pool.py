# SPDX-License-Identifier: Apache-2.0
"""`SymmetricPool`: tensors that PyTorch allocates by itself, in memory that all ranks of a group can address.

The pool is one symmetric allocation and a `torch.cuda.MemPool` whose segments are cut from it. Ranks that allocate
the same tensors in the same order find them at the same places; they compare what they have before it is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from ... import _native
from .cuda_clock import cuda

MAX_PIECES = 4096
KEPT: list[SymmetricPool] = []
"""Tensors of a pool may live longer than its group, so pools stay."""


@lru_cache
def arenas() -> Any:
    """The functions of native/arena.cpp."""
    library = ctypes.CDLL(str(_native.__file__))
    library.stretto_arena_add.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.stretto_arena_pieces.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int]
    return library


class SymmetricPool:
    """An allocation of all ranks (see `GpuEngine.make_pool`), from which PyTorch takes what is made inside `use`."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.agreed = False
        """Whether all ranks have the same pieces at the same places."""
        self._number = int(arenas().stretto_arena_add(memory.data_ptr(), memory.nbytes))
        self._pool: Any = None
        KEPT.append(self)

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """What this thread allocates on the GPU lies in the pool."""
        if self._pool is None:
            functions = (ctypes.cast(f, ctypes.c_void_p).value for f in self._functions())
            maker: Any = torch._C
            self._pool = cuda.MemPool(maker._cuda_customAllocator(*functions))
        before = arenas().stretto_arena_use(self._number)
        try:
            with cuda.use_mem_pool(self._pool, self.memory.device):
                yield
        finally:
            arenas().stretto_arena_use(before)

    def _functions(self) -> tuple[Any, Any]:
        return arenas().stretto_arena_alloc, arenas().stretto_arena_free

    @property
    def layout(self) -> bytes:
        """A digest of the pieces: equal on ranks that allocated alike."""
        return hashlib.sha256(repr(self.pieces).encode()).digest()

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Where the segments that PyTorch has taken begin and end, in bytes from the beginning of the memory."""
        words = (ctypes.c_uint64 * (2 * MAX_PIECES))()
        count = min(int(arenas().stretto_arena_pieces(self._number, words, MAX_PIECES)), MAX_PIECES)
        return [(int(words[2 * at]), int(words[2 * at + 1])) for at in range(count)]
