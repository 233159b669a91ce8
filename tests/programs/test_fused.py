# SPDX-License-Identifier: Apache-2.0
"""Fused steps: proved for every algorithm of the library; and the proof finds what was broken on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fused_check import check_fused

from stretto import Cluster, InvalidInput, Program, VerificationError, synthesize
from stretto.algorithms import algorithm
from stretto.algorithms.registry import defined_for
from stretto.collectives import COLLECTIVES, AllReduce
from stretto.programs.fused import PACKET, Fused, FusedStep, fuse

MODES: tuple[dict[str, Any], ...] = ({"symmetric": True}, {}, {"protocol": "ll"})


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_algorithm_of_the_library_is_proved_in_every_mode(kind: str) -> None:
    names = [(n, name) for n in (2, 3, 4) for name in defined_for(kind, n)]
    for at, (n, name) in enumerate(names):
        program = algorithm(name, kind, n, in_place=at % 2 == 1)
        fused = [fuse(program, **options) for options in MODES]
        # One behind the other: slots are used again by other programs.
        check_fused(*fused, orders=2, seed=at)


def test_lowered_streams_become_steps_too() -> None:
    for kind in ("all_reduce", "all_gather"):
        lowered = algorithm("ring", kind, 3).lower(instances=2)
        for options in MODES:
            check_fused(fuse(lowered, **options), orders=2)


def test_a_synthesised_program_becomes_steps() -> None:
    found = synthesize(AllReduce(8), Cluster.preset("dgx_a100"), 1_000_000, budget_s=1)
    assert isinstance(found.program, Program)
    check_fused(fuse(found.program), orders=2)


def test_a_direct_all_reduce_is_one_step_of_n_sources_and_n_targets() -> None:
    fused = fuse(algorithm("direct", "all_reduce", 8), symmetric=True)
    for rank, stream in enumerate(fused.steps):
        (step,) = stream
        (item,) = step.items
        assert [p.rank for p in item.sources] == list(range(8))
        assert sorted(p.rank for p in item.targets) == list(range(8)) and item.targets[0].rank == rank
        assert step.finish and not step.waits and not step.signals
    assert fused.slots == 0 and all(len(peers) == 7 for peers in fused.ready + fused.done)


def test_one_shot_with_packets_has_no_signals() -> None:
    fused = fuse(algorithm("direct", "all_reduce", 4, steps=1), protocol="ll")
    assert fused.hears_all and fused.packets == 3 and fused.depth == 2
    assert not any(step.signals or step.waits for stream in fused.steps for step in stream)
    assert all(p.space == PACKET for p in fused.steps[0][0].items[0].targets)


def test_a_broadcast_tells_at_the_start_that_slots_are_free() -> None:
    fused = fuse(algorithm("chain", "broadcast", 4))
    assert not fused.hears_all and 0 in fused.starts[3] and not fused.starts[0]


def changed(fused: Fused, rank: int, index: int, step: FusedStep) -> Fused:
    """The same with one step replaced."""
    stream = (*fused.steps[rank][:index], step, *fused.steps[rank][index + 1 :])
    return replace(fused, steps=(*fused.steps[:rank], stream, *fused.steps[rank + 1 :]))


def test_the_checker_finds_what_is_taken_away() -> None:
    """Every wait and every meeting that some stream has is needed: without it a race, or a wrong result, shows."""
    found = 0
    for fused in (fuse(algorithm("direct", "all_reduce", 3)), fuse(algorithm("ring", "all_reduce", 3, in_place=True))):
        for rank, stream in enumerate(fused.steps):
            for index, step in enumerate(stream):
                for at in range(len(step.waits)):
                    fewer = step.waits[:at] + step.waits[at + 1 :]
                    with pytest.raises(VerificationError):
                        check_fused(changed(fused, rank, index, replace(step, waits=fewer)), orders=6)
                    found += 1
    assert found > 20


def test_the_checker_finds_memory_that_is_not_ready_and_slots_that_are_not_free() -> None:
    fused = fuse(algorithm("direct", "all_reduce", 3), symmetric=True)
    nobody = ((),) * 3
    with pytest.raises(VerificationError, match="makes chunk 0 of"):
        check_fused(replace(fused, ready=nobody, done=nobody))
    chain = fuse(algorithm("chain", "broadcast", 3))
    with pytest.raises(VerificationError, match="race"):
        check_fused(replace(chain, starts=nobody))
    wrong = replace(chain.steps[1][0], signals=())
    with pytest.raises(VerificationError, match="deadlock"):
        check_fused(changed(chain, 1, 0, wrong))


def test_what_cannot_be_fused_is_refused() -> None:
    ring = algorithm("ring", "all_gather", 33)
    with pytest.raises(InvalidInput, match="at most 32 ranks"):
        fuse(ring)
    with pytest.raises(InvalidInput, match="protocol"):
        fuse(algorithm("ring", "all_gather", 2), protocol="lll")
    with pytest.raises(InvalidInput, match="symmetric"):
        fuse(algorithm("ring", "all_gather", 2), protocol="ll", symmetric=True)
