"""Stretto, a communication compiler for distributed training.

The table of contents: what has to move (`Collective`), over what (`Cluster`), how (`Program`), and how long
it takes (`simulate`, `lower_bound`, `Timeline`); and a training step (`Workload`) with the decision how all of it
communicates (`plan`, `Plan`). A name is loaded when it is first used, so that importing the package costs little.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from . import algorithms as algorithms
    from . import dimensions as dimensions
    from . import pipeline as pipeline
    from . import resharding as resharding
    from . import strategy as strategy
    from .algorithms import algorithm as algorithm
    from .cluster import Cluster as Cluster
    from .cluster import Dimension as Dimension
    from .cluster import Link as Link
    from .cluster import Node as Node
    from .collectives import AllGather as AllGather
    from .collectives import AllReduce as AllReduce
    from .collectives import AllToAll as AllToAll
    from .collectives import AllToAllV as AllToAllV
    from .collectives import Broadcast as Broadcast
    from .collectives import Collective as Collective
    from .collectives import Gather as Gather
    from .collectives import Permute as Permute
    from .collectives import Reduce as Reduce
    from .collectives import ReduceScatter as ReduceScatter
    from .collectives import Scatter as Scatter
    from .errors import Infeasible as Infeasible
    from .errors import InvalidInput as InvalidInput
    from .errors import PeerLost as PeerLost
    from .errors import PlanMismatch as PlanMismatch
    from .errors import SearchTimeout as SearchTimeout
    from .errors import StrettoError as StrettoError
    from .errors import VerificationError as VerificationError
    from .planner.api import plan as plan
    from .planner.plan import Plan as Plan
    from .programs import Lowered as Lowered
    from .programs import Program as Program
    from .programs import SymmetricProgram as SymmetricProgram
    from .resharding import ReshardPlan as ReshardPlan
    from .resharding import plan_reshard as plan_reshard
    from .resharding.tensors.reshard import reshard as reshard
    from .resharding.tensors.weights import WeightSync as WeightSync
    from .runtime.capture.session import capture as capture
    from .runtime.torch_backend.current import step as step
    from .simulator import Bound as Bound
    from .simulator import Timeline as Timeline
    from .simulator import lower_bound as lower_bound
    from .simulator import simulate as simulate
    from .strategy.distribute import distribute as distribute
    from .strategy.distribute import model_spec as model_spec
    from .synthesis import Certificate as Certificate
    from .synthesis import Synthesis as Synthesis
    from .synthesis import synthesize as synthesize
    from .units import GB as GB
    from .units import GIB as GIB
    from .units import KB as KB
    from .units import KIB as KIB
    from .units import MB as MB
    from .units import MIB as MIB
    from .workload import Workload as Workload
    from .workload import workloads as workloads

__version__ = "0.1.0"

_PACKAGES = ("algorithms", "dimensions", "pipeline", "resharding", "strategy")
_HOMES = {
    ".algorithms": ("algorithm",),
    ".cluster": ("Cluster", "Dimension", "Link", "Node"),
    ".collectives": (
        "AllGather",
        "AllReduce",
        "AllToAll",
        "AllToAllV",
        "Broadcast",
        "Collective",
        "Gather",
        "Permute",
        "Reduce",
        "ReduceScatter",
        "Scatter",
    ),
    ".errors": (
        "Infeasible",
        "InvalidInput",
        "PeerLost",
        "PlanMismatch",
        "SearchTimeout",
        "StrettoError",
        "VerificationError",
    ),
    ".planner.api": ("plan",),
    ".planner.plan": ("Plan",),
    ".programs": ("Lowered", "Program", "SymmetricProgram"),
    ".resharding": ("ReshardPlan", "plan_reshard"),
    ".resharding.tensors.reshard": ("reshard",),
    ".resharding.tensors.weights": ("WeightSync",),
    ".runtime.capture.session": ("capture",),
    ".runtime.torch_backend.current": ("step",),
    ".simulator": ("Bound", "Timeline", "lower_bound", "simulate"),
    ".strategy.distribute": ("distribute", "model_spec"),
    ".synthesis": ("Certificate", "Synthesis", "synthesize"),
    ".units": ("GB", "GIB", "KB", "KIB", "MB", "MIB"),
    ".workload": ("Workload", "workloads"),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_PACKAGES, *_HOME])


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return _import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(_HOME[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
