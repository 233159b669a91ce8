# SPDX-License-Identifier: Apache-2.0
"""Compressor: the form in which gradients are sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..model import DTYPE_BYTES
from .step import LocalStep, Message, StepExchange, StrategyStep, VariablePiece

MEMORY_GB_PER_S = 200.0
"""Assumed memory rate of a device while it encodes or updates."""
SHORT_INDEX_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Form:
    """An encoded form: bytes of a gradient, whether ranks' messages can be summed, and passes over memory.

    `nbytes` and `then` are called with a piece and the encoder's amount. With `then`, every rank needs the sum of the
    first bytes before it can make the second ones, which are summed after it.
    """

    nbytes: Callable[[VariablePiece, float], float]
    adds: bool
    passes: float
    then: Callable[[VariablePiece, float], float] | None = None


def _as_matrix(piece: VariablePiece) -> tuple[int, int]:
    shape = piece.part.shape
    return shape[0], math.prod(shape[1:])


def _low_rank(piece: VariablePiece, rank: float) -> tuple[float, float]:
    """Bytes of two factors if they are smaller than the piece; other pieces are sent whole."""
    rows, columns = _as_matrix(piece) if piece.part.shape else (1, 1)
    size = rank * DTYPE_BYTES[piece.variable.dtype]
    return (size * rows, size * columns) if size * (rows + columns) < piece.nbytes else (piece.nbytes, 0.0)


def _factors(piece: VariablePiece, amount: float) -> float:
    return piece.variable.factors * sum(_as_matrix(piece)) * DTYPE_BYTES[piece.variable.dtype]


FORMS: dict[str, Form] = {
    "float16": Form(nbytes=lambda piece, _: 2.0 * piece.part.elements, adds=True, passes=1.5),
    "bfloat16": Form(nbytes=lambda piece, _: 2.0 * piece.part.elements, adds=True, passes=1.5),
    "powersgd": Form(
        nbytes=lambda piece, rank: _low_rank(piece, rank)[0], adds=True, passes=4.0,
        then=lambda piece, rank: _low_rank(piece, rank)[1],
    ),
    "topk": Form(
        nbytes=lambda piece, share: math.ceil(share * piece.part.elements)
        * (DTYPE_BYTES[piece.variable.dtype] + SHORT_INDEX_BYTES),
        adds=False, passes=4.0,
    ),
    "onebit": Form(
        nbytes=lambda piece, _: math.ceil(piece.part.elements / 8) + 2.0 * DTYPE_BYTES[piece.variable.dtype],
        adds=False, passes=3.0,
    ),
    "sufficient_factors": Form(nbytes=_factors, adds=False, passes=0.0),
}  # fmt: skip


class Compressor:
    """Gives the pushes of a message the size of their encoded form; forms that cannot be
    summed are gathered instead.
    """

    def rewrite(self, step: StrategyStep) -> StrategyStep:
        """Encode gradients only: parameters are sent back whole."""
        return replace(step, messages=tuple(self._encoded(message, step) for message in step.messages))

    def localize(self, local: LocalStep) -> LocalStep:
        """Return the step unchanged: every rank encodes what it sends."""
        return local

    def _encoded(self, message: Message, step: StrategyStep) -> Message:
        name, amount = message.sync.encoding
        if name == "none":
            return message
        form = FORMS[name]
        work_us = form.passes * message.nbytes / (MEMORY_GB_PER_S * 1e3)
        pushes = [exchange for exchange in message.exchanges if exchange.push]
        pulls = [exchange for exchange in message.exchanges if not exchange.push]
        nbytes = sum(form.nbytes(piece, amount) for piece in message.pieces)
        made = _summed(pushes, nbytes) if form.adds else _gathered(pushes, nbytes, len(step.replicas))
        if form.then is not None and (rest := sum(form.then(piece, amount) for piece in message.pieces)):
            made += [replace(back, push=True, nbytes=nbytes) for back in pulls] + _summed(pushes, rest)
        made = [replace(exchange, encoding=name, at_work_us=0.0 if at else work_us) for at, exchange in enumerate(made)]
        return replace(message, exchanges=(*made, *pulls))


def _summed(pushes: Sequence[StepExchange], nbytes: float) -> list[StepExchange]:
    return [replace(exchange, nbytes=nbytes) for exchange in pushes]


def _gathered(pushes: Sequence[StepExchange], nbytes: float, num_ranks: int) -> list[StepExchange]:
    """Pushes that gather runs of bytes, joined from level to level, each padded to the longest run of its group."""
    made, runs = [], 1
    for exchange in pushes:
        kind = {"all_reduce": "all_gather", "reduce": "gather"}.get(exchange.kind, exchange.kind)
        if kind == exchange.kind:
            made.append(replace(exchange, nbytes=nbytes * num_ranks))
            continue
        runs *= max(map(len, exchange.groups))
        made.append(replace(exchange, kind=kind, nbytes=nbytes * runs, direct=False))
    return made
