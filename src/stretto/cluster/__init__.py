# SPDX-License-Identifier: Apache-2.0
"""The hardware: `Cluster`, its presets and its file forms."""

from typing import TYPE_CHECKING

from ..late import late_names
from . import model
from .model import Cluster, Dimension, Link, Node

if TYPE_CHECKING:
    from . import files as files
    from . import presets as presets
else:
    __getattr__ = late_names(__name__, {"files": ".files", "presets": ".presets"})

__all__ = ["Cluster", "Dimension", "Link", "Node"]

model.PRESET.supply_from(f"{__name__}.presets", "preset")
model.LOAD.supply_from(f"{__name__}.files", "load")
model.SAVE.supply_from(f"{__name__}.files", "save")
