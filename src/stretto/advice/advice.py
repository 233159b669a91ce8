# SPDX-License-Identifier: Apache-2.0
"""`StepAdvice`: the answer of `advise` as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..cluster import Cluster
from ..planner.api import PlanResult
from ..workload import Workload
from ..workload.kineto_waiting import StepWaiting

WORTHWHILE = 0.03
"""The least share of a step that a change must save to be advised, as for `stretto run`."""

Effort = Literal["environment", "buckets", "tuner", "plan", "parallelism"]
EFFORTS: tuple[Effort, ...] = ("environment", "buckets", "tuner", "plan", "parallelism")
"""Kinds of changes in the order of what they cost the user."""
Confidence = Literal["high", "medium", "low"]
Knowledge = Literal["measured", "given", "assumed", "missing"]


@dataclass(frozen=True, kw_only=True)
class AdvisedChange:
    """One change to a training job, and what a step takes with it when simulated like the step as it is."""

    effort: Effort
    name: str
    how: str
    """What to do: a setting, a line of code, or a command."""
    step_us: float
    """The step as it is (measured, where it was) over `gain`; of a larger step, for as many samples as before."""
    gain: float
    """How many times faster than the step as it is; both simulated in one model, or both measured."""
    changes_training: bool = False
    """Whether the change also changes what is trained (the batch, or the precision)."""
    measured: bool = False
    """Whether the gain was measured in the job itself rather than simulated."""
    refused: bool = False
    """Whether the change was measured and not kept by the job, so that it is not advised."""
    diagnosis: bool = False
    """Whether this is a fault to look for rather than something that can simply be done."""
    note: str = ""

    @property
    def saves(self) -> float:
        """The share of the step that the change saves; negative where the step becomes longer."""
        return 1 - 1 / self.gain if self.gain > 0 else 0.0

    @property
    def worthwhile(self) -> bool:
        """Whether the change saves enough to be advised."""
        return self.saves >= WORTHWHILE and not self.refused


@dataclass(frozen=True, kw_only=True)
class BackendTrial:
    """What a job measured of itself on its own backend and under `stretto run`, in turns."""

    own: str
    """The backend that the job asked for."""
    own_us: float
    """An iteration of the unchanged job."""
    tried: str
    """What was compared with it: Stretto's backend in plain order, or a plan."""
    tried_us: float
    kept: bool
    """Whether the job went on with what was tried."""

    @property
    def gain(self) -> float:
        """How many times as fast as the unchanged job what was tried is."""
        return self.own_us / self.tried_us if self.tried_us > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class InputKnowledge:
    """One input of the advice, and how it is known."""

    what: str
    known: Knowledge
    how: str


@dataclass(frozen=True, kw_only=True, eq=False)
class StepAdvice:
    """How much of a step waits for communication, what bounds it, and what each change would gain.

    Times are microseconds of one step, of which all but `model_us` are on one base: the measured step, where there is
    one. Without a cluster, and where the model is unusable, `bound_us` and the simulated changes are missing.
    """

    workload: Workload
    cluster: Cluster | None
    step_us: float
    """The step as it is: measured where a trace has it, else the model's."""
    waits_us: float
    """The part of the step that waits for communication, of the rank that waits most."""
    measured: bool
    """Whether `step_us` and `waits_us` were measured."""
    compute_us: float
    """The compute of the busiest rank: no change of communication makes a step shorter."""
    waiting: tuple[StepWaiting, ...] = ()
    """The measured step of each rank; empty where nothing was measured."""
    late_share: float = 0.0
    """The share of the ranks' time in collectives that is spent waiting for later ranks, where it is known."""
    model_us: float = 0.0
    """The step as it is, in the model that the changes are simulated in, before it is scaled to the measured step."""
    bound_us: float = 0.0
    """A time that no plan beats in the same model, with the buckets and the speed of collectives as they are."""
    bound_by: str = ""
    factors: tuple[tuple[str, float], ...] = ()
    """By channels: how many times longer collectives took than the cluster lets expect."""
    unexplained: float = 0.0
    """The largest of `factors` where it leaves open what another backend would gain; 0 where none does."""
    unusable: str = ""
    """Why the model says nothing about this job; empty where it does."""
    probed: bool = False
    """Whether the cluster was probed by the job rather than described."""
    trial: BackendTrial | None = None
    """What the job has just measured of itself under `stretto run`."""
    placed: str = ""
    """Which devices the ranks are on, where the cluster has more devices than the step has ranks."""
    changes: tuple[AdvisedChange, ...] = ()
    inputs: tuple[InputKnowledge, ...] = ()
    confidence: Confidence = "low"
    confidence_why: str = ""
    plan: PlanResult | None = None
    """The plan behind the change of that kind."""
    notes: tuple[str, ...] = ()

    @property
    def waits_share(self) -> float:
        """The share of the step that waits for communication."""
        return self.waits_us / self.step_us if self.step_us > 0 else 0.0

    @property
    def advised(self) -> tuple[AdvisedChange, ...]:
        """The changes that are worthwhile, the least effort first."""
        return tuple(change for change in self.changes if change.worthwhile)

    @property
    def best(self) -> AdvisedChange | None:
        """The worthwhile change with the largest gain that can simply be made and trains the same; None without one."""
        same = [change for change in self.advised if not change.changes_training and not change.diagnosis]
        return max(same, key=lambda change: change.gain, default=None)

    def rows(self) -> dict[str, Any]:
        """The advice as plain data, for JSON."""
        return {
            "workload": self.workload.name, "cluster": self.cluster.name if self.cluster is not None else None,
            "step_us": self.step_us, "waits_us": self.waits_us, "waits_share": self.waits_share,
            "measured": self.measured, "compute_us": self.compute_us, "late_share": self.late_share,
            "model_us": self.model_us, "bound_us": self.bound_us, "bound_by": self.bound_by,
            "factors": dict(self.factors), "unexplained": self.unexplained, "unusable": self.unusable,
            "trial": None if self.trial is None else {**asdict(self.trial), "gain": self.trial.gain},
            "placed": self.placed,
            "ranks": [
                {"rank": one.rank, "steps": one.steps, "step_us": one.step_us, "compute_us": one.compute_us,
                 "waits_us": one.waits_us, "idle_us": one.idle_us, "comm_us": one.comm_us}
                for one in self.waiting
            ],
            "changes": [
                {"effort": one.effort, "name": one.name, "how": one.how, "step_us": one.step_us, "gain": one.gain,
                 "advised": one.worthwhile, "measured": one.measured, "changes_training": one.changes_training,
                 "diagnosis": one.diagnosis, "note": one.note}
                for one in self.changes
            ],
            "inputs": [{"what": one.what, "known": one.known, "how": one.how} for one in self.inputs],
            "confidence": self.confidence, "confidence_why": self.confidence_why, "notes": list(self.notes),
        }  # fmt: skip
