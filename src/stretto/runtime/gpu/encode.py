# SPDX-License-Identifier: Apache-2.0
"""Fused steps as the words that the kernel reads, for one size of call and one number of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...collectives import Collective
from ...errors import InvalidInput
from ...programs.fused import IN, OUT, Fused, FusedStep, MemoryPlace

HEADER_WORDS, STEP_WORDS, MAX_RANKS, STATE_WORDS = 16, 6, 32, 96
SYNC, FINISH = 1, 2
H_STEPS, H_PENDING, H_READY, H_TELL_READY, H_DONE, H_TELL_DONE = 3, 5, 6, 7, 9, 10
"""Words of a header, as in the kernel."""
VECTOR_BYTES = 16
LINE_BYTES = 128
LARGEST_GRAIN_VECTORS = 256
THREADS, LEAST_THREADS, WARP = 512, 64, 32
QUIET_RANKS, INLINE_WORDS = 8, 192
"""The ranks of programs of packets alone (`is_quiet`), and the words of a stream that comes with the launch."""
BLOCK_VECTORS = 128
"""What a block moves at least, before another one is taken: vectors, or packets."""
PIPELINE_BYTES = 128 << 10
"""What a block moves of a slice in one round where ranks forward to each other: so the first is passed on early."""
PIPELINE_DEPTH = 3
"""Programs with more levels of steps than this go in rounds of `PIPELINE_BYTES`."""
ELEMENT_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "uint8": 1,
    "bool": 1,
}  # fmt: skip
REDUCTIONS = ("sum", "prod", "min", "max", "avg")
"""Numbered as in the kernel."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodedProgram:
    """The words of every rank's stream, and how its blocks share memory."""

    headers: tuple[NDArray[np.int32], ...]
    """What comes with the launch: the rank, the rounds, masks of ranks, and the signals of each rank in a round."""
    streams: tuple[NDArray[np.int32], ...]
    blocks: int
    threads: int
    rounds: int
    slot_bytes: int
    packet_bytes: int
    inputs: tuple[int, ...]
    """The elements of each rank's input."""
    outputs: tuple[int, ...]
    quiet: bool
    """Whether ranks meet by packets alone: see `is_quiet`."""
    ends: bool
    """Whether ranks meet at the beginning and the end alone: see `meets_at_ends`."""


def chunk_elements(collective: Collective, count: int, lane: int) -> NDArray[np.int64]:
    """The elements of each chunk when the larger buffer of any rank has `count`.

    A shard is cut into its chunks where vectors end, so the last ones may be smaller, or empty.

    Args:
        collective: The collective.
        count: The elements of the larger buffer.
        lane: The elements of one vector.

    Returns:
        One number per chunk.

    Raises:
        InvalidInput: A shard has no whole number of elements.
    """
    c = collective
    share, chunks = c.chunk_share, 1
    if c.num_chunks % c.chunks == 0:
        by_shard = share.reshape(-1, c.chunks)
        if np.allclose(by_shard, by_shard[:, :1], rtol=1e-12):
            share, chunks = by_shard[:, 0] * c.chunks, c.chunks
    shard = np.rint(share * count).astype(np.int64)
    if not np.allclose(share * count, shard, rtol=0, atol=1e-3):
        raise InvalidInput(f"nbytes: {count} elements do not divide into the shards of {c.kind}")
    piece = -(-shard // chunks + 0)
    piece = rounded(piece, lane)
    left = shard[:, None] - piece[:, None] * np.arange(chunks)
    return np.clip(left, 0, piece[:, None]).reshape(-1)


def rounded(elements: NDArray[np.int64], lane: int) -> NDArray[np.int64]:
    """Slices or pieces of at least so many elements: they end where vectors do, large ones where lines of memory do.

    A slice that begins inside a sector of 32 bytes is moved at two thirds of the rate (seen on an H200), so large ones
    are multiples of up to 4 KiB; what is added for that is at most a 64th.

    >>> rounded(np.array([5, 4100, 11_184_811]), 4).tolist()
    [8, 4160, 11185152]
    """
    vectors = np.clip(elements // (64 * lane), 1, LARGEST_GRAIN_VECTORS)
    grain: NDArray[np.int64] = lane << np.log2(vectors).astype(np.int64)
    return -(-elements // grain) * grain


def block_count(fused: Fused, sizes: NDArray[np.int64], element: int, most: int) -> int:
    """How many blocks a call takes: few threads in many blocks are faster than many in few.

    Args:
        fused: The program.
        sizes: Elements of each chunk.
        element: Bytes of an element.
        most: The most blocks that may run.

    Returns:
        From 1 to `most`.
    """
    unit = BLOCK_VECTORS * (VECTOR_BYTES if fused.protocol == "simple" else 8)
    work = [sum(int(sizes[item.chunk]) for item in step.items) for stream in fused.steps for step in stream]
    return int(np.clip(-(-max(work, default=0) * element // unit), 1, most))


def thread_count(fused: Fused, sizes: NDArray[np.int64], element: int, blocks: int) -> int:
    """The threads of a block: no more than have work, since each that starts costs time.

    Args:
        fused: The program.
        sizes: Elements of each chunk.
        element: Bytes of an element.
        blocks: How many blocks share the work.

    Returns:
        A multiple of 64.
    """
    unit = VECTOR_BYTES if fused.protocol == "simple" else 8
    steps = [step for stream in fused.steps for step in stream]
    work = max((sum(int(sizes[item.chunk]) for item in step.items) for step in steps), default=0)
    threads = _power(-(-work * element // (unit * blocks)))
    if fused.protocol == "ll":
        # Every item, and of one source every target, has whole warps of its own, and so many that none goes twice.
        for step in steps:
            first = step.items[0]
            parts = len(step.items) * (len(first.targets) if len(first.sources) == 1 else 1)
            each = -(-max(int(sizes[item.chunk]) for item in step.items) * element // (unit * blocks))
            threads = max(threads, _power(max(each, WARP)) * _power(parts))
    return int(np.clip(threads, LEAST_THREADS, THREADS))


def _power(number: int) -> int:
    """The least power of two that is not below."""
    return 1 << max(number - 1, 0).bit_length()


def encode(
    fused: Fused, *, count: int, element: int, blocks: int, block_slots: int, block_packets: int
) -> EncodedProgram:
    """Write fused steps down for the kernel.

    Args:
        fused: The steps.
        count: The elements of the larger buffer of any rank.
        element: The bytes of an element.
        blocks: The most blocks to use, >= 1.
        block_slots: The bytes of slots that one block has on every rank.
        block_packets: The same for packet slots.

    Returns:
        The streams of all ranks.

    Raises:
        InvalidInput: The call is too large, its shards are not whole, or the slots are too small for the program.
    """
    c, lane = fused.collective, VECTOR_BYTES // element
    if not 0 <= count < 1 << 31:
        raise InvalidInput(f"nbytes: at most {(1 << 31) - 1} elements in a call, not {count}")
    sizes = chunk_elements(c, count, lane)
    blocks = block_count(fused, sizes, element, blocks)
    spans = rounded(-(-sizes // blocks), lane)
    room = slice_bytes = max(int(spans.max(initial=0)) * element, VECTOR_BYTES)
    for slots, memory in ((fused.slots, block_slots // 2), (2 * fused.packets, block_packets // 2)):
        if slots:
            room = min(room, _slot_room(memory // slots))
    if room <= 0:
        raise InvalidInput(f"slot_bytes: too small for the {fused.slots + fused.packets} slots of {fused.name}")
    if fused.depth > PIPELINE_DEPTH:
        room = min(room, PIPELINE_BYTES)
    rounds = -(-slice_bytes // room)
    places = [
        [np.concatenate([[0], np.cumsum(sizes[chunks(r)])]).astype(np.int64) for r in range(c.num_ranks)]
        for chunks in (c.inputs, c.outputs)
    ]
    streams = tuple(_stream(fused, r, sizes, spans, places) for r in range(c.num_ranks))
    return EncodedProgram(
        headers=tuple(_header(fused, r, rounds) for r in range(c.num_ranks)),
        streams=streams,
        blocks=blocks,
        threads=thread_count(fused, sizes, element, blocks),
        rounds=rounds,
        slot_bytes=room,
        packet_bytes=2 * room,
        inputs=tuple(int(places[0][r][-1]) for r in range(c.num_ranks)),
        outputs=tuple(int(places[1][r][-1]) for r in range(c.num_ranks)),
        quiet=is_quiet(fused),
        ends=meets_at_ends(fused),
    )


def _slot_room(nbytes: int) -> int:
    """The bytes of a slot that has so much room: whole lines of memory, or whole vectors."""
    unit = LINE_BYTES if nbytes >= LINE_BYTES else VECTOR_BYTES
    return nbytes // unit * unit


def is_quiet(fused: Fused) -> bool:
    """Whether few ranks meet by packets alone, keep nothing in slots, and have streams that come with the launch.

    >>> from stretto.algorithms import algorithm
    >>> from stretto.programs.fused import fuse
    >>> is_quiet(fuse(algorithm("direct", "all_reduce", 8), protocol="ll"))
    True
    """
    if fused.protocol != "ll" or fused.slots or fused.collective.num_ranks > QUIET_RANKS or any(fused.starts):
        return False
    steps = [step for stream in fused.steps for step in stream]
    if any(step.waits or step.signals or len(step.items[0].sources) > QUIET_RANKS for step in steps):
        return False
    return stream_words(fused) <= INLINE_WORDS


def meets_at_ends(fused: Fused) -> bool:
    """Whether few ranks work in symmetric memory and meet at the beginning and the end alone, in one short stream.

    >>> from stretto.algorithms import algorithm
    >>> from stretto.programs.fused import fuse
    >>> meets_at_ends(fuse(algorithm("direct", "all_reduce", 8), symmetric=True))
    True
    """
    if not fused.symmetric or fused.slots or fused.packets or any(fused.starts) or fused.depth > PIPELINE_DEPTH:
        return False
    steps = [step for stream in fused.steps for step in stream]
    if fused.collective.num_ranks > QUIET_RANKS or any(step.waits or step.signals for step in steps):
        return False
    return stream_words(fused) <= INLINE_WORDS


def stream_words(fused: Fused) -> int:
    """How long the longest stream of any rank is."""
    return max(
        sum(
            STEP_WORDS
            + len(step.items) * (2 + 2 * (len(step.items[0].sources) + len(step.items[0].targets)))
            + 2 * len(step.waits)
            for step in stream
        )
        for stream in fused.steps
    )


def kernel_shapes(fused: Fused) -> int:
    """What the kernel of a program must know, as in STRETTO_SHAPES: numbers of sources, packets, a short stream.

    >>> from stretto.algorithms import algorithm
    >>> from stretto.programs.fused import fuse
    >>> hex(kernel_shapes(fuse(algorithm("direct", "all_reduce", 4))))
    '0x809'
    >>> hex(kernel_shapes(fuse(algorithm("direct", "all_reduce", 4), symmetric=True)))
    '0x1008'
    """
    counts = {len(step.items[0].sources) for stream in fused.steps for step in stream}
    shapes = sum({1 << (min(count, 9) - 1) for count in counts})
    quiet, ends, short = is_quiet(fused), meets_at_ends(fused), stream_words(fused) <= INLINE_WORDS
    return shapes | (fused.protocol == "ll") << 9 | quiet << 10 | (short and not quiet and not ends) << 11 | ends << 12


def _mask(ranks: tuple[int, ...] | list[int]) -> int:
    bits = sum(1 << rank for rank in ranks)
    return bits - (1 << 32) if bits >> 31 else bits


def _header(f: Fused, r: int, rounds: int) -> NDArray[np.int32]:
    n = f.collective.num_ranks
    uses = bool(f.slots or f.packets) | (f.protocol == "ll") << 1 | is_quiet(f) << 2 | meets_at_ends(f) << 3
    words = [
        r, n, rounds, len(f.steps[r]), uses, not f.hears_all, _mask(f.ready[r]),
        _mask([q for q in range(n) if r in f.ready[q]]), _mask(f.starts[r]), _mask(f.done[r]), _mask(f.ready[r]),
    ]  # fmt: skip
    heard = [sum(r in step.signals for step in f.steps[q]) + (r in f.starts[q]) for q in range(n)]
    words += [0] * (HEADER_WORDS - len(words)) + heard + [0] * (MAX_RANKS - n)
    return np.array(words, np.int64).astype(np.int32)


def _stream(
    f: Fused,
    r: int,
    sizes: NDArray[np.int64],
    spans: NDArray[np.int64],
    places: list[list[NDArray[np.int64]]],
) -> NDArray[np.int32]:
    words: list[int] = []
    at = STEP_WORDS * len(f.steps[r])
    table: list[int] = []
    for step in f.steps[r]:
        waits = [number for wait in step.waits for number in wait]
        items = _items(step, sizes, places, spans)
        shape = len(step.items[0].sources) | len(step.items[0].targets) << 8
        shape |= (SYNC * step.sync | FINISH * step.finish) << 16
        begin = at + len(words)
        table += [shape, len(step.items), begin, _mask(step.signals), len(step.waits), begin + len(items)]
        words += items + waits
    return np.array([*table, *words], np.int64).astype(np.int32)


def _items(
    step: FusedStep, sizes: NDArray[np.int64], places: list[list[NDArray[np.int64]]], spans: NDArray[np.int64]
) -> list[int]:
    def operand(place: MemoryPlace) -> tuple[int, int]:
        user = place.space in (IN, OUT)
        offset = int(places[place.space][place.rank][place.at]) if user else place.at
        return place.space << 5 | place.rank, offset

    words: list[int] = []
    for item in step.items:
        words += [int(sizes[item.chunk]), int(spans[item.chunk])]
        for place in (*item.sources, *item.targets):
            words += operand(place)
    return words
