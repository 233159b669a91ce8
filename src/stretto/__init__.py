# SPDX-License-Identifier: Apache-2.0
"""Stretto, a communication compiler for distributed training.

The table of contents: what has to move (`Collective`), over what (`Cluster`), how (`Program`), and how long
it takes (`simulate`, `lower_bound`, `Timeline`); and a training step (`Workload`) with the decision how all of it
communicates (`plan`, `Plan`). What touches a running job is in `stretto.torch`; what belongs to one subject is in the
package of that subject (`stretto.algorithms`, `stretto.pipeline`, ...). A name is loaded when it is first used, so that
importing the package costs little.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from .moved import install as _install

if _TYPE_CHECKING:
    from . import advice as advice
    from . import algorithms as algorithms
    from . import cluster as cluster
    from . import collectives as collectives
    from . import dimensions as dimensions
    from . import doctor as doctor
    from . import lab as lab
    from . import pipeline as pipeline
    from . import planner as planner
    from . import programs as programs
    from . import report as report
    from . import resharding as resharding
    from . import simulator as simulator
    from . import strategy as strategy
    from . import synthesis as synthesis
    from . import weights as weights
    from . import workload as workload
    from .advice import advise as advise
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
    from .programs import Program as Program
    from .resharding import plan_reshard as plan_reshard
    from .simulator import Timeline as Timeline
    from .simulator import lower_bound as lower_bound
    from .simulator import simulate as simulate
    from .synthesis import synthesize as synthesize
    from .units import GB as GB
    from .units import GIB as GIB
    from .units import KB as KB
    from .units import KIB as KIB
    from .units import MB as MB
    from .units import MIB as MIB
    from .workload import Workload as Workload
    from .workload import workloads as workloads

    __version__: str

_PACKAGES = {
    **{
        name: f".{name}"
        for name in (
            "advice", "algorithms", "cluster", "collectives", "dimensions", "doctor", "lab", "pipeline",
            "planner", "programs", "report", "resharding", "simulator", "strategy", "synthesis", "weights", "workload",
        )
    },
    "workloads": ".workload.workloads",
}  # fmt: skip
"""Packages that are there without an import of their own."""
_HOMES = {
    # The six nouns.
    ".cluster": ("Cluster", "Dimension", "Link", "Node"),
    ".collectives": (
        "AllGather", "AllReduce", "AllToAll", "AllToAllV", "Broadcast", "Collective", "Gather", "Permute", "Reduce",
        "ReduceScatter", "Scatter",
    ),
    ".programs": ("Program",),
    ".workload": ("Workload",),
    ".planner.plan": ("Plan",),
    # The verbs, and the last noun: what `simulate` returns.
    ".algorithms": ("algorithm",),
    ".synthesis": ("synthesize",),
    ".simulator": ("Timeline", "lower_bound", "simulate"),
    ".planner.api": ("plan",),
    ".resharding": ("plan_reshard",),
    ".advice": ("advise",),
    # What is raised, and what sizes are written in.
    ".errors": (
        "Infeasible", "InvalidInput", "PeerLost", "PlanMismatch", "SearchTimeout", "StrettoError", "VerificationError",
    ),
    ".units": ("GB", "GIB", "KB", "KIB", "MB", "MIB"),
}  # fmt: skip
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_MOVED = {
    **dict.fromkeys(("WeightSync", "capture", "distribute", "model_spec", "reshard", "step"), "torch"),
    **dict.fromkeys(("Lowered", "SymmetricProgram"), "programs"),
    **dict.fromkeys(("Certificate", "Synthesis"), "synthesis"),
    "Bound": "simulator",
    "ReshardPlan": "resharding",
}
"""Names of 0.1 that stay for one release, and the module that each has moved to."""

__all__ = sorted(_HOME)

_install()


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return _import_module(_PACKAGES[name], __name__)
    if name in _HOME:
        value = getattr(_import_module(_HOME[name], __name__), name)
    elif name in _MOVED:
        import warnings

        home = f"{__name__}.{_MOVED[name]}"
        warnings.warn(f"{__name__}.{name} is {home}.{name} now", DeprecationWarning, stacklevel=2)
        value = getattr(_import_module(home), name)
    elif name == "__version__":
        from importlib.metadata import version

        value = version(__name__)
    elif name == "torch":
        # An attribute alone does not load PyTorch: whoever looks through all attributes does not want it.
        raise AttributeError(f"module {__name__!r} has no attribute 'torch' before `import {__name__}.torch`")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Kept, so that this function is asked once, and a warning is given once.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES, "__version__"})
