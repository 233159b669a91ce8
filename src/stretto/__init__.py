"""Stretto, a communication compiler for distributed training.

The table of contents: what has to move (`Collective`), over what (`Cluster`), how (`Program`), and how long
it takes (`simulate`, `lower_bound`, `Timeline`); and a training step (`Workload`) with the decision how all of it
communicates (`plan`, `Plan`).
"""

from . import algorithms, dimensions, pipeline, resharding, strategy
from .algorithms import algorithm
from .cluster import Cluster, Dimension, Link, Node
from .collectives import (
    AllGather,
    AllReduce,
    AllToAll,
    AllToAllV,
    Broadcast,
    Collective,
    Gather,
    Permute,
    Reduce,
    ReduceScatter,
    Scatter,
)
from .errors import (
    Infeasible,
    InvalidInput,
    PeerLost,
    PlanMismatch,
    SearchTimeout,
    StrettoError,
    VerificationError,
)
from .planner.api import plan
from .planner.plan import Plan
from .programs import Lowered, Program, SymmetricProgram
from .resharding import ReshardPlan, plan_reshard
from .resharding.tensors.reshard import reshard
from .resharding.tensors.weights import WeightSync
from .runtime.capture.session import capture
from .runtime.torch_backend.current import step
from .simulator import Bound, Timeline, lower_bound, simulate
from .strategy.distribute import distribute, model_spec
from .synthesis import Certificate, Synthesis, synthesize
from .units import GB, GIB, KB, KIB, MB, MIB
from .workload import Workload, workloads

__version__ = "0.1.0"

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "AllToAllV",
    "Bound",
    "Broadcast",
    "Certificate",
    "Cluster",
    "Collective",
    "Dimension",
    "GB",
    "GIB",
    "Gather",
    "Infeasible",
    "InvalidInput",
    "KB",
    "KIB",
    "Link",
    "Lowered",
    "MB",
    "MIB",
    "Node",
    "PeerLost",
    "Permute",
    "Plan",
    "PlanMismatch",
    "Program",
    "Reduce",
    "ReduceScatter",
    "ReshardPlan",
    "Scatter",
    "SearchTimeout",
    "StrettoError",
    "SymmetricProgram",
    "Synthesis",
    "Timeline",
    "VerificationError",
    "WeightSync",
    "Workload",
    "algorithm",
    "algorithms",
    "capture",
    "dimensions",
    "distribute",
    "lower_bound",
    "model_spec",
    "pipeline",
    "plan",
    "plan_reshard",
    "reshard",
    "resharding",
    "simulate",
    "step",
    "strategy",
    "synthesize",
    "workloads",
]
