# SPDX-License-Identifier: Apache-2.0
"""What the probe concludes from measurements, on simulated networks of which everything is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_world import SimulatedMeter, network

from stretto import Cluster
from stretto.errors import InvalidInput
from stretto.lab import LabLayout
from stretto.runtime.probe.build import build
from stretto.runtime.probe.find import at_distances, find, rounds
from stretto.runtime.probe.fit import fit_line
from stretto.runtime.probe.match import match, match_presets, pair_rates, ring_us
from stretto.runtime.probe.probe import conclude

BLOCKS = ((0, 1, 2, 3), (4, 5, 6, 7))
DEALT = ((0, 2, 4, 6), (1, 3, 5, 7))
FOUR = ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize("noise_us", [0.0, 1000.0, 4000.0])
@pytest.mark.parametrize("hosts", [BLOCKS, DEALT, FOUR, ((0, 1, 2, 3, 4), (5,), (6, 7))])
def test_hosts_rates_and_uplinks_are_found(hosts: tuple[tuple[int, ...], ...], noise_us: float) -> None:
    rates = {"rdma": [0.05] * len(hosts), "eth": [0.025] * len(hosts)}
    found = find(SimulatedMeter(network(hosts, uplinks=rates), noise_us=noise_us, burst_us=1000, seed=3))
    assert found.hosts == hosts
    assert found.notes == ()
    assert found.memory is not None
    for net, rate in zip(found.networks, (0.05, 0.025), strict=True):
        assert [port.ranks for port in net.ports] == list(hosts)
        assert net.trunks == ()
        assert net.flow_gb_per_s == math.inf
        for port in net.ports:
            assert port.out_gb_per_s == pytest.approx(rate, rel=0.05)
            assert port.in_gb_per_s == pytest.approx(rate, rel=0.05)


def test_latency_is_what_a_hop_costs_not_what_starting_costs() -> None:
    found = find(SimulatedMeter(network(BLOCKS, uplinks={"eth": [0.05] * 2})))
    assert found.networks[0].alpha_us == pytest.approx(10.0)
    assert found.memory is not None
    assert found.memory.alpha_us == pytest.approx(2.0)
    assert found.memory.gb_per_s == pytest.approx(4.0, rel=0.01)


def test_a_slow_host_slows_nobody_else_down() -> None:
    world = network(((0, 1), (2, 3), (4, 5)), uplinks={"eth": [0.05, 0.05, 0.0125]})
    found = find(SimulatedMeter(world, noise_us=1000))
    out = [port.out_gb_per_s for port in found.networks[0].ports]
    into = [port.in_gb_per_s for port in found.networks[0].ports]
    assert out == pytest.approx([0.05, 0.05, 0.0125], rel=0.05)
    assert into == pytest.approx([0.05, 0.05, 0.0125], rel=0.05)


def test_ranks_of_a_host_with_two_uplinks_are_told_apart() -> None:
    found = find(SimulatedMeter(network(BLOCKS, uplinks={"eth": [0.05] * 2}, ports=2), noise_us=1000))
    ports = found.networks[0].ports
    assert [port.ranks for port in ports] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert [port.out_gb_per_s for port in ports] == pytest.approx([0.05] * 4, rel=0.05)
    cluster = build(found)
    assert {"h0.eth0", "h0.eth1"} <= set(cluster.node_names)


def test_a_cap_on_each_flow_is_no_second_uplink() -> None:
    found = find(SimulatedMeter(network(BLOCKS, uplinks={"eth": [0.05] * 2}, flow_gb_per_s=0.02)))
    net = found.networks[0]
    assert net.flow_gb_per_s == pytest.approx(0.02, rel=0.05)
    assert [port.ranks for port in net.ports] == list(BLOCKS)
    assert [port.out_gb_per_s for port in net.ports] == pytest.approx([0.05] * 2, rel=0.05)


def test_hosts_behind_a_switch_that_all_of_them_share_are_grouped() -> None:
    racks = [[0, 2], [1, 3]]
    world = network(FOUR, uplinks={"eth": [0.05] * 4}, racks=racks, rack_gb_per_s=0.06)
    found = find(SimulatedMeter(world, noise_us=1000))
    net = found.networks[0]
    assert sorted(trunk.hosts for trunk in net.trunks) == [(0, 2), (1, 3)]
    assert [port.out_gb_per_s for port in net.ports] == pytest.approx([0.05] * 4, rel=0.05)
    assert [trunk.out_gb_per_s for trunk in net.trunks] == pytest.approx([0.06] * 2, rel=0.05)
    assert [trunk.in_gb_per_s for trunk in net.trunks] == pytest.approx([0.06] * 2, rel=0.05)
    assert pair_rates(build(found)) == pytest.approx(pair_rates(world), rel=0.08)


def test_wide_switches_are_no_trunks() -> None:
    world = network(FOUR, uplinks={"eth": [0.05] * 4}, racks=[[0, 1], [2, 3]], rack_gb_per_s=0.2)
    assert find(SimulatedMeter(world, noise_us=1000)).networks[0].trunks == ()


def test_more_hosts_need_few_more_runs() -> None:
    def runs(count: int) -> int:
        meter = SimulatedMeter(network([(at,) for at in range(count)], uplinks={"eth": [0.05] * count}))
        find(meter)
        return meter.runs

    assert runs(16) < 4 * runs(4) < 4 * 60


def test_a_job_on_one_host_is_a_cluster_of_memory_alone() -> None:
    probed = conclude(find(SimulatedMeter(network([(0, 1, 2)], uplinks={}))))
    assert probed.cluster.channels == ("shm",)
    assert probed.cluster.unreachable() is None
    assert probed.groups == {"host": ((0, 1, 2),)}
    assert probed.renumbering == (0, 1, 2)
    assert set(probed.fit_error) == {"shm"}


def test_hosts_of_one_rank_have_no_memory_to_measure() -> None:
    probed = conclude(find(SimulatedMeter(network([(0,), (1,), (2,)], uplinks={"eth": [0.05] * 3}))))
    assert probed.found.memory is None
    assert probed.cluster.channels == ("eth",)
    assert probed.cluster.unreachable() is None


def test_the_cluster_predicts_what_the_labs_own_does(tmp_path: object) -> None:
    layout = LabLayout.of(hosts=2, ranks_per_host=4, uplinks={"rdma": "400mbit", "eth": "200mbit"}, order="interleaved")
    truth = layout.cluster()
    probed = conclude(find(SimulatedMeter(truth, noise_us=1000, burst_us=1000)))
    assert probed.cluster.channels == truth.channels
    assert sorted(probed.cluster.node_names) == sorted(truth.node_names)
    assert probed.cluster.num_links == truth.num_links
    assert ring_us(probed.cluster, range(8)) == pytest.approx(ring_us(truth, range(8)), rel=0.05)


def test_dealt_ranks_should_be_renumbered_and_blocks_should_not() -> None:
    dealt = conclude(find(SimulatedMeter(network(DEALT, uplinks={"eth": [0.05] * 2}))))
    assert dealt.renumbering == (0, 2, 4, 6, 1, 3, 5, 7)
    assert dealt.gain == pytest.approx(4.0, rel=0.1)
    assert any("0, 2, 4, 6, 1, 3, 5, 7" in line for line in dealt.lines())
    blocks = conclude(find(SimulatedMeter(network(BLOCKS, uplinks={"eth": [0.05] * 2}))))
    assert blocks.renumbering == tuple(range(8))
    assert blocks.gain == 1.0


def test_a_known_cluster_is_recognised_under_another_numbering() -> None:
    known = network(BLOCKS, uplinks={"eth": [0.05, 0.02]})
    dealt = ((1, 3, 5, 7), (0, 2, 4, 6))
    probed = conclude(find(SimulatedMeter(network(dealt, uplinks={"eth": [0.05, 0.02]}), noise_us=1000)), known=known)
    assert probed.match is not None
    assert probed.preset == "world"
    assert {probed.match.order[at] for at in range(4)} in ({1, 3, 5, 7}, {0, 2, 4, 6})
    assert probed.match.error < 0.1
    other = network(BLOCKS, uplinks={"eth": [0.2, 0.2]})
    assert match(probed.cluster, other) is None
    assert match(probed.cluster, Cluster.preset("dgx2")) is None


def test_presets_are_recognised_by_their_rates() -> None:
    for name, nodes in (("dgx2", 2), ("ndv2", 1)):
        known = Cluster.preset(name, nodes=nodes)
        found = match_presets(known)
        assert found is not None
        assert found.error == 0.0
        assert found.name.startswith(name)
    assert match_presets(network(BLOCKS, uplinks={"eth": [0.001] * 2})) is None


def test_an_automorphism_of_uneven_links_is_found() -> None:
    known = Cluster.preset("ndv2", nodes=1)
    order = np.random.default_rng(1).permutation(8)
    rates = pair_rates(known)
    nodes, links = list(known.nodes()), list(known.links())
    place = {int(old): new for new, old in enumerate(order)}
    moved = Cluster.build(
        "moved", nodes=[nodes[at] for at in [*order, *range(8, len(nodes))]],
        links=[type(x)(**{**vars(x), "src": place.get(x.src, x.src), "dst": place.get(x.dst, x.dst)}) for x in links],
    )  # fmt: skip
    found = match(moved, known)
    assert found is not None
    assert pair_rates(moved)[np.ix_(found.order, found.order)] == pytest.approx(rates)


@settings(max_examples=30, deadline=None)
@given(
    rate=st.floats(0.001, 20.0), offset=st.floats(-2000.0, 2000.0),
    noise=st.lists(st.floats(0.0, 0.02), min_size=9, max_size=9),
)  # fmt: skip
def test_a_line_gives_the_rate_whatever_is_constant(rate: float, offset: float, noise: list[float]) -> None:
    sizes = [share * rate * 120_000 for share in (0.2, 0.6, 1.0)]
    times = [[offset + size / rate * (1 + noise[3 * at + k] * 0.3) for k in range(3)] for at, size in enumerate(sizes)]
    scaled = [size * 1e3 for size in sizes]
    fit = fit_line(scaled, [[max(t, 1.0) for t in row] for row in np.array(times) * 1.0])
    assert fit.gb_per_s == pytest.approx(rate, rel=0.03)


def test_one_size_gives_no_line() -> None:
    with pytest.raises(InvalidInput, match="two sizes"):
        fit_line([1.0, 1.0], [[1.0], [2.0]])


def test_rounds_pair_everybody_without_meeting_twice() -> None:
    for count in (2, 3, 4, 7, 16):
        pairs = at_distances(count)
        assert {a for a, _ in pairs} == set(range(count))
        made = rounds(pairs)
        assert sorted(pair for each in made for pair in each) == sorted(pairs)
        for each in made:
            ends = [host for pair in each for host in pair]
            assert len(set(ends)) == len(ends)


def test_alike_hosts_have_dimensions_in_the_cluster_that_is_written() -> None:
    found = conclude(find(SimulatedMeter(network(BLOCKS, uplinks={"eth": [0.05] * 2}), noise_us=1000.0, seed=1)))
    inside, between = found.cluster.dimensions
    assert (inside.kind, inside.size, between.kind, between.size) == ("switch", 4, "switch", 2)
    assert between.gb_per_s == pytest.approx(0.0125, rel=0.06)
    assert any(line.startswith("dimensions: switch of 4") for line in found.lines())
    for hosts in (DEALT, ((0, 1, 2, 3, 4), (5,), (6, 7))):
        assert (
            conclude(find(SimulatedMeter(network(hosts, uplinks={"eth": [0.05] * len(hosts)})))).cluster.dimensions
            == ()
        )
