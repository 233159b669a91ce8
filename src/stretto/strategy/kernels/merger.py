# SPDX-License-Identifier: Apache-2.0
"""Merger: pieces of one merge group become one message."""

from __future__ import annotations

from dataclasses import replace

from .step import LocalStep, Message, StrategyStep, VariablePiece

LANES = 8
"""The number of communicators on which parts of a cut variable are all-reduced in parallel."""


class Merger:
    """Joins pieces with equal group numbers into messages, if everything else about them is equal too."""

    def rewrite(self, step: StrategyStep) -> StrategyStep:
        """Make messages, in the order in which the backward pass completes them."""
        position = {v.name: at for at, v in enumerate(step.model.variables)}
        joined: dict[object, list[VariablePiece]] = {}
        for piece in step.pieces:
            key: object = (piece.sync, piece.variable.dtype, piece.variable.sparse)
            joined.setdefault(key if piece.sync.group >= 0 else piece.name, []).append(piece)
        # The backward pass completes a message with the variable that comes first in the forward pass.
        ready = sorted(joined.values(), key=lambda pieces: -min(position[p.variable.name] for p in pieces))
        messages = []
        for number, pieces in enumerate(ready):
            first = pieces[0]
            name = first.name if len(pieces) == 1 else f"group{first.sync.group}.{number}"
            lane = 0 if first.whole else first.part.index % LANES
            messages.append(Message(name=name, pieces=tuple(pieces), lane=lane))
        return replace(step, messages=tuple(messages))

    def localize(self, local: LocalStep) -> LocalStep:
        """Return the step unchanged: messages are the same on every rank."""
        return local
