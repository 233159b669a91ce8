# SPDX-License-Identifier: Apache-2.0
"""Runs fused programs through the CPU build of the GPU's kernel: all ranks, blocks and threads as fibers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stretto import _native
from stretto.programs.fused import Fused
from stretto.runtime.gpu.encode import ELEMENT_BYTES, REDUCTIONS, STATE_WORDS, EncodedProgram, chunk_elements, encode

MAX_BLOCKS = 4
FLAG_BYTES = 128 * MAX_BLOCKS
Array = NDArray[Any]
NUMPY = {name: np.dtype("uint16" if name == "bfloat16" else name) for name in ELEMENT_BYTES}


def to_float(values: Array, dtype: str) -> Array:
    """Values of a type as numbers that NumPy can add."""
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32) if dtype == "float16" else values


def from_float(values: Array, dtype: str) -> Array:
    """The other way, rounded to the nearest."""
    if dtype == "bfloat16":
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(NUMPY[dtype])


@dataclass(kw_only=True)
class EmulatedCall:
    """A program with the buffers of all ranks."""

    fused: Fused
    encoded: EncodedProgram
    dtype: str
    reduce: str
    inputs: list[Array]
    outputs: list[Array]
    before: list[Array]


class EmulatedGpu:
    """The symmetric memory and the state of some ranks, kept from launch to launch."""

    def __init__(self, ranks: int, *, block_slots: int = 4096, block_packets: int = 4096) -> None:
        self.ranks, self.block_slots, self.block_packets = ranks, block_slots, block_packets
        self.packets_at = FLAG_BYTES
        self.slots_at = FLAG_BYTES + MAX_BLOCKS * block_packets
        size = self.slots_at + MAX_BLOCKS * block_slots
        self.memory = [aligned(size) for _ in range(ranks)]
        self.state = [np.zeros(MAX_BLOCKS * STATE_WORDS, np.uint32) for _ in range(ranks)]

    def prepare(
        self,
        fused: Fused,
        count: int,
        dtype: str,
        reduce: str,
        rng: np.random.Generator,
        *,
        blocks: int,
        shift: int = 0,
    ) -> EmulatedCall:
        """Encode a program and draw inputs; `shift` moves user memory off its alignment by elements."""
        size = ELEMENT_BYTES[dtype]
        encoded = encode(
            fused, count=count, element=size, blocks=blocks, block_slots=self.block_slots,
            block_packets=self.block_packets,
        )  # fmt: skip
        inputs, outputs = [], []
        c = fused.collective
        sizes = chunk_elements(c, count, 16 // size)
        for r in range(self.ranks):
            values = random_values(rng, encoded.inputs[r], dtype, reduce)
            starts = np.concatenate([[0], np.cumsum(sizes[c.outputs(r)])])
            if fused.in_place:
                place = int(c.place[r])
                ahead = int(np.cumsum([0, *sizes[c.inputs(r)]])[-place]) if place < 0 else 0
                begin = int(starts[place]) if place > 0 else 0
                total = max(ahead + encoded.outputs[r], begin + encoded.inputs[r])
                both = aligned((total + shift) * size).view(NUMPY[dtype])[shift:]
                both[begin : begin + len(values)] = values
                inputs.append(both[begin : begin + len(values)])
                outputs.append(both[ahead : ahead + encoded.outputs[r]])
            else:
                room = aligned((len(values) + shift) * size).view(NUMPY[dtype])[shift:]
                room[:] = values
                inputs.append(room)
                outputs.append(aligned((encoded.outputs[r] + shift) * size).view(NUMPY[dtype])[shift:])
        before = [x.copy() for x in inputs]
        return EmulatedCall(
            fused=fused, encoded=encoded, dtype=dtype, reduce=reduce, inputs=inputs, outputs=outputs, before=before
        )

    def run(self, calls: list[EmulatedCall], *, seed: int, threads: int = 4, most: int = 50_000_000) -> None:
        """Launch calls one behind the other on every rank, without waiting between ranks.

        Threads are a power of two, as on GPUs, in warps of two (of programs that meet at their ends at least one for
        every rank), and all calls of a run have as many.
        """
        if any(call.encoded.ends for call in calls):
            threads = max(threads, self.ranks)
        threads = 1 << max(threads - 1, 1).bit_length()
        rows = []
        for call in calls:
            e = call.encoded
            rows.append((
                [s.ctypes.data for s in e.streams], [h.ctypes.data for h in e.headers], [len(s) for s in e.streams],
                [x.ctypes.data for x in call.inputs], [x.ctypes.data for x in call.outputs],
                [list(ELEMENT_BYTES).index(call.dtype), REDUCTIONS.index(call.reduce), e.blocks, threads,
                 e.slot_bytes, e.packet_bytes],
                call.fused.symmetric,
            ))  # fmt: skip
        _native.run_gpu_streams(
            [m.ctypes.data for m in self.memory], [s.ctypes.data for s in self.state],
            [self.slots_at, self.packets_at, self.block_slots, self.block_packets], rows, seed, most,
        )  # fmt: skip

    def expected(self, call: EmulatedCall) -> list[Array]:
        """What NumPy says that the outputs are."""
        c, dtype = call.fused.collective, call.dtype
        count = max(*call.encoded.inputs, *call.encoded.outputs)
        sizes = chunk_elements(c, count, 16 // ELEMENT_BYTES[dtype])
        held: dict[tuple[int, int], Array] = {}
        for r in range(self.ranks):
            at = 0
            for k in range(int(c.in_ptr[r]), int(c.in_ptr[r + 1])):
                size = int(sizes[c.in_chunk[k]])
                held[int(c.in_chunk[k]), int(c.in_part[k])] = to_float(call.before[r][at : at + size], dtype)
                at += size
        outputs = []
        for r in range(self.ranks):
            pieces = [from_float(
                combined([held[int(c.out_chunk[k]), p] for p in c.parts_of(k)], dtype, call.reduce, self.ranks), dtype
            ) for k in range(int(c.out_ptr[r]), int(c.out_ptr[r + 1]))]  # fmt: skip
            outputs.append(np.concatenate(pieces) if pieces else np.zeros(0, NUMPY[dtype]))
        return outputs

    def check(self, call: EmulatedCall) -> None:
        """Every output is exactly what NumPy says; the data is such that any order of adding gives the same."""
        for rank, (got, want) in enumerate(zip(call.outputs, self.expected(call), strict=True)):
            assert np.array_equal(got, want), (call.fused, call.dtype, call.reduce, rank, got, want)


def aligned(size: int) -> Array:
    """Zeroed bytes that begin at a multiple of 64."""
    raw = np.zeros(size + 64, np.uint8)
    skip = -raw.ctypes.data % 64
    return raw[skip : skip + size]


def random_values(rng: np.random.Generator, count: int, dtype: str, reduce: str) -> Array:
    """Small whole numbers that every type holds, so that sums (and products of signs) are exact."""
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(np.bool_)
    low = 0 if dtype == "uint8" else -3
    values = (
        rng.choice([1, 1, 2], count)
        if reduce == "prod"
        else rng.integers(low, 4, count) * (8 if reduce == "avg" else 1)
    )
    return from_float(values.astype(np.float32 if dtype in ("float16", "bfloat16") else NUMPY[dtype]), dtype)


def combined(parts: list[Array], dtype: str, reduce: str, ranks: int) -> Array:
    """The reduction of some parts."""
    if len(parts) == 1:
        return parts[0]
    if dtype == "bool":
        return np.asarray(np.logical_and.reduce(parts) if reduce in ("prod", "min") else np.logical_or.reduce(parts))
    ufunc = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(reduce, np.add)
    total = np.asarray(ufunc.reduce(parts))
    if reduce == "avg":
        total = total / total.dtype.type(ranks) if np.issubdtype(total.dtype, np.floating) else np.trunc(total / ranks)
    return np.asarray(total.astype(parts[0].dtype))
