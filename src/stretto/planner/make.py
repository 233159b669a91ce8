# SPDX-License-Identifier: Apache-2.0
"""The old place of `stretto.plan`, which goes with the next release."""

from __future__ import annotations

import warnings
from typing import Any

from ..cluster import Cluster
from ..workload import Workload
from .api import PlanResult, plan


def planned(workload: Workload, cluster: Cluster, **options: Any) -> PlanResult:
    """The old name of `stretto.plan`, with a warning.

    Args:
        workload: The step.
        cluster: The cluster.
        **options: The options of `stretto.plan`.

    Returns:
        What `stretto.plan` returns.
    """
    warnings.warn("stretto.planner.make.planned is now stretto.plan", DeprecationWarning, stacklevel=2)
    return plan(workload, cluster, **options)
