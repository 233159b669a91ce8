# SPDX-License-Identifier: Apache-2.0
"""Whether a plan lets all ranks launch in one order; no process is started."""

from __future__ import annotations

import pytest
from enforcer_plans import cluster_of, simple_plan, step_of, variant_plans, whole

from stretto.errors import PlanMismatch
from stretto.runtime.enforcer.launches import check_launches, launches
from stretto.runtime.enforcer.rank_plan import share_of
from stretto.workload import Dep, Op, Workload

HOSTS = ["a", "a", "b", "b"]
CLUSTER = cluster_of()
SIZE = 4.0 * 1024


def test_what_becomes_free_at_the_same_call_is_launched_in_the_order_of_the_plan() -> None:
    step = step_of([("all_to_all", SIZE, 0), ("all_reduce", SIZE, 0)], 4)
    plan = simple_plan(step, CLUSTER, [whole(["rdma"], seq=1), whole(["rdma"], seq=0)])
    for rank in range(4):
        order = launches(share_of(plan, step, rank, HOSTS))
        assert [(iteration, op) for iteration, op, _, _ in order] == [(0, 2), (0, 1), (1, 2), (1, 1), (2, 2), (2, 1)]


def test_plans_of_ops_that_all_ranks_share_suit_all_ranks() -> None:
    kinds = [("all_reduce", SIZE, 0), ("all_to_all", SIZE, 0), ("broadcast", SIZE, 1), ("reduce_scatter", SIZE, 0)]
    step = step_of(kinds, 4)
    for plan in variant_plans(step, CLUSTER, most=8):
        check_launches(plan, step, HOSTS)


def groups_step() -> Workload:
    """Ranks 0 and 1 sum twice, in between ranks 0 and 2 do."""
    given = (Dep(op="work", why="submit"),)
    pairs = {"first": ((0, 1),), "second": ((0, 1),), "third": ((0, 2),)}
    sums = [Op(name=name, kind="all_reduce", nbytes=SIZE, groups=groups, after=given) for name, groups in pairs.items()]
    return Workload(name="pairs", num_ranks=4, ops=(Op(name="work", duration_us=1.0), *sums))


def test_a_plan_that_holds_back_on_one_rank_what_another_launches_at_once_is_refused() -> None:
    step = groups_step()
    # On rank 0 the first sum stands behind the third, of which rank 1 knows nothing.
    late = simple_plan(step, CLUSTER, [whole(["rdma"], seq=1), whole(["eth"], seq=0), whole(["rdma"], seq=0)])
    with pytest.raises(PlanMismatch, match="ranks would launch first and second in different orders"):
        check_launches(late, step, HOSTS)
    soon = simple_plan(step, CLUSTER, [whole(["rdma"], seq=0), whole(["eth"], seq=0), whole(["rdma"], seq=1)])
    check_launches(soon, step, HOSTS)
