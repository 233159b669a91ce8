# SPDX-License-Identifier: Apache-2.0
"""How many messages and bytes each rank sends, counted on the programs themselves and held to the closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from stretto import Program, algorithm
from stretto.algorithms.double_binary_tree import two_trees

SIZE = 720_720.0


def sent(program: Program) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Messages and bytes that leave each rank."""
    messages = np.bincount(program.src, minlength=program.collective.num_ranks)
    return messages.astype(np.int64), _bytes_at(program, program.src)


def received(program: Program) -> NDArray[np.float64]:
    """Bytes that arrive at each rank."""
    return _bytes_at(program, program.dst)


def _bytes_at(program: Program, end: NDArray[np.int32]) -> NDArray[np.float64]:
    total = np.bincount(end, program.transfer_bytes(SIZE), minlength=program.collective.num_ranks)
    return total.astype(np.float64)


def assert_all_send(program: Program, messages: int, nbytes: float) -> None:
    count, total = sent(program)
    assert set(count.tolist()) == {messages}
    np.testing.assert_allclose(total, nbytes, rtol=1e-12)
    np.testing.assert_allclose(received(program), nbytes, rtol=1e-12)


@pytest.mark.parametrize("n", [2, 5, 8, 12])
def test_ring(n: int) -> None:
    share = SIZE * (n - 1) / n
    for kind, phases in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        assert_all_send(algorithm("ring", kind, n), phases * (n - 1), phases * share)
        assert_all_send(algorithm("ring", kind, n, chunks=3, rings=2), phases * (n - 1) * 6, phases * share)
        both_ways = algorithm("ring", kind, n, directions=2)
        assert_all_send(both_ways, phases * 2 * (n // 2), phases * share)
        assert both_ways.num_lanes == 2


def test_a_ring_sends_to_the_next_in_its_order_only() -> None:
    order = (3, 0, 4, 1, 2)
    program = algorithm("ring", "all_reduce", 5, order=order)
    following = dict(zip(order, (*order[1:], order[0]), strict=True))
    assert all(following[a] == b for a, b in zip(program.src.tolist(), program.dst.tolist(), strict=True))


def test_rings_with_different_strides_use_different_links() -> None:
    program = algorithm("ring", "all_gather", 7, rings=3)
    links = [
        set(zip(program.src[lane].tolist(), program.dst[lane].tolist(), strict=True))
        for lane in (program.lane == i for i in range(3))
    ]
    assert [len(link) for link in links] == [7, 7, 7]
    assert not links[0] & links[1] and not links[0] & links[2] and not links[1] & links[2]


@pytest.mark.parametrize("n", [2, 4, 8, 16])
@pytest.mark.parametrize("largest", ["near", "far"])
def test_halving_doubling(n: int, largest: str) -> None:
    rounds = n.bit_length() - 1
    for kind, phases in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        program = algorithm("halving_doubling", kind, n, largest=largest)
        assert_all_send(program, phases * rounds, phases * SIZE * (n - 1) / n)


def test_halving_doubling_sends_the_largest_messages_to_the_partner_it_is_told() -> None:
    for largest, distance in (("near", 1), ("far", 8)):
        program = algorithm("halving_doubling", "all_reduce", 16, largest=largest)
        sizes = program.transfer_bytes(SIZE)
        biggest = sizes > sizes.max() * 0.99
        assert set(np.abs(program.src - program.dst)[biggest].tolist()) == {distance}


def test_all_reduce_messages_are_contiguous_ranges() -> None:
    for name, options in (
        ("halving_doubling", {"largest": "near"}),
        ("halving_doubling", {"largest": "far"}),
        ("hierarchical", {"dims": (4, 2, 2), "inside": ("halving_doubling", "ring", "direct")}),
    ):
        program = algorithm(name, "all_reduce", 16, **options)
        for transfer in range(program.num_transfers):
            chunks = np.sort(program.chunks_of(transfer))
            assert chunks[-1] - chunks[0] == len(chunks) - 1


@pytest.mark.parametrize("n", [2, 4, 16])
def test_recursive_doubling(n: int) -> None:
    rounds = n.bit_length() - 1
    assert_all_send(algorithm("recursive_doubling", "all_gather", n), rounds, SIZE * (n - 1) / n)
    assert_all_send(algorithm("recursive_doubling", "all_reduce", n), rounds, SIZE * rounds)


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_bruck(n: int) -> None:
    steps = (n - 1).bit_length()
    assert_all_send(algorithm("bruck", "all_gather", n), steps, SIZE * (n - 1) / n)
    hops = sum(distance.bit_count() for distance in range(n))
    assert_all_send(algorithm("bruck", "all_to_all", n), steps, SIZE / n * hops)


@pytest.mark.parametrize("n", [2, 5, 8])
def test_direct_and_pairwise(n: int) -> None:
    share = SIZE * (n - 1) / n
    for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_v"):
        assert_all_send(algorithm("direct", kind, n), n - 1, share)
    assert_all_send(algorithm("direct", "all_reduce", n), 2 * (n - 1), 2 * share)
    assert_all_send(algorithm("direct", "all_reduce", n, steps=1), n - 1, SIZE * (n - 1))
    assert_all_send(algorithm("pairwise", "all_to_all", n), n - 1, share)


@pytest.mark.parametrize(("hosts", "local"), [(2, 4), (4, 2), (3, 3), (4, 4)])
def test_two_and_three_step_send_few_messages_between_hosts(hosts: int, local: int) -> None:
    n = hosts * local
    two = algorithm("two_step", "all_to_all", n, local=local)
    inside = SIZE / n * (local - 1) * hosts
    assert_all_send(two, local - 1 + hosts - 1, inside + SIZE / n * (hosts - 1) * local)
    three = algorithm("three_step", "all_to_all", n, local=local)
    for program, per_pair in ((two, local), (three, 1)):
        outside = program.src // local != program.dst // local
        pairs = (program.src // local * hosts + program.dst // local)[outside]
        assert np.bincount(pairs).max() == per_pair
        assert np.count_nonzero(outside) == hosts * (hosts - 1) * per_pair
        # Between hosts every byte moves once, and along rails.
        assert program.transfer_bytes(SIZE)[outside].sum() == pytest.approx(SIZE * (hosts - 1) * local)
        assert np.all(program.src[outside] % local == program.dst[outside] % local)


@pytest.mark.parametrize("n", [2, 3, 8, 13])
def test_broadcast_trees_deliver_each_byte_once(n: int) -> None:
    for name in ("chain", "binomial", "binary_tree", "double_binary_tree", "direct"):
        for root in (0, n - 1):
            program = algorithm(name, "broadcast", n, root=root, chunks=6)
            wanted = np.full(n, SIZE)
            wanted[root] = 0
            np.testing.assert_allclose(received(program), wanted)
            gathered = algorithm(name, "reduce", n, root=root, chunks=6)
            np.testing.assert_allclose(sent(gathered)[1], wanted)


def test_binomial_root_sends_to_log_n_ranks() -> None:
    messages, _ = sent(algorithm("binomial", "broadcast", 13, root=3))
    assert messages[3] == 4 and messages.sum() == 12


@pytest.mark.parametrize("n", [2, 3, 4, 8, 9, 16, 31, 100])
def test_double_binary_tree_loads_no_rank_with_more_than_every_byte_once(n: int) -> None:
    first, second = two_trees(n)
    inner = [set(tree[1:].tolist()) - {0} for tree in (first, second)]
    assert not inner[0] & inner[1]
    for kind, phases in (("broadcast", 1), ("reduce", 1), ("all_reduce", 2)):
        program = algorithm("double_binary_tree", kind, n, chunks=2)
        assert sent(program)[1].max() <= phases * SIZE * (1 + 1e-12)
        assert received(program).max() <= phases * SIZE * (1 + 1e-12)


@pytest.mark.parametrize("dims", [(8, 2), (4, 3, 2), (16,), (2, 2, 2, 2)])
def test_hierarchical(dims: tuple[int, ...]) -> None:
    n = int(np.prod(dims))
    hops = sum(d - 1 for d in dims)
    for kind, phases in (("all_gather", 1), ("reduce_scatter", 1), ("all_reduce", 2)):
        program = algorithm("hierarchical", kind, n, dims=dims, chunks=2)
        assert_all_send(program, phases * hops * 2, phases * SIZE * (n - 1) / n)


def test_hierarchical_sends_only_a_share_between_hosts() -> None:
    program = algorithm("hierarchical", "all_reduce", 16, dims=(8, 2))
    outside = program.src // 8 != program.dst // 8
    assert program.transfer_bytes(SIZE)[outside].sum() == pytest.approx(2 * 16 * SIZE / 16)
    assert np.all(program.src[outside] % 8 == program.dst[outside] % 8)


def test_a_ring_over_many_ranks_has_every_message_in_one_array() -> None:
    program = algorithm("ring", "all_reduce", 256)
    assert program.num_transfers == 2 * 255 * 256
    assert_all_send(program, 510, 2 * SIZE * 255 / 256)
