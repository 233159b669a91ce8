# SPDX-License-Identifier: Apache-2.0
"""Lowered programs on the network: timed as their threadblocks would run them."""

from __future__ import annotations

import pytest

from stretto import MB, Cluster, algorithm, simulate


@pytest.mark.parametrize("preset", ["ring", "fully_connected"])
@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
@pytest.mark.parametrize("name", ["ring", "direct", "recursive_doubling"])
def test_the_lowered_form_takes_as_long_as_the_program(name: str, kind: str, preset: str) -> None:
    cluster = Cluster.preset(preset, nodes=8)
    program = algorithm(name, kind, 8)
    abstract, lowered = (simulate(p, cluster, nbytes=8 * MB) for p in (program, program.lower()))
    # Where many messages ask for a link at one moment their numbers decide, and those are not the program's.
    crowded = (name, preset) == ("direct", "ring")
    assert lowered.total_us == pytest.approx(abstract.total_us, rel=0.1 if crowded else 1e-9)
    assert lowered.link_bytes.tolist() == pytest.approx(abstract.link_bytes.tolist())


def test_a_message_in_pieces_may_be_forwarded_piece_by_piece() -> None:
    # Bruck's chunks wrap around the buffer, so that one message becomes two instructions, each sent when it can.
    cluster = Cluster.preset("fully_connected", nodes=8)
    program = algorithm("bruck", "all_gather", 8)
    abstract, lowered = (simulate(p, cluster, nbytes=8 * MB) for p in (program, program.lower()))
    assert lowered.num_spans > abstract.num_spans
    assert lowered.total_us < abstract.total_us
    assert lowered.link_bytes.tolist() == pytest.approx(abstract.link_bytes.tolist())


def test_instances_share_the_links_and_change_nothing_in_a_ring_without_latency() -> None:
    cluster = Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=0.0)
    program = algorithm("ring", "all_reduce", 4)
    times = [simulate(program.lower(instances=k), cluster, nbytes=4 * MB).total_us for k in (1, 2)]
    assert times == pytest.approx([600.0, 600.0])


def test_spans_are_named_after_the_receiving_instruction() -> None:
    cluster = Cluster.preset("ring", nodes=3)
    t = simulate(algorithm("ring", "all_reduce", 3, in_place=True).lower(), cluster, nbytes=MB)
    assert {name.split()[0] for name in t.names} <= {"r", "rcs", "rrs", "rrc", "rrcs"}
    assert t.num_spans == 12
