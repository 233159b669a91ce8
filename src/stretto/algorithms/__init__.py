"""The algorithm library: one algorithm per module, built by name through the registry."""

from .base import Algorithm, collective_kind
from .registry import NAMES, algorithm, algorithms, defined_for

__all__ = ["NAMES", "Algorithm", "algorithm", "algorithms", "collective_kind", "defined_for"]
