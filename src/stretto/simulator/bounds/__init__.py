# SPDX-License-Identifier: Apache-2.0
"""Lower bounds: how fast a collective could be at best on a cluster, independent of any algorithm."""

from .lower import Bound, lower_bound

__all__ = ["Bound", "lower_bound"]
