# SPDX-License-Identifier: Apache-2.0
"""The paper's own examples, and what the schedulers promise."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import MB, Cluster, InvalidInput
from stretto.dimensions import Dim, DimSchedule, baseline, dims_of, resolve, simulate, stretto, themis
from stretto.dimensions.balance import balanced_shares
from stretto.dimensions.model import order_loads

UNIT = 1000.0
# 4 x 4, the second dimension at half the rate: the reduce-scatter of 64 MB in the first takes one unit.
FIG5 = (
    Dim(kind="switch", size=4, gb_per_s=48, step_us=0),
    Dim(kind="switch", size=4, gb_per_s=24, step_us=0),
)
NETWORKS = [
    "themis_2d_sw_sw", "themis_3d_sw_sw_sw_homo", "themis_3d_sw_sw_sw_hetero", "themis_3d_fc_ring_sw",
    "themis_4d_ring_sw_sw_sw", "themis_4d_ring_fc_ring_sw",
]  # fmt: skip


def test_figure_5a_the_baseline_needs_8_units_and_leaves_dim2_idle_half_of_them() -> None:
    run = simulate(baseline(FIG5, "all_reduce", 256 * MB, chunks=4), in_flight=1)
    starts = (run.start_us / UNIT).reshape(4, 4)
    # Reduce-scatter in dim1, dim2, all-gather in dim2, dim1; gathering waits until all chunks are reduced in dim1.
    assert starts.tolist() == [[0, 1, 1.5, 4], [1, 2, 2.5, 5], [2, 3, 3.5, 6], [3, 4, 4.5, 7]]
    assert run.total_us / UNIT == 8.0
    assert (run.busy_us / UNIT).tolist() == [8.0, 4.0]


def test_figure_7_the_orders_and_loads_of_steps_b_to_e() -> None:
    schedule = themis(FIG5, "all_reduce", 256 * MB, chunks=4)
    assert [chunk.reduce_scatter for chunk in schedule.chunks] == [(0, 1), (1, 0), (0, 1), (0, 1)]
    assert all(chunk.all_gather == chunk.reduce_scatter[::-1] for chunk in schedule.chunks)
    loads, seen = np.zeros(2), []
    for chunk in schedule.chunks:
        loads += 2 * np.array(order_loads(FIG5, chunk.reduce_scatter, 64 * MB)) / UNIT
        seen.append(loads.tolist())
    assert seen == [[2, 1], [2.5, 5], [4.5, 6], [6.5, 7]]


def test_figure_5b_themis_needs_7_units_with_dim2_always_busy() -> None:
    run = simulate(themis(FIG5, "all_reduce", 256 * MB, chunks=4), in_flight=1)
    assert run.total_us / UNIT == pytest.approx(7.0)
    assert (run.busy_us / UNIT).tolist() == pytest.approx([6.5, 7.0])


def test_ours_keeps_both_dimensions_of_figure_5_busy_all_the_time() -> None:
    run = simulate(stretto(FIG5, "all_reduce", 256 * MB, chunks=4, in_flight=1), in_flight=1)
    assert run.utilization == pytest.approx(1.0)
    assert len({chunk.share for chunk in run.schedule.chunks}) > 1


def test_todays_platform_is_well_used_by_the_baseline() -> None:
    def of(size: int) -> float:
        dims = [
            Dim(kind="switch", size=16, gb_per_s=1200 / 8, step_us=0.7),
            Dim(kind="switch", size=size, gb_per_s=100 / 8, step_us=1.7),
        ]
        return simulate(baseline(dims, "all_reduce", 1024 * MB)).utilization

    # The paper's 97.7 % is exactly what the loads say for groups of 16 x 8; its 16 x 64 is a little better.
    assert of(8) == pytest.approx(0.977, abs=0.001)
    assert of(64) == pytest.approx(0.983, abs=0.001)


def test_the_means_of_the_paper_over_six_networks_and_four_sizes() -> None:
    runs: dict[str, list[float]] = {"baseline": [], "fifo": [], "scf": []}
    speed: dict[str, list[float]] = {"fifo": [], "scf": []}
    for name, size in itertools.product(NETWORKS, (100, 256, 512, 1024)):
        dims = dims_of(Cluster.load(name))
        base = simulate(baseline(dims, "all_reduce", size * MB))
        runs["baseline"].append(base.utilization)
        for discipline in ("fifo", "scf"):
            run = simulate(themis(dims, "all_reduce", size * MB, discipline=discipline))
            runs[discipline].append(run.utilization)
            speed[discipline].append(base.total_us / run.total_us)
    assert np.mean(runs["baseline"]) == pytest.approx(0.563, abs=0.005)
    assert np.mean(runs["fifo"]) == pytest.approx(0.877, abs=0.03)
    assert np.mean(runs["scf"]) == pytest.approx(0.951, abs=0.025)
    assert np.mean(speed["fifo"]) == pytest.approx(1.58, abs=0.07)
    assert np.mean(speed["scf"]) == pytest.approx(1.72, abs=0.07)


@pytest.mark.parametrize("name", NETWORKS)
def test_ours_is_near_the_ideal_and_stays_ahead_when_bandwidth_is_mis_estimated(name: str) -> None:
    dims = dims_of(Cluster.load(name))
    ours, theirs = stretto(dims, "all_reduce", 100 * MB), themis(dims, "all_reduce", 100 * MB)
    assert simulate(ours).utilization > 0.985
    found: dict[str, list[float]] = {"ours": [], "theirs": [], "again": []}
    for signs in itertools.product((-0.1, 0.1), repeat=len(dims)):
        real = [replace(dim, gb_per_s=dim.gb_per_s * (1 + sign)) for dim, sign in zip(dims, signs, strict=True)]
        found["ours"].append(simulate(ours, dims=real).utilization)
        found["theirs"].append(simulate(theirs, dims=real).utilization)
    assert np.mean(found["ours"]) > np.mean(found["theirs"])


def test_resolving_from_measured_bandwidth_gains_back_what_was_lost() -> None:
    dims = dims_of(Cluster.load("themis_3d_sw_sw_sw_hetero"))
    planned = stretto(dims, "all_reduce", 256 * MB)
    measured = [180.0, 120.0, 40.0]
    real = [replace(dim, gb_per_s=rate) for dim, rate in zip(dims, measured, strict=True)]
    again = resolve(planned, measured)
    assert [dim.gb_per_s for dim in again.dims] == measured
    assert simulate(planned, dims=real).utilization < 0.95
    assert simulate(again).utilization > 0.99
    with pytest.raises(InvalidInput, match="gb_per_s: 2 rates for 3 dimensions"):
        resolve(planned, [1.0, 2.0])


@pytest.mark.parametrize("collective", ["reduce_scatter", "all_gather"])
def test_the_halves_of_an_all_reduce_alone(collective: str) -> None:
    dims = dims_of(Cluster.load("themis_3d_sw_sw_sw_homo"))
    runs = {make.__name__: simulate(make(dims, collective, 256 * MB)) for make in (baseline, themis, stretto)}
    both = simulate(baseline(dims, "all_reduce", 256 * MB))
    assert runs["baseline"].total_us == pytest.approx(both.total_us / 2, rel=0.02)
    assert runs["baseline"].utilization < 0.5 < 0.9 < runs["themis"].utilization <= runs["stretto"].utilization
    assert runs["stretto"].utilization > 0.98
    # The second dimension has the least latency: the first chunk is reduced there first, or gathered there last.
    first = runs["themis"].schedule.chunks[0].stages
    assert first == ((1, 0, 2) if collective == "reduce_scatter" else (2, 0, 1))


def test_the_two_readings_of_themis_differ_only_in_all_reduces_and_by_little() -> None:
    used: dict[str, list[float]] = {"whole": [], "literal": []}
    for name, size in itertools.product(NETWORKS, (100, 1024)):
        dims = dims_of(Cluster.load(name))
        for tracker, found in used.items():
            found.append(simulate(themis(dims, "all_reduce", size * MB, tracker=tracker)).utilization)
        assert themis(dims, "all_gather", size * MB, tracker="literal") == themis(dims, "all_gather", size * MB)
    assert np.mean(used["literal"]) == pytest.approx(np.mean(used["whole"]), abs=0.015)
    assert used["literal"] != used["whole"]
    with pytest.raises(InvalidInput, match="unknown tracker 'x'; choose from: whole, literal"):
        themis(FIG5, "all_reduce", 1e6, tracker="x")


@pytest.mark.parametrize("nbytes", [1.0, 7.0, 1e3])
def test_tiny_collectives_are_scheduled_where_latency_is_all_there_is(nbytes: float) -> None:
    for name in NETWORKS:
        dims = dims_of(Cluster.load(name))
        ours = simulate(stretto(dims, "all_reduce", nbytes)).total_us
        assert 2 * sum(dim.latency_us for dim in dims) <= ours * (1 + 1e-9)
        assert ours <= simulate(themis(dims, "all_reduce", nbytes)).total_us


def test_few_chunks_cannot_average_the_directions_of_a_switch_that_reduces() -> None:
    dims = dims_of(Cluster.load("themis_2d_sw_sw"), in_network=[0])
    for make in (baseline, themis, stretto):
        with pytest.raises(InvalidInput, match="chunks: must be >= 8 where switches reduce, not 4"):
            make(dims, "all_reduce", 1e6, chunks=4)
        assert simulate(make(dims, "reduce_scatter", 1e6, chunks=4)).total_us > 0
    assert len(stretto(dims, "all_reduce", 1e3, chunks=16).chunks) >= 8


def test_switches_that_reduce_make_it_faster_and_are_balanced_too() -> None:
    cluster = Cluster.load("themis_3d_sw_sw_sw_homo")
    plain, offloaded = dims_of(cluster), dims_of(cluster, in_network=[0, 1, 2])
    for make in (baseline, themis, stretto):
        assert (
            simulate(make(offloaded, "all_reduce", 256 * MB)).total_us
            < simulate(make(plain, "all_reduce", 256 * MB)).total_us
        )
    ours = simulate(stretto(offloaded, "all_reduce", 256 * MB))
    theirs = simulate(themis(offloaded, "all_reduce", 256 * MB))
    assert theirs.utilization < ours.utilization <= 1
    assert min(ours.dim_utilization) > 0.95


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["ring", "switch", "fully_connected"]),
            st.integers(2, 9),
            st.floats(10, 500),
            st.floats(0, 3),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
    st.integers(1, 20),
    st.integers(1, 16),
)
def test_ours_is_never_slower_than_the_others(
    shape: list[tuple[str, int, float, float]], collective: str, chunks: int, in_flight: int
) -> None:
    dims = [Dim(kind=kind, size=size, gb_per_s=rate, step_us=step) for kind, size, rate, step in shape]

    def time_us(schedule: DimSchedule) -> float:
        return simulate(schedule, in_flight=in_flight).total_us

    ours = time_us(stretto(dims, collective, 50 * MB, chunks=chunks, in_flight=in_flight))
    for make in (baseline, themis):
        assert ours <= time_us(make(dims, collective, 50 * MB, chunks=chunks)) * (1 + 1e-9)


def test_a_vertex_needs_no_more_orders_than_there_are_dimensions_and_balances_them() -> None:
    for name in NETWORKS:
        dims = dims_of(Cluster.load(name))
        shares = balanced_shares(dims, 1e9)
        assert len(shares) <= len(dims)
        assert sum(shares.values()) == pytest.approx(1.0)
        loads = sum(share * np.array(order_loads(dims, order, 1e9)) for order, share in shares.items())
        latency = np.array([dim.latency_us for dim in dims])
        assert np.ptp(loads + latency) < 1e-3 * np.max(loads)


def test_same_input_same_schedule() -> None:
    dims = dims_of(Cluster.load("themis_4d_ring_fc_ring_sw"))
    assert stretto(dims, "all_reduce", 100 * MB) == stretto(dims, "all_reduce", 100 * MB)


def test_what_cannot_be_scheduled_is_refused() -> None:
    for make in (baseline, themis, stretto):
        with pytest.raises(InvalidInput, match="unknown collective 'broadcast'"):
            make(FIG5, "broadcast", 1e6)
        with pytest.raises(InvalidInput, match=r"chunks: must be 1\.\.65536, not 0"):
            make(FIG5, "all_reduce", 1e6, chunks=0)
        with pytest.raises(InvalidInput, match="nbytes: must be > 0"):
            make(FIG5, "all_reduce", 0.0)
    with pytest.raises(InvalidInput, match="at most 6 can be balanced, not 7"):
        stretto([FIG5[0]] * 7, "all_reduce", 1e6)
    with pytest.raises(InvalidInput, match="unknown discipline"):
        themis(FIG5, "all_reduce", 1e6, discipline="lifo")
