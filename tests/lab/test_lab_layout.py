# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import Cluster
from stretto.cluster.model import NIC
from stretto.errors import InvalidInput
from stretto.lab import Lab, LabLayout
from stretto.lab.layout import MAX_BITS_PER_S, MIN_BITS_PER_S, format_rate, lab_rate
from stretto.lab.network import burst_bytes


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("400mbit", 4e8),
        ("1gbit", 1e9),
        ("2.5Gbit/s", 2.5e9),
        ("50MB/s", 4e8),
        ("400Mbps", 4e8),
        ("1 GB/s", 8e9),
        ("2000kbit", 2e6),
    ],
)
def test_rates_are_read_in_bits_and_with_a_capital_b_in_bytes(text: str, bits: float) -> None:
    assert lab_rate(text) == bits


@pytest.mark.parametrize("text", ["", "400", "fast", "-1mbit", "1e3mbit", "4Mib", "9" * 99 + "KB"])
def test_a_rate_that_is_none_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(InvalidInput, match="expected a number with its unit, such as 400mbit"):
        lab_rate(text)


@pytest.mark.parametrize("text", ["50MB", "50 mb", "50MBPS", "50MB/S", "50mB"])
def test_a_rate_that_may_be_bits_or_bytes_is_refused_with_both_spellings(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"write 50MB/s \(bytes\) or 50mbit \(bits\)"):
        lab_rate(text)


@pytest.mark.parametrize("text", ["0mbit", "1kbit", "41gbit", "999999999999GB/s"])
def test_rates_have_limits(text: str) -> None:
    with pytest.raises(InvalidInput, match="must be 1mbit to 40gbit"):
        lab_rate(text)


@given(st.integers(MIN_BITS_PER_S, MAX_BITS_PER_S))
def test_rates_survive_being_written_and_read(bits: int) -> None:
    assert lab_rate(format_rate(bits)) == bits


@pytest.mark.parametrize("order", ["host", "interleaved"])
def test_every_rank_has_its_own_place(order: str) -> None:
    layout = LabLayout.of(hosts=3, ranks_per_host=4, order=order)
    places = {(layout.host_of(rank), layout.local_rank(rank)) for rank in range(layout.world_size)}
    assert places == {(host, local) for host in range(3) for local in range(4)}
    assert [layout.host_of(rank) for rank in range(4)] == ([0] * 4 if order == "host" else [0, 1, 2, 0])


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_that_does_not_exist_has_no_host(rank: int) -> None:
    with pytest.raises(InvalidInput, match=r"rank: must be 0\.\.7"):
        Lab().host_of(rank)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": 0}, r"^hosts: must be 1\.\.32, not 0"),
        ({"ranks_per_host": 65}, r"^ranks: must be 1\.\.64 per host, not 65"),
        ({"hosts": 32, "ranks_per_host": 64}, "^ranks: 32 hosts x 64 are more than 256"),
        ({"order": "random"}, "^order: unknown order 'random'; choose from: host, interleaved"),
        ({"shaper": "netem"}, "^shaper: unknown shaper 'netem'; choose from: tbf, htb"),
        ({"tcp": "reno; reboot"}, "^tcp: 'reno; reboot' is no name of a congestion control"),
        ({"uplinks": {"eth": "1gbit,2gbit,3gbit"}}, "^uplink eth: has 3 rates; give one for all hosts"),
        ({"uplinks": {"eth": "quick"}}, "^uplink eth: rate 'quick': expected"),
        ({"uplinks": {"lo": "1gbit"}}, "^uplink 'lo': a channel's name"),
        ({"uplinks": {"a b; reboot": "1gbit"}}, "^uplink 'a b; reboot': a channel's name"),
        ({"uplinks": {f"c{i}": "1gbit" for i in range(9)}}, "^uplink: at most 8 channels"),
    ],
)
def test_a_wrong_layout_is_refused_before_anything_is_built(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Lab(**options)  # type: ignore[arg-type]


def test_the_truth_has_the_shaped_rates_and_the_places_of_the_ranks(tmp_path: Path) -> None:
    lab = Lab(hosts=2, ranks_per_host=2, uplinks={"rdma": "400mbit", "eth": "200mbit,100mbit"}, order="interleaved")
    truth = lab.cluster()
    assert truth.num_devices == 4
    assert [int(truth.node_host[rank]) for rank in range(4)] == [lab.host_of(rank) for rank in range(4)] == [0, 1, 0, 1]
    up = {
        (truth.node_names[link.src], link.channel): link.gb_per_s
        for link in truth.links()
        if truth.node_kind[link.src] == NIC and truth.node_host[link.dst] < 0
    }
    rdma = {("h0.rdma", "rdma"): 0.05, ("h1.rdma", "rdma"): 0.05}
    assert up == rdma | {("h0.eth", "eth"): 0.025, ("h1.eth", "eth"): 0.0125}
    truth.save(tmp_path / "truth.yaml")
    assert Cluster.load(str(tmp_path / "truth.yaml")) == truth


def test_ranks_of_a_host_meet_in_memory_and_those_of_two_on_an_uplink() -> None:
    truth = Lab(hosts=2, ranks_per_host=2, uplinks={"eth": "100mbit"}).cluster()
    assert {truth.link(i).channel for route in truth.routes(0, 1, channels=["shm"]) for i in route} == {"shm"}
    (between,) = truth.routes(0, 2)
    assert min(truth.link(i).gb_per_s for i in between) == 0.0125


def test_one_host_has_no_uplink() -> None:
    assert Lab(hosts=1).cluster().channels == ("shm",)


def test_a_burst_is_a_millisecond_but_never_less_than_a_few_packets() -> None:
    assert burst_bytes(10**9) == 125_000
    assert burst_bytes(10**7) == 32 * 1024
