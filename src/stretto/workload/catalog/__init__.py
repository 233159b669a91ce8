# SPDX-License-Identifier: Apache-2.0
"""The catalog of networks: every model that workloads, strategies and pipelines know, layer by layer, described once.

Sizes, arithmetic and memory traffic of one sample are here; what a training step, a strategy or a pipeline makes of
them is in `workload.models`, `strategy.zoo` and `pipeline.models`.
"""
