# SPDX-License-Identifier: Apache-2.0
"""`SymmetricPool`: tensors that PyTorch allocates by itself, in memory that all ranks of a group can address.

The pool is one symmetric allocation and a `torch.cuda.MemPool` whose segments are cut from it. Ranks that allocate
the same tensors in the same order find them at the same places; they compare what they have before it is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch

from ... import _native
from ...process_state import STATE, ProcessPart
from .cuda_clock import cuda

MAX_PIECES = 4096
RINGS = 4
"""How many streams may take pieces in turn; each has an equal share of the memory."""
ALIGN = 512


class KeptPools(ProcessPart):
    """All pools of this process: tensors of a pool may live longer than its group, so pools stay."""

    def __init__(self) -> None:
        self.pools: list[SymmetricPool] = []


KEPT_POOLS = STATE.part(KeptPools)


@lru_cache
def arenas() -> Any:
    """The functions of native/arena.cpp."""
    library = ctypes.CDLL(str(_native.__file__))
    library.stretto_arena_add.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.stretto_arena_pieces.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.c_int]
    return library


class MemoryPiece:
    """Bytes that a tensor shows as its own: they are in use as long as this object lives."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape = (self._memory.nbytes,)
        return {
            "data": (self._memory.data_ptr(), False),
            "shape": shape,
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class MemoryRing:
    """One stream's share of a pool, given out in turn."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number, self._nbytes, self._next = number, nbytes // ALIGN * ALIGN, 0
        self.given: list[tuple[int, int, weakref.ref[MemoryPiece]]] = []

    def take(self, nbytes: int) -> int | None:
        """Where the next piece begins in the pool; None where it has no room, or an older piece is in use there."""
        if nbytes > self._nbytes:
            return None
        if self._next + nbytes > self._nbytes:
            self._next = 0
        at = self.number * self._nbytes + self._next
        self._next += -(-nbytes // ALIGN) * ALIGN
        self.given = [one for one in self.given if one[2]() is not None]
        if any(begin < at + nbytes and at < end for begin, end, _ in self.given):
            return None
        return at


class SymmetricPool:
    """An allocation of all ranks (see `GpuEngine.make_pool`), from which PyTorch takes what is made inside `use`."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.agreed = False
        """Whether all ranks have the same pieces at the same places."""
        self._number = int(arenas().stretto_arena_add(memory.data_ptr(), memory.nbytes))
        self._pool: Any = None
        self._rings: dict[int, MemoryRing] = {}
        KEPT_POOLS.pools.append(self)

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

    def piece(self, nbytes: int) -> torch.Tensor:
        """The next bytes in turn, in a ring of the current stream's.

        Which bytes these are follows from the calls alone, not from when older pieces were dropped: so ranks that make
        the same calls get the same places. Where an older piece is alive there still, the memory is none of the pool's.

        Args:
            nbytes: How many, > 0.

        Returns:
            A tensor of bytes; its memory is given out again once nothing uses it.
        """
        device, stream = self.memory.device, self._stream()
        ring = self._rings.setdefault(stream, MemoryRing(len(self._rings), self.memory.nbytes // RINGS))
        at = ring.take(nbytes) if ring.number < RINGS else None
        if at is None:
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        given = MemoryPiece(self.memory[at : at + nbytes])
        ring.given.append((at, at + nbytes, weakref.ref(given)))
        found: torch.Tensor = torch.as_tensor(given, device=device)
        return found

    def _stream(self) -> int:
        return int(cuda.current_stream(self.memory.device).cuda_stream)

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
