# SPDX-License-Identifier: Apache-2.0
"""The models as functions: ``stretto.workloads.dlrm("A2", ranks=64)``; ``names()`` lists them."""

from __future__ import annotations

from .models.cnn import regnetz, resnet
from .models.dlrm import dlrm
from .models.themis import themis
from .models.transformer import gpt, moe, xlmr
from .registry import MODELS

__all__ = ["dlrm", "gpt", "moe", "names", "regnetz", "resnet", "themis", "xlmr"]


def names() -> list[str]:
    """Every model with each of its variants, as `Workload.load` takes them.

    >>> names()[:4]
    ['dlrm:A1', 'dlrm:A2', 'dlrm:A3', 'dlrm:A4']
    """
    return [f"{entry.name}:{variant}" for entry in MODELS.values() for variant in entry.variants]
