# SPDX-License-Identifier: Apache-2.0
"""The GPU's kernel, built for the CPU: the same streams, every thread a fiber, in orders drawn from seeds."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from gpu_emulation import EmulatedCall, EmulatedGpu

from stretto import InvalidInput
from stretto.algorithms import algorithm
from stretto.algorithms.registry import defined_for
from stretto.collectives import COLLECTIVES, AllReduce
from stretto.programs.fused import Fused, fuse
from stretto.runtime.gpu.compile import (
    ELEMENTS,
    EndParams,
    GpuLimits,
    GpuParams,
    PacketParams,
    kernel_options,
    kernel_source,
)
from stretto.runtime.gpu.encode import ELEMENT_BYTES, REDUCTIONS, chunk_elements, encode, rounded

MODES: tuple[dict[str, Any], ...] = ({}, {"symmetric": True}, {"protocol": "ll"})


def drawn(gpu: EmulatedGpu, rng: np.random.Generator) -> EmulatedCall | None:
    """A random collective with a random program, mode, type, operation and size; None where there is no such."""
    n, kind = gpu.ranks, str(rng.choice(list(COLLECTIVES)))
    names = defined_for(kind, n)
    if not names:
        return None
    try:
        program = algorithm(str(rng.choice(names)), kind, n, in_place=bool(rng.integers(2)))
        options = MODES[int(rng.integers(3))]
        fused = fuse(program.lower() if rng.integers(4) == 0 else program, **options)
        dtype = str(rng.choice(list(ELEMENT_BYTES)))
        reduce = str(rng.choice(REDUCTIONS[: 4 if dtype == "bool" else 5]))
        count = int(rng.choice([0, 1, 2, 7, 33, 100])) * n * n
        blocks, shift = int(rng.integers(1, 4)), int(rng.integers(3))
        return gpu.prepare(fused, count, dtype, reduce, rng, blocks=blocks, shift=shift)
    except InvalidInput:
        return None


def test_random_collectives_on_random_orders_are_what_numpy_says() -> None:
    done = 0
    for trial in range(80):
        rng = np.random.default_rng(trial)
        gpu = EmulatedGpu(int(rng.integers(2, 6)), block_slots=int(rng.choice([2048, 4096])))
        calls = [call for _ in range(3) if (call := drawn(gpu, rng)) is not None]
        if calls:
            gpu.run(calls, seed=trial, threads=int(rng.choice([2, 4, 8])))
            for call in calls:
                gpu.check(call)
            done += len(calls)
    assert done > 120


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_every_type_and_operation(dtype: str) -> None:
    gpu, rng = EmulatedGpu(3), np.random.default_rng(5)
    calls = [
        gpu.prepare(fuse(algorithm("direct", "all_reduce", 3), **options), 51, dtype, reduce, rng, blocks=2)
        for reduce in REDUCTIONS[: 4 if dtype == "bool" else 5]
        for options in MODES
    ]
    gpu.run(calls, seed=1)
    for call in calls:
        gpu.check(call)


def test_sums_of_many_sources_and_long_streams() -> None:
    for n, name in ((12, "direct"), (8, "ring")):
        gpu, rng = EmulatedGpu(n, block_slots=1 << 14, block_packets=1 << 15), np.random.default_rng(n)
        for options in MODES:
            call = gpu.prepare(
                fuse(algorithm(name, "all_reduce", n), **options), 24 * n, "float32", "sum", rng, blocks=1
            )
            gpu.run([call, gpu.prepare(call.fused, 24 * n, "int32", "sum", rng, blocks=2)], seed=n, threads=2)
            gpu.check(call)


@pytest.mark.parametrize("ranks", [2, 8])
def test_direct_programs_in_symmetric_memory_meet_at_their_ends_alone(ranks: int) -> None:
    gpu, rng = EmulatedGpu(ranks), np.random.default_rng(ranks)
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    calls = [
        gpu.prepare(
            fuse(algorithm("direct", kind, ranks), symmetric=True), 9 * ranks, "float32", "sum", rng, blocks=2, shift=at
        )
        for at, kind in enumerate(kinds)
    ]
    assert all(call.encoded.ends for call in calls)
    assert not gpu.prepare(fuse(algorithm("direct", "all_reduce", ranks)), 9, "int8", "sum", rng, blocks=1).encoded.ends
    # Between them one that counts signals: all kernels go on from the same counts.
    calls.insert(
        2, gpu.prepare(fuse(algorithm("direct", "all_reduce", ranks)), 9 * ranks, "int8", "sum", rng, blocks=2)
    )
    gpu.run(calls, seed=ranks)
    for call in calls:
        gpu.check(call)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_slices_of_many_vectors_begin_where_lines_of_memory_do(ranks: int) -> None:
    """Every thread loads many vectors, the last ones fewer; slices of three blocks are no powers of two."""
    gpu, rng = EmulatedGpu(ranks), np.random.default_rng(ranks)
    count = 6011 * ranks
    calls = [
        gpu.prepare(fuse(algorithm("direct", kind, ranks), symmetric=True), count, dtype, "sum", rng, blocks=3)
        for kind in ("all_reduce", "reduce_scatter", "all_gather")
        for dtype in ("float32", "int16")
    ]
    gpu.run(calls, seed=ranks, threads=4)
    for call in calls:
        gpu.check(call)
    assert rounded(np.array([count // 3]), 4) * 4 % 128 == 0


@pytest.mark.parametrize("options", MODES)
def test_what_lies_where_it_goes_is_left_there(options: dict[str, Any]) -> None:
    """A program for separate memory, whose input is a rank's own part of the output: a backend's call in place."""
    for ranks, count in ((2, 501), (4, 3000)):
        gpu, rng = EmulatedGpu(ranks), np.random.default_rng(ranks)
        fused = fuse(algorithm("direct", "all_gather", ranks), **options)
        call = gpu.prepare(fused, count * ranks, "int32", "sum", rng, blocks=2)
        for rank, (given, made) in enumerate(zip(call.inputs, call.outputs, strict=True)):
            made[rank * count : (rank + 1) * count] = given
            call.inputs[rank] = made[rank * count : (rank + 1) * count]
        gpu.run([call], seed=ranks)
        gpu.check(call)


def test_ranks_get_the_same_bits_in_the_order_of_ranks() -> None:
    gpu, rng = EmulatedGpu(4), np.random.default_rng(0)
    for options in MODES:
        for steps in (1, 2):
            fused = fuse(algorithm("direct", "all_reduce", 4, steps=steps), **options)
            call = gpu.prepare(fused, 40, "float32", "sum", rng, blocks=2)
            for x in call.inputs:
                x[:] = rng.normal(size=len(x))
            want = ((call.inputs[0] + call.inputs[1]) + call.inputs[2]) + call.inputs[3]
            gpu.run([call], seed=3)
            assert all(np.array_equal(y, want) for y in call.outputs)


def test_not_a_number_wins_a_maximum() -> None:
    gpu, rng = EmulatedGpu(2), np.random.default_rng(0)
    call = gpu.prepare(fuse(algorithm("direct", "all_reduce", 2)), 4, "float32", "max", rng, blocks=1)
    call.inputs[0][1] = call.inputs[1][2] = np.nan
    gpu.run([call], seed=0)
    assert [bool(np.isnan(v)) for v in call.outputs[0]] == [False, True, True, False]


def test_a_stream_that_waits_for_nobody_comes_to_an_end_with_words() -> None:
    gpu, rng = EmulatedGpu(2), np.random.default_rng(0)
    call = gpu.prepare(fuse(algorithm("direct", "all_reduce", 2)), 4, "float32", "sum", rng, blocks=1)
    call.encoded.headers[0][3] = 0  # Rank 0 does nothing.
    with pytest.raises(RuntimeError, match="do not come to an end"):
        gpu.run([call], seed=0, most=20_000)


def test_chunks_end_where_vectors_do_and_shards_are_whole() -> None:
    assert chunk_elements(AllReduce(4), 18, 4).tolist() == [8, 8, 2, 0]
    with pytest.raises(InvalidInput, match="do not divide"):
        chunk_elements(algorithm("direct", "all_gather", 4).collective, 18, 4)


def test_slots_that_are_too_small_are_refused() -> None:
    fused = fuse(algorithm("ring", "all_reduce", 8))
    with pytest.raises(InvalidInput, match="slot_bytes"):
        encode(fused, count=64, element=4, blocks=1, block_slots=64, block_packets=64)


def test_large_calls_go_in_rounds_and_small_ones_take_few_blocks() -> None:
    fused: Fused = fuse(algorithm("direct", "all_reduce", 4))
    room = {"element": 4, "blocks": 32, "block_slots": 2 << 20, "block_packets": 1 << 18}
    large, small = encode(fused, count=64 << 20, **room), encode(fused, count=256, **room)
    assert large.blocks == 32 and large.rounds > 1 and small.blocks == 1 and small.rounds == 1


def test_the_host_and_the_kernel_agree_on_their_words() -> None:
    text = kernel_source()
    both = (("Limits", GpuLimits), ("Params", GpuParams), ("PacketParams", PacketParams), ("EndParams", EndParams))
    for name, params in both:
        begin = text.index(f"struct {name} {{")
        words = re.sub("//.*", "", text[begin : text.index("};", begin)])
        assert [field[0] for field in params._fields_] == re.findall(r"(\w+)(?:\[[^]]+\])?[;,]", words)
    assert set(ELEMENTS) == set(ELEMENT_BYTES)
    assert "enum { SUM, PROD, MIN, MAX, AVG };" in text and REDUCTIONS == ("sum", "prod", "min", "max", "avg")
    with pytest.raises(InvalidInput, match="dtype"):
        kernel_options("complex64", "sum", 1)
    with pytest.raises(InvalidInput, match="reduce"):
        kernel_options("float32", "xor", 1)
