# SPDX-License-Identifier: Apache-2.0
"""Weights of models from trainers to servers: shapes of public models, layouts of both sides, plans at full
size, and mapping files for names and layouts that differ.
"""

from .mapping import MappedTensor, MappingRule, WeightMapping
from .models import MODELS, ModelShapes, ModelTensor, model_of_size, model_shapes, small_model
from .parallel import ParallelDegrees
from .planning import DTYPES, WeightPlan, plan_weights

__all__ = [
    "DTYPES",
    "MODELS",
    "MappedTensor",
    "MappingRule",
    "ModelShapes",
    "ModelTensor",
    "ParallelDegrees",
    "WeightMapping",
    "WeightPlan",
    "model_of_size",
    "model_shapes",
    "plan_weights",
    "small_model",
]
