# SPDX-License-Identifier: Apache-2.0
"""Clusters by name: the machines of the papers, and regular networks. One module per family.

To add a preset, write a builder and register it (`registry.register`); importing its module is enough.
"""

from . import ndv2, dgx2, dgx, gb200, hgx2, mi250, mi300x, shared_gpu, p3, aws, autodist, themis, regular, fat_tree  # noqa: F401, I001
from .registry import PresetInfo, preset, presets

__all__ = ["PresetInfo", "preset", "presets"]
