# SPDX-License-Identifier: Apache-2.0
"""Multicast, delays and transfers without links in the network simulator, against times computed by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import stretto as st
from stretto.cluster.model import Link, Node
from stretto.errors import InvalidInput
from stretto.programs import Program
from stretto.simulator.network import Times, simulate_transfers

MODES = list(product(("fifo", "fair"), ("pipelined", "blocking")))


def star(down: tuple[float, ...] = (10.0, 10.0, 5.0, 10.0), *, multicast: bool = True) -> st.Cluster:
    """Devices on one switch: 10 GB/s and 1 us up, 0.5 us down."""
    n = len(down)
    nodes = [Node(name=f"d{i}") for i in range(n)] + [Node(name="s", kind="switch", multicast=multicast)]
    links = [Link(src=i, dst=n, alpha_us=1.0, gb_per_s=10.0) for i in range(n)]
    links += [Link(src=n, dst=i, alpha_us=0.5, gb_per_s=rate) for i, rate in enumerate(down)]
    return st.Cluster.build("star", nodes=nodes, links=links)


def cast_to(*ranks: int, chunks: int = 1, n: int = 4) -> Program:
    count = len(ranks) * chunks
    return Program.from_steps(
        "cast", st.Broadcast(n, chunks=chunks),
        src=[0] * count, dst=list(ranks) * chunks, chunk=np.repeat(np.arange(chunks), len(ranks)), step=[0] * count,
        cast=np.repeat(np.arange(chunks), len(ranks)),
    )  # fmt: skip


@pytest.mark.parametrize(("contention", "alpha"), MODES)
def test_a_lone_cast_takes_as_long_as_its_slowest_branch(contention: str, alpha: str) -> None:
    timeline = st.simulate(cast_to(1, 2, 3), star(), nbytes=1e6, contention=contention, alpha=alpha)
    assert timeline.start_us.tolist() == [0, 0, 0]
    assert timeline.end_us.tolist() == pytest.approx([101.5, 201.5, 101.5])
    assert timeline.link_bytes.tolist() == [1e6, 0, 0, 0, 0, 1e6, 1e6, 1e6], "once up, once down each"


@pytest.mark.parametrize(("contention", "alpha"), MODES)
def test_the_load_of_the_shared_way_up_is_counted_once(contention: str, alpha: str) -> None:
    timeline = st.simulate(
        cast_to(1, 2, 3, chunks=4), star(), nbytes=1e6, contention=contention, alpha=alpha, load_slots=50
    )
    busy = timeline.link_load.sum(axis=1) * timeline.total_us / 50
    np.testing.assert_allclose(busy, timeline.link_busy_us, rtol=1e-9, atol=1e-9)
    assert timeline.link_load.max() <= 1 + 1e-9


@pytest.mark.parametrize(("contention", "alpha"), MODES)
def test_separate_sends_share_the_way_up(contention: str, alpha: str) -> None:
    program = cast_to(1, 2, 3)
    apart = program.replace(cast=np.full(3, -1, np.int32))
    together, alone = (
        st.simulate(p, star((10.0,) * 4), nbytes=1e6, contention=contention, alpha=alpha) for p in (program, apart)
    )
    assert together.total_us == pytest.approx(101.5)
    assert alone.total_us == pytest.approx(303.5 if (contention, alpha) == ("fifo", "blocking") else 301.5)


@pytest.mark.parametrize(("alpha", "second"), [("pipelined", 100.0), ("blocking", 101.0)])
def test_casts_follow_each_other_on_the_link_up(alpha: str, second: float) -> None:
    timeline = st.simulate(cast_to(1, 2, 3, chunks=2), star((10.0,) * 4), nbytes=2e6, contention="fifo", alpha=alpha)
    assert timeline.start_us.tolist() == [0.0] * 3 + [second] * 3
    assert timeline.end_us.tolist() == pytest.approx([101.5] * 3 + [second + 101.5] * 3)


def test_a_busy_branch_does_not_hold_the_others() -> None:
    """d1's port is taken by d2 for 100 us when the cast gets there."""
    chunks = st.AllGather(4)
    program = Program.from_steps(
        "busy", chunks, src=[2, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3], dst=[1, 1, 2, 3, 0, 2, 3, 0, 3, 0, 1, 2],
        chunk=[2, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3], step=[0, 0, 0, 0] + [1] * 8,
        cast=[-1, 0, 0, 0] + [-1] * 8,
    )  # fmt: skip
    timeline = st.simulate(program, star((10.0,) * 4), nbytes=4e6, contention="fifo")
    assert timeline.end_us[:4].tolist() == pytest.approx([101.5, 201.5, 101.5, 101.5])


def test_fair_shares_count_a_cast_once() -> None:
    """The link up carries the cast at the rate of its fastest member, 5 GB/s, beside the other lane's 5."""
    program = Program.from_steps(
        "two", st.Broadcast(4, chunks=2), src=[0] * 4 + [1, 1], dst=[1, 2, 3, 1, 2, 3], chunk=[0, 0, 0, 1, 1, 1],
        step=[0] * 4 + [1] * 2, cast=[0, 0, 0, -1, 1, 1],
        lane=[0, 0, 0, 1, 0, 0],
    )  # fmt: skip
    timeline = st.simulate(program, star((10.0,) * 4), nbytes=2e6, contention="fair")
    # d1's own link carries both at 5 GB/s; they end at 200 us plus alphas.
    assert timeline.end_us[:4].tolist() == pytest.approx([201.5] * 4)
    assert timeline.end_us[4:].tolist() == pytest.approx([303.0, 303.0])


def test_fair_the_way_up_is_free_once_the_fastest_branch_is_through() -> None:
    program = Program.from_steps(
        "then", st.Broadcast(4, chunks=2), src=[0] * 4 + [3, 3], dst=[1, 2, 3, 3, 1, 2], chunk=[0, 0, 0, 1, 1, 1],
        step=[0, 0, 0, 1, 2, 2], cast=[0, 0, 0, -1, 1, 1],
    )  # fmt: skip
    after = [[], [], [], [0], [3], [3]]
    ptr = np.cumsum([0, *map(len, after)])
    waits = program.replace(after_ptr=ptr, after=np.array([x for row in after for x in row], np.int32))
    timeline = st.simulate(waits, star(), nbytes=2e6, contention="fair")
    assert timeline.end_us[:4].tolist() == pytest.approx([101.5, 201.5, 101.5, 203.0])


def test_fair_casts_on_the_same_connections_follow_each_other_at_the_pace_of_the_slowest_branch() -> None:
    """d2's port takes 200 us for each; the second cast starts when that member, too, has drained."""
    timeline = st.simulate(cast_to(1, 2, 3, chunks=2), star(), nbytes=2e6, contention="fair")
    assert timeline.start_us.tolist() == pytest.approx([0.0] * 3 + [200.0] * 3)
    assert timeline.end_us.tolist() == pytest.approx([101.5, 201.5, 101.5, 301.5, 401.5, 301.5])


def test_fair_a_message_behind_a_member_of_a_cast_waits_for_that_member_alone() -> None:
    program = Program.from_steps(
        "behind", st.Broadcast(4, chunks=2), src=[0] * 4 + [1, 1], dst=[1, 2, 3, 1, 2, 3], chunk=[0, 0, 0, 1, 1, 1],
        step=[0] * 4 + [1] * 2, cast=[0, 0, 0, -1, 1, 1],
    )  # fmt: skip
    timeline = st.simulate(program, star(), nbytes=2e6, contention="fair")
    assert timeline.start_us.tolist() == pytest.approx([0, 0, 0, 100, 201.5, 201.5])
    assert timeline.end_us[:4].tolist() == pytest.approx([101.5, 201.5, 101.5, 201.5])


def test_a_cast_may_part_more_than_once() -> None:
    nodes = [Node(name=f"d{i}") for i in range(4)]
    nodes += [Node(name=s, kind="switch", multicast=True) for s in "st"]
    ends = [(0, 4), (4, 1), (4, 5), (5, 2), (5, 3)]
    links = [Link(src=a, dst=b, alpha_us=1.0, gb_per_s=10.0) for a, b in ends]
    tree = st.Cluster.build("tree", nodes=nodes, links=links)
    for contention, alpha in MODES:
        timeline = st.simulate(cast_to(2, 1, 3), tree, nbytes=1e6, contention=contention, alpha=alpha)
        assert timeline.end_us.tolist() == pytest.approx([103.0, 102.0, 103.0])
        assert timeline.link_bytes.tolist() == [1e6] * 5


def test_who_cannot_copy_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"transfers\[1\].cast: parts from .* cast 0 at s, which does not multicast"):
        st.simulate(cast_to(1, 2, 3), star(multicast=False), nbytes=1e6)
    ring = st.Cluster.preset("ring", nodes=3)
    with pytest.raises(InvalidInput, match=r"transfers\[1\].cast: parts from the others of cast 0 at its source"):
        st.simulate(cast_to(1, 2, n=3), ring, nbytes=1e6)


def test_a_critical_path_leads_back_to_the_start() -> None:
    timeline = st.simulate(cast_to(1, 2, 3, chunks=3), star(), nbytes=3e6, contention="fifo")
    path = timeline.critical_path.tolist()
    assert path[-1] == int(timeline.end_us.argmax()) and len(path) == len(set(path))
    assert timeline.start_us[path[0]] == 0


def run(**changes: Any) -> Times:
    """Work of 50 us, then 1 MB over link 0; another program's 1 MB over the same link, after work of 30 us."""
    columns: dict[str, Any] = {
        "routes": (np.array([0, 0, 1]), np.array([0], np.int32)),
        "route": np.array([0, 1, 0, 1], np.int32),
        "connection": np.array([0, 1, 2, 3], np.int32),
        "nbytes": np.array([0, 1e6, 0, 1e6]),
        "after": (np.array([0, 0, 1, 1, 2]), np.array([0, 2], np.int32)),
        "delay_us": np.array([50.0, 0.0, 30.0, 0.0]),
    }
    cluster = st.Cluster.preset("ring", nodes=4, gb_per_s=10.0, alpha_us=1.0)
    return simulate_transfers(cluster, **(columns | changes))


def test_work_delays_messages_and_two_programs_share_a_link() -> None:
    fifo = run(contention="fifo")
    assert fifo.start_us.tolist() == [0, 130, 0, 30]
    assert fifo.end_us.tolist() == [50, 231, 30, 131]
    assert fifo.link_busy_us[0] == 200 and fifo.link_bytes[0] == 2e6
    assert fifo.critical_path.tolist() == [2, 3, 1]
    fair = run(contention="fair")
    # Alone for 20 us (0.2 MB), then half each: the second has 0.8 MB left at 50, done at 210.
    assert fair.end_us.tolist() == pytest.approx([50, 231, 30, 211])


@pytest.mark.parametrize("contention", ["fifo", "fair"])
def test_a_message_may_wait_before_it_asks_for_its_link(contention: str) -> None:
    times = run(delay_us=np.array([50.0, 7.0, 30.0, 300.0]), contention=contention)
    assert times.start_us.tolist() == [0, 57, 0, 330]
    assert times.end_us.tolist() == [50, 158, 30, 431]


@pytest.mark.parametrize("contention", ["fifo", "fair"])
@pytest.mark.parametrize(("delay", "second"), [(40.0, 100.0), (140.0, 140.0)])
def test_a_delay_passes_while_the_message_before_it_flows(contention: str, delay: float, second: float) -> None:
    times = run(
        route=np.ones(4, np.int32), connection=np.zeros(4, np.int32), nbytes=np.array([1e6, 1e6, 0, 0]),
        after=(np.zeros(5, np.int64), np.zeros(0, np.int32)), delay_us=np.array([0.0, delay, 0.0, 0.0]),
        contention=contention,
    )  # fmt: skip
    assert times.start_us.tolist() == pytest.approx([0, second, second + 100, second + 100])
    assert times.end_us.tolist() == pytest.approx([101, second + 101, second + 101, second + 101])


@pytest.mark.parametrize("contention", ["fifo", "fair"])
def test_work_between_two_messages_of_a_connection_does_not_let_the_second_pass_the_first(contention: str) -> None:
    times = run(
        route=np.array([1, 0, 1, 1], np.int32), connection=np.array([0, 0, 0, 1], np.int32),
        nbytes=np.array([1e6, 0, 1e6, 0]), after=(np.zeros(5, np.int64), np.zeros(0, np.int32)), delay_us=None,
        contention=contention,
    )  # fmt: skip
    assert times.start_us[:3].tolist() == pytest.approx([0, 0, 100])
    assert times.end_us[:3].tolist() == pytest.approx([101, 101, 201])


def test_work_alone_takes_its_delays_one_after_the_other() -> None:
    times = run(route=np.zeros(4, np.int32), after=(np.array([0, 0, 1, 2, 3]), np.array([0, 1, 2], np.int32)))
    assert times.end_us.tolist() == [50, 50, 80, 80]
    assert times.link_bytes.sum() == 0


def test_it_agrees_with_the_simulation_of_a_program() -> None:
    from stretto.simulator.network import routes_of

    cluster = st.Cluster.preset("dgx2", nodes=2)
    program = st.algorithm("ring", "all_reduce", 32, chunks=2)
    connection, route, ptr, links = routes_of(program, cluster, nbytes=1e6)
    for contention, alpha in MODES:
        whole = st.simulate(program, cluster, nbytes=1e6, contention=contention, alpha=alpha)
        parts = simulate_transfers(
            cluster, routes=(ptr, links), route=route, connection=connection, nbytes=program.transfer_bytes(1e6),
            after=(program.after_ptr, program.after), reduce=program.reduce, gate=(program.gate_ptr, program.gate),
            gate_reads=program.gate_reads, contention=contention, alpha=alpha,
        )  # fmt: skip
        assert np.array_equal(whole.start_us, parts.start_us) and np.array_equal(whole.end_us, parts.end_us)
        assert np.array_equal(whole.link_busy_us, parts.link_busy_us)


def test_casts_work_there_too() -> None:
    program = cast_to(1, 2, 3)
    times = simulate_transfers(
        star(), routes=(np.array([0, 2, 4, 6]), np.array([0, 5, 0, 6, 0, 7], np.int32)), cast=program.cast,
        route=np.arange(3, dtype=np.int32), connection=np.arange(3, dtype=np.int32), nbytes=np.full(3, 1e6),
        after=(program.after_ptr, program.after), delay_us=np.array([0.0, 20.0, 0.0]),
    )  # fmt: skip
    assert times.end_us.tolist() == pytest.approx([121.5, 221.5, 121.5]), "they start together"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"route": np.array([0, 1, 0, 2], np.int32)}, r"route\[3\]: must be 0..1, not 2"),
        ({"routes": (np.array([0, 0, 1]), np.array([99], np.int32))}, r"routes\[0\]: must be 0..7, not 99"),
        ({"routes": (np.array([0, 2, 1]), np.array([0], np.int32))}, "routes: pointers do not match"),
        ({"delay_us": np.array([0.0, -1.0, 0.0, 0.0])}, "delay_us: must be >= 0 and finite"),
        ({"delay_us": np.zeros(3)}, "delay_us: has 3 entries, not 4"),
        ({"after": (np.array([0, 1, 2, 2, 2]), np.array([1, 0], np.int32))}, "after: transfer 0 waits for itself"),
    ],
)
def test_wrong_arrays_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        run(**changes)
