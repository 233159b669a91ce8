# SPDX-License-Identifier: Apache-2.0
"""Moves tensors between meshes: unit tasks, their senders and order, and one verified program for all of them."""

from .assign import ORDERS
from .files import load_plan, save_plan
from .placing import Side, place
from .plan import SYSTEMS, BufferRegion, ReshardPlan, ScheduledBundle, plan_reshard, plan_tensors
from .spec import Layout, Mesh, Spec
from .tasks import Tensor, UnitTask, decompose

__all__ = [
    "ORDERS",
    "SYSTEMS",
    "Layout",
    "Mesh",
    "ScheduledBundle",
    "BufferRegion",
    "ReshardPlan",
    "Side",
    "Spec",
    "Tensor",
    "UnitTask",
    "decompose",
    "load_plan",
    "place",
    "plan_reshard",
    "plan_tensors",
    "save_plan",
]
