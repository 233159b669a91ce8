# SPDX-License-Identifier: Apache-2.0
"""Weights of models from trainers to servers: shapes of public models, layouts of both sides, plans at full size."""

from .models import MODELS, ModelShapes, ModelTensor, model_shapes
from .parallel import ParallelDegrees
from .planning import DTYPES, WeightPlan, plan_weights

__all__ = [
    "DTYPES",
    "MODELS",
    "ModelShapes",
    "ModelTensor",
    "ParallelDegrees",
    "WeightPlan",
    "model_shapes",
    "plan_weights",
]
