# SPDX-License-Identifier: Apache-2.0
"""Names of the miniatures that benchmarks/strategy_real.py and benchmarks/distribute.py train.

Each has the shape of a known model and about a hundredth of its parameters or less, so that a step fits two cores and
a shaped network: results with them are not results with the models they resemble.
"""

from __future__ import annotations

LABELS = {
    "vgg_like": "vgg-like 1.0M", "resnet_like": "resnet-like 0.41M", "bert_like": "bert-like 1.0M",
    "bert_like_sparse": "bert-like 1.0M, sparse", "ncf_like": "ncf-like 0.77M",
    "ncf_like_sparse": "ncf-like 0.77M, sparse",
}  # fmt: skip
"""What rows call a model: what it resembles, and its millions of parameters."""
