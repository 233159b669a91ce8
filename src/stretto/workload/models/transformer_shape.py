# SPDX-License-Identifier: Apache-2.0
"""`TransformerShape`: the sizes of a transformer, and its degrees of parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import InvalidInput
from ...units import MB
from .common import check_count, check_divides, check_scale
from .parallel import check_mode


@dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """The sizes of a transformer, and its degrees of parallelism."""

    layers: int
    hidden: int
    heads: int
    seq: int = 2048
    vocab: int = 51200
    batch: int = 1
    """The number of sequences in one micro-batch on one replica."""
    micro_batches: int = 1
    tensor: int = 1
    pipeline: int = 1
    sequence_parallel: bool = False
    mode: str = "ddp"
    bucket_mb: float = 25.0
    unit_layers: int = 1
    experts: int = 0
    expert_parallel: int = 1
    top_k: int = 2
    moe_every: int = 2

    def __post_init__(self) -> None:
        for name, most in _LIMITS.items():
            check_count(name, getattr(self, name), 0 if name == "experts" else 1, most)
        check_scale("bucket_mb", self.bucket_mb, 0.001, 1e6)
        object.__setattr__(self, "mode", check_mode(self.mode))
        if not isinstance(self.sequence_parallel, bool):
            raise InvalidInput(f"sequence_parallel: must be true or false, not {self.sequence_parallel!r}")
        check_divides("pipeline", self.pipeline, "layers", self.layers)
        check_divides("tensor", self.tensor, "hidden", self.hidden)
        if self.experts:
            check_divides("expert_parallel", self.expert_parallel, "experts", self.experts)
            if self.top_k > self.experts:
                raise InvalidInput(f"top_k: {self.top_k} of {self.experts} experts")
        elif self.expert_parallel > 1:
            raise InvalidInput(f"expert_parallel: {self.expert_parallel} needs experts")

    @property
    def bucket_bytes(self) -> float:
        """Bytes of gradients that data parallelism sends together."""
        return self.bucket_mb * MB

    @property
    def tokens(self) -> int:
        """The number of tokens in one micro-batch on one replica."""
        return self.batch * self.seq

    def is_moe(self, layer: int) -> bool:
        """Whether a layer has experts instead of its MLP."""
        return self.experts > 0 and layer % self.moe_every == self.moe_every - 1

    @property
    def parameters(self) -> float:
        """The number of parameters of the whole model."""
        moe = sum(self.is_moe(layer) for layer in range(self.layers))
        dense = 12 * self.layers - 8 * moe
        return (dense + 8 * moe * self.experts) * self.hidden**2 + self.vocab * self.hidden * min(self.pipeline, 2)


_LIMITS = {
    "layers": 10_000,
    "hidden": 1 << 20,
    "heads": 1 << 14,
    "seq": 1 << 24,
    "vocab": 1 << 24,
    "batch": 1 << 20,
    "micro_batches": 10_000,
    "tensor": 1 << 14,
    "pipeline": 10_000,
    "unit_layers": 10_000,
    "experts": 1 << 14,
    "expert_parallel": 1 << 14,
    "top_k": 64,
    "moe_every": 10_000,
}
