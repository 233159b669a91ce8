# SPDX-License-Identifier: Apache-2.0
"""Times of programs: the network simulator, its timelines, prices of runtimes, and lower bounds."""

from .bounds import Bound, lower_bound
from .network import SIMULATE_PRICED, simulate
from .priced import simulate_priced
from .runtimes import Protocol, Runtime
from .timeline import Timeline

SIMULATE_PRICED.supply(simulate_priced)

__all__ = ["Bound", "Protocol", "Runtime", "Timeline", "lower_bound", "simulate"]
