# SPDX-License-Identifier: Apache-2.0
"""Trees that switches copy: the optimum with multicast, reached, counted on the links, and kept by programs."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import stretto as st
from stretto.cluster.model import Link, Node
from stretto.collectives import Collective
from stretto.errors import InvalidInput
from stretto.programs.interpret import check as interpret_and_check
from stretto.synthesis.forest import forests_of, synthesize
from stretto.synthesis.forest_optimum import _least_scale
from stretto.synthesis.forest_trees import Forest, pack_trees


def star(n: int, up: float, down: float, *, multicast: bool = True) -> st.Cluster:
    nodes = [Node(name=f"d{i}") for i in range(n)] + [Node(name="s", kind="switch", multicast=multicast)]
    links = [Link(src=i, dst=n, alpha_us=1.0, gb_per_s=up) for i in range(n)]
    links += [Link(src=n, dst=i, alpha_us=0.5, gb_per_s=down) for i in range(n)]
    return st.Cluster.build("star", nodes=nodes, links=links)


def check(forest: Forest, devices: set[int]) -> None:
    """Every tree spans, casts part where the cluster copies, and no link carries too much."""
    c = forest.cluster
    for bundle, (first, last) in enumerate(pairwise(forest.ptr.tolist())):
        reached = {int(forest.root[bundle])}
        ways: dict[int, list[tuple[int, ...]]] = {}
        for e in range(first, last):
            src, dst = int(forest.src[e]), int(forest.dst[e])
            assert src in reached and dst not in reached and dst < c.num_devices
            reached.add(dst)
            route = forest.routes[forest.route[e]]
            assert (int(c.link_src[route[0]]), int(c.link_dst[route[-1]])) == (src, dst)
            assert all(c.link_dst[a] == c.link_src[b] for a, b in pairwise(route))
            if forest.cast[e] >= 0:
                for other in ways.get(int(forest.cast[e]), []):
                    shared = next(i for i, (a, b) in enumerate(zip(route, other, strict=False)) if a != b)
                    assert shared > 0 and c.node_multicast[c.link_dst[route[shared - 1]]]
                ways.setdefault(int(forest.cast[e]), []).append(route)
        assert reached == devices
        assert all(len(members) > 1 for members in ways.values())
    per_tree = forest.throughput / forest.k
    for link, trees in enumerate(forest.load().tolist()):
        assert trees * per_tree <= Fraction(c.link_gb_per_s[link]).limit_denominator(100_000)


@pytest.mark.parametrize(
    ("n", "up", "down", "plain", "copied"),
    [
        (4, 10.0, 30.0, Fraction(40, 3), Fraction(40)),
        (4, 10.0, 10.0, Fraction(40, 3), Fraction(40, 3)),
        (8, 10.0, 35.0, Fraction(80, 7), Fraction(40)),
        (4, 10.0, 99.0, Fraction(40, 3), Fraction(40)),
        (4, 30.0, 10.0, Fraction(40, 3), Fraction(40, 3)),
    ],
)
def test_a_star_reaches_its_tightest_cut_only_with_multicast(
    n: int, up: float, down: float, plain: Fraction, copied: Fraction
) -> None:
    cluster = star(n, up, down)
    without = pack_trees(cluster, range(n), range(n))
    with_it = pack_trees(cluster, range(n), range(n), multicast=True)
    check(without, set(range(n)))
    check(with_it, set(range(n)))
    assert without.algorithm_gb_per_s == plain and without.exact
    assert with_it.algorithm_gb_per_s == copied and with_it.exact
    for cluster_, best in ((star(n, up, down, multicast=False), plain), (cluster, copied)):
        bound = st.lower_bound(st.AllGather(n), cluster_, nbytes=1e9)
        assert bound.algorithm_gb_per_s == pytest.approx(float(best), rel=1e-9)


def test_a_fork_runs_at_full_rate_if_its_switch_copies() -> None:
    nodes = [Node(name=x) for x in "abc"] + [Node(name="s", kind="switch", multicast=True)]
    ends = [(0, 3), (3, 1), (3, 2), (1, 0), (2, 0)]
    links = [Link(src=a, dst=b, alpha_us=0.0, gb_per_s=1.0) for a, b in ends]
    forest = pack_trees(st.Cluster.build("fork", nodes=nodes, links=links), range(3), [0], multicast=True)
    check(forest, {0, 1, 2})
    assert forest.throughput == forest.optimum == 1
    assert "optimal, multicast" in repr(forest)


@some.composite
def clusters(draw: some.DrawFn) -> st.Cluster:
    devices, switches = draw(some.integers(2, 6)), draw(some.integers(1, 3))
    total = devices + switches
    rate = some.sampled_from([1.0, 2.0, 2.5, 3.0, 7.0])
    chain = draw(some.permutations(range(total)))
    extra = draw(some.lists(some.tuples(some.integers(0, total - 1), some.integers(0, total - 1)), max_size=12))
    links = []
    for a, b in [*pairwise(chain), *extra]:
        if a != b:
            links += [Link(src=x, dst=y, alpha_us=1.0, gb_per_s=draw(rate)) for x, y in ((a, b), (b, a))]
    nodes = [Node(name=f"d{i}") for i in range(devices)]
    nodes += [Node(name=f"s{i}", kind="switch", multicast=draw(some.booleans())) for i in range(switches)]
    return st.Cluster.build("random", nodes=nodes, links=links)


@settings(max_examples=20, deadline=None)
@given(clusters())
def test_multicast_is_never_slower_and_never_beats_its_bounds(cluster: st.Cluster) -> None:
    n = cluster.num_devices
    without = pack_trees(cluster, range(n), range(n))
    with_it = pack_trees(cluster, range(n), range(n), multicast=True)
    check(with_it, set(range(n)))
    assert without.throughput <= with_it.throughput <= with_it.optimum
    bound = st.lower_bound(st.AllGather(n), cluster, nbytes=1e9).algorithm_gb_per_s
    assert float(with_it.throughput * n) <= bound * (1 + 1e-9)
    program = synthesize(st.AllGather(n), cluster, nbytes=1e6, budget_s=0.2, max_transfers=500)
    for contention in ("fifo", "fair"):
        took = st.simulate(program, cluster, nbytes=1e6, contention=contention).total_us
        assert took >= st.lower_bound(st.AllGather(n), cluster, nbytes=1e6).total_us * (1 - 1e-9)


def test_a_message_that_cannot_part_where_it_should_counts_each_time_it_is_sent() -> None:
    """Copies leave the switch that copies by one link and part at one that cannot: no cast is left of them."""
    nodes = [Node(name=f"d{i}") for i in range(3)]
    nodes += [Node(name=f"s{i}", kind="switch", multicast=i == 2) for i in range(3)]
    ends = [(5, 1, 2), (1, 5, 1), (4, 2, 2), (2, 4, 1), (4, 0, 2), (0, 4, 3), (5, 4, 2), (4, 5, 2)]
    links = [Link(src=a, dst=b, alpha_us=1.0, gb_per_s=rate) for a, b, rate in ends]
    check(pack_trees(st.Cluster.build("late", nodes=nodes, links=links), range(3), range(3), multicast=True), {0, 1, 2})


def test_links_that_balancing_has_closed_never_help_a_cut() -> None:
    assert _least_scale(np.array([0, 2]), Fraction(1, 4), 1) == Fraction(1, 2)


COLLECTIVES: list[Callable[[int], Collective]] = [
    st.AllGather, st.AllReduce, st.Broadcast, st.ReduceScatter, lambda n: st.Reduce(n, root=1),
]  # fmt: skip


@pytest.mark.parametrize("make", COLLECTIVES)
def test_programs_are_right_and_use_what_the_cluster_offers(make: Callable[[int], Collective]) -> None:
    cluster = star(4, 10.0, 30.0)
    collective = make(4)
    program = synthesize(collective, cluster, nbytes=1e8, max_transfers=4000)
    copies = collective.kind in ("all_gather", "all_reduce", "broadcast")
    assert program.multicasts == copies and ("multicast" in program.name) == copies
    assert not program.reduce[program.cast >= 0].any()
    lowered = program.lower()
    lowered.verify()
    interpret_and_check(lowered)
    took = st.simulate(program, cluster, nbytes=1e8).total_us
    plain = st.simulate(
        synthesize(collective, cluster, nbytes=1e8, max_transfers=4000, multicast=False), cluster, nbytes=1e8
    ).total_us
    assert took <= plain
    bound = st.lower_bound(collective, cluster, nbytes=1e8).total_us
    assert bound <= took * (1 + 1e-9) <= 1.02 * bound


def test_two_dgx2_reach_the_bound_to_the_last_microsecond() -> None:
    cluster = st.Cluster.load("dgx2_teccl:2+multicast")
    program = synthesize(st.AllGather(32), cluster, nbytes=1e9, max_transfers=20_000)
    took = st.simulate(program, cluster, nbytes=1e9).total_us
    assert took == pytest.approx(st.lower_bound(st.AllGather(32), cluster, nbytes=1e9).total_us, rel=1e-6)


def test_a_fabric_behind_shared_nics_falls_back_to_what_can_be_copied() -> None:
    """The InfiniBand switch would have to send twice into a NIC that cannot copy; NVSwitch has no such trouble."""
    (forest,) = forests_of(st.AllGather(32), st.Cluster.load("dgx2:2+multicast"), max_k=200)
    check(forest, set(range(32)))
    assert forest.exact and (forest.cast >= 0).any()
    first = [forest.routes[r][0] for r in forest.route[forest.cast >= 0]]
    assert {forest.cluster.node_names[n] for n in forest.cluster.link_dst[first]} == {"h0.nvswitch", "h1.nvswitch"}


def test_multicast_is_refused_where_nobody_copies() -> None:
    with pytest.raises(InvalidInput, match="multicast: no switch of dgx2:2 multicasts"):
        forests_of(st.AllGather(32), st.Cluster.load("dgx2:2"), multicast=True)


def test_the_portfolio_finds_it_and_lowers_it() -> None:
    cluster = star(4, 10.0, 30.0)
    found = st.synthesize(st.AllGather(4), cluster, 1e8, budget_s=3.0, cache=False, makers=["forest", "library:ring"])
    assert found.plain.multicasts and found.certificate.gap < 0.001
    lowered = st.synthesize(
        st.AllGather(4), cluster, 1e8, budget_s=3.0, cache=False, makers=["forest", "library:ring"], lower="msccl"
    )
    assert lowered.lowering is not None and lowered.lowering.time_us > 7000, "streams send to each rank by itself"
