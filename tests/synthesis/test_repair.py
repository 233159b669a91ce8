# SPDX-License-Identifier: Apache-2.0
"""Searches from an old program, after links have failed or become slower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import stretto as st
from stretto.cli import run
from stretto.errors import InvalidInput
from stretto.programs.interpret import check as interpret_and_check
from stretto.synthesis import repair, steiner
from stretto.synthesis.helpers import resolve
from stretto.synthesis.repair import trees_of
from stretto.synthesis.steiner_packing import shards_of

MB = 1_000_000
KINDS = {
    "all_gather": st.AllGather, "reduce_scatter": st.ReduceScatter, "all_reduce": st.AllReduce,
    "all_to_all": st.AllToAll,
}  # fmt: skip


def without(cluster: st.Cluster, *links: int) -> st.Cluster:
    """The cluster with some links gone."""
    keep = np.ones(cluster.num_links, np.bool_)
    keep[list(links)] = False
    columns = [name for name in cluster.__dataclass_fields__ if name.startswith("link_")]
    return replace(cluster, name="broken", **{name: getattr(cluster, name)[keep] for name in columns})


@pytest.mark.parametrize("kind", KINDS)
def test_a_lost_link_is_gone_around(kind: str) -> None:
    torus = st.Cluster.load("torus:3x3")
    old = st.synthesize(KINDS[kind](9), torus, 64 * MB, cache=False, budget_s=60.0, makers=["greedy"])
    broken = without(torus, 0)
    found = st.synthesize(
        KINDS[kind](9), broken, 64 * MB, cache=False, budget_s=600.0, base=old, makers=["repair"],
        maker_options={"repair": {"max_transfers": 20_000}},
    )  # fmt: skip
    assert found.certificate.maker == "repair"
    assert found.certificate.gap < 0.25
    found.program.verify()
    assert isinstance(old.program, st.Program)
    coarse = repair.synthesize(KINDS[kind](9), broken, base=old.program, nbytes=MB, budget_s=60.0, max_transfers=800)
    interpret_and_check(coarse.lower())


def test_the_old_trees_are_packed_before_the_old_maker_is_asked() -> None:
    torus = st.Cluster.load("torus:3x3")
    old = st.synthesize(st.AllGather(9), torus, MB, cache=False, budget_s=60.0, makers=["forest"])
    said: list[str] = []
    st.synthesize(
        st.AllGather(9), without(torus, 0), MB, cache=False, budget_s=60.0, base=old,
        progress=lambda message, share: said.append(message),
    )  # fmt: skip
    assert "repair" in said[0] and any("forest" in message for message in said)


def test_the_trees_of_a_program_are_found_in_it() -> None:
    ring = st.algorithm("ring", "all_reduce", 4)
    shards = shards_of(st.AllReduce(4, chunks=1))
    trees = list(trees_of(ring, (0, 1, 2, 3), shards))
    assert len(trees) == 4
    for shard, gather, spread in trees:
        assert (shard, len(gather), len(spread)) == (0, 3, 3)
        assert spread[0][0] == gather[-1][1]
    exchange = st.algorithm("recursive_doubling", "all_reduce", 4)
    assert list(trees_of(exchange, (0, 1, 2, 3), shards)) == []


def test_helpers_of_the_old_program_may_help_again() -> None:
    torus, group = st.Cluster.load("torus:3x3"), [0, 4, 8]
    old = steiner.synthesize(
        st.AllReduce(group), torus, helpers=resolve(torus, group, "all"), nbytes=MB, budget_s=60.0, max_transfers=500
    )
    found = st.synthesize(
        st.AllReduce(group), without(torus, 3), MB, cache=False, budget_s=600.0, base=old,
        maker_options={"repair": {"max_transfers": 500}},
    )  # fmt: skip
    assert found.program.collective.helpers > 0
    assert set(found.program.collective.ranks) <= set(old.collective.ranks)


def test_another_collective_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = st.Cluster.load("ring:4")
    with pytest.raises(InvalidInput, match=r"base: does .*all_gather.*, not .*all_reduce"):
        st.synthesize(st.AllReduce(4), ring, MB, base=st.algorithm("ring", "all_gather", 4))
    old, new = tmp_path / "old.txt", tmp_path / "new.txt"
    assert run(["synth", "allgather", "-c", "ring:4", "-b", "1M", "--makers", "library:ring", "-o", str(old)]) == 0
    assert (
        run(["synth", "allgather", "-c", "ring:4", "-b", "1M", "--from", str(old), "-o", str(new), "--budget", "600"])
        == 0
    )
    assert "repair" in capsys.readouterr().out
    assert run(["synth", "allreduce", "-c", "ring:4", "-b", "1M", "--from", str(old)]) == 2
