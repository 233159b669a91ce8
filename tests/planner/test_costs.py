# SPDX-License-Identifier: Apache-2.0
"""What bound motifs cost by simulation."""

from __future__ import annotations

import pytest

from stretto import Cluster, algorithm, simulate
from stretto.algorithms.orders import rails
from stretto.cluster.presets.hgx2 import INCAST
from stretto.errors import Infeasible, InvalidInput
from stretto.planner.algebra.recipes import MotifRequest, build, library
from stretto.planner.costs.channels import bindings, restrict
from stretto.planner.costs.concurrent import ConcurrentProgram, together
from stretto.planner.costs.costs import CPU_LAUNCH_US, LAUNCH_US, Motion, SimulatedCosts, interpolated, launch_us
from stretto.programs import Program
from stretto.units import MB

HGX2 = Cluster.preset("hgx2", nodes=2)
FAST, SLOW = ("nvlink", "rdma"), ("pcie", "ethernet")
EVERYONE = (tuple(range(16)),)


def motion(kind: str, channels: tuple[str, ...] = FAST, groups: tuple[tuple[int, ...], ...] = EVERYONE) -> Motion:
    return Motion(kind=kind, groups=groups, channels=channels)


def test_a_cost_is_the_simulated_time_on_the_channels_and_says_so() -> None:
    costs = SimulatedCosts(HGX2)
    found = costs.cost(motion("all_gather"), 10 * MB, "direct", exact=True)
    expected = simulate(algorithm("direct", "all_gather", 16), HGX2, nbytes=10 * MB, channels=FAST).total_us
    assert found.us == pytest.approx(expected)
    assert found.source == "simulated: direct on nvlink+rdma, fair"
    fifo = SimulatedCosts(Cluster.preset("dgx2")).cost(motion("all_gather", ("nvlink",)), MB, "ring")
    assert fifo.source == "simulated: ring on nvlink, fifo"


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "double_binary_tree", "double_binary_tree:1"])
@pytest.mark.parametrize("channels", [FAST, SLOW])
def test_interpolated_costs_are_close_to_exact_ones_and_grow(name: str, channels: tuple[str, ...]) -> None:
    costs = SimulatedCosts(HGX2)
    wanted = motion("all_reduce", channels)
    sizes = [3e3, 5e4, 7e5, 3e6, 9e7]
    times = [costs.cost(wanted, size, name).us for size in sizes]
    assert times == sorted(times)
    for size, us in zip(sizes, times, strict=True):
        assert us == pytest.approx(costs.cost(wanted, size, name, exact=True).us, rel=0.1)


def test_each_size_of_the_grid_is_simulated_once() -> None:
    costs = SimulatedCosts(HGX2)
    for size in (5e5, 6e5, 7e5, 8e5):
        costs.cost(motion("all_reduce"), size, "ring")
    assert costs.simulations == 2
    assert interpolated(10.0, lambda size: size) == 1024.0
    assert interpolated(4096.0, lambda size: size) == 4096.0


def test_groups_that_meet_on_links_slow_one_another_down_and_others_do_not() -> None:
    costs = SimulatedCosts(HGX2)
    alone = costs.cost(motion("all_reduce", ("nvlink",), (tuple(range(8)),)), 8 * MB, "ring", exact=True).us
    hosts = (tuple(range(8)), tuple(range(8, 16)))
    assert costs.cost(motion("all_reduce", ("nvlink",), hosts), 8 * MB, "ring", exact=True).us == pytest.approx(alone)
    one = costs.cost(motion("all_reduce", SLOW, ((0, 8),)), 8 * MB, "direct", exact=True).us
    socket = costs.cost(motion("all_reduce", SLOW, ((0, 8), (1, 9), (2, 10), (3, 11))), 8 * MB, "direct", exact=True).us
    assert socket > 2 * one


def test_adding_up_on_the_host_costs_time_and_on_the_gpu_none() -> None:
    slow, free = SimulatedCosts(HGX2), SimulatedCosts(HGX2, cpu_reduce_us_per_mb=0.0)
    cases = (("all_reduce", SLOW, True), ("all_gather", SLOW, False), ("all_reduce", FAST, False))
    for kind, channels, differ in cases:
        a, b = (one.cost(motion(kind, channels), 16 * MB, "ring", exact=True).us for one in (slow, free))
        assert (a > b) == differ


def test_channels_that_cannot_carry_a_motif_are_infeasible() -> None:
    costs = SimulatedCosts(HGX2)
    with pytest.raises(Infeasible, match="nvlink do not join"):
        costs.cost(motion("all_reduce", ("nvlink",)), MB, "ring")
    # Without PCIe the GPUs of an NDv2 reach only some of the others, which a ring can live with.
    ndv2 = SimulatedCosts(Cluster.preset("ndv2"))
    eight = (tuple(range(8)),)
    assert ndv2.cost(motion("all_reduce", ("nvlink",), eight), MB, "ring").us > 0
    with pytest.raises(Infeasible, match=r"all_to_all by direct on nvlink: .*no route"):
        ndv2.cost(motion("all_to_all", ("nvlink",), eight), MB, "direct")
    with pytest.raises(InvalidInput, match="nbytes: must be > 0"):
        costs.cost(motion("all_reduce"), 0.0, "ring")


def test_a_provider_adds_algorithms() -> None:
    def provider(ask: MotifRequest, cluster: Cluster, nbytes: float) -> dict[str, object]:
        assert cluster.channels == FAST
        return {"mine": lambda: algorithm("pairwise", ask.kind, ask.group)} if ask.kind == "all_to_all" else {}

    costs = SimulatedCosts(HGX2, providers=[provider])  # type: ignore[list-item]
    wanted = motion("all_to_all")
    assert costs.algorithms(wanted, MB)[-1] == "mine"
    assert "mine" not in costs.algorithms(motion("all_reduce"), MB)
    assert costs.cost(wanted, MB, "mine").us == pytest.approx(costs.cost(wanted, MB, "pairwise", exact=True).us)


@pytest.mark.parametrize(
    "kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send"]
)
def test_every_recipe_builds_a_program_that_verifies(kind: str) -> None:
    group = (3, 9) if kind == "send" else tuple(range(1, 15))
    for root in (0, 1):
        ask = MotifRequest(kind=kind, group=group, root=root)
        for name in library(ask):
            build(name, ask, HGX2).verify()


def test_a_window_of_an_all_to_all_moves_its_share() -> None:
    costs = SimulatedCosts(HGX2)
    windows = [Motion(kind="all_to_all", groups=EVERYONE, channels=FAST, window=w) for w in ((0, 8), (8, 8))]
    whole = costs.cost(motion("all_to_all"), 16 * MB, "direct", exact=True).us
    halves = [costs.cost(window, 8 * MB, "direct", exact=True).us for window in windows]
    assert max(halves) <= whole < sum(halves)
    program = costs.program(windows[1], 8 * MB, "direct")
    assert {(d - s) % 16 for s, d in zip(program.src.tolist(), program.dst.tolist(), strict=True)} == set(range(8, 16))
    with pytest.raises(InvalidInput, match="window"):
        build("direct", MotifRequest(kind="all_to_all", group=EVERYONE[0], window=(9, 8)), HGX2)


def test_rings_run_on_every_rail_that_a_device_can_feed() -> None:
    assert rails(HGX2, range(16)) == 8
    assert rails(HGX2, range(8)) == 1
    assert rails(restrict(HGX2, SLOW), range(16)) == 1
    assert rails(restrict(HGX2, ("nvlink", "pcie", "ethernet")), range(16)) == 2


def test_a_chain_in_pieces_overlaps_all_hops_but_the_slowest_where_links_are_shared_fairly() -> None:
    # One hop of 12.5 GB/s between the hosts and 7 of 150 inside: in 8 pieces, which follow one another on each
    # connection, the fast hops cost one piece each instead of the whole.
    costs = SimulatedCosts(HGX2)
    line = Motion(kind="broadcast", groups=((0, *range(8, 16)),), channels=FAST)
    whole, pieces = (costs.cost(line, 64 * MB, name, exact=True) for name in ("chain:1", "chain"))
    assert costs.program(line, 64 * MB, "chain").num_transfers == 8 * 8
    assert pieces.source.endswith("fair")
    assert whole.us - pieces.us == pytest.approx(7 * (1 - 1 / 8) * 64e3 / 150)


@pytest.mark.parametrize("kind", ["broadcast", "reduce"])
def test_chains_leave_a_host_through_all_of_its_nics(kind: str) -> None:
    costs = SimulatedCosts(HGX2)
    chains = costs.program(motion(kind), MB, "chain")
    assert chains.num_transfers == 8 * 15 * 8
    assert chains.num_lanes == 8
    assert chains.collective.kind == kind
    ends = (chains.src, chains.dst) if kind == "broadcast" else (chains.dst, chains.src)
    across = [(a, b) for a, b in zip(*(end.tolist() for end in ends), strict=True) if a < 8 <= b]
    assert {a for a, _ in across} == set(range(8))
    # 8 NICs of 12.5 GB/s: at least 10 ms for 1 GB, where one NIC alone takes 80.
    assert 10_000 < costs.cost(motion(kind), 1000 * MB, "chain:64", exact=True).us < 11_500


def test_the_bound_of_the_busiest_link_is_below_every_cost() -> None:
    costs = SimulatedCosts(HGX2)
    for kind in ("all_reduce", "broadcast", "all_to_all"):
        for channels in (FAST, SLOW):
            for name in library(MotifRequest(kind=kind, group=tuple(range(16)))):
                for size in (100.0, 3 * MB, 70 * MB):
                    least = costs.at_least_us(motion(kind, channels), size, name)
                    assert 0 < least <= costs.cost(motion(kind, channels), size, name).us * (1 + 1e-9)


def test_programs_side_by_side_verify_and_contend() -> None:
    ring, direct = algorithm("ring", "all_reduce", 16, cluster=HGX2), algorithm("direct", "all_to_all", 16)

    def time(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[Program, float]:
        parts = [
            ConcurrentProgram(program=ring, nbytes=4 * MB, channels=first),
            ConcurrentProgram(program=direct, nbytes=8 * MB, channels=second),
        ]
        program, nbytes = together(parts, HGX2)
        return program, simulate(program, HGX2, nbytes=nbytes).total_us

    wanted = ((ring, 4 * MB, FAST), (direct, 8 * MB, SLOW))
    alone = [simulate(p, HGX2, nbytes=n, channels=c).total_us for p, n, c in wanted]
    program, apart_us = time(FAST, SLOW)
    program.verify()
    assert program.collective.kind == "2 x all_reduce+all_to_all"
    assert apart_us == pytest.approx(max(alone))
    assert time(FAST, FAST)[1] > simulate(direct, HGX2, nbytes=8 * MB, channels=FAST).total_us


def test_launching_costs_more_through_the_host() -> None:
    launch = {b.name: launch_us(b) for b in bindings(HGX2)}
    assert launch["nvlink+rdma"] == LAUNCH_US < CPU_LAUNCH_US == launch["pcie+ethernet"]


def test_many_flows_into_one_nic_lose_throughput() -> None:
    cluster = Cluster.preset("hgx2", nodes=16)
    assert any("incast" in note for note in cluster.notes)
    costs = SimulatedCosts(cluster)
    per_flow = {}
    for flows in (16, 32, 64, 120):
        senders = tuple(range(8, 8 + flows))
        gather = Motion(kind="gather", groups=((0, *senders),), channels=FAST)
        per_flow[flows] = costs.cost(gather, (flows + 1) * MB, "direct", exact=True).us / flows
    assert per_flow[16] == pytest.approx(per_flow[32], rel=0.01)
    shares = [share for count, share in INCAST if count <= 120]
    assert per_flow[32] / per_flow[64] == pytest.approx(shares[0], rel=0.01)
    assert per_flow[32] / per_flow[120] == pytest.approx(shares[1], rel=0.02)
    assert Cluster.preset("hgx2", nodes=1).incast_curves == ()
