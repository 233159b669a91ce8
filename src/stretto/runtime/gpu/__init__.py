# SPDX-License-Identifier: Apache-2.0
"""Programs on GPU memory: fused steps, interpreted by one kernel that NVRTC compiles."""

from .communicator import GpuCommunicator, GpuProgram

__all__ = ["GpuCommunicator", "GpuProgram"]
