# SPDX-License-Identifier: Apache-2.0
"""Schedules as verified programs, and the one-representative model against every link of a small network."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import stretto as st
from stretto import InvalidInput
from stretto.cluster.grid import regular
from stretto.cluster.model import Cluster, Dimension
from stretto.dimensions import DimSchedule, baseline, dims_of, simulate, stretto, themis
from stretto.dimensions.link_search import LinkProgram, best_program, fastest_program, promised_program
from stretto.dimensions.messages import message_us
from stretto.dimensions.program import moves, program, quantized

NBYTES = 64e6
MANY = 1000
Make = Callable[..., DimSchedule]
MAKERS: tuple[Make, ...] = (baseline, themis, stretto)


def network(*parts: str) -> Cluster:
    kinds = {"sw": "switch", "fc": "fully_connected", "ring": "ring"}
    rates, latencies = (100.0, 50.0, 25.0), (0.7, 0.9, 1.7)
    dims = []
    for part, rate, alpha in zip(parts, rates, latencies, strict=False):
        kind, size = part.split(":")
        dims.append(Dimension(kind=kinds[kind], size=int(size), gb_per_s=rate, alpha_us=alpha))
    return regular("x".join(parts), dims)


def both(cluster: Cluster, make: Make, collective: str, chunks: int, k: int) -> tuple[float, float]:
    """What the model says of a fixed order, and what the links say of it."""
    planned = quantized(make(dims_of(cluster), collective, NBYTES, chunks=chunks))
    fixed = replace(simulate(planned, in_flight=k).enforced(), discipline="enforced")
    links = st.simulate(program(fixed), cluster, nbytes=NBYTES, contention="fifo", alpha="pipelined")
    return simulate(fixed, in_flight=MANY).total_us, links.total_us


@pytest.mark.parametrize("parts", [("fc:4", "sw:2"), ("sw:2", "fc:4"), ("ring:2", "fc:4", "sw:2"), ("fc:3", "fc:5")])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_where_stages_have_one_step_the_model_is_exact(parts: tuple[str, ...], collective: str) -> None:
    cluster = network(*parts)
    for make in MAKERS:
        for chunks, k in ((8, 1), (32, 4), (32, 16)):
            model, links = both(cluster, make, collective, chunks, k)
            assert links == pytest.approx(model, rel=1e-6)


@pytest.mark.parametrize(
    "parts", [("sw:4", "sw:4"), ("ring:4", "sw:4"), ("ring:5", "fc:2"), ("sw:2", "ring:2", "sw:4")]
)
def test_with_several_steps_the_baseline_agrees_within_six_per_cent(parts: tuple[str, ...]) -> None:
    # A later step asks for its link later, so that other stages' messages get between: the model has no steps.
    model, links = both(network(*parts), baseline, "all_reduce", 16, 16)
    assert links == pytest.approx(model, rel=0.06)
    model, links = both(network(*parts), baseline, "all_reduce", 64, 16)
    assert links == pytest.approx(model, rel=0.04)


@pytest.mark.parametrize(
    "parts", [("sw:2", "sw:4"), ("ring:4", "fc:2"), ("ring:5", "sw:2"), ("sw:2", "ring:3", "fc:2")]
)
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_every_schedule_is_a_correct_program(parts: tuple[str, ...], collective: str) -> None:
    cluster = network(*parts)
    dims = dims_of(cluster)
    for make in MAKERS:
        schedule = make(dims, collective, NBYTES, chunks=6)
        found = program(schedule, units=24)
        assert found.verify().fifo_depth == 1
        assert found.collective.kind == collective
        # Every device sends what the stages say, and both links of a ring carry the same.
        sent = found.transfer_bytes(NBYTES).sum() / cluster.num_devices
        assert sent == pytest.approx(quantized(schedule, units=24).stages.wire_bytes.sum())


@pytest.mark.parametrize("parts", [("fc:4", "sw:2"), ("sw:4", "sw:4"), ("ring:4", "sw:4"), ("ring:4", "fc:2")])
def test_on_the_links_ours_is_near_what_the_model_promises_and_beats_the_baseline(parts: tuple[str, ...]) -> None:
    cluster = network(*parts)
    dims = dims_of(cluster)
    planned = stretto(dims, "all_reduce", NBYTES, chunks=64)
    found = best_program(planned, cluster)
    found.program.verify()
    assert found.total_us == pytest.approx(simulate(planned).total_us, rel=0.05)
    usual = best_program(baseline(dims, "all_reduce", NBYTES, chunks=64), cluster)
    assert found.total_us < 0.9 * usual.total_us


def test_rounding_keeps_the_sum_and_gives_everybody_something() -> None:
    dims = dims_of(network("ring:4", "sw:2"))
    schedule = quantized(stretto(dims, "all_reduce", NBYTES, chunks=16), units=64)
    units = [chunk.share * 64 for chunk in schedule.chunks]
    assert sum(units) == 64
    assert all(unit >= 2 and unit % 2 == 0 for unit in units)
    with pytest.raises(InvalidInput, match="units: must be a multiple of 2 and >= 32, not 31"):
        quantized(schedule, units=31)


def test_what_cannot_be_a_program_is_refused() -> None:
    with pytest.raises(InvalidInput, match="halving_doubling needs a power of two"):
        program(baseline(dims_of(network("sw:3", "sw:2")), "all_reduce", 1e6, chunks=2))
    with pytest.raises(InvalidInput, match="without in_network"):
        program(baseline(dims_of(network("sw:4", "sw:2"), in_network=[0]), "all_reduce", 1e6, chunks=8))
    with pytest.raises(InvalidInput, match="256 pieces of each of 1024 devices are 536346624 moves, over 16777216"):
        program(baseline(dims_of(Cluster.load("themis_2d_sw_sw")), "all_reduce", 1e6))


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_the_moves_are_counted_before_they_are_made(collective: str) -> None:
    for parts in (("ring:5", "sw:4"), ("fc:3", "sw:2", "ring:4")):
        schedule = stretto(dims_of(network(*parts)), collective, NBYTES, chunks=6)
        assert len(program(schedule, units=24).chunk) == moves(quantized(schedule, units=24), units=24)


@pytest.mark.parametrize("torus", ["torus:3x5", "torus:4x4", "torus:6x3"])
@pytest.mark.parametrize("collective", [st.AllReduce, st.ReduceScatter, st.AllGather])
def test_on_odd_rings_too_programs_are_near_the_lower_bound(torus: str, collective: Any) -> None:
    cluster = Cluster.load(torus)
    wanted = collective(cluster.num_devices)
    planned = stretto(dims_of(cluster), wanted.kind, NBYTES, chunks=16)
    found = best_program(planned, cluster, units=128)
    found.program.verify()
    assert found.program.collective.kind == wanted.kind
    assert found.total_us == st.simulate(found.program, cluster, nbytes=NBYTES).total_us
    bound = st.lower_bound(wanted, cluster, NBYTES).total_us
    assert bound * (1 - 1e-9) <= found.total_us <= 1.035 * bound


def generated(seed: int) -> Cluster:
    """A network of 2 to 4 dimensions of any kinds, at most 24 devices, 12.5 to 450 GB/s and 0.02 to 3 us."""
    rng = random.Random(seed)
    while True:
        kinds = [rng.choice(["ring", "fully_connected", "switch"]) for _ in range(rng.randint(2, 4))]
        sizes = [rng.choice([2, 4, 8]) if kind == "switch" else rng.randint(2, 8) for kind in kinds]
        if math.prod(sizes) <= 24:
            break
    rates = [12.5 * 36 ** rng.random() for _ in kinds]
    latencies = [0.02 * 150 ** rng.random() for _ in kinds]
    return regular(
        "generated",
        [
            Dimension(kind=kind, size=size, gb_per_s=rate, alpha_us=alpha)
            for kind, size, rate, alpha in zip(kinds, sizes, rates, latencies, strict=True)
        ],
    )


@cache
def fastest_there(seed: int, collective: str) -> LinkProgram:
    """The fastest program on a generated network."""
    return fastest_program(generated(seed), collective, NBYTES, chunks=8, units=64)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter", "all_gather"])
def test_on_generated_networks_links_keep_the_promise_and_themis_is_never_faster(seed: int, collective: str) -> None:
    cluster = generated(seed)
    found = fastest_there(seed, collective)
    found.program.verify()
    assert found.promise_us == pytest.approx(found.total_us, rel=0.05)
    dims = dims_of(cluster)
    for other in (baseline(dims, collective, NBYTES, chunks=8), themis(dims, collective, NBYTES, chunks=8)):
        assert found.total_us <= best_program(other, cluster, units=64).total_us


@pytest.mark.parametrize("seed", range(3))
def test_the_promise_chooses_nearly_as_well_as_the_links_do(seed: int) -> None:
    cluster = generated(seed)
    found = promised_program(cluster, "all_reduce", NBYTES, chunks=8, units=64)
    assert found.total_us <= 1.02 * fastest_there(seed, "all_reduce").total_us
    assert found.promise_us == pytest.approx(found.total_us, rel=0.05)


@pytest.mark.parametrize("parts", [("ring:4", "sw:8"), ("sw:4", "sw:4", "ring:3"), ("ring:5", "fc:2")])
@pytest.mark.parametrize("window", [1, 2])
def test_single_messages_in_the_model_are_those_on_the_links(parts: tuple[str, ...], window: int) -> None:
    cluster = network(*parts)
    planned = quantized(baseline(dims_of(cluster), "all_reduce", NBYTES, chunks=8), units=64)
    links = st.simulate(program(planned, units=64, window=window), cluster, nbytes=NBYTES)
    assert links.total_us == pytest.approx(message_us(planned, window=window), rel=0.01)


def test_a_window_smaller_than_one_stage_is_refused() -> None:
    planned = baseline(dims_of(network("ring:4", "sw:2")), "all_reduce", NBYTES, chunks=4)
    with pytest.raises(InvalidInput, match="window: must be >= 1 or None, not 0"):
        message_us(planned, window=0)
