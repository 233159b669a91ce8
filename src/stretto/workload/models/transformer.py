# SPDX-License-Identifier: Apache-2.0
"""Transformers with tensor, pipeline, data and expert parallelism: GPT, mixtures of experts, and SYNDICATE's A5.

Assumptions: matrix products, activations, parameters and gradients on the wire are FP16, Adam is FP32; the backward
pass costs twice the forward pass, nothing is recomputed; biases, norms and the loss are too small to count. Experts get
equal shares of the tokens. With one pipeline stage the output layer shares the matrix of the embedding, with several it
has its own. Ranks are numbered ``(stage * replicas + replica) * tensor + shard``: shards are next to each other, then
replicas, then stages.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ...errors import unknown
from ..dag import Workload
from ..roofline import Accelerator, accelerator
from .common import check_divides, check_ranks
from .transformer_shape import TransformerShape
from .transformer_step import TransformerStep

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
