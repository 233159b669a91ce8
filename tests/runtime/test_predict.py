# SPDX-License-Identifier: Apache-2.0
"""Predictions of what the executor does: slices, windows and shared links."""

from __future__ import annotations

import numpy as np
import pytest

from stretto import Cluster, lower_bound, simulate
from stretto.algorithms import algorithm
from stretto.lab.layout import LabLayout
from stretto.programs.lower import lower
from stretto.programs.streams import InstructionStreams
from stretto.runtime.executor.executor import far_bytes
from stretto.runtime.torch_backend.prediction import predict
from stretto.simulator.priced import repeated, slices_of
from stretto.simulator.runtimes import PRESETS

WINDOW = PRESETS["executor"].window
LAB = LabLayout.of(hosts=2, ranks_per_host=2, uplinks={"eth": "200mbit"}).cluster()


def test_slices_are_as_long_as_the_messages_allow() -> None:
    pairs = lower(algorithm("pairwise", "all_to_all", 4))
    assert slices_of(pairs, 1000, far_bytes(pairs)) == 1
    assert slices_of(pairs, 4 << 20, 1 << 18) == 4
    assert slices_of(pairs, 4 << 20, 64) == 256  # never below a page


@pytest.mark.parametrize("name", ["ring", "halving_doubling", "direct", "hierarchical"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_prediction_moves_every_byte_and_never_beats_the_lower_bound(name: str, kind: str) -> None:
    program = algorithm(name, kind, 4, cluster=LAB)
    lowered = lower(program)
    found = predict(lowered, LAB, nbytes=1 << 20, message_bytes=far_bytes(lowered))
    moved = simulate(program, LAB, nbytes=1 << 20).nbytes.sum()
    assert found.nbytes.sum() == pytest.approx(moved)
    assert found.total_us >= lower_bound(program.collective, LAB, nbytes=1 << 20).total_us * (1 - 1e-9)


def test_streams_repeated_for_slices_wait_inside_their_own_slice() -> None:
    lowered = lower(algorithm("direct", "all_reduce", 4))
    thrice = repeated(lowered, 3)
    assert thrice.num_instructions == 3 * lowered.num_instructions
    once, again = InstructionStreams.of(lowered), InstructionStreams.of(thrice)
    assert len(again.senders) == 3 * len(once.senders)
    waits = thrice.dep_tb >= 0
    assert waits.sum() == 3 * (lowered.dep_tb >= 0).sum()
    assert np.array_equal(repeated(lowered, 1).dep_step, lowered.dep_step)


def test_a_connection_lets_no_more_messages_be_under_way_than_its_window() -> None:
    """With one message as long as the latency, a window of four fills a link only to four fifths."""
    line = Cluster.preset("ring", nodes=2, gb_per_s=1.0, alpha_us=256.0)
    lowered = lower(algorithm("direct", "all_gather", 2))
    length, count = 64 << 10, 64
    total = predict(lowered, line, nbytes=2 * length * count, message_bytes=length).total_us
    step_us = length / 1e3 + 256.0
    assert total == pytest.approx((count // WINDOW) * step_us + (WINDOW - 1) * length / 1e3, rel=0.02)
