# SPDX-License-Identifier: Apache-2.0
"""The joint search over orders and motifs, and the schedules, bounds and simulations that it is judged by."""
