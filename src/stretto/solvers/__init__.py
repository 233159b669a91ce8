# SPDX-License-Identifier: Apache-2.0
"""Solvers of linear and integer programs: HiGHS in this process, CP-SAT (OR-Tools) in a process of its own."""
