# SPDX-License-Identifier: Apache-2.0
"""The algorithm library: one algorithm per module, built by name through the registry.

`base.Algorithm` says what a module has to hold; `registry.NAMES` lists the modules. `register_algorithm` makes one of
somebody else's known.
"""

from .base import Algorithm, Ranks, Steps, choose, collective_kind, devices_of, label, placement, unless
from .registry import NAMES, algorithm, algorithms, defined_for, names, register_algorithm

__all__ = [
    "NAMES", "Algorithm", "Ranks", "Steps", "algorithm", "algorithms", "choose", "collective_kind", "defined_for",
    "devices_of", "label", "names", "placement", "register_algorithm", "unless",
]  # fmt: skip
