# SPDX-License-Identifier: Apache-2.0
"""Exact mode: the known optima of one NDv2 node, and small networks of other kinds."""

from __future__ import annotations

from dataclasses import replace

import pytest

import stretto as st
from stretto.collectives import Collective
from stretto.solvers import cp_sat
from stretto.synthesis.exact import ExactResult, solve, synthesize

MB8 = 8 * st.MB


def nvlinks() -> st.Cluster:
    """One NDv2 node as TACCL counts it: NVLinks only, alpha folded into 23 or 46 us per MB."""
    whole = st.Cluster.load("ndv2:1")
    return st.Cluster.build(
        "nvlinks",
        nodes=[node for node in whole.nodes() if node.kind == "device"],
        links=[replace(link, alpha_us=0.0) for link in whole.links() if link.channel == "nvlink"],
    )


def box(devices: int, *, up: float = 50.0, down: float = 50.0, alpha_us: float = 0.0) -> st.Cluster:
    """Devices around one switch."""
    nodes = [st.Node(name=f"d{i}") for i in range(devices)] + [st.Node(name="sw", kind="switch")]
    ports = [st.Link(src=i, dst=devices, alpha_us=alpha_us, gb_per_s=up) for i in range(devices)]
    ports += [st.Link(src=devices, dst=i, alpha_us=alpha_us, gb_per_s=down) for i in range(devices)]
    return st.Cluster.build("box", nodes=nodes, links=ports)


def check(found: ExactResult, cluster: st.Cluster, nbytes: float, alpha: str) -> None:
    found.program.verify()
    assert found.time_us == st.simulate(found.program, cluster, nbytes=nbytes, alpha=alpha).total_us
    floor = st.lower_bound(found.program.collective, cluster, nbytes).total_us
    assert floor * (1 - 1e-9) <= found.proved_bound_us <= found.time_us * (1 + 1e-9)


@pytest.mark.parametrize(
    ("collective", "time_us", "bound_us"),
    [
        (st.AllGather(8), 69.0, 69.0),
        (st.ReduceScatter(8), 69.0, 69.0),
        (st.AllToAll(8), 138.0, 138.0),
        (st.AllReduce(8), 138.0, 115.0),
        (st.AllGather(8, chunks=2), 57.5, 57.5),
        (st.AllReduce(8, chunks=16), 115.0, 115.0),
        (st.AllToAll(8, chunks=2), 126.5, 126.5),
        (st.AllToAll(8, chunks=3), 368 / 3, 368 / 3),
    ],
    ids=lambda value: f"{value.kind}{value.chunks}" if isinstance(value, Collective) else "",
)
def test_one_ndv2_node(collective: Collective, time_us: float, bound_us: float) -> None:
    cluster = nvlinks()
    found = solve(collective, cluster, nbytes=MB8, alpha="blocking", budget_s=60)
    check(found, cluster, MB8, "blocking")
    assert found.time_us == pytest.approx(time_us)
    assert found.proved_bound_us == pytest.approx(bound_us)
    assert found.optimal == (time_us == bound_us)
    assert "divide every hop time" in found.grid


def test_cp_sat_proves_the_same() -> None:
    cluster = nvlinks()
    assert cp_sat.available()
    found = solve(st.AllToAll(8), cluster, nbytes=MB8, alpha="blocking", solver="cp-sat", budget_s=60)
    check(found, cluster, MB8, "blocking")
    assert found.optimal
    assert found.time_us == 138.0


COLLECTIVES = [
    st.AllGather(5), st.AllGather(5, chunks=2), st.ReduceScatter(5), st.AllToAll(5), st.AllReduce(5),
    st.Broadcast(5, root=1, chunks=3), st.Reduce(5, root=2, chunks=2), st.Scatter(5, root=3), st.Gather(5),
    st.Permute(5, [(0, 2), (2, 0), (4, 1)]),
]  # fmt: skip


@pytest.mark.parametrize("alpha", ["pipelined", "blocking"])
@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda c: f"{c.kind}{c.chunks}")
def test_a_small_ring(collective: Collective, alpha: str) -> None:
    cluster = st.Cluster.load("ring:5")
    found = solve(collective, cluster, nbytes=MB8, alpha=alpha)
    check(found, cluster, MB8, alpha)
    assert found.gap < 0.02
    if alpha == "blocking":
        assert found.optimal


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda c: f"{c.kind}{c.chunks}")
def test_a_switch_with_unequal_ports(collective: Collective) -> None:
    cluster = box(5, up=50.0, down=25.0, alpha_us=0.0)
    found = solve(collective, cluster, nbytes=MB8, budget_s=300)
    check(found, cluster, MB8, "pipelined")
    assert found.optimal


def test_asymmetric_links_reduce_along_the_reverse_of_the_best_all_gather() -> None:
    links = [st.Link(src=i, dst=(i + 1) % 4, alpha_us=0, gb_per_s=20) for i in range(4)]
    links += [st.Link(src=(i + 1) % 4, dst=i, alpha_us=0, gb_per_s=10) for i in range(4)]
    cluster = st.Cluster.build("uneven", nodes=[st.Node(name=f"d{i}") for i in range(4)], links=links)
    times = []
    for collective in (st.AllGather(4), st.ReduceScatter(4), st.AllReduce(4)):
        found = solve(collective, cluster, nbytes=MB8)
        check(found, cluster, MB8, "pipelined")
        times.append(found.time_us)
    # Turned round, the network is the same ring with its directions exchanged.
    assert times[0] == times[1]


def test_some_of_the_devices_and_channels() -> None:
    cluster = st.Cluster.load("ndv2:1")
    found = solve(st.AllGather([0, 1, 3, 2]), cluster, nbytes=4 * st.MB, channels=["nvlink"], alpha="blocking")
    check(found, cluster, 4 * st.MB, "blocking")
    assert found.gap < 0.1


def test_same_seed_same_program() -> None:
    cluster = nvlinks()
    one, two = (synthesize(st.AllGather(8), cluster, nbytes=MB8, alpha="blocking", seed=3) for _ in range(2))
    assert one == two
    assert one.name == "exact(slot=23us)"


def test_progress_is_told() -> None:
    said: list[tuple[str, float]] = []
    ring = st.Cluster.load("ring:4")
    solve(st.AllGather(4), ring, nbytes=MB8, progress=lambda message, share: said.append((message, share)))
    assert said
    assert all(message.startswith("exact") and 0 <= share <= 1 for message, share in said)


def test_what_cannot_be_done_is_said() -> None:
    nodes = [st.Node(name=f"d{i}") for i in range(3)]
    cluster = st.Cluster.build("apart", nodes=nodes, links=[st.Link(src=0, dst=1, alpha_us=0, gb_per_s=1)])
    with pytest.raises(st.Infeasible, match="no route brings chunk 0 to rank 2"):
        solve(st.AllGather(3), cluster, nbytes=MB8)
    ring = st.Cluster.load("ring:4")
    with pytest.raises(st.Infeasible, match="multiple of 4 chunks"):
        solve(st.AllReduce(4, chunks=3), ring, nbytes=MB8)
    with pytest.raises(st.Infeasible, match="chunks of one size"):
        solve(st.AllToAllV(2, [[0, 1], [2, 0]]), ring, nbytes=MB8)
    with pytest.raises(st.InvalidInput, match="choose from: auto, cp-sat, highs"):
        solve(st.AllGather(4), ring, nbytes=MB8, solver="gurobi")
    with pytest.raises(st.Infeasible, match="this mode is for small cases"):
        solve(st.AllGather(64), st.Cluster.load("torus:64"), nbytes=MB8)


def test_too_little_time_is_said_with_what_was_proved() -> None:
    with pytest.raises(st.SearchTimeout, match="at least"):
        solve(st.AllGather(8, chunks=6), nvlinks(), nbytes=MB8, alpha="blocking", budget_s=0.3)
