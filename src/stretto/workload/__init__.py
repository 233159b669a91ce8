"""Training steps: the `Workload` DAG, parametric models, and readers for traces of real jobs."""

from . import workloads
from .dag import COMM_KINDS, COMPUTE, Dep, Op, Place, Workload

__all__ = ["COMM_KINDS", "COMPUTE", "Dep", "Op", "Place", "Workload", "workloads"]
