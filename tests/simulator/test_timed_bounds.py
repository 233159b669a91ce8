# SPDX-License-Identifier: Apache-2.0
"""Bounds that add latencies and bytes, against an exhaustive search on tiny random clusters and values by hand."""

from __future__ import annotations

import random

import pytest
from exhaustive import bounds_and_optima, tiny

import stretto as st

@pytest.mark.parametrize("seed", range(16))
def test_no_bound_is_above_the_best_program_of_an_exhaustive_search(seed: int) -> None:
    case = tiny(random.Random(seed), 3 + seed % 2)
    for kind, bound, best in bounds_and_optima(case):
        assert bound <= best * (1 + 1e-9), kind


def h100(hosts: int) -> st.Cluster:
    """Hosts of 8 GPUs on an NVSwitch, one 50 GB/s NIC each, and one switch for the NICs of equal number."""
    nodes = [st.Node(name=f"h{h}g{k}", host=h) for h in range(hosts) for k in range(8)]
    nodes += [st.Node(name=f"s{k}", kind="switch") for k in range(hosts + 8)]
    links = []
    for h in range(hosts):
        for k in range(8):
            for switch, rate, alpha in ((8 * hosts + h, 450.0, 0.35), (9 * hosts + k, 50.0, 1.25)):
                ends = ((8 * h + k, switch), (switch, 8 * h + k))
                links += [st.Link(src=a, dst=b, gb_per_s=rate, alpha_us=alpha) for a, b in ends]
    return st.Cluster.build("h100", nodes=nodes, links=links)


@pytest.mark.parametrize("collective", [st.AllGather(16), st.ReduceScatter(16)])
def test_a_hop_between_hosts_and_a_hop_inside_add_up(collective: st.Collective) -> None:
    # A byte enters a host after 2.5 us and is with its neighbours 0.7 us later: 50 (T - 2.5) + 350 (T - 3.2) >= 500 KB.
    bound = st.lower_bound(collective, h100(2), 1e6)
    assert bound.total_us == pytest.approx((500 + 50 * 2.5 + 350 * 3.2) / 400)
    assert bound.method == "timed cut" and bound.bandwidth_us < bound.total_us


def test_what_nobody_can_relay_in_time_is_received_by_everyone() -> None:
    # In less than two hops (2 us) nothing is relayed or added up, so everybody takes in what 7 others have.
    nodes = [st.Node(name=f"d{i}") for i in range(8)] + [st.Node(name="s", kind="switch")]
    links = [st.Link(src=a, dst=b, gb_per_s=10.0, alpha_us=0.5) for i in range(8) for a, b in ((i, 8), (8, i))]
    star = st.Cluster.build("star", nodes=nodes, links=links)
    assert st.lower_bound(st.AllReduce(8), star, 1e3).total_us == pytest.approx(1.0 + 7 * 0.1)
    assert st.lower_bound(st.AllReduce(8), star, 1e6).total_us > 101.8
