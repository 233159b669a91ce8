# SPDX-License-Identifier: Apache-2.0
"""The lab: hosts as network namespaces with shaped uplinks on this machine, and jobs whose ranks run on them.

A third party that wants to run ranks on a lab needs `Lab` alone: ``with Lab(...) as lab: lab.run(command)``.
`Lab.enter` gives the command prefix for launchers that start ranks by themselves.
"""

from .job import LabJob, LabResult
from .lab import Lab
from .layout import ORDERS, SHAPERS, LabChannel, LabLayout
from .network import unavailable
from .processes import LabProcesses, clean, running

__all__ = [
    "LabChannel",
    "LabJob",
    "Lab",
    "LabLayout",
    "ORDERS",
    "LabResult",
    "LabProcesses",
    "SHAPERS",
    "clean",
    "running",
    "unavailable",
]
