# SPDX-License-Identifier: Apache-2.0
"""Collective-permutes: every rank sends to one and receives from one, both at once."""

from __future__ import annotations

from pathlib import Path

import pytest

import stretto as st
from stretto.errors import InvalidInput
from stretto.planner.schedule.resources import op_ends
from stretto.workload import Dep, Op, Workload, chakra

NBYTES = 50e6
GB_PER_S = 25.0


def ring_of_hosts(count: int) -> st.Cluster:
    """Hosts of one device each behind full-duplex NICs at one switch."""
    nodes = [st.Node(name=f"d{k}", host=k) for k in range(count)] + [st.Node(name="fabric", kind="switch")]
    links = [
        st.Link(src=a, dst=b, alpha_us=1.0, gb_per_s=GB_PER_S, channel="ib")
        for k in range(count)
        for a, b in ((k, count), (count, k))
    ]
    return st.Cluster.build("hosts", nodes=nodes, links=links)


def step(*groups: tuple[int, int], kind: str = "collective_permute", ranks: int = 4) -> Workload:
    ops = (
        Op(name="attend", duration_us=100.0, after=(Dep(op="shift", lag=1),)),
        Op(name="shift", kind=kind, nbytes=NBYTES, groups=groups, after=(Dep(op="attend"),)),
    )
    return Workload(name="ring attention", num_ranks=ranks, ops=ops)


def test_a_ring_takes_as_long_as_one_of_its_messages() -> None:
    around = step(*((k, (k + 1) % 4) for k in range(4)))
    found = st.plan(around, ring_of_hosts(4), steps=100)
    alone_us = NBYTES / GB_PER_S / 1e3
    assert found.plan.retimed_us == pytest.approx(100 + alone_us, rel=0.02)
    assert found.plan.iteration_us == pytest.approx(found.plan.retimed_us, rel=0.01)
    assert found.bound_us <= found.plan.retimed_us * (1 + 1e-9)


def test_two_targets_behind_one_nic_share_it() -> None:
    both = Workload(
        name="two", num_ranks=4,
        ops=(
            Op(name="c", duration_us=10.0, after=(Dep(op="a", lag=1), Dep(op="b", lag=1))),
            Op(name="a", kind="collective_permute", nbytes=NBYTES, groups=((0, 1), (1, 0)), after=(Dep(op="c"),)),
            Op(name="b", kind="collective_permute", nbytes=NBYTES, groups=((0, 2), (2, 0)), after=(Dep(op="c"),)),
        ),
    )  # fmt: skip
    found = st.plan(both, ring_of_hosts(4), steps=100)
    assert found.plan.retimed_us >= 2 * NBYTES / GB_PER_S / 1e3


def test_a_rank_of_a_ring_holds_both_directions() -> None:
    around = step((0, 1), (1, 2), (2, 0), ranks=4)
    assert len(op_ends(around)[1]) == 2 * (len(around.places) - 1)
    one_way = step((0, 1), (2, 3))
    assert len(op_ends(one_way)[1]) == len(one_way.places)


def test_a_rank_sends_once_and_receives_once() -> None:
    with pytest.raises(InvalidInput, match=r"groups\[1\]: rank 0 sends twice"):
        step((0, 1), (0, 2))
    with pytest.raises(InvalidInput, match=r"groups\[1\]: rank 1 receives twice"):
        step((0, 1), (2, 1))
    with pytest.raises(InvalidInput, match="a collective_permute needs groups"):
        step()
    with pytest.raises(InvalidInput, match="rank 1 is in two groups"):
        step((0, 1), (1, 2), kind="send")


def test_files_keep_it_and_chakra_refuses_it(tmp_path: Path) -> None:
    around = step(*((k, (k + 1) % 4) for k in range(4)))
    around.save(tmp_path / "step.yaml")
    assert Workload.load(tmp_path / "step.yaml") == around
    with pytest.raises(InvalidInput, match="shift: Chakra has no collective_permute"):
        chakra.write(around, tmp_path / "traces")
