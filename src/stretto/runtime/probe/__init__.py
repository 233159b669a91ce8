# SPDX-License-Identifier: Apache-2.0
"""Measuring the links of a cluster and the collectives on it."""
