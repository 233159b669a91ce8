# SPDX-License-Identifier: Apache-2.0
"""What ranks and controller say to each other, and how it is written.

A rank asks, the controller answers; each message says all there is to say, so that one which is lost, late or heard
twice does no harm. Everything that comes in is bounded: by the transport in size, here in every count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from ..cluster import Cluster, yaml_form
from ..cluster import files as cluster_files
from ..errors import InvalidInput, PlanMismatch
from ..files import convert, parse_json, typed
from ..planner.plan import Plan
from ..runtime.enforcer.report import EnforcerReport
from ..workload import Workload
from ..workload import files as workload_files
from .own_costs import MAX_TIMES, OwnTime
from .spans import ReportSpan
from .split import GainSplit

MAX_MESSAGE_BYTES = 32 << 20
"""The most bytes of one message; a captured step of a large model is a few megabytes."""
MAX_RANKS = 1 << 16
MAX_NUMBER = 1 << 53
PROTOCOL = 1
"""Ranks and controllers that speak another version are refused."""

Number = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Name = Annotated[str, Meta(max_length=128)]
Line = Annotated[str, Meta(max_length=2000)]
Identity = Annotated[dict[Name, Line], Meta(max_length=32)]
Text = Annotated[str, Meta(max_length=MAX_MESSAGE_BYTES)]
T = TypeVar("T")


class PlanId(msgspec.Struct, frozen=True):
    """A plan's number, which never goes back, and the hash of its content; number 0 is plain order."""

    number: Number = 0
    hash: Name = ""

    def __str__(self) -> str:
        return f"plan {self.number} ({self.hash})" if self.number else "plain order"


PLAIN = PlanId()


class Ballot(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank voted on the latest plan that it was asked to prepare. A vote for a number is never taken again."""

    plan: PlanId
    yes: bool
    why: Line = ""
    told: bool = False
    """Whether the rank had voted yes, and only follows the refusal of another rank."""


MAX_MOTIF_US = 1e6


class CapturedStep(msgspec.Struct, frozen=True, kw_only=True):
    """The training step and the cluster, as the job's rank 0 knows them."""

    workload: Text
    cluster: Text
    motif_us: Annotated[float, Meta(ge=0, le=MAX_MOTIF_US)] = 0.0
    """What every motif costs beside what its bytes take: threads have to be woken up on all ranks."""
    key: Name = ""
    """The key under which a plan is kept for the next start of the job; empty where no plan is kept."""
    own_times: Annotated[tuple[OwnTime, ...], Meta(max_length=MAX_TIMES)] = ()
    """What collectives of the job's own backend took, where plans run above it; then these are what motifs cost."""
    identity: Identity = {}
    """The facts that `key` is a digest of, by name: a later start that has the same facts may use the kept plan."""


class RankState(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's whole state; `beat` grows with every change, so that an old message is known as one."""

    protocol: Annotated[int, Meta(ge=0, le=1 << 16)] = PROTOCOL
    job: Name
    epoch: Number
    """The number of the job's start: ranks that are started again come back with a higher one."""
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    beat: Number = 0
    digest: Name = ""
    """The digest of the captured step; empty before there is one."""
    ballot: Ballot | None = None
    committed: PlanId = PLAIN
    active: PlanId = PLAIN
    barred: Number = 0
    """The highest number of a plan that the training step no longer fits: no plan up to it is switched to again."""
    report: EnforcerReport | None = None
    captured: CapturedStep | None = None
    leaving: bool = False
    """Whether this is the last message of a rank that ends normally."""


class Nothing(msgspec.Struct, frozen=True, tag="nothing"):
    """The order to go on as before."""


class Prepare(msgspec.Struct, frozen=True, tag="prepare", kw_only=True):
    """The order to check and load a plan, then to vote; what runs is not disturbed."""

    plan: PlanId
    digest: Name
    body: bytes = b""


class Commit(msgspec.Struct, frozen=True, tag="commit", kw_only=True):
    """The news that all ranks have voted yes: they switch to the plan at an iteration that they agree on."""

    plan: PlanId


class Abort(msgspec.Struct, frozen=True, tag="abort", kw_only=True):
    """The order to let go of what was prepared, because a rank has voted no."""

    plan: PlanId


class Profile(msgspec.Struct, frozen=True, tag="profile", kw_only=True):
    """The order to record the training step again, because the recorded one fits no more."""

    digest: Name


Order = Nothing | Prepare | Commit | Abort | Profile


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The controller's answer, meant for one start of one job."""

    epoch: Number
    order: Order
    send_captured: bool = False
    """This controller has not seen the captured step (it may have been started again): send it next time."""


class RecallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The question of rank 0, before it records, whether a plan is kept for a job like this one."""

    protocol: Annotated[int, Meta(ge=0, le=1 << 16)] = PROTOCOL
    key: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    identity: Identity = {}
    """The facts that the key is a digest of."""


class HushRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The news from `stretto run` that a signal ends its job, so that ranks that leave from now on are no hang."""

    protocol: Annotated[int, Meta(ge=0, le=1 << 16)] = PROTOCOL
    job: Name


class RecallReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `RecallRequest`: the step and the cluster that a plan is kept for; None where no plan is kept."""

    captured: CapturedStep | None = None
    on_own: bool = False
    why: Line = ""
    """Why no plan is kept."""


class StatusRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The question of `stretto status`."""

    protocol: Annotated[int, Meta(ge=0, le=1 << 16)] = PROTOCOL


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank as the controller last heard of it."""

    rank: int
    heard_s: float
    """How many seconds ago the rank was last heard."""
    ballot: Ballot | None
    committed: PlanId
    active: PlanId
    iteration: int
    iteration_us: float
    waits_us: float
    fell_back: str
    left: bool
    held_us: float = 0.0
    """How long the plan's order held motifs back in an iteration, while `waits_us` is the application's own wait."""


class MotifStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One motif of the active plan, as predicted and as rank 0 measures it (0: not yet); starts count from an
    iteration's begin."""

    op: str
    motif: int
    algorithm: str
    channels: tuple[str, ...]
    nbytes: float
    predicted_start_us: float
    predicted_us: float
    start_us: float
    duration_us: float
    wait_us: float
    turn_us: float = 0.0


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One job as the controller sees it."""

    job: str
    epoch: int
    size: int
    phase: str
    about: str
    """The last thing that happened to the job, in words."""
    plan: PlanId
    plan_name: str
    digest: str
    predicted_us: float
    plain_us: float
    iteration_us: float
    waits_us: float
    replans: int
    ranks: tuple[RankStatus, ...]
    motifs: tuple[MotifStatus, ...] = ()
    """The motifs of the active plan, or of the plan that was active last."""
    motifs_plan: PlanId = PLAIN
    """The plan that `motifs` belong to."""
    split: GainSplit = GainSplit()
    """The gain over the unchanged job, divided between our backend and the plan."""
    recorded: tuple[ReportSpan, ...] = ()
    """The step of rank 0 as it was recorded."""
    before: tuple[ReportSpan, ...] = ()
    """The step as it is predicted in plain order on our backend."""
    after: tuple[ReportSpan, ...] = ()
    """The step as it is predicted under the plan of `motifs`."""
    about_recorded: str = ""
    """The workload in words, with its digest."""
    held_us: float = 0.0
    """How long the plan's order held motifs back in an iteration, over all ranks."""
    recalled: bool = False
    """Whether the job began with a plan of an earlier start."""

    @property
    def gain(self) -> float:
        """How many times faster an iteration is than it was in plain order; 0 while that is not known."""
        return self.plain_us / self.iteration_us if self.plan.number and self.iteration_us > 0 else 0.0


class HangStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A hang, or a rank that was lost, in words."""

    job: str
    kind: str
    """gone, stopped, silent, differs (ranks call different things), behind (a rank does not come) or stuck."""
    ranks: tuple[int, ...]
    """The ranks that caused the hang, as far as they are known."""
    text: str
    went_on_s: float = 0.0
    """The seconds after which the job went on by itself; 0 where it did not."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller knows of all its jobs."""

    pid: int
    jobs: tuple[JobStatus, ...]
    hangs: tuple[HangStatus, ...] = ()
    """Ranks that hung or were lost, also of jobs of which nothing was recorded."""


def encode(message: msgspec.Struct) -> bytes:
    """A message as bytes."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, kind: type[T]) -> T:
    """A message of this kind from bytes; raises `InvalidInput` where the bytes hold anything else."""
    try:
        return msgspec.msgpack.decode(data, type=typed(kind))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidInput(f"message: not a {kind.__name__}: {error}") from None


def encode_plan(plan: Plan) -> bytes:
    """A plan as bytes."""
    return msgspec.json.encode(plan)


def decode_plan(body: bytes, expected: str) -> Plan:
    """The plan, if its content has the hash that was agreed on."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        raise InvalidInput("plan: not text") from None
    plan = convert(parse_json(text, where="plan"), Plan, where="plan")
    if plan.hash != expected:
        raise PlanMismatch(f"plan: the content has hash {plan.hash}, not {expected}")
    return plan


def encode_captured(
    workload: Workload, cluster: Cluster, motif_us: float = 0.0, key: str = "", own_times: tuple[OwnTime, ...] = (),
    identity: Mapping[str, str] | None = None,
) -> CapturedStep:  # fmt: skip
    """What rank 0 sends once; the arguments are the fields of `CapturedStep`.

    Args:
        workload: The recorded step.
        cluster: The network that it ran on.
        motif_us: What starting any motif costs; cut off at `MAX_MOTIF_US`.
        key: What the job is known by at its next start; empty where nothing is kept.
        own_times: What calls of the job's own backend were measured to take.
        identity: What the key stands for.

    Returns:
        The message.
    """
    return CapturedStep(
        workload=workload_files.dumps(workload, json=True), cluster=yaml_form.dumps(cluster, json=True),
        motif_us=min(motif_us, MAX_MOTIF_US), key=key, own_times=own_times, identity=dict(identity or {}),
    )  # fmt: skip


def decode_captured(captured: CapturedStep) -> tuple[Workload, Cluster]:
    """The workload and the cluster of a captured step, checked as files from outside are."""
    return (
        workload_files.loads(captured.workload, where="workload"),
        cluster_files.loads(captured.cluster, where="cluster"),
    )
