"""The lab: hosts as network namespaces with shaped uplinks, and a job's ranks on them."""

from .job import Job, Result
from .lab import Lab
from .layout import ORDERS, SHAPERS, Channel, Layout
from .network import unavailable
from .processes import Running, clean, running

__all__ = [
    "Channel", "Job", "Lab", "Layout", "ORDERS", "Result", "Running", "SHAPERS", "clean", "running", "unavailable",
]
