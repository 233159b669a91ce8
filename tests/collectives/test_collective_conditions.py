# SPDX-License-Identifier: Apache-2.0
"""Pre- and postconditions of every collective, against definitions written independently of the library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from stretto import (
    AllGather,
    AllReduce,
    AllToAll,
    AllToAllV,
    Broadcast,
    Collective,
    Gather,
    InvalidInput,
    Permute,
    Reduce,
    ReduceScatter,
    Scatter,
)

Data = list[list[float]]
"""One list of numbers per rank: its input or output buffer, one number per chunk."""


def simulate(collective: Collective, inputs: Data) -> Data:
    """The outputs that the postcondition asks for: each chunk is the sum of its parts' values."""
    value: dict[tuple[int, int], float] = {}
    for rank in range(collective.num_ranks):
        low, high = collective.in_ptr[rank], collective.in_ptr[rank + 1]
        assert len(inputs[rank]) == high - low
        for at, number in zip(range(low, high), inputs[rank], strict=True):
            value[int(collective.in_chunk[at]), int(collective.in_part[at])] = number
    return [
        [
            sum(value[int(collective.out_chunk[at]), part] for part in collective.parts_of(at))
            for at in range(collective.out_ptr[rank], collective.out_ptr[rank + 1])
        ]
        for rank in range(collective.num_ranks)
    ]


def numbers(rank: int, count: int) -> list[float]:
    """Powers of two, so that every sum tells which values it is made of."""
    return [float(2 ** (7 * rank + i)) for i in range(count)]


def total(inputs: Data) -> list[float]:
    return [sum(column) for column in zip(*inputs, strict=True)]


N, K = 4, 3


@pytest.mark.parametrize(
    ("collective", "inputs", "outputs"),
    [
        (AllGather(N, chunks=K), K, lambda x: [[v for row in x for v in row]] * N),
        (ReduceScatter(N, chunks=K), N * K, lambda x: [total(x)[K * r : K * r + K] for r in range(N)]),
        (AllReduce(N, chunks=K), K, lambda x: [total(x)] * N),
        (AllReduce(N), N, lambda x: [total(x)] * N),
        (
            AllToAll(N, chunks=K),
            N * K,
            lambda x: [[v for row in x for v in row[K * q : K * q + K]] for q in range(N)],
        ),
        (Broadcast(N, root=2, chunks=K), {2: K}, lambda x: [x[2]] * N),
        (Reduce(N, root=1, chunks=K), K, lambda x: [total(x) if r == 1 else [] for r in range(N)]),
        (Gather(N, root=3, chunks=K), K, lambda x: [[v for row in x for v in row] if r == 3 else [] for r in range(N)]),
        (Scatter(N, root=2, chunks=K), {2: N * K}, lambda x: [x[2][K * r : K * r + K] for r in range(N)]),
        (Permute(N, [(0, 3), (3, 1)], chunks=K), {0: K, 3: K}, lambda x: [[], x[3], [], x[0]]),
        (
            AllToAllV(3, [[0, 2, 1], [1, 0, 0], [5, 5, 5]]),
            {0: 2, 1: 1, 2: 3},
            lambda x: [[x[1][0], x[2][0]], [x[0][0], x[2][1]], [x[0][1], x[2][2]]],
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Collective) else "",
)
def test_the_postcondition_is_what_mpi_would_compute(
    collective: Collective, inputs: int | dict[int, int], outputs: Callable[[Data], Data]
) -> None:
    counts = inputs if isinstance(inputs, dict) else dict.fromkeys(range(collective.num_ranks), inputs)
    data = [numbers(rank, counts.get(rank, 0)) for rank in range(collective.num_ranks)]
    assert simulate(collective, data) == outputs(data)


ALL: list[Callable[..., Collective]] = [
    AllGather,
    ReduceScatter,
    AllReduce,
    AllToAll,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
]


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize("chunks", [1, 2])
def test_nbytes_is_the_larger_of_one_ranks_send_and_receive_buffer(
    build: Callable[..., Collective], chunks: int
) -> None:
    collective = build(5, chunks=chunks)
    size = collective.chunk_bytes(1e6)
    buffers = [float(size[side(rank)].sum()) for rank in range(5) for side in (collective.inputs, collective.outputs)]
    assert max(buffers) == pytest.approx(1e6)


def test_uneven_all_to_all_scales_to_its_largest_buffer() -> None:
    collective = AllToAllV(2, [[1, 3], [0, 2]], chunks=2)
    assert collective.num_chunks == 6
    assert collective.chunk_bytes(100).tolist() == [10, 10, 30, 30, 20, 20]


@pytest.mark.parametrize("build", ALL)
def test_a_subset_of_devices_keeps_rank_numbers_and_remembers_devices(build: Callable[..., Collective]) -> None:
    whole, subset = build(3), build([7, 2, 9])
    assert subset.ranks == (7, 2, 9)
    assert np.array_equal(whole.in_chunk, subset.in_chunk)
    assert np.array_equal(whole.out_chunk, subset.out_chunk)
    assert whole != subset


@pytest.mark.parametrize(
    "collective",
    [
        AllGather(4, chunks=2, in_place=True),
        ReduceScatter(4, chunks=2, in_place=True),
        AllReduce(4, in_place=True),
        Broadcast(4, root=1, in_place=True),
        Reduce(4, root=3, in_place=True),
        Gather(4, root=2, chunks=2, in_place=True),
        Scatter(4, root=2, chunks=2, in_place=True),
    ],
    ids=lambda c: c.kind,
)
def test_in_place_input_lies_where_the_same_chunk_of_the_output_lies(collective: Collective) -> None:
    seen = 0
    for rank in range(collective.num_ranks):
        inputs, outputs = collective.inputs(rank).tolist(), collective.outputs(rank).tolist()
        for at, chunk in enumerate(inputs):
            place = at + int(collective.place[rank])
            if 0 <= place < len(outputs):
                seen += 1
                assert outputs[place] == chunk
    assert seen > 0
    assert collective.in_place


def test_only_reductions_combine() -> None:
    assert {build(4).kind for build in ALL if build(4).combining} == {"reduce_scatter", "all_reduce", "reduce"}
    assert not AllReduce(1).combining
    assert not Permute(2, [(0, 1)]).combining


def test_one_rank_and_many_ranks_are_fine() -> None:
    for build in ALL:
        assert build(1).num_ranks == 1
    big = AllReduce(100_000, chunks=1)
    assert len(big.in_chunk) == 100_000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllGather(0), "ranks: must be 1..131072, not 0"),
        (lambda: AllGather(10**9), "ranks: must be 1..131072, not 1000000000"),
        (lambda: AllGather(2.5), "ranks: must be a number of ranks or a list of devices, not 2.5"),  # type: ignore
        (lambda: AllGather([]), "ranks: at least one device must take part"),
        (lambda: AllGather([1, 1]), "ranks: must be distinct devices >= 0"),
        (lambda: AllGather([0, -1]), "ranks: must be distinct devices >= 0"),
        (lambda: AllReduce(2, chunks=0), "chunks: must be >= 1, not 0"),
        (lambda: AllToAll(100_000), "chunks: all_to_all over 100000 ranks would have 10000000000 chunks"),
        (lambda: Broadcast(4, root=4), "root: must be a rank 0..3, not 4"),
        (lambda: Reduce(4, root=-1), "root: must be a rank 0..3, not -1"),
        (lambda: Permute(3, []), "pairs: at least one (src, dst)"),
        (lambda: Permute(3, [(0, 1), (0, 2)]), "no rank sends twice or receives twice"),
        (lambda: Permute(3, [(0, 3)]), "pairs: ranks must be 0..2"),
        (lambda: AllToAllV(2, [[1, 2]]), "counts: must be 2 rows of 2 numbers >= 0, not all zero"),
        (lambda: AllToAllV(2, [[0, 0], [0, 0]]), "counts: must be 2 rows of 2 numbers"),
        (lambda: AllToAllV(2, [[0, float("nan")], [1, 0]]), "counts: must be 2 rows of 2 numbers"),
    ],
)
def test_bad_arguments_are_refused_by_name(make: Callable[[], Collective], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        make()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_equality_is_by_content() -> None:
    assert AllGather(4) == AllGather(4)
    assert AllGather(4) != AllGather(4, in_place=True)
    assert hash(Broadcast(4, root=1)) == hash(Broadcast(4, root=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"part_sets": ((-1000,),)}, "part_sets[0]: must be distinct parts"),
        ({"part_sets": ((0, 0),)}, "part_sets[0]: must be distinct parts"),
        ({"part_sets": ((),)}, "part_sets[0]: must be distinct parts"),
        ({"in_ptr": np.array([0, 1])}, "inputs: pointers, chunks and parts differ in length"),
        ({"out_ptr": np.array([0, 4, 2, 4, 4])}, "outputs: pointers"),
        ({"place": np.zeros(2, np.int64)}, "place: must be 4 offsets, one per rank"),
        ({"chunk_share": np.ones(1)}, "chunk_share: must be 4 shares > 0"),
        ({"chunk_share": np.full(4, np.inf)}, "chunk_share: must be 4 shares > 0"),
    ],
)
def test_inconsistent_arrays_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        dataclasses.replace(AllGather(4), **changes)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_in_place_exchanges_need_room_for_what_comes_in() -> None:
    assert Permute(3, [(0, 1), (1, 0)], in_place=True).in_place
    assert AllToAllV(2, [[0, 3], [3, 1]], in_place=True).in_place
    with pytest.raises(InvalidInput, match="in_place: counts must be symmetric"):
        AllToAllV(2, [[0, 3], [2, 1]], in_place=True)


def test_the_digest_does_not_depend_on_the_type_of_a_number() -> None:
    assert AllGather(4, chunks=int(np.int64(6))).digest == AllGather(4, chunks=np.int64(6)).digest  # type: ignore[arg-type]
