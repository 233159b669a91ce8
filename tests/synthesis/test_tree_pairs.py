# SPDX-License-Identifier: Apache-2.0
"""Pairs of trees: the best total rate by an independent linear program, and programs that keep near to the bound."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

import stretto as st
from stretto.cluster.model import Link, Node
from stretto.errors import Infeasible
from stretto.programs.interpret import check as interpret_and_check
from stretto.solvers.linear import LinearProgram
from stretto.synthesis.tree_pair_latency import quickest_pairs, shortest_pairs
from stretto.synthesis.tree_pair_packing import TreePair, cheapest_pairs, pack_tree_pairs
from stretto.synthesis.tree_pairs import piece_sends, synthesize


@some.composite
def digraphs(draw: some.DrawFn) -> st.Cluster:
    """Devices on direct links, and perhaps one switch with unequal ports."""
    devices = draw(some.integers(2, 6))
    rate = some.sampled_from([1.0, 2.0, 2.5, 3.0, 7.0, 12.5])
    circle = draw(some.permutations(range(devices)))
    ends = {*pairwise([*circle, circle[0]])}
    ends |= set(draw(some.lists(some.tuples(some.integers(0, devices - 1), some.integers(0, devices - 1)), max_size=8)))
    links = [Link(src=a, dst=b, alpha_us=1.0, gb_per_s=draw(rate)) for a, b in sorted(ends) if a != b]
    nodes = [Node(name=f"d{i}") for i in range(devices)]
    if draw(some.booleans()):
        nodes.append(Node(name="s", kind="switch"))
        for port in range(devices):
            links += [
                Link(src=a, dst=b, alpha_us=0.5, gb_per_s=draw(rate)) for a, b in ((port, devices), (devices, port))
            ]
    return st.Cluster.build("random", nodes=nodes, links=links)


def best_rate(cluster: st.Cluster) -> float:
    """The best rate by Edmonds' theorem, with flows instead of trees.

    Root v gets a share; each link is divided into a part that spreads and a part that reduces. Trees of these rates
    exist if the whole rate flows from the shares to every device over the first part, and from every device to the
    shares over the second. A switch hands on what it gets in each part.
    """
    links, n = cluster.num_links, cluster.num_devices
    columns = n + 2 * links + 2 * n * links + 1
    share, spread, reduce = 0, n, n + links
    rate = columns - 1
    rows: list[tuple[float, float, dict[int, float]]] = []

    def flow(part: int, terminal: int) -> int:
        return n + 2 * links + (part * n + terminal) * links

    for link in range(links):
        rows.append((-np.inf, float(cluster.link_gb_per_s[link]), {spread + link: 1.0, reduce + link: 1.0}))
    for node in range(n, cluster.num_nodes):
        for part in (spread, reduce):
            balance: dict[int, float] = {}
            for link in range(links):
                sign = float(cluster.link_dst[link] == node) - float(cluster.link_src[link] == node)
                if sign:
                    balance[part + link] = sign
            rows.append((0.0, 0.0, balance))
    rows.append((0.0, 0.0, {rate: 1.0, **{share + v: -1.0 for v in range(n)}}))
    for part, capacity in enumerate((spread, reduce)):
        for terminal in range(n):
            first = flow(part, terminal)
            rows += [(-np.inf, 0.0, {first + link: 1.0, capacity + link: -1.0}) for link in range(links)]
            for node in range(cluster.num_nodes):
                net: dict[int, float] = {}
                for link in range(links):
                    sign = float(cluster.link_dst[link] == node) - float(cluster.link_src[link] == node)
                    if sign:
                        net[first + link] = sign if part == 0 else -sign
                if node < n:
                    net[share + node] = 1.0
                if node == terminal:
                    net[rate] = -1.0
                rows.append((0.0, 0.0, net))
    return solved(columns, rate, rows)


def solved(columns: int, wanted: int, rows: Iterable[tuple[float, float, dict[int, float]]]) -> float:
    model = LinearProgram(maximize=True)
    for column in range(columns):
        model.column(cost=float(column == wanted))
    for low, high, row in rows:
        model.row(list(row), list(row.values()), lower=low, upper=high)
    return model.solve().objective


def check_pair(cluster: st.Cluster, pair: TreePair, n: int) -> None:
    """Both trees reach every rank, and routes lead from rank to rank."""
    for parents, routes, up in ((pair.gather, pair.gather_route, True), (pair.spread, pair.spread_route, False)):
        for rank in range(n):
            at, steps = rank, 0
            while at != pair.root:
                at, steps = parents[at], steps + 1
                assert steps <= n
            if rank != pair.root:
                ends = (rank, parents[rank]) if up else (parents[rank], rank)
                route = routes[rank]
                assert (int(cluster.link_src[route[0]]), int(cluster.link_dst[route[-1]])) == ends
                assert all(cluster.link_dst[a] == cluster.link_src[b] for a, b in pairwise(route))


@settings(max_examples=60, deadline=None)
@given(digraphs())
def test_random_networks_are_packed_at_the_best_rate(cluster: st.Cluster) -> None:
    n = cluster.num_devices
    packing = pack_tree_pairs(cluster, tuple(range(n)), close=1e-6)
    load = np.zeros(cluster.num_links)
    for pair in packing.pairs:
        check_pair(cluster, pair, n)
        load += pair.gb_per_s * pair.load(cluster.num_links)
    assert np.all(load <= cluster.link_gb_per_s * (1 + 1e-6))
    assert packing.gb_per_s <= packing.limit_gb_per_s * (1 + 1e-9)
    assert packing.gb_per_s == pytest.approx(best_rate(cluster), rel=1e-4)


@settings(max_examples=15, deadline=None)
@given(digraphs(), some.sampled_from([1e3, 1e6, 1e8]), some.sampled_from(["pipelined", "blocking"]))
def test_programs_are_right_and_never_below_the_bound(cluster: st.Cluster, nbytes: float, alpha: str) -> None:
    collective = st.AllReduce(cluster.num_devices)
    program = synthesize(collective, cluster, nbytes=nbytes, alpha=alpha, max_transfers=600)
    interpret_and_check(program.lower())
    took = st.simulate(program, cluster, nbytes=nbytes, alpha=alpha).total_us
    assert took >= st.lower_bound(collective, cluster, nbytes=nbytes).total_us * (1 - 1e-9)


def unequal_star() -> st.Cluster:
    ports = [(10.0, 25.0), (25.0, 10.0), (40.0, 50.0), (12.0, 40.0), (50.0, 12.0), (25.0, 20.0)]
    nodes = [Node(name=f"d{i}") for i in range(len(ports))] + [Node(name="s", kind="switch")]
    links = []
    for port, (up, down) in enumerate(ports):
        links += [Link(src=port, dst=len(ports), alpha_us=0.5, gb_per_s=up)]
        links += [Link(src=len(ports), dst=port, alpha_us=0.5, gb_per_s=down)]
    return st.Cluster.build("star", nodes=nodes, links=links)


def test_unequal_ports_come_near_the_bound_where_equal_shares_cannot() -> None:
    cluster = unequal_star()
    program = synthesize(st.AllReduce(6), cluster, nbytes=256e6, budget_s=600, max_transfers=50_000)
    bound = st.lower_bound(st.AllReduce(6), cluster, nbytes=256e6).total_us
    # Each rank the root of a sixth of the data: the slowest port carries 2 x 5/6 of it.
    assert st.simulate(program, cluster, nbytes=256e6).total_us < 1.05 * bound < 2 * 5 / 6 * bound


@settings(max_examples=30, deadline=None)
@given(digraphs(), some.sampled_from([1.0, 1e3, 1e5, 1e8]))
def test_pairs_for_a_size_fit_the_links_and_weigh_latency_against_rate(cluster: st.Cluster, nbytes: float) -> None:
    ranks = tuple(range(cluster.num_devices))
    packing = pack_tree_pairs(cluster, ranks)
    took, pairs = quickest_pairs(cluster, ranks, nbytes, packing)
    load = sum((pair.load(cluster.num_links) * pair.gb_per_s for pair in pairs), np.zeros(cluster.num_links))
    assert (load <= cluster.link_gb_per_s * (1 + 1e-6)).all()
    assert took >= st.lower_bound(st.AllReduce(cluster.num_devices), cluster, nbytes).total_us * (1 - 1e-6)
    late = [pair.latency_us(cluster.link_alpha_us) for pair in packing.pairs]
    rates = [pair.gb_per_s * 1e3 for pair in packing.pairs]
    by_rate = (nbytes + float(np.dot(rates, late))) / sum(rates)
    assert took <= by_rate * (1 + 1e-6)


@settings(max_examples=60, deadline=None)
@given(digraphs(), some.data())
def test_shortest_pairs_are_trees_at_any_prices(cluster: st.Cluster, data: some.DataObject) -> None:
    """Links may cost nothing, or less than what rounding loses beside others."""
    prices = some.sampled_from([0.0, 1e-20, 1.0, 5.0])
    price = np.array([data.draw(prices) for _ in range(len(cluster.link_src))])
    ranks = tuple(range(cluster.num_devices))
    _, cheapest = cheapest_pairs(cluster, ranks, price)
    for pair in shortest_pairs(cheapest, price):
        for parent in (pair.gather, pair.spread):
            for rank in ranks:
                for _ in ranks:
                    rank = parent[rank] if parent[rank] >= 0 else rank
                assert rank == pair.root


def test_links_without_latency_do_not_keep_the_search_for_ever() -> None:
    """Two described hosts, whose links between GPUs and NICs take no time: pairs of trees went in circles there."""
    cluster = st.Cluster.load("hosts: 2, gpus: 4 x a100, network: 2 x 100gbit")
    program = synthesize(st.AllReduce(8), cluster, nbytes=1e6, budget_s=2.0)
    program.verify()


@settings(max_examples=20, deadline=None)
@given(digraphs())
def test_the_latency_of_a_pair_is_what_a_byte_takes(cluster: st.Cluster) -> None:
    ranks = tuple(range(cluster.num_devices))
    _, pairs = quickest_pairs(cluster, ranks, 1.0, pack_tree_pairs(cluster, ranks))
    for pair in pairs:
        one = piece_sends(st.AllReduce(cluster.num_devices), cluster, [pair], 1).program
        took = st.simulate(one, cluster, nbytes=1e-6).total_us
        assert took == pytest.approx(pair.latency_us(cluster.link_alpha_us), abs=1e-6)


def test_pieces_are_shared_by_rates() -> None:
    cluster = unequal_star()
    packing = pack_tree_pairs(cluster, tuple(range(6)))
    sends = piece_sends(st.AllReduce(6), cluster, list(packing.pairs), 600)
    assert sends.program.num_transfers == 600 * 10
    sends.program.verify()
    load = np.zeros(cluster.num_links)
    for route in sends.program.route:
        load[list(sends.program.routes[route])] += 1 / 600
    assert np.max(load / cluster.link_gb_per_s) == pytest.approx(1 / packing.gb_per_s, rel=0.02)


def test_what_it_does_not_serve_is_refused() -> None:
    ring = st.Cluster.preset("ring", nodes=4)
    with pytest.raises(Infeasible, match="serves all_reduce"):
        synthesize(st.AllGather(4), ring, nbytes=1e6)
    lonely = st.Cluster.build(
        "lonely",
        nodes=[Node(name="a"), Node(name="b")],
        links=[Link(src=0, dst=1, alpha_us=1.0, gb_per_s=1.0)],
    )
    with pytest.raises(Infeasible, match="does not reach"):
        pack_tree_pairs(lonely, (0, 1))


def test_some_ranks_of_a_cluster_can_take_part() -> None:
    cluster = st.Cluster.preset("torus", nodes=16)
    program = synthesize(st.AllReduce((0, 1, 5, 6)), cluster, nbytes=1e6, max_transfers=2000)
    interpret_and_check(program.lower())


@given(cluster=digraphs(), nbytes=some.sampled_from([1e5, 1e6, 64e6]))
@settings(max_examples=30, deadline=None)
def test_calm_pairs_fit_the_links_and_take_hardly_longer(cluster: st.Cluster, nbytes: float) -> None:
    ranks = tuple(range(cluster.num_devices))
    packing = pack_tree_pairs(cluster, ranks)
    took, _ = quickest_pairs(cluster, ranks, nbytes, packing)
    longer, calm = quickest_pairs(cluster, ranks, nbytes, packing, calm=True)
    assert took <= longer <= took * 1.0011
    load = np.sum([pair.gb_per_s * pair.load(cluster.num_links) for pair in calm], axis=0)
    assert (load <= cluster.link_gb_per_s * (1 + 1e-3)).all()
    moved = sum(pair.gb_per_s for pair in calm)
    assert moved * 1e3 * longer >= nbytes * (1 - 1e-3)


def test_on_unequal_ports_calm_pairs_keep_fewer_links_busy() -> None:
    ports = [(10.0, 50.0), (25.0, 10.0), (40.0, 12.0), (50.0, 25.0), (12.0, 40.0), (20.0, 50.0), (50.0, 20.0)]
    links = [Link(src=k, dst=7, alpha_us=0.5, gb_per_s=up) for k, (up, _) in enumerate(ports)]
    links += [Link(src=7, dst=k, alpha_us=0.5, gb_per_s=down) for k, (_, down) in enumerate(ports)]
    nodes = [*(Node(name=f"d{k}") for k in range(7)), Node(name="s", kind="switch")]
    star = st.Cluster.build("star", nodes=nodes, links=links)
    packing = pack_tree_pairs(star, tuple(range(7)))

    def full(calm: bool) -> int:
        pairs = quickest_pairs(star, tuple(range(7)), 1e6, packing, calm=calm)[1]
        load = np.sum([pair.gb_per_s * pair.load(star.num_links) for pair in pairs], axis=0)
        return int((load > 0.985 * star.link_gb_per_s).sum())

    assert full(calm=True) < full(calm=False)


def test_with_little_time_it_is_asked_before_makers_that_take_longer() -> None:
    from stretto.synthesis.makers import plan_tasks
    from stretto.synthesis.problem import SynthesisProblem

    problem = SynthesisProblem(collective=st.AllReduce(16), cluster=st.Cluster.load("dgx_h100:2"), nbytes=1e6)
    asked = [task.maker for task in plan_tasks(problem, None)[0] if task.maker != "library"]
    assert asked.index("tree_pairs") < min(asked.index(name) for name in ("compose", "greedy", "forest", "three_stage"))
