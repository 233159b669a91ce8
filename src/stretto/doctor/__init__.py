# SPDX-License-Identifier: Apache-2.0
"""What works on this machine, and what to do about the rest (`stretto doctor`, `stretto selftest`)."""

from .checks import Finding, examine
from .gpu_selftest import SelfTest, SelfTestMachine, SelfTestRow, gpu_selftest

__all__ = ["Finding", "SelfTest", "SelfTestMachine", "SelfTestRow", "examine", "gpu_selftest"]
