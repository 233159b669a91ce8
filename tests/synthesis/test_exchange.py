# SPDX-License-Identifier: Apache-2.0
"""Groups that exchange their sums: right on random networks, and in one diameter where that can be."""

from __future__ import annotations

import random
from itertools import islice

import numpy as np
import pytest

import stretto as st
from stretto.cluster.model import Link, Node
from stretto.errors import Infeasible
from stretto.programs.interpret import check
from stretto.synthesis.exchange import hop_us, join, rail_programs, synthesize


def network(seed: int) -> st.Cluster:
    """A circle of devices with more links at random, and perhaps a switch between some of them."""
    draw = random.Random(seed)
    n = draw.randint(2, 9)
    circle = [(i, (i + 1) % n) for i in range(n)]
    ends = {*circle, *((b, a) for a, b in circle)}
    ends |= {(draw.randrange(n), draw.randrange(n)) for _ in range(draw.randint(0, 8))}
    nodes = [Node(name=f"d{i}", host=i // 3) for i in range(n)]
    links = [(a, b) for a, b in sorted(ends) if a != b]
    if draw.random() < 0.5:
        nodes.append(Node(name="s", kind="switch"))
        some = draw.sample(range(n), draw.randint(2, n))
        links += [(i, n) for i in some] + [(n, i) for i in some]
    made = [
        Link(src=a, dst=b, alpha_us=draw.choice((0.3, 1.0, 2.5)), gb_per_s=draw.choice((1.0, 7.0, 25.0)))
        for a, b in links
    ]
    return st.Cluster.build("random", nodes=nodes, links=made)


@pytest.mark.parametrize("seed", range(20))
def test_programs_are_right_and_never_below_the_bound(seed: int) -> None:
    cluster = network(seed)
    collective = st.AllReduce(cluster.num_devices)
    nbytes = (1.0, 1e3, 1e5)[seed % 3]
    program = synthesize(collective, cluster, nbytes=nbytes, budget_s=0.05, seed=seed)
    program.verify()
    check(program.lower(), fifo_depth=1, op="sum", seed=seed)
    took = st.simulate(program, cluster, nbytes=nbytes).total_us
    assert took >= st.lower_bound(collective, cluster, nbytes).total_us * (1 - 1e-9)


@pytest.mark.parametrize("name", ["torus:4x4", "torus:8x2"])
def test_rows_and_columns_take_one_diameter(name: str) -> None:
    torus = st.Cluster.load(name)
    collective = st.AllReduce(16)
    program = synthesize(collective, torus, nbytes=1e-3, budget_s=0.5)
    bound = st.lower_bound(collective, torus, 1e-3)
    assert st.simulate(program, torus, nbytes=1e-3).total_us == pytest.approx(bound.latency_us, rel=1e-3)


@pytest.mark.parametrize("pair_of_hosts", ["dgx_h100:2", "ndv2:2"])
def test_two_hosts_exchange_shares_of_their_sums_in_one_hop_between_them(pair_of_hosts: str) -> None:
    cluster = st.Cluster.load(pair_of_hosts)
    collective = st.AllReduce(cluster.num_devices)
    hop = hop_us(cluster, collective.ranks, 1e6)
    times = []
    for program in islice(rail_programs(collective, hop, cluster.node_host[: cluster.num_devices]), 3):
        program.verify()
        times.append(st.simulate(program, cluster, nbytes=1e6).total_us)
    assert times == sorted(times, reverse=True)
    check(program.lower(), fifo_depth=1, op="sum", seed=0)


def test_a_line_meets_in_the_middle() -> None:
    ends = [(a, b) for i in range(7) for a, b in ((i, i + 1), (i + 1, i))]
    nodes = [Node(name=f"d{i}") for i in range(8)]
    line = st.Cluster.build(
        "line", nodes=nodes, links=[Link(src=a, dst=b, alpha_us=1.0, gb_per_s=1.0) for a, b in ends]
    )
    program = synthesize(st.AllReduce(8), line, nbytes=1e-3, budget_s=0.5)
    assert st.simulate(program, line, nbytes=1e-3).total_us == pytest.approx(7.0, rel=1e-3)


def test_hops_pass_switches_but_not_devices() -> None:
    nodes = [Node(name="a"), Node(name="b"), Node(name="c"), Node(name="s", kind="switch")]
    ends = [(0, 1), (1, 2), (0, 3), (3, 1)]
    cluster = st.Cluster.build(
        "x", nodes=nodes, links=[Link(src=a, dst=b, alpha_us=1.0, gb_per_s=1.0) for a, b in ends]
    )
    hop = hop_us(cluster, (0, 1, 2), 1e3)
    assert hop[0, 1] == 2.0 and hop[1, 2] == 2.0 and np.isinf(hop[0, 2]) and np.isinf(hop[2]).all()
    assert join([(0,), (1,)], np.zeros(3), hop) is None


def test_what_it_does_not_serve_is_refused() -> None:
    with pytest.raises(Infeasible, match="serves all_reduce"):
        synthesize(st.AllGather(4), st.Cluster.load("ring:4"), nbytes=1e3)
    island = st.Cluster.build(
        "island", nodes=[Node(name="a"), Node(name="b")], links=[Link(src=0, dst=1, alpha_us=1.0, gb_per_s=1.0)]
    )
    with pytest.raises(Infeasible, match="reach each other both ways"):
        synthesize(st.AllReduce(2), island, nbytes=1e3)
