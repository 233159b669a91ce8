# SPDX-License-Identifier: Apache-2.0
"""The time-expanded greedy: right on any network, optimal on tori, never ahead of physics."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hst
from patience import patient

from stretto import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Cluster,
    Collective,
    Gather,
    Infeasible,
    InvalidInput,
    Link,
    Node,
    Reduce,
    ReduceScatter,
    Scatter,
    SearchTimeout,
    lower_bound,
    simulate,
)
from stretto.synthesis.greedy import synthesize
from stretto.synthesis.hops import Hops
from stretto.synthesis.quotient import quotient
from stretto.units import GB, MB

MAKERS = {
    "all_gather": lambda n: AllGather(n),
    "reduce_scatter": lambda n: ReduceScatter(n),
    "all_reduce": lambda n: AllReduce(n),
    "all_to_all": lambda n: AllToAll(n),
    "broadcast": lambda n: Broadcast(n, root=1, chunks=3),
    "reduce": lambda n: Reduce(n, root=1, chunks=3),
    "gather": lambda n: Gather(n, root=1),
    "scatter": lambda n: Scatter(n, root=1),
}


@pytest.mark.parametrize("dims", [(4, 4), (5, 6), (6, 8), (8, 8), (3, 3, 3), (4, 4, 4)])
@pytest.mark.parametrize("make", [AllGather, ReduceScatter])
def test_a_torus_takes_the_least_number_of_steps(dims: tuple[int, ...], make: type) -> None:
    torus = Cluster.preset("torus", dims=dims, gb_per_s=50.0, alpha_us=0.5)
    count = int(np.prod(dims))
    program = synthesize(make(count), torus, nbytes=count * MB, alpha="blocking", pieces=[1])
    least = -(-(count - 1) // (2 * len(dims)))
    total = simulate(program, torus, nbytes=count * MB, alpha="blocking").total_us
    assert program.num_transfers == count * (count - 1)
    assert total == pytest.approx(least * (0.5 + MB / 50e3))


def test_without_symmetry_a_torus_takes_few_more_steps() -> None:
    torus = Cluster.preset("torus", dims=(6, 6), gb_per_s=1.0, alpha_us=0.0)
    program = synthesize(AllGather(36), torus, nbytes=36 * MB, pieces=[1], symmetric=False)
    assert simulate(program, torus, nbytes=36 * MB).total_us <= 10 * 1000 + 1e-6


@patient
def test_hosts_on_switches_come_near_the_bound(patience: float) -> None:
    for name, ranks, gap in (("ndv2:2", 16, 1.02), ("ndv2:4", 32, 1.02), ("dgx_a100:4", 32, 1.03)):
        cluster = Cluster.load(name)
        for collective in (AllGather(ranks), ReduceScatter(ranks)):
            program = synthesize(collective, cluster, nbytes=GB, pieces=[8], budget_s=patience)
            bound = lower_bound(collective, cluster, GB).total_us
            assert bound <= simulate(program, cluster, nbytes=GB).total_us <= gap * bound


@patient
def test_all_reduce_takes_no_longer_than_its_halves(patience: float) -> None:
    cluster = Cluster.load("dgx2:2")
    halves = [
        synthesize(c, cluster, nbytes=GB, pieces=[2], budget_s=2 * patience) for c in (AllGather(32), ReduceScatter(32))
    ]
    whole = synthesize(AllReduce(32), cluster, nbytes=GB, pieces=[2], budget_s=4 * patience)
    parts = sum(simulate(half, cluster, nbytes=GB).total_us for half in halves)
    assert simulate(whole, cluster, nbytes=GB).total_us <= parts * 1.01


def test_a_chunk_enters_a_host_once_where_the_network_is_slow() -> None:
    cluster = Cluster.load("ndv2:2")
    program = synthesize(AllGather(16), cluster, nbytes=GB, pieces=[2], budget_s=1)
    crossing = program.src // 8 != program.dst // 8
    assert np.count_nonzero(crossing) == 16 * 2


@pytest.mark.parametrize("kind", MAKERS)
def test_every_collective_is_right_on_one_irregular_host(kind: str) -> None:
    cluster, collective = Cluster.load("ndv2:1"), MAKERS[kind](8)
    program = synthesize(collective, cluster, nbytes=8 * MB, pieces=[1, 2], budget_s=1)
    assert program.collective.kind == kind
    assert simulate(program, cluster, nbytes=8 * MB).total_us >= lower_bound(collective, cluster, 8 * MB).total_us


@hst.composite
def networks(draw: hst.DrawFn) -> Cluster:
    """A random strongly connected network of devices and one switch, with unequal links."""
    count = draw(hst.integers(3, 7))
    rates = hst.sampled_from([1.0, 2.5, 10.0])
    alphas = hst.sampled_from([0.0, 0.7, 5.0])
    nodes = [Node(name=f"d{i}") for i in range(count)] + [Node(name="hub", kind="switch")]
    pairs = {(i, (i + 1) % count) for i in range(count)}
    pairs |= set(draw(hst.lists(hst.tuples(hst.integers(0, count), hst.integers(0, count)), max_size=12)))
    links = [Link(src=a, dst=b, alpha_us=draw(alphas), gb_per_s=draw(rates)) for a, b in sorted(pairs) if a != b]
    return Cluster.build("random", nodes=nodes, links=links)


@settings(max_examples=40, deadline=None)
@given(cluster=networks(), kind=hst.sampled_from(sorted(MAKERS)), alpha=hst.sampled_from(["pipelined", "blocking"]))
def test_random_networks_are_served_rightly_and_not_faster_than_possible(
    cluster: Cluster, kind: str, alpha: str
) -> None:
    collective: Collective = MAKERS[kind](cluster.num_devices)
    program = synthesize(collective, cluster, nbytes=MB, alpha=alpha, pieces=[1, 2], budget_s=0.5)
    program.verify()
    timeline = simulate(program, cluster, nbytes=MB, alpha=alpha)
    assert timeline.total_us >= lower_bound(collective, cluster, MB).total_us * (1 - 1e-9)
    waiter = np.repeat(np.arange(program.num_transfers), np.diff(program.after_ptr))
    assert np.all(timeline.start_us[waiter] >= timeline.end_us[program.after] * (1 - 1e-9))


def test_the_same_seed_gives_the_same_program() -> None:
    cluster = Cluster.load("ndv2:2")
    made = [synthesize(AllGather(16), cluster, nbytes=GB, pieces=[1], seed=3, budget_s=60) for _ in range(2)]
    assert made[0] == made[1]


def test_some_ranks_of_a_cluster_can_take_part() -> None:
    cluster = Cluster.load("dgx2:2")
    program = synthesize(AllGather([1, 4, 9, 20, 31]), cluster, nbytes=MB, budget_s=1)
    assert program.collective.ranks == (1, 4, 9, 20, 31)


def test_a_network_that_does_not_reach_everyone_is_refused() -> None:
    nodes = [Node(name=f"d{i}") for i in range(3)]
    links = [Link(src=0, dst=1, alpha_us=0.0, gb_per_s=1.0), Link(src=1, dst=0, alpha_us=0.0, gb_per_s=1.0)]
    with pytest.raises(Infeasible, match="no hops lead"):
        synthesize(AllGather(3), Cluster.build("split", nodes=nodes, links=links), nbytes=MB)


def test_a_plan_that_takes_longer_than_the_budget_is_given_up() -> None:
    # One plan for 1024 ranks takes many seconds.
    cluster = Cluster.load("dgx2:64")
    with pytest.raises(SearchTimeout, match="one plan for 1024 ranks takes longer than the budget"):
        synthesize(AllGather(1024), cluster, nbytes=GB, budget_s=0.5)


def test_ranks_beyond_the_cluster_are_refused() -> None:
    with pytest.raises(InvalidInput, match="device 8 does not exist"):
        synthesize(AllGather(9), Cluster.load("ndv2:1"), nbytes=MB)


def test_hosts_in_a_circle_are_one_host_in_the_quotient() -> None:
    cluster = Cluster.load("ndv2:4")
    view = quotient(Hops.of(cluster), tuple(range(32)))
    assert (view.local, view.sizes, view.copies) == (8, (4,), 4)
    assert set(np.unique(view.region)) == {0}


def test_unequal_hosts_have_no_symmetry() -> None:
    cluster = Cluster.load("ndv2:2")
    view = quotient(Hops.of(cluster, devices=range(12)), tuple(range(12)))
    assert (view.local, view.copies) == (12, 1)
