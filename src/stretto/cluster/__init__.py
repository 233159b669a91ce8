# SPDX-License-Identifier: Apache-2.0
"""The hardware: `Cluster`, its presets and its file forms."""

from . import files, model, presets
from .model import Cluster, Dimension, Link, Node

__all__ = ["Cluster", "Dimension", "Link", "Node"]

model.PRESET.supply(presets.preset)
model.LOAD.supply(files.load)
model.SAVE.supply(files.save)
