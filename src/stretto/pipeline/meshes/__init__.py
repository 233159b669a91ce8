# SPDX-License-Identifier: Apache-2.0
"""Pipelines in a running job whose stages are device meshes: between two stages every tensor is resharded by a planned
program, while other micro-batches are computed.
"""
