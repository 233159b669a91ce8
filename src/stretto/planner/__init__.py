# SPDX-License-Identifier: Apache-2.0
"""The joint planner: motifs, their physical plans, schedules, and the search over all of them together."""
