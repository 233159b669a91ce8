# SPDX-License-Identifier: Apache-2.0
"""The maker `rails`: all-reduces on equal hosts, some pieces of which take one hop between hosts and the others two."""

from __future__ import annotations

import numpy as np
import pytest

import stretto as st
from stretto.errors import Infeasible
from stretto.programs.interpret import check
from stretto.synthesis import rails


@pytest.mark.parametrize("hosts", [3, 4])
@pytest.mark.parametrize("one_hop", [0, 1, 3, 5])
def test_programs_are_right(hosts: int, one_hop: int) -> None:
    ranks = np.random.default_rng(hosts).permutation(8 * hosts)[: 8 * hosts].tolist()
    task, cluster = st.AllReduce(ranks), st.Cluster.load(f"dgx_h100:{hosts}")
    program = rails.rail_program(task, rails.rail_grid(task, cluster), 5, one_hop)
    program.verify()
    check(program.lower(), fifo_depth=1 << 20, op="sum", seed=one_hop)
    assert program.num_transfers <= 5 * rails.transfers_each(rails.rail_grid(task, cluster)) * hosts


def test_pieces_that_take_one_hop_fill_the_gap_of_those_that_take_two() -> None:
    cluster, task = st.Cluster.load("dgx_h100:4"), st.AllReduce(32)
    grid = rails.rail_grid(task, cluster)
    times = [
        st.simulate(rails.rail_program(task, grid, 64, one_hop), cluster, nbytes=1e6).total_us for one_hop in (0, 8, 64)
    ]
    assert times[1] < 0.98 * times[0] and times[1] < times[2]
    assert min(times) >= st.lower_bound(task, cluster, 1e6).total_us


def test_what_it_is_not_for_is_refused() -> None:
    with pytest.raises(Infeasible, match="three or more hosts"):
        rails.synthesize(st.AllReduce(16), st.Cluster.load("dgx_h100:2"), nbytes=1e6)
    with pytest.raises(Infeasible, match="same number of ranks"):
        rails.synthesize(st.AllReduce([0, 1, 8, 9, 16]), st.Cluster.load("dgx_h100:3"), nbytes=1e6)
    with pytest.raises(Infeasible, match="serves all_reduce"):
        rails.synthesize(st.AllGather(24), st.Cluster.load("dgx_h100:3"), nbytes=1e6)
