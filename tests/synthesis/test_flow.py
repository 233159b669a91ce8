# SPDX-License-Identifier: Apache-2.0
"""All-to-all by flow: paths at the bound of the concurrent flow, messages that carry everything, programs near it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st_
from patience import patient

import stretto as st
from stretto import _native
from stretto.cluster.model import Link, Node
from stretto.collectives import Collective
from stretto.errors import Infeasible
from stretto.synthesis import flow
from stretto.synthesis.flow_order import Planner, messages_of
from stretto.synthesis.flow_routes import gather, refined, route, traffic_of


@st_.composite
def clusters(draw: st_.DrawFn) -> st.Cluster:
    """A ring of devices with chords and sometimes a switch, unequal links throughout."""
    count = draw(st_.integers(3, 6))
    rates, alphas = st_.sampled_from([5.0, 10.0, 20.0, 50.0]), st_.sampled_from([0.0, 0.5, 2.0])
    ends = [(i, (i + 1) % count) for i in range(count)]
    ends += draw(st_.lists(st_.tuples(st_.integers(0, count - 1), st_.integers(0, count - 1)), max_size=6))
    switch = draw(st_.booleans())
    ends += [pair for i in range(count) for pair in ((i, count), (count, i))] if switch else []
    return st.Cluster.build(
        "random",
        nodes=[
            *(Node(name=f"d{i}", host=i) for i in range(count)),
            *([Node(name="hub", kind="switch")] if switch else []),
        ],
        links=[Link(src=a, dst=b, gb_per_s=draw(rates), alpha_us=draw(alphas)) for a, b in ends if a != b],
    )


def worst_link_us(cluster: st.Cluster, links: np.ndarray, nbytes: np.ndarray) -> float:
    return float((np.bincount(links, nbytes, cluster.num_links) / cluster.link_gb_per_s / 1e3).max())


@given(clusters())
@settings(max_examples=25, deadline=None)
def test_finely_cut_paths_reach_the_linear_program_of_the_bound(cluster: st.Cluster) -> None:
    collective = st.AllToAll(cluster.num_devices, chunks=60)
    bound = st.lower_bound(collective, cluster, 1e9)
    assert bound.exact
    traffic = traffic_of(collective)
    paths = route(collective, cluster, traffic, nbytes=1e9, target_us=bound.bandwidth_us)
    per_chunk = np.repeat(traffic.share * 1e9, np.diff(paths.ptr))
    assert paths.worst_us == pytest.approx(worst_link_us(cluster, paths.link, per_chunk))
    assert bound.bandwidth_us * (1 - 1e-6) <= paths.worst_us <= bound.bandwidth_us * 1.02


@given(clusters(), st_.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_paths_lead_from_source_to_destination_and_messages_carry_them(cluster: st.Cluster, pieces: int) -> None:
    collective = st.AllToAll(cluster.num_devices, chunks=pieces)
    traffic = traffic_of(collective)
    paths = route(collective, cluster, traffic, nbytes=1e6, target_us=10.0)
    for i, (a, b) in enumerate(pairwise(paths.ptr)):
        links = paths.link[a:b]
        nodes = [*cluster.link_src[links], cluster.link_dst[links[-1]]]
        assert np.array_equal(cluster.link_src[links[1:]], cluster.link_dst[links[:-1]])
        assert (nodes[0], nodes[-1]) == (traffic.src[i], traffic.dst[i])
        assert len(set(nodes)) == len(nodes)
    for merge in (None, "source", "destination"):
        messages = messages_of(collective, cluster, traffic, paths, nbytes=1e6, merge=merge)
        sent = [len(messages.routes[r]) for r in messages.route]
        assert np.dot(sent, np.diff(messages.chunk_ptr)) == len(paths.link)
        assert messages.nbytes.sum() == pytest.approx(1e6 * collective.chunk_share[messages.chunk].sum())
        plan = next(Planner(messages, blocking=False).rules())
        messages.program("p", plan).verify()
        messages.program("paced", plan, slack_us=0.1 * plan.total_us).verify()


@given(clusters(), st_.sampled_from([1e3, 1e6, 1e9]), st_.sampled_from(["pipelined", "blocking"]))
@settings(max_examples=12, deadline=None)
def test_programs_are_right_and_never_below_the_bound(cluster: st.Cluster, nbytes: float, alpha: str) -> None:
    collective = st.AllToAll(cluster.num_devices)
    program = flow.synthesize(collective, cluster, nbytes=nbytes, alpha=alpha, pieces=2, budget_s=0.4)
    program.verify()
    took = st.simulate(program, cluster, nbytes=nbytes, alpha=alpha).total_us
    assert took >= st.lower_bound(collective, cluster, nbytes).total_us * (1 - 1e-9)


@given(st_.lists(st_.tuples(st_.integers(0, 9), st_.integers(0, 7)), max_size=120))
def test_edges_of_one_colour_never_meet_and_colours_are_as_few_as_can_be(edges: list[tuple[int, int]]) -> None:
    left, right = np.array(edges, np.int32).reshape(-1, 2).T.copy()
    color = _native.colour_edges(left, right, 10, 8)
    for ends in (left, right):
        assert len(set(zip(ends.tolist(), color.tolist(), strict=True))) == len(edges)
    degree = max(np.bincount(left, minlength=1).max(), np.bincount(right, minlength=1).max())
    assert np.all(color < degree)


@pytest.mark.parametrize(
    ("name", "nbytes", "most_us"),
    [
        ("dgx2_teccl:2", 1e3, 4.06),
        ("dgx2_teccl:2", 64e3, 8.46),
        ("dgx2_teccl:2", 1e6, 84.25),
        ("dgx2_teccl:2", 16e6, 1292.0),
        ("dgx2_teccl:2", 1e9, 80500.0),
        ("mi250", 1e9, 13400.0),
        ("ndv2_teccl:2", 1e9, 320100.0),
        ("torus:16", 1e9, 10150.0),
    ],
)
@patient
def test_named_cases(name: str, nbytes: float, most_us: float, patience: float) -> None:
    """The peer's times on two DGX-2, and within 1.5 % of the bound elsewhere."""
    cluster = st.Cluster.load(name)
    pieces = {"mi250": 3, "torus:16": 2}.get(name, 1)
    program = flow.synthesize(
        st.AllToAll(cluster.num_devices), cluster, nbytes=nbytes, pieces=pieces, budget_s=2.0 * patience
    )
    assert program.name.startswith("flow(")
    assert st.simulate(program, cluster, nbytes=nbytes).total_us <= most_us


@patient
def test_hundred_and_twenty_eight_gpus_within_five_percent(patience: float) -> None:
    cluster = st.Cluster.load("dgx2_teccl:8")
    collective = st.AllToAll(128)
    program = flow.synthesize(collective, cluster, nbytes=1e9, pieces=1, budget_s=4.0 * patience)
    bound = st.lower_bound(collective, cluster, 1e9).total_us
    assert bound <= st.simulate(program, cluster, nbytes=1e9).total_us <= 1.05 * bound


@pytest.mark.parametrize(
    "collective",
    [
        st.AllToAllV(6, np.arange(36).reshape(6, 6).tolist()),
        st.Permute(6, [(0, 3), (3, 0), (1, 5)]),
        st.Gather(6, root=2),
        st.Scatter(6, root=1),
        st.AllToAll([4, 0, 2]),
    ],
    ids=lambda c: c.kind,
)
def test_other_one_to_one_collectives(collective: Collective) -> None:
    cluster = st.Cluster.preset("torus", nodes=6, gb_per_s=10.0, alpha_us=0.1)
    program = flow.synthesize(collective, cluster, nbytes=6e6, pieces=16, budget_s=1.0)
    assert program.collective.kind == collective.kind
    assert program.collective.ranks == collective.ranks
    bound = st.lower_bound(collective, cluster, 6e6).total_us
    assert bound * (1 - 1e-9) <= st.simulate(program, cluster, nbytes=6e6).total_us <= 1.2 * bound


def test_ranks_without_a_way_of_their_own_are_refused() -> None:
    links = [Link(src=a, dst=b, gb_per_s=1.0, alpha_us=0.0) for a, b in ((0, 1), (1, 2), (2, 1), (1, 0))]
    line = st.Cluster.build("line", nodes=[Node(name=f"d{i}") for i in range(3)], links=links)
    with pytest.raises(Infeasible, match="no way"):
        flow.synthesize(st.AllToAll([0, 2]), line, nbytes=1e6)


@pytest.mark.parametrize("collective", [st.AllGather(4), st.AllReduce(4), st.Broadcast(4)], ids=lambda c: c.kind)
def test_what_is_shared_or_summed_is_refused(collective: Collective) -> None:
    with pytest.raises(Infeasible, match="one to one only"):
        flow.synthesize(collective, st.Cluster.preset("ring", nodes=4), nbytes=1e6)


def test_nothing_to_move_is_refused() -> None:
    with pytest.raises(Infeasible, match="nothing to move"):
        flow.synthesize(st.AllToAll(1), st.Cluster.preset("ring", nodes=4), nbytes=1e6)


def test_refining_keeps_the_kind_and_the_sizes() -> None:
    counts = [[0, 3, 1], [2, 0, 0], [1, 1, 5]]
    assert refined(st.AllToAllV(3, counts), 4) == st.AllToAllV(3, counts, chunks=4)
    assert refined(st.Permute(4, [(0, 1), (2, 3)], chunks=2), 2) == st.Permute(4, [(0, 1), (2, 3)], chunks=4)
    assert refined(st.AllToAll(3, in_place=True), 2) == st.AllToAll(3, chunks=2, in_place=True)


def test_same_seed_same_program() -> None:
    cluster = st.Cluster.load("ndv2:1")
    one, two = (flow.synthesize(st.AllToAll(8), cluster, nbytes=1e6, seed=3, pieces=2) for _ in range(2))
    assert one == two


@patient
def test_chunks_gather_in_few_messages_where_alpha_blocks(patience: float) -> None:
    """As in the two-step algorithm, which nobody told it about."""
    cluster = st.Cluster.load("dgx2:2")
    program = flow.synthesize(st.AllToAll(32), cluster, nbytes=1e3, alpha="blocking", pieces=1, budget_s=2.0 * patience)
    two_step = st.algorithm("two_step", "all_to_all", 32, cluster=cluster)
    took, known = (st.simulate(x, cluster, nbytes=1e3, alpha="blocking").total_us for x in (program, two_step))
    assert took < known
    assert program.num_transfers < 32 * 31


@given(clusters(), st_.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_gathered_paths_carry_every_chunk(cluster: st.Cluster, pieces: int) -> None:
    collective = st.AllToAll(cluster.num_devices)
    paths = gather(
        collective, cluster, traffic_of(collective), nbytes=1e4, target_us=5.0, pieces=pieces, turns=cluster.num_devices
    )
    finer = refined(collective, pieces)
    messages = messages_of(finer, cluster, traffic_of(finer), paths, nbytes=1e4)
    plan = next(Planner(messages, blocking=True).rules())
    program = messages.program("gathered", plan)
    program.verify()
    busiest = st.simulate(program, cluster, nbytes=1e4, alpha="blocking").link_busy_us.max()
    assert busiest == pytest.approx(paths.worst_us)
