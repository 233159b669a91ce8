# SPDX-License-Identifier: Apache-2.0
"""The arguments behind lower bounds against brute force, networkx and an independent linear program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations

import highspy
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from numpy.typing import NDArray

import stretto as st
from stretto import _native
from stretto.simulator.bounds import lower
from stretto.simulator.bounds.demand import demand_of
from stretto.simulator.bounds.net import ArcNetwork

Nodes = frozenset[int]
RATES = some.sampled_from([0.5, 1.0, 2.0, 3.0, 7.0])


@some.composite
def clusters(draw: some.DrawFn, most_devices: int = 5) -> st.Cluster:
    """A few devices on a ring with unequal rates, a switch or two, and links at random."""
    devices = draw(some.integers(2, most_devices))
    switches = draw(some.integers(0, 2))
    count = devices + switches
    ends = [(i, (i + 1) % devices) for i in range(devices)]
    pair = some.tuples(some.integers(0, count - 1), some.integers(0, count - 1)).filter(lambda p: p[0] != p[1])
    ends += draw(some.lists(pair, max_size=10))
    nodes = [st.Node(name=f"d{i}") for i in range(devices)]
    nodes += [st.Node(name=f"s{i}", kind="switch") for i in range(switches)]
    links = [st.Link(src=a, dst=b, alpha_us=0.0, gb_per_s=draw(RATES)) for a, b in ends]
    return st.Cluster.build("random", nodes=nodes, links=links)


def sides(cluster: st.Cluster) -> Iterator[Nodes]:
    """Every set of nodes that parts the devices."""
    nodes = range(cluster.num_nodes)
    for size in range(1, cluster.num_nodes):
        for side in map(frozenset, combinations(nodes, size)):
            if 0 < len([d for d in side if d < cluster.num_devices]) < cluster.num_devices:
                yield side


def out_rate(cluster: st.Cluster, side: Nodes) -> float:
    return sum(link.gb_per_s * 1e3 for link in cluster.links() if link.src in side and link.dst not in side)


def worst_cut(cluster: st.Cluster, leaves: Callable[[Nodes], float]) -> float:
    """The longest time over all cuts, when `leaves(devices)` bytes must leave a set of devices."""
    times = []
    for side in sides(cluster):
        devices = frozenset(d for d in side if d < cluster.num_devices)
        if leaves(devices) > 0:
            times.append(leaves(devices) / out_rate(cluster, side))
    return max(times)


@settings(max_examples=60, deadline=None)
@given(clusters())
def test_collectives_equal_the_worst_of_all_cuts(cluster: st.Cluster) -> None:
    n, nbytes = cluster.num_devices, 1e6
    whole = {
        st.AllGather(n): lambda s: len(s) / n,
        st.ReduceScatter(n): lambda s: 1 - len(s) / n,
        st.Broadcast(n, root=1): lambda s: float(1 in s),
        st.Reduce(n, root=1): lambda s: float(1 not in s),
        st.Gather(n): lambda s: 0.0 if 0 in s else len(s) / n,
        st.Scatter(n): lambda s: 1 - len(s) / n if 0 in s else 0.0,
    }
    for collective, leaves in whole.items():
        expected = nbytes * worst_cut(cluster, leaves)
        bound = st.lower_bound(collective, cluster, nbytes)
        assert bound.bandwidth_us == pytest.approx(expected, rel=1e-9), collective
        rate = cluster.link_gb_per_s[bound.links] * 1e3
        assert bound.demand_bytes / float(bound.weights @ rate) == pytest.approx(bound.bandwidth_us)


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for at, block in enumerate(rest):
            yield [*rest[:at], [items[0], *block], *rest[at + 1 :]]


def in_rate(cluster: st.Cluster, inside: Sequence[int]) -> float:
    """The narrowest entry into a set of devices, over all sides that the switches may take."""
    outside = [d for d in range(cluster.num_devices) if d not in inside]
    switches = range(cluster.num_devices, cluster.num_nodes)
    options = (chosen for size in range(len(switches) + 1) for chosen in combinations(switches, size))
    return min(out_rate(cluster, frozenset([*outside, *chosen])) for chosen in options)


@settings(max_examples=60, deadline=None)
@given(clusters())
def test_all_reduce_is_at_least_the_worst_of_all_cuts_and_all_partitions(cluster: st.Cluster) -> None:
    n = cluster.num_devices
    times = [worst_cut(cluster, lambda s: 1.0)]
    for groups in partitions(range(n)):
        if len(groups) > 1:
            times.append(2 * (len(groups) - 1) / sum(in_rate(cluster, group) for group in groups))
    bound = st.lower_bound(st.AllReduce(n), cluster, 1e6)
    # More where first sendings prove more, which test_first_sends.py judges.
    more = bound.reason.startswith("first sends")
    assert bound.bandwidth_us == pytest.approx(1e6 * max(times), rel=1e-9) or (
        more and bound.bandwidth_us > 1e6 * max(times)
    )


def concurrent_us(cluster: st.Cluster, demands: dict[tuple[int, int], float]) -> float:
    """The least time for all demands: one flow per pair, written down as plainly as possible."""
    links = list(cluster.links())
    pairs = list(demands)
    columns = len(pairs) * len(links) + 1
    rows: list[NDArray[np.float64]] = []
    low, high = [], []
    for k, (a, b) in enumerate(pairs):
        for node in range(cluster.num_nodes):
            if node == a:
                continue
            row = np.zeros(columns)
            for at, link in enumerate(links):
                row[k * len(links) + at] = (link.dst == node) - (link.src == node)
            row[-1] = -demands[a, b] if node == b else 0.0
            rows.append(row)
            low.append(0.0)
            high.append(0.0)
    for at, link in enumerate(links):
        row = np.zeros(columns)
        row[at : -1 : len(links)] = 1.0
        rows.append(row)
        low.append(-highspy.kHighsInf)
        high.append(link.gb_per_s * 1e3)
    matrix = np.array(rows)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, len(rows)
    lp.col_cost_ = np.append(np.zeros(columns - 1), -1.0)
    lp.col_lower_, lp.col_upper_ = np.zeros(columns), np.full(columns, highspy.kHighsInf)
    lp.row_lower_, lp.row_upper_ = np.array(low), np.array(high)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.append(0, np.cumsum((matrix != 0).sum(axis=1)))
    lp.a_matrix_.index_, lp.a_matrix_.value_ = np.nonzero(matrix)[1], matrix[matrix != 0]
    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.passModel(lp)
    solver.run()
    return 1 / -float(solver.getInfo().objective_function_value)


@settings(max_examples=25, deadline=None)
@given(clusters(most_devices=4), some.data())
def test_exchanges_equal_the_concurrent_flow(cluster: st.Cluster, data: some.DataObject) -> None:
    n, nbytes = cluster.num_devices, 1e3
    counts = data.draw(some.lists(some.lists(RATES, min_size=n, max_size=n), min_size=n, max_size=n))
    uneven = st.AllToAllV(n, counts)
    largest = max(np.sum(counts, axis=0).max(), np.sum(counts, axis=1).max())
    pairs = [(a, b) for a in range(n) for b in range(n) if a != b]
    for collective, demands in (
        (st.AllToAll(n), {pair: nbytes / n for pair in pairs}),
        (uneven, {(a, b): nbytes * counts[a][b] / largest for a, b in pairs}),
    ):
        bound = st.lower_bound(collective, cluster, nbytes)
        assert bound.exact
        exact = concurrent_us(cluster, demands)
        assert bound.bandwidth_us == pytest.approx(exact, rel=1e-6)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lower, "MAX_VARIABLES", 0)
            net = ArcNetwork.of(cluster, None)
            loose = [p.us * nbytes for p in lower._proofs(cluster, net, demand_of(collective, cluster.num_nodes))]
        assert max(loose) <= exact * (1 + 1e-9)
        assert max(loose) >= 0.7 * exact


def custom(
    ranks: int,
    inputs: Sequence[Sequence[tuple[int, int]]],
    outputs: Sequence[Sequence[tuple[int, int]]],
    part_sets: Sequence[tuple[int, ...]] = (),
) -> st.Collective:
    """A collective from (chunk, part) and (chunk, set) lists of each rank; every chunk is one whole tensor."""
    held = [entry for row in inputs for entry in row]
    wanted = [entry for row in outputs for entry in row]
    chunks = 1 + max(chunk for chunk, _ in held)
    return st.Collective(
        kind="custom", ranks=tuple(range(ranks)), num_chunks=chunks, chunks=1,
        in_ptr=np.cumsum([0, *map(len, inputs)]), in_chunk=np.array([c for c, _ in held], np.int32),
        in_part=np.array([p for _, p in held], np.int32),
        out_ptr=np.cumsum([0, *map(len, outputs)]), out_chunk=np.array([c for c, _ in wanted], np.int32),
        out_set=np.array([s for _, s in wanted], np.int32), chunk_share=np.ones(chunks),
        place=np.zeros(ranks, np.int64), part_sets=tuple(part_sets),
    )  # fmt: skip


def mesh(ends: Sequence[tuple[int, int]], gb_per_s: float = 1.0) -> st.Cluster:
    count = 1 + max(max(pair) for pair in ends)
    links = [st.Link(src=a, dst=b, alpha_us=1.0, gb_per_s=gb_per_s) for x, y in ends for a, b in ((x, y), (y, x))]
    return st.Cluster.build("mesh", nodes=[st.Node(name=f"d{i}") for i in range(count)], links=links)


SQUARE = mesh([(0, 1), (1, 2), (2, 3), (3, 0)])


def test_a_part_that_two_ranks_hold_may_come_from_both() -> None:
    line = mesh([(0, 2), (1, 2), (2, 3)])
    both = custom(4, [[(0, 0)], [(0, 0)], [], []], [[], [], [(0, -1)], []])
    bound = st.lower_bound(both, line, 1e6)
    assert bound.bandwidth_us == pytest.approx(500.0) and bound.latency_us == 1.0 and bound.exact
    onward = custom(4, [[(0, 0)], [(0, 0)], [], []], [[], [], [(0, -1)], [(0, -1)]])
    assert st.lower_bound(onward, line, 1e6).bandwidth_us == pytest.approx(1000.0)


def test_sets_that_say_the_same_give_the_same_bound() -> None:
    inputs = [[(0, r)] for r in range(4)]
    named = custom(4, inputs, [[(0, 0)], [(0, 1)], [(0, -1)], [(0, 0)]], [(0, 1, 2, 3), (3, 2, 1, 0)])
    plain = st.lower_bound(st.AllReduce(4), SQUARE, 1e6)
    bound = st.lower_bound(named, SQUARE, 1e6)
    assert bound.total_us == pytest.approx(plain.total_us) and bound.reason == plain.reason


def test_reductions_of_two_pairs_are_cut_apart() -> None:
    inputs = [[(0, 0)], [(1, 1)], [(0, 2)], [(1, 3)]]
    bound = st.lower_bound(custom(4, inputs, [[(0, -1)], [], [], [(1, -1)]]), SQUARE, 1e6)
    assert bound.bandwidth_us == pytest.approx(500.0) and not bound.exact


def test_partial_sums_of_one_chunk_cross_a_cut_once() -> None:
    inputs = [[(0, r)] for r in range(3)] + [[]]
    line = mesh([(0, 1), (1, 2), (2, 3)])
    wants = custom(4, inputs, [[], [], [], [(0, 0)]], [(0, 1)])
    assert st.lower_bound(wants, line, 1e6).bandwidth_us == pytest.approx(1000.0)


def test_several_wanters_are_served_by_one_copy_over_a_bridge() -> None:
    bridge = mesh([(0, 1), (1, 2), (2, 3), (1, 3)])
    mixed = custom(4, [[(0, 0)], [(1, 1)], [], []], [[], [], [(0, -1), (1, -1)], [(0, -1)]])
    bound = st.lower_bound(mixed, bridge, 1e6)
    assert bound.bandwidth_us == pytest.approx(1000.0) and not bound.exact


def test_a_part_that_nobody_holds_is_named() -> None:
    wants = custom(2, [[(0, 0)], [(0, 1)]], [[(0, 0)], []], [(0, 5)])
    with pytest.raises(st.InvalidInput, match="part 5 of chunk 0 is wanted but no rank has it"):
        st.lower_bound(wants, mesh([(0, 1)]), 1e6)


@settings(max_examples=100, deadline=None)
@given(clusters(), some.data())
def test_max_flow_agrees_with_networkx(cluster: st.Cluster, data: some.DataObject) -> None:
    count = cluster.num_nodes
    amounts = some.lists(some.sampled_from([0.0, 0.5, 1.0, 4.0]), min_size=count, max_size=count).map(np.array)
    flow = _native.MaxFlow(count, cluster.link_src, cluster.link_dst)
    flow.set_capacity(cluster.link_gb_per_s, 2.0**-20)
    nodes = np.arange(count, dtype=np.int32)
    for _ in range(2):
        supply, demand = data.draw(amounts), data.draw(amounts)
        graph = nx.DiGraph()
        graph.add_nodes_from(["source", "sink"])
        for v in range(count):
            graph.add_edge("source", v, capacity=supply[v])
            graph.add_edge(v, "sink", capacity=demand[v])
        for link in cluster.links():
            before = graph.get_edge_data(link.src, link.dst, {"capacity": 0.0})["capacity"]
            graph.add_edge(link.src, link.dst, capacity=before + link.gb_per_s)
        value = flow.run(nodes, supply, nodes, demand)
        assert value == pytest.approx(nx.maximum_flow_value(graph, "source", "sink"), abs=1e-9)
        side = flow.sink_side().astype(np.bool_)
        crossing = ~side[cluster.link_src] & side[cluster.link_dst]
        cut = cluster.link_gb_per_s[crossing].sum() + supply[side].sum() + demand[~side].sum()
        assert cut == pytest.approx(value, abs=1e-9)


@settings(max_examples=50, deadline=None)
@given(clusters(), some.data())
def test_path_lengths_agree_with_networkx(cluster: st.Cluster, data: some.DataObject) -> None:
    links = cluster.num_links
    length = np.array(data.draw(some.lists(some.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=links, max_size=links)))
    graph = nx.MultiDiGraph()
    graph.add_nodes_from(range(cluster.num_nodes))
    for link, each in zip(cluster.links(), length, strict=True):
        graph.add_edge(link.src, link.dst, weight=each)
    sources = np.arange(cluster.num_nodes, dtype=np.int32)
    found = _native.path_lengths(cluster.num_nodes, cluster.link_src, cluster.link_dst, length, sources)
    for source, row in enumerate(found.reshape(cluster.num_nodes, -1)):
        expected = nx.single_source_dijkstra_path_length(graph, source)
        assert row.tolist() == [pytest.approx(expected.get(v, np.inf)) for v in range(cluster.num_nodes)]


def test_paths_in_a_dense_graph_stop_early_but_right() -> None:
    count = 12
    ends = [(a, b) for a in range(count) for b in range(count) if a != b]
    length = np.array([3.0 if (a + b) % 3 else 1.0 for a, b in ends])
    src, dst = (np.array(x, np.int32) for x in zip(*ends, strict=True))
    found = _native.path_lengths(count, src, dst, length, np.arange(count, dtype=np.int32)).reshape(count, count)
    graph = nx.DiGraph()
    graph.add_weighted_edges_from((a, b, each) for (a, b), each in zip(ends, length, strict=True))
    expected = dict(nx.all_pairs_dijkstra_path_length(graph))
    assert found.tolist() == [[expected[a][b] for b in range(count)] for a in range(count)]
