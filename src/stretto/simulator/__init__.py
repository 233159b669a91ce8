"""Time: the network simulator, its timelines, and lower bounds."""

from .timeline import Timeline

__all__ = ["Timeline"]
