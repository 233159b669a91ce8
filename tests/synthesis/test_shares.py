# SPDX-License-Identifier: Apache-2.0
"""The maker `shares`: all-reduces through shards of unequal sizes on networks of direct links."""

from __future__ import annotations

import random

import numpy as np
import pytest

import stretto as st
from stretto.errors import Infeasible
from stretto.programs.interpret import check
from stretto.synthesis import shares


def direct(count: int, seed: int) -> st.Cluster:
    """A strongly connected digraph of devices with unequal links."""
    from stretto.cluster.model import Link, Node

    draw = random.Random(seed)
    circle = draw.sample(range(count), count)
    pairs = set(zip(circle, [*circle[1:], circle[0]], strict=True))
    while len(pairs) < 2 * count:
        a, b = draw.sample(range(count), 2)
        pairs.add((a, b))
    links = [
        Link(src=a, dst=b, gb_per_s=draw.choice((4.0, 10.0, 25.0)), alpha_us=draw.choice((0.3, 2.0)))
        for a, b in sorted(pairs)
    ]
    return st.Cluster.build("drawn", nodes=[Node(name=f"d{k}", host=k) for k in range(count)], links=links)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("alpha", ["pipelined", "blocking"])
def test_programs_are_right_and_not_below_the_bound(seed: int, alpha: str) -> None:
    cluster = direct(3 + seed, seed)
    ranks = random.Random(seed).sample(range(cluster.num_devices), cluster.num_devices)
    task = st.AllReduce(ranks)
    program = shares.synthesize(task, cluster, nbytes=1e6, budget_s=0.05, seed=seed, alpha=alpha)
    program.verify()
    check(program.lower(), fifo_depth=1 << 20, op="sum", seed=seed)
    took = st.simulate(program, cluster, nbytes=1e6, alpha=alpha).total_us
    assert took >= st.lower_bound(task, cluster, 1e6).total_us * (1 - 1e-9)


def test_a_line_is_nearly_at_its_bound() -> None:
    """Pairs of trees with one root stay 2 % above it; with many small shards both directions are busy all the time."""
    from stretto.cluster.model import Link, Node

    links = [Link(src=a, dst=b, gb_per_s=30.0, alpha_us=0.8) for k in range(7) for a, b in ((k, k + 1), (k + 1, k))]
    line = st.Cluster.build("line8", nodes=[Node(name=f"d{k}", host=k) for k in range(8)], links=links)
    search = shares.ShareSearch.of(st.AllReduce(8), line, nbytes=1e6, alpha="pipelined", seed=0)
    program = search.program(search.trial(next(search.suggested()), 960))
    program.verify()
    bound = st.lower_bound(st.AllReduce(8), line, 1e6).total_us
    assert st.simulate(program, line, nbytes=1e6).total_us < 1.015 * bound


def test_switches_other_collectives_and_parts_that_do_not_meet_are_refused() -> None:
    with pytest.raises(Infeasible, match="not by switches"):
        shares.synthesize(st.AllReduce(8), st.Cluster.load("dgx_a100"), nbytes=1e6)
    with pytest.raises(Infeasible, match="serves all_reduce"):
        shares.synthesize(st.AllGather(4), st.Cluster.load("ring:4"), nbytes=1e6)
    with pytest.raises(Infeasible, match="does not reach"):
        shares.synthesize(st.AllReduce([0, 5]), st.Cluster.load("torus:4x4"), nbytes=1e6)


def test_shares_let_ranks_with_few_links_keep_more() -> None:
    found = shares.leveled(np.array([2.0, 3.0, 4.0, 4.0, 4.0]))
    assert found[0] > found[1] > found[2] and abs(found.sum() - 1) < 1e-9
