# SPDX-License-Identifier: Apache-2.0
"""The folder that `stretto run` puts in front of PYTHONPATH; nothing else may be in it."""
