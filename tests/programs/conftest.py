# SPDX-License-Identifier: Apache-2.0
"""Small algorithms written as synchronous steps, for the tests of what is done with programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
    Permute,
    Program,
    Reduce,
    ReduceScatter,
    Scatter,
)

Step = tuple[int, int, int, Iterable[int], bool]
"""(step, src, dst, chunks, reduce)"""
Made = tuple[Collective, Sequence[Step]]
Maker = Callable[[int, int, bool], Made]


def _shard(rank: int, k: int) -> range:
    return range(rank * k, (rank + 1) * k)


def ring_all_gather(n: int, k: int, in_place: bool) -> Made:
    steps = [(s, r, (r + 1) % n, _shard((r - s) % n, k), False) for s in range(n - 1) for r in range(n)]
    return AllGather(n, chunks=k, in_place=in_place), steps


def ring_reduce_scatter(n: int, k: int, in_place: bool) -> Made:
    steps = [(s, r, (r + 1) % n, _shard((r - s - 1) % n, k), True) for s in range(n - 1) for r in range(n)]
    return ReduceScatter(n, chunks=k, in_place=in_place), steps


def ring_all_reduce(n: int, k: int, in_place: bool) -> Made:
    steps = [(s, r, (r + 1) % n, _shard((r - s) % n, k), s < n - 1) for s in range(2 * n - 2) for r in range(n)]
    return AllReduce(n, chunks=n * k, in_place=in_place), steps


def direct_all_to_all(n: int, k: int, in_place: bool) -> Made:
    steps = [(0, r, q, _shard(r * n + q, k), False) for r in range(n) for q in range(n) if r != q]
    return AllToAll(n, chunks=k, in_place=in_place), steps


def shifted_all_to_all(n: int, k: int, in_place: bool) -> Made:
    steps = [(s, r, (r + s) % n, _shard(r * n + (r + s) % n, k), False) for s in range(1, n) for r in range(n)]
    return AllToAll(n, chunks=k, in_place=in_place), steps


def relayed_all_to_all(n: int, k: int, in_place: bool) -> Made:
    """Around the ring: everything that has not arrived goes on, through scratch."""
    steps: list[Step] = []
    for s in range(n - 1):
        for r in range(n):
            origin = (r - s) % n
            far = [c for q in range(n) if (q - origin) % n > s for c in _shard(origin * n + q, k)]
            steps.append((s, r, (r + 1) % n, far, False))
    return AllToAll(n, chunks=k, in_place=in_place), steps


def recursive_doubling_all_reduce(n: int, k: int, in_place: bool) -> Made:
    rounds = n.bit_length() - 1
    steps = [(s, r, r ^ (1 << s), range(k), True) for s in range(rounds) for r in range(n)]
    return AllReduce(n, chunks=k, in_place=in_place), steps


def recursive_doubling_all_gather(n: int, k: int, in_place: bool) -> Made:
    steps: list[Step] = []
    for s in range(n.bit_length() - 1):
        width = 1 << s
        for r in range(n):
            base = r & ~(width - 1)
            steps.append((s, r, r ^ width, range(base * k, (base + width) * k), False))
    return AllGather(n, chunks=k, in_place=in_place), steps


def strided_halving_doubling(n: int, k: int, in_place: bool) -> Made:
    """Low bits first, so that every exchange moves chunks that are not neighbours."""
    rounds = n.bit_length() - 1
    steps: list[Step] = []
    for s in range(rounds):
        for r in range(n):
            peer, mask = r ^ (1 << s), (1 << s) - 1
            sent = [c for c in range(n * k) if c & mask == r & mask and c >> s & 1 == peer >> s & 1]
            steps.append((s, r, peer, sent, True))
    for i, s in enumerate(reversed(range(rounds))):
        for r in range(n):
            mask = (2 << s) - 1
            kept = [c for c in range(n * k) if c & mask == r & mask]
            steps.append((rounds + i, r, r ^ (1 << s), kept, False))
    return AllReduce(n, chunks=n * k, in_place=in_place), steps


def binomial_broadcast(n: int, k: int, in_place: bool) -> Made:
    root, width, s = 1 % n, 1, 0
    steps: list[Step] = []
    while width < n:
        steps += [(s, (v + root) % n, (v + width + root) % n, range(k), False) for v in range(width) if v + width < n]
        width, s = 2 * width, s + 1
    return Broadcast(n, root=root, chunks=k, in_place=in_place), steps


def binomial_reduce(n: int, k: int, in_place: bool) -> Made:
    _, down = binomial_broadcast(n, k, in_place)
    return Reduce(n, root=1 % n, chunks=k, in_place=in_place), [(-s, b, a, c, True) for s, a, b, c, _ in down]


def chain_broadcast(n: int, k: int, in_place: bool) -> Made:
    steps = [(r + j, r, r + 1, [j], False) for r in range(n - 1) for j in range(k)]
    return Broadcast(n, chunks=k, in_place=in_place), steps


def chain_gather(n: int, k: int, in_place: bool) -> Made:
    steps = [(n - r, r, r - 1, range(r * k, n * k), False) for r in range(n - 1, 0, -1)]
    return Gather(n, chunks=k, in_place=in_place), steps


def chain_scatter(n: int, k: int, in_place: bool) -> Made:
    steps = [(r, r - 1, r, range(r * k, n * k), False) for r in range(1, n)]
    return Scatter(n, chunks=k, in_place=in_place), steps


def relay(n: int, k: int, in_place: bool) -> Made:
    """One send over n-2 ranks in between, which keep nothing; chunk by chunk."""
    return Permute(n, [(0, n - 1)], chunks=k), [(r + j, r, r + 1, [j], False) for r in range(n - 1) for j in range(k)]


def unequal_all_to_all(n: int, k: int, in_place: bool) -> Made:
    counts = [[0 if r == q else r + 2 * q for q in range(n)] for r in range(n)]
    pairs = [(r, q) for r in range(n) for q in range(n) if counts[r][q]]
    steps = [(0, r, q, _shard(i, k), False) for i, (r, q) in enumerate(pairs)]
    return AllToAllV(n, counts, chunks=k), steps


MAKERS: dict[str, Maker] = {
    make.__name__: make
    for make in (
        ring_all_gather,
        ring_reduce_scatter,
        ring_all_reduce,
        direct_all_to_all,
        shifted_all_to_all,
        relayed_all_to_all,
        recursive_doubling_all_reduce,
        recursive_doubling_all_gather,
        strided_halving_doubling,
        binomial_broadcast,
        binomial_reduce,
        chain_broadcast,
        chain_gather,
        chain_scatter,
        relay,
        unequal_all_to_all,
    )
}


def build_program(name: str, n: int = 4, *, k: int = 1, in_place: bool = False) -> Program:
    """One of `MAKERS` over n ranks with k chunks per shard."""
    collective, steps = MAKERS[name](n, k, in_place)
    rows = [list(chunks) for _, _, _, chunks, _ in steps]
    return Program.from_steps(
        name,
        collective,
        src=[a for _, a, _, _, _ in steps],
        dst=[b for _, _, b, _, _ in steps],
        chunk=[c for row in rows for c in row],
        chunk_ptr=np.concatenate([[0], np.cumsum([len(row) for row in rows])]),
        step=[s for s, *_ in steps],
        reduce=[add for *_, add in steps],
    )


@pytest.fixture(scope="session")
def build() -> Callable[..., Program]:
    return build_program


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `maker` runs once for each of `MAKERS`."""
    if "maker" in metafunc.fixturenames:
        metafunc.parametrize("maker", list(MAKERS))
