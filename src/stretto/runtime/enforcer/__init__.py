# SPDX-License-Identifier: Apache-2.0
"""Runs a training step the way a plan says."""
