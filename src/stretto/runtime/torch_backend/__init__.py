# SPDX-License-Identifier: Apache-2.0
"""The PyTorch backend `stretto`: collectives of torch.distributed on the executor."""
