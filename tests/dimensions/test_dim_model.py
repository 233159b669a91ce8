# SPDX-License-Identifier: Apache-2.0
"""What one stage costs in one dimension."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto import Cluster, InvalidInput
from stretto.dimensions import Dim, best_us, dims_of, ideal_us, split
from stretto.dimensions.model import order_loads


def dim(kind: str = "switch", size: int = 8, gb_per_s: float = 100.0, step_us: float = 1.0, **more: float) -> Dim:
    return Dim(kind=kind, size=size, gb_per_s=gb_per_s, step_us=step_us, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "steps"), [("ring", 7), ("fully_connected", 1), ("switch", 3)])
def test_steps_are_those_of_the_kinds_algorithm(kind: str, steps: int) -> None:
    assert dim(kind).steps == steps
    assert dim(kind, step_us=0.5).latency_us == 0.5 * steps


def test_a_reduce_scatter_sends_all_but_ones_own_share_and_an_all_gather_undoes_it() -> None:
    for kind in ("ring", "fully_connected", "switch"):
        assert dim(kind).wire_bytes("reduce_scatter", 800.0) == 700.0
        assert dim(kind).after("reduce_scatter", 800.0) == 100.0
        assert dim(kind).wire_bytes("all_gather", 100.0) == 700.0
        assert dim(kind).after("all_gather", 100.0) == 800.0


def test_a_switch_that_reduces_takes_one_step_and_halves_the_traffic_of_an_all_reduce() -> None:
    switch = dim(in_network=True)
    assert switch.steps == 1
    both = switch.wire_bytes("reduce_scatter", 800.0) + switch.wire_bytes("all_gather", 100.0)
    assert both == 800.0
    assert switch.wire_bytes("reduce_scatter", 800.0, alone=True) == 800.0
    assert switch.wire_bytes("all_gather", 100.0, alone=True) == 800.0


def test_headers_count_in_each_direction_as_the_payload_does() -> None:
    switch = dim(in_network=True, header_bytes=10.0)
    assert switch.wire_bytes("reduce_scatter", 8192.0) == 8192 / 2 + 10  # two packets up, half of what goes both ways
    assert switch.wire_bytes("reduce_scatter", 8192.0, alone=True) == 8192 + 20
    dims = [switch, dim("ring", header_bytes=42.0)]
    bare = [replace(each, header_bytes=0.0) for each in dims]
    assert best_us(dims, "all_reduce", 5e3) == best_us(bare, "all_reduce", 5e3)


def test_headers_count_once_for_each_packet_of_each_message() -> None:
    # Halves, quarters and eighths of 8192: 4096 + 2048 + 1024 bytes are three packets.
    assert dim(header_bytes=10.0).wire_bytes("reduce_scatter", 8192.0) == 8192 * 7 / 8 + 3 * 10
    assert dim("ring", header_bytes=10.0).wire_bytes("all_gather", 1024.0) == 7 * 1024 + 7 * 10
    assert dim("ring", header_bytes=10.0, packet_bytes=512).wire_bytes("all_gather", 1024.0) == 7 * 1024 + 14 * 10


@given(
    st.lists(st.integers(2, 16), min_size=1, max_size=4),
    st.lists(st.floats(1, 1000), min_size=4, max_size=4),
    st.sampled_from(["all_reduce", "reduce_scatter", "all_gather"]),
)
def test_the_order_moves_the_load_but_not_the_total(sizes: list[int], rates: list[float], collective: str) -> None:
    dims = [dim(size=size, gb_per_s=rate) for size, rate in zip(sizes, rates, strict=False)]
    count = math.prod(sizes)
    for order in itertools.permutations(range(len(dims))):
        loads = order_loads(dims, order, 1e6)
        sent = sum(load * d.bytes_per_us for load, d in zip(loads, dims, strict=True))
        assert sent == pytest.approx(1e6 * (1 - 1 / count))
    passes = 2 if collective == "all_reduce" else 1
    ideal = ideal_us(dims, collective, 1e6)
    assert ideal == pytest.approx(passes * 1e6 * (1 - 1 / count) / sum(d.bytes_per_us for d in dims))
    assert best_us(dims, collective, 1e6) >= ideal * (1 - 1e-6)


def test_the_ideal_time_of_switches_that_reduce_is_no_more_than_any_balance_reaches() -> None:
    dims = [dim(size=16, gb_per_s=50, in_network=True), dim("ring", size=4, gb_per_s=100)]
    assert ideal_us(dims, "all_reduce", 1e6) <= best_us(dims, "all_reduce", 1e6)
    without = [dim(size=16, gb_per_s=50), dim("ring", size=4, gb_per_s=100)]
    assert ideal_us(dims, "all_reduce", 1e6) < ideal_us(without, "all_reduce", 1e6)


def test_a_cluster_gives_its_dimensions() -> None:
    dims = dims_of(Cluster.load("themis_3d_fc_ring_sw"), in_network=[2])
    assert [d.algorithm for d in dims] == ["direct", "ring", "halving_doubling"]
    assert [(d.size, d.gb_per_s, d.step_us) for d in dims] == [(8, 175, 0.7), (16, 100, 0.7), (8, 50, 1.7)]
    assert [d.in_network for d in dims] == [False, False, True]
    with pytest.raises(InvalidInput, match="has no dimensions"):
        dims_of(Cluster.load("dgx2:2"))
    with pytest.raises(InvalidInput, match=r"in_network: must be 0\.\.1, not 2"):
        dims_of(Cluster.load("themis_2d_sw_sw"), in_network=[2])


def test_groups_may_end_inside_a_switch_but_not_inside_a_ring() -> None:
    dims = [dim(size=16), dim(size=64)]
    within, between = split(dims, 128)
    assert [(at, d.size) for at, d in within] == [(0, 16), (1, 8)]
    assert [(at, d.size) for at, d in between] == [(1, 8)]
    assert split(dims, 1024) == (((0, dims[0]), (1, dims[1])), ())
    with pytest.raises(InvalidInput, match=r"group of 8: does not fit dimension 0 \(ring of 16\)"):
        split([dim("ring", size=16)], 8)
    with pytest.raises(InvalidInput, match="group of 256: there are only 128 devices"):
        split([dim(size=16), dim(size=8)], 256)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "mesh"}, "unknown kind"),
        ({"size": 1}, r"dimension\.size: must be 2\.\."),
        ({"gb_per_s": 0.0}, r"dimension\.gb_per_s: must be 1e-06\.\.1e\+09, not 0"),
        ({"gb_per_s": math.nan}, r"dimension\.gb_per_s"),
        ({"gb_per_s": 5e-324}, r"dimension\.gb_per_s"),
        ({"step_us": 1e300}, r"dimension\.step_us"),
        ({"header_bytes": 1e308}, "header_bytes must be"),
        ({"step_us": -1.0}, r"dimension\.step_us: must be 0\.\.1e\+09, not -1"),
        ({"kind": "ring", "in_network": True}, "only a switch can, not ring"),
        ({"header_bytes": -1.0}, "header_bytes must be 0"),
    ],
)
def test_a_wrong_dimension_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        dim(**changes)


def test_none_and_too_many_dimensions_are_refused() -> None:
    for wrong in ([], [dim()] * 9):
        with pytest.raises(InvalidInput, match=r"dims: must be 1\.\.8"):
            ideal_us(wrong, "all_reduce", 1e6)
    with pytest.raises(InvalidInput, match="unknown collective"):
        ideal_us([dim()], "broadcast", 1e6)
