# SPDX-License-Identifier: Apache-2.0
"""Simulates a training step as it is, and with one change at a time, in one model."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..cluster import Cluster
from ..control.refine import LEAST, MOST, RefinedCosts
from ..errors import Infeasible, InvalidInput
from ..planner.algebra.options import problem as make_problem
from ..planner.api import PlanResult
from ..planner.baselines import Systems
from ..planner.costs.costs import CostModel, simulated_costs
from ..planner.placement import hosts_taken
from ..planner.schedule.problem import PlanProblem
from ..planner.schedule.schedule import StepSchedule
from ..planner.tuner_csv import MAX_BYTES, TunerLine, tuner_lines
from ..planner.tuner_gain import with_tuner_alone
from ..units import MIB
from ..workload import Workload
from .advice import WORTHWHILE, AdvisedChange
from .buckets import CAPS, accumulated, gradient_buckets, rebucketed

SLOWER = 1.25
"""Collectives that took this many times longer than the description lets expect are a finding of their own."""
TIMES = (2, 4)
"""Numbers of micro-batches that are tried."""


def as_submitted_us(workload: Workload, cluster: Cluster, costs: CostModel) -> StepSchedule:
    """The step as PyTorch runs it by itself: whole collectives, one after the other, in the order of submission.

    Args:
        workload: The step.
        cluster: Where it runs.
        costs: What motifs cost there.

    Returns:
        The schedule of an iteration in the steady state.
    """
    return Systems(_defaults(workload, cluster, costs)).schedule("fifo")


def _defaults(workload: Workload, cluster: Cluster, costs: CostModel) -> PlanProblem:
    # No time is left from the beginning, so that every comm-op has its default option only.
    return make_problem(workload, cluster, costs, until=0.0)


def measured_factors(
    workload: Workload, cluster: Cluster, alone: float = 1.0, *, probed: bool = False
) -> dict[str, float]:
    """How many times longer the measured collectives took than simulated, by the channels that they use.

    Args:
        workload: a step whose comm-ops have measured durations; others are skipped.
        cluster: the cluster as it was described.
        alone: the share of its measured time that a collective would take by itself, where several ran at once; the
            model lets them run one after the other.
        probed: whether the job itself measured the cluster: then no factor is too large to be true.

    Returns:
        By channels joined with ``+``, the ratio of the sums; empty where nothing was measured.
    """
    sums = _measured_sums(workload, cluster, alone)
    most = float("inf") if probed else MOST
    return {key: min(max(real / model, LEAST), most) for key, (real, model) in sums.items() if model > 0}


def beyond_factors(workload: Workload, cluster: Cluster, alone: float = 1.0, *, gloo: bool = False) -> str:
    """What to say where collectives took so much longer, or shorter, than simulated that no factor is that large.

    Args:
        workload: as for `measured_factors`.
        cluster: the cluster as it was described.
        alone: as for `measured_factors`.
        gloo: whether the step was recorded on gloo.

    Returns:
        The reason why the cluster is not the one of the measurement; empty where all that takes long is in range.
    """
    sums = _measured_sums(workload, cluster, alone)
    total_us = sum(real for real, _ in sums.values())
    for key, (real, model) in sums.items():
        if model > 0 and real > WORTHWHILE * total_us and not LEAST < real / model < MOST:
            times = f"more than {MOST:g} times" if real > model else f"less than 1/{MOST:g} of the time"
            as_long = "as long as" if real > model else "that"
            why = "it is another network"
            if gloo and "nvlink" in key:
                why = "gloo, on which the step was recorded, does not use it"
            return f"collectives took {times} {as_long} {cluster.name} lets expect of {key}: {why}"
    return ""


def _measured_sums(workload: Workload, cluster: Cluster, alone: float) -> dict[str, list[float]]:
    """By channels: the measured time of all collectives together, and the simulated one."""
    problem = _defaults(workload, cluster, simulated_costs(cluster))
    sums: dict[str, list[float]] = {}
    for op in workload.comm_ops:
        if op.duration_us > 0 and not op.at_most:
            (task,) = problem.options[op.name][0].tasks
            both = sums.setdefault("+".join(task.channels), [0.0, 0.0])
            # The launch is a figure of its own, which the factor does not scale.
            took_us = alone * op.duration_us
            both[0] += max(took_us - task.launch_us, LEAST * took_us)
            both[1] += task.duration_us - task.launch_us
    return sums


@dataclass(frozen=True, kw_only=True, eq=False)
class WhatIf:
    """One step on one cluster, with what was measured of its collectives; every change is compared with `now`."""

    workload: Workload
    cluster: Cluster
    gpu: bool
    factors: dict[str, float]
    probed: bool = False
    """Whether the cluster was probed rather than described."""
    step_us: float = 0.0
    """The step as it was measured, the base of all times; 0 where it was not: then the model's is."""
    until: float = float("inf")
    """The moment (`time.monotonic`) after which no further variants are tried."""

    @cached_property
    def costs(self) -> CostModel:
        """The simulated costs, times what was measured."""
        plain = simulated_costs(self.cluster)
        return RefinedCosts(plain, self.factors) if self.factors else plain

    @cached_property
    def now(self) -> StepSchedule:
        """The step as it is."""
        return as_submitted_us(self.workload, self.cluster, self.costs)

    def change(self, effort: Any, name: str, how: str, step_us: float, **rest: Any) -> AdvisedChange:
        """A change, with its gain over the step as it is.

        Args:
            effort: the kind of the change.
            name: a few words.
            how: what to do.
            step_us: the simulated step with the change.
            **rest: other fields of `AdvisedChange`.

        Returns:
            The change.
        """
        gain = self.now.period_us / step_us if step_us > 0 else 1.0
        shown_us = self.step_us / gain if self.step_us else step_us
        return AdvisedChange(effort=effort, name=name, how=how, step_us=shown_us, gain=gain, **rest)

    def described_links(self) -> Iterator[AdvisedChange]:
        """The step if the network did what the description says, where collectives were clearly slower than that."""
        worst = max(self.factors.values(), default=1.0)
        if worst < SLOWER:
            return
        found = as_submitted_us(self.workload, self.cluster, simulated_costs(self.cluster))
        what, itself = ("probed", "") if self.probed else ("described", ", the description itself")
        if self.gpu:
            why = "NCCL's algorithms, the interface (NCCL_IB_HCA, NCCL_SOCKET_IFNAME, NCCL_NET_GDR_LEVEL), the fabric"
        elif hosts_taken(self.workload.num_ranks, self.cluster) == 1:
            why = "gloo, which goes through sockets inside a host, too, or more ranks and threads than processors"
        else:
            why = "gloo's algorithms, the interface (GLOO_SOCKET_IFNAME), more ranks than processors, the fabric"
        yield self.change(
            "environment", f"the network as {what}",
            f"find out why collectives take {worst:.1f} times as long as the network as {what} lets expect: {why}"
            f"{itself}", found.period_us,
            diagnosis=True, note="a fault to look for, not a setting",
        )  # fmt: skip

    def library_algorithms(self) -> Iterator[AdvisedChange]:
        """One algorithm of NCCL's for all all-reduces, by its environment variable."""
        if not self.gpu or not any(op.kind == "all_reduce" for op in self.workload.comm_ops):
            return
        problem = _defaults(self.workload, self.cluster, self.costs)
        found = {}
        for name in ("ring", "tree"):
            line = TunerLine(
                collective="allreduce", min_bytes=0, max_bytes=MAX_BYTES, algorithm=name, protocol="simple"
            )
            found[name] = with_tuner_alone([line], problem, self.cluster, self.costs).period_us
        best = min(found, key=lambda name: found[name])
        setting = f"NCCL_ALGO=allreduce:{best}"
        yield self.change(
            "environment", setting, f"export {setting}", found[best], note="NCCL is taken to choose well by itself"
        )

    def other_buckets(self) -> Iterator[AdvisedChange]:
        """The best ``bucket_cap_mb`` of those that are tried."""
        if not gradient_buckets(self.workload):
            return
        best: tuple[float, int] | None = None
        tried: set[str] = {self.workload.digest}
        for cap in CAPS:
            other = rebucketed(self.workload, cap)
            if other.digest in tried or (best is not None and time.monotonic() > self.until):
                continue
            tried.add(other.digest)
            period = as_submitted_us(other, self.cluster, self.costs).period_us
            if best is None or period < best[0]:
                best = (period, cap)
        if best is not None:
            mb = best[1] // MIB
            largest = max(op.nbytes for family in gradient_buckets(self.workload) for op in family)
            yield self.change(
                "buckets", f"bucket_cap_mb={mb}", f"DistributedDataParallel(model, bucket_cap_mb={mb})", best[0],
                note=f"the largest bucket now has {largest / MIB:.3g} MiB",
            )  # fmt: skip

    def tuner(self, found: PlanResult) -> Iterator[AdvisedChange]:
        """What NCCL's tuner plugin alone would take from the plan."""
        if not self.gpu:
            return
        lines, _ = tuner_lines(found.plan, self.workload, self.cluster, self.costs)
        period = with_tuner_alone(lines, found.problem, self.cluster, self.costs).period_us
        yield self.change(
            "tuner", "NCCL's tuner plugin",
            "stretto plan -w STEP -c CLUSTER --tuner nccl.csv; then NCCL_TUNER_PLUGIN (NCCL's example plugin) and "
            "NCCL_TUNER_CONFIG_FILE=nccl.csv", period, note="algorithms only: no order, no pieces, no choice of links",
        )  # fmt: skip

    def whole_plan(self, found: PlanResult) -> Iterator[AdvisedChange]:
        """Everything that a plan decides."""
        period = max(found.plan.iteration_us, found.plan.retimed_us)
        if self.gpu:
            how = "stretto plan -w STEP -c CLUSTER -o plan.json; then stretto.torch.enforce in the script"
            note = "above NCCL a plan is enforced by hand; run on one H200 only so far"
        else:
            how, note = "stretto run -- COMMAND", "the job needs no change; nothing is kept that is slower"
        yield self.change("plan", "a plan for every collective", how, period, note=note)

    def more_micro_batches(self) -> Iterator[AdvisedChange]:
        """Gradients synchronized once for several micro-batches."""
        if not gradient_buckets(self.workload):
            return
        for times in TIMES:
            try:
                period = as_submitted_us(accumulated(self.workload, times), self.cluster, self.costs).period_us
            except (Infeasible, InvalidInput):
                return
            yield self.change(
                "parallelism", f"accumulate gradients over {times} micro-batches",
                f"with model.no_sync() for {times - 1} of {times} micro-batches", period / times,
                changes_training=True, note=f"a step then has {times} times the samples",
            )  # fmt: skip

    def other_models(self, variants: dict[str, Workload]) -> Iterator[AdvisedChange]:
        """The same model with other parallelism, for models that are parametric; the time is for equal samples."""
        for name, other in variants.items():
            if time.monotonic() > self.until:
                return
            try:
                period = as_submitted_us(other, self.cluster, self.costs).period_us
            except (Infeasible, InvalidInput):
                continue
            share = self.workload.samples / other.samples if other.samples else 1.0
            yield self.change(
                "parallelism", name, f"train with {name}", period * share,
                note="compute by roofline; whether it fits in memory is not checked",
            )  # fmt: skip


def with_names(change: AdvisedChange, step: str, cluster: str) -> AdvisedChange:
    """The change with the user's own words for STEP and CLUSTER in its commands, quoted for a shell.

    Args:
        change: The change.
        step: What the user gave as the step.
        cluster: What the user gave as the cluster.

    Returns:
        The same change with other text.
    """
    words = {"STEP": shlex.quote(step), "CLUSTER": shlex.quote(cluster)}
    return replace(change, how=re.sub("STEP|CLUSTER", lambda found: words[found[0]], change.how))
