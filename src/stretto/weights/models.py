# SPDX-License-Identifier: Apache-2.0
"""Shapes of public models, built from the numbers of their published configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod

from ..errors import InvalidInput, unknown


@dataclass(frozen=True, kw_only=True)
class ModelTensor:
    """One tensor of a model: experts of a layer are one tensor with the experts as its first dimension."""

    name: str
    shape: tuple[int, ...]
    role: str
    """How tensor and expert parallelism cut it: ``column``, ``vocab`` and ``expert_column`` by output rows, ``row`` and
    ``expert_row`` by inputs, ``kv`` by whole key-value heads, experts by expert first; ``replicated`` not at all."""
    layer: int | None = None
    """The layer that the tensor belongs to; None for the embedding, the last norm and the head."""
    heads: int = 0
    """The number of key-value heads of a ``kv`` tensor."""

    @property
    def parameters(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ModelShapes:
    """The tensors of a model, and the number of parameters that its authors publish."""

    name: str
    num_layers: int
    tensors: tuple[ModelTensor, ...]
    published_billion: float
    source: str

    @property
    def parameters(self) -> int:
        """The number of parameters of all tensors together."""
        return sum(t.parameters for t in self.tensors)


@dataclass(frozen=True, kw_only=True)
class _Config:
    """The numbers of a published configuration that decide shapes; keys as in the model's ``config.json``."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    num_key_value_heads: int = 0
    head_dim: int = 128
    q_lora_rank: int = 0
    """Larger than 0 for multi-head latent attention."""
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_routed_experts: int = 0
    n_shared_experts: int = 0
    moe_intermediate_size: int = 0
    first_k_dense_replace: int = 0
    qk_norm: bool = False
    router_bias: bool = False


def _attention(c: _Config) -> Iterator[tuple[str, tuple[int, ...], str]]:
    wide = c.num_attention_heads * c.head_dim
    few = c.num_key_value_heads * c.head_dim
    yield "q_proj", (wide, c.hidden_size), "column"
    yield "k_proj", (few, c.hidden_size), "kv"
    yield "v_proj", (few, c.hidden_size), "kv"
    yield "o_proj", (c.hidden_size, wide), "row"
    if c.qk_norm:
        yield "q_norm", (c.head_dim,), "replicated"
        yield "k_norm", (c.head_dim,), "replicated"


def _latent_attention(c: _Config) -> Iterator[tuple[str, tuple[int, ...], str]]:
    heads, key = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
    yield "q_a_proj", (c.q_lora_rank, c.hidden_size), "replicated"
    yield "q_a_layernorm", (c.q_lora_rank,), "replicated"
    yield "q_b_proj", (heads * key, c.q_lora_rank), "column"
    yield "kv_a_proj_with_mqa", (c.kv_lora_rank + c.qk_rope_head_dim, c.hidden_size), "replicated"
    yield "kv_a_layernorm", (c.kv_lora_rank,), "replicated"
    yield "kv_b_proj", (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank), "column"
    yield "o_proj", (c.hidden_size, heads * c.v_head_dim), "row"


def _experts(c: _Config) -> Iterator[tuple[str, tuple[int, ...], str]]:
    count, inner = c.n_routed_experts, c.moe_intermediate_size
    yield "gate", (count, c.hidden_size), "replicated"
    if c.router_bias:
        yield "gate.e_score_correction_bias", (count,), "replicated"
    yield "experts.gate_proj", (count, inner, c.hidden_size), "expert_column"
    yield "experts.up_proj", (count, inner, c.hidden_size), "expert_column"
    yield "experts.down_proj", (count, c.hidden_size, inner), "expert_row"
    if c.n_shared_experts:
        yield from _dense(c.hidden_size, c.n_shared_experts * inner, "shared_experts.")


def _dense(hidden: int, inner: int, prefix: str = "") -> Iterator[tuple[str, tuple[int, ...], str]]:
    yield f"{prefix}gate_proj", (inner, hidden), "column"
    yield f"{prefix}up_proj", (inner, hidden), "column"
    yield f"{prefix}down_proj", (hidden, inner), "row"


def _tensors(c: _Config) -> Iterator[ModelTensor]:
    yield ModelTensor(name="model.embed_tokens.weight", shape=(c.vocab_size, c.hidden_size), role="vocab")
    attention: Callable[[_Config], Iterator[tuple[str, tuple[int, ...], str]]]
    attention = _latent_attention if c.q_lora_rank else _attention
    for layer in range(c.num_hidden_layers):
        dense = not c.n_routed_experts or layer < c.first_k_dense_replace
        parts = [(f"self_attn.{name}", shape, role) for name, shape, role in attention(c)]
        mlp = _dense(c.hidden_size, c.intermediate_size) if dense else _experts(c)
        parts += [(f"mlp.{name}", shape, role) for name, shape, role in mlp]
        parts += [(name, (c.hidden_size,), "replicated") for name in ("input_layernorm", "post_attention_layernorm")]
        for name, shape, role in parts:
            end = "" if name.endswith("bias") else ".weight"
            heads = c.num_key_value_heads if role == "kv" else 0
            yield ModelTensor(
                name=f"model.layers.{layer}.{name}{end}", shape=shape, role=role, layer=layer, heads=heads
            )
    yield ModelTensor(name="model.norm.weight", shape=(c.hidden_size,), role="replicated")
    yield ModelTensor(name="lm_head.weight", shape=(c.vocab_size, c.hidden_size), role="vocab")


_CONFIGS: dict[str, tuple[_Config, float, str]] = {
    "deepseek-v3": (
        _Config(
            hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, intermediate_size=18432, vocab_size=129280,
            q_lora_rank=1536, n_routed_experts=256, n_shared_experts=1, moe_intermediate_size=2048,
            first_k_dense_replace=3, router_bias=True,
        ),
        671.0,
        "deepseek-ai/DeepSeek-V3 config.json, without the module for multi-token prediction",
    ),
    "kimi-k2": (
        _Config(
            hidden_size=7168, num_hidden_layers=61, num_attention_heads=64, intermediate_size=18432, vocab_size=163840,
            q_lora_rank=1536, n_routed_experts=384, n_shared_experts=1, moe_intermediate_size=2048,
            first_k_dense_replace=1, router_bias=True,
        ),
        1040.0,
        "moonshotai/Kimi-K2-Instruct config.json; its report says 1.04 T",
    ),
    "llama-3-70b": (
        _Config(
            hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
            intermediate_size=28672, vocab_size=128256,
        ),
        70.6,
        "meta-llama/Meta-Llama-3-70B config.json",
    ),
    "qwen3-235b": (
        _Config(
            hidden_size=4096, num_hidden_layers=94, num_attention_heads=64, num_key_value_heads=4,
            intermediate_size=12288, vocab_size=151936, n_routed_experts=128, moe_intermediate_size=1536, qk_norm=True,
        ),
        235.0,
        "Qwen/Qwen3-235B-A22B config.json",
    ),
}  # fmt: skip
MODELS = tuple(_CONFIGS)


def model_shapes(name: str) -> ModelShapes:
    """The tensors of a public model.

    >>> model = model_shapes("llama-3-70b")
    >>> len(model.tensors), model.parameters
    (723, 70553706496)

    Args:
        name: one of `MODELS`.

    Returns:
        Its tensors, with the published number of parameters.

    Raises:
        InvalidInput: the model is unknown.
    """
    if name not in _CONFIGS:
        raise unknown("model", name, MODELS)
    config, billion, source = _CONFIGS[name]
    return ModelShapes(
        name=name, num_layers=config.num_hidden_layers, tensors=tuple(_tensors(config)), published_billion=billion,
        source=source,
    )  # fmt: skip


def small_model(hidden: int, *, layers: int = 4, vocabulary: int = 0) -> ModelShapes:
    """A dense transformer of any width, for runs with real bytes.

    >>> small_model(256).parameters
    3672320

    Args:
        hidden: the width, a multiple of 64.
        layers: the number of layers.
        vocabulary: rows of the embedding and of the head; four times the width where none are given.

    Returns:
        Its tensors.

    Raises:
        InvalidInput: a size is none.
    """
    if hidden < 64 or hidden % 64 or layers < 1 or vocabulary < 0:
        raise InvalidInput(f"hidden, layers: must be a multiple of 64 and >= 1, not {hidden} and {layers}")
    config = _Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 32, intermediate_size=3 * hidden,
        vocab_size=vocabulary or 4 * hidden, num_key_value_heads=max(4, hidden // 128), head_dim=32,
    )  # fmt: skip
    return ModelShapes(
        name=f"dense-{hidden}x{layers}", num_layers=layers, tensors=tuple(_tensors(config)), published_billion=0.0,
        source="a dense transformer to measure with",
    )  # fmt: skip


def model_of_size(nbytes: float, *, layers: int = 4) -> ModelShapes:
    """The `small_model` whose weights in bf16 come nearest to some bytes.

    >>> 0.9e9 < 2 * model_of_size(1e9).parameters < 1.1e9
    True
    """
    sizes = [small_model(64 * k, layers=layers) for k in range(1, 257)]
    return min(sizes, key=lambda model: abs(2 * model.parameters - nbytes))
