# SPDX-License-Identifier: Apache-2.0
"""Hierarchical composition: right, near the bound, and only for equal hosts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hst

from stretto import (
    GB,
    MB,
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Cluster,
    Collective,
    Infeasible,
    InvalidInput,
    ReduceScatter,
    lower_bound,
    simulate,
)
from stretto.synthesis.compose import host_grid, synthesize

Make = Callable[..., Collective]


@pytest.mark.parametrize("make", [AllGather, ReduceScatter, AllReduce, AllToAll])
@pytest.mark.parametrize(
    ("name", "ranks", "gap"), [("ndv2:2", 16, 1.03), ("dgx2:2", 32, 1.13), ("dgx_a100:4", 32, 1.04)]
)
def test_compositions_come_near_the_bound(make: Make, name: str, ranks: int, gap: float) -> None:
    cluster, collective = Cluster.load(name), make(ranks)
    program = synthesize(collective, cluster, nbytes=GB, pieces=[1, 8], budget_s=10)
    bound = lower_bound(collective, cluster, GB).total_us
    assert program.collective.kind == collective.kind
    assert bound * (1 - 1e-9) <= simulate(program, cluster, nbytes=GB).total_us <= gap * bound


@settings(max_examples=15, deadline=None)
@given(
    hosts=hst.integers(2, 4),
    local=hst.integers(2, 5),
    make=hst.sampled_from([AllGather, ReduceScatter, AllReduce, AllToAll]),
    chunks=hst.integers(1, 2),
    seed=hst.randoms(use_true_random=False),
)
def test_any_ranks_in_equal_numbers_on_hosts_are_served(
    hosts: int, local: int, make: Make, chunks: int, seed: object
) -> None:
    cluster = Cluster.load(f"dgx_a100:{hosts}")
    ranks = [host * 8 + rank for host in range(hosts) for rank in range(local)]
    seed.shuffle(ranks)  # type: ignore[attr-defined]
    cut = chunks * len(ranks) if make is AllReduce else chunks
    program = synthesize(make(ranks, chunks=cut), cluster, nbytes=MB, pieces=[1], budget_s=1)
    program.verify()
    assert program.collective.ranks == tuple(ranks)


def test_each_shard_enters_a_host_once_over_its_own_rail() -> None:
    program = synthesize(AllGather(24), Cluster.load("dgx_a100:3"), nbytes=GB, pieces=[2])
    crossing = program.src // 8 != program.dst // 8
    assert np.array_equal(program.src[crossing] % 8, program.dst[crossing] % 8)
    rows = np.repeat(crossing, np.diff(program.chunk_ptr))
    assert np.count_nonzero(rows) == 24 * 2 * 2


def test_the_table_of_hosts_follows_the_ranks() -> None:
    cluster = Cluster.load("dgx_a100:2")
    assert host_grid(AllGather([9, 0, 8, 1]), cluster).tolist() == [[1, 3], [0, 2]]


@pytest.mark.parametrize(
    ("collective", "reason"),
    [
        (AllGather(8), "at least two hosts"),
        (AllGather(11), "same number of ranks"),
        (AllGather([0, 8]), "at least 2"),
        (Broadcast(16), "broadcast is none of"),
    ],
)
def test_what_cannot_be_composed_is_refused(collective: Collective, reason: str) -> None:
    with pytest.raises(Infeasible, match=reason):
        synthesize(collective, Cluster.load("dgx_a100:2"), nbytes=MB)


def test_devices_without_hosts_are_refused() -> None:
    with pytest.raises(Infeasible, match="at least two hosts"):
        synthesize(AllGather(16), Cluster.load("torus:16"), nbytes=MB)


def test_ranks_beyond_the_cluster_are_refused() -> None:
    with pytest.raises(InvalidInput, match="device 16 does not exist"):
        synthesize(AllGather(17), Cluster.load("dgx_a100:2"), nbytes=MB)
