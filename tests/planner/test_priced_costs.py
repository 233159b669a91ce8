# SPDX-License-Identifier: Apache-2.0
"""The planner with the price of a runtime: what it adds, where it changes the choice, and what it refuses."""

from __future__ import annotations

import pytest

from stretto import Cluster, InvalidInput, Workload
from stretto.algorithms import algorithm
from stretto.errors import Infeasible
from stretto.planner.api import plan
from stretto.planner.costs.costs import Motion, SimulatedCosts
from stretto.planner.costs.priced import PricedCosts
from stretto.programs.formats.mscclpp_wide import PlanForm
from stretto.simulator import Runtime, simulate
from stretto.simulator.priced_wide import wide_time_us

BOX = Cluster.preset("dgx_h200")
ALL = Motion(kind="all_gather", groups=(tuple(range(8)),), channels=("nvlink",))


def test_a_motif_inside_a_host_costs_what_its_plan_of_wide_steps_does() -> None:
    runtime = Runtime.load("mscclpp:h200")
    cost = PricedCosts(BOX, runtime).cost(ALL, 64e6, "direct", exact=True)
    direct = algorithm("direct", "all_gather", 8)
    forms = [PlanForm(streams=streams, slices=64 // streams) for streams in (1, 8, 32)]
    least_us = min(wide_time_us(direct, BOX, nbytes=64e6, form=form, runtime=runtime) for form in forms)
    assert cost.us == pytest.approx(least_us, rel=0.02) and cost.source.endswith(", on mscclpp:h200")
    assert cost.us > SimulatedCosts(BOX).cost(ALL, 64e6, "direct", exact=True).us


def test_between_hosts_a_motif_costs_what_its_streams_do() -> None:
    cluster, runtime = Cluster.preset("dgx_h200", nodes=2), Runtime.load("mscclpp:h200")
    motion = Motion(kind="all_reduce", groups=((0, 8),), channels=("pcie", "rdma"))
    cost = PricedCosts(cluster, runtime).cost(motion, 1e6, "direct", exact=True)
    program = SimulatedCosts(cluster).program(motion, 1e6, "direct")
    streams = simulate(program.lower(fifo_depth=2), cluster, nbytes=1e6, runtime=runtime)
    assert cost.us == pytest.approx(streams.total_us, rel=1e-6)


def test_links_alone_cost_nothing_more() -> None:
    for name in ("ring", "direct", "bruck"):
        assert PricedCosts(BOX, "network").cost(ALL, 1e6, name).us == SimulatedCosts(BOX).cost(ALL, 1e6, name).us


def test_what_a_runtime_does_not_run_is_not_planned() -> None:
    narrow = Runtime(name="narrow", max_blocks=1, instruction_us={"s": 1.0})
    with pytest.raises(Infeasible, match="narrow"):
        PricedCosts(BOX, narrow).cost(ALL, 1e6, "direct")


def test_a_plan_chooses_with_the_runtime() -> None:
    step, box = Workload.load("gpt:125m,ranks=2,tensor=2"), Cluster.load("hosts: 1, gpus: 2 x h200")
    free, priced = (plan(step, box, steps=5, runtime=runtime, systems=()) for runtime in (None, "mscclpp:h200"))
    assert priced.iteration_us > free.iteration_us
    with pytest.raises(InvalidInput, match="runtime"):
        plan(step, box, steps=5, runtime="executor", costs=SimulatedCosts(box))
