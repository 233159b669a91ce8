"""Transformers with tensor, pipeline, data and expert parallelism: GPT, mixtures of experts, and SYNDICATE's A5.

Assumptions: matrix products, activations, parameters and gradients on the wire are FP16, Adam is FP32; the backward
pass costs twice the forward pass, nothing is recomputed; biases, norms and the loss are too small to count. Experts get
equal shares of the tokens. With one pipeline stage the output layer shares the matrix of the embedding, with several it
has its own. Ranks are numbered ``(stage * replicas + replica) * tensor + shard``: shards are next to each other, then
replicas, then stages.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from ...errors import InvalidInput, unknown
from ...units import MB
from ..dag import Workload
from ..roofline import Accelerator, accelerator
from .common import check_count, check_divides, check_ranks, check_scale
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

GPT = {
    "125m": TransformerShape(layers=12, hidden=768, heads=12, batch=4),
    "1.3b": TransformerShape(layers=24, hidden=2048, heads=16, batch=4),
    "6.7b": TransformerShape(layers=32, hidden=4096, heads=32, batch=2, mode="zero3"),
    "13b": TransformerShape(layers=40, hidden=5120, heads=40, tensor=8, pipeline=2, micro_batches=8),
    "175b": TransformerShape(
        layers=96, hidden=12288, heads=96, tensor=8, pipeline=8, micro_batches=16, sequence_parallel=True
    ),
    "1t": TransformerShape(layers=128, hidden=25600, heads=160, tensor=128, mode="zero2", batch=16, bucket_mb=500.0),
}
MOE = {
    "1.3b-8e": replace(GPT["1.3b"], experts=8, expert_parallel=8),
    "1.3b-64e": replace(GPT["1.3b"], experts=64, expert_parallel=64),
    "6.7b-64e": replace(GPT["6.7b"], mode="zero1", tensor=8, experts=64, expert_parallel=16),
}
XLMR = {
    "xl": TransformerShape(layers=36, hidden=2560, heads=32, seq=512, vocab=250_002, mode="zero3"),
    "xxl": TransformerShape(layers=48, hidden=4096, heads=32, seq=512, vocab=250_002, mode="zero3"),
}


def gpt(
    variant: str = "1.3b",
    *,
    ranks: int = 128,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    seq: int | None = None,
    vocab: int | None = None,
    batch: int | None = None,
    micro_batches: int | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
    sequence_parallel: bool | None = None,
    mode: str | None = None,
    bucket_mb: float | None = None,
    unit_layers: int | None = None,
    efficiency: float | None = None,
    device: str = "a100",
) -> Workload:
    """A GPT; an argument that is None takes the variant's value.

    >>> gpt("125m", ranks=8)
    <Workload gpt:125m: 42 ops (7 of communication) over 8 ranks, 95.34 ms of compute, 249 MB moved>

    Args:
        variant: one of `GPT`: "125m", "1.3b", "6.7b", "13b", "175b", "1t".
        ranks: number of ranks, 1..16384, a multiple of ``tensor * pipeline``.
        layers: number of layers, a multiple of `pipeline`.
        hidden: width of the model.
        heads: attention heads.
        seq: tokens of a sequence.
        vocab: size of the vocabulary.
        batch: sequences of one micro-batch on one replica.
        micro_batches: micro-batches of an iteration.
        tensor: ranks that share each layer.
        pipeline: number of pipeline stages.
        sequence_parallel: whether activations between the halves of a layer are sharded over the tensor-parallel ranks.
        mode: data parallelism: "ddp", "zero1", "zero2", "zero3" or "fsdp".
        bucket_mb: size of a gradient bucket in MB, 0.001..1e6.
        unit_layers: layers of one FSDP unit.
        efficiency: share of the roofline that kernels reach, over 0 and at most 1; None takes the device's.
        device: one of `ACCELERATORS`.

    Returns:
        One training step.

    Raises:
        InvalidInput: an argument is unknown, out of range, or does not divide.
    """
    given = dict(
        layers=layers, hidden=hidden, heads=heads, seq=seq, vocab=vocab, batch=batch, micro_batches=micro_batches,
        tensor=tensor, pipeline=pipeline, sequence_parallel=sequence_parallel, mode=mode, bucket_mb=bucket_mb,
        unit_layers=unit_layers,
    )  # fmt: skip
    return _named("gpt", GPT, variant, given, ranks, accelerator(device, efficiency=efficiency))


def moe(
    variant: str = "1.3b-64e",
    *,
    ranks: int = 128,
    experts: int | None = None,
    expert_parallel: int | None = None,
    top_k: int | None = None,
    moe_every: int | None = None,
    layers: int | None = None,
    seq: int | None = None,
    batch: int | None = None,
    micro_batches: int | None = None,
    tensor: int | None = None,
    pipeline: int | None = None,
    mode: str | None = None,
    efficiency: float | None = None,
    device: str = "a100",
) -> Workload:
    """A GPT with experts instead of the MLP in some layers; an argument that is None takes the variant's value.

    Args:
        variant: one of `MOE`: "1.3b-8e", "1.3b-64e", "6.7b-64e".
        ranks: number of ranks, 1..16384, a multiple of ``tensor * pipeline``.
        experts: experts of a layer, a multiple of `expert_parallel`.
        expert_parallel: replicas that share one set of experts; must divide the number of replicas.
        top_k: experts that each token goes to, at most `experts`.
        moe_every: every so-many-th layer has experts.
        layers: number of layers, a multiple of `pipeline`.
        seq: tokens of a sequence.
        batch: sequences of one micro-batch on one replica.
        micro_batches: micro-batches of an iteration.
        tensor: ranks that share each layer.
        pipeline: number of pipeline stages.
        mode: data parallelism: "ddp", "zero1", "zero2", "zero3" or "fsdp".
        efficiency: share of the roofline that kernels reach, over 0 and at most 1; None takes the device's.
        device: one of `ACCELERATORS`.

    Returns:
        One training step.

    Raises:
        InvalidInput: an argument is unknown, out of range, or does not divide.
    """
    given = dict(
        experts=experts, expert_parallel=expert_parallel, top_k=top_k, moe_every=moe_every, layers=layers, seq=seq,
        batch=batch, micro_batches=micro_batches, tensor=tensor, pipeline=pipeline, mode=mode,
    )  # fmt: skip
    return _named("moe", MOE, variant, given, ranks, accelerator(device, efficiency=efficiency))


def xlmr(
    variant: str = "xl",
    *,
    ranks: int = 128,
    batch: int | None = None,
    unit_layers: int | None = None,
    mode: str | None = None,
    efficiency: float | None = None,
    device: str = "v100_hgx2",
) -> Workload:
    """XLM-R-XL, SYNDICATE's A5: parameters are sharded over all GPUs and gathered layer by layer.

    The paper gives no batch. It finds that A5 gains from overlapping all-gather with reduce-scatter in the backward
    pass; that holds for one sequence of 512 tokens per GPU, because with more the compute hides both.

    Args:
        variant: "xl" or "xxl".
        ranks: number of ranks, 1..16384.
        batch: sequences per GPU; None takes one.
        unit_layers: layers of one FSDP unit; None takes one.
        mode: data parallelism: "ddp", "zero1", "zero2", "zero3" or "fsdp"; None takes "zero3".
        efficiency: share of the roofline that kernels reach, over 0 and at most 1; None takes the device's.
        device: one of `ACCELERATORS`.

    Returns:
        One training step.

    Raises:
        InvalidInput: an argument is unknown or out of range.
    """
    given = dict(batch=batch, unit_layers=unit_layers, mode=mode)
    return _named("xlmr", XLMR, variant, given, ranks, accelerator(device, efficiency=efficiency))


def _named(
    family: str,
    variants: dict[str, TransformerShape],
    variant: str,
    given: dict[str, Any],
    ranks: int,
    device: Accelerator,
) -> Workload:
    from .transformer_step import TransformerStep

    if variant not in variants:
        raise unknown(f"variant of {family}", variant, variants)
    check_ranks(ranks)
    changes = {key: value for key, value in given.items() if value is not None}
    assert changes.keys() <= {field.name for field in fields(TransformerShape)}
    shape = replace(variants[variant], **changes)
    check_divides("tensor x pipeline", shape.tensor * shape.pipeline, "ranks", ranks)
    replicas = ranks // (shape.tensor * shape.pipeline)
    check_divides("expert_parallel", shape.expert_parallel, "replicas", replicas)
    return TransformerStep(shape, replicas, device).workload(f"{family}:{variant}", unit="words")
