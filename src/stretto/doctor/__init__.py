# SPDX-License-Identifier: Apache-2.0
"""What works on this machine, and what to do about the rest (`stretto doctor`)."""

from .checks import Finding, examine

__all__ = ["Finding", "examine"]
