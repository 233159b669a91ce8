# SPDX-License-Identifier: Apache-2.0
"""Clusters by name: the machines of the papers, and regular networks. One module per family.

To add a preset, write a builder and `register` it; importing its module is enough, which `STRETTO_PLUGINS` does for
modules of somebody else's (docs/plugins.md).
"""

from . import ndv2, dgx2, dgx, gb200, hgx2, mi250, mi300x, shared_gpu, p3, aws, autodist, themis, regular, fat_tree  # noqa: F401, I001
from ..wiring import Wiring, numbered
from .registry import PresetInfo, preset, presets, register

__all__ = ["PresetInfo", "Wiring", "numbered", "preset", "presets", "register"]
