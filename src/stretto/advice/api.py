# SPDX-License-Identifier: Apache-2.0
"""`advise`: a recorded or described training step, and a cluster, in; a `StepAdvice` out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..cluster import Cluster
from ..errors import InvalidInput
from ..planner import api
from ..units import check_seed, format_us
from ..workload import Workload, kineto
from ..workload.files import is_kineto
from ..workload.kineto_waiting import StepWaiting, waiting_of
from ..workload.registry import MODELS, from_spec
from .advice import EFFORTS, AdvisedChange, Confidence, InputKnowledge, Knowledge, StepAdvice
from .what_if import WhatIf, measured_factors, with_names

PLAN_SHARE = 0.6
"""The share of the budget for the search of a plan; the rest is for the other changes."""
CLOSE, FAR = 0.10, 0.25
"""The model's step is close to the measured one within the first share, and far from it beyond the second."""
FEW_STEPS = 3
"""A trace of fewer steps gives no high confidence: docs/traces.md asks for three to ten."""
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
    measured_us: float = 0.0


def advise(
    step: str | Path | Workload | Sequence[str | Path],
    cluster: str | Path | Cluster | None = None,
    *,
    budget_s: float = 20.0,
    steps: int | None = None,
    seed: int = 0,
    gpu: bool | None = None,
    measured_us: float = 0.0,
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
    asked = replace(_step(step, gpu), measured_us=measured_us)
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
        gpu=on_gpu if gpu is None else gpu, ranks=len(traces),
    )  # fmt: skip


def _late_share(workload: Workload) -> float:
    """The share of the time in collectives that ranks spend waiting for later ones, where traces show it."""
    waits = sum(op.wait_us for op in workload.comm_ops)
    return waits / (waits + sum(op.duration_us for op in workload.comm_ops)) if waits else 0.0


def _slowest(asked: _Step) -> StepWaiting | None:
    return max(asked.waiting, key=lambda one: one.share, default=None)


def _alone(asked: _Step) -> float:
    """The share of its time that a collective of a CPU trace would take by itself: gloo runs several of a rank at once.

    NCCL runs those of a group in order, and those of different groups often over different links.
    """
    shares = sorted(one.comm_us / one.calls_us for one in asked.waiting if one.calls_us > 0)
    return 1.0 if asked.gpu or not shares else shares[len(shares) // 2]


def _without_model(asked: _Step, machine: Cluster | None, late: float) -> StepAdvice:
    slowest = _slowest(asked)
    notes = asked.workload.notes
    if not asked.workload.comm_ops:
        notes += ("the step has no collectives: there is nothing to gain from communication",)
    confidence, why = _confidence_alone(asked)
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
    until = time.monotonic() + effort.budget_s
    effort.tell("the step as it is", 0.0)
    factors = measured_factors(workload, machine, _alone(asked))
    what_if = WhatIf(workload=workload, cluster=machine, gpu=asked.gpu, factors=factors, until=until)
    now = what_if.now
    found = api.plan(
        workload, machine, budget_s=PLAN_SHARE * effort.budget_s, steps=effort.steps, seed=effort.seed,
        costs=what_if.costs, progress=effort.tell,
    )  # fmt: skip
    effort.tell("other changes", 0.9)
    makers = (
        what_if.described_links(), what_if.library_algorithms(), what_if.other_buckets(), what_if.tuner(found),
        what_if.whole_plan(found), what_if.more_micro_batches(), what_if.other_models(_variants(asked.spec)),
    )  # fmt: skip
    changes = [with_names(change, asked.name, cluster_name) for some in makers for change in some]
    confidence, why = _confidence(asked, machine, now.period_us)
    return StepAdvice(
        workload=workload, cluster=machine, measured=slowest is not None or asked.measured_us > 0,
        step_us=slowest.step_us if slowest is not None else asked.measured_us or now.period_us,
        waits_us=slowest.waits_us if slowest is not None else float(now.exposed_us.max(initial=0.0)),
        compute_us=workload.compute_us, waiting=asked.waiting, late_share=late, model_us=now.period_us,
        bound_us=min(found.bound_us, now.period_us), bound_by=found.plan.bound_by,
        factors=tuple(sorted(factors.items())), changes=_in_order(changes), inputs=_inputs(asked, machine, factors),
        confidence=confidence, confidence_why=why, plan=found,
        notes=(*workload.notes, *(note for note in found.problem.notes if note.startswith("warning"))),
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


def _inputs(asked: _Step, machine: Cluster | None, factors: dict[str, float]) -> tuple[InputKnowledge, ...]:
    """Where each input of the advice comes from."""
    world, in_job = asked.workload.num_ranks, asked.measured_us > 0 and not asked.waiting
    rows: list[tuple[str, Knowledge, str]] = []
    if asked.waiting:
        steps = min(one.steps for one in asked.waiting)
        rows.append(
            (
                "step and waiting",
                "measured",
                f"the median of {steps} step{'s' * (steps > 1)}, {asked.ranks} of {world} ranks",
            )
        )
        rows.append(("compute", "measured", "the kernels of the trace"))
    elif in_job:
        rows.append(("step", "measured", "the median iteration of the job"))
        rows.append(("waiting", "assumed", "simulated, with the compute that was recorded"))
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
    rows.append(("cluster", *_about_cluster(machine)))
    return tuple(InputKnowledge(what=what, known=known, how=how) for what, known, how in rows)


def _about_cluster(machine: Cluster | None) -> tuple[Knowledge, str]:
    if machine is None:
        return "missing", "give one (-c) for bounds and gains"
    assumed = [note.removeprefix("assumed: ") for note in machine.notes if note.startswith("assumed")]
    if assumed:
        return "assumed", f"{machine.name}: {'; '.join(assumed)}"
    return "given", machine.name


def _confidence(asked: _Step, machine: Cluster, model_us: float) -> tuple[Confidence, str]:
    """How far to believe the gains, and why."""
    real_us = max((one.step_us for one in asked.waiting), default=asked.measured_us)
    if not real_us:
        return "low", "nothing was measured: record a trace of some steps"
    off = model_us / real_us - 1 if real_us > 0 else 0.0
    said = f"the model's step is {format_us(model_us)}, {off:+.0%} of the measured one"
    if abs(off) > FAR:
        return "low", said
    alone = 0 < asked.ranks < asked.workload.num_ranks
    few = _few_steps(asked)
    if abs(off) > CLOSE or alone or few:
        missing = f"; {asked.ranks} ranks' traces stand for all" if alone else ""
        return "medium", said + missing + few
    return "high", said


def _confidence_alone(asked: _Step) -> tuple[Confidence, str]:
    """How far to believe what a trace says without a cluster, and why."""
    if not asked.waiting:
        why = "nothing was measured and there is no cluster"
        return ("low", why) if asked.workload.comm_ops else ("high", why)
    few = _few_steps(asked)
    return "medium" if few else "high", "the waiting was measured" + few


def _few_steps(asked: _Step) -> str:
    """What to say of a trace with fewer steps than a median needs; empty where there are enough."""
    steps = min((one.steps for one in asked.waiting), default=FEW_STEPS)
    return f"; of {steps} step{'s' * (steps > 1)} only: record {FEW_STEPS} to 10" if steps < FEW_STEPS else ""
