# SPDX-License-Identifier: Apache-2.0
"""The time of an iteration under a strategy, and the reasons for it; and the joint plan of a strategy's messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster
from ..errors import InvalidInput
from ..planner import api
from ..planner.api import PlanResult
from ..workload import Workload
from .flows import AS_LISTED, DIRECT, MessageFlow, flow_costs, run
from .kernels import StrategyStep, global_step, workload_of
from .kernels.workload import exchange_name
from .model import ModelSpec
from .representation import Strategy


@dataclass(frozen=True, kw_only=True)
class SimulatedStrategy:
    """One iteration in the steady state."""

    iteration_us: float
    compute_us: float
    comm_us: float
    """Microseconds in which at least one message was under way."""
    bound_us: float
    """A lower bound for any order of these messages: the compute, or the busiest link."""
    busiest_link: str
    busiest_us: float
    messages: int
    moved_bytes: float
    """Bytes moved, summed over all links."""
    settled: bool

    @property
    def exposed_us(self) -> float:
        """The time that communication adds to the compute."""
        return self.iteration_us - self.compute_us


def simulate_strategy(
    strategy: Strategy, model: ModelSpec, cluster: Cluster, *, slowdown: Sequence[float] = (), host_us: float = 0.0
) -> SimulatedStrategy:
    """Simulate a strategy's step on a cluster until iterations take the same time.

    >>> from stretto.strategy import zoo
    >>> from stretto.strategy.builders import build
    >>> model, cluster = zoo.model("vgg16", scale=0.1), Cluster.preset("autodist_b5")
    >>> found = simulate_strategy(build("all_reduce", model, cluster), model, cluster)
    >>> found.bound_us <= found.iteration_us < 2 * found.compute_us
    True

    Args:
        strategy: the strategy.
        model: the model that it is for.
        cluster: the cluster, whose first devices are the strategy's.
        slowdown: for each rank the factor on the model's compute times; empty means 1 for all.
        host_us: microseconds that issuing a message takes longer than a library's launch (bookkeeping, remote calls),
            >= 0.

    Returns:
        Times and loads of one iteration.

    Raises:
        InvalidInput: the arguments do not fit.
    """
    step, workload = prepared(strategy, model, cluster, slowdown)
    flows = flows_of(step, cluster, host_us)
    ran = run(workload, flows, cluster)
    busy_us = ran.link_bytes / (cluster.link_gb_per_s * 1e3)
    at = int(np.argmax(busy_us)) if len(busy_us) else -1
    return SimulatedStrategy(
        iteration_us=ran.period_us, compute_us=workload.compute_us, comm_us=ran.comm_us,
        bound_us=max(workload.compute_us, float(busy_us.max(initial=0.0))),
        busiest_link=cluster.link_name(at) if flows else "", busiest_us=float(busy_us.max(initial=0.0)),
        messages=len(flows), moved_bytes=float(ran.link_bytes.sum()), settled=ran.settled,
    )  # fmt: skip


def iteration_us(strategy: Strategy, model: ModelSpec, cluster: Cluster, *, slowdown: Sequence[float] = ()) -> float:
    """The simulated time of an iteration; see `simulate_strategy`.

    Args:
        strategy: the strategy.
        model: the model that it is for.
        cluster: the cluster, whose first devices are the strategy's.
        slowdown: for each rank the factor on the model's compute times; empty means 1 for all.

    Returns:
        Microseconds.

    Raises:
        InvalidInput: the arguments do not fit.
    """
    return simulate_strategy(strategy, model, cluster, slowdown=slowdown).iteration_us


def plan_strategy(
    strategy: Strategy, model: ModelSpec, cluster: Cluster, *, budget_s: float = 30.0, steps: int | None = None,
    seed: int = 0, slowdown: Sequence[float] = (), systems: tuple[str, ...] = ("fifo",),
) -> PlanResult:  # fmt: skip
    """Let the joint planner choose pieces, order, channels and algorithms of a strategy's messages.

    Args:
        strategy: the strategy.
        model: the model that it is for.
        cluster: the cluster, whose first devices are the strategy's.
        budget_s: seconds for the planner, > 0.
        steps: number of search steps instead of a time budget; None uses `budget_s`.
        seed: seed of the search, >= 0.
        slowdown: for each rank the factor on the model's compute times; empty means 1 for all.
        systems: names of the baselines to compare with.

    Returns:
        The plan with everything it was compared with.

    Raises:
        InvalidInput: the arguments do not fit.
    """
    _, workload = prepared(strategy, model, cluster, slowdown)
    return api.plan(workload, cluster, budget_s=budget_s, steps=steps, seed=seed, systems=systems, retime=False)


def prepared(
    strategy: Strategy, model: ModelSpec, cluster: Cluster, slowdown: Sequence[float] = ()
) -> tuple[StrategyStep, Workload]:
    """The step of a strategy on a cluster, and its workload.

    Args:
        strategy: the strategy.
        model: the model that it is for.
        cluster: the cluster, whose first devices are the strategy's.
        slowdown: for each rank the factor on the model's compute times; empty means 1 for all.

    Returns:
        The step and the workload.

    Raises:
        InvalidInput: the arguments do not fit.
    """
    step = global_step(strategy, model, cluster)
    if step.ranks != tuple(range(step.num_ranks)):
        raise InvalidInput(f"strategy {strategy.name}: its devices must be the first of {cluster.name}, in its order")
    return step, workload_of(step, slowdown=slowdown)


def flows_of(step: StrategyStep, cluster: Cluster, host_us: float = 0.0) -> dict[str, MessageFlow]:
    """The flow of each message's exchange, by the name of its comm-op.

    Args:
        step: the step.
        cluster: the cluster.
        host_us: microseconds that issuing a message takes longer than a library's launch, >= 0.

    Returns:
        The flows by name.

    Raises:
        InvalidInput: `host_us` is out of range.
    """
    if not 0 <= host_us < 1e9:
        raise InvalidInput(f"host_us: must be 0 or more, not {host_us:g}")
    costs = flow_costs(cluster)
    found = {}
    for message in step.messages:
        served = message.sync.kind == "parameter_server"
        how = DIRECT if served else AS_LISTED if message.sync.sequence else "stock"
        for number, exchange in enumerate(message.exchanges):
            found[exchange_name(message, number)] = costs.flow(
                exchange.kind, exchange.groups, exchange.nbytes, root=exchange.root, how=how,
                lane=-1 if served else message.lane, more_us=host_us,
            )  # fmt: skip
    return found
