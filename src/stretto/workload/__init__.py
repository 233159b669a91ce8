# SPDX-License-Identifier: Apache-2.0
"""Training steps: the `Workload` DAG, parametric models, and readers for traces of real jobs."""

from . import dag, files, workloads
from .dag import COMM_KINDS, COMPUTE, PAIRWISE, Dep, Op, Place, Workload

__all__ = ["COMM_KINDS", "COMPUTE", "PAIRWISE", "Dep", "Op", "Place", "Workload", "chakra", "kineto", "workloads"]

dag.LOAD.supply(files.load)
dag.SAVE.supply(files.save)
dag.DIGEST.supply(files.digest)
