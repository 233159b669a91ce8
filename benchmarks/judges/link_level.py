# SPDX-License-Identifier: Apache-2.0
"""The same step link by link: every transfer of every message contends in the simulator. `flows` is judged by this.

It shares the programs and the physics with `flows`, but not the idea that a message is one load: here the steps of a
message wait for each other, and where two messages meet each of their connections gets its share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stretto.cluster import Cluster
from stretto.errors import Infeasible
from stretto.planner.algebra.nodes import nodes_of
from stretto.planner.schedule.merge import Merge, transfers_of
from stretto.strategy.flows import CONTENTION, flow_costs
from stretto.strategy.model import ModelSpec
from stretto.strategy.representation import Strategy
from stretto.strategy.simulate import flows_of, prepared
from stretto.workload.ordering import in_order

ITERATIONS = 3
MAX_TRANSFERS = 2_000_000


def link_level_us(
    strategy: Strategy, model: ModelSpec, cluster: Cluster, *, slowdown: Sequence[float] = (), host_us: float = 0.0
) -> float:
    """The time of an iteration with all transfers of all messages simulated together.

    Messages of one queue follow one another in program order.

    Args:
        strategy: the strategy.
        model: the model that it is for.
        cluster: the cluster, whose first devices are the strategy's.
        slowdown: for each rank the factor on the model's compute times; empty means 1 for all.
        host_us: microseconds that issuing a message takes longer than a library's launch, >= 0.

    Returns:
        Microseconds.

    Raises:
        InvalidInput: the arguments do not fit.
        Infeasible: there are too many transfers.
    """
    step, workload = prepared(strategy, model, cluster, slowdown)
    flows = flows_of(step, cluster, host_us)
    nodes, costs = nodes_of(workload), flow_costs(cluster).costs
    flow_at = [flows.get(workload.ops[op].name) for op in nodes.op]
    made = {}
    for flow in flows.values():
        key = (flow.motion, flow.nbytes, flow.algorithm)
        if key not in made:
            found = transfers_of(flow.motion, flow.nbytes, flow.algorithm, cluster, costs)
            assert found is not None, "every algorithm of flows has a program"
            made[key] = found
    total = ITERATIONS * sum(made[f.motion, f.nbytes, f.algorithm].count for f in flows.values())
    if total > MAX_TRANSFERS:
        raise Infeasible(f"{total} transfers in {ITERATIONS} iterations are more than {MAX_TRANSFERS}")
    waits: dict[tuple[int, int], list[tuple[int, int]]] = {}
    last: dict[object, tuple[int, int]] = {}
    for iteration in range(ITERATIONS):
        for node, before in enumerate(nodes.all_waits()):
            here = (iteration, node)
            waits[here] = [(iteration - lag, other) for other, lag in before if lag <= iteration]
            if (mine := flow_at[node]) is not None:
                waits[here] += [last[mine.queue]] if mine.queue in last else []
                last[mine.queue] = here
    merge = Merge(cluster, CONTENTION)
    end: dict[tuple[int, int], int] = {}
    for here in in_order(waits):
        needs, moved = [end[before] for before in waits[here]], flow_at[here[1]]
        if moved is None:
            end[here] = merge.work(needs, nodes.us[here[1]])
        else:
            start = merge.work(needs, moved.launch_us)
            end[here] = merge.move(made[moved.motion, moved.nbytes, moved.algorithm], start)
    times = merge.end_us()
    finish = np.zeros(ITERATIONS)
    for (iteration, node), number in end.items():
        if flow_at[node] is None:
            finish[iteration] = max(finish[iteration], times[number])
    return float(finish[-1] - finish[-2])
