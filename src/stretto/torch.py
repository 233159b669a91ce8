# SPDX-License-Identifier: Apache-2.0
"""Everything that touches a running PyTorch job; importing this registers the backend `stretto`.

::

    import stretto.torch
    torch.distributed.init_process_group("stretto")

Measure a job: `capture` makes a `Workload` of its step, `probe` a `Cluster` of its network, `bench` a table of what
motifs cost there, `record` a `Timeline` of the calls. Change how it communicates: `enforce` carries out a plan (`step`
marks the ends of iterations), `distribute` a strategy (`serve` on ranks that only serve), `pipeline` a schedule,
`MeshPipeline` one whose stages are meshes, `reshard` and `WeightSync` move tensors between meshes, `DdpHook` reduces
gradients under a plan. `choices` says which program ran for which calls, and why.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from math import prod as _prod
from typing import TYPE_CHECKING

from .errors import InvalidInput

try:
    import torch as _torch
    import torch.distributed as _dist
except ImportError:
    raise InvalidInput("stretto.torch needs PyTorch: pip install 'stretto[torch]'") from None

from .runtime.torch_backend.backend import StrettoGroup, register
from .runtime.torch_backend.current import step
from .runtime.torch_backend.gpu_watch import WATCHDOG as _WATCHDOG
from .runtime.torch_backend.recording import LEDGER, Choice, Recording
from .runtime.torch_backend.recording import record as _record

if TYPE_CHECKING:
    from .cluster import Cluster
    from .control.agent import Agent as Agent
    from .control.agent import connect as connect
    from .pipeline.meshes.mesh_pipeline import EdgeTransfer as EdgeTransfer
    from .pipeline.meshes.mesh_pipeline import MeshPipeline as MeshPipeline
    from .pipeline.meshes.mesh_pipeline import StageMesh as StageMesh
    from .pipeline.torch_runtime import pipeline as pipeline
    from .planner.api import PlanResult
    from .planner.plan import Plan
    from .resharding.tensors.describe import TensorPart as TensorPart
    from .resharding.tensors.elastic import ElasticSync as ElasticSync
    from .resharding.tensors.mapped import MappedSync as MappedSync
    from .resharding.tensors.reshard import reshard as reshard
    from .resharding.tensors.weight_run import WeightRun as WeightRun
    from .resharding.tensors.weight_run import run_weights as run_weights
    from .resharding.tensors.weights import WeightSync as WeightSync
    from .resharding.tensors.world import SyncWorld as SyncWorld
    from .runtime.capture.session import Recorder as Recorder
    from .runtime.capture.session import capture as capture
    from .runtime.enforcer.background import BackgroundMotif as BackgroundMotif
    from .runtime.enforcer.binding import MotifBinding as MotifBinding
    from .runtime.enforcer.carrier import Carrier as Carrier
    from .runtime.enforcer.carrier import CarrierMaker as CarrierMaker
    from .runtime.enforcer.carrier import CarrierSite as CarrierSite
    from .runtime.enforcer.carrier import HostCarrier as HostCarrier
    from .runtime.enforcer.carrier import PendingMaximum as PendingMaximum
    from .runtime.enforcer.compiled_op import CompiledMotif as CompiledMotif
    from .runtime.enforcer.compiled_op import CompiledOp as CompiledOp
    from .runtime.enforcer.ddp_hook import DdpHook as DdpHook
    from .runtime.enforcer.ddp_hook import ddp_hook as ddp_hook
    from .runtime.enforcer.enforcer import Enforcer as Enforcer
    from .runtime.enforcer.executor_carrier import ExecutorCarrier as ExecutorCarrier
    from .runtime.enforcer.gloo import GlooCarrier as GlooCarrier
    from .runtime.enforcer.memory import RowLayout as RowLayout
    from .runtime.enforcer.memory import StagedBuffers as StagedBuffers
    from .runtime.enforcer.nccl import NcclCarrier as NcclCarrier
    from .runtime.enforcer.rank_plan import RankMotif as RankMotif
    from .runtime.enforcer.sequencer import ActiveMotif as ActiveMotif
    from .runtime.enforcer.sequencer import QueuedMotif as QueuedMotif
    from .runtime.enforcer.sequencer import QueuedOp as QueuedOp
    from .runtime.enforcer.sequencer import Sequencer as Sequencer
    from .runtime.enforcer.sequencer import Submission as Submission
    from .runtime.enforcer.submission import SubmissionOwner as SubmissionOwner
    from .runtime.executor.executor import Executor as Executor
    from .runtime.probe.bench import BenchResult as BenchResult
    from .runtime.probe.bench import bench as bench
    from .runtime.probe.probe import ProbeResult as ProbeResult
    from .runtime.probe.probe import probe as probe
    from .runtime.torch_backend.buffers import CollectiveCall as CollectiveCall
    from .runtime.torch_backend.engine import Engine as Engine
    from .runtime.torch_backend.fsdp_gathers import early_gathers as early_gathers
    from .runtime.torch_backend.inductor import InductorCosts as InductorCosts
    from .runtime.torch_backend.inductor import inductor_costs as inductor_costs
    from .runtime.torch_backend.symmetric_models import symmetric_buffers as symmetric_buffers
    from .runtime.torch_backend.work import GroupWork as GroupWork
    from .strategy.distribute import distribute as distribute
    from .strategy.distribute import model_spec as model_spec
    from .strategy.distribute import serve as serve
    from .workload import Workload

_HOMES = {
    "BackgroundMotif": (".runtime.enforcer.background", "BackgroundMotif"),
    "Carrier": (".runtime.enforcer.carrier", "Carrier"),
    "CarrierSite": (".runtime.enforcer.carrier", "CarrierSite"),
    "CollectiveCall": (".runtime.torch_backend.buffers", "CollectiveCall"),
    "DdpHook": (".runtime.enforcer.ddp_hook", "DdpHook"),
    "Enforcer": (".runtime.enforcer.enforcer", "Enforcer"),
    "Engine": (".runtime.torch_backend.engine", "Engine"),
    "GlooCarrier": (".runtime.enforcer.gloo", "GlooCarrier"),
    "HostCarrier": (".runtime.enforcer.carrier", "HostCarrier"),
    "CompiledMotif": (".runtime.enforcer.compiled_op", "CompiledMotif"),
    "MotifBinding": (".runtime.enforcer.binding", "MotifBinding"),
    "QueuedMotif": (".runtime.enforcer.sequencer", "QueuedMotif"),
    "RankMotif": (".runtime.enforcer.rank_plan", "RankMotif"),
    "RowLayout": (".runtime.enforcer.memory", "RowLayout"),
    "StagedBuffers": (".runtime.enforcer.memory", "StagedBuffers"),
    "ActiveMotif": (".runtime.enforcer.sequencer", "ActiveMotif"),
    "CarrierMaker": (".runtime.enforcer.carrier", "CarrierMaker"),
    "CompiledOp": (".runtime.enforcer.compiled_op", "CompiledOp"),
    "ExecutorCarrier": (".runtime.enforcer.executor_carrier", "ExecutorCarrier"),
    "NcclCarrier": (".runtime.enforcer.nccl", "NcclCarrier"),
    "PendingMaximum": (".runtime.enforcer.carrier", "PendingMaximum"),
    "QueuedOp": (".runtime.enforcer.sequencer", "QueuedOp"),
    "Sequencer": (".runtime.enforcer.sequencer", "Sequencer"),
    "Submission": (".runtime.enforcer.sequencer", "Submission"),
    "SubmissionOwner": (".runtime.enforcer.submission", "SubmissionOwner"),
    "GroupWork": (".runtime.torch_backend.work", "GroupWork"),
    "Agent": (".control.agent", "Agent"),
    "BenchResult": (".runtime.probe.bench", "BenchResult"),
    "InductorCosts": (".runtime.torch_backend.inductor", "InductorCosts"),
    "Executor": (".runtime.executor.executor", "Executor"),
    "ProbeResult": (".runtime.probe.probe", "ProbeResult"),
    "Recorder": (".runtime.capture.session", "Recorder"),
    "EdgeTransfer": (".pipeline.meshes.mesh_pipeline", "EdgeTransfer"),
    "MeshPipeline": (".pipeline.meshes.mesh_pipeline", "MeshPipeline"),
    "StageMesh": (".pipeline.meshes.mesh_pipeline", "StageMesh"),
    "MappedSync": (".resharding.tensors.mapped", "MappedSync"),
    "SyncWorld": (".resharding.tensors.world", "SyncWorld"),
    "TensorPart": (".resharding.tensors.describe", "TensorPart"),
    "WeightRun": (".resharding.tensors.weight_run", "WeightRun"),
    "ElasticSync": (".resharding.tensors.elastic", "ElasticSync"),
    "WeightSync": (".resharding.tensors.weights", "WeightSync"),
    "bench": (".runtime.probe.bench", "bench"),
    "bench_cases": (".runtime.probe.bench", "runs"),
    "capture": (".runtime.capture.session", "capture"),
    "connect": (".control.agent", "connect"),
    "ddp_hook": (".runtime.enforcer.ddp_hook", "ddp_hook"),
    "early_gathers": (".runtime.torch_backend.fsdp_gathers", "early_gathers"),
    "distribute": (".strategy.distribute", "distribute"),
    "model_spec": (".strategy.distribute", "model_spec"),
    "serve": (".strategy.distribute", "serve"),
    "inductor_costs": (".runtime.torch_backend.inductor", "inductor_costs"),
    "pipeline": (".pipeline.torch_runtime", "pipeline"),
    "probe": (".runtime.probe.probe", "probe"),
    "reshard": (".resharding.tensors.reshard", "reshard"),
    "symmetric_buffers": (".runtime.torch_backend.symmetric_models", "symmetric_buffers"),
    "run_weights": (".resharding.tensors.weight_run", "run_weights"),
}
"""Where the names are that are loaded when they are first used: most jobs use one or two of them. Those of the enforcer
are what a carrier of one's own is made of (docs/enforcer.md)."""

__all__ = [
    "Choice", "Recording", "StrettoGroup", "choices", "enforce", "gpu_held_bytes", "last_choice", "record", "step",
    "symmetric_empty", *_HOMES,
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, there = _HOMES[name]
    value = getattr(import_module(module, __package__), there)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register()


def last_choice() -> Choice | None:
    """What was chosen for the latest call of this process; None before the first."""
    return LEDGER.last()


def choices() -> list[Choice]:
    """What was chosen for every kind of call so far, oldest first."""
    return LEDGER.all()


def gpu_held_bytes() -> int:
    """GPU memory that this process's groups hold for programs on GPU tensors; 0 before their first call.

    >>> gpu_held_bytes()
    0
    """
    return _WATCHDOG.held_bytes()


def symmetric_empty(
    *shape: int, dtype: _torch.dtype | None = None, device: _torch.device | None = None, group: object = None
) -> _torch.Tensor:
    """A tensor in GPU memory that all ranks of a group can address; they all make it, at the same point and alike.

    Collectives whose input and output lie in such memory, at the same place on all ranks, copy nothing into slots.

    Args:
        *shape: The same on all ranks.
        dtype: The type of the elements; PyTorch's default where none is given.
        device: This rank's GPU; the current one where none is given.
        group: A process group on the backend `stretto`; the default one where none is given.

    Returns:
        The tensor, of no value.

    Raises:
        InvalidInput: There is no such group, or no program runs on the memory of its GPUs.
    """
    owner = group if group is not None else _dist.group.WORLD
    if not isinstance(owner, StrettoGroup):
        raise InvalidInput("symmetric_empty: needs a process group on the backend stretto")
    where = device if device is not None else _torch.device("cuda")
    flat = owner.gpu.empty(_prod(shape), dtype or _torch.get_default_dtype(), where)
    return flat.view(shape)


def record() -> AbstractContextManager[Recording]:
    """Note when every call inside the block ran on this rank; then read ``timeline``.

    ::

        with stretto.torch.record() as recording:
            train_step()
        from stretto.report import write_perfetto
        write_perfetto(recording.timeline, "step.pftrace")
    """
    return _record(_dist.get_rank)


def enforce(
    plan: Plan | PlanResult,
    workload: Workload,
    *,
    every: int = 8,
    cluster: Cluster | None = None,
    carrier: str | CarrierMaker = "auto",
) -> Enforcer:
    """Carry out a plan for the captured step from one of the next iterations on; all ranks call it at the same point.

    ::

        plan = stretto.plan(recorder.workload, cluster)       # on one rank; the others load the file
        with stretto.torch.enforce(plan, recorder.workload) as enforcer:
            for batch in loader:
                train_step(batch)
                stretto.torch.step()
        print(enforcer.report())

    `carrier` moves the data: "executor" (ours), "gloo", or "nccl" (on GPUs); "auto" takes what the job uses.
    One of your own is given by what makes it, see docs/enforcer.md.

    Args:
        plan: The plan, or what `stretto.plan` returned.
        workload: The captured step that the plan is for.
        every: Ranks agree on a change of plans every so many iterations.
        cluster: The cluster that the plan was made for. Default: the library's own order of ranks.
        carrier: Its name, or what makes one.

    Returns:
        The enforcer: a context manager with `report()`.

    Raises:
        PlanMismatch: The plan is for another step or another number of ranks.
        InvalidInput: There is no such carrier here.
    """
    from .planner.plan import Plan
    from .runtime.enforcer.enforcer import Enforcer

    chosen = plan if isinstance(plan, Plan) else plan.plan
    made = Enforcer(workload, every=every, cluster=cluster, carrier=carrier)
    try:
        made.prepare(chosen, workload, 1)
        made.commit(1, chosen.hash)
    except BaseException:
        made.close()
        raise
    return made
