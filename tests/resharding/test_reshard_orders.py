# SPDX-License-Identifier: Apache-2.0
"""Senders and orders: the paper's algorithms on its own cases, and our dense order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from stretto import Cluster, InvalidInput
from stretto.collectives.reshard import Piece, Reshard, largest_buffer
from stretto.resharding import Tensor, decompose, place
from stretto.resharding.assign import ORDERS, HostTask, assign, jobs_of, timed
from stretto.resharding.balance import balance
from stretto.resharding.bundles import bundles_of
from stretto.resharding.dense import dense_order
from stretto.resharding.hosts import Hosts

P3 = Cluster.preset("p3_8xlarge", nodes=5)


def jobs(src: str, dst: str) -> list[HostTask]:
    sides = place(src, dst, P3)
    tasks = decompose([Tensor(shape=(1024, 1024, 512), dtype_bytes=4, src=sides[0], dst=sides[1])])
    devices = sorted({d for side in sides for d in side.mesh.devices})
    return jobs_of(bundles_of(tasks, merge=False), Hosts.of(P3, devices))


@pytest.mark.parametrize("order", ORDERS)
def test_hosts_do_one_task_at_a_time_and_senders_hold_what_they_send(order: str) -> None:
    work = jobs("(2,4) S1RR", "(2,4) S0RR")
    found = assign(order, work)
    assert sorted(found.order) == list(range(len(work)))
    spans: dict[int, list[tuple[float, float]]] = {}
    for j, job in enumerate(work):
        assert found.sender[j] in job.senders
        for host in (found.sender[j], *job.receivers):
            spans.setdefault(host, []).append((found.start_us[j], found.start_us[j] + job.us))
    for mine in spans.values():
        mine.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in pairwise(mine))


@pytest.mark.parametrize(
    ("sides", "ratios"),
    [
        (("(2,4) RRR", "(2,4) S0RR"), {"naive": 2, "load_balance_only": 1, "dfs": 1, "greedy": 1}),
        (("(2,4) RS0R", "(2,4) S0RR"), {"naive": 1.5, "load_balance_only": 1.5, "dfs": 1, "greedy": 1}),
        (("(2,4) RS01R", "(2,4) S01RR"), {"naive": 1.875, "load_balance_only": 1.875, "greedy": 1, "ensemble": 1}),
    ],
)
def test_orders_of_the_ablation(sides: tuple[str, str], ratios: dict[str, float]) -> None:
    work = jobs(*sides)
    half_us = 1024 * 1024 * 512 * 4 / 2 / 1250
    for order, ratio in ratios.items():
        assert assign(order, work).total_us == pytest.approx(ratio * half_us, rel=1e-9), order


def test_depth_first_search_ends_and_never_loses_to_the_order_it_begins_with() -> None:
    work = jobs("(2,4) RS01R", "(2,4) S01RR")
    assert assign("dfs", work).total_us <= assign("naive", work).total_us


def test_tasks_start_as_early_as_their_hosts_allow() -> None:
    work = [HostTask(senders=(0,), receivers=(2,), us=5.0), HostTask(senders=(1,), receivers=(2, 3), us=2.0)]
    assert timed(work, [0, 1], [1, 0]).start_us == (2.0, 0.0)


def test_a_balance_is_the_best_split() -> None:
    shares, us = balance({frozenset({0, 1}): 60.0, frozenset({1, 2}): 60.0, frozenset({2}): 60.0}, {0: 1, 1: 1, 2: 1})
    assert us == pytest.approx(60.0, rel=1e-4)
    for share in shares.values():
        assert sum(share.values()) == pytest.approx(1.0)


def test_a_dense_order_is_as_long_as_the_busiest_port() -> None:
    draw = np.random.default_rng(7)
    out, into = draw.integers(0, 4, 400), 4 + draw.integers(0, 4, 400)
    start, end = dense_order(
        out_port=out.tolist(), in_port=into.tolist(), duration_us=[1.0] * 400, parent=[-1] * 400,
        urgency=list(range(400)),
    )  # fmt: skip
    busiest = max(np.bincount(out).max(), np.bincount(into).max())
    assert busiest <= end.max() <= busiest + 2
    for port in range(8):
        mine = np.sort(start[(out == port) | (into == port)])
        assert np.all(np.diff(mine) >= 1 - 1e-9)


def test_hops_wait_for_what_brings_their_data() -> None:
    start, end = dense_order(
        out_port=[0, 1, -1], in_port=[2, 3, -1], duration_us=[4.0, 1.0, 0.5], parent=[-1, 0, 1], urgency=[0, 0, 0]
    )
    assert start.tolist() == [0.0, 4.0, 5.0] and end[2] == 5.5


def test_a_port_may_send_for_one_device_and_receive_for_another() -> None:
    draw = np.random.default_rng(3)
    ports = draw.integers(0, 5, (2, 300))
    parent = [int(draw.integers(-1, at)) if at else -1 for at in range(300)]
    start, end = dense_order(
        out_port=ports[0].tolist(), in_port=ports[1].tolist(), duration_us=[1.0] * 300, parent=parent,
        urgency=list(range(300)),
    )  # fmt: skip
    assert np.all(end == start + 1)
    assert all(parent[at] < 0 or start[at] >= end[parent[at]] for at in range(300))


def test_pieces_are_cut_at_whole_elements() -> None:
    piece = Piece(nbytes=40, parts=((0,),), wanted=(1,), chunks=3, align=4)
    assert np.diff(piece.cuts()).tolist() == [12, 12, 16]
    pieces = [piece, Piece(nbytes=8, parts=((0,), (1,)), wanted=(0,))]
    collective = Reshard((3, 5), pieces)
    assert largest_buffer(2, pieces) == 48
    assert np.rint(collective.chunk_bytes(48)).tolist() == [12, 12, 16, 8]
    assert collective.combining


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Piece(nbytes=10, parts=((0,),), wanted=(1,), align=4), "multiple of 4"),
        (Piece(nbytes=8, parts=((0,),), wanted=(1,), chunks=9), "chunks: must be 1..8, not 9"),
        (Piece(nbytes=8, parts=((0,), ()), wanted=(1,)), "needs somebody who holds it"),
        (Piece(nbytes=8, parts=((0,), (0,)), wanted=(1,)), "parts: must be distinct ranks 0..1"),
        (Piece(nbytes=8, parts=((0,),), wanted=(2,)), "wanted: must be distinct ranks 0..1"),
    ],
)
def test_wrong_pieces_are_refused(piece: Piece, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Reshard((0, 1), [piece])
