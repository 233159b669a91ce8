# SPDX-License-Identifier: Apache-2.0
"""The algorithm library: one algorithm per module, built by name through the registry.

`base.Algorithm` says what a module has to hold; `registry.NAMES` lists the modules.
"""

from .base import Algorithm, collective_kind
from .registry import NAMES, algorithm, algorithms, defined_for

__all__ = ["NAMES", "Algorithm", "algorithm", "algorithms", "collective_kind", "defined_for"]
