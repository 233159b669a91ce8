# SPDX-License-Identifier: Apache-2.0
"""Sends planned by their urgency, and two rings of opposite direction."""

from __future__ import annotations

import random

import numpy as np
import pytest

import stretto as st
from stretto.simulator import simulate
from stretto.synthesis.justify import justified
from stretto.synthesis.piece_search import PieceSearch
from stretto.synthesis.tree_pair_latency import quickest_pairs
from stretto.synthesis.tree_pair_packing import pack_tree_pairs
from stretto.synthesis.tree_pairs import piece_sends


def broken_torus(side: int, seed: int) -> st.Cluster:
    """A torus without one of its links, which a seed draws."""
    ends = {
        (a, b)
        for x in range(side)
        for y in range(side)
        for other in ((x + 1) % side * side + y, x * side + (y + 1) % side)
        for a, b in ((x * side + y, other), (other, x * side + y))
    }
    ends.discard(random.Random(seed).choice(sorted(ends)))
    nodes = [st.Node(name=f"d{k}") for k in range(side * side)]
    links = [st.Link(src=a, dst=b, gb_per_s=20.0, alpha_us=0.6) for a, b in sorted(ends)]
    return st.Cluster.build("broken torus", nodes=nodes, links=links)


@pytest.mark.parametrize("seed", range(3))
def test_sends_by_urgency_are_faster_than_pieces_in_turn_and_right(seed: int) -> None:
    cluster, nbytes = broken_torus(3 + seed % 2, seed), 1e6
    collective = st.AllReduce(cluster.num_devices)
    packing = pack_tree_pairs(cluster, collective.ranks)
    _, pairs = quickest_pairs(cluster, collective.ranks, nbytes, packing)
    sends = piece_sends(collective, cluster, pairs, 8 * len(pairs), nbytes=nbytes)
    in_turn, urgent = (PieceSearch(cluster, nbytes, "pipelined", np.inf) for _ in range(2))
    in_turn.climb(lambda pieces: sends, first=8 * len(pairs), few=1, most=0)
    took = urgent.justify(sends)
    assert in_turn.best is not None and urgent.best is not None
    urgent.best[1].verify()
    assert urgent.best[0] == took == simulate(urgent.best[1], cluster, nbytes=nbytes).total_us
    assert st.lower_bound(collective, cluster, nbytes).total_us <= took < in_turn.best[0] * 0.98


def test_a_plan_keeps_links_and_waits() -> None:
    cluster, nbytes = broken_torus(3, 5), 1e5
    collective = st.AllReduce(cluster.num_devices)
    packing = pack_tree_pairs(cluster, collective.ranks)
    sends = piece_sends(collective, cluster, list(packing.pairs), 4 * len(packing.pairs), nbytes=nbytes)
    program = sends.program
    plan = justified(program, sends.piece * sends.piece_us, cluster, nbytes=nbytes, blocks=False)
    for send in range(program.num_transfers):
        for before in program.after[program.after_ptr[send] : program.after_ptr[send + 1]]:
            assert plan.start_us[send] >= plan.arrive_us[before] - 1e-9
    busy_us = program.transfer_bytes(nbytes) / 20e3
    link = np.array([route[0] for route in program.routes])[program.route]
    for one in np.unique(link):
        mine = np.flatnonzero(link == one)
        mine = mine[np.argsort(plan.start_us[mine])]
        assert (plan.start_us[mine[1:]] >= (plan.start_us + busy_us)[mine[:-1]] - 1e-9).all()


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_two_opposed_rings_pass_switches_that_one_ring_would_crowd(kind: str) -> None:
    # Three switches of four devices each, joined by links that are slower than the devices' own.
    nodes = [st.Node(name=f"d{k}", host=k // 4) for k in range(12)]
    nodes += [st.Node(name=f"s{k}", kind="switch") for k in range(3)]
    ends = [(k, 12 + k // 4, 25.0) for k in range(12)] + [(12, 13, 20.0), (13, 14, 20.0), (14, 12, 20.0)]
    links = [st.Link(src=a, dst=b, gb_per_s=rate, alpha_us=0.3) for x, y, rate in ends for a, b in ((x, y), (y, x))]
    cluster = st.Cluster.build("joined switches", nodes=nodes, links=links)
    collective = st.collectives.COLLECTIVES[kind](12)
    one, two = (
        st.synthesize(collective, cluster, 4 * st.MB, cache=False, makers=[maker])
        for maker in ("library:ring", "library:ring,opposed")
    )
    assert one.certificate.gap > 0.2 > 0.05 > two.certificate.gap
