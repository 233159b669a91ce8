# SPDX-License-Identifier: Apache-2.0
"""Measuring the links of a cluster and the collectives on it."""

from ...moved import old_name


def __getattr__(name: str) -> object:
    # Kept, since Python would find the module of the same name instead when it asks again.
    globals()[name] = value = old_name(__name__, name)
    return value
