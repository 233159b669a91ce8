# SPDX-License-Identifier: Apache-2.0
"""Parametric models: each makes a `Workload` from a few numbers, with a roofline for its compute.

`stretto.workload.registry` describes how a model is written and registered.
"""
