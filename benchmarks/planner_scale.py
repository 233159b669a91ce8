# SPDX-License-Identifier: Apache-2.0
"""One GPT-175B step on a large cluster, loaded, planned and re-timed in a process of its own; prints one row as JSON.

``python benchmarks/planner_scale.py RANKS PIPELINE MICRO_BATCHES BUDGET_S``: tensor parallelism of 8 inside each DGX
H100, 1F1B, sequence parallelism, DDP buckets. Seconds are CPU seconds of all threads. The budget is one of wall time,
which a busy machine gives only a part of: it is multiplied by how much longer a loop takes than its CPU time.

`evaluations in 30 s` is counted apart from that, after the plan was made: one thread searches the smaller step from no
baseline for 30 CPU seconds; `above bound then` is where it ends.
"""

from __future__ import annotations

import json
import resource
import sys
import time

from common import Row, cpu_s

import stretto as st
from stretto.planner.baselines import Systems
from stretto.planner.costs.costs import simulated_costs
from stretto.planner.schedule.problem import PlanProblem
from stretto.planner.schedule.retime import retime
from stretto.planner.schedule.search import Progress, search
from stretto.workload import Workload

BASELINE = "syndicate"
SEARCH_CPU_S = 30.0


class Phases:
    """CPU seconds by what the planner says that it is doing."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name, self._since = "costing", cpu_s()

    def tell(self, message: str, _: float) -> None:
        first = message.split()[0]
        name = {"costing": "costing", "best": "search", "re-timing": "re-timing", "end": "end"}.get(first, "baselines")
        now = cpu_s()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now


def slowdown() -> float:
    """Wall time over CPU time of a loop."""
    begun, cpu = time.monotonic(), time.process_time()
    while time.process_time() - cpu < 0.3:
        pass
    return (time.monotonic() - begun) / 0.3


def measure(ranks: int, pipeline: int, micro_batches: int, budget_s: float) -> Row:
    begun = cpu_s()
    step = Workload.load(f"gpt:175b,ranks={ranks},tensor=8,pipeline={pipeline},micro_batches={micro_batches}")
    loaded = cpu_s()
    cluster = st.Cluster.load(f"dgx_h100:{ranks // 8}")
    factor = slowdown()
    phases, wall = Phases(), time.monotonic()
    found = st.plan(step, cluster, budget_s=budget_s * factor, progress=phases.tell)
    wall = time.monotonic() - wall
    phases.tell("end", 1.0)
    row: Row = {
        "case": f"{ranks} ranks, 8 x {pipeline}, {micro_batches} micro-batches", "ops": len(step.ops),
        "load_cpu_s": loaded - begun, **{f"{name}_cpu_s": s for name, s in phases.seconds.items()},
        "all_cpu_s": cpu_s() - begun, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "budget_s": budget_s * factor, "wall_s": wall, "evaluations": found.search.evaluations,
        "predicted_us": found.plan.iteration_us, "link_by_link_us": found.plan.retimed_us, "bound_us": found.bound_us,
    }  # fmt: skip
    other = retime(found.schedules[BASELINE], found.problem, cluster, simulated_costs(cluster)).period_us
    row |= {f"{BASELINE}_us": other, "gain": other / found.plan.retimed_us - 1}
    row["above_bound"] = found.plan.retimed_us / found.bound_us - 1
    row |= searched(found.problem)
    row["note"] = "; ".join((found.search.why_stopped, *found.plan.notes))
    return row


def searched(problem: PlanProblem) -> Row:
    """Evaluations of one thread in `SEARCH_CPU_S` seconds of this process, the bound and the starts included."""
    scheduler = Systems(problem).own
    begun = time.process_time()

    def stop(_: Progress) -> None:
        if time.process_time() - begun >= SEARCH_CPU_S:
            raise KeyboardInterrupt  # ends a search with what it has

    found = search(scheduler, budget_s=3600.0, threads=1, progress=stop)
    return {
        "smaller step": len(scheduler.problem.workload.ops), "evaluations in 30 s": found.evaluations,
        "search then CPU s": time.process_time() - begun, "above bound then": found.curve[-1][2] / found.bound.us - 1,
    }  # fmt: skip


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:4]]
    print(json.dumps(measure(given[0], given[1], given[2], float(sys.argv[4]))))
