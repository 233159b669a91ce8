# SPDX-License-Identifier: Apache-2.0
"""Inverses, refinement and all-reduce from two halves."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs

import stretto as st
from stretto.programs import Program
from stretto.synthesis.combine import (
    all_reduce_from,
    inverse,
    like,
    refine,
    reversed_cluster,
)
from stretto.synthesis.hops import Hops
from stretto.synthesis.pacing import paced
from stretto.synthesis.schedule import program_from_schedule


def lopsided(seed: int, devices: int = 6) -> st.Cluster:
    """A random connected network with a switch, whose links differ by direction."""
    rng = np.random.default_rng(seed)
    nodes = [st.Node(name=f"d{i}") for i in range(devices)] + [st.Node(name="sw", kind="switch")]
    pairs = {(i, (i + 1) % devices) for i in range(devices)}
    pairs |= {(int(a), int(b)) for a, b in rng.integers(0, devices, (devices, 2)) if a != b}
    pairs |= {(i, devices) for i in range(devices)} | {(devices, i) for i in range(devices)}
    links = [
        st.Link(src=a, dst=b, alpha_us=float(rng.uniform(0.1, 2)), gb_per_s=float(rng.uniform(5, 50)))
        for a, b in sorted(pairs)
    ]
    return st.Cluster.build(f"lopsided{seed}", nodes=nodes, links=links)


def random_trees(cluster: st.Cluster, chunks: int, seed: int) -> Program:
    """An all-gather along random spanning trees with named routes."""
    rng = np.random.default_rng(seed)
    n = cluster.num_devices
    hops = Hops.of(cluster)
    start, src, dst, moved, routes = [], [], [], [], []
    for chunk in range(n * chunks):
        has = [chunk // chunks]
        while len(has) < n:
            out = [h for h in range(hops.num_hops) if hops.src[h] in has and hops.dst[h] not in has]
            h = int(rng.choice(out))
            start.append(float(len(has)))
            src.append(int(hops.src[h]))
            dst.append(int(hops.dst[h]))
            moved.append([chunk])
            routes.append(hops.route(h))
            has.append(int(hops.dst[h]))
    return program_from_schedule(
        "trees", st.AllGather(n, chunks=chunks), cluster, start_us=start, src=src, dst=dst, chunks=moved, routes=routes
    )


@pytest.mark.parametrize("name", ["ring", "bruck", "direct", "halving_doubling"])
@pytest.mark.parametrize("spec", ["ndv2:1", "dgx2:1"])
def test_library_all_gathers_invert_and_combine(spec: str, name: str) -> None:
    cluster = st.Cluster.load(spec)
    gather = st.algorithm(name, "all_gather", cluster.num_devices, cluster=cluster)
    scatter = inverse(gather, cluster)
    both = all_reduce_from(scatter, gather, cluster)
    assert scatter.collective == st.ReduceScatter(cluster.num_devices)
    assert both.collective == st.AllReduce(cluster.num_devices)
    times = [st.simulate(p, cluster, nbytes=64 * st.MB).total_us for p in (scatter, gather, both)]
    assert times[2] <= times[0] + times[1] + 1e-6
    for program in (scatter, both):
        program.verify()


@settings(max_examples=15, deadline=None)
@given(seed=hs.integers(0, 10**6), first=hs.integers(1, 3), second=hs.integers(1, 3))
def test_random_trees_on_lopsided_networks(seed: int, first: int, second: int) -> None:
    cluster = lopsided(seed)
    back = reversed_cluster(cluster)
    mirrored = random_trees(back, first, seed)
    scatter = inverse(mirrored, cluster, nbytes=6 * st.MB)
    scatter.verify()
    assert scatter.num_transfers == mirrored.num_transfers
    # The same links carry the same bytes, each in the other direction.
    there = st.simulate(mirrored, back, nbytes=6 * st.MB)
    here = st.simulate(scatter, cluster, nbytes=6 * st.MB)
    np.testing.assert_allclose(here.link_bytes, there.link_bytes)
    both = all_reduce_from(scatter, random_trees(cluster, second, seed + 1), cluster, nbytes=6 * st.MB)
    both.verify()
    assert both.collective == st.AllReduce(6, chunks=6 * math.lcm(first, second))


def test_a_program_routed_on_the_cluster_itself_takes_the_links_back() -> None:
    cluster = st.Cluster.load("ndv2:1")
    gather = random_trees(cluster, 1, 3)
    scatter = inverse(gather, cluster)
    assert scatter.routes_digest == cluster.digest
    assert st.simulate(scatter, cluster, nbytes=8 * st.MB).total_us > 0


def test_one_way_links_cannot_be_taken_back() -> None:
    links = [st.Link(src=i, dst=(i + 1) % 3, alpha_us=1, gb_per_s=10) for i in range(3)]
    cluster = st.Cluster.build("one way", nodes=[st.Node(name=f"d{i}") for i in range(3)], links=links)
    gather = random_trees(cluster, 1, 0)
    with pytest.raises(st.Infeasible, match="no link leads back along d0>d1"):
        inverse(gather, cluster)
    inverse(random_trees(reversed_cluster(cluster), 1, 0), cluster).verify()


def test_routes_of_a_third_cluster_are_refused() -> None:
    gather = random_trees(lopsided(1), 1, 0)
    with pytest.raises(st.InvalidInput, match="routed on another cluster"):
        inverse(gather, lopsided(2))


def test_reversing_twice_gives_the_same_links() -> None:
    cluster = lopsided(5)
    twice = reversed_cluster(reversed_cluster(cluster))
    assert list(twice.links()) == list(cluster.links())


@pytest.mark.parametrize("kind", ["broadcast", "scatter", "gather", "reduce", "all_to_all", "reduce_scatter"])
def test_every_collective_with_an_inverse_inverts_and_comes_back(kind: str) -> None:
    cluster = st.Cluster.load("dgx2:1")
    names = [a.name for a in st.algorithms.algorithms(kind)]
    name = next(n for n in ("binomial", "pairwise", "ring", "direct") if n in names)
    program = st.algorithm(name, kind, 16, chunks=2)
    back = inverse(program, cluster)
    back.verify()
    again = inverse(back, cluster)
    again.verify()
    assert again.collective == program.collective


def test_broadcast_becomes_reduce_and_both_an_all_reduce() -> None:
    cluster = st.Cluster.load("ring:8")
    tree = st.algorithm("chain", "broadcast", 8, root=3, chunks=4)
    reduce = inverse(tree, cluster)
    assert reduce.collective == st.Reduce(8, root=3, chunks=4)
    both = all_reduce_from(reduce, tree, cluster)
    assert both.collective == st.AllReduce(8, chunks=4)
    parts = [st.simulate(p, cluster, nbytes=64 * st.MB).total_us for p in (reduce, tree, both)]
    assert parts[2] < 0.95 * (parts[0] + parts[1])


def test_deliveries_that_nobody_needs_are_left_out_of_the_inverse() -> None:
    twice = Program.from_steps(
        "twice", st.AllGather(3), src=[0, 1, 2, 0, 1, 2, 0], dst=[1, 2, 0, 2, 0, 1, 1], chunk=[0, 1, 2, 0, 1, 2, 2],
        step=[0, 0, 0, 1, 1, 1, 2],
    )  # fmt: skip
    twice.verify()
    assert inverse(twice, st.Cluster.load("ring:3")).num_transfers == 6


def test_refine_cuts_chunks_and_keeps_messages_whole_if_told() -> None:
    ring = st.algorithm("ring", "reduce_scatter", 4, chunks=2)
    whole, split = refine(ring, 3, split=False), refine(ring, 3)
    for program in (whole, split):
        assert program.collective == st.ReduceScatter(4, chunks=6) == like(ring.collective, chunks=6)
        program.verify()
    assert (whole.num_transfers, split.num_transfers) == (ring.num_transfers, 3 * ring.num_transfers)


def test_halves_that_do_not_fit_are_refused() -> None:
    cluster = st.Cluster.load("ring:4")
    gather = st.algorithm("ring", "all_gather", 4)
    with pytest.raises(st.InvalidInput, match="reduce_scatter and all_gather"):
        all_reduce_from(gather, gather, cluster)
    with pytest.raises(st.InvalidInput, match="all_reduce has none"):
        inverse(st.algorithm("ring", "all_reduce", 4), cluster)
    other = st.algorithm("ring", "reduce_scatter", [1, 0, 2, 3])
    with pytest.raises(st.InvalidInput, match="same ranks"):
        all_reduce_from(other, gather, cluster)


def test_holding_back_lets_a_relayed_message_take_its_planned_turn() -> None:
    # Rank 0 has two messages of its own for the port, and between them relays one that rank 1 sends it.
    nodes = [st.Node(name=f"d{i}") for i in range(3)] + [st.Node(name="sw", kind="switch")]
    links = [st.Link(src=a, dst=b, alpha_us=0, gb_per_s=1) for i in range(3) for a, b in ((i, 3), (3, i))]
    cluster = st.Cluster.build("box", nodes=nodes, links=links)
    plain = Program.from_steps(
        "relay", st.AllGather(3), src=[1, 0, 2, 0, 0, 2], dst=[0, 1, 0, 2, 2, 1], chunk=[1, 0, 2, 1, 0, 2],
        step=range(6), lane=[0, 0, 0, 0, 1, 0],
    )  # fmt: skip
    start, end = [0, 0, 1, 1, 2, 2], [1, 1, 2, 2, 3, 3]
    held = paced(plain, start, end)
    held.verify()
    assert held.after_of(4).tolist() == [2]
    times = [st.simulate(p, cluster, nbytes=3e3) for p in (plain, held)]
    assert times[0].start_us[4] < times[0].start_us[3]
    assert times[1].start_us[3:].tolist() == start[3:]
