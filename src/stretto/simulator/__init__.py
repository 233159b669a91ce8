# SPDX-License-Identifier: Apache-2.0
"""Times of programs: the network simulator, its timelines, and lower bounds."""

from .bounds import Bound, lower_bound
from .network import simulate
from .timeline import Timeline

__all__ = ["Bound", "Timeline", "lower_bound", "simulate"]
