# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules: one representation (PyTorch's action text), makers, a checker, memory, simulation, a search,
models.
"""

from .actions import Action
from .check import ScheduleProof, check, in_flight
from .layouts import LayoutResult, PipelineLayout, StageLayout, search_layouts
from .lowering import STYLES, with_comms
from .makers import FULL, MAKERS, eager_1f1b, gpipe, interleaved, make, one_f_one_b, paced, zb_h1, zb_h2
from .memory import StageMemory, peak_bytes
from .pipeline_model import PipelineLayer, PipelineModel
from .schedule import Schedule
from .search import PipelineResult, search
from .simulation import PipelineRun, StageCosts, lower_bound_us, simulate

__all__ = [
    "Action",
    "StageCosts",
    "FULL",
    "LayoutResult",
    "PipelineLayer",
    "PipelineLayout",
    "PipelineModel",
    "StageLayout",
    "search_layouts",
    "PipelineResult",
    "MAKERS",
    "ScheduleProof",
    "PipelineRun",
    "STYLES",
    "Schedule",
    "StageMemory",
    "check",
    "eager_1f1b",
    "gpipe",
    "in_flight",
    "interleaved",
    "lower_bound_us",
    "make",
    "one_f_one_b",
    "paced",
    "peak_bytes",
    "search",
    "simulate",
    "with_comms",
    "zb_h1",
    "zb_h2",
]
