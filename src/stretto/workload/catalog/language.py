# SPDX-License-Identifier: Apache-2.0
"""Language models: BERT of several depths, the Transformer for translation, and LM1B's LSTM."""

from __future__ import annotations

from .layers import Scale, VariableLayer, linear, table

BERT_WORDS, BERT_TOKENS, BERT_POSITIONS = 30522, 128, 512
TRANSFORMER_WORDS, TRANSFORMER_TOKENS = 33708, 32
LM1B_WORDS, LM1B_STEPS, LM1B_SAMPLED = 793470, 20, 8192


def bert(w: Scale, *, layers: int, width: int, sparse: bool = False) -> list[VariableLayer]:
    """The layers of BERT: embeddings, encoder layers and pooler.

    Args:
        w: scales widths.
        layers: number of encoder layers.
        width: hidden width before scaling.
        sparse: whether the gradient of the word table is sparse (then there is no tied output layer).

    Returns:
        The layers in the order of use.
    """
    hidden, tokens = w(width), BERT_TOKENS
    made = [
        table("words", w(BERT_WORDS), hidden, looked_up=tokens, sparse=sparse),
        table("positions", BERT_POSITIONS, hidden, looked_up=tokens, sparse=False),
        table("segments", 2, hidden, looked_up=tokens, sparse=False),
    ]
    for at in range(layers):
        made += _layer(f"layer{at}", hidden, 4 * hidden, tokens)
    return [*made, linear("pooler", hidden, hidden)]


def _layer(name: str, hidden: int, inner: int, tokens: int, *, cross: bool = False) -> list[VariableLayer]:
    attention = []
    for kind in ("self", "cross") if cross else ("self",):
        for what in ("query", "key", "value"):
            # The attention scores and their products with the values are counted with the value projection.
            more = 4.0 * tokens * tokens * hidden if what == "value" else 0.0
            attention.append(linear(f"{name}.{kind}.{what}", hidden, hidden, tokens=tokens, more=more))
        attention.append(linear(f"{name}.{kind}.output", hidden, hidden, tokens=tokens, norm=True))
    return [
        *attention, linear(f"{name}.up", hidden, inner, tokens=tokens),
        linear(f"{name}.down", inner, hidden, tokens=tokens, norm=True),
    ]  # fmt: skip


def transformer(w: Scale) -> list[VariableLayer]:
    """The layers of the base Transformer: 6 encoder and 6 decoder layers of width 512, one dense table for words and
    output.
    """
    hidden, tokens = w(512), TRANSFORMER_TOKENS
    made = [table("words", w(TRANSFORMER_WORDS), hidden, looked_up=2 * tokens, sparse=False)]
    for at in range(6):
        made += _layer(f"encoder{at}", hidden, w(2048), tokens)
    for at in range(6):
        made += _layer(f"decoder{at}", hidden, w(2048), tokens, cross=True)
    # The output layer multiplies with the word table above, so it adds only flops.
    logits = linear("output_norm", hidden, hidden, tokens=tokens, more=2.0 * w(TRANSFORMER_WORDS) * hidden * tokens)
    return [*made, logits]


def lm1b(w: Scale) -> list[VariableLayer]:
    """The layers of LM1B: an LSTM of 2048 with projections to 512, sparse word vectors and a sampled softmax."""
    words, inner, hidden, steps = w(LM1B_WORDS), w(512), w(2048), LM1B_STEPS
    return [
        table("words", words, inner, looked_up=steps, sparse=True),
        linear("lstm", 2 * inner, 4 * hidden, tokens=steps),
        linear("projection", hidden, inner, tokens=steps),
        table("softmax", words, inner, looked_up=steps, sparse=True, extra_rows=min(LM1B_SAMPLED, words)),
        table("softmax_bias", words, 1, looked_up=steps, sparse=True, extra_rows=min(LM1B_SAMPLED, words)),
    ]
