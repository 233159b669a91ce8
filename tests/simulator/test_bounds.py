# SPDX-License-Identifier: Apache-2.0
"""Lower bounds: certified optima, values computed by hand, and what goes wrong with bad input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest

import stretto as st
from stretto.algorithms import defined_for
from stretto.simulator.bounds import lower

MB = st.MB
NDV2_DOUBLE = "01 04 13 23 26 45 57 67"
NDV2_SINGLE = "02 03 12 15 37 46 47 56"
MI250 = (
    "0-1 4, 0-4 2, 0-8 1, 1-5 1, 1-9 1, 1-10 1, 2-3 4, 2-6 1, 2-9 1, 2-10 1, 3-7 2, 3-11 1, 4-5 4, 4-6 1, 5-6 1, "
    "5-7 1, 6-7 4, 8-9 4, 8-12 2, 9-13 1, 10-11 4, 10-14 1, 11-15 2, 12-13 4, 12-14 1, 13-14 1, 13-15 1, 14-15 4"
)


def both(a: int, b: int, gb_per_s: float, alpha_us: float = 0.0, channel: str = "link") -> list[st.Link]:
    ends = ((a, b), (b, a))
    return [st.Link(src=x, dst=y, alpha_us=alpha_us, gb_per_s=gb_per_s, channel=channel) for x, y in ends]


def cluster(devices: int, links: Sequence[st.Link], *, switches: int = 0, per_host: int = 0) -> st.Cluster:
    nodes = [st.Node(name=f"d{i}", host=i // per_host if per_host else -1) for i in range(devices)]
    nodes += [st.Node(name=f"s{i}", kind="switch") for i in range(switches)]
    return st.Cluster.build("test", nodes=nodes, links=links)


def ring(count: int, gb_per_s: float = 1.0, alpha_us: float = 0.0) -> st.Cluster:
    return cluster(count, [x for i in range(count) for x in both(i, (i + 1) % count, gb_per_s, alpha_us)])


def torus(side: int, gb_per_s: float = 1.0) -> st.Cluster:
    links = []
    for x in range(side):
        for y in range(side):
            links += both(x * side + y, (x + 1) % side * side + y, gb_per_s)
            links += both(x * side + y, x * side + (y + 1) % side, gb_per_s)
    return cluster(side * side, links)


def star(count: int, up: float, down: float, alpha_us: float = 0.0) -> st.Cluster:
    links = [st.Link(src=i, dst=count, alpha_us=alpha_us, gb_per_s=up) for i in range(count)]
    links += [st.Link(src=count, dst=i, alpha_us=alpha_us, gb_per_s=down) for i in range(count)]
    return cluster(count, links, switches=1)


def ndv2() -> st.Cluster:
    links = [x for pair in NDV2_DOUBLE.split() for x in both(int(pair[0]), int(pair[1]), 1e3 / 23)]
    links += [x for pair in NDV2_SINGLE.split() for x in both(int(pair[0]), int(pair[1]), 1e3 / 46)]
    return cluster(8, links)


def a100(boxes: int) -> st.Cluster:
    count = 8 * boxes
    links = [x for i in range(count) for x in both(i, count + i // 8, 300.0)]
    if boxes > 1:
        links += [x for i in range(count) for x in both(i, count + boxes + i % 2, 25.0, channel="nic")]
    return cluster(count, links, switches=boxes + 2, per_host=8)


def mi250(boxes: int) -> st.Cluster:
    count = 16 * boxes
    links = []
    for entry in MI250.split(", "):
        pair, units = entry.split()
        a, b = (int(x) for x in pair.split("-"))
        links += [x for box in range(boxes) for x in both(16 * box + a, 16 * box + b, 50.0 * int(units))]
    if boxes > 1:
        links += [x for i in range(count) for x in both(i, count, 16.0)]
    return cluster(count, links, switches=1, per_host=16)


@pytest.mark.parametrize(
    ("boxes", "build", "gb_per_s"),
    [
        (1, a100, 300 * 8 / 7),
        (2, a100, 325 * 16 / 15),
        (4, a100, 200 * 4 / 3),
        (8, a100, 200 * 8 / 7),
        (1, mi250, 300 * 8 / 7),
        (2, mi250, 332 * 16 / 15),
        (4, mi250, 256 * 4 / 3),
        (6, torus, 4 * 36 / 35),
        (8, torus, 4 * 64 / 63),
        (10, torus, 4 * 100 / 99),
    ],
)
def test_all_gather_reaches_certified_optima(boxes: int, build: Callable[[int], st.Cluster], gb_per_s: float) -> None:
    machine = build(boxes)
    for collective in (st.AllGather(machine.num_devices), st.ReduceScatter(machine.num_devices)):
        bound = st.lower_bound(collective, machine, st.GB)
        assert bound.algorithm_gb_per_s == pytest.approx(gb_per_s, rel=1e-12)
        assert bound.exact and bound.method == "max-flow, exact"


def test_published_figures_of_the_certified_optima() -> None:
    found = [st.lower_bound(st.AllGather(8 * n), a100(n), st.GB).algorithm_gb_per_s for n in (1, 2, 4, 8)]
    assert [round(x, 1) for x in found] == [342.9, 346.7, 266.7, 228.6]
    found = [st.lower_bound(st.AllGather(16 * n), mi250(n), st.GB).algorithm_gb_per_s for n in (1, 2, 4)]
    assert [round(x, 1) for x in found] == [342.9, 354.1, 341.3]


def test_ndv2_counting_and_receive_bounds() -> None:
    reduced = st.lower_bound(st.AllReduce(8), ndv2(), 8 * MB)
    assert reduced.bandwidth_us == pytest.approx(14 * 8 / (16 / 23 + 16 / 46), rel=1e-12)
    assert round(reduced.bandwidth_us, 1) == 107.3
    assert reduced.reason.startswith("counting: each byte is received 14 times by 8 devices")
    assert round(st.lower_bound(st.AllGather(8), ndv2(), 8 * MB).bandwidth_us, 1) == 53.7


def test_one_link_is_alpha_plus_bytes_over_rate() -> None:
    pair = cluster(2, both(0, 1, 10.0, 2.0))
    bound = st.lower_bound(st.Permute(2, [(0, 1)]), pair, 5 * MB)
    assert (bound.total_us, bound.bandwidth_us, bound.latency_us) == (502.0, 500.0, 2.0)
    assert bound.links.tolist() == [0] and bound.demand_bytes == 5 * MB
    assert bound.reason == "cut: d1 must receive 5 MB over 10 GB/s"


def test_names_are_only_names() -> None:
    nodes = [st.Node(name="{0}"), st.Node(name="%s{x!r}")]
    bound = st.lower_bound(st.AllGather(2), st.Cluster.build("odd", nodes=nodes, links=both(0, 1, 1.0)), 2 * MB)
    assert bound.reason == "cut: {0} must receive 1 MB over 1 GB/s"


def test_alphas_of_a_whole_message_delay_every_link_of_its_route() -> None:
    bound = st.lower_bound(st.AllGather(4), star(4, 10.0, 10.0, 0.5), 4 * MB)
    assert bound.total_us == pytest.approx(3 * MB / 1e4 + 1.0)


def test_a_slow_start_on_one_link_is_filled_by_the_other() -> None:
    links = [st.Link(src=0, dst=1, alpha_us=a, gb_per_s=1.0, channel=c) for a, c in ((1.0, "near"), (101.0, "far"))]
    pair = cluster(2, links)
    send = st.Permute(2, [(0, 1)])
    assert st.lower_bound(send, pair, 50_000).total_us == pytest.approx(51.0)
    assert st.lower_bound(send, pair, 300_000).total_us == pytest.approx((300 + 1 + 101) / 2)


@pytest.mark.parametrize("count", [3, 4, 7])
def test_ring_values(count: int) -> None:
    machine, nbytes = ring(count, 1.0, 1.0), count * MB

    def us(collective: st.Collective) -> float:
        return st.lower_bound(collective, machine, nbytes).bandwidth_us

    assert us(st.AllGather(count)) == pytest.approx((count - 1) * 1e3 / 2)
    assert us(st.ReduceScatter(count)) == pytest.approx((count - 1) * 1e3 / 2)
    assert us(st.AllReduce(count)) == pytest.approx((count - 1) * 1e3)
    assert us(st.Broadcast(count)) == us(st.Reduce(count)) == pytest.approx(count * 1e3 / 2)
    assert us(st.Gather(count)) == us(st.Scatter(count)) == pytest.approx((count - 1) * 1e3 / 2)
    hops = sum(min(d, count - d) for d in range(1, count))
    assert us(st.AllToAll(count)) == pytest.approx(hops * 1e3 / 2)
    assert st.lower_bound(st.AllGather(count), machine, nbytes).latency_us == count // 2


def test_star_with_unequal_directions() -> None:
    machine = star(4, 10.0, 40.0)
    gathered = st.lower_bound(st.AllGather(4), machine, 4 * MB)
    assert gathered.bandwidth_us == pytest.approx(3e6 / 1e4) and gathered.exact
    assert gathered.weights @ np.full(len(gathered.links), 3 * MB) >= gathered.demand_bytes
    assert "switches only pass data on" in gathered.reason
    assert st.lower_bound(st.ReduceScatter(4), machine, 4 * MB).bandwidth_us == pytest.approx(3e6 / 1e4)
    assert st.lower_bound(st.AllToAll(4), machine, 4 * MB).bandwidth_us == pytest.approx(3e6 / 1e4)
    copying = st.lower_bound(st.AllGather(4), machine.with_multicast(), 4 * MB)
    assert copying.bandwidth_us == pytest.approx(1e6 / 1e4) and not copying.exact
    backwards = star(4, 40.0, 10.0)
    for either in (backwards, backwards.with_multicast()):
        reduced = st.lower_bound(st.ReduceScatter(4), either, 4 * MB)
        assert reduced.bandwidth_us == pytest.approx(3e6 / 1e4), "switches do not add, and copies do not help"


def test_two_hosts_are_limited_by_what_joins_them() -> None:
    links = [x for i in range(8) for x in both(i, 8 + i // 4, 100.0)] + both(8, 9, 12.5, 1.0)
    machine = cluster(8, links, switches=2, per_host=4)
    gathered = st.lower_bound(st.AllGather(8), machine, 64 * MB)
    assert gathered.bandwidth_us == pytest.approx(32e6 / 12.5e3)
    assert gathered.reason.startswith("cut: 4 devices of host ") and "receive 32 MB over 12.5 GB/s" in gathered.reason
    reduced = st.lower_bound(st.AllReduce(8), machine, 64 * MB)
    assert reduced.bandwidth_us == pytest.approx(64e6 / 12.5e3)
    exchanged = st.lower_bound(st.AllToAll(8), machine, 64 * MB)
    assert exchanged.bandwidth_us == pytest.approx(4 * 32e6 / 12.5e3)
    assert exchanged.exact and exchanged.method == "concurrent-flow LP, exact"
    assert "4 devices of host " in exchanged.reason, "a cut says it more plainly than weights do"


def test_hosts_are_counted_as_groups_where_their_entries_are_narrow() -> None:
    links = [x for i in range(12) for x in both(i, 12 + i // 4, 1000.0)]
    links += [x for host in range(3) for x in both(12 + host, 15, 10.0)]
    bound = st.lower_bound(st.AllReduce(12), cluster(12, links, switches=4, per_host=4), 30 * MB)
    assert bound.bandwidth_us == pytest.approx(4 * 30e6 / 30e3)
    assert bound.reason == "counting: each byte is received 4 times by 3 hosts, which take in 30 GB/s"


def test_links_that_lead_nowhere_carry_nothing() -> None:
    dead = [st.Link(src=4, dst=0, alpha_us=0, gb_per_s=99.0), st.Link(src=1, dst=5, alpha_us=0, gb_per_s=99.0)]
    links = [x for i in range(4) for x in both(i, (i + 1) % 4, 1.0)]
    plain, decorated = cluster(4, links), cluster(4, links + dead, switches=2)
    for collective in (st.AllReduce(4), st.AllGather(4), st.AllToAll(4)):
        assert st.lower_bound(collective, decorated, MB).total_us == st.lower_bound(collective, plain, MB).total_us


def test_devices_that_take_no_part_may_relay() -> None:
    line = cluster(3, both(0, 1, 1.0, 1.0) + both(1, 2, 1.0, 1.0))
    bound = st.lower_bound(st.AllGather([0, 2]), line, 2 * MB)
    assert bound.latency_us == 2.0 and bound.bandwidth_us == pytest.approx(1e3)
    assert not bound.exact


def test_a_relay_may_combine_so_it_loosens_the_count() -> None:
    # A parameter server in the middle: everyone sends once and receives once.
    machine = cluster(4, [x for i in range(3) for x in both(i, 3, 1.0)])
    assert st.lower_bound(st.AllReduce([0, 1, 2]), machine, MB).bandwidth_us == pytest.approx(1e3)


def test_the_order_of_ranks_does_not_matter() -> None:
    machine = star(4, 10.0, 10.0)
    for make in (st.AllGather, st.AllReduce, st.ReduceScatter, st.AllToAll):
        there, back = (st.lower_bound(make(ranks), machine, 4 * MB) for ranks in ([0, 1, 3], [3, 0, 1]))
        assert there.total_us == pytest.approx(back.total_us) and there.method == back.method


def test_channels_leave_out_the_other_links() -> None:
    both_ways = both(0, 1, 10.0, channel="nvlink") + both(0, 1, 2.0, channel="pcie")
    pair = cluster(2, both_ways)
    send = st.Permute(2, [(0, 1)])
    assert st.lower_bound(send, pair, MB).bandwidth_us == pytest.approx(1e3 / 12)
    assert st.lower_bound(send, pair, MB, channels=["pcie"]).bandwidth_us == pytest.approx(500)
    assert st.lower_bound(send, pair, MB, channels={"pcie"}).links.tolist() == [2]


def test_flow_caps_do_not_tighten_and_incast_does_not_loosen() -> None:
    plain = cluster(2, both(0, 1, 10.0))
    special = [
        st.Link(src=a, dst=b, alpha_us=0, gb_per_s=10.0, flow_gb_per_s=1.0, incast=((2, 0.5),))
        for a, b in ((0, 1), (1, 0))
    ]
    for collective in (st.AllGather(2), st.AllToAll(2)):
        bounds = [st.lower_bound(collective, c, MB).total_us for c in (plain, cluster(2, special))]
        assert bounds[0] == bounds[1]


def test_chunks_and_in_place_change_nothing() -> None:
    machine = torus(3, 2.0)
    for make in (st.AllGather, st.ReduceScatter, st.AllReduce, st.AllToAll):
        plain = st.lower_bound(make(9), machine, 9 * MB)
        cut_up = st.lower_bound(make(9, chunks=18, in_place=True), machine, 9 * MB)
        assert cut_up.total_us == pytest.approx(plain.total_us, rel=1e-9)


def test_bandwidth_grows_with_bytes_and_latency_rules_small_sizes() -> None:
    machine = ring(6, 1.0, 5.0)
    bounds = [st.lower_bound(st.AllReduce(6), machine, nbytes) for nbytes in (1, 1_000, MB, 1000 * MB)]
    assert bounds[0].total_us == bounds[0].latency_us == 15.0
    assert bounds[0].reason == "latency: d0 to d3 takes 15 us of alphas" and bounds[0].method == "shortest path"
    assert bounds[3].bandwidth_us == pytest.approx(1000 * bounds[2].bandwidth_us)
    assert all(a.total_us <= b.total_us for a, b in pairwise(bounds))


def test_faster_links_never_raise_the_bound() -> None:
    slow, fast = ndv2(), cluster(8, [*ndv2().links(), *both(0, 6, 20.0)])
    for make in (st.AllGather, st.AllReduce, st.AllToAll, st.Broadcast):
        before, after = (st.lower_bound(make(8), c, 8 * MB).total_us for c in (slow, fast))
        assert after <= before * (1 + 1e-9)


def test_all_to_all_v_follows_the_largest_demand() -> None:
    counts = np.zeros((4, 4))
    counts[0, 2], counts[1, 2] = 3.0, 1.0
    bound = st.lower_bound(st.AllToAllV(4, counts.tolist()), star(4, 10.0, 10.0), 4 * MB)
    assert bound.bandwidth_us == pytest.approx(400.0)


def test_no_links_needed_when_nothing_moves() -> None:
    alone = cluster(1, [])
    bound = st.lower_bound(st.AllReduce(1), alone, MB)
    assert (bound.total_us, bound.reason, bound.exact) == (0.0, "nothing has to move", True)


def test_weights_are_a_proof_that_every_program_obeys() -> None:
    machine = star(4, 5.0, 4.0, 0.25)
    for kind in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "broadcast", "gather"):
        for name in defined_for(kind, 4):
            program = st.algorithm(name, kind, 4)
            for nbytes in (4_000, 4 * MB):
                bound = st.lower_bound(program.collective, machine, nbytes)
                for contention in ("fifo", "fair"):
                    for alpha in ("pipelined", "blocking"):
                        ran = st.simulate(program, machine, nbytes=nbytes, contention=contention, alpha=alpha)
                        assert ran.total_us >= bound.total_us * (1 - 1e-9), (kind, name, contention, alpha)
                        assert bound.weights @ ran.link_bytes[bound.links] >= bound.demand_bytes * (1 - 1e-9)


def test_large_networks_without_the_linear_program() -> None:
    machine = torus(32)
    gathered = st.lower_bound(st.AllGather(1024), machine, 1024 * MB)
    assert gathered.bandwidth_us == pytest.approx(1023e6 / 4e3) and gathered.exact
    reduced = st.lower_bound(st.AllReduce(1024), machine, 1024 * MB)
    assert reduced.bandwidth_us == pytest.approx(2 * 1023e6 / 4e3)


def test_all_to_all_on_a_torus_is_tight_without_the_linear_program(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = st.lower_bound(st.AllToAll(36), torus(6), 36 * MB)
    monkeypatch.setattr(lower, "MAX_VARIABLES", 0)
    loose = st.lower_bound(st.AllToAll(36, in_place=True), torus(6), 36 * MB)  # another key in the cache
    assert exact.exact and not loose.exact
    assert loose.bandwidth_us == pytest.approx(exact.bandwidth_us)


def test_a_solver_that_fails_costs_exactness_but_not_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = st.lower_bound(st.AllToAll(5), ring(5), 5 * MB)
    monkeypatch.setattr(lower, "concurrent_flow", lambda net, needs: (np.inf, np.zeros(len(net.src))))
    loose = st.lower_bound(st.AllToAll(5, in_place=True), ring(5), 5 * MB)  # another key in the cache
    assert exact.exact and not loose.exact
    assert loose.bandwidth_us == pytest.approx(exact.bandwidth_us)


def test_unreachable_devices_are_named() -> None:
    one_way = cluster(2, [st.Link(src=0, dst=1, alpha_us=1, gb_per_s=1)])
    st.lower_bound(st.Permute(2, [(0, 1)]), one_way, MB)
    with pytest.raises(st.InvalidInput, match="no route from d1 to d0"):
        st.lower_bound(st.AllGather(2), one_way, MB)
    pair = cluster(2, [*both(0, 1, 1.0, channel="a")[:1], *both(0, 1, 1.0, channel="b")])
    with pytest.raises(st.InvalidInput, match="no route from d1 to d0 over channels a"):
        st.lower_bound(st.AllReduce(2), pair, MB, channels=["a"])


@pytest.mark.parametrize(
    ("ranks", "nbytes", "channels", "message"),
    [
        (3, MB, None, "ranks: device 2 does not exist; test has 2 devices"),
        (2, 0, None, "nbytes: must be finite and > 0, not 0"),
        (2, float("nan"), None, "nbytes: must be finite and > 0, not nan"),
        (2, MB, ["ib"], "unknown channel 'ib'; choose from: link"),
    ],
)
def test_bad_input_is_named(ranks: int, nbytes: float, channels: list[str] | None, message: str) -> None:
    with pytest.raises(st.InvalidInput, match=message):
        st.lower_bound(st.AllGather(ranks), cluster(2, both(0, 1, 1.0)), nbytes, channels=channels)
