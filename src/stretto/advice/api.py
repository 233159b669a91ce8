# SPDX-License-Identifier: Apache-2.0
"""`advise`: a recorded or described training step, and a cluster, in; a `StepAdvice` out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..cluster import Cluster
from ..control.spans import replayed
from ..errors import InvalidInput
from ..planner import api
from ..planner.api import PlanResult
from ..planner.placement import hosts_taken, placement
from ..planner.reasons import length_us, union
from ..units import check_seed, format_us
from ..workload import Workload, kineto
from ..workload.files import is_kineto
from ..workload.kineto_waiting import StepWaiting, waiting_of
from ..workload.registry import MODELS, from_spec
from .advice import EFFORTS, AdvisedChange, BackendTrial, InputKnowledge, Knowledge, StepAdvice
from .trust import confidence_in_model, confidence_in_trace, contradiction, other_hosts
from .what_if import WhatIf, beyond_factors, measured_factors, with_names

PLAN_SHARE = 0.6
"""The share of the budget for the search of a plan; the rest is for the other changes."""
MODES = ("ddp", "zero1", "zero2", "zero3")
TENSORS = (1, 2, 4, 8)

Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    """The step that is asked about, and how it is known."""

    workload: Workload
    name: str
    waiting: tuple[StepWaiting, ...] = ()
    gpu: bool = True
    spec: str = ""
    ranks: int = 0
    """How many ranks' traces there are."""
    hosts: int = 0
    """On how many hosts the traces were recorded; 0 where they do not say."""
    measured_us: float = 0.0
    probed: bool = False
    trial: BackendTrial | None = None

    @property
    def in_job(self) -> bool:
        """Whether the step was recorded and measured in a job, apart from each other."""
        return self.measured_us > 0 and not self.waiting


def advise(
    step: str | Path | Workload | Sequence[str | Path],
    cluster: str | Path | Cluster | None = None,
    *,
    budget_s: float = 20.0,
    steps: int | None = None,
    seed: int = 0,
    gpu: bool | None = None,
    measured_us: float = 0.0,
    probed: bool = False,
    trial: BackendTrial | None = None,
    progress: Progress | None = None,
) -> StepAdvice:
    """Say how much of a training step waits for communication, and what each change to the job would gain.

    Waiting is measured in the trace, without a model. Every gain is the simulated step with that change over the
    simulated step as it is; where the trace has the times of collectives, both are scaled to them.

    Args:
        step: a PyTorch profiler trace (a file, several, or a directory of one file per rank), a workload file, a
            model (``gpt:1.3b,ranks=16``) or a `Workload`.
        cluster: a cluster, a preset, a file (NCCL's topology XML, ``nvidia-smi topo -m``, Stretto's own), or a
            description such as ``hosts: 2, gpus: 8 x h100, network: 8 x 400gbit``. None: only what can be said without.
        budget_s: seconds for all simulations together, > 0.
        steps: search steps of the plan instead of a part of the budget; the result then depends on the seed alone.
        seed: seed of the search, >= 0.
        gpu: whether the job runs on GPUs with NCCL; None: as the trace says, else yes.
        measured_us: the time of a step, where it was measured apart from `step`; 0 where it was not.
        probed: whether the cluster was measured by the job itself rather than described.
        trial: what the job has measured of itself under `stretto run`; None where it did not.
        progress: called with a description of the current work and the share of it that is done.

    Returns:
        The advice.

    Raises:
        InvalidInput: an input cannot be read, or the step has more ranks than the cluster devices.
        Infeasible: the cluster cannot carry one of the step's collectives.

    >>> from stretto.workload import Dep, Op
    >>> toy = Workload(name="toy", num_ranks=16, ops=(
    ...     Op(name="backward", duration_us=1000.0, after=(Dep(op="update", lag=1),)),
    ...     Op(name="gradients", kind="all_reduce", nbytes=2e8, after=(Dep(op="backward"),)),
    ...     Op(name="update", phase="optimizer", duration_us=50.0, after=(Dep(op="gradients"),)),
    ... ))
    >>> found = advise(toy, "dgx_h100:2", steps=20)
    >>> found.measured, 0 < found.waits_share < 1, found.bound_us <= found.model_us
    (False, True, True)
    """
    check_seed(seed)
    if not 0 < budget_s < float("inf"):
        raise InvalidInput(f"budget_s: must be > 0, not {budget_s:g}")
    if not 0 <= measured_us < float("inf"):
        raise InvalidInput(f"measured_us: must be >= 0, not {measured_us:g}")
    asked = replace(_step(step, gpu), measured_us=measured_us, probed=probed, trial=trial)
    late = _late_share(asked.workload)
    machine = cluster if cluster is None or isinstance(cluster, Cluster) else Cluster.load(cluster)
    if machine is None or not asked.workload.comm_ops:
        return _without_model(asked, machine, late)
    return _with_model(
        asked, machine, str(cluster) if not isinstance(cluster, Cluster) else machine.name, late,
        _Effort(budget_s=budget_s, steps=steps, seed=seed, tell=progress or (lambda message, share: None)),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Effort:
    budget_s: float
    steps: int | None
    seed: int
    tell: Progress


def _step(step: str | Path | Workload | Sequence[str | Path], gpu: bool | None) -> _Step:
    if isinstance(step, Workload):
        return _Step(workload=step, name=step.name, gpu=gpu is not False)
    paths = [step] if isinstance(step, str | Path) else list(step)
    if not paths:
        raise InvalidInput("step: is empty; give at least one trace")
    first, *peers = paths
    name = str(first)
    if isinstance(first, str) and first.partition(":")[0].partition(",")[0] in MODELS and not peers:
        return _Step(workload=Workload.load(first), name=name, gpu=gpu is not False, spec=first)
    if not peers and not is_kineto(Path(first)):
        return _Step(workload=Workload.load(first), name=name, gpu=gpu is not False)
    traces = kineto.read_ranks(first, peers=peers)
    on_gpu = any(trace.gpu for trace in traces.values())
    return _Step(
        workload=kineto.workload_of(first, traces), name=name, waiting=waiting_of(traces),
        gpu=on_gpu if gpu is None else gpu, ranks=len(traces), hosts=len({one.host for one in traces.values()} - {""}),
    )  # fmt: skip


def _late_share(workload: Workload) -> float:
    """The share of the time in collectives that ranks spend waiting for later ones, where traces show it."""
    waits = sum(op.wait_us for op in workload.comm_ops)
    return waits / (waits + sum(op.duration_us for op in workload.comm_ops)) if waits else 0.0


def _slowest(asked: _Step) -> StepWaiting | None:
    return max(asked.waiting, key=lambda one: one.share, default=None)


def _alone(asked: _Step) -> float:
    """The share of its time that a collective on CPUs would take by itself: gloo runs several of a rank at once.

    NCCL runs those of a group in order, and those of different groups often over different links.
    """
    if asked.gpu:
        return 1.0
    if asked.in_job:
        spans = [(span.start_us, span.start_us + span.duration_us) for span in replayed(asked.workload) if span.comm]
        calls_us = sum(end - start for start, end in spans)
        return length_us(union(spans)) / calls_us if calls_us > 0 else 1.0
    shares = sorted(one.comm_us / one.calls_us for one in asked.waiting if one.calls_us > 0)
    return shares[len(shares) // 2] if shares else 1.0


def _recorded_us(asked: _Step) -> float:
    """How long the iterations took from which a job's step was recorded: the measured ones may have been faster."""
    if not asked.in_job:
        return 0.0
    return max((span.start_us + span.duration_us for span in replayed(asked.workload)), default=0.0)


def _without_model(asked: _Step, machine: Cluster | None, late: float) -> StepAdvice:
    slowest = _slowest(asked)
    notes = asked.workload.notes
    if not asked.workload.comm_ops:
        notes += ("the step has no collectives: there is nothing to gain from communication",)
    confidence, why = confidence_in_trace(asked.waiting, bool(asked.workload.comm_ops))
    return StepAdvice(
        workload=asked.workload, cluster=machine, measured=slowest is not None,
        step_us=slowest.step_us if slowest is not None else asked.workload.compute_us,
        waits_us=slowest.waits_us if slowest is not None else 0.0, compute_us=asked.workload.compute_us,
        waiting=asked.waiting, late_share=late, inputs=_inputs(asked, machine, {}),
        confidence=confidence, confidence_why=why,
        notes=notes,
    )  # fmt: skip


def _with_model(asked: _Step, machine: Cluster, cluster_name: str, late: float, effort: _Effort) -> StepAdvice:
    workload, slowest = asked.workload, _slowest(asked)
    measured_us = slowest.step_us if slowest is not None else asked.measured_us
    probed = asked.probed
    until = time.monotonic() + effort.budget_s
    effort.tell("the step as it is", 0.0)
    alone, recorded_us = _alone(asked), _recorded_us(asked)
    factors = measured_factors(workload, machine, alone, probed=probed)
    what_if = WhatIf(
        workload=workload, cluster=machine, gpu=asked.gpu, factors=factors, probed=probed, step_us=measured_us,
        until=until,
    )  # fmt: skip
    now_us = what_if.now.period_us
    found = api.plan(
        workload, machine, budget_s=PLAN_SHARE * effort.budget_s, steps=effort.steps, seed=effort.seed,
        costs=what_if.costs, progress=effort.tell,
    )  # fmt: skip
    bound_us = min(found.bound_us, now_us)
    taken = hosts_taken(workload.num_ranks, machine)
    unusable = (
        ("" if probed else beyond_factors(workload, machine, alone, gloo=not asked.gpu))
        or other_hosts(asked.hosts, taken) or contradiction(bound_us, measured_us, recorded_us)
    )  # fmt: skip
    effort.tell("other changes", 0.9)
    changes = () if unusable else _changes(asked, what_if, found, cluster_name)
    slower = any(change.diagnosis and change.worthwhile for change in changes)
    unexplained = max(factors.values(), default=0.0) if slower and asked.trial is None else 0.0
    missing = workload.num_ranks - asked.ranks if asked.ranks else 0
    confidence, why = confidence_in_model(
        now_us, measured_us, waiting=asked.waiting, missing=missing, unusable=unusable,
        unexplained=unexplained, recorded_us=recorded_us,
    )  # fmt: skip
    scale = measured_us / now_us if measured_us and now_us > 0 else 1.0
    if unusable:
        waits_us = max(0.0, measured_us - workload.compute_us)
    else:
        waits_us = scale * float(what_if.now.exposed_us.max(initial=0.0))
    return StepAdvice(
        workload=workload, cluster=machine, measured=measured_us > 0, step_us=measured_us or now_us,
        waits_us=slowest.waits_us if slowest is not None else waits_us,
        compute_us=workload.compute_us, waiting=asked.waiting, late_share=late, model_us=now_us,
        bound_us=0.0 if unusable else scale * bound_us, bound_by="" if unusable else found.plan.bound_by,
        factors=tuple(sorted(factors.items())), unexplained=unexplained, unusable=unusable, probed=probed,
        trial=asked.trial, placed=placement(workload.num_ranks, machine),
        changes=_in_order([*changes, *_tried(asked, measured_us)]),
        inputs=_inputs(asked, machine, factors, unusable=bool(unusable), probed=probed),
        confidence=confidence, confidence_why=why, plan=found,
        notes=(*workload.notes, *(note for note in found.problem.notes if note.startswith("warning"))),
    )  # fmt: skip


def _changes(asked: _Step, what_if: WhatIf, found: PlanResult, cluster_name: str) -> tuple[AdvisedChange, ...]:
    """All changes that can be simulated, in one model."""
    # What `stretto run` has just measured needs no simulation.
    whole = what_if.whole_plan(found) if asked.trial is None else ()
    makers = (
        what_if.described_links(), what_if.library_algorithms(), what_if.other_buckets(), what_if.tuner(found),
        whole, what_if.more_micro_batches(), what_if.other_models(_variants(asked.spec)),
    )  # fmt: skip
    return tuple(with_names(change, asked.name, cluster_name) for some in makers for change in some)


def _tried(asked: _Step, step_us: float) -> tuple[AdvisedChange, ...]:
    """What the job has measured under `stretto run`, as a change."""
    trial = asked.trial
    if trial is None or trial.gain <= 0:
        return ()
    beside = f"{trial.tried}: {format_us(trial.tried_us)}, {trial.own}: {format_us(trial.own_us)}"
    return (
        AdvisedChange(
            effort="plan", name="stretto run, measured", how="stretto run -- COMMAND", step_us=step_us / trial.gain,
            gain=trial.gain, measured=True, refused=not trial.kept, note=f"measured in this job just now: {beside}",
        ),
    )  # fmt: skip


def _in_order(changes: Sequence[AdvisedChange]) -> tuple[AdvisedChange, ...]:
    return tuple(sorted(changes, key=lambda change: EFFORTS.index(change.effort)))


def _variants(spec: str) -> dict[str, Workload]:
    """The same parametric model with another kind of data parallelism, or another tensor parallelism."""
    head, *tail = spec.split(",") if spec else [""]
    family = MODELS.get(head.partition(":")[0])
    if family is None:
        return {}
    found = {}
    for key, values in (("mode", MODES), ("tensor", TENSORS)):
        if key not in family.options:
            continue
        kept = [part for part in tail if part.partition("=")[0].strip() != key]
        for value in values:
            if f"{key}={value}" not in tail:
                try:
                    found[f"{key}={value}"] = from_spec(",".join([head, *kept, f"{key}={value}"]))
                except InvalidInput:
                    continue
    same = from_spec(spec).digest
    return {name: other for name, other in found.items() if other.digest != same}


def _inputs(
    asked: _Step, machine: Cluster | None, factors: dict[str, float], *, unusable: bool = False, probed: bool = False
) -> tuple[InputKnowledge, ...]:
    """Where each input of the advice comes from."""
    world, in_job = asked.workload.num_ranks, asked.in_job
    rows: list[tuple[str, Knowledge, str]] = []
    if asked.waiting:
        steps = min(one.steps for one in asked.waiting)
        how = f"the median of {steps} step{'s' * (steps > 1)}, {asked.ranks} of {world} ranks"
        rows.append(("step and waiting", "measured", how))
        works = "kernels" if asked.gpu else "CPU operators"
        rows.append(("compute", "measured", f"the {works} of the trace"))
    elif in_job:
        rows.append(("step", "measured", "the median iteration of the job"))
        left = "at most what the compute that was recorded leaves of the step"
        rows.append(("waiting", "assumed", left if unusable else "simulated, with the compute that was recorded"))
        rows.append(("compute", "measured", "recorded in the job"))
    else:
        rows.append(("step and waiting", "assumed", "simulated: there is no trace"))
        by_size = "by roofline from the model's size"
        rows.append(("compute", "assumed", by_size) if asked.spec else ("compute", "given", "as the workload says"))
    if in_job or (asked.waiting and asked.ranks == world):
        rows.append(("late ranks", "measured", "all ranks were recorded"))
    else:
        rows.append(("late ranks", "missing", "needs the traces of all ranks"))
    if factors:
        scaled = ", ".join(f"x{value:.2g} on {key}" for key, value in sorted(factors.items()))
        rows.append(("times of collectives", "measured", f"the simulated ones are scaled to them, by {scaled}"))
    elif machine is not None:
        rows.append(("times of collectives", "assumed", "simulated on the cluster"))
    rows.append(("cluster", "measured", "probed by the job") if probed else ("cluster", *_about_cluster(machine)))
    return tuple(InputKnowledge(what=what, known=known, how=how) for what, known, how in rows)


def _about_cluster(machine: Cluster | None) -> tuple[Knowledge, str]:
    if machine is None:
        return "missing", "give one (-c) for bounds and gains"
    assumed = [note.removeprefix("assumed: ") for note in machine.notes if note.startswith("assumed")]
    if assumed:
        return "assumed", f"{machine.name}: {'; '.join(assumed)}"
    return "given", machine.name
