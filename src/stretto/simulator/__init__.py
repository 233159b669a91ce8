"""Time: the network simulator, its timelines, and lower bounds."""

from .network import simulate
from .timeline import Timeline

__all__ = ["Timeline", "simulate"]
