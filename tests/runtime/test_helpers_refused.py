# SPDX-License-Identifier: Apache-2.0
"""Programs that use devices outside their group are refused where these take no part."""

from __future__ import annotations

import pytest

from stretto import AllReduce, Cluster, Program
from stretto.errors import InvalidInput, PlanMismatch
from stretto.planner.algebra.motif import motif_of
from stretto.runtime.enforcer.binding import Programs, bind_op
from stretto.runtime.enforcer.rank_plan import RankMotif, RankOp
from stretto.runtime.executor.executor import Executor
from stretto.synthesis import steiner
from stretto.workload import Op


@pytest.fixture(scope="module")
def helped() -> Program:
    """Two opposite devices of a ring, which pass through the two between them."""
    ring = Cluster.preset("ring", nodes=4)
    return steiner.synthesize(AllReduce((0, 2), in_place=True), ring, helpers=(1, 3), nbytes=1 << 20, budget_s=0.2)


@pytest.mark.parametrize("ranks", [None, (0,), (0, 0), (0, 0, 0, 0)])
def test_the_executor_loads_it_only_for_all_ranks_that_it_names(helped: Program, ranks: tuple[int, ...] | None) -> None:
    named, helpers = helped.collective.num_ranks, helped.collective.helpers
    assert helpers > 0 and named == 2 + helpers
    with (
        Executor(0, 1, lambda mine: [mine], token=b"only for tests") as executor,
        pytest.raises(InvalidInput, match=rf"for {named} ranks, {helpers} of them helpers .* which must take part"),
    ):
        executor.load(helped, ranks=ranks)


def test_a_plan_that_brings_it_along_is_refused_by_the_group_alone(helped: Program) -> None:
    for group in ((0, 1), tuple(range(helped.collective.num_ranks))):
        whole = motif_of("all_reduce", group, 4096.0, 0)
        part = RankMotif(
            number=0, leaf=whole, algorithm="x", channels=("a",), lane=0, after=(), program=helped, brief=False
        )
        op = Op(name="op", kind="all_reduce", nbytes=4096.0)
        with pytest.raises(PlanMismatch, match="helpers outside the group, which take no part in its calls"):
            bind_op(RankOp(number=0, op=op, whole=whole, motifs=(part,), option="whole"), 0, 4096, None, Programs())
