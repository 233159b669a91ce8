# SPDX-License-Identifier: Apache-2.0
"""Work in other processes: `Child`, a process that is ended with all that it has started, and the start of Ray."""

from .child import Child

__all__ = ["Child"]
