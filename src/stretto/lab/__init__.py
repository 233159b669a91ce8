"""The lab: hosts as network namespaces with shaped uplinks on this machine, and jobs whose ranks run on them.

A third party that wants to run ranks on a lab needs `Lab` alone: ``with Lab(...) as lab: lab.run(command)``.
`Lab.enter`
gives the command prefix for launchers that start ranks by themselves.
"""

from .job import Job, Result
from .lab import Lab
from .layout import ORDERS, SHAPERS, Channel, Layout
from .network import unavailable
from .processes import Running, clean, running

__all__ = [
    "Channel", "Job", "Lab", "Layout", "ORDERS", "Result", "Running", "SHAPERS", "clean", "running", "unavailable",
]
