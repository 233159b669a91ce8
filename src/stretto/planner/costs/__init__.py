# SPDX-License-Identifier: Apache-2.0
"""The cost of a motif, from simulation and from measurements."""
