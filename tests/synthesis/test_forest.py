# SPDX-License-Identifier: Apache-2.0
"""Trees: exactly as many as the tightest cut allows, within the links' rates, and programs that keep that pace."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import stretto as st
from stretto.cluster.model import Link, Node
from stretto.collectives import Collective
from stretto.errors import Infeasible, InvalidInput
from stretto.programs.interpret import check as interpret_and_check
from stretto.synthesis.forest import forests_of, synthesize
from stretto.synthesis.forest_trees import Forest, pack_trees


def check(forest: Forest, devices: set[int]) -> None:
    """Every tree spans, k of them leave each root, routes lead where they should, and no link carries too much."""
    c = forest.cluster
    for bundle, (first, last) in enumerate(pairwise(forest.ptr.tolist())):
        reached = {int(forest.root[bundle])}
        for e in range(first, last):
            src, dst = int(forest.src[e]), int(forest.dst[e])
            assert src in reached and dst not in reached
            reached.add(dst)
            ends = (dst, src) if forest.reverse else (src, dst)
            route = forest.routes[forest.route[e]]
            assert (int(c.link_src[route[0]]), int(c.link_dst[route[-1]])) == ends
            assert all(c.link_dst[a] == c.link_src[b] for a, b in pairwise(route))
        assert reached == devices
    for root in forest.roots:
        assert forest.amount[forest.root == root].sum() == forest.k
    per_tree = forest.throughput / forest.k
    for link, trees in enumerate(forest.load().tolist()):
        assert trees * per_tree <= Fraction(c.link_gb_per_s[link]).limit_denominator(100_000)


def everywhere(name: str, **options: float) -> Forest:
    name, _, nodes = name.partition(":")
    cluster = st.Cluster.preset(name, nodes=int(nodes) if nodes else None, **options)
    devices = range(cluster.num_devices)
    forest = pack_trees(cluster, devices, devices)
    check(forest, set(devices))
    return forest


@pytest.mark.parametrize(
    ("name", "gb_per_s", "k"),
    [
        ("dgx_a100:1", Fraction(2400, 7), 1),
        ("dgx_a100:2", Fraction(1040, 3), 13),
        ("dgx_a100:4", Fraction(800, 3), 1),
        ("dgx_a100:8", Fraction(1600, 7), 1),
        ("mi250:1", Fraction(2400, 7), 3),
        ("mi250:2", Fraction(5312, 15), 83),
        ("mi250:4", Fraction(1024, 3), 3),
        ("ndv2_teccl:2", Fraction(25), 1),
        ("dgx2_teccl:2", Fraction(4000, 31), 1),
    ],
)
def test_published_optima_are_reached_exactly(name: str, gb_per_s: Fraction, k: int) -> None:
    forest = everywhere(name)
    assert forest.algorithm_gb_per_s == gb_per_s
    assert forest.exact
    assert forest.k == k


@pytest.mark.parametrize("side", [6, 8, 10])
def test_unit_tori_reach_four_links_per_device_with_trees_no_higher_than_the_torus_is_wide(side: int) -> None:
    forest = everywhere(f"torus:{side * side}", gb_per_s=1.0)
    assert forest.algorithm_gb_per_s == Fraction(4 * side * side, side * side - 1)
    assert forest.k == 4
    assert forest.height == side


def test_the_optimum_is_the_independent_lower_bound() -> None:
    for name in ("dgx_a100:2", "mi250:1", "ndv2:2", "dgx2:2", "p3_8xlarge:2"):
        cluster = st.Cluster.load(name)
        n = cluster.num_devices
        for collective in (st.AllGather(n), st.ReduceScatter(n), st.Broadcast(n, root=1), st.Reduce(n, root=2)):
            (forest,) = forests_of(collective, cluster)
            check(forest, set(range(n)))
            bound = st.lower_bound(collective, cluster, nbytes=1e9)
            assert float(forest.optimum * len(forest.roots)) == pytest.approx(bound.algorithm_gb_per_s, rel=1e-9)
            assert forest.exact or not bound.exact


@some.composite
def clusters(draw: some.DrawFn, *, symmetric: bool) -> st.Cluster:
    devices, switches = draw(some.integers(2, 6)), draw(some.integers(0, 3))
    total = devices + switches
    rate = some.sampled_from([1.0, 2.0, 2.5, 3.0, 7.0, 12.5])
    # A path through all nodes (and back) keeps it connected.
    pairs = draw(some.permutations(range(total)))
    ends = [*pairwise(pairs), *draw(some.lists(some.tuples(some.integers(0, total - 1), some.integers(0, total - 1))))]
    links = []
    for a, b in ends[:24]:
        if a == b:
            continue
        there = draw(rate)
        back = there if symmetric else draw(rate)
        links += [Link(src=a, dst=b, alpha_us=1.0, gb_per_s=there), Link(src=b, dst=a, alpha_us=1.0, gb_per_s=back)]
    kinds = ["device"] * devices + ["switch"] * switches
    return st.Cluster.build(
        "random", nodes=[Node(name=f"n{i}", kind=kind) for i, kind in enumerate(kinds)], links=links
    )


@settings(max_examples=60, deadline=None)
@given(clusters(symmetric=True), some.booleans())
def test_random_networks_with_balanced_switches_reach_their_tightest_cut(cluster: st.Cluster, reverse: bool) -> None:
    n = cluster.num_devices
    forest = pack_trees(cluster, range(n), range(n), reverse=reverse)
    check(forest, set(range(n)))
    bound = st.lower_bound(st.ReduceScatter(n) if reverse else st.AllGather(n), cluster, nbytes=1e9)
    assert bound.exact and forest.exact
    assert float(forest.algorithm_gb_per_s) == pytest.approx(bound.algorithm_gb_per_s, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(clusters(symmetric=False))
def test_random_networks_with_unequal_switches_are_packed(cluster: st.Cluster) -> None:
    n = cluster.num_devices
    forest = pack_trees(cluster, range(n), range(n))
    check(forest, set(range(n)))
    bound = st.lower_bound(st.AllGather(n), cluster, nbytes=1e9)
    assert float(forest.optimum * n) == pytest.approx(bound.algorithm_gb_per_s, rel=1e-6)
    assert forest.throughput >= forest.optimum * Fraction(99, 100)


def fork() -> st.Cluster:
    nodes = [Node(name=x) for x in "abc"] + [Node(name="s", kind="switch")]
    ends = [(0, 3), (3, 1), (3, 2), (1, 0), (2, 0)]
    links = [Link(src=a, dst=b, alpha_us=0.0, gb_per_s=1.0) for a, b in ends]
    return st.Cluster.build("fork", nodes=nodes, links=links)


def test_a_switch_that_would_have_to_multicast_halves_the_rate() -> None:
    forest = pack_trees(fork(), range(3), [0])
    check(forest, {0, 1, 2})
    copying = fork().with_multicast()
    assert st.lower_bound(st.Broadcast(3), copying, nbytes=1e9).algorithm_gb_per_s == pytest.approx(1.0)
    assert st.lower_bound(st.Broadcast(3), fork(), nbytes=1e9).algorithm_gb_per_s == pytest.approx(0.5)
    assert forest.throughput == forest.optimum == Fraction(1, 2)


def test_a_bound_on_k_costs_little_and_is_said() -> None:
    cluster = st.Cluster.preset("mi250", nodes=2)
    forest = pack_trees(cluster, range(32), range(32), max_k=8)
    check(forest, set(range(32)))
    assert forest.k <= 8 and not forest.exact
    assert forest.throughput > forest.optimum * Fraction(95, 100)
    assert "of the optimum" in repr(forest)


def test_height_is_bounded_when_asked_and_refused_when_impossible() -> None:
    ring = st.Cluster.preset("ring", nodes=8)
    with pytest.raises(Infeasible, match="max_height: no trees of height 3"):
        forests_of(st.AllGather(8), ring, max_height=3)
    (forest,) = forests_of(st.AllGather(8), ring, max_height=7)
    assert forest.height <= 7


def test_ranks_may_be_some_of_the_devices() -> None:
    cluster = st.Cluster.preset("dgx_a100", nodes=2)
    some_ranks = (1, 2, 5, 8, 11)
    program = synthesize(st.AllGather(some_ranks), cluster, nbytes=1e8)
    bound = st.lower_bound(st.AllGather(some_ranks), cluster, nbytes=1e8)
    assert st.simulate(program, cluster, nbytes=1e8).total_us >= bound.total_us


COLLECTIVES: list[Callable[[int], Collective]] = [
    st.AllGather, st.ReduceScatter, st.AllReduce, st.Broadcast, lambda n: st.Reduce(n, root=1),
]  # fmt: skip


@pytest.mark.parametrize("make", COLLECTIVES)
@pytest.mark.parametrize("name", ["ring", "torus", "dgx_a100", "ndv2_teccl:2"])
def test_programs_keep_the_pace_of_their_trees(name: str, make: Callable[[int], Collective]) -> None:
    cluster = st.Cluster.load(name)
    collective = make(cluster.num_devices)
    program = synthesize(collective, cluster, nbytes=1e9, max_transfers=30_000, budget_s=600)
    assert program.collective.kind == collective.kind
    assert program.name.startswith("forest(k=")
    took = st.simulate(program, cluster, nbytes=1e9).total_us
    bound = st.lower_bound(collective, cluster, nbytes=1e9).total_us
    assert bound <= took * (1 + 1e-9) <= bound * 1.03


@pytest.mark.parametrize("name", ["dgx2_teccl:2", "dgx_a100:2"])
def test_all_gather_keeps_the_pace_on_two_boxes(name: str) -> None:
    cluster = st.Cluster.load(name)
    collective = st.AllGather(cluster.num_devices)
    program = synthesize(collective, cluster, nbytes=1e9, max_transfers=260_000, budget_s=600)
    took = st.simulate(program, cluster, nbytes=1e9).total_us
    assert took <= 1.03 * st.lower_bound(collective, cluster, nbytes=1e9).total_us


def test_progress_is_told_and_options_are_checked() -> None:
    said: list[tuple[str, float]] = []
    ring = st.Cluster.preset("ring", nodes=4)
    synthesize(st.AllGather(4), ring, nbytes=1e6, progress=lambda text, share: said.append((text, share)))
    assert said[0] == ("packing trees", 0.0) and all(0 <= share <= 1 for _, share in said)
    with pytest.raises(InvalidInput, match="max_k: must be >= 1"):
        synthesize(st.AllGather(4), ring, nbytes=1e6, max_k=0)
    with pytest.raises(Infeasible, match="trees serve all_gather"):
        synthesize(st.AllToAll(4), ring, nbytes=1e6)


def test_a_device_that_cannot_be_reached_is_named() -> None:
    nodes = [Node(name=x) for x in "abc"]
    links = [Link(src=0, dst=1, alpha_us=0.0, gb_per_s=1.0), Link(src=1, dst=0, alpha_us=0.0, gb_per_s=1.0)]
    links.append(Link(src=2, dst=0, alpha_us=0.0, gb_per_s=1.0))
    with pytest.raises(Infeasible, match="no link leads to c"):
        forests_of(st.AllGather(3), st.Cluster.build("split", nodes=nodes, links=links))


def test_programs_can_be_lowered_and_interpreted() -> None:
    cluster = st.Cluster.load("ndv2_teccl:2")
    program = synthesize(st.AllReduce(16), cluster, nbytes=1e6, max_transfers=2000)
    lowered = program.lower()
    lowered.verify()
    interpret_and_check(lowered)
