# SPDX-License-Identifier: Apache-2.0
"""Moves tensors and whole state dicts of a running job from one mesh to another: `stretto.torch.reshard`,
`stretto.torch.WeightSync`.
"""
